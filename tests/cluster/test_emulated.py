from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.emulated import EmulatedPiece, Pace, PacedRunner, RecordedRunner, Sharing
from earlyexit.engine.device import Answered, Device, Failed, Release, Step
from earlyexit.engine.engine import Batch, BatchEngine, Dispatch, ObservedTimes
from earlyexit.errors import PlanError, UnprocessableInputError
from earlyexit.network.boundary import Answer, Split, WirePiece
from profiles.table import LatencyTable
from tests.answers import label_of
from tests.clock import ManualClock
from tests.cluster.recorded_batches import HALF, RAMPS, WHOLE, batch_of, piece_of, recorded
from tests.exit_records import exit_records

EVERYWHERE = [("a", "bcd", 1), ("b", "cd", 2), ("c", "d", 3), ("d", "", None)]
"""The steps if a leaves at the first ramp, b at the second, c at the third and d at none."""


def answer(sample_id: str, label: int, exit: int, score: float = 1.0) -> Answer:  # noqa: A002 - the field's name
    return Answer(sample_id=sample_id, value=label, score=score, exit=exit)


def ran(
    runner: RecordedRunner, ids: Sequence[str], split: Split = WHOLE, *, probe: bool = False
) -> list[tuple[str, str, int | None]]:
    """Runs a batch; returns its steps in the form of `summarized`."""
    return summarized(list(runner.run(batch_of(ids, split, probe=probe))))


def summarized(steps: Sequence[Step[EmulatedPiece]]) -> list[tuple[str, str, int | None]]:
    """Returns for each step the inputs that left, the inputs inside, and the block for which they wait."""
    return [
        (
            "".join(each.sample_id for each in step.answers),
            "" if step.survivors is None else "".join(step.survivors.sample_ids),
            None if step.survivors is None else step.survivors.next_block,
        )
        for step in steps
    ]


def test_new_thresholds_apply_from_the_next_batch_on() -> None:
    assert ran(recorded(0.5, "entropy"), "abcd") == EVERYWHERE
    runner = recorded(HALF)
    running = runner.run(batch_of("abcd"))
    runner.follow({0: 2.0, 1: 0.5})
    assert summarized(list(running)) == EVERYWHERE
    assert ran(runner, "abcd") == [("ab", "cd", 2), ("cd", "", None)]


@pytest.mark.parametrize("thresholds", [None, {}, {3: 0.5}], ids=["no policy", "none", "of a ramp without records"])
def test_no_input_leaves_at_ramps_without_a_threshold(thresholds: Mapping[int, float] | None) -> None:
    assert ran(recorded(thresholds), "abcd") == [("abcd", "", None)]


def test_only_the_input_without_records_of_a_batch_is_refused() -> None:
    released: list[Release[EmulatedPiece]] = []
    engine: BatchEngine[EmulatedPiece] = BatchEngine((WHOLE,), ObservedTimes())
    device = Device(engine, recorded(HALF), ManualClock(), released.extend)
    engine.submit(0, batch_of(("a", "stranger#1", "d")).members, 0.0)
    device.run_until_idle()
    assert [release.answer.sample_id for release in released if isinstance(release, Answered)] == ["a", "d"]
    [lost] = [release for release in released if isinstance(release, Failed)]
    assert isinstance(lost.error, UnprocessableInputError)
    assert str(lost.error) == "no exit record for the id 'stranger'; send the `ids` of recorded inputs"


def test_probes_run_every_ramp_and_are_answered_early_without_leaving() -> None:
    split = Split(first=0, end=4, batch=4, ramps=(1,))
    steps = list(recorded(HALF).run(batch_of("bd", split, probe=True)))
    assert summarized(steps) == [("", "bd", 1), ("b", "bd", 2), ("", "bd", 3), ("bd", "", None)]
    assert steps[1].answers == (answer("b", 11, 1),)
    assert steps[3].answers == (answer("b", 101, 3), answer("d", 103, 3))
    assert [step.seen for step in steps[:3]] == [
        (answer("b", 1, 0, 0.0), answer("d", 3, 0, 0.0)),
        (answer("b", 11, 1, 1.0), answer("d", 13, 1, 0.0)),
        (answer("b", 21, 2, 1.0), answer("d", 23, 2, 0.0)),
    ]
    assert [(seen.sample_id, seen.exit, seen.value) for seen in steps[3].seen] == [("b", 3, 101), ("d", 3, 103)]
    assert all(math.isnan(seen.score) for seen in steps[3].seen)


