"""Gains of new plans against the cost of a change, trials, and stragglers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from deployments.wire.messages import Interval
from earlyexit.network.boundary import Split
from optimizer.live.plan_changes import StartCost, Trial, Verdict, judge, kept_share, weigh
from optimizer.live.stragglers import ReplicaTimes, find_stragglers
from optimizer.plans.plan import Stage
from optimizer.problems.problem import MinimizeCost, PlanProblem, Slo, Supply
from profiles.table import LatencyTable
from tests.optimizer.plain_problem import plain_problem

# One block takes 0.1 s at batch 1 and 0.2 s at batch 4: a replica does 10 or 20 a second.
PROBLEM = plain_problem(
    survival_N=(1.0,),
    latency={"T4": LatencyTable(batches=(1, 4), block_s_NB=np.array([[0.1, 0.2]]), ramp_s_EB=np.zeros((0, 2)))},
    devices={"T4": Supply(count=20, usd_per_hour=0.5)},
    slo=Slo(latency_s=10.0),
)


def stages(replicas: int, *, batch: int = 4, device: str = "T4") -> tuple[Stage, ...]:
    return (Stage(device=device, replicas=replicas, splits=(Split(first=0, end=1, batch=batch),)),)


def weighed(
    current: Sequence[Stage] | None,
    new: tuple[Stage, ...],
    *,
    started: int,
    problem: PlanProblem = PROBLEM,
    least_gain: float = 0.02,
) -> Verdict:
    start_cost = StartCost(running={"T4": new[0].replicas - started}, start_s=12.0, period_s=120.0)
    return weigh(problem, current, new, start_cost=start_cost, least_gain=least_gain)


def test_the_plan_changes_only_for_a_gain_above_its_cost_and_the_least_gain() -> None:
    verdict = weighed(stages(10), stages(12), started=2)
    assert verdict.change
    # 240/s instead of 200/s; 2 of 12 replicas miss a tenth of the period.
    assert verdict.words == (
        "changes the plan: the new one would give 20.0% more, starting 2 of 12 replicas costs 1.7%, "
        "and 2.0% is the least gain"
    )
    verdict = weighed(stages(10), stages(11), started=9)
    assert not verdict.change
    assert "give 10.0% more, starting 9 of 11 replicas costs 8.2%" in verdict.words
    assert weighed(stages(10), stages(11), started=8).change
    assert weighed(stages(10), stages(11), started=9, least_gain=0.01).change


def test_the_plan_changes_if_only_the_current_one_breaks_a_promise() -> None:
    verdict = weighed(None, stages(1), started=1)
    assert verdict.change
    assert verdict.words == "takes the plan: there is none yet"
    verdict = weighed(stages(3), stages(3), started=0)
    assert not verdict.change
    assert verdict.words == "keeps the plan: it is still the best"
    fewer = replace(PROBLEM, devices={"T4": Supply(count=9, usd_per_hour=0.5)})
    verdict = weighed(stages(10), stages(9), started=9, problem=fewer)
    assert verdict.change
    assert verdict.words == "changes the plan: the current one breaks a promise: it needs 10 T4, and 9 are available"
    tight = replace(PROBLEM, slo=Slo(latency_s=0.1))
    verdict = weighed(stages(10), stages(9), started=0, problem=tight)
    assert not verdict.change
    assert "give 10.0% less" in verdict.words, "both break the promise"


def test_the_current_plan_is_compared_with_the_shares_of_its_chains() -> None:
    both, start_cost = (*stages(4), *stages(4, batch=1)), StartCost(running={"T4": 8}, start_s=12.0, period_s=120.0)
    # The chains do 80/s and 40/s. With equal shares, the second one limits the plan to 80/s.
    found = [
        weigh(PROBLEM, both, both, start_cost=start_cost, least_gain=0.02, shares=shares)
        for shares in ((0.5, 0.5), (0.665, 0.335), ())
    ]
    assert [each.change for each in found] == [True, False, False]
    assert found[0].words.startswith("changes the plan: the new one would give 50.0% more, starting 0 of 8 replicas")


@pytest.mark.parametrize(("slo_s", "change"), [(0.25, False), (0.21, True)])
def test_the_current_plan_may_use_the_slack(slo_s: float, change: bool) -> None:
    tight = replace(PROBLEM, slo=Slo(latency_s=slo_s, slack=0.2))  # a new plan must keep 0.2 s, this one takes 0.22
    assert weighed(stages(10), stages(10, batch=1), started=0, problem=tight).change is change


@pytest.mark.parametrize(
    ("old", "new", "gain", "change"),
    [(10, 8, "save 20.0%", True), (10, 10, "save 0.0%", False), (8, 10, "cost 25.0% more", False)],
)
def test_the_gain_of_a_cheaper_plan_is_the_saved_share(old: int, new: int, gain: str, change: bool) -> None:
    cheap = replace(PROBLEM, objective=MinimizeCost(rate_per_s=50.0))
    verdict = weighed(stages(old), stages(new, batch=1 if new == old else 4), started=0, problem=cheap)
    assert verdict.change is change
    assert gain in verdict.words


def test_a_plan_that_is_too_slow_is_changed_for_a_faster_one_though_neither_keeps_all_promises() -> None:
    late = replace(PROBLEM, objective=MinimizeCost(rate_per_s=300.0), slo=Slo(latency_s=0.1))
    assert "give 87.5% more" in weighed(stages(8), stages(15), started=7, problem=late).words  # 300/s instead of 160/s
    assert weighed(stages(8), stages(20), started=7, problem=late).change
    assert "save 6.2%" in weighed(stages(16), stages(15), started=0, problem=late).words


def test_both_plans_are_evaluated_with_the_given_reach() -> None:
    table = LatencyTable(batches=(4,), block_s_NB=np.array([[0.2], [0.2]]), ramp_s_EB=np.zeros((1, 1)))
    two_blocks = plain_problem(survival_N=(1.0, 0.5), latency={"T4": table}, slo=Slo(latency_s=10.0))
    current = (Stage(device="T4", replicas=1, splits=(Split(first=0, end=2, batch=4),)),)
    halves = (Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=2, batch=4))
    cut = (Stage(device="T4", replicas=1, splits=halves),)
    # 0.4 s per batch; cut, 0.2 s and as much for the share that goes on.
    start_cost = StartCost(running={"T4": 1}, start_s=0, period_s=1)
    judged = partial(weigh, two_blocks, current, cut, start_cost=start_cost, least_gain=0)
    assert "give 33.3% more" in judged().words
    assert "give 0.0% more" in judged(reach=lambda active: (1.0, 1.0)).words


def served(offered: int, in_slo: int, *, seconds: float = 60.0, late: int = 0, dropped: int = 0) -> Interval:
    """Rates per second."""
    return Interval(
        since_s=0.0,
        at_s=seconds,
        arrived=round(offered * seconds),
        answered=round((in_slo + late) * seconds),
        in_slo=round(in_slo * seconds),
        drops={"deadline": round(dropped * seconds)},
    )


def trial(before: Interval, *, predicted_rps: float = 200.0, before_predicted_rps: float = 150.0) -> Trial:
    kept = kept_share(before, before_predicted_rps)
    return Trial(epoch=3, predicted_rps=predicted_rps, before_kept=kept, before_predicted_rps=before_predicted_rps)


def judged(tried: Trial, now: Interval) -> Verdict | None:
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
def test_a_plan_keeps_a_share_of_the_expected_goodput(now: Interval, kept: float) -> None:
    assert kept_share(now, 200.0) == pytest.approx(kept)


def test_a_plan_that_misses_its_prediction_is_rolled_back() -> None:
    verdict = judged(trial(AS_PROMISED), served(300, 190, dropped=110))
    words = "keeps the plan: plan 3 gives 190/s in time, 95.0% of what was expected (200/s)"
    assert verdict == Verdict(change=False, words=words)
    words = "keeps the plan: plan 3 gives 20/s in time, 100.0% of what was expected (20/s)"
    assert judged(trial(AS_PROMISED), served(20, 20)) == Verdict(change=False, words=words)
    # 148 of 150 settled inputs were in time: of 300/s that is 148 of the 150/s that the plan could do.
    words = (
        "rolls back: plan 3 gives 100/s in time, 50.0% of what was expected (200/s); "
        "the one before kept 98.7% of its own and would give 148/s"
    )
    assert judged(trial(AS_PROMISED), served(300, 100, dropped=200)) == Verdict(change=True, words=words)
    nothing = judged(trial(AS_PROMISED), served(300, 0))
    assert nothing is not None
    assert nothing.change


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (served(300, 75, dropped=225), served(300, 110, dropped=190), "kept 50.0% of its own and would give 75/s"),
        (AS_PROMISED, served(300, 155, dropped=145), "155/s in time, 77.5% of what was expected (200/s); the one"),
    ],
)
def test_a_plan_is_kept_if_the_one_before_is_no_better(before: Interval, now: Interval, words: str) -> None:
    verdict = judged(trial(before), now)
    assert verdict is not None
    assert not verdict.change
    assert verdict.words.startswith("keeps the plan: ")
    assert words in verdict.words


def test_a_trial_waits_for_inputs_but_not_forever() -> None:
    assert judged(trial(AS_PROMISED), served(300, 0, seconds=5.0)) is None
    assert judged(trial(AS_PROMISED), served(1, 0)) is None
    words = "keeps plan 3: only 0 inputs arrived in 120 s, too few to judge"
    assert judged(trial(AS_PROMISED), served(0, 0, seconds=120.0)) == Verdict(change=False, words=words)


def ran(replica: str, slot: str, seconds: float, *, batches: int = 20, device: str = "T4") -> ReplicaTimes:
    """A replica that takes `seconds` per batch. The profile says one second."""
    taken_s = seconds * batches
    return ReplicaTimes(replica=replica, slot=slot, device=device, batches=batches, seconds=taken_s, expected_s=batches)


def slots(**seconds: list[float]) -> list[ReplicaTimes]:
    """Replicas named by slot and rank, such as `a0`."""
    return [ran(f"{slot}{rank}", slot, each) for slot, all_of in seconds.items() for rank, each in enumerate(all_of)]


def names(times: list[ReplicaTimes], *, resting: Collection[str] = ()) -> list[str]:
    return [each.replica for each in find_stragglers(times, 1.5, resting=resting)]


def test_at_most_a_third_of_the_replicas_of_a_type_rest() -> None:
    [(straggler, words)] = find_stragglers(slots(a=[1.0, 1.1, 1.8]), 1.5).items()
    assert (straggler.replica, straggler.slot, straggler.device) == ("a2", "a", "T4")
    assert words == "a2 takes 1.71 times as long as its 2 peers (1.80 against 1.05 times the profile)"
    assert names(slots(a=[1.0, 1.0, 1.0, 2.0, 3.0])) == ["a4"]
    times = slots(a=[1.0, 1.0, 1.0, 1.0, 2.0, 3.0])
    assert names(times) == ["a5", "a4"]
    assert names(times, resting={"a5"}) == ["a4"]
    assert names(slots(a=[1.0, 2.0])) == [], "one of two is more than a third"
    assert names([replace(each, variance_s2=60.0) for each in slots(a=[1.0, 1.0, 2.0])]) == [], "chance explains it"
    assert names([*slots(a=[1.0, 1.0]), ran("a2", "a", 5.0, batches=19)]) == [], "of few batches nothing is known"


def test_peers_share_the_slot_or_the_type_and_may_run_other_batches() -> None:
    assert names(slots(a=[3.0, 3.0, 3.0, 3.0], b=[3.0, 3.0], c=[3.0])) == []
    assert names(slots(a=[1.0] * 4, b=[2.0, 2.1])) == []
    assert names(slots(a=[1.0] * 4, b=[1.0, 2.0])) == ["b1"]
    assert names(slots(a=[2.0] * 4, b=[1.0, 2.0])) == []  # the other is quick
    assert names(slots(a=[1.0, 1.0, 1.0], b=[2.0])) == ["b0"]
    assert names([*slots(a=[1.0, 1.0, 1.0]), ran("b0", "b", 9.0, device="V100")]) == []
    small = replace(ran("a2", "a", 0.5, batches=20), expected_s=20 * 0.5)
    assert find_stragglers([*slots(a=[1.0, 1.0]), small], 1.5) == {}
