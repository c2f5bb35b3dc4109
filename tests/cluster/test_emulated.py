from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from cluster.emulated import EmulatedPiece, RecordedRunner
from earlyexit.clock import ManualClock
from earlyexit.engine.device import Answered, Device, Failed, Release, Step
from earlyexit.engine.engine import BatchEngine
from earlyexit.engine.times import ObservedTimes
from earlyexit.errors import PlanError, UnprocessableInputError
from earlyexit.network.boundary import Answer, Seen, Split, WirePiece
from profiles.records import ExitRecords
from tests.answers import label_of
from tests.cluster.recorded_batches import HALF, WHOLE, batch_of, piece_of, recorded

EVERYWHERE = [("a", "bcd", 1), ("b", "cd", 2), ("c", "d", 3), ("d", "", None)]
"""What is told where a leaves at the first ramp, b at the second, c at the third and d nowhere."""


def answer(sample_id: str, label: int, exit: int, score: float = 1.0) -> Answer:  # noqa: A002 - the answer's own word
    return Answer(sample_id=sample_id, value=label, score=score, exit=exit)


def ran(
    runner: RecordedRunner, ids: Sequence[str], split: Split = WHOLE, *, probe: bool = False
) -> list[tuple[str, str, int | None]]:
    """See `told`."""
    return told(list(runner.run(batch_of(ids, split, probe=probe))))


def told(steps: Sequence[Step[EmulatedPiece]]) -> list[tuple[str, str, int | None]]:
    """Per step, which inputs left, which are inside, and what block they wait for."""
    return [
        (
            "".join(each.sample_id for each in step.answers),
            "" if step.survivors is None else "".join(step.survivors.sample_ids),
            None if step.survivors is None else step.survivors.next_block,
        )
        for step in steps
    ]


def test_thresholds_change_from_the_next_batch_on_and_of_entropies_small_ones_are_sure() -> None:
    assert ran(recorded(0.5, "entropy"), "abcd") == EVERYWHERE
    runner = recorded(HALF)
    running = runner.run(batch_of("abcd"))
    runner.follow({0: 2.0, 1: 0.5})
    assert told(list(running)) == EVERYWHERE
    assert ran(runner, "abcd") == [("ab", "cd", 2), ("cd", "", None)]


@pytest.mark.parametrize("thresholds", [None, {}, {3: 0.5}], ids=["no policy", "none", "of a ramp without records"])
def test_at_ramps_without_a_threshold_nobody_leaves(thresholds: Mapping[int, float] | None) -> None:
    assert ran(recorded(thresholds), "abcd") == [("abcd", "", None)]


def test_an_input_without_records_is_refused_alone() -> None:
    released: list[Release[EmulatedPiece]] = []
    engine: BatchEngine[EmulatedPiece] = BatchEngine((WHOLE,), ObservedTimes())
    device = Device(engine, recorded(HALF), ManualClock(), released.extend)
    engine.submit(0, batch_of(("a", "stranger#1", "d")).members, 0.0)
    device.run_until_idle()
    assert [release.answer.sample_id for release in released if isinstance(release, Answered)] == ["a", "d"]
    [lost] = [release for release in released if isinstance(release, Failed)]
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


def test_inputs_that_stay_are_seen_by_the_active_ramps_and_the_end_and_answered_as_others() -> None:
    split = Split(first=0, end=4, batch=4, ramps=(0, 2), after_answer="stay")
    steps = list(recorded(HALF).run(batch_of("bad", split)))
    assert told(steps) == [("a", "bad", 1), ("b", "bad", 3), ("bad", "", None)]
    assert [[(said.sample_id, said.value) for said in step.seen] for step in steps] == [
        [("b", 1), ("a", 0), ("d", 3)],
        [("b", 21), ("a", 20), ("d", 23)],
        [("b", 101), ("a", 100), ("d", 103)],
    ]
    stopping = [each.answers for each in recorded(HALF).run(batch_of("bad", replace(split, after_answer="stop")))]
    assert [step.answers for step in steps[:2]] == stopping[:2]


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


def test_a_piece_crosses_processes_without_values_and_a_real_ingress_may_send_tokens() -> None:
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


def test_pieces_for_warming_are_of_recorded_inputs() -> None:
    runner = recorded(HALF)
    piece = runner.warm_up_pieces(Split(first=1, end=4, batch=3), 3)
    assert (piece.next_block, len(set(piece.sample_ids)), len(piece)) == (1, 3, 3)
    assert ran(runner, piece.sample_ids, Split(first=1, end=4, batch=3))[-1][1] == ""