def test_inputs_that_stay_run_the_active_ramps_and_the_last_block() -> None:
    split = Split(first=0, end=4, batch=4, ramps=(0, 2), after_answer="stay")
    steps = list(recorded(HALF).run(batch_of("bad", split)))
    assert summarized(steps) == [("a", "bad", 1), ("b", "bad", 3), ("bad", "", None)]
    assert [[(answer.sample_id, answer.value) for answer in step.seen] for step in steps] == [
        [("b", 1), ("a", 0), ("d", 3)],
        [("b", 21), ("a", 20), ("d", 23)],
        [("b", 101), ("a", 100), ("d", 103)],
    ]
    stopping = [each.answers for each in recorded(HALF).run(batch_of("bad", replace(split, after_answer="stop")))]
    assert [step.answers for step in steps[:2]] == stopping[:2]


def test_decisions_are_those_of_the_records_for_any_ramps_and_splits() -> None:
    rng = np.random.default_rng(11)
    answers_NE = rng.integers(0, 9, (40, 5))
    records = exit_records(rng.random((40, 4)), answers_NE=answers_NE, num_blocks=6, ramps=(0, 1, 3, 4))
    runner = RecordedRunner(records, num_blocks=6)
    for _ in range(20):
        active = tuple(ramp for ramp in records.ramps if rng.random() < 0.6)
        thresholds = {ramp: float(rng.uniform(0.4, 1.0)) for ramp in records.ramps}
        cut = int(rng.integers(1, 6))
        runner.follow(thresholds)
        expected = records.outcome({ramp: thresholds[ramp] for ramp in active})
        got = dict.fromkeys(records.sample_ids, (-1, -1))
        inside = records.sample_ids
        for first, end in ((0, cut), (cut, 6)):
            split = Split(first=first, end=end, batch=40, ramps=tuple(r for r in active if first <= r < end))
            for step in runner.run(batch_of(inside, split)):
                got |= {answer.sample_id: (answer.exit, label_of(answer)) for answer in step.answers}
                inside = () if step.survivors is None else step.survivors.sample_ids
            if not inside:
                break
        assert expected.answers_N is not None
        assert list(got.values()) == list(zip(expected.exits_N, expected.answers_N, strict=True))


def test_ramps_without_records_are_refused_when_prepared() -> None:
    with pytest.raises(PlanError, match=r"the exit records hold no ramps \[3\]; they hold \[0, 1, 2\]"):
        recorded(HALF).prepare([Split(first=0, end=2, batch=1, ramps=(0,)), Split(first=2, end=5, batch=1, ramps=(3,))])


def test_an_emulated_device_sends_no_hidden_states() -> None:
    runner = recorded(HALF)
    wire = piece_of("ab", next_block=2).to_wire()
    assert (wire.tensors, wire.state_BS) == ((), None)
    back = runner.from_wire(wire)
    assert (back.sample_ids, back.next_block, back.lengths_B.tolist()) == (("a", "b"), 2, [1, 2])
    wire = WirePiece(
        sample_ids=("a",),
        next_block=0,
        lengths_B=np.array([3], dtype=np.int32),
        tensors=(np.array([7, 8, 9], dtype=np.int32),),
        state_BS=None,
    )
    assert runner.from_wire(wire).sample_ids == ("a",)


def test_warm_up_pieces_use_recorded_inputs() -> None:
    runner = recorded(HALF)
    piece = runner.warm_up_pieces(Split(first=1, end=4, batch=3), 3)
    assert (piece.next_block, len(set(piece.sample_ids)), len(piece)) == (1, 3, 3)
    assert ran(runner, piece.sample_ids, Split(first=1, end=4, batch=3))[-1][1] == ""


# Row by row: block k takes 10 ** k seconds for one input; twice that for two, three times for four.
TABLE = LatencyTable(
    batches=(1, 2, 4),
    block_s_NB=np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300], [1000, 2000, 3000]], dtype=np.float64),
    ramp_s_EB=np.array([[0.1, 0.2, 0.3]] * 3),
)


class Stage:
    """A paced runner of recorded decisions on a manual clock, which its sleep advances."""

    def __init__(self, *, table: LatencyTable = TABLE, length: int | None = None, time_scale: float = 1.0) -> None:
        self.clock = ManualClock()
        self.runner = PacedRunner(
            recorded(HALF),
            table,
            RAMPS,
            time_scale=time_scale,
            length=length,
            clock=self.clock,
            sleep=self.clock.advance,
        )

    def moments(self, batch: Batch[EmulatedPiece]) -> list[tuple[str, object]]:
        """Returns the inputs that left, and their rounded times."""
        return [
            ("".join(answer.sample_id for answer in step.answers), pytest.approx(self.clock.now_s()))
            for step in self.runner.run(batch)
        ]


