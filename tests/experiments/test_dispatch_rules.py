from __future__ import annotations

import numpy as np
import pytest

from earlyexit.engine import Dispatch
from experiments.dispatch_rules import SLO_S, LinearTimes, simulate

RULES: tuple[Dispatch, ...] = ("work-conserving", "deferred")
TIMES = LinearTimes(fixed_s=0.005, per_input_s=0.0003)


@pytest.mark.parametrize("dispatch", ["work-conserving", "deferred"])
def test_every_input_is_answered_or_dropped_once(dispatch: Dispatch) -> None:
    arrivals_s = np.cumsum(np.random.default_rng(0).exponential(1 / 900, 500)).tolist()
    outcome = simulate(TIMES, dispatch, arrivals_s, seed=1)
    assert len(outcome.latencies_s) + outcome.dropped == 500


def test_a_lone_input_starts_at_once_where_work_is_conserved() -> None:
    outcome = simulate(TIMES, "work-conserving", [1.0], seed=1)
    assert outcome.latencies_s.tolist() in ([pytest.approx(0.0053)], [pytest.approx(0.0053 * 3)])


def test_a_lone_input_waits_for_company_until_its_deadline_is_at_risk_where_dispatch_is_deferred() -> None:
    outcome = simulate(TIMES, "deferred", [1.0], seed=1)
    assert 0.5 * SLO_S < outcome.latencies_s[0] <= SLO_S


def test_deferred_batches_are_fuller_under_little_load() -> None:
    arrivals_s = np.cumsum(np.random.default_rng(0).exponential(1 / 200, 500)).tolist()
    fills = [simulate(TIMES, rule, arrivals_s, seed=1).fills[0] for rule in RULES]
    assert fills[1] > 2 * fills[0]
