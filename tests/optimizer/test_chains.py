"""Plans of chains of networks and of parallel chains, compared with brute force."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np
import pytest

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.cost.evaluate import evaluate, loads, objective_value, predictions, violations
from optimizer.plans.plan import Stage, chains_of
from optimizer.problems.networks import Subproblem, survival_with
from optimizer.problems.problem import Ingresses, Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from optimizer.problems.problem_file import parse_problem, problem_document, read_problem
from optimizer.problems.tokens import in_tokens, token_survival_N, with_budgets
from optimizer.search.chains import SOLVED
from optimizer.search.decision import Found, NoPlan, Planned, Strategy
from optimizer.search.exact import search_exactly
from optimizer.search.planner import more_devices, solve
from optimizer.search.space import Space
from profiles.lengths import Lengths
from profiles.table import LatencyTable
from tests.exit_records import exit_records
from tests.optimizer.answers import planned, refused
from tests.optimizer.brute_force import BruteForce, layouts
from tests.optimizer.plain_problem import plain_problem, random_chain, random_problem


def some(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrizes a test with the first seeds, and with all seeds for `make test-all`."""
    rest = pytest.param(range(few, many), id="many", marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id="few"), rest])


@some(15, 500)
@pytest.mark.parametrize("strategy", ["best", "serial", "e3", "stock"])
def test_the_best_plan_of_a_chain_equals_that_of_brute_force(seeds: range, strategy: Strategy) -> None:
    for seed in seeds:
        problem = random_chain(seed)
        known, found = BruteForce(problem).best(strategy), solve(problem, strategy)
        assert isinstance(found, NoPlan) == (known is None), seed
        if known is None or not isinstance(found, Planned):
            continue
        value = objective_value(problem, found.figures)
        assert value == pytest.approx(objective_value(problem, known.figures), rel=1e-9), seed
        assert found.gap == 0, seed
        assert violations(problem, found.stages, evaluate(problem, found.stages)) == [], seed


def two_networks(**changes: object) -> PlanProblem:
    """Returns a chain of two blocks, 4 ms and 20 ms. Batches are of 4, half of the inputs leave, a hop takes 1 ms."""
    facts = {
        "survival_N": (1.0, 0.5),
        "latency": {"cpu": LatencyTable.of_rows((4,), [[0.004], [0.020]], [[0.0]])},
        "devices": {"cpu": Supply(count=2, usd_per_hour=3.0)},
        "link": Link(bandwidth_bytes_per_s=1e9, delay_s=0.001),
        "slo": Slo(latency_s=1.0, slack=0.0),
        "networks": (1, 2),
        "crossing_s": 0.002,
    }
    return plain_problem(**facts | changes)


SMALL, LARGE = Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=2, batch=4)


def test_recorded_survival_of_a_set_of_networks_is_used_if_known() -> None:
    problem = two_networks(
        num_blocks=3,
        ramps=(0, 1),
        survival_N=(1.0, 0.5, 0.4),
        networks=(1, 2, 3),
        bytes_per_sample_N=(0.0,) * 3,
        latency={"cpu": LatencyTable(batches=(4,), block_s_NB=np.ones((3, 1)), ramp_s_EB=np.zeros((2, 1)))},
        survival_of={(0, 2): (1.0, 0.0, 0.7)},  # of block 1, which is not used, any number
    )
    assert Subproblem(whole=problem, used=(1, 2)).problem.survival_N == (1.0, 0.4)
    assert Subproblem(whole=problem, used=(0, 2)).problem.survival_N == (1.0, 0.7)
    assert survival_with(problem, (0, 2)) == (1.0, 0.7, 0.7)
    assert Subproblem(whole=problem, used=(0, 1, 2)).problem.survival_N == (1.0, 0.5, 0.4)
    assert Subproblem(whole=problem, used=(2,)).problem.networks == ()


