"""Tests of the decisions where inputs leave."""

from __future__ import annotations

import numpy as np
import pytest

from earlyexit.errors import DataError, PlanError
from optimizer.plans.plan import Plan, PolicySpec
from profiles.records import ExitRecords
from simulator.inputs import NOWHERE, ByPatience, ByRamp, nested, patient, survival_of
from simulator.simulate import simulate
from tests.exit_records import exit_records
from tests.simulator.tiny_cases import scenario, split, stage

SURE = ByRamp(ramps=(0, 2, 4), sure_NR=np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]], dtype=np.bool_))


def records() -> ExitRecords:
    answers_NE = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0]])
    return exit_records([[0.9, 0.5, 0.9], [0.1, 0.6, 0.2], [0.1, 0.2, 0.3]], answers_NE=answers_NE)


def test_unknown_ramps_no_patience_and_no_inputs_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the decisions have no ramps \[1, 3\]; they have \[0, 2, 4\]"):
        SURE.leaves_N((1, 2, 3), (1, 2, 3))
    with pytest.raises(PlanError, match="patience must be at least 1, not 0"):
        ByPatience(ramps=(0,), labels_NR=np.zeros((1, 1), dtype=np.int64), patience=0)
    with pytest.raises(DataError, match="at least one input is needed, not 0"):
        nested((1.0,), (), np.random.default_rng(0), num_rows=0)


@pytest.mark.parametrize(
    ("patience", "active", "leaves"),
    [
        pytest.param(1, (0, 1, 2), [1, 2, NOWHERE], id="one repeat"),
        pytest.param(2, (0, 1, 2), [2, NOWHERE, NOWHERE], id="two repeats"),
        pytest.param(1, (0, 2), [2, NOWHERE, 2], id="only active ramps count"),
        pytest.param(1, (1,), [NOWHERE, NOWHERE, NOWHERE], id="one ramp repeats nothing"),
    ],
)
def test_patience_counts_repeats_at_active_ramps(patience: int, active: tuple[int, ...], leaves: list[int]) -> None:
    assert patient(records(), patience).leaves_N(active, active).tolist() == leaves


def test_patience_includes_ramps_of_earlier_splits_and_none_of_other_chains() -> None:
    whole, parts = stage(1, split(0, 4, ramps=(0, 2))), stage(1, split(0, 2, ramps=(0, 1)), split(2, 4, ramps=(2,)))
    chains = Plan(stages=(whole, parts), shares=(0.5, 0.5), policy=PolicySpec(name="patience", patience=1))
    decisions = ByPatience(ramps=(0, 1, 2), labels_NR=np.array([[0, 1, 0], [0, 0, 0], [0, 1, 1]]), patience=1)
    outcome = simulate(scenario(chains, range(6), (0, 0, 1, 1, 2, 2), decisions=decisions))
    assert outcome.exit_N.tolist() == [2, 3, 2, 1, 3, 2], "the chains in turn"


def test_survival_is_that_of_the_served_rows_recorded_or_random() -> None:
    decisions = nested((1.0, 0.7, 0.7, 0.2), (0, 1, 2), np.random.default_rng(0), num_rows=10)
    assert decisions.sure_NR.sum(0).tolist() == [3, 3, 8]
    assert (np.diff(decisions.sure_NR.astype(int), axis=1) >= 0).all()
    assert survival_of(decisions, (0, 1, 2), 4, np.arange(10)) == pytest.approx((1.0, 0.7, 0.7, 0.2))
    # Rows 0 and 0 leave at ramp 0, row 1 at ramp 2, row 2 stays.
    assert survival_of(SURE, (0, 2, 4), 6, np.array([0, 0, 1, 2])) == (1.0, 0.5, 0.5, 0.25, 0.25, 0.25)
