"""Searches the highest rate that a service sustains; E3 calls it goodput (section 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from offramp.load.sustained import Search
from simulator.outcome import Figures
from simulator.scenario import Scenario
from simulator.simulate import booted, play

ScenarioAt = Callable[[float], Scenario]
"""A function from a rate, in inputs per second, to a scenario."""

SHARE = 0.99
"""Share of inputs that must be answered within the SLO."""
PRECISION = 0.01
"""Relative distance of the ends of the last bracket."""
GROWTH, MOST_TRIALS = 1.05, 1000
HIGHEST = 2.0**6
"""Largest multiple of the expected rate; a service that sustains it has no limit."""
LOWEST = 2.0**-10
"""Smallest multiple of the expected rate; a service that does not sustain it sustains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The highest sustained rate, and the figures at that rate."""

    rate_per_s: float
    """0 if no rate was sustained."""
    figures: Figures | None


def highest_rate(
    scenario_at: ScenarioAt, expected_per_s: float, *, share: float = SHARE, precision: float = PRECISION
) -> Capacity:
    """Searches from the expected rate. Raises DataError if the service has no limit.

    A scenario should send the same arrivals at every rate, only faster, so that trials differ only by the rate.
    """
    if not 0 < expected_per_s < float("inf"):
        raise DataError(f"the expected rate must be a finite number above 0, not {expected_per_s}")
    search = Search(
        start_per_s=expected_per_s,
        low_per_s=LOWEST * expected_per_s,
        high_per_s=HIGHEST * expected_per_s,
        resolution=precision,
        most_probes=MOST_TRIALS,
        growth=GROWTH,
    )
    best: Figures | None = None
    while (rate_per_s := search.next_rate()) is not None:
        figures = _figures(scenario_at(rate_per_s), share)
        best = figures or best
        for _ in range(1 if figures else 2):  # a search wants two failures, and a simulation fails again
            search.add(rate_per_s, "passed" if figures else "failed")
    if search.ending == "highest":
        raise DataError(f"{search.best_per_s:g} inputs/s are answered in time; does the scenario have an SLO?")
    return Capacity(rate_per_s=search.best_per_s, figures=best)


class _TooLateError(Exception):
    """More inputs are late than the share allows."""


def _figures(scenario: Scenario, share: float) -> Figures | None:
    """Returns the figures if the rate is sustained. Ends a simulation as soon as it cannot be any more."""
    service = booted(scenario)
    first = int(np.searchsorted(scenario.arrivals_s, scenario.warm_up_s)) * scenario.inputs_per_request
    allowed = (1 - share) * (len(service.ledger.latency_s) - first)

    def watch(_: float) -> None:
        latency_s_N = np.frombuffer(service.ledger.latency_s)[first:]
        if np.count_nonzero(latency_s_N > scenario.slo_s) > allowed:
            raise _TooLateError

    try:
        figures = play(service, progress=watch).figures()
    except _TooLateError:
        return None
    if figures.interrupted:
        raise KeyboardInterrupt
    return figures if figures.inputs and figures.in_slo_share >= share else None
