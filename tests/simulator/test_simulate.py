"""Tests of whole simulations."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from simulator.outcome import UNANSWERED, Outcome
from simulator.scenario import Scenario, poisson_arrivals
from simulator.simulate import CHUNK, simulate
from tests.simulator.tiny_cases import AT_0, AT_1, TO_END, plan, scenario, split, stage

TWO_STAGES = plan(
    stage(2, split(0, 2, ramps=(0, 1))), stage(2, split(2, 3), split(3, 4)), rate_per_s=2.0, latency_s=8.0
)
"""A quarter of the inputs leaves at the first ramp, another at the second."""
ROWS = (AT_0, TO_END, AT_1, TO_END)


def busy(rate_per_s: float = 2.0, *, seconds: float = 500.0, seed: int = 0, **options: object) -> Scenario:
    arrivals_s = poisson_arrivals(rate_per_s, seconds, seed)
    return scenario(TWO_STAGES, arrivals_s.tolist(), ROWS, duration_s=seconds, **options)


def said(outcome: Outcome) -> tuple[bytes, bytes, bytes, str]:
    return (
        outcome.latency_s_N.tobytes(),
        outcome.exit_N.tobytes(),
        outcome.drop_N.tobytes(),
        repr((outcome.splits, outcome.slots, outcome.usd, outcome.ended_s)),
    )


@pytest.mark.parametrize("num_ingresses", [1, 3])
def test_equal_scenarios_give_equal_outcomes_to_the_byte(num_ingresses: int) -> None:
    one, other = (simulate(busy(slo_s=30.0, admission=True, num_ingresses=num_ingresses)) for _ in range(2))
    assert said(one) == said(other)
    assert said(one) != said(simulate(busy(slo_s=30.0, admission=True, num_ingresses=num_ingresses, seed=1)))


def test_accelerators_are_held_until_the_last_work_ends_or_without_requests_to_the_end() -> None:
    outcome = simulate(scenario(TWO_STAGES, [], duration_s=10.0))
    figures = outcome.figures()
    assert (figures.inputs, figures.goodput_per_s, figures.splits) == (0, 0.0, ())
    assert (outcome.ended_s, figures.utilisation) == (10.0, 0.0)
    assert figures.usd_per_hour == pytest.approx(12.0)  # four accelerators, 3 USD/h each
    outcome = simulate(scenario(plan(stage(2, split(0, 4))), [0.0], duration_s=1.0))
    assert outcome.ended_s == 4.0
    (slot,) = outcome.slots
    assert (slot.replica_s, slot.utilisation) == (8.0, 0.5)
    assert outcome.usd == pytest.approx(8 / 3600 * 3)


def test_progress_is_the_share_of_the_simulated_time() -> None:
    assert gc.isenabled()
    arrivals_s = np.linspace(0.0, 4.0, CHUNK + 2)
    told: list[float] = []
    simulate(scenario(plan(stage(8, split(0, 4))), arrivals_s.tolist(), duration_s=8.0), progress=told.append)
    assert told == [pytest.approx(0.5, abs=1e-3), 0.5]
    assert gc.isenabled()


def interrupt(share: float) -> None:
    raise KeyboardInterrupt


def test_results_from_before_an_interruption_are_kept() -> None:
    arrivals_s = np.linspace(0.0, 200.0, 300).tolist()  # slightly more than is served at once, the last at the end
    asked = scenario(TWO_STAGES, arrivals_s, ROWS, duration_s=200.0)
    interrupted, whole = simulate(asked, progress=interrupt), simulate(asked)
    assert (interrupted.interrupted, whole.interrupted) == (True, False)
    answered_N = ~np.isnan(interrupted.latency_s_N)
    assert 100 < answered_N.sum() < 300
    assert (interrupted.latency_s_N == whole.latency_s_N)[answered_N].all()
    assert (interrupted.drop_N == UNANSWERED).tolist() == (~answered_N).tolist()
    assert interrupted.figures().drops == {"unanswered": int((~answered_N).sum())}
    assert interrupted.figures().interrupted
    nothing = simulate(scenario(TWO_STAGES, [0.0, 0.5]), progress=interrupt).figures()
    assert (nothing.splits, nothing.answered, nothing.drops) == ((), 0, {"unanswered": 2})


def test_without_an_slo_an_overloaded_service_queues_and_answers_all_in_the_end() -> None:
    outcome = simulate(busy(10.0, seconds=200.0, admission=True))
    assert not np.isnan(outcome.latency_s_N).any()
    assert outcome.ended_s > 400


@pytest.mark.parametrize("num_ingresses", [1, 40])
@pytest.mark.parametrize("admission", [True, False])
def test_with_an_slo_an_overloaded_service_drops_and_ends_soon(admission: bool, num_ingresses: int) -> None:
    outcome = simulate(busy(20.0, seconds=200.0, slo_s=20.0, admission=admission, num_ingresses=num_ingresses))
    figures = outcome.figures()
    assert set(figures.drops) <= {"admission", "deadline"}
    assert sum(figures.drops.values()) > 0.5 * figures.inputs
    assert outcome.ended_s < 230


def test_dropping_does_not_nest_calls_ever_deeper() -> None:
    # Everything of a long queue is dropped at one time, by many ingresses and many replicas in turn.
    served_by = plan(stage(8, split(0, 4, 1)))
    deep = scenario(served_by, [0.0] * 400 + [4.9] * 4000, slo_s=5.0, num_ingresses=16, calls_per_replica=8)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        outcome = simulate(deep)
    finally:
        sys.setrecursionlimit(limit)
    assert (np.isnan(outcome.latency_s_N) == (outcome.drop_N >= 0)).all()
