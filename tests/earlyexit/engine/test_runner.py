from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from earlyexit.engine.device import Step
from earlyexit.engine.engine import Batch
from earlyexit.engine.queue import Member
from earlyexit.network.boundary import Encoded, Segment, Split
from earlyexit.network.cut import TorchRunner
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece, Tensors
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.counting import PatiencePolicy, VotingPolicy
from earlyexit.policies.threshold import ConfidencePolicy
from tests.earlyexit.network.tokens import wire_of

WHOLE = Split(first=0, end=4, batch=8, ramps=(0, 1, 2))
HALVES = (Split(first=0, end=2, batch=8, ramps=(0,)), Split(first=2, end=4, batch=8, ramps=(2,)))
EVERYONE_LEAVES, NOBODY_LEAVES = ConfidencePolicy(0.0), ConfidencePolicy(1.1)


def batch_of(split: Split, piece: Piece, *, probe: bool = False) -> Batch[Piece]:
    members = tuple(Member(sample_id=one.sample_ids[0], payload=one, probe=probe) for one in piece.singles())
    return Batch(split=split, members=members, tokens=len(members), started_s=0.0, probe=probe)


def run(runner: TorchRunner, split: Split, piece: Piece, *, probe: bool = False) -> list[Step[Piece]]:
    return list(runner.run(batch_of(split, piece, probe=probe)))


def survivors_of(steps: Sequence[Step[Piece]]) -> Piece:
    assert steps[-1].survivors is not None
    return steps[-1].survivors


def exits(steps: Sequence[Step[Piece]]) -> list[int]:
    return [answer.exit for step in steps for answer in step.answers]


def test_another_policy_decides_from_the_next_batch_on(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    runner = TorchRunner(small_model, NOBODY_LEAVES)
    piece = runner.from_wire(wire_of(encoded[:2]))
    running = runner.run(batch_of(WHOLE, piece))
    first = next(running)
    runner.follow(EVERYONE_LEAVES)
    assert exits([first, *running]) == [3, 3]
    assert exits(run(runner, WHOLE, piece)) == [0, 0]


def test_a_ramp_of_a_plan_that_is_gone_no_input_leaves_without_a_threshold(
    small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    runner = TorchRunner(small_model, ConfidencePolicy({1: 0.0}))
    assert exits(run(runner, WHOLE, runner.from_wire(wire_of(encoded[:2])))) == [1, 1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(NOBODY_LEAVES, PatiencePolicy(1), id="none, then patience"),
        pytest.param(PatiencePolicy(9), NOBODY_LEAVES, id="patience, then none"),
        pytest.param(PatiencePolicy(9), VotingPolicy(9), id="patience, then votes"),
    ],
)
def test_pieces_of_another_policy_are_fused_and_begin_anew(
    before: ExitPolicy, after: ExitPolicy, small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    runner = TorchRunner(small_model, before)
    old = survivors_of(run(runner, HALVES[0], runner.from_wire(wire_of(encoded[:2]))))
    runner.follow(after)
    new = survivors_of(run(runner, HALVES[0], runner.from_wire(wire_of(encoded[2:4]))))
    both = (*batch_of(HALVES[1], old).members, *batch_of(HALVES[1], new).members)
    steps = list(runner.run(Batch(split=HALVES[1], members=both, tokens=len(both), started_s=0.0)))
    assert exits(steps) == [3, 3, 3, 3]


def test_where_a_policy_cannot_be_probed_probes_run_as_any_other_input(
    small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    runner = TorchRunner(small_model, VotingPolicy(1))
    (step,) = run(runner, WHOLE, runner.from_wire(wire_of(encoded[:2])), probe=True)
    assert (exits([step]), step.seen, step.survivors) == ([0, 0], (), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("split", [WHOLE, HALVES[1]], ids=["from tokens", "from a hidden state"])
def test_inputs_of_nothing_run(split: Split, dtype: torch.dtype, small_model: EarlyExitModel) -> None:
    runner = TorchRunner(small_model.to(dtype), NOBODY_LEAVES)
    piece = runner.warm_up_pieces(split, 3)
    assert piece.lengths_B.tolist() == [16, 16, 16]
    assert exits(run(runner, split, piece)) == [3, 3, 3]


@dataclass
class SlowSegments:
    """Counts what it runs; ready for what it prepared."""

    inner: EarlyExitModel
    ready: set[Segment] = field(default_factory=set)
    ran: list[Segment] = field(default_factory=list)

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        self.ran.append(segment)
        return self.inner.run(segment, piece)

    def is_ready(self, segment: Segment) -> bool:
        return segment in self.ready

    def prepare(self, segments: Collection[Segment]) -> None:
        self.ready |= set(segments)


def test_torch_runs_what_is_not_prepared_and_says_so(
    small_model: EarlyExitModel, encoded: list[Encoded], caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowSegments(small_model)
    runner = TorchRunner(small_model, NOBODY_LEAVES, slow)
    piece = runner.from_wire(wire_of(encoded[:2]))
    with caplog.at_level(logging.DEBUG, logger="earlyexit.network.cut"):
        unprepared = run(runner, HALVES[0], piece)
    assert caplog.messages == [
        "blocks 0 to 0 are not prepared: the network itself runs them",
        "blocks 1 to 1 are not prepared: the network itself runs them",
    ]
    assert slow.ran == []
    runner.prepare(HALVES)
    prepared = run(runner, HALVES[0], piece)
    assert slow.ran == [Segment(first=0, end=1, ramp=0), Segment(first=1, end=2, ramp=None)]
    assert survivors_of(prepared).tensors[0].equal(survivors_of(unprepared).tensors[0])


def test_where_ramps_look_that_are_off_torch_runs_them(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    slow = SlowSegments(small_model)
    runner = TorchRunner(small_model, NOBODY_LEAVES, slow)
    some = replace(WHOLE, ramps=(1,))
    runner.prepare([some])
    assert exits(run(runner, some, runner.from_wire(wire_of(encoded[:2])), probe=True)) == [3, 3]
    assert slow.ran == []


def test_inputs_that_stay_are_run_as_those_that_stop_are(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    slow = SlowSegments(small_model)
    runner = TorchRunner(small_model, EVERYONE_LEAVES, slow)
    staying = replace(HALVES[0], after_answer="stay")
    runner.prepare([staying])
    (first, second) = run(runner, staying, runner.from_wire(wire_of(encoded[:2])))
    assert [segment.ramp for segment in slow.ran] == [0, None]
    assert ([answer.exit for answer in first.answers], len(first.seen), second.seen) == ([0, 0], 2, ())
    assert survivors_of([second]).sample_ids == ("i0", "i1")
    patient = TorchRunner(small_model, PatiencePolicy(1), slow)  # of which no ramp by itself has anything to show
    steps = run(patient, replace(WHOLE, after_answer="stay"), patient.from_wire(wire_of(encoded[:2])))
    assert [[seen.block for seen in step.seen] for step in steps] == [[], [], [], [3, 3]]
