from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from cluster.emulated import EmulatedPiece, PacedRunner, RecordedRunner
from earlyexit.clock import ManualClock
from earlyexit.device import Device
from earlyexit.engine import Batch, BatchEngine, Dispatch
from earlyexit.errors import PlanError, UnprocessableInputError
from earlyexit.member import Member
from earlyexit.release import Lost, Release, Step, Told
from earlyexit.split import Split
from earlyexit.times import ObservedTimes
from earlyexit.wire import Answer, Seen, WirePiece
from profiles.records import ExitRecords
from profiles.scores import Score
from profiles.table import LatencyTable
from tests.answers import label_of

RAMPS = (0, 1, 2)
HALF = {0: 0.5, 1: 0.5, 2: 0.5}
WHOLE = Split(first=0, end=4, batch=4, ramps=RAMPS)
# Row by row: block k takes 10 ** k seconds for one input; twice that for two, three times for four.
TABLE = LatencyTable(
    batches=(1, 2, 4),
    block_s_NB=np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300], [1000, 2000, 3000]], dtype=np.float64),
    ramp_s_EB=np.array([[0.1, 0.2, 0.3]] * 3),
)


EVERYWHERE = [("a", "bcd", 1), ("b", "cd", 2), ("c", "d", 3), ("d", "", None)]
"""What is told where a leaves at the first ramp, b at the second, c at the third and d nowhere."""


def make_records(score: Score = "confidence") -> ExitRecords:
    """Four inputs of a model of four blocks: a is sure from ramp 0 on, b from ramp 1, c from ramp 2, d never.

    What ramp r says of them is 10 * r, 10 * r + 1, ...; the full model says 100, 101, ...
    """
    sure = np.array([[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]], dtype=np.float32)
    rows, columns = np.indices((4, 3))
    return ExitRecords.of_answers(
        np.column_stack([10 * columns + rows, np.arange(100, 104)]),
        score=score,
        num_blocks=4,
        ramps=RAMPS,
        sample_ids=("a", "b", "c", "d"),
        scores_NR=(sure if score == "confidence" else 1 - sure).astype(np.float32),
    )


def recorded(thresholds: Mapping[int, float] | float | None, score: Score = "confidence") -> RecordedRunner:
    runner = RecordedRunner(make_records(score), num_blocks=4)
    runner.follow(thresholds)
    return runner


def piece_of(ids: Sequence[str], next_block: int = 0) -> EmulatedPiece:
    lengths_B = np.arange(1, len(ids) + 1, dtype=np.int32)
    return EmulatedPiece(sample_ids=tuple(ids), next_block=next_block, lengths_B=lengths_B)


def batch_of(
    ids: Sequence[str],
    split: Split = WHOLE,
    *,
    probe: bool = False,
    queued_s: float = 0.0,
    started_s: float = 0.0,
) -> Batch[EmulatedPiece]:
    members = tuple(
        Member(sample_id=single.sample_ids[0], payload=single, probe=probe, queued_since_s=queued_s)
        for single in piece_of(ids, split.first).singles()
    )
    return Batch(split=split, members=members, started_s=started_s, probe=probe)


def answer(sample_id: str, label: int, exit: int, score: float = 1.0) -> Answer:  # noqa: A002 - the answer's own word
    return Answer(sample_id=sample_id, value=label, score=score, exit=exit)


def ran(
    runner: RecordedRunner, ids: Sequence[str], split: Split = WHOLE, *, probe: bool = False
) -> list[tuple[str, str, int | None]]:
    """See `told`."""
    return told(list(runner.run(batch_of(ids, split, probe=probe))))


def told(steps: Sequence[Step[EmulatedPiece]]) -> list[tuple[str, str, int | None]]:
    """Per step who left, who is inside, and what block they wait for."""
    return [
        (
            "".join(each.sample_id for each in step.answers),
            "" if step.survivors is None else "".join(step.survivors.sample_ids),
            None if step.survivors is None else step.survivors.next_block,
        )
        for step in steps
    ]


def test_inputs_leave_at_the_first_active_ramp_that_was_sure_of_them_when_recorded() -> None:
    steps = list(recorded(HALF).run(batch_of("abcd")))
    assert told(steps) == EVERYWHERE
    assert [said for step in steps for said in step.answers] == [
        answer("a", 0, 0),
        answer("b", 11, 1),
        answer("c", 22, 2),
        answer("d", 103, 3),
    ]


