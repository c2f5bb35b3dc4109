from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from deployments.settings import ServeSettings
from earlyexit.engine.queue import OrderSpec
from earlyexit.errors import InputError
from offramp.spec.application import resolve_plan
from offramp.spec.file import Service, of_ramps, read_service
from optimizer.calibration.calibration_file import RECORDS_FILE
from optimizer.cost.evaluate import evaluate
from optimizer.plans.plan import PolicySpec
from optimizer.plans.plan_file import read_plan
from optimizer.problems.problem import Ingresses, MaximizeRate, MinimizeCost, MinimizeLatency
from profiles.catalogue import published_profile
from profiles.lengths import Lengths
from profiles.records import ExitRecords
from tests.model_cards import change_card
from tests.offramp.service.service_folders import (
    CHAIN_TABLE,
    TABLE,
    WEIGHTS_BYTES,
    Files,
    control_of,
    emulated,
    policy_of,
    problem_of,
    write_beside,
    write_model,
    write_pruned,
    write_records,
    write_shares,
)

SERVICES = yaml.safe_load(Path(__file__).with_name("services.yaml").read_text(encoding="utf-8"))["services"]


def found_at(service: Service, path: str) -> Any:
    """Returns the value at a dotted path of attributes, keys and indices, as YAML data."""
    value: Any = service
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value[part]
        else:
            value = value[int(part)] if part.isdigit() else getattr(value, part)
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("case", SERVICES, ids=lambda case: case["what"])
def test_fields_of_a_service_file_become_settings(case: dict[str, Any], files: Files) -> None:
    service = files.read(**case["given"])
    assert {path: found_at(service, path) for path in case["found"]} == case["found"]


def test_a_calibrated_budget_is_monitored_unless_it_is_one_of_harm(files: Files) -> None:
    write_shares(files.model, calibrated=0.9, recorded=0.9)
    policy = PolicySpec(name="share", thresholds={0: 0.5, 1: 0.5}, confidences={0: 0.9, 1: 0.9})
    assert files.read().settings.plan.policy == policy
    path = files.model / "calibration.json"
    written = json.loads(path.read_text(encoding="utf-8")) | {"metric": "harm"}
    path.write_text(json.dumps(written), encoding="utf-8")
    assert control_of(files.read()).accuracy_budget is None
    assert control_of(files.read(accuracy={"budget": 0.03})).accuracy_budget == 0.03  # of agreement, which it can


def test_fields_that_contradict_each_other_are_refused_before_a_plan_is_made(files: Files) -> None:
    with pytest.raises(InputError, match="needs the controller"):
        read_service(files.write(planner={"tuning": "guarantee", "control": False}), pytest.fail)


def test_a_model_without_thresholds_is_planned_without_ramps_and_not_tuned(tmp_path: Path) -> None:
    files = Files(tmp_path / "a")
    write_model(tmp_path / "a" / "none", thresholds={})
    problem = problem_of(files.read(model={"folder": "none", "latency": {"cpu": TABLE}}))
    assert (problem.ramps, problem.survival_N) == ((), (1.0, 1.0, 1.0))
    with pytest.raises(InputError, match="tuning 'guarantee' needs ramps, and the model has none"):
        files.read(model={"folder": "none", "latency": {"cpu": TABLE}}, planner={"tuning": "guarantee"})


def test_settings_that_the_file_leaves_out_have_the_applications_defaults(files: Files) -> None:
    for nothing in ({}, {"ingress": {"max_queued": None}, "planner": {"strategy": "serial", "period_s": None}}):
        service = files.read(**nothing)
        settings = service.settings
        assert settings.max_queued == ServeSettings(model="m", plan=settings.plan).max_queued
        assert control_of(service).period_s == 120
        assert control_of(service).state == str(files.folder / "demo.sqlite")
        assert (settings.probe_share, settings.tracing, settings.access) == (0.02, None, None)
    elsewhere = control_of(files.read(planner={"strategy": "serial", "state": "s/x.sqlite"}))
    assert elsewhere.state == str(files.folder / "s" / "x.sqlite")


