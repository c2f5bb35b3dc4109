"""Compares simulated services under Poisson arrivals with queues whose mean latency is known by a formula."""

from __future__ import annotations

import pytest

from optimizer.plans.plan import Plan
from simulator.scenario import poisson_arrivals
from simulator.simulate import simulate
from tests.simulator.queueing import batch_latency_s, fixed_service_wait_s, tandem_latency_s
from tests.simulator.tiny_cases import plan, scenario, split, stage

NUM_INPUTS = 8_000
ONE = plan(stage(1, split(0, 4, 1)))
"""4 s per input."""
TANDEM = plan(stage(1, split(0, 1, 1)), stage(1, split(1, 4, 1)))
"""1 s per input, half a second on the link, and 3 s."""
BATCHES = plan(stage(1, split(0, 4, 4)))
"""4 s for an input, and one more for each further one of a batch of up to four."""


@pytest.mark.parametrize(
    ("served_by", "rate_per_s", "latency_s"),
    [
        pytest.param(ONE, 0.15, 4.0 + fixed_service_wait_s(0.15, 4.0), id="one server"),
        pytest.param(TANDEM, 0.2, tandem_latency_s(0.2, (1.0, 0.5, 3.0)), id="servers in a row"),
        pytest.param(BATCHES, 0.2, batch_latency_s(0.2, (4.0, 5.0, 6.0, 7.0)), id="batches, some load"),
        pytest.param(BATCHES, 0.4, batch_latency_s(0.4, (4.0, 5.0, 6.0, 7.0)), id="batches, high load"),
    ],
)
def test_the_mean_latency_is_that_of_the_queue(served_by: Plan, rate_per_s: float, latency_s: float) -> None:
    arrivals_s = poisson_arrivals(rate_per_s, NUM_INPUTS / rate_per_s, 0).tolist()
    outcome = simulate(scenario(served_by, arrivals_s, calls_per_replica=1_000_000))
    assert outcome.latency_s_N.mean() == pytest.approx(latency_s, rel=0.05)