def test_inactive_ramps_let_nobody_leave_and_survivors_wait_for_the_splits_end() -> None:
    runner = recorded(HALF)
    assert ran(runner, "abcd", Split(first=0, end=4, batch=4, ramps=(1,))) == [("ab", "cd", 2), ("cd", "", None)]
    assert ran(runner, "abcd", Split(first=0, end=3, batch=4, ramps=(0,))) == [("a", "bcd", 1), ("", "bcd", 3)]
    assert ran(runner, "cd", Split(first=1, end=2, batch=4, ramps=(1,))) == [("", "cd", 2)]
    assert ran(runner, "bd", Split(first=1, end=2, batch=4, ramps=(1,))) == [("b", "d", 2)]


def test_survivors_keep_their_lengths() -> None:
    [step] = recorded(HALF).run(batch_of("abd", Split(first=0, end=2, batch=4, ramps=(1,))))
    assert step.survivors is not None
    assert (step.survivors.sample_ids, step.survivors.lengths_B.tolist()) == (("d",), [3])


def test_of_entropies_small_ones_are_sure() -> None:
    assert ran(recorded(0.5, "entropy"), "abcd") == EVERYWHERE


@pytest.mark.parametrize("thresholds", [None, {}, {3: 0.5}], ids=["no policy", "none", "of a ramp without records"])
def test_at_ramps_without_a_threshold_nobody_leaves(thresholds: Mapping[int, float] | None) -> None:
    assert ran(recorded(thresholds), "abcd") == [("abcd", "", None)]


def test_thresholds_change_from_the_next_batch_on() -> None:
    runner = recorded(HALF)
    running = runner.run(batch_of("abcd"))
    runner.follow({0: 2.0, 1: 0.5})
    assert told(list(running)) == EVERYWHERE
    assert ran(runner, "abcd") == [("ab", "cd", 2), ("cd", "", None)]


def test_one_record_can_be_asked_many_times() -> None:
    ids = ("a#0", "a#1", "d#x")
    steps = list(recorded(HALF).run(batch_of(ids)))
    assert [(said.sample_id, said.exit) for step in steps for said in step.answers] == [
        ("a#0", 0),
        ("a#1", 0),
        ("d#x", 3),
    ]


def test_an_input_without_records_is_refused_alone() -> None:
    released: list[Release[EmulatedPiece]] = []
    engine: BatchEngine[EmulatedPiece] = BatchEngine((WHOLE,), ObservedTimes())
    device = Device(engine, recorded(HALF), ManualClock(), released.extend)
    engine.submit(0, batch_of(("a", "stranger#1", "d")).members, 0.0)
    device.run_until_idle()
    assert [release.answer.sample_id for release in released if isinstance(release, Told)] == ["a", "d"]
    [lost] = [release for release in released if isinstance(release, Lost)]
    assert isinstance(lost.error, UnprocessableInputError)
    assert str(lost.error) == "no exit records of the id 'stranger'; send the `ids` of recorded inputs"


def test_probes_are_seen_by_every_ramp_and_answered_early_without_leaving() -> None:
    split = Split(first=0, end=4, batch=4, ramps=(1,))
    steps = list(recorded(HALF).run(batch_of("bd", split, probe=True)))
    assert told(steps) == [("", "bd", 1), ("b", "bd", 2), ("", "bd", 3), ("bd", "", None)]
    assert steps[1].answers == (answer("b", 11, 1),)
    assert steps[3].answers == (answer("b", 101, 3), answer("d", 103, 3))
    assert [step.seen for step in steps[:3]] == [
        (seen("b", 0, 0.0, 1), seen("d", 0, 0.0, 3)),
        (seen("b", 1, 1.0, 11), seen("d", 1, 0.0, 13)),
        (seen("b", 2, 1.0, 21), seen("d", 2, 0.0, 23)),
    ]
    assert [(said.sample_id, said.block, said.value) for said in steps[3].seen] == [("b", 3, 101), ("d", 3, 103)]
    assert all(math.isnan(said.score) for said in steps[3].seen)


def test_probes_that_do_not_reach_the_models_end_go_on() -> None:
    split = Split(first=0, end=2, batch=4, ramps=(0,))
    assert ran(recorded(HALF), "ad", split, probe=True) == [("a", "ad", 1), ("", "ad", 2)]


def seen(sample_id: str, block: int, score: float, label: int) -> Seen:
    return Seen(sample_id=sample_id, block=block, score=score, value=label)


