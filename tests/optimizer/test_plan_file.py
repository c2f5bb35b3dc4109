from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from earlyexit.engine.queue import OrderSpec
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import (
    ModelShape,
    parse_plan,
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


def test_a_plan_of_two_chains_is_read_from_yaml(tmp_path: Path) -> None:
    assert read_plan(write(tmp_path, SIDE_BY_SIDE), SHAPE) == TWO_CHAINS


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("share: 0.25", "share: 0", "9: chains.1.share: Input should be greater than 0"),
        ("share: 0.25", "share: -0.25", "9: chains.1.share: Input should be greater than 0"),
        ("share: 0.25", "share: 0.3", "3: the shares of the chains must sum to 1, not to 1.05"),
        ("share: 0.25", "share: a quarter", "9: chains.1.share: Input should be a valid number"),
        ("share: 0.25\n", "part: 0.25\n", "9: chains.1.part: "),
        ("{first: 2, end: 6", "{first: 2, end: 5", "16: the last split ends at block 5, the model has 6 blocks"),
        ("{first: 0, end: 2", "{first: 1, end: 2", "13: the first split must start at block 0, not 1"),
        ("{first: 2, end: 6", "{first: 3, end: 6", "16: gap: no split runs blocks 2 to 2"),
        ("device: V100", "device: V1000", "5: unknown device 'V1000'"),
        ("schema_version: 2", "stages: []", "1: stages: "),
    ],
)
def test_a_plan_of_contradicting_chains_is_refused_with_file_and_line(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    assert SIDE_BY_SIDE.count(old) == 1
    path = write(tmp_path, SIDE_BY_SIDE.replace(old, new))
    with pytest.raises(PlanError) as refused:
        read_plan(path, SHAPE)
    assert str(refused.value).startswith(f"{path}:{said}")


def test_chains_that_end_at_different_blocks_are_refused_without_a_models_shape(tmp_path: Path) -> None:
    path = write(tmp_path, SIDE_BY_SIDE.replace("{first: 2, end: 6", "{first: 2, end: 5"))
    with pytest.raises(PlanError, match=r"plan\.yaml:16: the chain ends at block 5, the one before it at block 6$"):
        read_plan(path)


def test_more_chains_than_allowed_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, SIDE_BY_SIDE)
    with pytest.raises(PlanError, match=r"plan\.yaml:3: 2 chains side by side; at most 1 are allowed$"):
        read_plan(path, replace(SHAPE, most_chains=1))


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


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


SECOND = "{first: 2, end: 4, batch: 16, ramps: [3]}"
POLICY = GOOD[GOOD.index("  name: confidence") : GOOD.index("stages")]
RECORDED = "  # another\n  name: recorded\n  thresholds: 0.4\n  records: gone.npz\n"


