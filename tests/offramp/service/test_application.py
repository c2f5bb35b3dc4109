from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from deployments.keys import AccessSettings
from deployments.settings import ServeSettings
from earlyexit.engine.queue import OrderSpec
from earlyexit.errors import InputError, ModelFolderError, PlanError
from earlyexit.network.boundary import Split
from offramp.spec.application import application_settings, exposure_notes, resolve_plan, with_environment
from offramp.spec.documents import AccessDocument, ApplicationDocument, ServedModelDocument
from offramp.spec.file import at_folder
from optimizer.calibration_file import CalibrationCard
from optimizer.plan import Plan, PolicySpec, Stage, serial_plan, stock_plan
from optimizer.plan_file import write_plan

KEYS = {"OFFRAMP_API_KEYS": "alice:alice-0123456789"}
PLAN = stock_plan(3, batch=7)


def settings(access: AccessSettings | None = None) -> ServeSettings:
    return ServeSettings(model="m", plan=PLAN, access=access)


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    write_plan(PLAN, tmp_path / "plan.yaml")
    return str(tmp_path / "plan.yaml")


def test_files_are_found_beside_the_one_naming_them_and_budgets_reach_replicas(tmp_path: Path, model: Path) -> None:
    document = ApplicationDocument(model=ServedModelDocument(folder="m"), access=AccessDocument(keys_file="../keys"))
    found = application_settings(document, PLAN, tmp_path / "services")
    assert found.model == str(tmp_path / "services" / "m")
    assert found.access == AccessSettings(keys_file=str(tmp_path / "keys"))
    moved = at_folder(settings(AccessSettings(keys_file="/home/me/keys")), PurePosixPath("/srv/offramp"))
    assert moved.access == AccessSettings(keys_file="/srv/offramp/keys")
    splits = (Split(first=0, end=2, batch=8, tokens=64), Split(first=2, end=3, batch=8))
    plan = Plan(stages=(Stage(device="cpu", replicas=1, splits=splits),))
    write_plan(plan, tmp_path / "tokens.yaml")
    read = resolve_plan(str(tmp_path / "tokens.yaml"), model)
    served = application_settings(ApplicationDocument(model=ServedModelDocument(folder=str(model))), read)
    assert ServeSettings.model_validate_json(served.model_dump_json()).plan.splits == splits


def test_a_built_in_plan_has_a_batch_of_32_and_with_ramps_the_calibrations_thresholds(model: Path) -> None:
    assert resolve_plan("stock", model) == stock_plan(3, batch=32, device="cpu", replicas=1)
    told = resolve_plan("stock", model, batch=4, replicas=2, device="cuda")
    assert told == stock_plan(3, batch=4, device="cuda", replicas=2)
    thresholds = {0: 0.4, 1: 0.5}
    card = CalibrationCard(
        policy="entropy", thresholds=thresholds, budget=0.01, confidence=0.9, tested={}, provenance={}
    )
    (model / "calibration.json").write_text(card.model_dump_json(), encoding="utf-8")
    assert resolve_plan("serial", model) == serial_plan(3, (0, 1), PolicySpec(thresholds=thresholds), batch=32)
    assert resolve_plan("early-exit", model).ramps == (0, 1)


def test_a_plan_of_a_file_is_taken_in_any_order_or_refused(model: Path, plan_file: str) -> None:
    assert resolve_plan(plan_file, model) == PLAN
    das = OrderSpec(name="das")
    assert resolve_plan("stock", model, order=das) == replace(stock_plan(3, batch=32), order=das)
    assert resolve_plan(plan_file, model, order=das) == replace(PLAN, order=das)
    with pytest.raises(InputError, match=r"--batch and --device: only for built-in plans; .* says it for every stage"):
        resolve_plan(plan_file, model, batch=32, device="cpu")
    with pytest.raises(PlanError, match="--plan serail: no such file; built in are stock, early-exit, serial"):
        resolve_plan("serail", model, batch=4)
    with pytest.raises(ModelFolderError, match="is not calibrated; run: offramp calibrate"):
        resolve_plan("serial", model)
    with pytest.raises(PlanError, match="unknown device 'tpu'; known: cpu, cuda"):
        resolve_plan("stock", model, device="tpu")


@pytest.mark.parametrize(
    ("named", "environment", "access"),
    [
        pytest.param(None, {}, None, id="nothing"),
        pytest.param(None, KEYS, AccessSettings(keys_env="OFFRAMP_API_KEYS"), id="environment"),
        pytest.param(
            AccessSettings(rate_per_s=5.0), KEYS, AccessSettings(rate_per_s=5.0, keys_env="OFFRAMP_API_KEYS"), id="rate"
        ),
        pytest.param(AccessSettings(keys_file="/k"), KEYS, AccessSettings(keys_file="/k"), id="file"),
    ],
)
def test_the_environments_keys_count_where_none_are_named_and_are_never_held(
    named: AccessSettings | None, environment: dict[str, str], access: AccessSettings | None
) -> None:
    found = with_environment(settings(named), environment)
    assert found == settings(access)
    assert "alice" not in found.model_dump_json()


@pytest.mark.parametrize(
    ("host", "ray_is_open", "has_keys", "mode", "words"),
    [
        ("127.0.0.1", False, False, "disabled", []),
        ("0.0.0.0", False, True, "token", []),
        ("10.0.0.1", False, False, "token", ["without API keys"]),
        ("0.0.0.0", True, True, "token", ["as --metrics-port does"]),
        ("0.0.0.0", True, False, "disabled", ["without API keys", "opens them to all"]),
    ],
)
def test_open_ports_are_said(host: str, ray_is_open: bool, has_keys: bool, mode: str, words: list[str]) -> None:
    notes = exposure_notes(host, has_keys=has_keys, ray_is_open=ray_is_open, environment={"RAY_AUTH_MODE": mode})
    assert [word in note for word, note in zip(words, notes, strict=True)] == [True] * len(words)
