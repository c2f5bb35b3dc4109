"""The simulator against formulas, at sizes where figures are rough; the command's are within 2 %."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.planning.simulator_check import (
    DEVICE,
    PLANS,
    Row,
    batch_service,
    fixed_service,
    saturation,
    serving,
    tandem,
)
from optimizer.plan import stock_plan
from simulator.decisions import nested
from simulator.scenario import Scenario
from simulator.simulate import simulate
from simulator.sustained import poisson_arrivals

REQUESTS = 8_000


def test_waits_before_one_server_are_those_of_lindleys_recursion() -> None:
    service_s, rate_per_s = 0.01, 80.0
    arrivals_s = poisson_arrivals(rate_per_s, 50.0, seed=0)
    problem = serving([[service_s]], [1])
    outcome = simulate(
        Scenario(
            problem=problem,
            plan=stock_plan(1, batch=1, device=DEVICE),
            decisions=nested((1.0,), (), np.random.default_rng(0), num_rows=1),
            rows_N=np.zeros(1, dtype=np.int64),
            arrivals_s=arrivals_s,
            duration_s=50.0,
        )
    )
    waits_s = [0.0]
    for gap_s in np.diff(arrivals_s):
        waits_s.append(max(0.0, waits_s[-1] + service_s - gap_s))
    np.testing.assert_allclose(outcome.latency_s_N, np.array(waits_s) + service_s, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rows", [fixed_service, tandem, batch_service], ids=lambda rows: str(rows.__name__))
def test_latencies_are_near_those_of_the_formula(rows: object) -> None:
    assert callable(rows)
    found: list[Row] = list(rows(REQUESTS))
    assert len(found) >= 2
    assert {row.what: row.off for row in found if abs(row.off) > 0.15} == {}


def test_saturated_plans_serve_what_the_cost_model_says() -> None:
    found = list(saturation(20_000))  # fewer fill no batches
    assert len(found) == len(PLANS)
    assert {row.what: row.off for row in found if abs(row.off) > 0.05} == {}
