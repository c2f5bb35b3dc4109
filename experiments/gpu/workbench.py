"""A model on a device, and the sides that are built on it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from earlyexit.captured.recorder import recorder_of
from earlyexit.captured.segments import CapturedSegments
from earlyexit.checkpoint import RampOptions, random_model
from earlyexit.clock import Clock
from earlyexit.member import Member
from earlyexit.model import EarlyExitModel
from earlyexit.network import PreparedSegments, SegmentRunner, arbitrary_tensors
from earlyexit.piece import Piece
from earlyexit.policies.base import ExitPolicy
from earlyexit.runner import TorchRunner
from experiments.gpu.exits import NEVER, THRESHOLD, Exits, policy_of
from experiments.gpu.meter import Meter, MeteredRunner, MeteredSegments, meter_of
from experiments.gpu.options import BenchOptions, ModelSize
from experiments.gpu.plans import Plan
from experiments.gpu.side import Side, members_of

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
