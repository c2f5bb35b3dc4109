from __future__ import annotations

import math
from typing import Any

import pytest

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.plan import Plan, PolicySpec, Stage, early_exit_plan, serial_plan, stock_plan

ENTROPY = PolicySpec(thresholds=0.4)


def split(first: int, end: int, *ramps: int) -> Split:
    return Split(first=first, end=end, batch=8, ramps=ramps)


def stage(*splits: Split, replicas: int = 1) -> Stage:
    return Stage(device="cpu", replicas=replicas, splits=splits)


def test_a_plan_knows_its_splits_ramps_and_blocks() -> None:
    plan = Plan(stages=(stage(split(0, 2, 1), split(2, 4)), stage(split(4, 6, 4, 5))), policy=ENTROPY)
    assert [(each.first, each.end) for each in plan.splits] == [(0, 2), (2, 4), (4, 6)]
    assert (plan.ramps, plan.num_blocks) == ((1, 4, 5), 6)
    assert [(each.first, each.end) for each in plan.stages] == [(0, 4), (4, 6)]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        pytest.param([[(0, 2)], [(3, 4)]], "gap: no split runs blocks 2 to 2", id="gap between stages"),
        pytest.param([[(0, 2), (4, 6)]], "gap: no split runs blocks 2 to 3", id="gap inside a stage"),
        pytest.param([[(0, 3)], [(2, 4)]], "overlap: two splits run block 2", id="overlap"),
        pytest.param([[(1, 4)]], "the first split must start at block 0, not 1", id="late start"),
        pytest.param([], "a plan needs at least one stage", id="no stages"),
        pytest.param([[]], "a stage needs at least one split", id="no splits"),
    ],
)
def test_plans_that_do_not_run_every_block_once_are_refused(stages: list[list[tuple[int, int]]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(stages=tuple(stage(*(split(*bounds) for bounds in splits)) for splits in stages))


def test_what_inputs_do_after_their_answer_is_one_thing_in_a_whole_plan() -> None:
    plan = Plan(stages=(stage(split(0, 2, 1), split(2, 4)), stage(split(4, 6))), policy=ENTROPY)
    assert plan.after_answer == "stop"
    staying = plan.with_after_answer("stay")
    assert (staying.after_answer, [each.stays for each in staying.splits]) == ("stay", [True] * 3)
    assert staying.with_after_answer("stop") == plan
    with pytest.raises(PlanError, match="blocks 4 on say 'stop', those before 'stay'"):
        Plan(stages=(staying.stages[0], plan.stages[1]), policy=ENTROPY)


def test_when_batches_overlap_is_one_thing_in_a_whole_plan_and_no_choice_of_the_planner() -> None:
    plan = Plan(stages=(stage(split(0, 2, 1), split(2, 4)), stage(split(4, 6))), policy=ENTROPY)
    overlapping = plan.with_overlap(4)
    assert (plan.overlap_below, overlapping.overlap_below) == (None, 4)
    assert [each.overlap_below for each in overlapping.splits] == [4] * 3
    assert overlapping.planned_stages == plan.stages
    with pytest.raises(PlanError, match="blocks 4 on say None, those before 4"):
        Plan(stages=(overlapping.stages[0], plan.stages[1]), policy=ENTROPY)


def test_active_ramps_need_a_policy() -> None:
    with pytest.raises(PlanError, match=r"ramps \[1\] are active, but no exit policy says when to leave"):
        Plan(stages=(stage(split(0, 2, 1)),))


def test_a_stage_needs_a_replica() -> None:
    with pytest.raises(PlanError, match="a stage needs at least 1 replica, not 0"):
        stage(split(0, 2), replicas=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({}, "'entropy' takes thresholds, not nothing", id="entropy without thresholds"),
        pytest.param(
            {"thresholds": 0.4, "votes": 2}, "'entropy' takes thresholds, not thresholds and votes", id="too much"
        ),
        pytest.param(
            {"name": "patience", "thresholds": 0.4}, "'patience' takes patience, not thresholds", id="other's"
        ),
        pytest.param(
            {"name": "recorded", "thresholds": 0.4},
            "'recorded' takes records and thresholds",
            id="recorded without records",
        ),
        pytest.param(
            {"name": "share", "thresholds": 0.4}, "'share' takes confidences and thresholds, not thresholds", id="share"
        ),
        pytest.param({"name": "tabi", "c": 0.9}, "'tabi' takes c and k, not c", id="tabi without a slope"),
        pytest.param({"name": "tabi", "c": 1.2, "k": 9}, "c, the confidence .* must be from 0 to 1, not 1.2", id="c"),
        pytest.param({"name": "tabi", "c": 0.9, "k": math.nan}, "k, the slope .* not nan", id="k"),
        pytest.param({"thresholds": 0.4, "weights": {5: math.nan}}, "after block 5 .* count nan", id="weight nan"),
        pytest.param(
            {"thresholds": 0.4, "weights": {5: 1.0}}, "at least 0, below 1", id="nothing for what comes after"
        ),
        pytest.param({"thresholds": 0.4, "weights": {5: -0.1}}, "at least 0, below 1", id="negative weight"),
        pytest.param({"name": "voting", "votes": 2, "weights": {5: 0.2}}, "'voting' takes no weights", id="own state"),
        pytest.param({"name": "voting"}, "'voting' takes votes, not nothing", id="voting without votes"),
        pytest.param({"name": "own"}, "'own' takes own, not nothing", id="own without a name"),
    ],
)
def test_a_policy_takes_its_own_numbers_only(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PolicySpec(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"name": "patience", "patience": 0}, "patience must be at least 1, not 0", id="patience"),
        pytest.param({"name": "voting", "votes": -1}, "votes must be at least 1, not -1", id="votes"),
        pytest.param({"thresholds": math.nan}, "thresholds must be finite numbers", id="not a number"),
        pytest.param({"thresholds": {0: 0.4, 1: math.inf}}, "thresholds must be finite numbers", id="infinite"),
        pytest.param(
            {"name": "share", "thresholds": 0.4, "confidences": {0: 1.5}},
            "confidences must be .* from 0 to 1",
            id="1.5",
        ),
        pytest.param(
            {"name": "share", "thresholds": 0.4, "confidences": math.nan}, "confidences must be .* from 0", id="nan"
        ),
        pytest.param({"name": "own", "own": "module"}, "is named module:name, not 'module'", id="own without a name"),
        pytest.param({"name": "own", "own": "a b:c"}, "is named module:name, not 'a b:c'", id="own with a space"),
    ],
)
def test_a_policy_refuses_numbers_and_names_that_mean_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PolicySpec(**fields)


