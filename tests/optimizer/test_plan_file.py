from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from earlyexit.errors import PlanError
from earlyexit.split import Split
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import ModelShape, parse_plan, plan_document, read_plan, write_plan

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


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "plan.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


def test_a_plan_is_read_from_yaml(tmp_path: Path) -> None:
    assert read_plan(write(tmp_path, GOOD), SHAPE) == PLAN


def test_a_plan_is_read_from_json_whose_keys_are_strings(tmp_path: Path) -> None:
    text = json.dumps(plan_document(PLAN))
    assert '"1": 0.9' in text
    assert read_plan(write(tmp_path, text), SHAPE) == PLAN


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(PLAN, id="two stages"),
        pytest.param(Plan(stages=PLAN.stages[:1], policy=PolicySpec(thresholds=0.4), epoch=7), id="one threshold"),
        pytest.param(Plan(stages=PLAN.stages[:1], policy=PolicySpec(name="patience", patience=3)), id="patience"),
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


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def with_policy(text: str) -> str:
    """The good plan with another policy, whose first line is line 5."""
    return GOOD.replace(GOOD[GOOD.index("policy") : GOOD.index("stages")], f"policy:\n  # another\n  {text}\n")


SECOND = "{first: 2, end: 4, batch: 16, ramps: [3]}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(changed("- {first: 2,", "- {first: 3,"), "13: gap: no split runs blocks 2 to 2", id="gap"),
        pytest.param(
            changed("- {first: 2,", "- {first: 1,"), "13: overlap: block 1 is in an earlier split already", id="overlap"
        ),
        pytest.param(changed("first: 4", "first: 5"), "16: gap: no split runs blocks 4 to 4", id="gap between stages"),
        pytest.param(changed("{first: 0,", "{first: 1,"), "12: gap: no split runs blocks 0 to 0", id="late start"),
        pytest.param(
            changed("end: 6", "end: 7"), "16: the last split ends at block 7, the model has 6 blocks", id="wrong end"
        ),
        pytest.param(
            changed("batch: 8", "batch: 8\n        ramps: [5]"),
            "16: the model has no ramps [5]; its ramps are [0, 1, 2, 3, 4]",
            id="unknown ramp",
        ),
        pytest.param(
            changed("ramps: [3]", "ramps: [5]"),
            "13: ramp 5 is outside its split, whose blocks are 2 to 3",
            id="ramp outside its split",
        ),
        pytest.param(
            changed("batch: 8", "batch: 0"),
            "18: stages.1.splits.0.batch: Input should be greater than or equal to 1",
            id="batch 0",
        ),
        pytest.param(
            changed("replicas: 2", "replicas: 0"),
            "10: stages.0.replicas: Input should be greater than or equal to 1",
            id="no replicas",
        ),
        pytest.param(changed("device: V100", "device: V1000"), "9: unknown device 'V1000'; known: cpu,", id="device"),
        pytest.param(
            changed("replicas: 2", "copies: 2"), "10: stages.0.copies: Extra inputs are not permitted", id="unknown key"
        ),
        pytest.param(
            changed("schema_version: 1", "schema_version: 2"), "1: schema_version: Input should be 1", id="schema"
        ),
        pytest.param(
            changed("dispatch: deferred", "dispatch: eager"),
            "2: dispatch: Input should be 'work-conserving' or 'deferred'",
            id="dispatch",
        ),
        pytest.param(
            changed("name: confidence", "name: patience"),
            "4: exit policy 'patience' takes patience, not thresholds",
            id="policy with another's numbers",
        ),
        pytest.param(
            changed("first: 4", 'first: "4"'),
            "16: stages.1.splits.0.first: Input should be a valid integer",
            id="number in quotes",
        ),
        pytest.param(
            changed("1: 0.9", "1: high"), "6: policy.thresholds.1: Input should be a valid number", id="threshold"
        ),
        pytest.param(
            changed("1: 0.9", "early: 0.9"),
            "6: policy.thresholds.early: Input should be a valid integer",
            id="threshold of no ramp",
        ),
        pytest.param(changed(f"- {SECOND}", "- {first: 2"), "14: not YAML:", id="not YAML"),
        pytest.param(changed("dispatch: deferred", "dispatch: \x07"), "2: not YAML:", id="control character"),
        pytest.param(changed("dispatch: deferred", "? [1]\n: 2"), "2: not YAML:", id="a list as a key"),
        pytest.param(
            "", "1: the plan: Input should be a mapping with schema_version, stages, policy,", id="empty file"
        ),
        pytest.param(
            "- 1\n", "1: the plan: Input should be a mapping with schema_version, stages, policy,", id="a list"
        ),
        pytest.param(
            changed("3: 0.8", "5: 0.8"), "7: thresholds for ramps [5]; the model's ramps are [0,", id="no ramp"
        ),
        pytest.param(
            changed("1: 0.9", "1: .nan"), "6: policy.thresholds.1: Input should be a finite number", id="threshold nan"
        ),
        pytest.param(
            with_policy("thresholds: .inf"), "5: policy.thresholds: Input should be a finite number", id="threshold inf"
        ),
        pytest.param(
            with_policy("name: patience\n  patience: 0"),
            "6: policy.patience: Input should be greater than or equal to 1",
            id="patience 0",
        ),
        pytest.param(
            with_policy("name: voting\n  votes: 0"),
            "6: policy.votes: Input should be greater than or equal to 1",
            id="no votes",
        ),
        pytest.param(
            with_policy("name: own\n  own: rule"),
            "6: an own exit policy is named module:name, not 'rule'",
            id="own without a module",
        ),
        pytest.param(
            with_policy("name: recorded\n  thresholds: 0.4\n  records: gone.npz"),
            "7: gone.npz: no such file of exit records",
            id="records that are gone",
        ),
        pytest.param("epoch: 1\nstages: &a [*a]\n", "2: not YAML: an alias stands inside what it names", id="alias"),
        pytest.param(
            "epoch: 1\npredicted: &a\n  x: {y: *a}\n",
            "2: not YAML: an alias stands inside what it names",
            id="alias, deep",
        ),
        pytest.param("epoch: 2026-13-45\n", "1: not YAML: month must be in 1..12", id="a date that is none"),
        pytest.param("[" * 3000, "1: not YAML: nested too deeply", id="depth"),
        pytest.param("stages: []\n", "1: stages: List should have at least 1 item", id="no stages"),
    ],
)
def test_a_plan_that_is_wrong_is_refused_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(PlanError) as refused:
        read_plan(path, SHAPE)
    assert str(refused.value).startswith(f"{path}:{message}")