RAMP_1 = Split(first=0, end=4, batch=4, ramps=(1,))
TIMED: dict[str, tuple[dict[str, Any], Batch[EmulatedPiece], list[tuple[str, float]]]] = {
    # Four inside block 0 and ramp 0: 3 + 0.3. Three, between two and four: 25 + 0.25. Two: 200 + 0.2. One: 1000.
    "inputs inside": ({}, batch_of("abcd"), [("a", 3.3), ("b", 28.55), ("c", 228.75), ("d", 1228.75)]),
    "stretched": ({"time_scale": 15}, batch_of("abcd"), [("a", 49.5), ("b", 428.25), ("c", 3431.25), ("d", 18431.25)]),
    "active ramps": ({}, batch_of("abcd", replace(RAMP_1, ramps=(2,))), [("abc", 333.3), ("d", 1333.3)]),
    "probes": ({}, batch_of("abcd", RAMP_1, probe=True), [("", 3.3), ("ab", 33.6), ("", 333.9), ("abcd", 3333.9)]),
    "stay": ({}, batch_of("abcd", replace(RAMP_1, after_answer="stay")), [("ab", 33.3), ("abcd", 3333.3)]),
    # The profile is of inputs of 10 tokens. Forty tokens count as four inputs: 3 + 0.3. Without a's 20 two remain, 20 +
    # 0.2. Without b's 5, one and a half: 150 + 0.15. Without c's 10, a half, which takes as long as one: 1000.
    "tokens inside": (
        {"length": 10},
        batch_of("abcd", tokens=(20, 5, 10, 5)),
        [("a", 3.3), ("b", 23.5), ("c", 173.65), ("d", 1173.65)],
    ),
    "more tokens than measured": (
        {"length": 10},
        batch_of("d", Split(first=0, end=2, batch=1), tokens=(60,)),
        [("", 1.5 * 33)],
    ),
}


@pytest.mark.parametrize(("options", "batch", "moments"), TIMED.values(), ids=TIMED)
def test_a_batch_takes_the_seconds_of_the_profile(
    options: dict[str, Any], batch: Batch[EmulatedPiece], moments: list[tuple[str, float]]
) -> None:
    assert Stage(**options).moments(batch) == moments


def test_a_batch_starts_when_the_device_is_free_and_its_last_input_is_queued() -> None:
    stage = Stage()
    split = Split(first=0, end=2, batch=1)
    stage.moments(batch_of("a", split))
    stage.clock.advance(0.5)  # Python's time between two batches
    assert stage.moments(batch_of("d", split, queued_s=3.0, started_s=11.5)) == [("", 22.0)]
    stage = Stage()
    split = Split(first=0, end=2, batch=2)
    stage.clock.advance(100.5)
    batch = Batch(
        split=split,
        members=(
            *batch_of("a", split, queued_s=90.0).members,
            *batch_of("d", split, queued_s=100.0).members,
        ),
        tokens=2,
        started_s=100.5,
    )
    assert stage.moments(batch) == [("", 122.0)]
    stage = Stage()
    stage.clock.advance(50)
    assert stage.moments(batch_of("d", Split(first=0, end=2, batch=1), started_s=50.0)) == [("", 50.0)]
    assert stage.moments(batch_of("d", Split(first=0, end=3, batch=1), started_s=50.0)) == [("", 122.0)]


@pytest.mark.parametrize(
    ("dispatch", "batch", "end_s"),
    [("work-conserving", 2, 11.0), ("deferred", 2, 61.0), ("deferred", 1, 11.0)],
    ids=["never", "for more inputs", "not when full"],
)
def test_a_deferred_batch_starts_after_a_wait(dispatch: Dispatch, batch: int, end_s: float) -> None:
    stage = Stage()
    stage.runner.dispatch = dispatch
    stage.clock.advance(50)
    stage.moments(batch_of("d", Split(first=0, end=2, batch=batch), started_s=50.0))
    assert stage.clock.now_s() == max(50.0, end_s)


