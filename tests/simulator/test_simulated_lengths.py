"""Tests of inputs whose time depends on their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import DataError, PlanError
from optimizer.plans.plan import Plan, Stage
from optimizer.problems.problem import PlanProblem
from simulator.outcome import Outcome
from simulator.scenario import Scenario, poisson_arrivals
from simulator.simulate import simulate
from tests.simulator.tiny_cases import AT_0, AT_1, TO_END, plan, problem, scenario, split, stage

LENGTH = 8
ROWS = (AT_0, TO_END, AT_1, TO_END)


def measured(length: int | None = LENGTH) -> PlanProblem:
    """Returns the tiny problem, with a profile of inputs of 8 tokens."""
    tiny = problem()
    return replace(tiny, latency={"cpu": replace(tiny.latency["cpu"], length=length)})


def with_lengths(served_by: Plan, arrivals_s: Sequence[float], lengths: Sequence[int], **options: Any) -> Scenario:
    """Returns a scenario in which the four rows of the tiny decisions have these tokens."""
    return scenario(
        served_by, arrivals_s, **{"problem": measured(), "rows": (3,), **options}, lengths_R=np.array(lengths)
    )


def budgets(*stages: Stage, **predicted: float) -> Plan:
    """Returns the plan with token budgets: 8 tokens for each input of its batches."""
    counted = (
        replace(each, splits=tuple(replace(every, tokens=LENGTH * every.batch) for every in each.splits))
        for each in stages
    )
    return replace(plan(*counted), predicted=predicted)


STAGES = (stage(2, split(0, 2, ramps=(0, 1))), stage(2, split(2, 3), split(3, 4)))


def events(outcome: Outcome) -> tuple[bytes, bytes, bytes, list[tuple[int, int, float]], float]:
    batches = [(each.batches, each.inputs, each.busy_s) for each in outcome.splits]
    return (
        outcome.latency_s_N.tobytes(),
        outcome.exit_N.tobytes(),
        outcome.drop_N.tobytes(),
        batches,
        outcome.ended_s,
    )


@pytest.mark.parametrize("options", [{}, {"slo_s": 30.0, "admission": True}, {"slo_s": 30.0, "num_ingresses": 3}])
@pytest.mark.parametrize("rate_per_s", [0.5, 2.0, 4.0])
def test_inputs_of_the_profiles_length_are_served_event_for_event_as_without_lengths(
    options: dict[str, Any], rate_per_s: float
) -> None:
    arrivals_s = poisson_arrivals(rate_per_s, 300.0, 5).tolist()
    plain = plan(*STAGES, rate_per_s=2.0, latency_s=8.0)
    budgeted = budgets(*STAGES, rate_per_s=2.0, latency_s=8.0, tokens_per_input=LENGTH)
    given = {"duration_s": 300.0, **options}
    without = scenario(plain, arrivals_s, ROWS, **given)
    by_inputs = with_lengths(plain, arrivals_s, [LENGTH] * 4, rows=ROWS, **given)
    by_tokens = with_lengths(budgeted, arrivals_s, [LENGTH] * 4, rows=ROWS, **given)
    assert events(simulate(without)) == events(simulate(by_inputs))
    assert events(simulate(without)) == events(simulate(by_tokens))


def test_times_of_a_batch_and_a_hop_depend_on_their_tokens() -> None:
    # Four blocks; 8 tokens take 1 s a block, 16 take 1.25 s, so 12 take 1.125 s. Shorter than 8 is no faster.
    alone = plan(stage(1, split(0, 4)))
    took_s = [
        simulate(with_lengths(alone, [0.0], [8, 8, 8, tokens])).latency_s_N.tolist() for tokens in (8, 12, 16, 4, 64)
    ]
    assert took_s == [[4.0], [4.5], [5.0], [4.0], [14.0]]  # 64 tokens: twice the time of the largest batch
    # The call with the short input leaves at once. The long input has three times its tokens and takes 1.5 s a block.
    served = plan(stage(1, split(0, 4, ramps=(0,))))
    arrivals_s = [0.0, 0.0]
    outcome = simulate(with_lengths(served, arrivals_s, [8, 8, 8, 24], rows=(AT_0, TO_END), slo_s=100.0))
    (short_s, long_s) = outcome.latency_s_N.tolist()
    assert (outcome.splits[0].batches, outcome.splits[0].inputs) == (2, 2)
    assert (short_s, long_s) == (1.0, 7.0)
    # An input of 8 tokens takes 0.5 s to the next stage, so one of 24 takes 1.5 s, and 1.5 s a block.
    served = plan(stage(1, split(0, 2)), stage(1, split(2, 4)))
    (hopped_s,) = simulate(with_lengths(served, [0.0], [8, 8, 8, 24])).latency_s_N.tolist()
    assert hopped_s == 4 * 1.5 + 1.5


def test_tokens_determine_when_a_batch_is_full() -> None:
    # Of ten that wait while the first runs, 32 tokens run together, and the next 32.
    served = budgets(stage(1, split(0, 4)))
    wide = replace(served, stages=(stage(1, replace(split(0, 4, 32), tokens=32)),))
    outcome = simulate(with_lengths(wide, [0.0] + [0.5] * 10, [8, 8, 8, 6]))
    assert outcome.splits[0].batches == 3
    assert outcome.splits[0].lengths is not None
    assert outcome.splits[0].lengths.tokens == 66
    assert outcome.splits[0].lengths.fill == pytest.approx(66 / 96)


# Refusals


@pytest.mark.parametrize(
    ("lengths", "said"),
    [([8, 8], "lengths need 4 numbers, one per row"), ([8, 8, 8, 0], "each at least 1")],
)
def test_invalid_lengths_are_refused(lengths: list[int], said: str) -> None:
    with pytest.raises(DataError, match=said):
        with_lengths(plan(stage(1, split(0, 4))), [0.0], lengths)


def test_lengths_need_token_budgets_and_latencies_with_a_length() -> None:
    with pytest.raises(DataError, match="the latency of cpu does not say its length"):
        with_lengths(plan(stage(1, split(0, 4))), [0.0], [8] * 4, problem=measured(None))
    served = budgets(stage(1, split(0, 4)))
    with pytest.raises(PlanError, match="the plan has batches of 32 tokens, and inputs have no lengths"):
        scenario(served, [0.0], problem=measured())
    wide = plan(stage(1, replace(split(0, 4), tokens=33)))
    with pytest.raises(PlanError, match="measured up to batches of 32 tokens, not 33"):
        with_lengths(wide, [0.0], [8] * 4)