MISTAKES = (
    ("- {first: 2,", "- {first: 3,", "13: gap: no split runs blocks 2 to 2"),
    ("- {first: 2,", "- {first: 1,", "13: overlap: two splits run block 1"),
    ("first: 4", "first: 5", "16: gap: no split runs blocks 4 to 4"),
    ("{first: 0,", "{first: 1,", "12: the first split must start at block 0, not 1"),
    ("end: 6", "end: 7", "16: the last split ends at block 7, the model has 6 blocks"),
    ("batch: 8", "batch: 8\n        ramps: [5]", "16: the model has no ramps [5]; its ramps are [0, 1, 2, 3, 4]"),
    ("ramps: [3]", "ramps: [5]", "13: ramp 5 is outside its split, whose blocks are 2 to 3"),
    ("batch: 8", "batch: 0", "18: stages.1.splits.0.batch: "),
    ("replicas: 2", "replicas: 0", "10: stages.0.replicas: "),
    ("device: V100", "device: V1000", "9: unknown device 'V1000'; known: cpu,"),
    ("replicas: 2", "copies: 2", "10: stages.0.copies: "),
    ("schema_version: 1", "schema_version: 3", "1: schema_version: Input should be 1 or 2"),
    ("stages:\n", "levels:\n", "9: levels: "),
    (
        "dispatch: deferred",
        "dispatch: eager",
        "2: dispatch: Input should be 'auto', 'work-conserving', 'deferred' or 'filling'",
    ),
    ("dispatch: deferred", "after_answer: leave", "2: after_answer: Input should be 'stop' or 'stay'"),
    ("dispatch: deferred", "overlap_below: 0", "2: overlap_below: Input should be greater than or equal to 1"),
    ("dispatch: deferred", "order: longest", "2: order: Input should be 'arrival', 'deadline', 'shortest' or 'das'"),
    ("dispatch: deferred", "order: {name: das, eta: 1.5}", "2: eta must be between 0 and 1, not 1.5"),
    ("dispatch: deferred", "order: {name: das, eta: 0.5, q: 0.25}", "2: eta and q must sum to 1, not to 0.75"),
    ("dispatch: deferred", "order: {name: arrival, eta: 0.5}", "2: the order 'arrival' takes no eta"),
    ("dispatch: deferred", "order: {name: das, etta: 0.5}", "2: order.etta: "),
    ("dispatch: deferred", "order: [das]", "2: order: "),
    ("name: confidence", "name: patience", "4: exit policy 'patience' takes patience, not thresholds"),
    ("first: 4", 'first: "4"', "16: stages.1.splits.0.first: "),
    ("1: 0.9", "1: high", "6: policy.thresholds.1: "),
    ("1: 0.9", "early: 0.9", "6: policy.thresholds.early: "),
    (f"- {SECOND}", "- {first: 2", "14: not YAML:"),
    ("dispatch: deferred", "dispatch: \x07", "2: not YAML:"),
    ("dispatch: deferred", "? [1]\n: 2", "2: not YAML:"),
    (GOOD, "", "1: the plan: Input should be a mapping with schema_version, chains, stages, policy,"),
    (GOOD, "- 1\n", "1: the plan: Input should be a mapping with schema_version, chains, stages, policy,"),
    ("3: 0.8", "5: 0.8", "7: thresholds for ramps [5]; the model's ramps are [0,"),
    ("1: 0.9", "1: .nan", "6: policy.thresholds.1: "),
    (POLICY, "  # another\n  thresholds: .inf\n", "5: policy.thresholds: "),
    (POLICY, "  # another\n  name: patience\n  patience: 0\n", "6: policy.patience: "),
    (POLICY, "  # another\n  name: voting\n  votes: 0\n", "6: policy.votes: "),
    (POLICY, "  # another\n  name: own\n  own: rule\n", "6: an own exit policy is named module:name, not 'rule'"),
    (POLICY, RECORDED, "7: gone.npz: no such file of exit records"),
    (GOOD, "epoch: 1\nstages: &a [*a]\n", "2: not YAML: an alias stands inside what it names"),
    (GOOD, "epoch: 1\npredicted: &a\n  x: {y: *a}\n", "2: not YAML: an alias stands inside what it names"),
    ("dispatch: deferred", "predicted: {rate_per_s: fast}", "2: rate_per_s must be a number, at least 0, not 'fast'"),
    ("dispatch: deferred", "predicted: {rate_per_s: .nan}", "2: rate_per_s must be a number, at least 0, not nan"),
    ("dispatch: deferred", "predicted: {tokens_per_input: -1}", "2: tokens_per_input must be a number, at least 0"),
    ("dispatch: deferred", "predicted: {tokens_per_input: .inf}", "2: tokens_per_input must be a number, at least 0"),
    (GOOD, "epoch: 2026-13-45\n", "1: not YAML: month must be in 1..12"),
    (GOOD, "[" * 3000, "1: not YAML: nested too deeply"),
    (GOOD, "stages: []\n", "1: stages: "),
    (GOOD, "chains: []\n", "1: chains: "),
    (
        GOOD,
        "epoch: 1\n",
        "1: a plan needs either `chains`, each with `share` and `stages`, or the `stages` of one chain",
    ),
    ("dispatch: deferred", "chains: [{stages: []}]", "2: chains.0.stages: "),
)
"""What is written instead of what, and what is said: the line, then the field or what is allowed."""


def test_a_plan_that_is_wrong_is_refused_with_file_and_line(tmp_path: Path) -> None:
    for old, new, said in MISTAKES:
        path = write(tmp_path, changed(old, new))
        with pytest.raises(PlanError) as refused:
            read_plan(path, SHAPE)
        assert str(refused.value).startswith(f"{path}:{said}"), new