def test_decisions_are_those_of_the_records_for_any_ramps_and_splits() -> None:
    rng = np.random.default_rng(11)
    records = ExitRecords.of_answers(
        np.column_stack([rng.integers(0, 9, (40, 4)), rng.integers(0, 9, 40)]),
        score="confidence",
        num_blocks=6,
        ramps=(0, 1, 3, 4),
        sample_ids=tuple(map(str, range(40))),
        scores_NR=rng.random((40, 4)).astype(np.float32),
    )
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
                got |= {said.sample_id: (said.exit, label_of(said)) for said in step.answers}
                inside = () if step.survivors is None else step.survivors.sample_ids
            if not inside:
                break
        assert expected.answers_N is not None
        assert list(got.values()) == list(zip(expected.exits_N, expected.answers_N, strict=True))


def test_ramps_without_records_are_refused_when_prepared() -> None:
    with pytest.raises(PlanError, match=r"the exit records hold no ramps \[3\]; they hold \[0, 1, 2\]"):
        recorded(HALF).prepare([Split(first=0, end=2, batch=1, ramps=(0,)), Split(first=2, end=5, batch=1, ramps=(3,))])


def test_a_piece_crosses_processes_without_values() -> None:
    runner = recorded(HALF)
    wire = piece_of("ab", next_block=2).to_wire()
    assert (wire.tensors, wire.state_BS) == ((), None)
    back = runner.from_wire(wire)
    assert (back.sample_ids, back.next_block, back.lengths_B.tolist()) == (("a", "b"), 2, [1, 2])


def test_what_a_real_ingress_sends_is_taken_without_its_tokens() -> None:
    wire = WirePiece(
        sample_ids=("a",),
        next_block=0,
        lengths_B=np.array([3], dtype=np.int32),
        tensors=(np.array([7, 8, 9], dtype=np.int32),),
        state_BS=None,
    )
    assert recorded(HALF).from_wire(wire).sample_ids == ("a",)


def test_pieces_for_warming_are_of_recorded_inputs() -> None:
    runner = recorded(HALF)
    piece = runner.warm_up_pieces(Split(first=1, end=4, batch=3), 3)
    assert (piece.next_block, len(set(piece.sample_ids)), len(piece)) == (1, 3, 3)
    assert ran(runner, piece.sample_ids, Split(first=1, end=4, batch=3))[-1][1] == ""


class Stage:
    """A paced runner of recorded decisions on a manual clock, whose sleep advances it."""

    def __init__(self, *, table: LatencyTable = TABLE, time_scale: float = 1.0, slowness: float = 1.0) -> None:
        self.clock = ManualClock()
        self.runner = PacedRunner(
            recorded(HALF),
            table,
            RAMPS,
            time_scale=time_scale,
            slowness=slowness,
            clock=self.clock,
            sleep=self.clock.advance,
        )

    def moments(self, batch: Batch[EmulatedPiece]) -> list[tuple[str, object]]:
        """Who left, and when, to rounding."""
        return [
            ("".join(said.sample_id for said in step.answers), pytest.approx(self.clock.now_s()))
            for step in self.runner.run(batch)
        ]


def test_answers_come_when_the_profile_says_for_those_really_inside() -> None:
    # Four inside block 0 and ramp 0: 3 + 0.3. Three, between two and four: 25 + 0.25. Two: 200 + 0.2. One: 1000.
    assert Stage().moments(batch_of("abcd")) == [("a", 3.3), ("b", 28.55), ("c", 228.75), ("d", 1228.75)]


def test_only_active_ramps_take_time() -> None:
    split = Split(first=0, end=4, batch=4, ramps=(2,))
    assert Stage().moments(batch_of("abcd", split)) == [("abc", 3 + 30 + 300 + 0.3), ("d", 333.3 + 1000)]


def test_a_ramp_where_nobody_leaves_takes_time_all_the_same() -> None:
    assert Stage().moments(batch_of("cd", Split(first=0, end=3, batch=2, ramps=(0, 1)))) == [("", 2 + 20 + 200 + 0.4)]


def test_probes_take_the_time_of_every_ramp_with_everyone_inside() -> None:
    split = Split(first=0, end=4, batch=4, ramps=(1,))
    assert Stage().moments(batch_of("abcd", split, probe=True)) == [
        ("", 3.3),
        ("ab", 33.6),
        ("", 333.9),
        ("abcd", 3333.9),
    ]


def test_time_is_stretched_by_the_scale_and_by_slowness() -> None:
    moments = Stage(time_scale=10, slowness=1.5).moments(batch_of("abcd"))
    assert moments == [("a", 49.5), ("b", 428.25), ("c", 3431.25), ("d", 18431.25)]


