from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optimizer.calibration_file import RECORDS_FILE
from profiles.records import ExitRecords
from tests.offramp.service.service_files import ENTROPY, TABLE, Files, emulated
from tests.offramp.service.service_folders import WEIGHTS_BYTES, with_card, write_records, write_shares

MODEL = {"folder": "model", "latency": {"cpu": TABLE}}


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


def test_lengths_and_recorded_batches_exclude_each_other(files: Files) -> None:
    line, said = files.refused(**MEASURED, lengths=3, planner={"strategy": "pame", "control": False})
    assert said == "strategy pame plans by recorded batches, counted in inputs; leave lengths out"
    assert line == files.line_of("strategy")
