"""The search for the highest rate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from experiments.sustained import highest_rate
from simulator.scenario import Scenario
from tests.simulator.tiny_cases import plan, scenario, split, stage

WHOLE = plan(stage(2, split(0, 4, 1)))
"""Two replicas, 4 s per input: 0.5 inputs per second."""


def evenly(*, slo_s: float = 8.0, seconds: float = 4000.0) -> Callable[[float], Scenario]:
    """Inputs at equal gaps: all are in time at 0.5/s and below, and few above, where a queue grows without end."""

    def at(rate_per_s: float) -> Scenario:
        arrivals_s = np.arange(0.0, seconds, 1 / rate_per_s)
        return scenario(WHOLE, arrivals_s.tolist(), slo_s=slo_s, duration_s=seconds)

    return at


@pytest.mark.parametrize("expected_per_s", [0.5, 0.05, 3.0])
def test_a_known_capacity_is_found_from_wherever_the_search_begins(expected_per_s: float) -> None:
    # At a rate of 0.5 (1 + x)/s a share of 1 / (1 + x) is in time: 99 % of them up to 0.505/s.
    found = highest_rate(evenly(), expected_per_s)
    assert 0.499 <= found.rate_per_s <= 0.511
    assert found.figures is not None
    assert found.figures.in_slo_share >= 0.99
    assert all(share >= 0.99 for rate, share in found.trials if rate <= found.rate_per_s)
    assert all(share < 0.99 for rate, share in found.trials if rate > found.rate_per_s)


def test_what_no_rate_sustains_has_none() -> None:
    found = highest_rate(evenly(slo_s=3.0, seconds=400.0), 0.5)  # an input alone takes 4 s
    assert (found.rate_per_s, found.figures) == (0.0, None)
    assert len(found.trials) > 1
