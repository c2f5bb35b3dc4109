"""The planner is exact: on small random problems, no plan of a strategy's space is better than its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count, product
from pathlib import Path
from time import process_time

import numpy as np
import pytest

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import best_value, evaluate, merit, objective_value, violations
from optimizer.problems.problem import (
    Ingresses,
    Link,
    MaximizeRate,
    MinimizeCost,
    MinimizeLatency,
    PlanProblem,
    Slo,
    Supply,
)
from optimizer.problems.problem_file import parse_problem, problem_document, read_problem
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import SLO_RESOLUTION, STRATEGIES, NoPlan, Planned, Strategy
from optimizer.search.exact import ExactSearch
from optimizer.search.kernels import small_problem
from optimizer.search.moves import build_graph
from optimizer.search.planner import more_devices, solve
from optimizer.search.soonest.solve import RATE_RESOLUTION, search_soonest
from optimizer.search.space import MAX_LABELS, SPACES
from profiles.table import LatencyTable
from tests.optimizer.answers import AGREE, Answers, check_against_brute_force, chunks, planned, refused, within
from tests.optimizer.brute_force import BruteForce
from tests.optimizer.plain_problem import DOCUMENT, plain_problem, random_latency_problem, random_problem, some_sizes

PROBLEMS = 500
FEW: dict[Strategy, int] = {"best": 60, "stock": 24, "early-exit": 24, "e3": 24, "serial": 24}
"""Problems by default; the rest is for `make test-all`."""

each_chunk = chunks(FEW, PROBLEMS)


@cache
def answers(seed: int, strategy: Strategy) -> Answers:
    return Answers.to(random_problem(seed), strategy)


@each_chunk
def test_the_planner_equals_brute_force_and_proves_optimality(strategy: Strategy, seeds: range) -> None:
    found = {seed: answers(seed, strategy) for seed in seeds}
    check_against_brute_force(found, strategy, lambda problem, figures: merit(problem, figures)[0])


def test_the_best_plan_with_room_for_queues_is_no_dearer_than_one_of_another_strategy() -> None:
    # Without queues, a slower plan is as cheap and quicker. It has no room for queues.
    problem = replace(random_problem(98), objective=MinimizeCost(rate_per_s=17, in_time=0.99))
    best, other = planned(problem), planned(problem, "early-exit")
    assert best.figures.usd_per_hour == best.bound == other.figures.usd_per_hour
    assert (best.strategy, best.gap) == ("best", 0)


@each_chunk
def test_the_nearest_limits_of_an_infeasible_problem_are_returned(strategy: Strategy, seeds: range) -> None:
    without = [seed for seed in seeds if isinstance(answers(seed, strategy).decision, NoPlan)]
    assert without
    for seed in without:
        problem, decision = answers(seed, strategy).problem, answers(seed, strategy).decision
        assert isinstance(decision, NoPlan)
        slo_s, rate_per_s = nearest(problem, strategy)
        assert within(decision.highest_rate_per_s, rate_per_s, 0.0), f"problem {seed}: {decision}, twin {rate_per_s}"
        assert within(decision.nearest_slo_s, slo_s, SLO_RESOLUTION), f"problem {seed}: {decision}, twin {slo_s}"


def test_e3_keeps_a_batch_that_a_smaller_one_beats_in_one_split() -> None:
    # Of 10 inputs 9 leave after block 0, which is faster at batch 1 (1000/s) than at 4 (4 / 0.005 = 800/s). But then
    # block 1 does 1 / (0.1 * 0.100) = 100/s, against 4 / (0.1 * 0.010) = 4000/s at batch 4, and E3 has one batch.
    table = LatencyTable.of_rows((1, 4), [[0.001, 0.005], [0.100, 0.010]], [[0.0, 0.0]])
    problem = plain_problem(survival_N=(1.0, 0.1), latency={"cpu": table}, devices={"cpu": Supply(count=2)})
    assert planned(problem, "e3").figures.rate_per_s == pytest.approx(4 / 0.005)


def test_a_rate_that_is_too_high_names_the_accelerators_that_are_missing() -> None:
    problem = parse_problem({**DOCUMENT, "objective": {"minimize": "cost", "rate_per_s": 30_000}}).problem
    refused(problem)
    # An input takes 0.001 / 4 + 0.5 * 0.001 / 4 seconds: 8 V100 for block 0 and 4 for block 1; 4 are available.
    assert more_devices(problem, "best") == ("V100", 8)
    enough = replace(problem, devices={"V100": replace(problem.devices["V100"], count=12)})
    planned(enough)
    hasty = replace(problem, slo=Slo(latency_s=0.001))
    assert more_devices(hasty, "best") is None  # a block takes longer, on any number of V100
    # T4 is free, but a block takes 100 ms there, and 80 are allowed. Together, the mean would be below that.
    latency = {**problem.latency, "T4": problem.latency["V100"].times(100)}
    slow = replace(problem.with_rate(12_000), latency=latency, devices={**problem.devices, "T4": Supply(count=1)})
    assert more_devices(slow, "best") == ("V100", 1)


def nearest(problem: PlanProblem, strategy: Strategy) -> tuple[float | None, float | None]:
    """Returns the least feasible SLO latency and, if a rate is required, the highest feasible rate."""
    least_s = BruteForce(problem).least_latency_s(strategy)
    slo_s = None if least_s is None else least_s / (1 - problem.slo.slack)
    if isinstance(problem.objective, MaximizeRate):
        return slo_s, None
    # Batches fill faster at a higher rate, so a plan's latency is least at its highest rate.
    fastest = BruteForce(replace(problem, objective=MaximizeRate())).best(strategy)
    return slo_s, None if fastest is None else fastest.figures.rate_per_s


MOST = 40
"""Limits of labels, below the hundreds that the problem needs."""


def test_a_search_proves_its_plan_if_labels_suffice_and_else_returns_a_bound() -> None:
    graph = build_graph(small_problem(), SPACES["best"])
    search = partial(ExactSearch, graph=graph, space=SPACES["best"], incumbent=0.0)
    answer = search(labels_left=MOST).highest_rate()
    best = planned(small_problem())
    assert not answer.is_proven(small_problem())
    assert answer.bound >= best.figures.rate_per_s
    answer = search(labels_left=MAX_LABELS).highest_rate()
    assert answer.is_proven(small_problem())
    assert answer.bound == answer.plans[0].figures.rate_per_s


@pytest.mark.parametrize("objective", [MaximizeRate(), MinimizeCost(rate_per_s=4000)], ids=["rate", "cost"])
def test_where_the_exact_search_gives_up_there_is_a_plan_and_a_gap(objective: MaximizeRate | MinimizeCost) -> None:
    asked = replace(small_problem(), objective=objective)
    exact = planned(asked)
    given_up = planned(asked, replace(SPACES["best"], max_labels=MOST))
    assert violations(asked, given_up.stages, evaluate(asked, given_up.stages)) == []
    if isinstance(objective, MinimizeCost):
        assert given_up.bound <= exact.figures.usd_per_hour * (1 + 1e-9)
        assert given_up.figures.usd_per_hour <= given_up.bound * (1 + given_up.gap) * (1 + 1e-9)
    else:
        assert given_up.bound >= exact.figures.rate_per_s * (1 - 1e-9)
        assert given_up.figures.rate_per_s >= given_up.bound * (1 - given_up.gap) * (1 - 1e-9)
    assert 0 <= given_up.gap < 0.5


def test_among_equally_expensive_plans_a_quicker_one_is_preferred() -> None:
    # 100/s cost one B whatever the batch; a plan of full batches would wait 80 ms and more for each.
    asked = replace(small_problem(), objective=MinimizeCost(rate_per_s=100), slo=Slo(latency_s=10.0))
    decision = planned(asked)
    assert decision.figures.usd_per_hour == 1.0
    assert decision.figures.latency_s < 0.05
    # No input leaves, so no plan is faster than stock; plans of several splits would only wait longer.
    asked = replace(small_problem(), survival_N=(1.0,) * 6, devices={"A": Supply(count=5, usd_per_hour=3.0)})
    best, stock = planned(asked), planned(asked, "stock")
    assert best.figures.rate_per_s == pytest.approx(stock.figures.rate_per_s)
    assert best.figures.latency_s < 2 * stock.figures.latency_s


@pytest.mark.parametrize("seed", range(5))
def test_the_highest_rate_that_ingresses_carry_is_served_at_the_least_cost(seed: int) -> None:
    problem = replace(random_problem(seed), objective=MaximizeRate())
    carried_per_s = planned(problem).figures.rate_per_s / 2
    found = planned(parse_problem(problem_document(problem) | {"ingress": {"inputs_per_s": carried_per_s}}).problem)
    least = BruteForce(replace(problem, objective=MinimizeCost(rate_per_s=carried_per_s))).best("best")
    assert least is not None
    assert found.figures.usd_per_hour == pytest.approx(least.figures.usd_per_hour)
    assert (found.figures.rate_per_s, found.bound, found.gap) == (carried_per_s, carried_per_s, 0)
    carried = replace(problem, ingress=Ingresses(inputs_per_s=carried_per_s))
    brief = planned(carried, time_limit_s=30, now_s=count().__next__)  # plans of higher rates serve this one too
    assert (brief.figures.rate_per_s, brief.gap) == (carried_per_s, 0)


def test_if_batches_fill_too_slowly_for_the_ingresses_rate_it_is_not_claimed_that_no_plan_exists() -> None:
    table = LatencyTable(batches=(1, 8), block_s_NB=np.full((1, 2), 0.01), ramp_s_EB=np.zeros((0, 2)))
    problem = plain_problem(survival_N=(1.0,), latency={"A": table}, slo=Slo(latency_s=0.025))
    slow = replace(problem, ingress=Ingresses(inputs_per_s=200))  # 100/s in batches of 1; 8 inputs arrive in 40 ms
    with pytest.raises(PlanError, match=r"found for at most 200/s, which .*; there may be one with smaller batches"):
        solve(slow)
    assert planned(with_batch_limit(slow, 1)).figures.rate_per_s == 100
    equal = planned(replace(problem, ingress=Ingresses(inputs_per_s=800 * (1 - 1e-12))))
    assert equal.figures.rate_per_s == pytest.approx(800)
    assert equal.note == ""


def test_extreme_budgets_rates_and_numbers_of_accelerators_are_planned() -> None:
    decision = refused(replace(small_problem(), budget_usd_per_hour=0.5))
    assert (decision.binding, decision.nearest_slo_s) == ("budget", None)
    # A batch of 4 fills in 4e5 s at 1e-5/s; the slack of 20 % adds a quarter.
    decision = refused(two_blocks(objective=MinimizeCost(rate_per_s=1e-5)))
    assert decision.binding == "latency"
    assert decision.nearest_slo_s == pytest.approx(4e5 / 0.8, rel=1e-3)
    # A single input waits for no others, however rarely inputs arrive.
    assert planned(replace(small_problem(), objective=MinimizeCost(rate_per_s=1e-5))).figures.splits[0].wait_s == 0
    for usd, most_chains in ((0.0, 1), (3.0, 1), (3.0, 2)):
        many = {"A": Supply(count=1_000_000, usd_per_hour=usd)}
        asked = two_blocks(objective=MinimizeCost(rate_per_s=600), devices=many, most_chains=most_chains)
        assert planned(asked).figures.usd_per_hour == usd
    fastest = planned(replace(asked, objective=MaximizeRate()))
    assert fastest.figures.rate_per_s == pytest.approx(fastest.bound, rel=1e-3)


def test_replicas_are_added_until_the_queues_fit() -> None:
    """An input takes 10 of 26 ms. At 90/s, 99 % queue for at most 15.7 ms before two accelerators, 225 ms for one."""
    problem = plain_problem(
        survival_N=(1.0,),
        latency={"A": LatencyTable.of_rows((1,), [[0.01]], [])},
        devices={"A": Supply(count=2, usd_per_hour=1.0)},
        slo=Slo(latency_s=0.026, slack=0.0),
        objective=MinimizeCost(rate_per_s=90, in_time=0.99),
    )
    found = planned(problem)
    assert (found.figures.usd_per_hour, found.note) == (2.0, "room for queues: more replicas than the rate needs")


def test_early_answers_have_room_for_queues() -> None:
    """At 95/s, inputs queue for 95 ms before one accelerator with batches of one, and 1.2 ms with batches of four."""
    latency = {"A": LatencyTable.of_rows((1, 4), [[0.01, 0.016]], [])}
    alone = plain_problem(survival_N=(1.0,), latency=latency, objective=MinimizeLatency(rate_per_s=95))
    stages = [planned(each).stages[0] for each in (alone, alone.with_counts({"A": 9}), alone.without_queues())]
    assert [(stage.replicas, stage.splits[0].batch) for stage in stages] == [(1, 4), (4, 1), (1, 1)]
    assert planned(alone).figures.mean_latency_s == pytest.approx(4 / 95 / 2 + 0.016 + 0.38 * 0.002 / (1 - 0.38))


def test_blocks_that_take_hardly_any_time_are_not_cut_by_a_slow_link() -> None:
    quick = {name: table.times(1e-6) for name, table in small_problem().latency.items()}
    link = Link(bandwidth_bytes_per_s=1.0)
    decision = planned(replace(small_problem(), latency=quick, link=link))
    assert len(decision.stages) == 1, "a hop of 196608 s would bound the rate"
    assert decision.figures.rate_per_s > 1e6


FOLDER = Path(__file__).parents[2] / "examples" / "problems"
MANY = 300
FEW_SOONEST: dict[Strategy, int] = {"best": 24, **dict.fromkeys(STRATEGIES[1:], 12), "apparate": 12}
"""Problems by default; the rest is for `make test-all`."""

each_few = chunks(FEW_SOONEST, MANY)


@cache
def soonest_answers(seed: int, strategy: Strategy) -> Answers:
    return Answers.to(random_latency_problem(seed), strategy)


@pytest.mark.parametrize("of", [answers, soonest_answers], ids=["rate and cost", "soonest"])
def test_if_time_is_over_the_best_plan_so_far_has_a_true_bound(of: Callable[[int, Strategy], Answers]) -> None:
    gaps = []
    for seed, looks in product(range(8), (0, 10, 30, 100)):
        both, decision = of(seed, "best"), None
        with suppress(PlanError):
            decision = solve(both.problem, time_limit_s=looks, now_s=count().__next__)  # the clock ticks at each look
        if both.optimum is None or decision is None:
            assert decision in (None, both.decision)
            continue
        assert isinstance(decision, Planned)
        assert looks > 0 or of is answers, "plans of one split for a rate or a cost are found even then"
        assert violations(both.problem, decision.stages, decision.figures) == []
        value, best = (objective_value(both.problem, each.figures) for each in (decision, both.optimum))
        assert best_value(both.problem, [decision.bound, best]) == pytest.approx(decision.bound, rel=AGREE)
        assert decision.gap == pytest.approx(abs(value - decision.bound) / decision.bound)
        gaps.append(decision.gap)
    assert min(gaps) == 0 < max(gaps)


def test_if_time_is_over_the_bound_for_several_chains_is_not_that_for_one() -> None:
    problem = read_problem(FOLDER / "bert_base_hetero.yaml").problem
    brief = planned(problem, "serial", time_limit_s=5, now_s=count().__next__)
    assert brief.bound >= planned(problem, "serial").figures.rate_per_s


@each_few
def test_no_plan_of_the_space_answers_sooner_and_plans_keep_every_promise(strategy: Strategy, seeds: range) -> None:
    found = {seed: soonest_answers(seed, strategy) for seed in seeds}
    check_against_brute_force(found, strategy, lambda _, figures: figures.mean_latency_s)


@each_few
def test_the_nearest_limits_of_an_infeasible_latency_problem_are_returned(strategy: Strategy, seeds: range) -> None:
    told = 0
    for seed in seeds:
        both = soonest_answers(seed, strategy)
        if isinstance(both.decision, Planned):
            continue
        problem, decision = both.problem, both.decision
        least_s = BruteForce(problem).least_latency_s(strategy)
        nearest_s = None if least_s is None else least_s / (1 - problem.slo.slack)
        assert within(decision.nearest_slo_s, nearest_s, 0.0), f"problem {seed}: {decision}, twin {nearest_s}"
        assert (decision.binding == "latency") is (nearest_s is not None), f"problem {seed}: {decision}"
        if problem.ramp_budget is None:
            fastest = BruteForce(replace(problem, objective=MaximizeRate())).best(strategy)
            rate_per_s = None if fastest is None else fastest.figures.rate_per_s
            assert within(decision.highest_rate_per_s, rate_per_s, RATE_RESOLUTION), f"problem {seed}: {decision}"
        told += 1
    assert told


def two_blocks(**changes: object) -> PlanProblem:
    """Returns a problem of two blocks. Each takes 4 ms for a batch of 4. Half of the inputs leave after the first."""
    table = LatencyTable(batches=(4,), block_s_NB=np.full((2, 1), 0.004), ramp_s_EB=np.zeros((1, 1)))
    latency = {"A": table, "B": table}
    plain = {"survival_N": (1.0, 0.5), "latency": latency, "objective": MinimizeLatency(queues=False, rate_per_s=600)}
    return plain_problem(**plain | changes)


def test_among_equally_early_plans_stopping_ones_and_then_cheaper_ones_are_preferred() -> None:
    table = LatencyTable(batches=(1,), block_s_NB=np.full((2, 1), 0.001), ramp_s_EB=np.zeros((1, 1)))
    single = two_blocks(latency={"A": table, "B": table}, objective=MinimizeLatency(queues=False, rate_per_s=100))
    best, staying = planned(single), planned(single, "apparate")
    assert best.figures.mean_latency_s == staying.figures.mean_latency_s
    assert best.stages[0].splits[0].after_answer == "stop"
    supplies = {"A": Supply(count=1, usd_per_hour=4), "B": Supply(count=1, usd_per_hour=1)}
    decision = planned(two_blocks(devices=supplies, objective=MinimizeLatency(queues=False, rate_per_s=100)), "serial")
    assert [stage.device for stage in decision.stages] == ["B"]
    assert decision.gap == 0


def test_ramp_budgets_and_cost_budgets_that_bind_are_named() -> None:
    dear = two_blocks(
        latency={"A": LatencyTable(batches=(1,), block_s_NB=np.full((2, 1), 0.001), ramp_s_EB=np.full((1, 1), 0.001))},
        devices={"A": Supply(count=4, usd_per_hour=4)},
        objective=MinimizeLatency(queues=False, rate_per_s=100, ramp_budget=0.02),
    )
    bindings = [refused(replace(dear, budget_usd_per_hour=usd), "early-exit").binding for usd in (1.0, 4.0)]
    assert bindings == ["budget", "ramps"]
    table = LatencyTable(batches=(4,), block_s_NB=np.full((2, 1), 0.004), ramp_s_EB=np.full((1, 1), 0.001))
    problem = two_blocks(latency={"A": table, "B": table}, objective=MinimizeLatency(rate_per_s=100, ramp_budget=0.02))
    none = refused(problem, "early-exit")
    assert (none.binding, none.nearest_slo_s, none.highest_rate_per_s) == ("ramps", None, None)
    # Batches of 8 would be faster, but their ramps take a fifth of a block. At 1/s, batches of 4 fill too slowly.
    table = LatencyTable.of_rows((4, 8), [[0.004, 0.005]] * 2, [[0.00004, 0.001]])
    fast = two_blocks(latency={"A": table}, objective=MinimizeLatency(queues=False, rate_per_s=3000, ramp_budget=0.02))
    assert refused(fast, "early-exit").highest_rate_per_s == pytest.approx(511, rel=0.01)
    decision = planned(two_blocks(objective=MaximizeRate()), "apparate")
    assert decision.figures == planned(two_blocks(objective=MaximizeRate()), "stock").figures


def test_the_reason_of_infeasibility_is_found_within_seconds() -> None:
    problem = read_problem(FOLDER / "bert_base_hetero.yaml").problem
    objective = MinimizeLatency(queues=False, rate_per_s=500_000, ramp_budget=0.02)
    latency = {name: some_sizes(of, (1, 4, 16)) for name, of in problem.latency.items()}
    asked = replace(problem, objective=objective, latency=latency)
    solve(two_blocks(objective=objective), "best")  # compiles the kernels before the time is measured
    began_s = process_time()
    none = refused(asked)
    assert process_time() - began_s < 60  # regression: a search over all batch sizes took minutes
    assert none.binding == "devices"
    assert none.highest_rate_per_s is not None
    assert 70_000 < none.highest_rate_per_s < 85_000  # wide searches over all sizes find plans up to 81,600


def test_a_ramp_budget_leaves_the_ramps_that_save_most() -> None:
    # Ramps take 5 % of a block. Of three, a budget of 2 % of four blocks pays for one: 0.25 saves most behind block 1,
    # where 0.4 of the inputs skip two blocks; behind block 0 0.1 skip three, behind block 2 0.5 skip one.
    table = LatencyTable(batches=(1,), block_s_NB=np.full((4, 1), 0.001), ramp_s_EB=np.full((3, 1), 0.00005))
    problem = two_blocks(
        survival_N=(1.0, 0.9, 0.6, 0.5),
        latency={"A": table, "B": table},
        objective=MinimizeLatency(queues=False, rate_per_s=100, ramp_budget=0.02),
    )
    decision = planned(problem, "apparate")
    assert [split.ramps for stage in decision.stages for split in stage.splits] == [(1,)]
    assert decision.figures.ramp_overhead == pytest.approx(0.05 / 4)
    free = replace(problem, objective=MinimizeLatency(queues=False, rate_per_s=100))
    assert [split.ramps for split in planned(free, "apparate").stages[0].splits] == [(0, 1, 2)]


@pytest.mark.parametrize("name", ["bert_base_16_v100", "bert_base_hetero"])
def test_twelve_blocks_are_proven_best(name: str) -> None:
    problem = read_problem(FOLDER / f"{name}.yaml").problem
    asked = replace(problem, objective=MinimizeLatency(queues=False, rate_per_s=10_000, ramp_budget=0.02))
    of_strategies = {each: planned(asked, each) for each in ("best", "stock", "serial", "apparate")}
    assert {each.gap for each in of_strategies.values()} == {0.0}
    times_s = {name: each.figures.mean_latency_s for name, each in of_strategies.items()}
    assert times_s["best"] <= times_s["serial"] <= times_s["apparate"] < times_s["stock"]


def test_a_search_that_is_too_narrow_reports_its_gap() -> None:
    problem = read_problem(FOLDER / "bert_base_hetero.yaml").problem
    asked = replace(problem, objective=MinimizeLatency(queues=False, rate_per_s=30_000))
    narrow = search_soonest(asked, SPACES["best"], widths=(20,)).planned(asked, "best")
    assert isinstance(narrow, Planned)
    best_s = planned(asked).figures.mean_latency_s
    assert narrow.bound <= best_s * (1 + AGREE) <= narrow.figures.mean_latency_s * (1 + 2 * AGREE)
    assert narrow.gap == pytest.approx(narrow.figures.mean_latency_s / narrow.bound - 1)
    assert narrow.gap > 0


def test_a_model_that_is_too_large_is_refused() -> None:
    blocks = 1000
    table = LatencyTable(batches=(1,), block_s_NB=np.full((blocks, 1), 0.001), ramp_s_EB=np.zeros((blocks - 1, 1)))
    problem = two_blocks(survival_N=tuple(np.linspace(1, 0.5, blocks).tolist()), latency={"A": table, "B": table})
    with pytest.raises(PlanError, match="leave out some ramps or batch sizes"):
        solve(problem, "serial")
