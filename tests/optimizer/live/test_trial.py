"""New plans held against what they promised; those that failed are left alone while their problem stays the same."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from earlyexit.network.boundary import Split
from optimizer.live.stragglers import ReplicaTimes, Run, find
from optimizer.live.trial import Blame, Delivered, Judgement, Trial, is_blamed, judge
from optimizer.plan import Stage
from optimizer.problem import MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from profiles.table import LatencyTable
from tests.optimizer.plain_problem import plain_problem


def served(offered: int, in_slo: int, *, seconds: float = 60.0, late: int = 0, dropped: int = 0) -> Delivered:
    """Rates per second."""
    return Delivered(
        seconds=seconds,
        arrived=round(offered * seconds),
        answered=round((in_slo + late) * seconds),
        in_slo=round(in_slo * seconds),
        dropped=round(dropped * seconds),
    )


def trial(before: Delivered | None, *, predicted_rps: float = 200.0, before_predicted_rps: float = 150.0) -> Trial:
    return Trial(epoch=3, predicted_rps=predicted_rps, before=before, before_predicted_rps=before_predicted_rps)


def judged(tried: Trial, now: Delivered) -> Judgement:
    return judge(tried, now, margin=0.2, settle_s=10.0, patience_s=120.0)


AS_PROMISED = served(150, 148, dropped=2)


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        pytest.param(served(100, 90, late=6, dropped=4), 0.9, id="late and dropped ones are missing"),
        pytest.param(served(100, 60), 1.0, id="those under way are not"),
        pytest.param(served(100, 0), 0.0, id="unless nothing comes out"),
        pytest.param(served(400, 150, dropped=250), 0.75, id="of more than it can do only that is expected"),
        pytest.param(served(400, 220, dropped=180), 1.1, id="a plan may do better than it promised"),
    ],
)
def test_what_a_plan_keeps_of_its_promise(now: Delivered, kept: float) -> None:
    assert now.kept(200.0) == pytest.approx(kept)


def test_a_plan_that_does_what_it_promised_is_kept_and_another_rolled_back() -> None:
    verdict = judged(trial(AS_PROMISED), served(300, 190, dropped=110))
    assert verdict.outcome == "keep"
    assert verdict.words == "keeps the plan: plan 3 gives 190/s in time, 95.0% of what was expected (200/s)"
    assert judged(trial(AS_PROMISED), served(20, 20)).outcome == "keep"
    verdict = judged(trial(AS_PROMISED), served(300, 100, dropped=200))
    assert verdict.outcome == "roll back"
    # 148 of 150 settled inputs were in time: of 300/s that is 148 of the 150/s that the plan could do.
    assert verdict.words == (
        "rolls back: plan 3 gives 100/s in time, 50.0% of what was expected (200/s); "
        "the one before kept 98.7% of its own and would give 148/s"
    )
    assert judged(trial(AS_PROMISED), served(300, 0)).outcome == "roll back"


def test_a_plan_is_kept_where_the_one_before_is_no_better_or_is_not_known() -> None:
    verdict = judged(trial(served(300, 75, dropped=225)), served(300, 110, dropped=190))
    assert verdict.outcome == "keep"
    assert "the one before kept 50.0% of its own and would give 75/s" in verdict.words
    verdict = judged(trial(None), served(300, 10, dropped=290))
    assert verdict.outcome == "keep"
    assert verdict.words.endswith("; none was measured before it")
    verdict = judged(trial(AS_PROMISED), served(300, 155, dropped=145))
    assert verdict.kept == pytest.approx(0.775)
    assert verdict.reason == "no better before"


@pytest.mark.parametrize(
    ("now", "outcome", "words"),
    [
        (served(300, 0, seconds=5.0), "wait", "waits: plan 3 is in force for 5 s, too short to judge"),
        (served(1, 0), "wait", "waits: only 60 inputs came under plan 3"),
        (served(0, 0, seconds=120.0), "keep", "keeps plan 3: only 0 inputs came in 120 s, nothing tells"),
    ],
)
def test_it_waits_for_enough_but_not_for_ever(now: Delivered, outcome: str, words: str) -> None:
    verdict = judged(trial(AS_PROMISED), now)
    assert (verdict.outcome, verdict.words) == (outcome, words)


PROBLEM = plain_problem(
    survival_N=(1.0, 0.5),
    latency={"T4": LatencyTable(batches=(4,), block_s_NB=np.ones((2, 1)), ramp_s_EB=np.ones((1, 1)))},
    devices={"T4": Supply(count=4)},
    slo=Slo(latency_s=10.0),
    objective=MinimizeCost(rate_per_s=100.0),
)
FAILED = (Stage(device="T4", replicas=2, splits=(Split(first=0, end=2, batch=4),)),)
OTHER = (Stage(device="T4", replicas=3, splits=(Split(first=0, end=2, batch=4),)),)
BLAMED = (Blame(stages=FAILED, problem=PROBLEM, until=15),)


def test_a_plan_that_failed_is_blamed_and_no_other() -> None:
    assert is_blamed(BLAMED, FAILED, PROBLEM)
    assert not is_blamed(BLAMED, OTHER, PROBLEM)


@pytest.mark.parametrize(
    ("now", "another"),
    [
        pytest.param(replace(PROBLEM, survival_N=(1.0, 0.55)), False, id="a little survival"),
        pytest.param(replace(PROBLEM, survival_N=(1.0, 0.65)), True, id="much survival"),
        pytest.param(replace(PROBLEM, objective=MinimizeCost(rate_per_s=110.0)), False, id="a little rate"),
        pytest.param(replace(PROBLEM, objective=MinimizeCost(rate_per_s=75.0)), True, id="much rate"),
        pytest.param(replace(PROBLEM, objective=MaximizeRate()), True, id="another objective"),
        pytest.param(replace(PROBLEM, devices={"T4": Supply(count=3)}), True, id="fewer accelerators"),
        pytest.param(replace(PROBLEM, slo=Slo(latency_s=5.0)), True, id="another SLO"),
    ],
)
def test_a_clearly_changed_problem_lifts_the_blame(now: PlanProblem, another: bool) -> None:
    assert is_blamed(BLAMED, FAILED, now) is not another


SPLIT = Split(first=0, end=1, batch=4)


def one_second(device: str, split: Split, size: float) -> float:
    return 1.0


def ran(replica: str, slot: str, seconds: float, *, batches: int = 10, device: str = "T4") -> ReplicaTimes:
    """So many seconds per batch."""
    run = Run(split=SPLIT, size=4, batches=batches, seconds=seconds * batches)
    return ReplicaTimes(replica=replica, slot=slot, device=device, runs=(run,))


def slots(**seconds: list[float]) -> list[ReplicaTimes]:
    """Replicas named by slot and rank, such as `a0`."""
    return [ran(f"{slot}{rank}", slot, each) for slot, all_of in seconds.items() for rank, each in enumerate(all_of)]


def names(times: list[ReplicaTimes], *, resting: Collection[str] = ()) -> list[str]:
    found = find(times, one_second, 1.5, resting=resting)
    return [each.replica for each in found]


def test_one_of_three_is_slow_and_no_more_than_a_third_rests() -> None:
    (straggler,) = find(slots(a=[1.0, 1.1, 1.8]), one_second, 1.5)
    assert (straggler.replica, straggler.slot, straggler.device) == ("a2", "a", "T4")
    assert straggler.words == "a2 takes 1.71 times as long as its 2 peers (1.80 against 1.05 times the profile)"
    assert names(slots(a=[1.0, 1.0, 1.0, 2.0, 3.0])) == ["a4"]
    times = slots(a=[1.0, 1.0, 1.0, 1.0, 2.0, 3.0])
    assert names(times) == ["a5", "a4"]
    assert names(times, resting={"a5"}) == ["a4"]
    assert names(slots(a=[1.0, 2.0])) == [], "one of two is more than a third"
    assert names([*slots(a=[1.0, 1.0]), ran("a2", "a", 5.0, batches=9)]) == [], "of few batches nothing is known"


def test_peers_are_those_of_the_slot_or_the_type_whatever_batches_they_ran() -> None:
    assert names(slots(a=[3.0, 3.0, 3.0, 3.0], b=[3.0, 3.0], c=[3.0])) == []
    assert names(slots(a=[1.0] * 4, b=[2.0, 2.1])) == []
    assert names(slots(a=[1.0] * 4, b=[1.0, 2.0])) == ["b1"]
    assert names(slots(a=[2.0] * 4, b=[1.0, 2.0])) == []  # the other is quick
    assert names(slots(a=[1.0, 1.0, 1.0], b=[2.0])) == ["b0"]
    assert names([*slots(a=[1.0, 1.0, 1.0]), ran("b0", "b", 9.0, device="V100")]) == []

    def by_size(device: str, split: Split, size: float) -> float:
        return size / 4

    small = Run(split=SPLIT, size=2, batches=20, seconds=20 * 0.5)
    times = [*slots(a=[1.0, 1.0]), ReplicaTimes(replica="a2", slot="a", device="T4", runs=(small,))]
    assert find(times, by_size, 1.5) == ()
