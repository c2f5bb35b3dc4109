"""What half precision on hops does to answers, beside the bytes and the time that it saves.

    OFFRAMP_DATA=... python -m experiments.networks.hop_precision            # CIFAR's ResNet-20 and ResNet-32
    python -m experiments.networks.hop_precision runs/clinc150 --data clinc150/data_full.json --part test

Every cut of a calibrated model once: hidden states cross it as they are, and in half precision. Told are the share of
inputs whose answer after all blocks differs and the largest difference of their scores; the share whose exit, or whose
answer, differs with the calibration's thresholds in force; bytes per input; and microseconds of processor time per
input of the way from one replica's tensors over the ingress to the next one's, sockets left out. The ResNets are those
of `python -m experiments.trained.cifar10 --ramps light`, made where they are missing. Writes
runs/hop_precision-MODEL.json. Minutes: about 2 on one core for each model. Deterministic, but for the times.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from deployments.encoding import Begin, Part, encode, from_ingress, from_replica
from deployments.messages import Assignment, Chunk, GoingOn, StageCall, Timing
from deployments.stage.build import build_policy
from earlyexit.boundary import HopDtype
from earlyexit.codecs import find_codec
from earlyexit.cut import cut_out
from earlyexit.dataset import LabelledRows, read_labelled
from earlyexit.model import EarlyExitModel
from earlyexit.network import from_wire
from earlyexit.piece import Piece
from earlyexit.policies.base import ExitPolicy
from earlyexit.signature import Encoded
from earlyexit.split import Split
from earlyexit.store import load_model, read_card
from earlyexit.wire import Answer, WirePiece, entering
from experiments.data import RUNS, require_data
from experiments.kit import keep, show
from experiments.trained import cifar10
from offramp.jobs.calibration import read_calibration
from optimizer.plan import Stage

BATCH = 16
REPEATS = 30
HOPS: tuple[HopDtype, ...] = ("same", "float16")
COLUMNS = (
    "cut after block",
    "kB per input",
    "in float16",
    "hop us",
    "in float16",
    "answers differ",
    "score at most",
    "exits differ",
    "answers differ",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutFigures:
    """Of one cut; bytes and seconds in the order of `HOPS`, shares are those of inputs that float16 changes."""

    block: int
    bytes_per_input: tuple[float, ...]
    hop_s_per_input: tuple[float, ...]
    answers: float
    """Without exits before the end."""
    score: float
    """Largest difference, without exits before the end."""
    exits: float
    """With the calibration's thresholds."""
    answers_with_exits: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """A model cut in two, with or without its ramps."""

    model: EarlyExitModel
    policy: ExitPolicy
    ramps: tuple[int, ...]

    def answers(self, encoded: Sequence[Encoded], block: int, hop_dtype: HopDtype) -> dict[str, Answer]:
        """Every input's, where hidden states cross after a block."""
        found: dict[str, Answer] = {}
        for piece in _batches(self.model, self.policy, encoded):
            if (survivors := self._run(piece, 0, block + 1, found)) is not None:
                arrived = from_wire(self.model, survivors.to_wire(hop_dtype), self.policy)
                self._run(arrived, block + 1, self.model.num_blocks, found)
        return found

    def _run(self, piece: Piece, first: int, end: int, found: dict[str, Answer]) -> Piece | None:
        ramps = tuple(ramp for ramp in self.ramps if first <= ramp < end)
        survivors = None
        for step in cut_out(self.model, first, end, ramps, self.policy).run(piece):
            found.update({answer.sample_id: answer for answer in step.answers})
            survivors = step.survivors
        return survivors


def _batches(model: EarlyExitModel, policy: ExitPolicy, encoded: Sequence[Encoded]) -> Iterator[Piece]:
    for start in range(0, len(encoded), BATCH):
        some = encoded[start : start + BATCH]
        yield from_wire(model, entering([str(start + k) for k in range(len(some))], some), policy)


def run(folder: Path, data: LabelledRows) -> list[CutFigures]:
    """Every cut of a calibrated model."""
    model, calibration = load_model(folder), read_calibration(folder)
    encoded = data.encode(find_codec(read_card(folder).codec, folder))
    policy = build_policy(calibration.policy_spec())
    whole = Crossing(model, policy, ())
    leaving = Crossing(model, policy, tuple(sorted(calibration.thresholds)))
    return [cut_figures(whole, leaving, encoded, block) for block in range(model.num_blocks - 1)]


