"""Tests of the live controller over simulated replicas."""

from __future__ import annotations

import random
from operator import methodcaller

import numpy as np
import pytest

from experiments.controlled import Control, Controlled, Mix, Order, rows_in_turn, simulate_controlled
from simulator.outcome import DROPS, UNANSWERED
from simulator.scenario import Scenario
from tests.experiments.controlled.controlled_cases import (
    control,
    evenly,
    halves,
    problem,
    rows,
    scenario,
    seconds,
    whole,
)
from tests.experiments.controlled.troubles import Fault, with_faults

FIRST, SECOND = "split-cpu-0", "split-cpu-1"


def check_outcomes(result: Controlled) -> None:
    """Checks that every input has exactly one outcome, and that the ingresses' counts agree."""
    outcome = result.outcome
    answered_N = ~np.isnan(outcome.latency_s_N)
    assert (answered_N ^ (outcome.drop_N >= 0)).all()
    assert not (outcome.drop_N == UNANSWERED).any()
    assert ((outcome.exit_N >= 0) == answered_N).all()
    assert sum(report.arrived for report in result.reports) == len(answered_N)
    assert sum(report.answered for report in result.reports) == answered_N.sum()
    for reason, name in enumerate(DROPS):
        dropped = sum(report.drops.get(name, 0) for report in result.reports)
        assert dropped == (outcome.drop_N == reason).sum()
    assert all(report.unanswered == report.waiting == 0 for report in result.reports)


def test_a_changeover_moves_replicas_to_other_stages_and_loses_no_input() -> None:
    order = Order(at_s=10.1, plan=halves(2, 1))
    steered = control(problem(0.6), hold=True, orders=(order,))
    result = simulate_controlled(scenario(whole(4), evenly(100, 30), rows(0.6), duration_s=30.0), steered)
    assert seconds(result.done) == [
        "10.10 prepare 1",
        "10.10 follow 1",  # no replica has to start
        "12.50 scale cpu to 3",  # at the next look, no input runs under the plan before
        "13.50 split-cpu#3 ends",
    ]
    figures = result.outcome.figures()
    assert (figures.answered, figures.drops) == (3000, {})
    # Until 10.1 s no ramp is active; then 6 of 10 leave after block 1. By then 1011 inputs have arrived.
    assert figures.exits[1] + figures.exits[3] == 3000
    assert figures.exits[1] == pytest.approx(0.6 * (3000 - 1011), abs=6)
    check_outcomes(result)
    assert result.words("error") == []


def test_a_straggler_is_found_and_gets_no_work() -> None:
    slow = Fault(at_s=20.0, happen=lambda fleet: fleet.slow(FIRST, 2, 3.0))
    made = scenario(whole(4), evenly(200, 60), rows(0.0), duration_s=60.0)
    result = simulate_controlled(made, control(problem(0.0), make_fleet=with_faults(slow)))
    (words,) = result.words("straggler")
    assert words.startswith("split-cpu#2 takes 1.5")
    found = [plan for plan in result.plans if plan["reason"] == "straggler"]
    assert found[0]["placed"]["avoided"] == {"split-cpu#2": "cpu"}
    latest = result.outcome.figures_between(found[0]["at_s"] + 1.0, 60.0)
    assert latest.p99_s is not None
    assert latest.p99_s < 0.12  # the time of a slow batch alone
    check_outcomes(result)


def test_a_replica_whose_first_inputs_stay_is_no_straggler() -> None:
    # Two inputs arrive at a time, on two replicas. The second one stays until 2.6 s, from then on the first one.
    rows_N = np.concatenate([np.tile(rows(0.1, 2), 13), np.tile(rows(0.1, 2)[::-1], 37)])
    made = scenario(whole(3).with_splits(ramps=(1,)), np.repeat(evenly(5, 10), 2), rows_N, duration_s=10.0)
    assert simulate_controlled(made, control(problem(0.5), probe_share=0.0)).words("straggler") == []