def test_the_first_plan_uses_all_accelerators_or_is_read_from_a_file(files: Files) -> None:
    assert sum(stage.replicas for stage in files.read().settings.plan.stages) == 4
    files.write_plan(replicas=2)
    settings = files.read(planner={"plan": "plan.yaml"}).settings
    assert settings.plan.stages == read_plan(files.folder / "plan.yaml").stages
    files.write_plan(ramps=[1], policy={"name": "entropy", "thresholds": 0.5})
    parts = {"accuracy": {"policy": "entropy", "thresholds": {0: 0.5}, "budget": 0.1}}
    assert files.read(**parts, planner={"plan": "plan.yaml", "control": False}).settings.control is None


def test_order_and_dispatch_are_the_plan_files_unless_the_service_file_sets_them(files: Files) -> None:
    files.write_plan(replicas=2)
    path = files.folder / "plan.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "order: shortest\n", encoding="utf-8")
    assert files.read(planner={"plan": "plan.yaml"}).settings.plan.order == OrderSpec(name="shortest")
    other = files.read(planner={"plan": "plan.yaml", "order": {"name": "das", "eta": 0.3}}).settings.plan
    assert other.order == OrderSpec(name="das", eta=0.3)
    assert files.read(planner={"strategy": "serial", "order": "arrival"}).settings.plan.order.name == "arrival"
    assert files.read(planner={"strategy": "serial"}).settings.plan.order == OrderSpec()
    files.write_plan(replicas=2)
    assert files.read(planner={"plan": "plan.yaml"}).settings.plan.dispatch == "work-conserving"
    assert files.read(planner={"plan": "plan.yaml", "dispatch": "filling"}).settings.plan.dispatch == "filling"
    assert files.read(planner={"strategy": "serial", "dispatch": "filling"}).settings.plan.dispatch == "filling"
    assert files.read(planner={"strategy": "serial"}).settings.plan.dispatch == "work-conserving"


def test_emulated_time_is_scaled_for_the_controller_and_kept_for_replicas(files: Files) -> None:
    service = files.read(**emulated(scale=20.0))
    settings, problem = service.settings, problem_of(service)
    table = problem.latency["emulated:V100"]
    assert table.block_s_NB.tolist() == [pytest.approx([0.2, 0.4])] * 3
    assert problem.slo.latency_s == settings.slo_s == 20
    assert (problem.link.delay_s, problem.link.bandwidth_bytes_per_s) == (0.02, 5e4)
    kept = settings.emulated["emulated:V100"]
    assert (kept.batch, kept.block_s, kept.ramp_s, kept.time_scale) == (*TABLE.values(), 20)
    plain, slow = (files.read(**emulated(scale=scale)).settings.plan for scale in (1.0, 20.0))
    assert plain.stages == slow.stages
    assert slow.predicted["rate_per_s"] == pytest.approx(plain.predicted["rate_per_s"] / 20)
    assert slow.predicted["latency_s"] == pytest.approx(plain.predicted["latency_s"] * 20)
    ingress: dict[str, Any] = {"replicas": 2, "inputs_per_s": 3.0}  # real ones, so per wall-clock second
    service = files.read(**emulated(scale=20.0), ingress=ingress)
    assert (service.settings.plan.predicted["rate_per_s"], problem_of(service).ingress) == (6, Ingresses(**ingress))
    planner = {"objective": {"minimize": "latency", "rate_per_s": 121.0}}
    words = "ingress.inputs_per_s: no plan: 2 ingresses carry at most 120/s, and 121/s need 3 ingress.replicas"
    refused = files.refused(**emulated(scale=20.0), ingress=ingress, planner=planner)
    assert refused == (files.line_of("inputs_per_s"), words)


def test_by_default_plans_after_the_first_have_the_least_cost(files: Files) -> None:
    fastest = files.read(**emulated(scale=20.0), planner={"objective": {"maximize": "rate"}})
    assert problem_of(fastest).objective == MaximizeRate()
    for planner in ({}, {"objective": {"minimize": "cost"}}):
        service = files.read(**emulated(scale=20.0), planner=planner)
        plan, problem = service.settings.plan, problem_of(service)
        assert plan == fastest.settings.plan
        assert problem.required_per_s == pytest.approx(plan.predicted["rate_per_s"])
        assert (type(problem.objective), problem.in_time) == (MinimizeCost, 0.99)
    assert files.read(**emulated(), planner={"control": False}).settings.plan.stages == fastest.settings.plan.stages
    files.write_plan(device="emulated:V100", replicas=2)  # 2 inputs in 60 ms
    service = files.read(**emulated(), planner={"plan": "plan.yaml"})
    assert problem_of(service).required_per_s == pytest.approx(2 * 2 / 0.06)
    change_card(files.model, task={"name": "token", "vocab_size": 9}, codec={"name": "prompt", "max_length": 16})
    assert problem_of(files.read(**emulated())).objective == MaximizeRate(), "steps follow the plan"


