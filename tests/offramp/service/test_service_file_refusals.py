from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optimizer.calibration_file import RECORDS_FILE
from profiles.records import ExitRecords
from tests.offramp.service.service_files import ENTROPY, TABLE, Files, emulated
from tests.offramp.service.service_folders import WEIGHTS_BYTES, with_card, write_records, write_shares

MODEL = {"folder": "model", "latency": {"cpu": TABLE}}
COSTLY = {"minimize": "cost", "rate_per_s": 1.0}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "top": ({"slos": 1}, "slos", "slos: unknown field; known are schema_version, name, model"),
    "inside": (
        {"planner": {"objective": {"minimise": "cost"}}},
        "minimise",
        "planner.objective.minimise: unknown field; known are maximize, minimize, rate_per_s, ramp_budget",
    ),
    "cluster": (
        {"cluster": {"devices": {"cpu": {"number": 1}}}}, "number", "cluster.devices.cpu.number: unknown field"
    ),
    "null": ({"planner": {"control": None}}, "control", "planner.control: Input should be a valid boolean, not null"),
    "null folder": ({"model": MODEL | {"folder": None}}, "folder", "model.folder: Input should be a valid string"),
    "name": ({"name": "a/b"}, "a/b", "String should match pattern"),
    "quoted number": ({"ingress": {"max_queued": "7"}}, "max_queued", "ingress.max_queued: Input should be a valid in"),
    "route": ({"ingress": {"route_prefix": "b/"}}, "route_prefix", "route_prefix: String should match pattern"),
    "period": ({"planner": {"batch_limit": 1, "period_s": 0}}, "period_s", "greater than 0"),
    "access": (
        {"access": {"keys_file": "keys", "keys_env": "KEYS"}},
        "keys_file",
        "access: keys_file and keys_env exclude each other: give one of them",
    ),
    "origin": ({"access": {"cors_origins": ["a.org"]}}, "cors", "access.cors_origins: 'a.org' is no origin like http"),
    "no latency": ({"model": MODEL | {"latency": {"V100": TABLE}}}, "latency", "no latency for cpu; it is given"),
    "real time stretched": (
        {"cluster": {"devices": {"cpu": {"count": 1}}, "time_scale": 2}}, "time_scale", "cpu cannot be stretched"
    ),
    "empty cluster": ({"cluster": {"devices": {"cpu": {"count": 0}}}}, "devices", "no accelerator"),
    "halves of halves": (
        {"model": MODEL | {"dtype": "bfloat16", "hop_dtype": "float16"}},
        "hop_dtype",
        "model.hop_dtype: Hidden states in bfloat16 have two bytes already: allowed is same",
    ),
    "hops": ({"model": MODEL | {"hop_dtype": "int8"}}, "hop_dtype", "hop_dtype: Input should be 'same' or 'float16'"),
    "attention": ({"model": MODEL | {"attention": "packed"}}, "attention", "attention: Input should be 'auto'"),
    "attention of a graph": (
        {"model": MODEL | {"backend": "onnx", "attention": "apart"}},
        "attention",
        "model.attention: ONNX Runtime attends in rows: allowed is auto, padded or slotted",
    ),
    "real latency slowed": ({"model": MODEL | {"slower": 2.0}}, "slower", "slower 2 is of emulated accelerators"),
    "tuning without probes": (
        {"planner": {"tuning": "guarantee", "probe_share": 0.0}}, "tuning", "needs probes, and probe_share is 0"
    ),
    "tuning without a budget": (
        {"planner": {"tuning": "apparate"}, "accuracy": {"budget": 0.0}},
        "tuning",
        "above 0, and it is 0: accuracy.budget says it",
    ),
    "tuning without a controller": (
        {"planner": {"tuning": "guarantee", "control": False}},
        "tuning",
        "tuning 'guarantee' is the controller's, and planner.control is false",
    ),
    "exits by recorded batches with a controller": (
        {"planner": {"strategy": "pame", "objective": {"minimize": "latency", "rate_per_s": 40.0}}},
        "strategy",
        "strategy pame plans from recorded batches, which a controller has none of; control: false",
    ),
    "tuner": ({"planner": {"tuning": "often"}}, "tuning", "Input should be 'off', 'guarantee', 'apparate' or 'pame'"),
    "order": ({"planner": {"order": "longest"}}, "order", "Input should be 'arrival', 'deadline', 'shortest' or 'das'"),
    "numbers of another order": (
        {"planner": {"order": {"name": "shortest", "eta": 0.5}}}, "order", "the order 'shortest' takes no eta"
    ),
    "objective": (
        {"planner": {"objective": {"maximize": "rate", "rate_per_s": 1.0}}},
        "objective",
        "allowed are {maximize: rate}, {minimize: cost, rate_per_s: ...} and",
    ),
    "unknown price": ({"planner": {"objective": COSTLY}}, "cpu", "plans are made by cost, and cpu has no usd_per_hour"),
    "threshold of no ramp": (
        {"accuracy": {"thresholds": {0: 0.5, 7: 0.5}}},
        "thresholds",
        "thresholds for ramps [7]; the model's ramps are [0, 1]",
    ),
    "records of another score": (
        {"accuracy": {"policy": "confidence", "thresholds": 0.9}}, "accuracy", "the policy is confidence, "
    ),
    "no records": ({"accuracy": {"records": "gone.npz"}}, "gone", "No such file"),
    "latency of another model": (
        emulated(latency={"emulated:V100": {"published": "bert-base", "length": 128}}),
        "emulated:V100",
        "has 12 blocks and ramps [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]; the model has 3 blocks and ramps [0, 1]",
    ),
    "rows": (
        {"model": MODEL | {"latency": {"cpu": TABLE | {"block_s": [[0.1, 0.2]]}}}},
        "cpu",
        "block_s has 1 rows; 3 are needed, one per block",
    ),
    "values": (
        {"model": MODEL | {"latency": {"cpu": TABLE | {"ramp_s": [[0.1], [0.1, 0.2]]}}}}, "cpu", "ramp_s.0 needs 2 val"
    ),
    "batch sizes": (
        {"model": MODEL | {"latency": {"cpu": TABLE | {"batch": [2, 1]}}}}, "cpu", "batch sizes must ascend"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "line", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said_with_its_line(files: Files, parts: dict[str, Any], line: str, words: str) -> None:
    at, said = files.refused(**parts)
    assert words in said
    lines = files.path.read_text(encoding="utf-8").splitlines()
    # A mapping stands where its first key does: on the line after its name.
    assert line in lines[at - 1] or line in lines[at - 2]


def test_an_slo_that_no_plan_keeps_names_what_binds_and_the_nearest(files: Files) -> None:
    at, said = files.refused(slo={"latency_s": 0.001, "slack": 0.0})
    assert files.path.read_text(encoding="utf-8").splitlines()[at - 2] == "slo:"
    assert said.startswith("no plan: the SLO of 1 ms binds; the nearest SLO that would do is ")


def test_of_an_emulated_cluster_the_nearest_slo_is_in_the_files_own_seconds(files: Files) -> None:
    plain = files.refused(**emulated(scale=1.0), slo={"latency_s": 0.001})
    assert files.refused(**emulated(scale=20.0), slo={"latency_s": 0.001}) == plain


def test_a_model_of_another_version_or_without_a_calibration_is_refused(files: Files) -> None:
    (files.model / "calibration.json").unlink()
    assert "not calibrated; run: offramp calibrate" in files.refused()[1]
    with_card(files.model, schema_version=3)
    at, said = files.refused()
    assert at == files.line_of("folder: model")
    assert "model.json: schema_version" in said


def test_exit_records_of_another_model_are_refused(files: Files) -> None:
    write_records(files.folder / "others.npz", num_blocks=4)
    at, said = files.refused(accuracy={"records": "others.npz"})
    assert at == files.line_of("others.npz")
    assert "holds 4 blocks and ramps [0, 1, 2]; the model has 3 blocks and ramps [0, 1]" in said


@pytest.mark.parametrize(
    ("parts", "at", "message"),
    [
        ({"planner": {"strategy": "apparate"}}, "strategy", "strategy apparate is not of a model that generates"),
        ({"planner": {"strategy": "pame", "control": False}}, "strategy", "strategy pame is not of a model that"),
        (
            {"planner": {"objective": {"minimize": "latency", "rate_per_s": 1.0}}},
            "minimize",
            "least latency is",
        ),
        ({"lengths": [3, 4]}, "- 3", "lengths are not of a model that generates"),
    ],
    ids=["apparate", "pame", "least latency", "lengths"],
)
def test_what_is_not_planned_of_steps_is_refused(parts: dict[str, Any], at: str, message: str, files: Files) -> None:
    with_card(files.model, task={"name": "token", "vocab_size": 9}, codec={"name": "prompt", "max_length": 16})
    line, said = files.refused(**parts)
    assert (line, said[: len(message)]) == (files.line_of(at), message)


def test_decisions_from_records_without_answers_are_refused(files: Files) -> None:
    path = files.model / RECORDS_FILE
    replace(ExitRecords.load(path), answers_NE=None).save(path)
    at, said = files.refused(**emulated(), accuracy={"budget": 0.01})
    assert at == files.line_of("budget")
    assert "holds losses and no answers" in said
    assert said.endswith("give on emulated accelerators model.decisions: computed")
    asked = {"policy": "recorded", "thresholds": 0.5}
    for parts in ({}, emulated(decisions="computed")):
        assert "give policy entropy, and on emulated" in files.refused(**parts, accuracy=asked)[1]
    assert files.read(**emulated(decisions="computed")).settings.plan.policy is not None
    assert files.read().settings.plan.policy is not None


@pytest.mark.parametrize(
    ("dtype", "needed"),
    [
        pytest.param("float32", WEIGHTS_BYTES, id="float32 as stored"),
        pytest.param("bfloat16", WEIGHTS_BYTES // 2, id="bfloat16 is half of it"),
    ],
)
def test_a_model_must_fit_its_accelerator(files: Files, dtype: str, needed: int) -> None:
    def parts(memory_bytes: int) -> dict[str, Any]:
        return {
            "model": {"folder": "model", "dtype": dtype, "latency": {"cpu": TABLE}},
            "cluster": {"devices": {"cpu": {"count": 1, "memory_bytes": memory_bytes}}},
        }

    assert files.read(**parts(needed)).name == "demo"
    said = files.refused(**parts(needed - 1))[1]
    assert said.startswith(f"a replica needs {needed / 1e9:.3g} GB, its parameters in {dtype}; cpu has ")


def test_a_plan_that_needs_more_than_the_cluster_has_is_refused(files: Files) -> None:
    files.write_plan(replicas=6)
    at, said = files.refused(planner={"plan": "plan.yaml"})
    assert at == files.line_of("plan.yaml")
    assert "needs 2 cpu more than the cluster has" in said


def test_a_plan_that_cannot_be_answered_from_records_is_refused_on_emulated_accelerators(files: Files) -> None:
    files.write_plan(device="emulated:V100", ramps=[0], policy=ENTROPY)
    said = files.refused(**emulated(), planner={"plan": "plan.yaml"})[1]
    assert "leaves by entropy; emulated accelerators answer from exit records: recorded" in said


def test_a_plan_with_ramps_that_the_controller_has_no_threshold_for_is_refused(files: Files) -> None:
    files.write_plan(ramps=[1], policy=ENTROPY)
    parts = {"accuracy": {"policy": "entropy", "thresholds": {0: 0.5}, "budget": 0.1}}
    said = files.refused(**parts, planner={"plan": "plan.yaml"})[1]
    assert "has ramps [1]; the controller has thresholds for [0]" in said
    assert files.read(**parts, planner={"plan": "plan.yaml", "control": False}).settings.control is None


def test_records_of_another_confidence_than_the_calibrations_are_refused(files: Files) -> None:
    write_shares(files.model, calibrated=0.9, recorded=0.1)
    _, words = files.refused(accuracy={"budget": 0.01})
    assert words.startswith("the calibration's shares are of values above 0: 0.9, 1: 0.9, those of ")
    assert words.endswith("exit_records.npz above 0: 0.1, 1: 0.1")


def test_thresholds_of_the_calibration_are_not_held_against_records_of_another_score(files: Files) -> None:
    write_shares(files.model, calibrated=0.9, recorded=0.9)
    write_records(files.folder / "entropies.npz")
    _, words = files.refused(accuracy={"policy": "entropy", "records": "entropies.npz"})
    assert words.startswith("the calibration's thresholds are of share, ")


MEASURED = {"model": MODEL | {"latency": {"cpu": TABLE | {"length": 4}}}}


@pytest.mark.parametrize(
    ("parts", "below", "words"),
    [
        ({"lengths": [2, 0]}, 2, "lengths: the 1. length is 0; an input has a whole number of tokens"),
        ({"lengths": []}, 0, "lengths: lengths of no input"),
        ({"lengths": 0.5}, 0, "lengths: a mean length is from 1 to"),
        ({"lengths": "gone.txt"}, 0, "gone.txt: cannot be read"),
        ({"lengths": [2, 5000]}, 1, "lengths: an input of 5000 tokens; the model takes at most"),
        ({"lengths": 3, "model": MODEL}, 0, "latency of cpu: its length is not known"),
    ],
)
def test_lengths_that_no_input_has_are_refused(files: Files, parts: dict[str, Any], below: int, words: str) -> None:
    line, said = files.refused(**MEASURED | parts)
    assert words in said
    assert line == files.line_of("lengths:") + below


def test_lengths_and_recorded_batches_exclude_each_other(files: Files) -> None:
    line, said = files.refused(**MEASURED, lengths=3, planner={"strategy": "pame", "control": False})
    assert said == "strategy pame plans by recorded batches, counted in inputs; leave lengths out"
    assert line == files.line_of("strategy")
