from __future__ import annotations

import re
from dataclasses import replace

import pytest

from earlyexit.network.boundary import Split
from optimizer.cost.evaluate import evaluate
from optimizer.cost.explain import answered_by, bottlenecks, no_plan_text, times_better
from optimizer.plans.plan import Stage
from optimizer.problems.problem import Link, MinimizeCost, PlanProblem, Slo, Supply
from optimizer.problems.problem_file import parse_problem
from optimizer.search.decision import Binding, NoPlan, Planned, Strategy
from optimizer.search.planner import solve
from tests.optimizer.answers import refused
from tests.optimizer.plain_problem import BEST, DOCUMENT

PROBLEM = parse_problem(DOCUMENT).problem
LATENCY_S = 0.001 + 0.001 + 0.001 + 0.001 + 2e-6
"""Stage 0 fills 4 at 4000/s in 1 ms, stage 1 fills 2 at 2000/s in 1 ms; each runs 1 ms; 2 kB hop at 1 GB/s."""


def planned(problem: PlanProblem, stages: tuple[Stage, ...] = BEST, strategy: Strategy = "best") -> Planned:
    return Planned(strategy=strategy, stages=stages, figures=evaluate(problem, stages), bound=4000.0, gap=0.0)


def texts(problem: PlanProblem, stages: tuple[Stage, ...] = BEST) -> list[str]:
    return [each.text for each in bottlenecks(problem, stages, evaluate(problem, stages))]


def test_the_slowest_stage_a_slow_link_and_fully_used_devices_are_bottlenecks() -> None:
    [bind] = bottlenecks(PROBLEM, BEST, evaluate(PROBLEM, BEST))
    assert (bind.kind, bind.stage_index, bind.text) == ("stage", 0, "stage 0 serves at most 4000/s")
    slow = replace(PROBLEM, link=Link(bandwidth_bytes_per_s=1e6))  # 2 kB take 2 ms: 4 inputs in 2 ms
    [bind] = bottlenecks(slow, BEST, evaluate(slow, BEST))
    assert (bind.kind, bind.stage_index, bind.text) == ("hop", 0, "the hop after stage 0 carries at most 2000/s")
    shared = replace(PROBLEM, devices={"V100": Supply(count=4, per_node=1000)})  # each has 1 MB/s
    assert texts(shared) == [f"{bind.text}; 1000 accelerators of a node share its network card"]
    devices = {"V100": Supply(count=3), "T4": Supply(count=0)}
    three = replace(PROBLEM, devices=devices, latency=dict.fromkeys(devices, PROBLEM.latency["V100"]))
    assert texts(three) == ["stage 0 serves at most 4000/s", "all 3 V100 are used"]


def test_if_the_cost_is_minimized_stages_that_can_spare_no_replica_are_bottlenecks() -> None:
    """Stage 0 has one replica; stage 1 would serve 4000/s with one of its two."""
    assert texts(replace(PROBLEM, objective=MinimizeCost(rate_per_s=3000))) == [
        "stage 0 would serve 0/s with one replica less, and 3000/s are required"
    ]
    stages = (replace(BEST[0], replicas=2), BEST[1])  # 8000/s, so 4000/s with one less
    assert texts(replace(PROBLEM, objective=MinimizeCost(rate_per_s=5000)), stages) == [
        "stage 0 would serve 4000/s with one replica less, and 5000/s are required",
        "stage 1 would serve 4000/s with one replica less, and 5000/s are required",
        "all 4 V100 are used",
    ]


@pytest.mark.parametrize(("above", "is_bound"), [(1.019, True), (1.03, False)])
def test_a_latency_near_its_limit_binds(above: float, is_bound: bool) -> None:
    near = replace(PROBLEM, slo=Slo(latency_s=LATENCY_S * above, slack=0.0))
    assert any(text.startswith("the latency of 4.002 ms is at its limit of 4.0") for text in texts(near)) is is_bound


@pytest.mark.parametrize(("budget", "is_bound"), [(11.9, True), (12.0, False)])
def test_a_budget_that_pays_for_no_further_device_binds(budget: float, is_bound: bool) -> None:
    tight = replace(PROBLEM, budget_usd_per_hour=budget)
    said = f"of the budget of {budget:.2f} USD/h, {budget - 9:.2f} are left: less than one more device"
    assert (said in texts(tight)) is is_bound


def test_an_explanation_has_mean_fills_and_the_gain_over_a_strategy() -> None:
    whole = Stage(device="V100", replicas=2, splits=(Split(first=0, end=2, batch=4, ramps=(0,)),))
    stock = planned(PROBLEM, (replace(whole, splits=(Split(first=0, end=2, batch=4),)),), "stock")
    early = planned(PROBLEM, (whole,), "early-exit")
    assert [each.fill for each in early.figures.splits] == [0.75]  # 4 of 4, then 2 of 4
    assert times_better(PROBLEM, planned(PROBLEM), stock) == pytest.approx(1.0)  # 2 x 4 in 2 ms is 4000/s, too


