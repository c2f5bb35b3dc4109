from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from earlyexit.split import Split
from experiments.studies.cheapest import PRECISION, Search, accelerators, need
from optimizer.decision import Planned
from optimizer.evaluate import Evaluation
from optimizer.plan import Stage
from tests.experiments.studies.two_blocks import inputs, problem


def plan_for(rate_per_s: float) -> Planned:
    """An accelerator per 100 inputs/s, at a dollar each."""
    replicas = math.ceil(rate_per_s / 100)
    split = Split(first=0, end=1, batch=1, ramps=())
    figures = Evaluation(
        rate_per_s=rate_per_s,
        served_per_s=rate_per_s,
        latency_s=0.01,
        usd_per_hour=float(replicas),
        splits=(),
        stages=(),
    )
    return Planned(
        strategy="stock",
        stages=(Stage(device="V100", replicas=replicas, splits=(split,)),),
        figures=figures,
        bound=float(replicas),
        gap=0.0,
    )


def enough(replicas: int) -> Callable[[Planned], float]:
    return lambda planned: 1.0 if planned.stages[0].replicas >= replicas else 0.5


@pytest.mark.parametrize(("replicas", "asked_per_s"), [(10, 900.0), (6, 500.0), (13, 1200.0)])
def test_the_planner_is_asked_for_as_much_as_makes_its_plan_hold_the_rate(replicas: int, asked_per_s: float) -> None:
    search = Search(plan_for, enough(replicas))
    asked = search.least_that_holds(1000.0)
    assert asked is not None
    assert asked_per_s < asked <= asked_per_s * (1 + PRECISION)
    found = search.plan_for(asked)
    assert found is not None
    assert found.stages[0].replicas == replicas


def test_nothing_is_asked_for_where_nothing_holds_the_rate() -> None:
    assert Search(plan_for, lambda _: 0.5).least_that_holds(1000.0) is None


def test_a_rate_without_a_plan_does_not_hold() -> None:
    search = Search(lambda rate_per_s: None if rate_per_s < 700 else plan_for(rate_per_s), enough(1))
    asked = search.least_that_holds(1000.0)
    assert asked == pytest.approx(700, rel=PRECISION)


def test_equal_plans_are_simulated_once() -> None:
    seen: list[int] = []

    def share(planned: Planned) -> float:
        seen.append(planned.stages[0].replicas)
        return enough(9)(planned)

    Search(plan_for, share).least_that_holds(1000.0)
    assert len(seen) == len(set(seen))


def test_accelerators_are_counted_by_type() -> None:
    splits = (Split(first=0, end=1, batch=1, ramps=()),)
    counts = (("a", 2), ("b", 1), ("a", 3))
    stages = tuple(Stage(device=device, replicas=count, splits=splits) for device, count in counts)
    assert accelerators(stages) == {"a": 5, "b": 1}


def test_early_exit_at_batch_1_needs_less_than_the_cost_model_says() -> None:
    # The model charges the second block to all: 2 ms an input, so 1,200/s take 3 accelerators. Half leave: 1.5 ms.
    found = need(problem(batches=(1,)), "early-exit", inputs(), "quick", rate_per_s=1200.0, seed=0)
    assert found is not None
    assert accelerators(found.proposed.stages) == {"V100": 3}
    assert (found.number, found.usd_per_hour) == (2, 4.0)
    assert found.share >= 0.99
    assert found.document()["planner"]["usd_per_hour"] == 6.0


def test_without_enough_accelerators_there_is_no_need_to_tell() -> None:
    assert need(problem(batches=(1,)), "stock", inputs(), "quick", rate_per_s=1e5, seed=0) is None
