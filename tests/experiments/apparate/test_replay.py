from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from experiments.served_streams import (
    BATCH,
    Answered,
    Fixed,
    answered,
    greedy_thresholds,
    optimal,
    replay_replay,
    same_threshold,
    sampled,
)
from optimizer.live.exit_times import ExitTimes
from profiles.records import ExitRecords
from profiles.stream import Observations

# Ten seconds of blocks; each ramp takes another one.
TIMES = ExitTimes(block_s=(1.0, 2.0, 3.0, 4.0), ramp_s={0: 1.0, 1: 1.0, 2: 1.0})


def records(scores: list[list[float]], losses: list[list[int]]) -> ExitRecords:
    return ExitRecords(
        score="confidence",
        num_blocks=4,
        ramps=(0, 1, 2),
        sample_ids=tuple(map(str, range(len(scores)))),
        scores_NR=np.array(scores, dtype=np.float32),
        losses_NR=np.array(losses, dtype=np.float64),
    )


FOUR = records(
    [[0.9, 0.9, 0.9], [0.5, 0.8, 0.9], [0.5, 0.6, 0.7], [0.8, 0.9, 0.9]],
    [[0, 0, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]],
)


class Watching:
    """Switches ramp 1 on after the first batch."""

    def __init__(self) -> None:
        self.thresholds: Mapping[int, float] = {0: 0.85}
        self.seen: list[Observations] = []

    def told(self, seen: Observations) -> None:
        self.seen.append(seen)
        self.thresholds = {0: 0.85, 1: 0.75}


def test_an_answer_comes_after_the_blocks_and_active_ramps_before_it() -> None:
    served = answered(FOUR, {0: 0.85, 1: 0.75}, TIMES)
    # Ramp 0 lets the first out, after 1 s and itself; ramp 1 two; one input goes through all and both ramps.
    assert served.answer_s_N.tolist() == [2.0, 5.0, 12.0, 5.0]
    assert served.losses_N.tolist() == [0, 0, 0, 0]
    assert served.saved(0) == 0.8
    assert served.mean_saved == pytest.approx(1 - 24 / 40)
    assert answered(FOUR, {0: 0.85}, TIMES, evaluated=(0, 1, 2)).answer_s_N.tolist() == [2.0, 13.0, 13.0, 13.0]


def test_what_is_lost_counts_by_the_worst_tenth_too() -> None:
    served = Answered(answer_s_N=np.ones(100), losses_N=np.repeat([0.0, 1.0], [95, 5]), whole_s=2.0)
    assert served.agreement == pytest.approx(0.95)
    assert served.worst_agreement == pytest.approx(0.5)
    assert Answered.join([served, served]).agreement == pytest.approx(0.95)
    assert served.since(50).agreement == pytest.approx(0.9)


def test_the_optimal_leaves_at_the_first_ramp_that_is_right_and_pays_for_no_ramp() -> None:
    assert optimal(FOUR, TIMES).answer_s_N.tolist() == [1.0, 3.0, 10.0, 3.0]


def test_one_threshold_for_all_ramps_is_the_boldest_that_keeps_the_budget() -> None:
    found = same_threshold(FOUR, 0.0, TIMES, (0, 1))
    assert found[0] == found[1]
    assert 0.8 < found[0] <= 0.9, "at 0.8 the fourth would leave at ramp 0, wrongly"
    assert answered(FOUR, same_threshold(FOUR, 0.25, TIMES, (0, 1)), TIMES).losses_N.sum() == 1


def test_nobody_leaves_where_no_threshold_keeps_the_budget() -> None:
    wrong = records([[0.9, 0.9, 0.9]] * 4, [[1, 1, 1]] * 4)
    for tune in (same_threshold, greedy_thresholds):
        assert answered(wrong, tune(wrong, 0.01, TIMES, (0, 1, 2)), TIMES).losses_N.sum() == 0


def test_a_sample_is_in_order_and_holds_no_input_twice() -> None:
    many = FOUR.subset(np.tile(np.arange(4), 25))
    ids = sampled(many, 0.2, np.random.default_rng(0)).sample_ids
    assert len(ids) == 20


def test_what_is_set_holds_from_the_next_batch_on() -> None:
    watching = Watching()
    served = replay_replay(FOUR.subset(np.tile(np.arange(4), 8)), watching, TIMES)
    assert [dict(setting) for setting in served.settings] == [{0: 0.85}, {0: 0.85, 1: 0.75}]
    assert served.changes == 1
    assert served.mean_ramps == 1.5
    assert served.answered.answer_s_N[:4].tolist() == [2.0, 11.0, 11.0, 11.0]
    assert served.answered.answer_s_N[BATCH : BATCH + 4].tolist() == [2.0, 5.0, 12.0, 5.0]


def test_who_watches_sees_active_ramps_and_of_probes_all_which_take_their_time() -> None:
    watching = Watching()
    served = replay_replay(FOUR, watching, TIMES, probe_share=1.0)
    (seen,) = watching.seen
    assert seen.probe_N.all()
    assert not np.isnan(seen.scores_NR).any()
    assert served.answered.answer_s_N.tolist() == [2.0, 13.0, 13.0, 13.0]


def test_without_anybody_watching_nothing_changes() -> None:
    served = replay_replay(FOUR.subset(np.tile(np.arange(4), 8)), Fixed(thresholds={2: 0.65}), TIMES)
    assert served.changes == 0
    assert served.answered.losses_N.sum() == 8
