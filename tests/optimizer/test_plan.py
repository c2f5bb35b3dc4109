from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from earlyexit.network.boundary import Split
from optimizer.plan import Plan, PolicySpec, Stage, early_exit_plan, serial_plan, stock_plan
from optimizer.plan_file import ModelShape, plan_document, read_plan, write_plan

ENTROPY = PolicySpec(thresholds=0.4)


def split(first: int, end: int, *ramps: int) -> Split:
    return Split(first=first, end=end, batch=8, ramps=ramps)


def stage(*splits: Split, replicas: int = 1) -> Stage:
    return Stage(device="cpu", replicas=replicas, splits=splits)


def test_after_answer_and_overlap_are_equal_in_all_splits_of_a_plan() -> None:
    plan = Plan(stages=(stage(split(0, 2, 1), split(2, 4)), stage(split(4, 6))), policy=ENTROPY)
    assert plan.after_answer == "stop"
    staying = plan.with_splits(after_answer="stay")
    assert (staying.after_answer, [each.stays for each in staying.splits]) == ("stay", [True] * 3)
    assert staying.with_splits(after_answer="stop") == plan
    overlapping = plan.with_splits(overlap_below=4)
    assert (plan.overlap_below, overlapping.overlap_below) == (None, 4)
    assert [each.overlap_below for each in overlapping.splits] == [4] * 3
    assert overlapping.planned_stages == plan.stages


def test_an_own_policy_may_be_in_a_module_of_a_package() -> None:
    assert PolicySpec(name="own", own="package.module:rule").own == "package.module:rule"


def test_a_stock_plan_is_one_split_and_splits_end_where_networks_end() -> None:
    plan = stock_plan(6, batch=8, device="V100", replicas=3)
    assert plan.splits == (Split(first=0, end=6, batch=8),)
    assert (plan.stages[0].device, plan.stages[0].replicas, plan.policy) == ("V100", 3, None)
    chain = (3, 5, 9)
    stock, early, serial = (
        stock_plan(9, batch=8, networks=chain),
        early_exit_plan(9, (1, 2, 6), ENTROPY, batch=8, networks=chain),
        serial_plan(9, (1, 2, 6), ENTROPY, batch=8, networks=chain),
    )
    assert stock.splits == (split(5, 9),)
    assert early.splits == (split(5, 9, 6),)
    assert serial.splits == (split(0, 2, 1), split(2, 3, 2), split(3, 5), split(5, 7, 6), split(7, 9))
    assert [plan.used for plan in (stock, early, serial)] == [(2,), (2,), (0, 1, 2)]


def side_by_side(*shares: float) -> Plan:
    """Returns a plan of two chains of four blocks: one stage with ramp 1, and two stages with ramp 2."""
    policy = PolicySpec(thresholds=0.5)
    chains = (stage(split(0, 4, 1), replicas=3), stage(split(0, 2)), stage(split(2, 4, 2)))
    return Plan(stages=chains, shares=shares, policy=policy, predicted={"rate_per_s": 400.0, "latency_s": 0.1})


def test_every_chain_of_a_plan_is_a_plan_with_its_share_of_the_rate() -> None:
    plan = side_by_side(0.75, 0.25)
    first, second = plan.chains
    assert (first.stages, second.stages) == (plan.stages[:1], plan.stages[1:])
    assert (first.predicted, second.predicted) == (
        {"rate_per_s": 300.0, "latency_s": 0.1},
        {"rate_per_s": 100.0, "latency_s": 0.1},
    )
    assert (plan.ramps, first.ramps, second.ramps) == ((1, 2), (1,), (2,))
    assert first.chains == (first,), "a plan of one chain is its chain"


NETWORKS = (2, 5, 9)
SHAPE = ModelShape(num_blocks=9, ramps=(0, 1, 3, 4, 6), networks=NETWORKS)


def spans(*bounds: tuple[int, int]) -> Stage:
    return Stage(device="cpu", replicas=1, splits=tuple(Split(first=a, end=b, batch=4) for a, b in bounds))


def planned(*stages: Stage, networks: tuple[int, ...] = NETWORKS) -> Plan:
    return Plan(stages=stages, networks=networks)


@pytest.mark.parametrize(
    ("stages", "entry", "used"),
    [
        pytest.param([spans((0, 2), (2, 5), (5, 9))], 0, (0, 1, 2), id="all, in one stage"),
        pytest.param([spans((0, 1)), spans((1, 2), (2, 5)), spans((5, 7), (7, 9))], 0, (0, 1, 2), id="all"),
        pytest.param([spans((0, 2)), spans((5, 9))], 0, (0, 2), id="without the middle one"),
        pytest.param([spans((0, 2), (5, 9))], 0, (0, 2), id="without the middle one, in one stage"),
        pytest.param([spans((2, 5), (5, 9))], 2, (1, 2), id="without the first"),
        pytest.param([spans((5, 9))], 5, (2,), id="the last alone"),
    ],
)
def test_a_plan_may_leave_out_networks(stages: list[Stage], entry: int, used: tuple[int, ...], tmp_path: Path) -> None:
    made = planned(*stages)
    assert (made.entry, made.used, made.num_blocks) == (entry, used, 9)
    assert sum(each.num_blocks for each in made.stages) == sum((2, 3, 4)[network] for network in used)
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made


def test_a_stage_has_ranges_without_gaps_and_a_single_network_is_not_named() -> None:
    assert spans((0, 1), (1, 2), (5, 9)).ranges == ((0, 2), (5, 9))
    assert spans((2, 5)).ranges == ((2, 5),)
    one = planned(spans((0, 9)), networks=())
    assert (one.entry, one.used) == (0, (0,))
    assert "networks" not in plan_document(one)


def test_weights_and_pruning_are_of_the_networks_ends(tmp_path: Path) -> None:
    policy = PolicySpec(name="entropy", thresholds=0.4, weights={1: 0.2, 4: 0.5})
    made = Plan(stages=(spans((0, 2), (5, 9)),), networks=NETWORKS, policy=policy)
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made
    made = replace(planned(spans((0, 2), (2, 5)), spans((5, 9))), prune={1: 0.7, 4: 0.9})
    write_plan(made, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml", SHAPE) == made
    assert "prune" not in plan_document(planned(spans((5, 9))))