def cut_figures(whole: Crossing, leaving: Crossing, encoded: Sequence[Encoded], block: int) -> CutFigures:
    """Of the cut after a block."""
    same, half = (whole.answers(encoded, block, hop_dtype) for hop_dtype in HOPS)
    leaving_same, leaving_half = (leaving.answers(encoded, block, hop_dtype) for hop_dtype in HOPS)
    crossing = _hidden(whole, encoded[:BATCH], block)
    return CutFigures(
        block=block,
        bytes_per_input=tuple(_num_bytes(crossing.to_wire(each)) / len(crossing) for each in HOPS),
        hop_s_per_input=_hop_s(whole, crossing),
        answers=_share(same, half, lambda answer: answer.value),
        score=max(abs(same[key].score - half[key].score) for key in same),
        exits=_share(leaving_same, leaving_half, lambda answer: answer.exit),
        answers_with_exits=_share(leaving_same, leaving_half, lambda answer: answer.value),
    )


def _hidden(whole: Crossing, encoded: Sequence[Encoded], block: int) -> Piece:
    [piece] = _batches(whole.model, whole.policy, encoded)
    *_, last = cut_out(whole.model, 0, block + 1, (), whole.policy).run(piece)
    assert last.survivors is not None
    return last.survivors


def _share(same: dict[str, Answer], half: dict[str, Answer], what: Callable[[Answer], object]) -> float:
    assert same.keys() == half.keys(), "every input has one answer"
    return sum(what(same[key]) != what(half[key]) for key in same) / len(same)


def _num_bytes(wire: WirePiece) -> int:
    return sum(values.nbytes for values in wire.tensors)


def _hop_s(whole: Crossing, piece: Piece) -> tuple[float, ...]:
    """Per input, in turns: the machine's drift hits both."""
    taken_s: dict[HopDtype, list[float]] = {hop_dtype: [] for hop_dtype in HOPS}
    for _ in range(REPEATS):
        for hop_dtype in HOPS:
            began_s = time.thread_time()
            _hop(whole, piece, hop_dtype)
            taken_s[hop_dtype].append((time.thread_time() - began_s) / len(piece))
    return tuple(median(each) for each in taken_s.values())


def _hop(whole: Crossing, piece: Piece, hop_dtype: HopDtype) -> Piece:
    """From a replica's tensors to a frame, over the ingress, to the next replica's; the network itself is left out."""
    timings = (Timing(queue_s=0.0, compute_s=0.0),) * len(piece)
    frame = encode(Part(1, Chunk(going_on=GoingOn(piece=piece.to_wire(hop_dtype), timings=timings))))
    part = from_replica(frame)
    assert isinstance(part, Part)
    assert part.chunk.going_on is not None
    begin = from_ingress(encode(Begin(2, _call(part.chunk.going_on.piece))))
    assert isinstance(begin, Begin)
    return from_wire(whole.model, begin.call.piece, whole.policy)


def _call(piece: WirePiece) -> StageCall:
    split = Split(first=piece.next_block, end=piece.next_block + 1, batch=BATCH)
    stage = Stage(device="cpu", replicas=1, splits=(split,))
    assignment = Assignment(epoch=1, stage=stage, policy=None, dispatch="work-conserving")
    remaining_s = (1.0,) * len(piece.sample_ids)
    return StageCall(piece=piece, remaining_s=remaining_s, reserve_s=0.0, assignment=assignment)


def tell(name: str, num_inputs: int, cuts: Sequence[CutFigures]) -> None:
    """Print a table."""
    rows = [
        (
            str(each.block),
            *(f"{num_bytes / 1000:.1f}" for num_bytes in each.bytes_per_input),
            *(f"{1e6 * seconds:.0f}" for seconds in each.hop_s_per_input),
            f"{each.answers:.2%}",
            f"{each.score:.1e}",
            f"{each.exits:.2%}",
            f"{each.answers_with_exits:.2%}",
        )
        for each in cuts
    ]
    show(f"{name}, {num_inputs} inputs, batches of {BATCH}", COLUMNS, rows)


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.networks.hop_precision", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="calibrated folder; default: CIFAR's ResNets")
    parser.add_argument("--data", type=Path, help="rows for it")
    parser.add_argument("--part")
    parser.add_argument("--limit", type=int, default=2000, help="inputs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for folder, data in _models(options.model, options.data, options.part):
        some = data.select(range(0, len(data), max(1, len(data) // options.limit)))
        figures = run(folder, some)
        tell(folder.name, len(some), figures)
        print(f"written: {keep(figures, RUNS / f'hop_precision-{folder.name}.json')}")


def _models(model: Path | None, data: Path | None, part: str | None) -> Iterator[tuple[Path, LabelledRows]]:
    if model is not None:
        if data is None:
            raise SystemExit("a model needs --data")
        yield model, read_labelled(data, part=part)
        return
    learn, test = (read_labelled(require_data(name)) for name in (cifar10.TRAIN, cifar10.TEST))
    for network in cifar10.NETWORKS:
        folder = RUNS / f"cifar10-{network}-light"
        cifar10.run(folder, network, "light", learn, test)
        yield folder, test.divide(0.5, seed=0)[1]


if __name__ == "__main__":
    main()