def test_lost_accelerators_cause_a_new_plan_and_their_return_another() -> None:
    made = scenario(halves(2, 2), evenly(150, 120), rows(0.6), duration_s=120.0)
    lost = Fault(at_s=30.0, happen=lambda fleet: fleet.lose("cpu", (2, 3)))
    back = Fault(at_s=90.0, happen=lambda fleet: fleet.bring_back("cpu", (2, 3)))
    result = simulate_controlled(made, control(problem(0.6), make_fleet=with_faults(lost, back)))
    assert [(plan["reason"], plan["at_s"]) for plan in result.plans if plan["outcome"] == "in force"] == [
        ("start", 0.0),
        ("capacity lost", 40.0),  # noticed by Ray; until then one replica of each stage continues
        ("capacity lost", 40.0),
        ("capacity changed", 90.0),
    ]
    assert [plan["placed"]["plan"]["chains"][0]["stages"][0]["replicas"] for plan in result.plans] == [2, 1, 2, 4]
    between = result.outcome.figures_between(40.0, 120.0)
    assert between.in_slo == between.inputs
    check_outcomes(result)


def test_the_plan_follows_inputs_that_become_harder() -> None:
    arrivals_s = evenly(330, 160)
    mixes = [Mix(at_s=0.0, rows_N=rows(0.9)), Mix(at_s=70.0, rows_N=rows(0.1))]
    made = scenario(halves(2, 1), arrivals_s, rows_in_turn(mixes, arrivals_s), duration_s=160.0)
    kept = simulate_controlled(made, control(problem(0.9), hold=True)).outcome
    result = simulate_controlled(made, control(problem(0.9)))
    assert any("inputs left by ramp 1" in words for words in result.words("reaction"))
    # In the old plan, the only replica of the second half runs 200/s of the 297/s that reach it.
    assert kept.figures_between(130.0, 160.0).goodput_per_s < 250
    assert result.outcome.figures_between(130.0, 160.0).goodput_per_s == 330
    check_outcomes(result)


def random_faults(rng: random.Random) -> tuple[Fault, ...]:
    """Returns random faults in the first 40 s."""
    faults: list[Fault] = []
    for _ in range(rng.randint(2, 8)):
        at_s, slot, rank = rng.uniform(0, 40), rng.choice((FIRST, SECOND)), rng.randint(0, 3)
        numbers = tuple(rng.sample(range(4), rng.randint(1, 4)))
        happens = (
            methodcaller("die", slot, rank),
            methodcaller("slow", slot, rank, rng.uniform(1.0, 4.0)),
            methodcaller("lose", "cpu", numbers),
            methodcaller("bring_back", "cpu", numbers),
        )
        faults.append(Fault(at_s=at_s, happen=rng.choice(happens)))
    return tuple(faults)


def troubled(seed: int) -> tuple[Scenario, Control]:
    """Returns a random service with random faults."""
    rng = random.Random(seed)
    plan = rng.choice((whole(4), whole(2), halves(2, 2), halves(1, 2)))
    arrivals_s = np.sort(np.random.default_rng(seed).uniform(0.0, 60.0, int(60 * rng.uniform(50, 600))))
    options = {
        "admission": rng.random() < 0.5,
        "num_ingresses": rng.randint(1, 2),
        "slo_s": rng.choice((0.3, 1.0, 20.0)),
    }
    mixes = [Mix(at_s=0.0, rows_N=rows(0.8)), Mix(at_s=30.0, rows_N=rows(0.2))]
    made = scenario(plan, arrivals_s, rows_in_turn(mixes, arrivals_s), duration_s=60.0, **options)
    orders = tuple(Order(at_s=rng.uniform(0, 50), plan=rng.choice((whole(3), halves(1, 1)))) for _ in range(2))
    orders = orders if rng.random() < 0.5 else ()
    make_fleet = with_faults(*random_faults(rng))
    return made, control(problem(0.8), probe_share=0.3, linger_s=200.0, orders=orders, make_fleet=make_fleet)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))])
def test_every_input_has_one_outcome_under_all_faults(seed: int) -> None:
    check_outcomes(simulate_controlled(*troubled(seed), seed=seed))


def test_equal_runs_are_equal_and_another_seed_probes_others() -> None:
    one, again, other = (simulate_controlled(*troubled(3), seed=seed) for seed in (1, 1, 2))
    for name in ("latency_s_N", "exit_N", "drop_N"):
        assert getattr(one.outcome, name).tobytes() == getattr(again.outcome, name).tobytes()
    assert (one.plans, one.said, one.done) == (again.plans, again.said, again.done)
    assert one.outcome.latency_s_N.tobytes() != other.outcome.latency_s_N.tobytes()
