"""What exit checks and the copying of survivors cost, as shares of a batch's time (PAME section 7.8).

    python -m experiments.pame.exit_checks runs/pame/lsp runs/pame/camvid [--batch 16] [--rounds 20] [--device cpu]

Of every model folder: a batch runs all blocks and every ramp's head. Beside that the policy decides at every ramp (the
check), half of the batch is copied on (the copying), and half of the outputs become answers. The aims are 1 % for the
check and 2 % for copying; PAME has 0.1 % and 1.0 %. The batch is noise: times hang on shapes. A round measures all of
them, so that a busy machine hits them alike; told are medians of the shares within a round. One thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from earlyexit.model import EarlyExitModel
from earlyexit.network import arbitrary_tensors
from earlyexit.piece import Piece
from earlyexit.policies import make_policy
from earlyexit.policies.base import ExitPolicy, Opinion
from earlyexit.split import Split
from earlyexit.store import load_model
from earlyexit.transfer import mark_cuda, to_host
from experiments.kit import keep, show, spread
from experiments.pame.models import require_model

OUT = Path("runs/exit_checks.json")
Figures = dict[str, float]


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    for folder in given.folders:
        require_model(folder)
    torch.set_num_threads(1)
    found = {str(folder): shares(folder, given.batch, given.rounds, given.device) for folder in given.folders}
    names = list(next(iter(found.values())))
    rows = [(folder, *(f"{100 * figures[name]:.3g} %" for name in names)) for folder, figures in found.items()]
    show(f"shares of the time of a batch of {given.batch}", ("model", *names), rows)
    print(keep(found, OUT))


def shares(folder: Path, batch: int, rounds: int, device: str) -> Figures:
    """Medians over the rounds of what each costs, the batch's time being 1."""
    model = load_model(folder).to(torch.device(device))
    policy = make_policy("share", thresholds=0.5, confidences=0.5)
    with torch.inference_mode():
        measured = [measure(model, policy, piece_of(model, batch)) for _ in range(rounds + 1)][1:]
    told = {name: spread(each[name] / each["batch"] for each in measured) for name in measured[0] if name != "batch"}
    return {name: each.median for name, each in told.items() if each is not None}


def piece_of(model: EarlyExitModel, batch: int) -> Piece:
    """Noise before block 0."""
    lengths_B = np.ones(batch, dtype=np.int32)
    return Piece(
        sample_ids=tuple(map(str, range(batch))),
        next_block=0,
        lengths_B=lengths_B,
        tensors=arbitrary_tensors(model, 0, lengths_B, np.random.default_rng(0)),
        state_BS=torch.zeros(batch, 0, dtype=torch.int32, device=model.device),
    )


def measure(model: EarlyExitModel, policy: ExitPolicy, piece: Piece) -> Figures:
    """Seconds of a batch's network, and of what is done beside it at all its ramps."""
    seconds = dict.fromkeys(("batch", "check", "copying", "answers"), 0.0)
    half = range(0, len(piece), 2)

    def timed(what: str, run: Callable[[], object]) -> None:
        begun_s = now_s(model.device)
        run()
        seconds[what] += now_s(model.device) - begun_s

    def beside(ramp: int, said: Opinion, now: Piece) -> None:
        timed("check", lambda: policy.decide(ramp, said, now.state_BS, ()))
        timed("copying", lambda: now.select(list(half)))
        timed("answers", lambda: said.answers(list(half)))

    split = Split(first=0, end=model.num_blocks, batch=len(piece), ramps=model.ramp_indices)
    for segment in split.segments():
        begun_s = now_s(model.device)
        tensors, outputs = model.run(segment, piece)
        seconds["batch"] += now_s(model.device) - begun_s
        assert outputs is not None
        piece = Piece(
            sample_ids=piece.sample_ids,
            next_block=segment.end,
            lengths_B=piece.lengths_B,
            tensors=tensors,
            state_BS=piece.state_BS,
        )
        if segment.ramp is not None:
            beside(segment.ramp, Opinion(model.task, outputs if model.task.large else to_host(outputs)), piece)
    return seconds


def now_s(device: torch.device) -> float:
    """The clock, once the device has done what it was told."""
    if device.type == "cuda":
        mark_cuda(device)()
    return perf_counter()


if __name__ == "__main__":
    main()
