from __future__ import annotations

from pathlib import Path

import pytest

from earlyexit.errors import InputError, ModelFolderError, PlanError
from offramp.service.plans import resolve_plan
from optimizer.calibration_file import CalibrationCard
from optimizer.plan import PolicySpec, serial_plan, stock_plan
from optimizer.plan_file import write_plan


@pytest.fixture
def calibrated(model: Path) -> Path:
    card = CalibrationCard(
        policy="entropy", thresholds={0: 0.4, 1: 0.5}, budget=0.01, confidence=0.9, tested={}, provenance={}
    )
    (model / "calibration.json").write_text(card.model_dump_json(), encoding="utf-8")
    return model


def test_a_built_in_plan_has_a_batch_of_32_on_one_cpu_replica_unless_told_otherwise(model: Path) -> None:
    assert resolve_plan("stock", model) == stock_plan(3, batch=32, device="cpu", replicas=1)
    told = resolve_plan("stock", model, batch=4, replicas=2, device="cuda")
    assert told == stock_plan(3, batch=4, device="cuda", replicas=2)


def test_a_built_in_plan_with_ramps_takes_the_calibrations_thresholds(calibrated: Path) -> None:
    policy = PolicySpec(thresholds={0: 0.4, 1: 0.5})
    assert resolve_plan("serial", calibrated) == serial_plan(3, (0, 1), policy, batch=32)
    assert resolve_plan("early-exit", calibrated).ramps == (0, 1)


def test_a_plan_of_a_file_is_that_of_the_file(model: Path, tmp_path: Path) -> None:
    plan = stock_plan(3, batch=7)
    write_plan(plan, tmp_path / "plan.yaml")
    assert resolve_plan(str(tmp_path / "plan.yaml"), model) == plan


def test_numbers_for_built_in_plans_are_refused_beside_a_file(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(stock_plan(3, batch=7), path)
    with pytest.raises(InputError, match=r"--batch and --device: only for built-in plans; .* says it for every stage"):
        resolve_plan(str(path), model, batch=32, device="cpu")


def test_a_name_that_is_neither_built_in_nor_a_file_is_refused_with_those_built_in(model: Path) -> None:
    with pytest.raises(PlanError, match="--plan serail: no such file; built in are stock, early-exit, serial"):
        resolve_plan("serail", model, batch=4)


def test_an_uncalibrated_model_has_no_plan_with_ramps(model: Path) -> None:
    with pytest.raises(ModelFolderError, match="is not calibrated; run: offramp calibrate"):
        resolve_plan("serial", model)


def test_an_unknown_device_is_refused_with_the_known_ones(model: Path) -> None:
    with pytest.raises(PlanError, match="unknown device 'tpu'; known: cpu, cuda"):
        resolve_plan("stock", model, device="tpu")
