"""A model on a device, exits for it, and the sides that are built on it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.backends.captured import CapturedSegments, recorder_of
from earlyexit.clock import Clock
from earlyexit.engine.engine import Batch
from earlyexit.engine.queue import Member
from earlyexit.engine.release import Step
from earlyexit.engine.runner import TorchRunner
from earlyexit.errors import DataError, InputError
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.network import PreparedSegments, SegmentRunner, arbitrary_tensors
from earlyexit.network.piece import Piece, Tensors, fuse
from earlyexit.network.split import Segment, Split
from earlyexit.network.wire import WirePiece
from earlyexit.policies.base import ExitPolicy, Opinion, Verdict
from earlyexit.policies.recorded import RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import EntropyPolicy
from experiments.data import data_folder
from experiments.gpu.side import Plan, Side, members_of

# Where inputs leave: recorded exits of BERT-base, or drawn ones of the same survival, and policies by them.

IntArray = npt.NDArray[np.int64]
Source = Literal["auto", "recorded", "synthetic"]
Decisions = Literal["waited", "known"]
"""Waited: the host waits for the logits of every active ramp and judges them, as any policy that decides by them must;
then the records answer. Known: the records answer without waiting, so that the device never idles for a decision. No
served policy can do that; the two bound what a faster decision could gain."""
NEVER = -1.0
"""An entropy that no prediction has."""
THRESHOLD = 0.4
"""Entropy in nats; E3 section 5's default."""
NUM_BLOCKS = 12
"""Blocks of the model that was recorded."""
SURVIVAL = (1.0, 0.75, 0.60, 0.45, 0.38, 0.375, 0.33, 0.31, 0.29, 0.27, 0.25, 0.24)
"""Share of inputs that reach each block, for drawn exits: about what the recorded ones give at the threshold
(`experiments.recorded_exits.bert12_sst2`: Div290/Buffer_based_threshold, BERT-base on SST-2 dev)."""
NUM_DRAWN = 1000
SURE, UNSURE = 0.1, 0.6
"""Entropies of drawn inputs at the ramps from their exit on, and before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits:
    """What every ramp says of N inputs, and from which entropy on an input leaves."""

    answers: RecordedAnswers
    num_blocks: int
    source: str
    """For people: whether these were recorded or drawn."""

    def __post_init__(self) -> None:
        if any(not 0 <= ramp < self.num_blocks - 1 for ramp in self.answers.ramps):
            raise DataError(f"ramps must sit below block {self.num_blocks - 1}, not {list(self.answers.ramps)}")

    @property
    def ramps(self) -> tuple[int, ...]:
        return self.answers.ramps

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return tuple(self.answers.row_of)

    def exits_N(self, active: Sequence[int]) -> IntArray:
        """The block that every input leaves after, with these ramps active."""
        columns = [self.ramps.index(ramp) for ramp in active]
        sure_NA = self.answers.scores_NR[:, columns] <= np.float32(THRESHOLD)
        last_N1 = np.ones((len(sure_NA), 1), dtype=bool)
        exits = np.array([*active, self.num_blocks - 1], dtype=np.int64)
        return np.asarray(exits[np.hstack([sure_NA, last_N1]).argmax(1)])

    def expected(self, active: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Every input's exit and label, with these ramps active."""
        exits = self.exits_N(active).tolist()
        column_of = {ramp: column for column, ramp in enumerate(self.ramps)}
        return {
            sample_id: (exits[row], self._label(row, column_of.get(exits[row])))
            for sample_id, row in self.answers.row_of.items()
        }

    @property
    def survival(self) -> tuple[float, ...]:
        """Per block, the share of inputs that reach it with every ramp active: a plan problem's `survival`."""
        exits_N = self.exits_N(self.ramps)
        return tuple(float((exits_N >= block).mean()) for block in range(self.num_blocks))

    def on_blocks(self, num_blocks: int) -> Exits:
        """The same exits in a deeper model: ramp r moves to the same share of its depth.

        Of 24 blocks, a ramp sits after every second one. Raises DataError for a model that is no multiple as deep.
        """
        times, rest = divmod(num_blocks, self.num_blocks)
        if rest or not times:
            raise DataError(f"exits of {self.num_blocks} blocks cannot be laid on {num_blocks}")
        ramps = tuple(times * (ramp + 1) - 1 for ramp in self.ramps)
        return replace(self, num_blocks=num_blocks, answers=replace(self.answers, ramps=ramps))

    def _label(self, row: int, column: int | None) -> int:
        return int(self.answers.answers_NE[row, -1 if column is None else column])


