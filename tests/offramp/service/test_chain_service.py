"""Service files of chains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earlyexit.errors import ModelFolderError
from offramp.spec.application import resolve_plan
from offramp.spec.model import of_ramps
from optimizer.calibration_file import RECORDS_FILE
from profiles.records import ExitRecords
from tests.offramp.service.service_files import CHAIN_TABLE, Files, control_of, policy_of, problem_of
from tests.offramp.service.service_folders import (
    WEIGHTS_BYTES,
    write_beside,
    write_pruned,
)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.write_chain()
    return files


def model(**changes: Any) -> dict[str, Any]:
    return {"folder": "cascade", "latency": {"cpu": CHAIN_TABLE}, "memory_bytes": 1} | changes


@pytest.mark.parametrize("models", [{}, {"models": ["small", "model"]}], ids=["unsaid", "said"])
def test_a_chain_is_served_as_any_model_is(files: Files, models: dict[str, Any]) -> None:
    plan = files.read(model=model(**models)).settings.plan
    assert plan.networks == (2, 5)
    assert [split.end for split in plan.splits if split.end in plan.networks] == [2, 5]


def test_splits_end_where_networks_end_and_crossings_take_seconds(files: Files) -> None:
    folder = files.folder / "cascade"
    assert [(split.first, split.end) for split in resolve_plan("stock", folder).splits] == [(2, 5)]
    assert [(split.first, split.end) for split in resolve_plan("early-exit", folder).splits] == [(2, 5)]
    assert [split.end for split in resolve_plan("serial", folder).splits] == [1, 2, 3, 4, 5]
    assert problem_of(files.read(model=model())).crossing_s == 0.0005
    assert problem_of(files.read()).crossing_s == 0


def test_a_replica_has_room_for_all_models_of_a_chain_in_one_float_type(files: Files) -> None:
    def cluster(memory_bytes: int) -> dict[str, Any]:
        return {"devices": {"cpu": {"count": 1, "memory_bytes": memory_bytes}}}

    needed, fits = 2 * WEIGHTS_BYTES, {"folder": "cascade", "latency": {"cpu": CHAIN_TABLE}}
    assert files.read(model=fits, cluster=cluster(needed)).name == "demo"
    said = files.refused(model=fits, cluster=cluster(needed - 1))[1]
    assert said.startswith(f"a replica needs {needed / 1e9:.3g} GB, its parameters in float32, of s and m; cpu has ")
    card = files.folder / "small" / "model.json"
    card.write_text(json.dumps(json.loads(card.read_text(encoding="utf-8")) | {"family": "onnx"}), encoding="utf-8")
    with pytest.raises(ModelFolderError, match="s: onnx models run in float32, not bfloat16"):
        files.read(model=model(dtype="bfloat16"))


@pytest.mark.parametrize(
    ("kept", "measuring", "pays"),
    [
        pytest.param(0.8, 1.05, True, id="film reviews"),
        pytest.param(0.97, 1.5, False, id="questions of eight words"),
        pytest.param(1.0, 1.0, False, id="nothing gained"),
    ],
)
def test_words_are_pruned_where_the_plan_gains_more(files: Files, kept: float, measuring: float, *, pays: bool) -> None:
    write_pruned(files.folder / "cascade", end=1, kept=kept, measuring=measuring)
    whole = files.read(model=model(), accuracy={"prune": False}).settings.plan
    assert whole.prune == {}
    assert whole.used == (0, 1)
    chosen = files.read(model=model()).settings
    asked = files.read(model=model(), accuracy={"prune": True})
    plan, problem = asked.settings.plan, problem_of(asked)
    assert plan.prune == {1: 0.6}
    assert policy_of(asked).thresholds == dict.fromkeys(range(4), 0.4)
    assert chosen.plan == (plan if pays else whole)
    assert (plan.predicted["rate_per_s"] > whole.predicted["rate_per_s"]) == pays
    assert problem.crossing_tokens == (1.0, kept), "the controller plans with it too"
    assert problem.latency["cpu"].block_s_NB[0].tolist() == pytest.approx([0.01 * measuring, 0.02 * measuring])


def test_texts_are_pruned_where_only_that_is_quick_enough_and_not_where_inputs_stay(files: Files) -> None:
    write_pruned(files.folder / "cascade", end=1, kept=0.5, measuring=1.0)
    soonest = {"planner": {"objective": {"minimize": "latency", "rate_per_s": 5.0}}, "slo": {"latency_s": 9.0}}
    plan = files.read(model=model(), **soonest).settings.plan
    assert plan.after_answer == "stay"
    assert plan.prune == {}
    said = files.refused(model=model(), accuracy={"prune": True}, **soonest)[1]
    assert said.startswith("accuracy.prune: where early answers are sought inputs may stay")
    most = files.read(model=model(), accuracy={"prune": False}).settings.plan.predicted["rate_per_s"]
    priced = {"devices": {"cpu": {"count": 4, "usd_per_hour": 1.0}}}
    cheapest = {"objective": {"minimize": "cost", "rate_per_s": 1.05 * most}}
    assert files.read(model=model(), cluster=priced, planner=cheapest).settings.plan.prune


def test_what_the_end_loses_is_no_longer_the_ramps_to_lose_where_no_probe_sees_it(files: Files) -> None:
    folder = files.folder / "cascade"
    write_pruned(folder, end=1, kept=0.8, measuring=1.0)
    records = ExitRecords.load(folder / "pruned" / RECORDS_FILE)
    assert of_ramps(0.2, records, {}) == pytest.approx(0.2 - 1 / 8)
    assert of_ramps(0.2, replace(records, end_losses_N=None), {}) == 0.2
    for prune in (False, True):  # of pruned texts probes see it
        service = files.read(model=model(), accuracy={"prune": prune, "budget": 0.2})
        assert control_of(service).accuracy_budget == 0.2


@pytest.mark.parametrize(
    ("own", "reference", "used"),
    [
        pytest.param({0: 0.5, 1: 0.5}, {3: 0.5}, (0, 1), id="the cascade"),
        pytest.param({0: 0.05, 1: 0.05}, {2: 0.5}, (1,), id="the reference alone"),
        pytest.param({0: 0.05, 1: 0.05}, {2: 0.05}, (1,), id="equal, so its own"),
    ],
)
def test_of_several_calibrations_that_of_the_plan_that_is_worth_most_is_followed(
    files: Files, own: dict[int, float], reference: dict[int, float], used: tuple[int, ...]
) -> None:
    write_beside(files.folder / "cascade", "", own)
    write_beside(files.folder / "cascade", "reference", reference)
    service = files.read(model=model())
    thresholds = reference if reference == {2: 0.5} else own
    assert policy_of(service).thresholds == thresholds
    assert service.settings.plan.used == used
    assert control_of(service).policy == policy_of(service)
    assert problem_of(service).ramps == tuple(thresholds), "the controller keeps to it"


def test_a_files_thresholds_leave_no_choice_and_pruned_texts_are_one(files: Files) -> None:
    write_beside(files.folder / "cascade", "reference", {2: 0.5})
    said = {"policy": "entropy", "thresholds": {1: 0.5}}
    assert policy_of(files.read(model=model(), accuracy=said)).thresholds == {1: 0.5}
    chain = files.folder / "cascade"
    write_pruned(chain, end=1, kept=0.5, measuring=1.0)
    write_beside(chain, "reference", {2: 0.05})
    assert files.read(model=model()).settings.plan.prune == {1: 0.6}
    for prune, alphas in ((True, {1: 0.6}), (False, {})):
        assert files.read(model=model(), accuracy={"prune": prune}).settings.plan.prune == alphas