def test_without_a_models_shape_a_records_file_may_be_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, changed(POLICY, RECORDED))
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


def test_plain_data_is_held_against_the_models_shape() -> None:
    with pytest.raises(PlanError, match="plan:1: the last split ends at block 2, the model has 3 blocks"):
        parse_plan({"stages": [{"splits": [{"first": 0, "end": 2, "batch": 4}]}]}, ModelShape(num_blocks=3, ramps=()))


def test_a_policy_alone_is_read_back_and_refused_by_the_name_of_its_place() -> None:
    policy = PolicySpec(name="confidence", thresholds=MappingProxyType({1: 0.9}))
    assert policy_document(policy) == {"name": "confidence", "thresholds": {1: 0.9}}
    assert type(policy_document(policy)["thresholds"]) is dict, "as YAML writes it"
    assert parse_policy(policy_document(policy)) == policy
    with pytest.raises(PlanError, match=r"^policy:1: the policy: Input should be a mapping with name, thresholds, "):
        parse_policy([])
    with pytest.raises(PlanError, match=r"^control\.policy:1: votes: "):
        parse_policy({"name": "voting", "votes": 0}, where="control.policy")


def test_a_policy_of_an_ensemble_keeps_its_weights() -> None:
    policy = PolicySpec(name="tabi", c=0.9, k=10.0, weights={3: 0.25})
    assert policy_document(policy) == {"name": "tabi", "c": 0.9, "k": 10.0, "weights": {3: 0.25}}
    assert parse_policy(json.loads(json.dumps(policy_document(policy)))) == policy


def test_a_policy_of_tokens_keeps_its_decay() -> None:
    policy = PolicySpec(name="foreseen", thresholds={3: 0.25}, decay=16.0)
    assert policy_document(policy) == {"name": "foreseen", "thresholds": {3: 0.25}, "decay": 16.0}
    assert parse_policy(policy_document(policy)) == policy


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"name": "confidence", "thresholds": 0.5, "decay": 0.0}, "decay must be a number of tokens above 0, not 0"),
        (
            {"name": "confidence", "thresholds": 0.5, "decay": float("nan")},
            "Input should be a finite number, not nan",
        ),
        ({"name": "entropy", "thresholds": 0.5, "decay": 4.0}, "exit policy 'entropy' takes no decay"),
        ({"name": "voting", "votes": 2, "decay": 4.0}, "exit policy 'voting' takes no decay"),
    ],
    ids=["none", "no number", "entropy", "no score"],
)
def test_a_decay_that_means_nothing_is_refused(document: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_policy(document)


def test_weights_of_ramps_that_the_model_lacks_are_refused_with_their_line(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("  thresholds:", "  weights:\n    7: 0.2\n  thresholds:"))
    with pytest.raises(PlanError, match=r"plan\.yaml:6: weights for ramps \[7\]; the model's ramps are"):
        read_plan(path, SHAPE)


def test_a_plan_without_token_budgets_does_not_speak_of_them() -> None:
    assert "tokens" not in json.dumps(plan_document(PLAN))


def test_a_plan_with_token_budgets_is_refused_for_a_model_without_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("batch: 32,", "batch: 32, tokens: 256,"))
    assert read_plan(path, SHAPE).splits[0].tokens == 256
    images = ModelShape(num_blocks=6, ramps=(0, 1, 2, 3, 4), has_tokens=False)
    with pytest.raises(PlanError, match=r"plan\.yaml:12: tokens: 256: .* have no tokens"):
        read_plan(path, images)


def test_where_answers_are_tokens_of_sequences_none_stays(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "after_answer: stay\n")
    assert read_plan(path, SHAPE).after_answer == "stay"
    with pytest.raises(PlanError, match=rf"plan\.yaml:{len(GOOD.splitlines()) + 1}: after_answer: .* stays"):
        read_plan(path, replace(SHAPE, generates=True))


def test_a_budget_of_no_tokens_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("batch: 32,", "batch: 32, tokens: 0,"))
    with pytest.raises(PlanError, match=r"plan\.yaml:12: .*tokens"):
        read_plan(path, SHAPE)
