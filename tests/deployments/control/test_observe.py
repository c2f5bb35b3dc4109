"""Counts between reports, forecasts from them, the proposed plan, and missing accelerators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.controller.decide import problems_to_solve, propose
from deployments.controller.observe import BELIEVED_S, ObservedStream, effective_probes, window_rates
from deployments.controller.observe import MissingAccelerators as Missing
from deployments.controller.remember import State
from deployments.controller.settings import thresholds_of
from deployments.settings import ControlSettings
from deployments.wire.messages import (
    BUCKET,
    IngressReport,
    Interval,
    ReplicaReport,
    counts_between,
    latency_s,
    ran_since,
    total,
)
from earlyexit.engine.engine import TimesRun
from earlyexit.errors import DataError, PlanError
from earlyexit.network.boundary import Split
from optimizer.cost.evaluate import evaluate
from optimizer.live.plan_changes import StartCost, best_after_starts
from optimizer.plans.plan import PlacedPlan, Plan, Stage
from optimizer.problems.problem import MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem, Reach
from optimizer.search.decision import Decision, Planned, Strategy
from optimizer.search.planner import solve
from profiles.lengths import Lengths
from profiles.stream import Observations, empty
from tests.deployments.control.control_fakes import (
    EASY,
    POLICY,
    RAMPS,
    SHAPE,
    START_S,
    begun,
    halves,
    ingress,
    no_plan,
    planned,
    probes,
    problem,
    replica,
    whole,
)
from tests.optimizer.brute_force import BruteForce


def ran(*times: tuple[int, float], name: str = "r") -> ReplicaReport:
    """Returns the report of a replica with batches of 1, 2, ... inputs and their seconds."""
    runs = (
        TimesRun(first=0, end=4, ramps=(), size=size, batches=batches, tokens=size * batches, seconds=seconds)
        for size, (batches, seconds) in enumerate(times, start=1)
    )
    return replica(tuple(runs), name=name)


def since(before: Sequence[IngressReport], *now: IngressReport) -> Interval | None:
    return counts_between({report.name: report for report in before}, now, 5.0, 10.0)


def test_an_interval_has_what_was_counted_since_each_ingresss_last_report() -> None:
    before = [ingress("a", arrived=10), ingress("b", arrived=20)]
    interval = since(before, ingress("a", arrived=13), ingress("b", arrived=24), ingress("c", arrived=2))
    assert interval == Interval(since_s=5.0, at_s=10.0, arrived=9, answered=9, in_slo=9)
    assert since(before) is total([]) is None


async def test_counts_of_an_ingress_that_does_not_report_are_made_up_for_later(tmp_path: Path) -> None:
    scene = await begun(tmp_path)
    scene.restart()
    for scene.fleet.broken in ({"reports"}, set(), {"reports"}, set()):
        await scene.ticks(1, EASY)
    (interval,) = scene.loop.stream.intervals(scene.clock.now_s() - 10.0)
    assert (interval.seconds, interval.arrived, interval.exits) == (10.0, 200, {3: 200})
    assert sum(map(len, scene.history.probes())) == (23 + 4) * 100


def test_the_counts_of_an_interval_are_differences_under_any_plan() -> None:
    crossed: dict[str, Any] = {"crossings": {6: 10}, "crossing_s": {6: 1.0}, "words": {6: 100}, "pruned_words": {6: 14}}
    later: dict[str, Any] = {
        **{"crossings": {6: 14, 18: 2}, "crossing_s": {6: 1.5, 18: 0.5}},
        **{"words": {6: 150}, "pruned_words": {6: 20}},
    }
    first = ingress(epoch=1, exits={1: 50}, drops={"deadline": 2}, **crossed)
    second = ingress(epoch=1, exits={1: 53, 3: 1}, drops={"deadline": 2}, **crossed)
    same, other = (
        since([first], second),
        since([second], ingress(epoch=2, exits={1: 57, 3: 1}, drops={"deadline": 3}, **later)),
    )
    assert same is not None
    assert other is not None
    assert (same.exits, same.drops, same.crossings) == ({1: 3, 3: 1}, {}, {})
    assert (other.exits, other.drops) == ({1: 4}, {"deadline": 1})
    assert (other.crossings, other.crossing_s) == ({6: 4, 18: 2}, {6: 0.5, 18: 0.5})
    assert (other.words, other.pruned_words) == ({6: 50}, {6: 6})


def test_a_quantile_is_the_upper_end_of_its_bucket() -> None:
    assert latency_s({0: 98, 10: 2}, 0.5) == pytest.approx(BUCKET)
    assert latency_s({0: 98, 10: 2}, 0.99) == pytest.approx(BUCKET**11)
    assert latency_s({}, 0.5) is None


def test_batches_are_counted_since_the_baseline_or_from_zero() -> None:
    (run,) = ran_since(ran((10, 1.0), (4, 2.0)), ran((15, 1.75), (4, 2.0)))
    assert (run.size, run.batches, run.seconds) == (1, 5, 0.75)
    (run,) = ran_since(None, ran((3, 0.5), name="new"))
    assert run.batches == 3


PLAN = Plan(stages=halves(3, 1), policy=POLICY)
PERIOD_S = 120.0
STATE = State.first(PlacedPlan(plan=PLAN), thresholds_of(POLICY, problem()), START_S)


def known(asked: PlanProblem | None = None, since_s: float = START_S) -> ObservedStream:
    settings = {"problem": asked or problem(), "policy": POLICY, "state": "", "period_s": PERIOD_S}
    return ObservedStream(ControlSettings.model_validate(settings), since_s)


def seen(at_s: float, *, leaving: int, staying: int) -> Observations:
    num = leaving + staying
    return probes([at_s] * num, [True] * leaving + [False] * staying, PLAN)


def asked_of(
    stream: ObservedStream, now_s: float, counts: Mapping[str, int], last: PlanProblem | None = None
) -> tuple[PlanProblem, ...]:
    return problems_to_solve(stream.problem, last or stream.problem, stream.forecast(STATE, now_s), counts)


def counted(arrived: int, since_s: float, at_s: float) -> Interval:
    return Interval(since_s=since_s, at_s=at_s, arrived=arrived)


@pytest.mark.parametrize(
    ("leaving", "staying", "survival", "how"),
    [
        pytest.param(0, 0, 0.4, "expected", id="before anything was seen"),
        pytest.param(
            0, 15, 0.7, "worth 15 probes, and what was expected", id="15 of the 30 that would do: half of each"
        ),
        pytest.param(6, 24, 0.8, "worth 30 probes", id="enough are believed alone"),
    ],
)
def test_few_probes_share_weight_with_the_prior(leaving: int, staying: int, survival: float, how: str) -> None:
    stream = known()
    stream.add_probes(seen(START_S + 5.0, leaving=leaving, staying=staying))
    forecast = stream.forecast(STATE, START_S + 10.0)
    assert forecast.survival.next_survival == pytest.approx((1.0, 1.0, survival, survival))
    assert (forecast.num_probes, forecast.how) == (leaving + staying, how)
    if leaving + staying == 15:
        assert forecast.survival.survival_low_K[2] <= 0.4
        assert forecast.survival.survival_high_K[2] >= 0.9


def test_the_incomplete_first_window_is_kept() -> None:
    stream = known(since_s=START_S + 50.0)
    state = replace(STATE, changed_s=START_S + 50.0)
    stream.add_probes(seen(START_S + 60.0, leaving=6, staying=24))
    assert effective_probes(stream.observed(state, START_S + 50.0, START_S + 70.0)) == 30
    assert stream.forecast(state, START_S + PERIOD_S + 1.0).how == "worth 30 probes"


def test_forecasts_use_complete_windows() -> None:
    stream = known()
    stream.add_probes(seen(START_S + 5.0, leaving=50, staying=50))
    stream.add_probes(seen(START_S + PERIOD_S + 5.0, leaving=0, staying=7))  # of a window that is not complete yet
    forecast = stream.forecast(STATE, START_S + PERIOD_S + 10.0)
    assert forecast.survival.next_survival == pytest.approx((1.0, 1.0, 0.5, 0.5))
    assert (forecast.num_probes, forecast.how) == (100, "1 windows")


def test_forecasts_ignore_probes_from_before_a_change_of_the_stream() -> None:
    stream = known()
    stream.add_probes(seen(START_S + 5.0, leaving=50, staying=50))
    changed = replace(STATE, changed_s=START_S + 50.0)
    stream.add_probes(seen(START_S + 60.0, leaving=0, staying=40))
    forecast = stream.forecast(changed, START_S + PERIOD_S + 10.0)
    assert forecast.survival.next_survival == pytest.approx((1.0, 1.0, 1.0, 1.0))
    records = stream.records(changed, START_S + PERIOD_S + 10.0)
    assert records is not None
    assert len(records) == 40


def test_plans_are_scored_on_recent_probes_if_there_are_enough() -> None:
    stream = known()
    stream.add_probes(seen(START_S + 5.0, leaving=20, staying=20))
    assert stream.records(STATE, START_S + 4.0) is None
    near, far = stream.records(STATE, START_S + 10.0), stream.records(STATE, START_S + 5 * PERIOD_S)
    assert near is not None
    assert far is not None
    assert (len(near), len(far)) == (40, 40)
    assert near.outcome({1: 0.5}).survival == (1.0, 1.0, 0.5, 0.5)


def stayed(at_s: float, *, leaving: int, staying: int) -> Observations:
    """Returns inputs that stayed, which were not observed at the inactive ramps 0 and 2."""
    sampled = seen(at_s, leaving=leaving, staying=staying)
    probe_N = np.zeros(len(sampled), dtype=bool)
    unseen_NR = np.where(sampled.active_NR, np.float32(0.0), np.float32(np.nan))
    return replace(
        sampled, probe_N=probe_N, stayed_N=~probe_N, scores_NR=sampled.scores_NR + unseen_NR, losses_NR=unseen_NR
    )


def test_effective_probes_are_limited_by_inactive_ramps() -> None:
    stream = known()
    stream.add_probes(stayed(START_S + 5.0, leaving=5_000, staying=5_000))
    stream.add_probes(seen(START_S + 6.0, leaving=0, staying=3))
    for now_s in (START_S + 10.0, START_S + PERIOD_S + 10.0):
        forecast = stream.forecast(STATE, now_s)
        assert 3 <= forecast.num_probes <= 6
        assert forecast.how.endswith("what was expected")
        assert forecast.survival.next_survival[2] < 0.6  # calibrated: 0.4; by the probes alone: 1


def test_inputs_that_stayed_under_all_ramps_count_as_probes() -> None:
    every = replace(
        PLAN, stages=(Stage(device="cpu", replicas=1, splits=(Split(first=0, end=4, batch=4, ramps=RAMPS),)),)
    )
    sampled = probes([START_S + 5.0] * 40, [True] * 10 + [False] * 30, every)
    probe_N = np.zeros(40, dtype=bool)
    stream = known()
    stream.add_probes(replace(sampled, probe_N=probe_N, stayed_N=~probe_N))
    forecast = stream.forecast(STATE, START_S + PERIOD_S + 10.0)
    assert (forecast.num_probes, forecast.how) == (40, "1 windows")
    assert forecast.survival.next_survival == pytest.approx((1.0, 1.0, 0.75, 0.75))


def test_probes_with_another_score_start_a_new_stream() -> None:
    stream = known()
    stream.add_probes(seen(START_S + 5.0, leaving=20, staying=20))
    stream.add_probes(replace(seen(START_S + 6.0, leaving=0, staying=35), shape=replace(SHAPE, score="entropy")))
    assert stream.forecast(STATE, START_S + 10.0).num_probes == 35
    with pytest.raises(DataError, match="probes have 6 blocks"):
        stream.add_probes(empty(replace(SHAPE, num_blocks=6)))


def test_arrivals_of_an_interval_are_divided_between_its_windows() -> None:
    counts = [counted(60, START_S, START_S + 60.0), counted(120, START_S + 60.0, START_S + 180.0)]
    rates = window_rates(counts, START_S, START_S + 2 * PERIOD_S, PERIOD_S)
    # (60 + 60) / 120 s, and 60 in the 60 s of the second window that were counted.
    assert rates.tolist() == [1.0, 1.0]
    assert np.isnan(window_rates(counts[:1], START_S, START_S + 3 * PERIOD_S, PERIOD_S)).tolist() == [False, True, True]


def cheap(rate_per_s: float) -> PlanProblem:
    return replace(problem(), objective=MinimizeCost(rate_per_s=rate_per_s))


def rates_asked(stream: ObservedStream, now_s: float, last: PlanProblem | None = None) -> list[float | None]:
    return [each.required_per_s for each in asked_of(stream, now_s, {"cpu": 3}, last)]


def test_the_highest_rate_is_planned_on_the_available_accelerators() -> None:
    stream = known()
    (asked,) = asked_of(stream, START_S + 1.0, {"cpu": 3})
    assert (asked.objective, asked.devices["cpu"].count) == (MaximizeRate(), 3)
    (asked,) = asked_of(stream, START_S + 1.0, {})
    assert asked.devices["cpu"].count == 0


def test_early_answers_are_planned_at_the_forecast_rate_or_else_the_highest_rate() -> None:
    sooner = replace(problem(), objective=MinimizeLatency(rate_per_s=10.0, ramp_budget=0.02))
    stream = known(sooner)
    stream.add_interval(counted(50 * 120, START_S, START_S + PERIOD_S))
    asked = asked_of(stream, START_S + PERIOD_S, {"cpu": 3})
    assert [type(each.objective) for each in asked] == [MinimizeLatency, MaximizeRate]
    assert [each.required_per_s for each in asked] == [pytest.approx(50.0), None]
    assert asked[0].ramp_budget == 0.02


def test_the_least_cost_is_planned_at_the_upper_end_of_the_forecast_rate_first() -> None:
    stream = known(cheap(100.0))
    for window in range(10):
        begin_s = START_S + window * PERIOD_S
        stream.add_interval(counted(2400 + 24 * (window % 2), begin_s, begin_s + PERIOD_S))
    upper, named, most = rates_asked(stream, START_S + 10 * PERIOD_S)
    assert upper is not None
    assert 20.0 < upper < 25.0
    assert (named, most) == (100.0, None)


def test_after_a_single_window_plans_serve_at_least_the_original_or_the_last_rate() -> None:
    stream = known(cheap(100.0))
    stream.add_interval(counted(50 * 120, START_S, START_S + PERIOD_S))
    assert rates_asked(stream, START_S + PERIOD_S) == [100.0, None]
    assert rates_asked(stream, START_S + PERIOD_S, cheap(70.0)) == [70.0, 100.0, None]
    assert rates_asked(stream, START_S + PERIOD_S, cheap(30.0)) == [pytest.approx(50.0), 100.0, None]
    for last in (problem(), cheap(400.0)):  # of the highest rate, or of a jump that is over
        assert rates_asked(stream, START_S + PERIOD_S, last) == [100.0, None]
    stream = known(cheap(10.0))
    stream.add_interval(counted(50 * 120, START_S, START_S + PERIOD_S))
    assert rates_asked(stream, START_S + PERIOD_S) == [pytest.approx(50.0), None]


# Lengths


def with_lengths() -> PlanProblem:
    tiny = problem()
    return replace(tiny, latency={"cpu": replace(tiny.latency["cpu"], length=32)}, lengths=Lengths.of([10, 10, 40]))


def answered(num: int, tokens: int, at_s: float) -> Interval:
    return Interval(since_s=at_s - 10.0, at_s=at_s, arrived=num, answered=num, answered_tokens=tokens)


def test_lengths_are_the_problems_until_enough_inputs_were_answered() -> None:
    stream = known(with_lengths())
    stream.add_interval(answered(200, 8000, START_S + 10.0))
    assert stream.forecast(STATE, START_S + 20.0).lengths == Lengths.of([10, 10, 40])
    stream.add_interval(answered(200, 8000, START_S + 20.0))
    (question,) = asked_of(stream, START_S + 20.0, {"cpu": 4})
    assert question.lengths == Lengths.of([20, 20, 80])


Stages = tuple[Stage, ...]


class FakePlanner:
    """A planner that returns the given plans, the best one first."""

    def __init__(self, *best: Stages) -> None:
        self._best = best
        self.asked: list[tuple[float | None, Strategy]] = []
        self.too_fast_per_s = self.unknown_per_s = float("inf")

    async def solve(self, asked: PlanProblem, strategy: Strategy) -> Decision:
        rate_per_s = asked.objective.rate_per_s if isinstance(asked.objective, MinimizeCost) else None
        self.asked.append((rate_per_s, strategy))
        if (rate_per_s or 0.0) > self.unknown_per_s:
            raise PlanError("no plan was found, though there may be one")
        if not self._best or (rate_per_s or 0.0) > self.too_fast_per_s:
            return no_plan()
        return replace(planned(asked, self._best[0]), candidates=self._best[1:])


async def proposed(
    planner: FakePlanner, *problems: PlanProblem, blamed: Sequence[Stages] = (), reach: Reach | None = None
) -> Planned:
    tried, free = problems or (problem(),), StartCost(running={"cpu": 4}, start_s=0.0, period_s=1.0)
    _, found = await propose(tried, planner.solve, "best", blamed=blamed, reach=reach, start_cost=free)
    assert isinstance(found, Planned)
    return found


async def test_an_alternative_plan_must_keep_the_promises_of_the_best_one() -> None:
    blamed = (whole(4),)
    planner = FakePlanner(whole(4), halves(4, 1), halves(2, 2))  # five accelerators, of four
    assert (await proposed(planner, blamed=blamed)).stages == halves(2, 2)


async def test_records_may_prefer_another_plan() -> None:
    # All 1.0 at block 2: no input leaves at ramp 1, so that the second half needs as much as the first.
    planner = FakePlanner(halves(3, 1), halves(2, 2))
    found = await proposed(planner, reach=lambda active: (1.0, 1.0, 1.0, 1.0))
    assert found.stages == halves(2, 2)
    assert found.figures.rate_per_s == 400.0


@pytest.mark.parametrize(("start_s", "started"), [(10.0, 1), (60.0, 1), (150.0, 0), (600.0, 0)])
async def test_the_best_plan_after_the_cost_of_its_starts_is_chosen(start_s: float, started: int) -> None:
    async def solve_exactly(asked: PlanProblem, strategy: Strategy) -> Decision:
        return solve(asked, strategy)

    asked, cost = problem(count=5), StartCost(running={"cpu": 4}, start_s=start_s, period_s=120.0)
    _, found = await propose((asked,), solve_exactly, "best", blamed=(), reach=None, start_cost=cost)
    assert isinstance(found, Planned)
    chosen, _ = best_after_starts(asked, found, cost)
    most, without = (BruteForce(each).best("best") for each in (asked, problem(count=4)))  # with 5 and with 4
    assert most is not None
    assert without is not None
    worth = [
        evaluate(asked, each).rate_per_s - cost.share(each) * most.figures.rate_per_s
        for each in (chosen, most.stages, without.stages)
    ]
    assert worth[0] == pytest.approx(max(worth))
    assert cost.num_started(chosen) == started


@pytest.mark.parametrize("limit", ["too_fast_per_s", "unknown_per_s"], ids=["no plan", "neither found nor ruled out"])
async def test_problems_are_solved_until_one_has_a_plan(limit: str) -> None:
    dear, cheap = (replace(problem(), objective=MinimizeCost(rate_per_s=rate)) for rate in (900.0, 300.0))
    planner = FakePlanner(whole(4))
    setattr(planner, limit, 400.0)
    assert (await proposed(planner, dear, cheap, problem())).stages == whole(4)
    assert planner.asked == [(900.0, "best"), (300.0, "best")]
    if limit == "unknown_per_s":
        with pytest.raises(PlanError, match="there may be one"):
            await proposed(planner, dear, dear)


ALL, WITHOUT_STAGE, FOLLOWED = {"cpu": 4}, {"cpu": 1}, State.first(PlacedPlan(plan=PLAN), {}, 0.0)


def left(missing: Missing, running: dict[str, int], at_s: float, *, counted: int = 6, state: State = FOLLOWED) -> int:
    return missing.available({"cpu": counted}, running, state, at_s)["cpu"]


def given_up() -> Missing:
    """Returns the detector after a stage was without replicas from 5 to 35 s."""
    missing = Missing()
    looks = [(ALL, 0.0), *((WITHOUT_STAGE, 5.0 * k) for k in range(1, 8))]
    assert [left(missing, running, at_s) for running, at_s in looks] == [6] * 7 + [1]
    return missing


def test_a_stage_that_lacks_replicas_for_20_s_is_not_given_up() -> None:
    missing = Missing()
    assert [left(missing, WITHOUT_STAGE, 600.0 * k) for k in range(5)] == [6] * 3 + [1] * 2, "it never starts"
    missing = Missing()
    assert {left(missing, each, 5.0 * k) for k, each in enumerate([*[ALL, *[WITHOUT_STAGE] * 5] * 2, ALL])} == {6}
    assert left(missing, WITHOUT_STAGE, 120.0) == 6, "a search for a plan took a minute"
    assert left(missing, WITHOUT_STAGE, 150.0, state=replace(FOLLOWED, at_s=145.0)) == 6, "the plan has changed"


def test_missing_accelerators_become_available_again() -> None:
    missing = given_up()
    assert left(missing, WITHOUT_STAGE, 36.0) == 1
    assert left(missing, WITHOUT_STAGE, 38.0, counted=5) == 5
    assert left(missing, WITHOUT_STAGE, 40.0) == 6
    assert left(given_up(), ALL, 40.0) == 6
    missing, state = given_up(), replace(FOLLOWED, suspended="no plan")
    assert [left(missing, WITHOUT_STAGE, 35.0 + BELIEVED_S - each, state=state) for each in (1.0, 0.0)] == [1, 6]