def test_early_answers_are_planned_in_scaled_time_or_from_recorded_batches(files: Files) -> None:
    objective = {"minimize": "latency", "rate_per_s": 40.0, "ramp_budget": 0.5}
    service = files.read(**emulated(scale=20.0), planner={"objective": objective, "strategy": "apparate"})
    assert problem_of(service).objective == MinimizeLatency(rate_per_s=2.0, ramp_budget=0.5)
    plan = service.settings.plan
    assert plan.after_answer == "stay"
    figures = evaluate(problem_of(service), plan.stages)
    assert plan.predicted["mean_latency_s"] == pytest.approx(figures.mean_latency_s)
    assert plan.predicted["ramp_overhead"] == pytest.approx(figures.ramp_overhead)
    planner = {"objective": {"minimize": "latency", "rate_per_s": 40.0}, "strategy": "pame", "control": False}
    plan = files.read(**emulated(scale=20.0), planner=planner).settings.plan
    assert (len(plan.splits), plan.after_answer) == (1, "stop")


def test_emulated_accelerators_answer_from_exit_records_that_have_answers(files: Files) -> None:
    service = files.read(**emulated())
    settings = service.settings
    records = str(files.model / "exit_records.npz")
    expected = PolicySpec(name="recorded", thresholds={0: 0.5, 1: 0.5}, records=records)
    assert settings.plan.policy == expected
    assert control_of(service).policy == expected
    assert settings.emulated["emulated:V100"].decisions == "recorded"
    path = files.model / RECORDS_FILE
    replace(ExitRecords.load(path), answers_NE=None).save(path)
    assert files.read(**emulated(decisions="computed")).settings.plan.policy is not None
    assert files.read().settings.plan.policy is not None


def test_an_emulated_accelerator_has_the_published_profile_of_the_real_one(tmp_path: Path) -> None:
    files = Files(tmp_path)
    write_model(tmp_path / "big", num_blocks=12)
    latency = {"emulated:V100": {"published": "bert-base", "length": 128}}
    parts = emulated(folder="big", latency=latency, slower=2.0) | {"planner": {"batch_limit": 4, "strategy": "serial"}}
    service = files.read(**parts)
    real = published_profile("bert-base", "V100").at(128)
    kept = service.settings.emulated["emulated:V100"]
    assert kept.batch == list(real.batches)
    assert kept.block_s == (real.block_s_NB * 2).tolist()
    assert problem_of(service).latency["emulated:V100"].batches == (1, 2, 4)


def test_keys_cluster_and_exit_records_can_be_in_other_files(files: Files) -> None:
    access = files.read(
        access={"keys_file": "keys", "rate_per_s": 5.0, "cors_origins": ["https://a.org"]}
    ).settings.access
    assert access is not None
    assert access.keys_file == str(files.folder / "keys")
    assert (access.rate_per_s, access.cors_origins) == (5.0, ("https://a.org",))
    (files.folder / "cluster.yaml").write_text("devices: {cpu: {count: 3}}\n", encoding="utf-8")
    assert files.read(cluster="cluster.yaml").inventory.counts == {"cpu": 3}
    records = write_records(files.folder / "others.npz")
    accuracy = {"policy": "recorded", "records": "others.npz", "thresholds": 0.5}
    (files.model / "calibration.json").unlink()
    assert policy_of(files.read(accuracy=accuracy)).records == str(records)


def test_the_plan_and_the_controller_use_the_lengths_of_the_file(files: Files) -> None:
    parts = emulated(latency={"emulated:V100": TABLE | {"length": 4}})
    service = files.read(**parts, lengths=[2, 4])
    settings = service.settings
    budgets = {split.tokens for stage in settings.plan.stages for split in stage.splits}
    assert budgets <= {4, 8}
    assert settings.plan.predicted["tokens_per_input"] == 3.0
    assert problem_of(service).lengths == Lengths.of([2, 4])
    assert settings.emulated["emulated:V100"].length == 4