def test_an_own_policy_may_be_in_a_module_of_a_package() -> None:
    assert PolicySpec(name="own", own="package.module:rule").own == "package.module:rule"


def test_the_stock_plan_is_one_split_without_ramps() -> None:
    plan = stock_plan(6, batch=8, device="V100", replicas=3)
    assert plan.splits == (Split(first=0, end=6, batch=8),)
    assert (plan.stages[0].device, plan.stages[0].replicas, plan.policy) == ("V100", 3, None)


def test_the_early_exit_plan_is_one_split_with_all_ramps() -> None:
    assert early_exit_plan(6, (1, 3), ENTROPY, batch=8).splits == (Split(first=0, end=6, batch=8, ramps=(1, 3)),)


def test_of_a_chain_built_in_plans_end_splits_where_networks_end_and_two_are_of_the_reference_alone() -> None:
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


def test_the_serial_plan_is_one_stage_cut_after_every_ramp() -> None:
    plan = serial_plan(6, (1, 3), ENTROPY, batch=8)
    assert len(plan.stages) == 1
    assert plan.splits == (split(0, 2, 1), split(2, 4, 3), split(4, 6))


def side_by_side(*shares: float) -> Plan:
    """Two chains of four blocks: one stage with ramp 1, and two stages with ramp 2."""
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


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((1.0,), "the plan has 2 chains and 1 shares; every chain needs one share"),
        ((0.5, 0.25, 0.25), "the plan has 2 chains and 3 shares"),
        ((1.0, 0.0), "the share of a chain must be above 0 and at most 1, not 0"),
        ((0.5, math.nan), "the share of a chain must be above 0 and at most 1, not nan"),
        ((0.5, 0.4), r"the shares of the chains must sum to 1, not to 0\.9"),
    ],
)
def test_shares_that_contradict_the_chains_are_refused(shares: tuple[float, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        side_by_side(*shares)
