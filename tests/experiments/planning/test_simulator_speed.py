"""The speed command, at a size that takes no time."""

from __future__ import annotations

import pytest

from experiments.planning.simulator_speed import SIDES, Size, measured, problem_of, three_stages

SIZE = Size(requests=2000, accelerators=60, batch=8, load=0.8)


def test_the_plan_has_three_stages_on_all_accelerators_with_every_ramp_and_keeps_the_slo() -> None:
    problem = problem_of(SIZE)
    stages, figures = three_stages(problem)
    assert [stages[0].first, *(stage.end for stage in stages)][-1] == problem.num_blocks
    assert len(stages) == 3
    assert sum(stage.replicas for stage in stages) == 60
    assert tuple(ramp for stage in stages for split in stage.splits for ramp in split.ramps) == problem.ramps
    assert {split.batch for stage in stages for split in stage.splits} == {8}
    assert figures.latency_s <= problem.slo.limit_s


def test_replicas_are_in_balance() -> None:
    _, figures = three_stages(problem_of(SIZE))
    rates_per_s = [stage.rate_per_s for stage in figures.stages]
    assert max(rates_per_s) / min(rates_per_s) < 1.2  # of 60, a replica more or less is 5 to 10 % of a stage


@pytest.mark.parametrize("side", list(SIDES))
def test_every_request_is_simulated_and_every_event_counted(side: str) -> None:
    speed = measured(SIZE, side)
    assert speed.requests == pytest.approx(2000, rel=0.1)
    assert speed.goodput_per_s == pytest.approx(speed.offered_per_s, rel=0.05)
    assert len(speed.fill) == 3
    assert speed.events > speed.requests + speed.batches