def find_exits(source: Source, rng: np.random.Generator) -> Exits:
    """Recorded exits where OFFRAMP_DATA has them, or drawn ones; of 12 blocks."""
    if source == "synthetic" or (source == "auto" and data_folder() is None):
        return drawn_exits(rng)
    from experiments.recorded_exits import BERT12_SST2  # needs yaml, which a bare machine may not have

    folder = data_folder()
    if source == "recorded" or (folder is not None and (folder / BERT12_SST2).is_file()):
        return recorded_exits()
    return drawn_exits(rng)


def recorded_exits() -> Exits:
    """BERT-base on SST-2; ends the experiment with a sentence where the file is absent."""
    from experiments.recorded_exits import BERT12_SST2, bert12_sst2

    records = bert12_sst2("entropy")
    answers = RecordedAnswers(
        row_of={sample_id: row for row, sample_id in enumerate(records.sample_ids)},
        ramps=records.ramps,
        scores_NR=records.scores_NR,
        answers_NE=records.answers(),
    )
    return Exits(answers=answers, num_blocks=records.num_blocks, source=f"recorded: {BERT12_SST2}")


def drawn_exits(rng: np.random.Generator) -> Exits:
    """Exits of the share that SURVIVAL says, in random order, with random labels."""
    ramps = tuple(range(NUM_BLOCKS - 1))
    # Row n of N stays inside while n / N is below the survival: the shares are met, not only expected.
    place_N = rng.permutation(NUM_DRAWN) / NUM_DRAWN
    exits_N = (place_N[:, None] < np.array(SURVIVAL)).sum(1) - 1
    sure_NR = np.array(ramps) >= exits_N[:, None]
    answers = RecordedAnswers(
        row_of={f"drawn-{row}": row for row in range(NUM_DRAWN)},
        ramps=ramps,
        scores_NR=np.where(sure_NR, SURE, UNSURE).astype(np.float32),
        answers_NE=rng.integers(0, 2, (NUM_DRAWN, len(ramps) + 1)),
    )
    shares = ", ".join(f"{share:g}" for share in SURVIVAL)
    return Exits(answers=answers, num_blocks=NUM_BLOCKS, source=f"synthetic: drawn to survive {shares}")