def test_below_the_smallest_measured_batch_time_is_constant() -> None:
    table = LatencyTable(batches=(2, 4), block_s_NB=TABLE.block_s_NB[:, 1:], ramp_s_EB=TABLE.ramp_s_EB[:, 1:])
    assert Stage(table=table).moments(batch_of("d")) == [("d", 2222 + 0.6)]


def test_what_lies_between_two_batches_costs_a_busy_device_nothing() -> None:
    stage = Stage()
    split = Split(first=0, end=2, batch=1)
    stage.moments(batch_of("a", split))
    stage.clock.advance(0.5)  # Python, between two batches
    assert stage.moments(batch_of("d", split, queued_s=3.0, started_s=11.5)) == [("", 22.0)]


def test_an_idle_device_starts_when_the_last_input_of_the_batch_was_queued() -> None:
    stage = Stage()
    split = Split(first=0, end=2, batch=2)
    stage.clock.advance(100.5)
    batch = Batch(
        split=split,
        members=(
            *batch_of("a", split, queued_s=90.0).members,
            *batch_of("d", split, queued_s=100.0).members,
        ),
        started_s=100.5,
    )
    assert stage.moments(batch) == [("", 122.0)]


def test_a_device_that_is_late_does_not_wait() -> None:
    stage = Stage()
    stage.clock.advance(50)
    assert stage.moments(batch_of("d", Split(first=0, end=2, batch=1), started_s=50.0)) == [("", 50.0)]
    assert stage.moments(batch_of("d", Split(first=0, end=3, batch=1), started_s=50.0)) == [("", 122.0)]


def test_who_stays_on_the_device_is_ready_when_the_batch_before_ended() -> None:
    stage = Stage()
    stage.moments(batch_of("d", Split(first=0, end=2, batch=1)))
    stage.clock.advance(0.5)
    assert stage.moments(batch_of("d", Split(first=2, end=3, batch=1), queued_s=11.5)) == [("", 111.0)]


@pytest.mark.parametrize(
    ("dispatch", "batch", "end_s"),
    [("work-conserving", 2, 11.0), ("deferred", 2, 61.0), ("deferred", 1, 11.0)],
    ids=["never", "for more inputs", "not when full"],
)
def test_a_deferred_batch_was_waited_with(dispatch: Dispatch, batch: int, end_s: float) -> None:
    stage = Stage()
    stage.runner.dispatch = dispatch
    stage.clock.advance(50)
    stage.moments(batch_of("d", Split(first=0, end=2, batch=batch), started_s=50.0))
    assert stage.clock.now_s() == max(50.0, end_s)


def test_a_batch_beyond_the_profile_is_refused() -> None:
    runner = Stage().runner
    with pytest.raises(PlanError, match="the profile knows no batch of 5: its largest is 4"):
        runner.prepare([Split(first=0, end=4, batch=5)])
    with pytest.raises(PlanError, match="the profile knows no batch of 5"):
        list(runner.run(batch_of("abcda", Split(first=0, end=4, batch=5))))


def test_a_split_takes_its_profiles_time_while_nobody_leaves() -> None:
    split = Split(first=1, end=4, batch=4, ramps=(1, 2))
    assert Stage().runner.pace.split_s(split, 4) == pytest.approx((30.3, 3330.6))
    assert Stage().runner.pace.split_s(Split(first=0, end=2, batch=2), 2) == (22, 22)


def test_a_paced_device_answers_with_the_engine() -> None:
    """Two splits on one device: the survivors of the first wait for the second."""
    stage = Stage()
    splits = (Split(first=0, end=2, batch=2, ramps=(0, 1)), Split(first=2, end=4, batch=2, ramps=(2,)))
    log: list[tuple[str, object]] = []

    def deliver(releases: list[Release[EmulatedPiece]]) -> None:
        for release in releases:
            assert isinstance(release, Told)
            log.append((release.answer.sample_id, pytest.approx(stage.clock.now_s())))

    engine: BatchEngine[EmulatedPiece] = BatchEngine(splits, ObservedTimes())
    device = Device(engine, stage.runner, stage.clock, deliver)
    engine.submit(0, batch_of(("a", "c#1", "b", "c#2")).members, 0.0)
    device.run_until_idle()
    # First batch: a leaves at 2.2, c#1 stays until 2.2 + 10.1. Second: b leaves with two in blocks 0 and 1. Then both c
    # fill the second split: 200.2 more.
    assert log == [("a", 2.2), ("b", 12.3 + 2.2 + 20.2), ("c#1", 34.7 + 200.2), ("c#2", 34.7 + 200.2)]