def test_without_a_models_shape_a_records_file_may_be_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, with_policy("name: recorded\n  thresholds: 0.4\n  records: gone.npz"))
    assert read_plan(path).policy == PolicySpec(name="recorded", thresholds=0.4, records="gone.npz")


def test_active_ramps_without_a_policy_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace(GOOD[GOOD.index("policy") : GOOD.index("stages")], ""))
    with pytest.raises(PlanError, match=r"ramps \[1, 3\] are active, but no exit policy says when to leave"):
        read_plan(path)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan\.yaml:1: not UTF-8 at byte 10"):
        read_plan(write(tmp_path, b"dispatch: \xff\n"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"gone\.yaml: no such file"):
        read_plan(tmp_path / "gone.yaml")


def test_without_a_models_shape_only_the_plan_itself_is_checked(tmp_path: Path) -> None:
    assert read_plan(write(tmp_path, changed("end: 6", "end: 9"))).num_blocks == 9


def test_plain_data_is_parsed_without_a_file() -> None:
    document: dict[str, Any] = {"stages": [{"splits": [{"first": 0, "end": 2, "batch": 0}]}]}
    with pytest.raises(PlanError, match=r"plan:1: stages\.0\.splits\.0\.batch: Input should be greater"):
        parse_plan(document)
    document["stages"][0]["splits"][0]["batch"] = 4
    assert parse_plan(document).splits == (Split(first=0, end=2, batch=4),)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        pytest.param(Path("/dev/full"), "No space left on device", id="full"),
        pytest.param(Path("/proc/plan.yaml"), "(No such file or directory|Permission denied)", id="no files there"),
        pytest.param(Path("/tmp") / ("p" * 300), "File name too long", id="long name"),
        pytest.param(Path("/"), "Is a directory", id="folder"),
    ],
)
def test_a_plan_that_cannot_be_written_is_refused_with_the_reason(path: Path, reason: str) -> None:
    with pytest.raises(PlanError, match=f"^{path}: cannot be written: {reason}$"):
        write_plan(PLAN, path)