class WaitedPolicy(RecordedPolicy):
    """Records that answer only after the logits were read and judged by entropy."""

    name = "recorded"
    foreknows: ClassVar[bool] = False

    def __init__(self, answers: RecordedAnswers, judge: EntropyPolicy) -> None:
        super().__init__(answers, judge)
        self._reader = judge

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        self._reader.decide(ramp, opinion, state_BS, sample_ids)
        return super().decide(ramp, opinion, state_BS, sample_ids)

    def conclude(self, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        self._reader.conclude(opinion, state_BS, sample_ids)
        return super().conclude(opinion, state_BS, sample_ids)


def policy_of(answers: RecordedAnswers, threshold: float, decisions: Decisions) -> ExitPolicy:
    """Decides by the records at this entropy; nobody leaves early at NEVER."""
    judge = EntropyPolicy(threshold)
    return WaitedPolicy(answers, judge) if decisions == "waited" else RecordedPolicy(answers, judge)


# What is measured, on which model and device.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """An encoder with random weights."""

    name: str
    config: Mapping[str, int]
    """What differs from BERT-base."""
    length: int
    """Tokens of every input."""

    @property
    def num_blocks(self) -> int:
        return self.config["num_blocks"]


MODELS = (
    ModelSize(name="bert-base", config={"num_blocks": 12}, length=128),
    ModelSize(
        name="bert-large",
        config={"num_blocks": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096},
        length=128,
    ),
)
TINY = {"hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "vocab_size": 100}
DRY_MODELS = tuple(
    ModelSize(name=f"{model.name}-dry", config={**TINY, "num_blocks": model.num_blocks}, length=8) for model in MODELS
)
"""As deep as the real ones, and next to no work: only that everything runs is tried with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One run of the bench."""

    models: tuple[ModelSize, ...]
    batches: tuple[int, ...]
    """Batch limits, ascending."""
    rounds: int
    """In each, every side runs once."""
    seconds: float
    """Of work in a side's run, about."""
    records: Source
    decisions: Decisions
    device: str
    """What torch calls it."""
    graphs: bool
    """Whether segments are captured, as CUDA graphs on a GPU; else torch launches every kernel."""
    seed: int
    out: Path
    """Folder of the results."""

    def __post_init__(self) -> None:
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise InputError(f"batch limits must ascend from at least 1, not {list(self.batches)}")
        if self.rounds < 1 or self.seconds <= 0:
            raise InputError(f"a bench takes at least one round of some seconds, not {self.rounds} of {self.seconds}")


# Where a device's time goes: computing, gathering, or waiting for the host.

Kind = Literal["compute", "gather"]


class Meter:
    """Adds up a device's seconds by what it does in them. A span that the host fills slowly holds its pauses too."""

    def __init__(self, mark: Callable[[], Any], between_s: Callable[[Any, Any], float]) -> None:
        self._mark = mark
        self._between_s = between_s
        self._spans: dict[Kind, list[tuple[Any, Any]]] = {"compute": [], "gather": []}

    @contextmanager
    def span(self, kind: Kind) -> Iterator[None]:
        """What is told to the device inside is of this kind."""
        start = self._mark()
        yield
        self._spans[kind].append((start, self._mark()))

    def seconds(self, kind: Kind) -> float:
        """Of all its spans so far."""
        return sum(self._between_s(start, end) for start, end in self._spans[kind])


def meter_of(device: torch.device, clock: Clock) -> Meter:
    """By events on the stream of a GPU; on the CPU, where the host computes, by the clock."""
    if device.type != "cuda":
        return Meter(clock.now_s, lambda start_s, end_s: end_s - start_s)

    def recorded() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships no type for it
        event.record()
        return event

    def between_s(start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return Meter(recorded, between_s)


class MeteredSegments:
    """Segments whose time counts as computing, with all copies to and from a graph's own tensors."""

    def __init__(self, inner: SegmentRunner, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        with self._meter.span("compute"):
            return self._inner.run(segment, piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeteredPiece(Piece):
    """A piece whose selecting counts as gathering."""

    meter: Meter

    def select(self, keep: Sequence[int]) -> Piece:
        with self.meter.span("gather"):
            return Piece.select(self, keep)  # super() does not know a dataclass with slots


class MeteredRunner:
    """A runner whose fusing, and the selecting of survivors, count as gathering."""

    def __init__(self, inner: TorchRunner, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self.memory = inner.memory

    def from_wire(self, wire: WirePiece) -> Piece:
        return self._inner.from_wire(wire)

    def run(self, batch: Batch[Piece]) -> Iterator[Step[Piece]]:
        with self._meter.span("gather"):
            fused = fuse([member.payload for member in batch.members])
        piece = MeteredPiece(
            sample_ids=fused.sample_ids,
            next_block=fused.next_block,
            lengths_B=fused.lengths_B,
            tensors=fused.tensors,
            state_BS=fused.state_BS,
            meter=self._meter,
        )
        return self._inner.run(replace(batch, members=(Member(sample_id="all", payload=piece),)))

    def follow(self, policy: Any) -> None:
        self._inner.follow(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        self._inner.prepare(splits)

    def warm_up_pieces(self, split: Split, size: int) -> Piece:
        return self._inner.warm_up_pieces(split, size)


# A model on a device, and the sides that are built on it.

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """What all sides of one model share."""

    size: ModelSize
    options: BenchOptions
    exits: Exits
    """Of a model this deep."""
    model: EarlyExitModel
    segments: SegmentRunner
    clock: Clock
    rng: np.random.Generator

    def prepare(self, plans: Sequence[Plan]) -> None:
        """Capture what these plans need, where segments are captured."""
        if isinstance(self.segments, PreparedSegments):
            splits = [split for plan in plans for split in plan.splits]
            self.segments.prepare({segment: split.budget for split in splits for segment in split.segments()})

    def side(self, plan: Plan, *, leaving: bool = True) -> Side:
        """A live device under the plan; where inputs are not `leaving`, every ramp is asked in vain."""
        return Side(plan, self._runner(self.segments, leaving=leaving), self.clock, self._expected(plan, leaving))

    def metered_side(self, plan: Plan) -> tuple[Side, Meter]:
        """The same with a meter; what it costs to read belongs to no rate."""
        meter = meter_of(self.model.device, self.clock)
        runner = self._runner(MeteredSegments(self.segments, meter), leaving=True)
        return Side(plan, MeteredRunner(runner, meter), self.clock, self._expected(plan, leaving=True)), meter

    def members(self, number: int) -> list[Member[Piece]]:
        """Inputs of random tokens, all of one length, whose exits are those of the records in random order."""
        ids = self.exits.sample_ids
        rows = np.resize(self.rng.permutation(len(ids)), number)
        lengths_B = np.full(number, self.size.length, dtype=np.int32)
        policy = self._policy(THRESHOLD)
        piece = Piece(
            sample_ids=tuple(f"{ids[row]}#{k}" for k, row in enumerate(rows.tolist())),
            next_block=0,
            lengths_B=lengths_B,
            tensors=arbitrary_tensors(self.model, 0, lengths_B, self.rng),
            state_BS=policy.initial_state(number, self.model.task.num_outputs, self.model.device),
        )
        return members_of(piece)

    def _runner(self, segments: SegmentRunner, *, leaving: bool) -> TorchRunner:
        return TorchRunner(self.model, self._policy(THRESHOLD if leaving else NEVER), segments)

    def _policy(self, threshold: float) -> ExitPolicy:
        return policy_of(self.exits.answers, threshold, self.options.decisions)

    def _expected(self, plan: Plan, leaving: bool) -> dict[str, tuple[int, int]]:
        return self.exits.expected(plan.ramps if leaving else ())


def build_workbench(
    size: ModelSize, options: BenchOptions, exits: Exits, clock: Clock, rng: np.random.Generator
) -> Workbench:
    """The model with random weights on its device; DeeBERT's ramps (pooler on the first token) where exits are."""
    own_exits = exits.on_blocks(size.num_blocks)
    ramps = RampOptions(style="pooler", pooling="first", at=own_exits.ramps)
    model = random_model({**size.config, "max_length": size.length}, name=size.name, ramps=ramps, seed=options.seed)
    model = model.to(torch.device(options.device), DTYPE).requires_grad_(False)
    segments = CapturedSegments(model, recorder_of(model.device)) if options.graphs else model
    return Workbench(
        size=size,
        options=options,
        exits=own_exits,
        model=model,
        segments=segments,
        clock=clock,
        rng=rng,
    )


@contextmanager
def no_collections() -> Iterator[None]:
    """Python's collector stands still: tens of thousands of inputs are none of them garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
