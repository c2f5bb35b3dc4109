from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from earlyexit.engine.queue import OrderSpec
from earlyexit.network.boundary import Split
from optimizer.plans.plan import Plan, PolicySpec, Stage
from optimizer.plans.plan_file import (
    ModelShape,
    parse_plan,
    parse_policy,
    plan_document,
    policy_document,
    read_plan,
    write_plan,
)
from tests.offramp.cli.runs import written

SHAPE = ModelShape(num_blocks=6, ramps=(0, 1, 2, 3, 4))
GOOD = (Path(__file__).parent / "files/plan.yaml").read_text(encoding="utf-8")
PLAN = Plan(
    stages=(
        Stage(
            device="V100",
            replicas=2,
            splits=(Split(first=0, end=2, batch=32, ramps=(1,)), Split(first=2, end=4, batch=16, ramps=(3,))),
        ),
        Stage(device="cpu", replicas=1, splits=(Split(first=4, end=6, batch=8),)),
    ),
    policy=PolicySpec(name="confidence", thresholds={1: 0.9, 3: 0.8}),
    dispatch="deferred",
)


SIDE_BY_SIDE = (Path(__file__).parent / "files/side_by_side.yaml").read_text(encoding="utf-8")
"""A plan of two chains, which is also the next one."""
TWO_CHAINS = Plan(
    stages=(
        Stage(device="V100", replicas=2, splits=(Split(first=0, end=6, batch=8),)),
        Stage(device="K80", replicas=1, splits=(Split(first=0, end=2, batch=8),)),
        Stage(device="K80", replicas=1, splits=(Split(first=2, end=6, batch=4),)),
    ),
    shares=(0.75, 0.25),
)


ORDERS: list[tuple[OrderSpec, object]] = [
    (OrderSpec(name="shortest"), "shortest"),
    (OrderSpec(name="das", eta=0.3), {"name": "das", "eta": 0.3}),
    (OrderSpec(overdue_s=5.0), {"name": "deadline", "overdue_s": 5.0}),
]
"""Orders, and how a plan file says them."""


def test_plans_are_read_from_yaml_or_json(tmp_path: Path) -> None:
    assert read_plan(written(tmp_path / "plan.yaml", GOOD), SHAPE) == PLAN
    text = json.dumps(plan_document(PLAN))
    assert '"1": 0.9' in text
    assert read_plan(written(tmp_path / "plan.yaml", text), SHAPE) == PLAN
    assert read_plan(written(tmp_path / "plan.yaml", SIDE_BY_SIDE), SHAPE) == TWO_CHAINS


def test_a_plan_of_one_chain_is_written_in_schema_2_without_empty_fields(tmp_path: Path) -> None:
    document = plan_document(PLAN)
    [chain] = document["chains"]
    assert (document["schema_version"], chain["share"]) == (2, 1.0)
    assert [stage["device"] for stage in chain["stages"]] == ["V100", "cpu"]
    assert "after_answer" not in plan_document(PLAN)
    assert "overlap_below" not in plan_document(PLAN)
    assert plan_document(PLAN.with_splits(overlap_below=4)) == {**plan_document(PLAN), "overlap_below": 4}
    assert plan_document(PLAN.with_splits(after_answer="stay")) == {**plan_document(PLAN), "after_answer": "stay"}
    assert "order" not in plan_document(PLAN)
    for order, said in ORDERS:
        assert plan_document(replace(PLAN, order=order)) == {**plan_document(PLAN), "order": said}
    assert "tokens" not in json.dumps(plan_document(PLAN))
    path = written(tmp_path / "plan.yaml", GOOD.replace("batch: 32,", "batch: 32, tokens: 256,"))
    assert read_plan(path, SHAPE).splits[0].tokens == 256


FIRST = PLAN.stages[:1]
WHOLE = Split(first=0, end=6, batch=64)


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        TWO_CHAINS,
        PLAN.with_splits(after_answer="stay"),
        PLAN.with_splits(overlap_below=4),
        *(replace(PLAN, order=order) for order, _ in ORDERS),
        Plan(stages=(Stage(device="cpu", replicas=1, splits=(replace(WHOLE, tokens=512),)),)),
        Plan(stages=FIRST, policy=PolicySpec(thresholds=0.4), epoch=7),
        Plan(stages=FIRST, policy=PolicySpec(name="patience", patience=3)),
        Plan(stages=FIRST, policy=PolicySpec(name="share", thresholds=0.5, confidences={1: 0.9, 3: 0.8})),
        Plan(stages=FIRST, policy=PolicySpec(name="own", own="module:rule")),
        Plan(stages=(Stage(device="cpu", replicas=1, splits=(WHOLE,)),), predicted={"rate_per_s": 123.4}),
    ],
)
def test_a_written_plan_is_read_back_equal(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    endless = replace(plan, predicted={"latency_s": math.inf})
    assert parse_plan(plan_document(endless)).predicted == {"latency_s": None}, "JSON has no infinity"


POLICY = GOOD[GOOD.index("  name: confidence") : GOOD.index("stages")]
RECORDED = "  # another\n  name: recorded\n  thresholds: 0.4\n  records: gone.npz\n"


def test_without_a_models_shape_only_the_plan_itself_is_checked(tmp_path: Path) -> None:
    path = written(tmp_path / "plan.yaml", GOOD.replace(POLICY, RECORDED))
    assert read_plan(path).policy == PolicySpec(name="recorded", thresholds=0.4, records="gone.npz")
    assert read_plan(written(tmp_path / "plan.yaml", GOOD.replace("end: 6", "end: 9"))).num_blocks == 9


@pytest.mark.parametrize(
    ("policy", "document"),
    [
        (
            PolicySpec(name="confidence", thresholds=MappingProxyType({1: 0.9})),
            {"name": "confidence", "thresholds": {1: 0.9}},
        ),
        (
            PolicySpec(name="tabi", c=0.9, k=10.0, weights={3: 0.25}),
            {"name": "tabi", "c": 0.9, "k": 10.0, "weights": {3: 0.25}},
        ),
        (
            PolicySpec(name="foreseen", thresholds={3: 0.25}, decay=16.0),
            {"name": "foreseen", "thresholds": {3: 0.25}, "decay": 16.0},
        ),
    ],
    ids=["thresholds", "an ensemble", "tokens"],
)
def test_a_policy_alone_is_read_back(policy: PolicySpec, document: dict[str, Any]) -> None:
    assert policy_document(policy) == document
    assert type(policy_document(policy).get("thresholds", {})) is dict, "as YAML writes it"
    assert parse_policy(json.loads(json.dumps(document))) == policy