def test_among_equal_plans_the_one_with_fewer_networks_is_selected() -> None:
    # Half of the work is saved by the small network, which takes as much: 10 + 0.5 * 20 ms.
    table = LatencyTable(batches=(4,), block_s_NB=np.array([[0.010], [0.020]]), ramp_s_EB=np.array([[0.0]]))
    found = planned(two_networks(latency={"cpu": table}))
    assert [split.first for stage in found.stages for split in stage.splits] == [1]


def test_a_plan_is_found_although_the_search_gives_up_for_another_set_of_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gives_up(problem: PlanProblem, space: Space, *, any_plan: bool = False) -> Found | None:
        if problem.num_blocks == 2:
            raise PlanError("too large")
        return search_exactly(problem, space, any_plan=any_plan)

    best_per_s = planned(two_networks()).figures.rate_per_s
    monkeypatch.setattr("optimizer.search.planner.search_exactly", gives_up)
    found = planned(two_networks())
    assert [stage.first for stage in found.stages] == [1]
    assert found.bound >= best_per_s
    with pytest.raises(PlanError, match="too large"):
        solve(two_networks(objective=MinimizeCost(rate_per_s=500)))


def test_a_set_of_networks_that_keeps_the_share_in_time_is_preferred_to_a_cheaper_one() -> None:
    """Both networks wait 31 ms and take 27 ms of 58.5: on two devices, their queues do not fit. The large one's do."""
    problem = two_networks(
        devices={"cpu": Supply(count=3, usd_per_hour=3.0)},
        slo=Slo(latency_s=0.0585, slack=0.0),
        objective=MinimizeCost(rate_per_s=390, in_time=0.99),
    )
    found = planned(problem)
    assert violations(problem, found.stages, found.figures) == []
    assert [(stage.replicas, stage.first) for stage in found.stages] == [(3, 1)]
    assert planned(replace(problem, objective=MinimizeCost(rate_per_s=390))).figures.usd_per_hour == 6


def test_with_lengths_a_networks_budget_counts_its_own_tokens() -> None:
    table = LatencyTable(
        batches=(2, 4),
        block_s_NB=np.array([[0.002, 0.004], [0.010, 0.020]]),
        ramp_s_EB=np.array([[0.0, 0.0]]),
        length=10,
    )
    problem = two_networks(
        latency={"cpu": table}, lengths=Lengths.of([10]), network_tokens=(1.0, 1.0), crossing_tokens=(1.0, 0.5)
    )
    small, large = replace(SMALL, tokens=40), replace(LARGE, tokens=20)
    behind = evaluate(problem, [Stage(device="cpu", replicas=2, splits=(small, large))])
    # With half of the words left, a batch of 4 inputs takes the time of 2 whole ones.
    assert [split.seconds.mean_s for split in behind.splits] == pytest.approx([0.004, 0.010])
    assert behind.rate_per_s == pytest.approx(2 * 4 / (0.004 + 0.5 * 0.010))
    alone = evaluate(problem, [Stage(device="cpu", replicas=2, splits=(replace(LARGE, tokens=40),))])
    assert alone.rate_per_s == pytest.approx(2 * 4 / 0.020)
    in_tokens = [Stage(device="cpu", replicas=2, splits=(replace(SMALL, batch=40), replace(LARGE, batch=40)))]
    [stage] = with_budgets(Subproblem(whole=problem, used=(0, 1)).problem, in_tokens)
    assert [split.tokens for split in stage.splits] == [40, 20]
    for share, tokens in ((0.62, 25), (1.05, 40)):  # 4 inputs of 6.2 tokens; 3 of 10.5, as no more were measured
        found = planned(replace(problem, network_tokens=(1.0, share), crossing_tokens=()), "stock")
        assert found.stages[0].splits[0].tokens == tokens
        assert found.figures.rate_per_s == pytest.approx(found.bound)


FEW_BLOCKS = [seed for seed in range(500) if random_problem(seed).num_blocks <= 4]
Devices = tuple[int, ...]
"""Replicas by accelerator type."""
Rates = tuple[float, float]
"""The least rate at which a chain's batches fill in time, and its highest rate."""


