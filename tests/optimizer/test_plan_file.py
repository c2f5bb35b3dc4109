from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from earlyexit.engine.queue import OrderSpec
from earlyexit.network.boundary import Split
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import (
    ModelShape,
    parse_policy,
    plan_document,
    policy_document,
    read_plan,
    write_plan,
)

SHAPE = ModelShape(num_blocks=6, ramps=(0, 1, 2, 3, 4))
GOOD = """\
schema_version: 1
dispatch: deferred
policy:
  name: confidence
  thresholds:
    1: 0.9
    3: 0.8
stages:
  - device: V100
    replicas: 2
    splits:
      - {first: 0, end: 2, batch: 32, ramps: [1]}
      - {first: 2, end: 4, batch: 16, ramps: [3]}
  - device: cpu
    splits:
      - first: 4
        end: 6
        batch: 8
"""
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


SIDE_BY_SIDE = """\
schema_version: 2
chains:
  - share: 0.75
    stages:
      - device: V100
        replicas: 2
        splits:
          - {first: 0, end: 6, batch: 8}
  - share: 0.25
    stages:
      - device: K80
        splits:
          - {first: 0, end: 2, batch: 8}
      - device: K80
        splits:
          - {first: 2, end: 6, batch: 4}
"""
"""A plan of two chains."""
TWO_CHAINS = Plan(
    stages=(
        Stage(device="V100", replicas=2, splits=(Split(first=0, end=6, batch=8),)),
        Stage(device="K80", replicas=1, splits=(Split(first=0, end=2, batch=8),)),
        Stage(device="K80", replicas=1, splits=(Split(first=2, end=6, batch=4),)),
    ),
    shares=(0.75, 0.25),
)


def write(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plan_is_read_from_yaml(tmp_path: Path) -> None:
    assert read_plan(write(tmp_path, GOOD), SHAPE) == PLAN


def test_a_plan_is_read_from_json_whose_keys_are_strings(tmp_path: Path) -> None:
    text = json.dumps(plan_document(PLAN))
    assert '"1": 0.9' in text
    assert read_plan(write(tmp_path, text), SHAPE) == PLAN


def test_a_plan_of_two_chains_is_read_from_yaml(tmp_path: Path) -> None:
    assert read_plan(write(tmp_path, SIDE_BY_SIDE), SHAPE) == TWO_CHAINS


def test_a_plan_of_one_chain_is_written_in_schema_2() -> None:
    document = plan_document(PLAN)
    [chain] = document["chains"]
    assert (document["schema_version"], chain["share"]) == (2, 1.0)
    assert [stage["device"] for stage in chain["stages"]] == ["V100", "cpu"]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(PLAN, id="two stages"),
        pytest.param(TWO_CHAINS, id="two chains"),
        pytest.param(PLAN.with_after_answer("stay"), id="two stages whose inputs stay"),
        pytest.param(PLAN.with_overlap(4), id="two stages whose batches overlap"),
        pytest.param(
            Plan(stages=(Stage(device="cpu", replicas=1, splits=(Split(first=0, end=6, batch=64, tokens=512),)),)),
            id="a budget of tokens",
        ),
        pytest.param(Plan(stages=PLAN.stages[:1], policy=PolicySpec(thresholds=0.4), epoch=7), id="one threshold"),
        pytest.param(Plan(stages=PLAN.stages[:1], policy=PolicySpec(name="patience", patience=3)), id="patience"),
        pytest.param(
            Plan(stages=PLAN.stages[:1], policy=PolicySpec(name="share", thresholds=0.5, confidences={1: 0.9, 3: 0.8})),
            id="share",
        ),
        pytest.param(Plan(stages=PLAN.stages[:1], policy=PolicySpec(name="own", own="module:rule")), id="own"),
        pytest.param(
            Plan(
                stages=(Stage(device="cpu", replicas=1, splits=(Split(first=0, end=6, batch=1),)),),
                predicted={"rate_per_s": 123.4, "latency_s": 0.05},
            ),
            id="no policy, with predictions",
        ),
    ],
)
def test_a_written_plan_is_read_back_equal(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan


def test_only_a_plan_whose_inputs_stay_says_so() -> None:
    assert "after_answer" not in plan_document(PLAN)
    assert "overlap_below" not in plan_document(PLAN)
    assert plan_document(PLAN.with_overlap(4)) == {**plan_document(PLAN), "overlap_below": 4}
    assert plan_document(PLAN.with_after_answer("stay")) == {**plan_document(PLAN), "after_answer": "stay"}


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (OrderSpec(name="shortest"), "shortest"),
        (OrderSpec(name="das", eta=0.3), {"name": "das", "eta": 0.3}),
        (OrderSpec(overdue_s=5.0), {"name": "deadline", "overdue_s": 5.0}),
    ],
)
def test_only_an_order_of_its_own_is_said(order: OrderSpec, said: object, tmp_path: Path) -> None:
    assert "order" not in plan_document(PLAN)
    plan = replace(PLAN, order=order)
    assert plan_document(plan) == {**plan_document(PLAN), "order": said}
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan


POLICY = GOOD[GOOD.index("  name: confidence") : GOOD.index("stages")]
RECORDED = "  # another\n  name: recorded\n  thresholds: 0.4\n  records: gone.npz\n"


def test_without_a_models_shape_a_records_file_may_be_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace(POLICY, RECORDED))
    assert read_plan(path).policy == PolicySpec(name="recorded", thresholds=0.4, records="gone.npz")


def test_without_a_models_shape_only_the_plan_itself_is_checked(tmp_path: Path) -> None:
    assert read_plan(write(tmp_path, GOOD.replace("end: 6", "end: 9"))).num_blocks == 9


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


def test_budgets_of_tokens_are_said_where_there_are_some(tmp_path: Path) -> None:
    assert "tokens" not in json.dumps(plan_document(PLAN))
    path = write(tmp_path, GOOD.replace("batch: 32,", "batch: 32, tokens: 256,"))
    assert read_plan(path, SHAPE).splits[0].tokens == 256
