from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from earlyexit.engine import Dispatch
from experiments.engine.dispatch_rules import RULES, SLO_S, LinearTimes, Outcome, simulate


def run(rule: Dispatch, arrivals_s: Sequence[float]) -> Outcome:
    return simulate(LinearTimes(fixed_s=0.005, per_input_s=0.0003), rule, arrivals_s, seed=1)


def poisson(rate_per_s: float) -> list[float]:
    return list(np.cumsum(np.random.default_rng(0).exponential(1 / rate_per_s, 500)).tolist())


def test_every_input_is_answered_or_dropped_once() -> None:
    for outcome in (run(rule, poisson(900)) for rule in RULES):
        assert len(outcome.latencies_s) + outcome.dropped == 500


def test_a_lone_input_starts_at_once_or_waits_for_company_until_its_deadline_is_at_risk() -> None:
    (at_once,), (deferred,) = (run(rule, [1.0]).latencies_s for rule in RULES)
    assert at_once in (pytest.approx(0.0053), pytest.approx(0.0053 * 3))
    assert 0.5 * SLO_S < deferred <= SLO_S


def test_deferred_batches_are_fuller_under_little_load() -> None:
    fills = [run(rule, poisson(200)).fills[0] for rule in RULES]
    assert fills[1] > 2 * fills[0]