def chains(problem: PlanProblem) -> dict[Devices, list[Rates]]:
    """Returns the undominated chains of the space `best`, by the replicas that they use."""
    twin = BruteForce(replace(problem, objective=MinimizeCost(rate_per_s=1.0)))
    limit_s = problem.slo.limit_s * (1 + 1e-9)
    found: dict[Devices, set[Rates]] = defaultdict(set)
    for layout in layouts(problem, "best"):
        one = twin.scores(layout)
        with np.errstate(divide="ignore", invalid="ignore"):  # without arrivals, no batch fills
            room_PQ = limit_s - (one.latency_s_PQ - one.filled_PQ)
            least_PQ = np.where(room_PQ > 0, one.filled_PQ / room_PQ, np.inf)
        for q, replicas_G in enumerate(one.replicas_QG):
            used = tuple(
                sum(int(count) for count, device in zip(replicas_G, layout.devices, strict=True) if device == name)
                for name in problem.devices
            )
            rates = zip(least_PQ[:, q].tolist(), one.rate_per_s_PQ[:, q].tolist(), strict=True)
            found[used] |= {(least, most) for least, most in rates if least <= most * (1 + 1e-9)}
    return {used: list(_worth_having(rates)) for used, rates in found.items() if rates}


def _worth_having(rates: set[Rates]) -> Iterator[Rates]:
    most_so_far = -1.0
    for least, most in sorted(rates, key=lambda each: (each[0], -each[1])):
        if most > most_so_far:
            most_so_far = most
            yield least, most


def best_of_all(problem: PlanProblem, most_chains: int) -> float | None:
    """Returns the highest rate or the least cost of all multisets of chains, or None if none is feasible."""
    by_devices = chains(problem)
    counts = [supply.count for supply in problem.devices.values()]
    prices = [supply.usd_per_hour for supply in problem.devices.values()]
    budget = np.inf if problem.budget_usd_per_hour is None else problem.budget_usd_per_hour * (1 + 1e-9)
    required_per_s, values = problem.required_per_s, []
    for num_chains in range(1, most_chains + 1):
        for several in combinations_with_replacement(by_devices, num_chains):
            used = [sum(each) for each in zip(*several, strict=True)]
            usd = sum(price * count for price, count in zip(prices, used, strict=True))
            if usd > budget or any(taken > there for taken, there in zip(used, counts, strict=True)):
                continue
            if required_per_s is None:
                values.append(sum(max(most for _, most in by_devices[devices]) for devices in several))
            elif any(_serves(rates, required_per_s) for rates in product(*(by_devices[each] for each in several))):
                values.append(usd)
    return (max if required_per_s is None else min)(values) if values else None


def _serves(rates: tuple[Rates, ...], required_per_s: float) -> bool:
    least, most = (sum(each) for each in zip(*rates, strict=True))
    return bool(least <= required_per_s * (1 + 1e-9) and most >= required_per_s * (1 - 1e-9))


@pytest.mark.parametrize("seed", FEW_BLOCKS[::10])
def test_no_multiset_of_chains_is_better_than_the_plan_or_its_gap_says_by_how_much(seed: int) -> None:
    problem = replace(random_problem(seed), most_chains=3)
    expected, found = best_of_all(problem, 3), solve(problem, "best")
    if expected is None:
        assert not isinstance(found, Planned)
        return
    assert isinstance(found, Planned)
    assert violations(problem, found.stages, found.figures) == []
    assert len(chains_of(found.stages)) == len(found.figures.shares) <= 3
    value, allowed = objective_value(problem, found.figures), max(found.gap, SOLVED)
    if isinstance(problem.objective, MaximizeRate):
        assert expected * (1 - allowed) <= value <= expected * (1 + 1e-6)
        assert found.bound >= expected * (1 - SOLVED)
    else:
        assert expected * (1 - 1e-6) <= value
        assert value * (1 - allowed) <= expected * (1 + SOLVED) + 1e-9
        assert found.bound <= expected * (1 + SOLVED)