def test_the_nearest_slo_of_an_emulated_cluster_is_in_emulated_seconds(files: Files) -> None:
    plain = files.refused(**emulated(scale=1.0), slo={"latency_s": 0.001})
    assert files.refused(**emulated(scale=20.0), slo={"latency_s": 0.001}) == plain


@pytest.mark.parametrize(("dtype", "needed"), [("float32", WEIGHTS_BYTES), ("bfloat16", WEIGHTS_BYTES // 2)])
def test_a_model_must_fit_its_accelerator(files: Files, dtype: str, needed: int) -> None:
    def parts(memory_bytes: int) -> dict[str, Any]:
        return {
            "model": {"folder": "model", "dtype": dtype, "latency": {"cpu": TABLE}},
            "cluster": {"devices": {"cpu": {"count": 1, "memory_bytes": memory_bytes}}},
        }

    assert files.read(**parts(needed)).settings.app == "demo"
    said = files.refused(**parts(needed - 1))[1]
    assert said.startswith(f"a replica needs {needed / 1e9:.3g} GB (the parameters in {dtype}), cpu has ")


@pytest.fixture
def chained(tmp_path: Path) -> Files:
    chained = Files(tmp_path)
    chained.write_chain()
    return chained


def model(**changes: Any) -> dict[str, Any]:
    return {"folder": "cascade", "latency": {"cpu": CHAIN_TABLE}, "memory_bytes": 1} | changes


@pytest.mark.parametrize("models", [{}, {"models": ["small", "model"]}], ids=["unsaid", "said"])
def test_a_chain_is_served_as_any_model_is(chained: Files, models: dict[str, Any]) -> None:
    plan = chained.read(model=model(**models)).settings.plan
    assert plan.networks == (2, 5)
    assert [split.end for split in plan.splits if split.end in plan.networks] == [2, 5]


def test_splits_end_where_networks_end_and_crossings_take_seconds(chained: Files) -> None:
    folder = chained.folder / "cascade"
    assert [(split.first, split.end) for split in resolve_plan("stock", folder).splits] == [(2, 5)]
    assert [(split.first, split.end) for split in resolve_plan("early-exit", folder).splits] == [(2, 5)]
    assert [split.end for split in resolve_plan("serial", folder).splits] == [1, 2, 3, 4, 5]
    assert problem_of(chained.read(model=model())).crossing_s == 0.0005
    assert problem_of(chained.read()).crossing_s == 0


def test_a_replica_has_room_for_all_models_of_a_chain_in_one_float_type(chained: Files) -> None:
    def cluster(memory_bytes: int) -> dict[str, Any]:
        return {"devices": {"cpu": {"count": 1, "memory_bytes": memory_bytes}}}

    needed, fits = 2 * WEIGHTS_BYTES, {"folder": "cascade", "latency": {"cpu": CHAIN_TABLE}}
    assert chained.read(model=fits, cluster=cluster(needed)).settings.app == "demo"
    said = chained.refused(model=fits, cluster=cluster(needed - 1))[1]
    assert said.startswith(f"a replica needs {needed / 1e9:.3g} GB (the parameters of s and m in float32), cpu has ")
    change_card(chained.folder / "small", family="onnx")
    with pytest.raises(InputError, match="s: onnx models run in float32, not bfloat16"):
        chained.read(model=model(dtype="bfloat16"))


@pytest.mark.parametrize(
    ("kept", "measuring", "pays"),
    [
        pytest.param(0.8, 1.05, True, id="film reviews"),
        pytest.param(0.97, 1.5, False, id="questions of eight words"),
        pytest.param(1.0, 1.0, False, id="nothing gained"),
    ],
)
def test_words_are_pruned_where_plans_gain_more(chained: Files, kept: float, measuring: float, *, pays: bool) -> None:
    write_pruned(chained.folder / "cascade", end=1, kept=kept, measuring=measuring)
    whole = chained.read(model=model(), accuracy={"prune": False}).settings.plan
    assert whole.prune == {}
    assert whole.used == (0, 1)
    chosen = chained.read(model=model()).settings
    asked = chained.read(model=model(), accuracy={"prune": True})
    plan, problem = asked.settings.plan, problem_of(asked)
    assert plan.prune == {1: 0.6}
    assert policy_of(asked).thresholds == dict.fromkeys(range(4), 0.4)
    assert chosen.plan == (plan if pays else whole)
    assert (plan.predicted["rate_per_s"] > whole.predicted["rate_per_s"]) == pays
    assert problem.crossing_tokens == (1.0, kept), "the controller plans with it too"
    assert problem.latency["cpu"].block_s_NB[0].tolist() == pytest.approx([0.01 * measuring, 0.02 * measuring])


def test_texts_are_pruned_only_if_necessary(chained: Files) -> None:
    write_pruned(chained.folder / "cascade", end=1, kept=0.5, measuring=1.0)
    soonest: dict[str, Any] = {"slo": {"latency_s": 9.0}}
    soonest["planner"] = {"strategy": "apparate", "objective": {"minimize": "latency", "rate_per_s": 5.0}}
    plan = chained.read(model=model(), **soonest).settings.plan
    assert plan.after_answer == "stay"
    assert plan.prune == {}
    said = chained.refused(model=model(), accuracy={"prune": True}, **soonest)[1]
    assert said.startswith("accuracy.prune: with minimal latency as the objective")
    most = chained.read(model=model(), accuracy={"prune": False}).settings.plan.predicted["rate_per_s"]
    priced = {"devices": {"cpu": {"count": 4, "usd_per_hour": 1.0}}}
    cheapest = {"objective": {"minimize": "cost", "rate_per_s": 1.05 * most}}
    assert chained.read(model=model(), cluster=priced, planner=cheapest).settings.plan.prune


def test_the_loss_at_an_ensembles_end_is_subtracted_from_the_budget(chained: Files) -> None:
    folder = chained.folder / "cascade"
    write_pruned(folder, end=1, kept=0.8, measuring=1.0)
    records = ExitRecords.load(folder / "pruned" / RECORDS_FILE)
    assert of_ramps(0.2, records, {}) == pytest.approx(0.2 - 1 / 8)
    assert of_ramps(0.2, replace(records, end_losses_N=None), {}) == 0.2
    for prune in (False, True):  # of pruned texts probes see it
        service = chained.read(model=model(), accuracy={"prune": prune, "budget": 0.2})
        assert control_of(service).accuracy_budget == 0.2


@pytest.mark.parametrize(
    ("own", "reference", "used"),
    [
        pytest.param({0: 0.5, 1: 0.5}, {3: 0.5}, (0, 1), id="the cascade"),
        pytest.param({0: 0.05, 1: 0.05}, {2: 0.5}, (1,), id="the reference alone"),
        pytest.param({0: 0.05, 1: 0.05}, {2: 0.05}, (1,), id="equal, so its own"),
    ],
)
def test_the_calibration_with_the_best_plan_is_used(
    chained: Files, own: dict[int, float], reference: dict[int, float], used: tuple[int, ...]
) -> None:
    write_beside(chained.folder / "cascade", "", own)
    write_beside(chained.folder / "cascade", "reference", reference)
    service = chained.read(model=model())
    thresholds = reference if reference == {2: 0.5} else own
    assert policy_of(service).thresholds == thresholds
    assert service.settings.plan.used == used
    assert control_of(service).policy == policy_of(service)
    assert problem_of(service).ramps == tuple(thresholds), "the controller keeps to it"


def test_the_service_file_can_exclude_recorded_alternatives(chained: Files) -> None:
    write_beside(chained.folder / "cascade", "reference", {2: 0.5})
    said = {"policy": "entropy", "thresholds": {1: 0.5}}
    assert policy_of(chained.read(model=model(), accuracy=said)).thresholds == {1: 0.5}
    chain = chained.folder / "cascade"
    write_pruned(chain, end=1, kept=0.5, measuring=1.0)
    write_beside(chain, "reference", {2: 0.05})
    assert chained.read(model=model()).settings.plan.prune == {1: 0.6}
    for prune, alphas in ((True, {1: 0.6}), (False, {})):
        assert chained.read(model=model(), accuracy={"prune": prune}).settings.plan.prune == alphas
