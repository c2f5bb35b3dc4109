"""Searches the highest rate that a service sustains; E3 calls it goodput (section 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from simulator.outcome import Figures
from simulator.scenario import Scenario
from simulator.simulate import booted, play

ScenarioAt = Callable[[float], Scenario]
"""A function from a rate, in inputs per second, to a scenario."""

SHARE = 0.99
"""Share of inputs that must be answered within the SLO."""
PRECISION = 0.01
"""Relative distance of the ends of the last bracket."""
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
    """Bisects between a sustained rate and one that is not sustained, starting at the expected rate.

    A scenario should send the same arrivals at every rate, only faster, so that trials differ only by the rate.
    """
    if not 0 < expected_per_s < float("inf"):
        raise DataError(f"the expected rate must be a finite number above 0, not {expected_per_s}")
    search = _Search(scenario_at, share)
    low_per_s, high_per_s = search.bracket(expected_per_s)
    while low_per_s and high_per_s / low_per_s > 1 + precision:
        middle_per_s = (low_per_s * high_per_s) ** 0.5
        if search.sustains(middle_per_s):
            low_per_s = middle_per_s
        else:
            high_per_s = middle_per_s
    return Capacity(rate_per_s=low_per_s, figures=search.best)


class _TooLateError(Exception):
    """More inputs are late than the share allows."""


class _Search:
    def __init__(self, scenario_at: ScenarioAt, share: float) -> None:
        self._scenario_at = scenario_at
        self._share = share
        self.best: Figures | None = None
        """Figures at the highest sustained rate."""

    def sustains(self, rate_per_s: float) -> bool:
        try:
            figures = self._figures(self._scenario_at(rate_per_s))
        except _TooLateError:
            return False
        if figures.interrupted:
            raise KeyboardInterrupt
        if not figures.inputs or figures.in_slo_share < self._share:
            return False
        if self.best is None or figures.offered_per_s > self.best.offered_per_s:
            self.best = figures
        return True

    def _figures(self, scenario: Scenario) -> Figures:
        """Raises _TooLateError as soon as the share cannot be reached any more, to save the rest of the run."""
        service = booted(scenario)
        first = int(np.searchsorted(scenario.arrivals_s, scenario.warm_up_s)) * scenario.inputs_per_request
        allowed = (1 - self._share) * (len(service.ledger.latency_s) - first)

        def watch(_: float) -> None:
            latency_s_N = np.frombuffer(service.ledger.latency_s)[first:]
            if np.count_nonzero(latency_s_N > scenario.slo_s) > allowed:
                raise _TooLateError

        return play(service, progress=watch).figures()

    def bracket(self, expected_per_s: float) -> tuple[float, float]:
        """Returns a sustained rate, or 0, and a rate that is not sustained."""
        rate_per_s, step = expected_per_s, 1.05
        if self.sustains(rate_per_s):
            while self.sustains(rate_per_s * step):
                rate_per_s, step = rate_per_s * step, step**2
                if rate_per_s > HIGHEST * expected_per_s:
                    raise DataError(f"{rate_per_s:g} inputs/s are answered in time; does the scenario have an SLO?")
            return rate_per_s, rate_per_s * step
        while rate_per_s > LOWEST * expected_per_s:
            if self.sustains(rate_per_s / step):
                return rate_per_s / step, rate_per_s
            rate_per_s, step = rate_per_s / step, step**2
        return 0.0, rate_per_s