def test_a_master_problem_with_units_of_devices_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.search.master.MAX_USES", 4)
    num_plans = 0
    for seed in FEW_BLOCKS[:60:4]:
        problem = replace(random_problem(seed), most_chains=3)
        expected = best_of_all(problem, 3)
        if expected is None:
            continue
        try:
            found = solve(problem)
        except PlanError:  # that none was found in time
            continue
        assert isinstance(found, Planned), seed
        assert violations(problem, found.stages, found.figures) == []
        sign = 1 if isinstance(problem.objective, MaximizeRate) else -1
        assert sign * found.bound >= sign * expected - SOLVED * expected, seed
        num_plans += 1
    assert num_plans > 0


def test_no_bound_is_between_two_costs_of_whole_accelerators() -> None:
    assert planned(replace(random_problem(9), most_chains=3)).gap == 0


def test_with_the_strategy_serial_every_chain_is_one_stage() -> None:
    problem = replace(random_problem(18), most_chains=2)
    assert all(stage.end - stage.first == problem.num_blocks for stage in planned(problem, "serial").stages)


def test_the_search_for_one_chain_proves_that_no_plan_of_several_keeps_an_slo(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(random_problem(4), most_chains=3, objective=MaximizeRate(), slo=Slo(latency_s=1e-3))
    monkeypatch.setattr("optimizer.search.planner.search_chains", lambda *_: Found(plans=(), bound=np.inf))
    none = refused(problem)
    assert none == refused(replace(problem, most_chains=1))
    assert none.binding == "latency"
    assert (none.nearest_slo_s or 0.0) > problem.slo.latency_s


def test_a_rate_between_the_fastest_plan_and_the_bound_is_refused_with_both() -> None:
    fastest = planned(replace(random_problem(104), most_chains=3, objective=MaximizeRate()))
    found, most = fastest.figures.rate_per_s, fastest.bound
    assert found < most
    between = MinimizeCost(rate_per_s=(found + most) / 2, in_time=0.0)
    known = f"the fastest one found serves {found:.6g}/s, and none more than {most:.6g}/s"
    with pytest.raises(PlanError, match=f"^no plan was found, though there may be one: {known}$"):
        solve(replace(random_problem(104), most_chains=3, objective=between))


def table(batches: tuple[int, ...], block_ms: list[list[float]], ramp_ms: list[list[float]]) -> LatencyTable:
    return LatencyTable.of_rows(batches, block_ms, ramp_ms).times(1e-3)


def test_a_chain_on_two_types_may_be_slower_than_the_types_alone_if_it_leaves_devices_to_another_chain() -> None:
    """Returns a problem whose first blocks are slow on V100: all T4 run them for one V100. The others form a chain."""
    v100 = [[38.9], [10.9], [1.5], [1.5], [10.7], [5.9], [5.5], [4.5], [3.1]]
    t4 = [[5.1, 14.4], [8.2, 21.8], [11.4, 16.9], [8.9, 12.4], [12.9, 26.4], [5.8, 10.4], [11.8, 17.3], [10.4, 22.9]]
    problem = plain_problem(
        ramps=(1, 2, 3, 6, 7),
        survival_N=(1.0, 1.0, 0.0519, 0.0245, 0.0226, 0.0226, 0.0226, 0.0019, 0.0006),
        latency={
            "V100": table((4,), v100, [[4.9], [1.9], [0.9], [3.2], [0.4]]),
            "T4": table(
                (2, 8), [*t4, [11.1, 22.9]], [[0.35, 0.68], [0.35, 0.81], [0.36, 0.63], [0.66, 1.19], [0.34, 0.35]]
            ),
        },
        devices={"V100": Supply(count=4, usd_per_hour=0.6), "T4": Supply(count=7, usd_per_hour=1.6)},
        link=Link(bandwidth_bytes_per_s=1e6, delay_s=0.0),
        bytes_per_sample_N=(7e4, 2.6e4, 3.1e4, 4.1e4, 2.1e4, 8e4, 8.7e4, 5e4, 8.2e4),
        slo=Slo(latency_s=1.28, slack=0.2),
        most_chains=2,
    )
    found = planned(problem)
    assert len(found.figures.shares) == 2
    assert found.gap < 0.1


def test_refusals_count_the_accelerators_of_all_chains() -> None:
    """An accelerator of either type does 2000/s."""
    whole = table((4,), [[1.0], [1.0]], [[0.0]])
    problem = plain_problem(
        survival_N=(1.0, 1.0),
        latency={"V100": whole, "T4": whole},
        devices={"V100": Supply(count=1, usd_per_hour=1.0), "T4": Supply(count=1, usd_per_hour=5.0)},
        objective=MinimizeCost(rate_per_s=6000),
        most_chains=2,
    )
    assert refused(problem, "stock").highest_rate_per_s == pytest.approx(4000)
    assert more_devices(problem, "stock") == ("V100", 1)
    tight = replace(problem, objective=MinimizeCost(rate_per_s=3600), slo=Slo(latency_s=0.001))
    nearest_s = refused(tight, "stock").nearest_slo_s
    assert nearest_s is not None
    assert planned(replace(tight, slo=Slo(latency_s=nearest_s)), "stock").figures.latency_s == pytest.approx(
        0.004222, rel=1e-3
    )


def test_chains_whose_batches_fill_just_in_time_are_combined() -> None:
    """On each accelerator, batches of 4 fill in 10 ms at 400/s, and take 10 ms. 20 ms are allowed."""
    latency, slo = dict.fromkeys(("V100", "T4"), table((4,), [[10.0]], [])), Slo(latency_s=0.02, slack=0.0)
    problem = plain_problem(survival_N=(1.0,), latency=latency, slo=slo, most_chains=2)
    assert planned(problem).figures.rate_per_s == pytest.approx(800)
    assert len(planned(replace(problem, objective=MinimizeCost(rate_per_s=800))).figures.shares) == 2


def alternating() -> PlanProblem:
    """Returns a problem of seven blocks that are fast on V100 and T4 in turn: the best plan has seven stages."""
    fast_and_slow = [[1.0] if block % 2 else [100.0] for block in range(8)]
    latency = {"T4": table((1,), fast_and_slow[:7], []), "V100": table((1,), fast_and_slow[1:], [])}
    devices = {"T4": Supply(count=3, usd_per_hour=1.0), "V100": Supply(count=4, usd_per_hour=1.0)}
    return plain_problem(survival_N=(1.0,) * 7, ramps=(), latency=latency, devices=devices)


@pytest.mark.parametrize(
    "problem",
    [read_problem(Path("examples/problems/bert_large_hetero.yaml")).problem, alternating()],
    ids=["24 blocks", "seven stages"],
)
def test_plans_of_several_chains_are_no_worse_than_the_best_of_one(problem: PlanProblem) -> None:
    one, several = planned(replace(problem, most_chains=1)), planned(replace(problem, most_chains=3))
    assert several.figures.rate_per_s >= one.figures.rate_per_s * (1 - 1e-9)
    assert several.figures.rate_per_s <= several.bound
    carried = Ingresses(inputs_per_s=0.9 * several.figures.rate_per_s)
    limited = planned(replace(problem, most_chains=3, ingress=carried)).figures
    assert [limited.rate_per_s, sum(limited.shares)] == pytest.approx([carried.most_per_s, 1])
    even = (1 / len(several.figures.shares),) * len(several.figures.shares)
    assert evaluate(replace(problem, ingress=Ingresses(inputs_per_s=1.0)), several.stages, shares=even).shares == even
    too_fast = replace(problem, most_chains=3, objective=MinimizeCost(rate_per_s=1.1 * several.bound))
    assert refused(too_fast).highest_rate_per_s == several.figures.rate_per_s


LENGTH, LONG = 32, 128
MIXED = Lengths.weighted({10: 0.6, 40: 0.3, 100: 0.1})


def with_length(problem: PlanProblem, lengths: Lengths | None, length: int = LENGTH) -> PlanProblem:
    latency = {device: replace(table, length=length) for device, table in problem.latency.items()}
    return replace(problem, latency=latency, lengths=lengths, batches=None)


def one_block(batches: tuple[int, ...] = (1, 4, 16), per_input_s: float = 0.001, **changes: object) -> PlanProblem:
    """Returns a problem of one block, which takes 1 ms plus 1 ms per input of 32 tokens, on four accelerators."""
    block_s = 0.001 + per_input_s * np.array([batches], dtype=float)
    table = LatencyTable(batches=batches, block_s_NB=block_s, ramp_s_EB=np.zeros((0, len(batches))), length=LENGTH)
    devices = {"gpu": Supply(count=4, usd_per_hour=1.0)}
    return plain_problem(**{"survival_N": (1.0,), "latency": {"gpu": table}, "devices": devices, **changes})


def test_inputs_that_all_have_the_latencys_length_are_planned_as_without_lengths() -> None:
    for seed in range(6):
        plain = with_length(random_problem(seed), None)
        mixed = with_length(plain, Lengths.of([LENGTH]))
        without, found = solve(plain), solve(mixed)
        if isinstance(without, NoPlan) or isinstance(found, NoPlan):
            assert type(without) is type(found)
            continue
        assert found.figures.rate_per_s == pytest.approx(without.figures.rate_per_s)
        assert found.figures.latency_s == pytest.approx(without.figures.latency_s)
        assert found.bound == pytest.approx(without.bound)
        budgets = [(split.batch, split.tokens) for stage in found.stages for split in stage.splits]
        assert budgets == [(split.batch, split.batch * LENGTH) for stage in without.stages for split in stage.splits]


def test_batches_have_room_for_the_shortest_inputs_at_the_rate_of_the_mean() -> None:
    problem = one_block(lengths=MIXED)
    found = planned(problem)
    assert found.stages[0].splits == (Split(first=0, end=1, batch=52, tokens=512),)  # 512 / 10, rounded up
    held = round(MIXED.filled(512))
    seconds = 0.001 + 0.001 * held / LENGTH
    assert found.figures.rate_per_s == pytest.approx(4 * held / MIXED.mean / seconds)
    assert found.figures.splits[0].fill == held / 512
    assert found.bound == pytest.approx(found.figures.rate_per_s)
    assert predictions(problem, found.figures)["tokens_per_input"] == MIXED.mean


def test_rates_are_of_inputs_and_short_ones_come_faster() -> None:
    short, long = (planned(one_block(lengths=Lengths.of([tokens]))) for tokens in (8, 64))
    assert short.figures.rate_per_s == pytest.approx(8 * long.figures.rate_per_s)
    asked = one_block(lengths=Lengths.of([64]), objective=MinimizeCost(rate_per_s=800.0))
    found = planned(asked)
    assert found.figures.served_per_s == pytest.approx(800.0)
    assert found.figures.usd_per_hour == 2.0
    none = refused(replace(asked, objective=MinimizeCost(rate_per_s=1e6)))
    assert none.highest_rate_per_s == pytest.approx(4 * 8 / 0.017)


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_as_good_as_the_best_of_all_budgets_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = with_length(random_problem(seed), MIXED if seed % 2 else Lengths(mean=20.5), LONG)
    stays = tuple(np.linspace(1.0, float(rng.uniform(0.6, 1.4)), problem.num_blocks))
    problem = replace(problem, stayers_length_N=(1.0, *stays[1:]))
    best, found = BruteForce(by_hand(problem, stays)).best("best"), solve(problem)
    assert isinstance(found, Planned) == (best is not None)
    if isinstance(found, Planned) and best is not None:
        by_rate = isinstance(problem.objective, MaximizeRate)
        twin = best.figures.rate_per_s / problem.lengths.mean if by_rate else best.figures.usd_per_hour  # type: ignore[union-attr]
        assert objective_value(problem, found.figures) == pytest.approx(twin)
        assert not violations(problem, found.stages, found.figures)


def by_hand(problem: PlanProblem, stays: tuple[float, ...]) -> PlanProblem:
    """Returns the problem in which each token is an input, implemented independently."""
    lengths = problem.lengths
    assert lengths is not None
    latency = {}
    for device, table in problem.latency.items():
        sizes = np.array([round(lengths.filled(batch * LONG)) for batch in table.batches])
        rows = [np.interp(sizes / LONG, table.batches, row) for row in table.block_s_NB]
        ramps = [np.interp(sizes / LONG, table.batches, row) for row in table.ramp_s_EB]
        latency[device] = LatencyTable(
            batches=tuple(sizes.tolist()),
            block_s_NB=np.array(rows),
            ramp_s_EB=np.array(ramps).reshape(-1, len(sizes)),
        )
    share, survival = 1.0, []
    for by_inputs, longer in zip(problem.survival_N, (1.0, *stays[1:]), strict=True):
        share = min(share, by_inputs * longer)
        survival.append(share)
    plain = replace(problem, lengths=None, stayers_length_N=None, latency=latency, survival_N=tuple(survival))
    sizes_N = tuple(each / LONG for each in problem.bytes_per_sample_N)
    plain = replace(plain, bytes_per_sample_N=sizes_N, tokens_per_input=lengths.mean)
    asked = problem.required_per_s
    return plain if asked is None else plain.with_rate(asked * lengths.mean)


def test_rates_and_survival_are_weighted_by_tokens() -> None:
    problem = one_block(lengths=Lengths.of([16, 48]))
    stages = (Stage(device="gpu", replicas=1, splits=(Split(first=0, end=1, batch=8),)),)
    figures = evaluate(problem, stages)
    assert figures.rate_per_s == pytest.approx(8 / 0.009)
    assert figures.splits[0].batch_at_block == (8.0,)
    [[load]] = loads(problem, stages, figures)
    # Half of the inputs take half of the mean, the others 1.5 times the mean.
    assert (load.work_s, load.square_s2) == pytest.approx((0.009 / 8, 1.25 * (0.009 / 8) ** 2))
    problem = one_block(lengths=MIXED)
    assert token_survival_N(problem) == (1.0,)
    wide = with_length(random_problem(3), MIXED)
    longer = tuple(1.0 + 0.1 * block for block in range(wide.num_blocks))
    survival = token_survival_N(replace(wide, stayers_length_N=longer))
    assert survival[0] == 1.0
    assert list(survival) == sorted(survival, reverse=True)
    assert all(by_tokens >= by_inputs for by_tokens, by_inputs in zip(survival, wide.survival_N, strict=True))
    assert in_tokens(replace(wide, stayers_length_N=longer)).survival_N == survival


# Problem files


def document(**changes: object) -> dict[str, object]:
    return {**problem_document(one_block(lengths=MIXED)), **changes}


def test_problem_files_give_lengths_as_a_mean_a_list_shares_or_a_file(tmp_path: Path) -> None:
    problem = one_block(lengths=MIXED, stayers_length_N=(1.0,))
    again = parse_problem(problem_document(problem)).problem
    assert (again.lengths, again.stayers_length_N, again.latency["gpu"].length) == (MIXED, (1.0,), LENGTH)
    assert "lengths" not in problem_document(one_block())
    assert "length" not in problem_document(one_block())["latency"]["gpu"]
    (tmp_path / "lengths.txt").write_text("16\n48\n", encoding="utf-8")
    exit_records(np.zeros((2, 0)), score="entropy", tokens_N=np.array([16, 48])).save(tmp_path / "records.npz")
    for given in ([16, 48], {16: 1, 48: 1}, "lengths.txt", "records.npz"):
        problem = parse_problem(document(lengths=given), folder=tmp_path).problem
        assert problem.lengths == Lengths.of([16, 48])
    assert parse_problem(document(lengths=32)).problem.lengths == Lengths(mean=32)