def test_rates_and_costs_are_compared_if_there_are_plans_and_prices() -> None:
    half = (replace(BEST[0], splits=(Split(first=0, end=1, batch=2, ramps=(0,)),)), BEST[1])  # 2 inputs in 1 ms
    dear = (BEST[0], replace(BEST[1], replicas=3))  # 4 devices, not 3
    cheapest = replace(PROBLEM, objective=MinimizeCost(rate_per_s=2000))
    assert times_better(PROBLEM, planned(PROBLEM), planned(PROBLEM, half)) == pytest.approx(2.0)
    assert times_better(cheapest, planned(cheapest), planned(cheapest, dear)) == pytest.approx(4 / 3)
    free = replace(PROBLEM, devices={"V100": Supply(count=4)}, objective=MinimizeCost(rate_per_s=2000))
    none = NoPlan(strategy="stock", binding="latency")
    assert times_better(PROBLEM, planned(PROBLEM), none) is None
    assert times_better(PROBLEM, none, planned(PROBLEM)) is None
    assert times_better(free, planned(free), planned(free)) is None


def test_an_infeasible_latency_is_reported_with_the_nearest_feasible_one() -> None:
    tight = replace(PROBLEM, slo=Slo(latency_s=0.005, slack=0.2))
    decision = NoPlan(strategy="best", binding="latency", nearest_slo_s=0.0073)
    assert no_plan_text(tight, decision) == (
        "no plan: the SLO of 5 ms (4 ms after 20 % slack) binds; the tightest SLO with a plan is 7.3 ms"
    )
    none = replace(PROBLEM, devices={"V100": Supply(count=0)}, slo=Slo(latency_s=0.1, slack=0))
    said = no_plan_text(none, NoPlan(strategy="best", binding="devices"))
    assert said == "no plan: the devices (0 V100) are too few; no other SLO or rate has a plan"
    slo = no_plan_text(none, NoPlan(strategy="best", binding="latency"))
    assert slo == "no plan: the SLO of 100 ms binds; no other SLO or rate has a plan"


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        ("devices", "the devices (4 V100) are too few for 9000/s; the highest rate with a plan is 8000/s"),
        ("budget", "the budget of 10.00 USD/h is too small for 9000/s; the highest rate with a plan is 8000/s"),
    ],
)
def test_too_few_devices_and_a_too_small_budget_are_reported_with_a_feasible_rate(binding: Binding, said: str) -> None:
    asked = replace(PROBLEM, objective=MinimizeCost(rate_per_s=9000), budget_usd_per_hour=10)
    decision = NoPlan(strategy="best", binding=binding, highest_rate_per_s=8000)
    assert no_plan_text(asked, decision) == f"no plan: {said}"
    more = "the rate needs at least 2 more V100"
    assert no_plan_text(asked, replace(decision, more=("V100", 2))) == f"no plan: {said}; {more}"


def test_the_limits_that_would_do_are_rounded_to_limits_that_do() -> None:
    slower = replace(PROBLEM, latency={"V100": PROBLEM.latency["V100"].times(1.00031)})
    tight, fast = replace(slower, slo=Slo(latency_s=0.001)), replace(slower, objective=MinimizeCost(rate_per_s=1e5))
    [slo] = re.findall("tightest SLO with a plan is (.*) ms", no_plan_text(tight, refused(tight)))
    [rate] = re.findall("highest rate with a plan is (.*)/s", no_plan_text(fast, refused(fast)))
    assert isinstance(solve(replace(tight, slo=Slo(latency_s=float(slo) / 1e3))), Planned)
    assert isinstance(solve(fast.with_rate(float(rate))), Planned)
    # Single inputs run both blocks in 2 ms, and wait for no others.
    assert float(slo) == pytest.approx(1e3 * 2e-3 * 1.00031 / 0.8, rel=0.01)


def test_the_share_of_inputs_that_each_network_answers_is_reported() -> None:
    """Half of the inputs leave after block 0, which is a network of its own; or no input enters that network."""
    chain = replace(PROBLEM, networks=(1, 2))
    both = Stage(device="V100", replicas=1, splits=(Split(first=0, end=1, batch=4, ramps=(0,)), split(1, 2)))
    alone = Stage(device="V100", replicas=1, splits=(split(1, 2),))
    assert answered_by(chain, (both,)) == {0: 0.5, 1: 0.5}
    assert answered_by(chain, (alone,)) == {1: 1.0}
    assert answered_by(PROBLEM, BEST) == {}
    # Every input is computed in the second network; half of them have their answer by then.
    splits = (Split(first=0, end=1, batch=4, ramps=(0,)), split(1, 2))
    stays = Stage(device="V100", replicas=1, splits=tuple(replace(each, after_answer="stay") for each in splits))
    assert [each.reached_by for each in evaluate(chain, (stays,)).splits] == [1, 1]
    assert answered_by(chain, (stays,)) == {0: 0.5, 1: 0.5}


def split(first: int, end: int) -> Split:
    return Split(first=first, end=end, batch=4)
