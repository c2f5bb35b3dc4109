"""Plans of several networks one after the other: what they may leave out, and where their splits must end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from earlyexit.network.boundary import Split
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import ModelShape, plan_document, read_plan, write_plan

NETWORKS = (2, 5, 9)
SHAPE = ModelShape(num_blocks=9, ramps=(0, 1, 3, 4, 6), networks=NETWORKS)


def stage(*bounds: tuple[int, int]) -> Stage:
    return Stage(device="cpu", replicas=1, splits=tuple(Split(first=a, end=b, batch=4) for a, b in bounds))


def plan(*stages: Stage, networks: tuple[int, ...] = NETWORKS) -> Plan:
    return Plan(stages=stages, networks=networks)


@pytest.mark.parametrize(
    ("stages", "entry", "used"),
    [
        pytest.param([stage((0, 2), (2, 5), (5, 9))], 0, (0, 1, 2), id="all, in one stage"),
        pytest.param([stage((0, 1)), stage((1, 2), (2, 5)), stage((5, 7), (7, 9))], 0, (0, 1, 2), id="all"),
        pytest.param([stage((0, 2)), stage((5, 9))], 0, (0, 2), id="without the middle one"),
        pytest.param([stage((0, 2), (5, 9))], 0, (0, 2), id="without the middle one, in one stage"),
        pytest.param([stage((2, 5), (5, 9))], 2, (1, 2), id="without the first"),
        pytest.param([stage((5, 9))], 5, (2,), id="the last alone"),
    ],
)
def test_a_plan_may_leave_out_networks(stages: list[Stage], entry: int, used: tuple[int, ...], tmp_path: Path) -> None:
    made = plan(*stages)
    assert (made.entry, made.used, made.num_blocks) == (entry, used, 9)
    assert sum(each.num_blocks for each in made.stages) == sum((2, 3, 4)[network] for network in used)
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made


def test_a_stage_says_its_blocks_without_a_gap_and_one_network_is_not_named() -> None:
    assert stage((0, 1), (1, 2), (5, 9)).ranges == ((0, 2), (5, 9))
    assert stage((2, 5)).ranges == ((2, 5),)
    one = plan(stage((0, 9)), networks=())
    assert (one.entry, one.used) == (0, (0,))
    assert "networks" not in plan_document(one)


def test_weights_and_pruning_are_of_the_networks_ends(tmp_path: Path) -> None:
    policy = PolicySpec(name="entropy", thresholds=0.4, weights={1: 0.2, 4: 0.5})
    made = Plan(stages=(stage((0, 2), (5, 9)),), networks=NETWORKS, policy=policy)
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made
    made = replace(plan(stage((0, 2), (2, 5)), stage((5, 9))), prune={1: 0.7, 4: 0.9})
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made
    assert "prune" not in plan_document(plan(stage((5, 9))))