def test_a_batch_filled_by_tokens_waited_for_an_input_outside_it() -> None:
    stage = Stage(length=10)
    stage.runner.dispatch = "deferred"
    engine: BatchEngine[EmulatedPiece] = BatchEngine([Split(first=0, end=4, batch=4, tokens=10)], ObservedTimes())
    engine.follow(engine.splits, "deferred")
    engine.times.observe(engine.splits[0], 1, 6, 1.0, 1.0)
    for at_s, sample_id in ((0.0, "d#1"), (50.0, "d#2")):
        (member,) = batch_of([sample_id], tokens=(6,)).members
        member.deadline_s = 5000.0
        engine.submit(0, [member], at_s)
    stage.clock.advance(50)
    batch = engine.choose(50.0).batch
    assert batch is not None
    assert [member.sample_id for member in batch.members] == ["d#1"]
    assert stage.moments(batch) == [("d#1", 50.0 + 1111)]


def test_a_batch_or_a_token_budget_beyond_the_profile_is_refused() -> None:
    runner = Stage().runner
    with pytest.raises(PlanError, match="the profile has no batch of 5: its largest is 4"):
        runner.prepare([Split(first=0, end=4, batch=5)])
    with pytest.raises(PlanError, match="the profile has no batch of 5"):
        list(runner.run(batch_of("abcda", Split(first=0, end=4, batch=5))))
    runner = Stage(length=10).runner
    runner.prepare([Split(first=0, end=4, batch=64, tokens=40)])
    with pytest.raises(PlanError, match="has no batch of 41 tokens: its largest is 4 inputs of 10"):
        runner.prepare([Split(first=0, end=4, batch=64, tokens=41)])
    with pytest.raises(PlanError, match="has no batch of 64"):
        runner.prepare([Split(first=0, end=4, batch=64)])


# Two batches at once

# A block takes a tenth of a second for each input.
STEEP = LatencyTable(batches=(1, 4), block_s_NB=np.tile(np.array([[0.1, 0.4]]), (4, 1)), ramp_s_EB=np.zeros((3, 2)))


class SharedRuns:
    """Two lanes on a manual clock: while the first waits for its first step, the second's batch runs."""

    def __init__(self, time_scale: float = 1.0) -> None:
        self.clock = ManualClock()
        self.later: list[Batch[EmulatedPiece]] = []
        self.log: dict[str, float] = {}
        self.runner = PacedRunner(
            recorded(HALF),
            STEEP,
            RAMPS,
            time_scale=time_scale,
            clock=self.clock,
            sleep=self.clock.advance,
            wait=self.wait,
        )

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        if self.later:
            self.run(self.later.pop())
        else:
            self.clock.advance(seconds)

    def run(self, batch: Batch[EmulatedPiece]) -> None:
        for step in self.runner.run(batch):
            for answer in step.answers:
                self.log[answer.sample_id] = self.clock.now_s()


def test_two_batches_are_as_slow_as_one_of_both_until_one_ends_or_is_abandoned() -> None:
    runs = SharedRuns()
    split = Split(first=0, end=4, batch=4, ramps=(0,), overlap_below=2)
    first, second = (batch_of(name, split, queued_s=0.0, started_s=0.0) for name in ("d", "a"))
    runs.later = [replace(second, lane=1)]
    runs.run(first)
    # A block takes 0.1 s alone and 0.2 s beside another batch. Then a leaves, and d runs three blocks alone.
    assert runs.log == {"a": pytest.approx(0.2), "d": pytest.approx(0.5)}
    runs = SharedRuns()
    given_up = runs.runner.run(replace(batch_of("bc", split, queued_s=0.0), lane=1))
    next(given_up)
    given_up.close()  # type: ignore[attr-defined]
    began_s = runs.clock.now_s()
    runs.run(batch_of("d", split, queued_s=began_s))
    assert runs.log == {"d": pytest.approx(began_s + 0.4)}


def test_a_step_that_begins_before_the_counted_time_has_progressed_since() -> None:
    block_s_NB = np.array([[4.0, 4.0, 8.0]] * 4)  # constant up to four inputs, then a second per input
    pace = Pace(LatencyTable(batches=(1, 4, 8), block_s_NB=block_s_NB, ramp_s_EB=np.zeros((0, 3))), (), 1.0)
    sharing = Sharing()
    sharing.step(0, pace, 0, 1, (), inside=6, at_s=0.0)
    sharing.advance(6.0)
    sharing.shrink(0, 2, 6.0)
    sharing.step(1, pace, 0, 1, (), inside=2, at_s=8.0)
    sharing.step(0, pace, 0, 1, (), inside=2, at_s=6.0)  # this process was 2 s late
    assert sharing.due_s(0) == 10.0
