from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.choices import TracingSettings
from deployments.settings import ControlSettings, ServeSettings
from earlyexit.engine.queue import OrderSpec
from earlyexit.errors import InputError
from offramp.spec.file import Service
from optimizer.evaluate import evaluate
from optimizer.plan import PolicySpec
from optimizer.plan_file import read_plan
from optimizer.problem import MinimizeLatency, PlanProblem
from profiles.catalogue import published_profile
from profiles.lengths import Lengths
from tests.offramp.service.service_files import TABLE, Files, emulated
from tests.offramp.service.service_folders import write_model, write_records, write_shares


def control_of(service: Service) -> ControlSettings:
    assert service.settings.control is not None
    return service.settings.control


def problem_of(service: Service) -> PlanProblem:
    return control_of(service).problem


def test_exits_come_from_the_models_calibration(files: Files) -> None:
    service = files.read()
    assert service.settings.plan.policy == PolicySpec(name="entropy", thresholds={0: 0.5, 1: 0.5})
    assert control_of(service).policy == service.settings.plan.policy
    assert control_of(service).accuracy_budget == 0.01


def test_shares_are_of_the_values_that_the_calibration_counts(files: Files) -> None:
    write_shares(files.model, calibrated=0.9, recorded=0.9)
    policy = PolicySpec(name="share", thresholds={0: 0.5, 1: 0.5}, confidences={0: 0.9, 1: 0.9})
    assert files.read().settings.plan.policy == policy


def test_version_1_is_at_the_root_and_others_in_their_place_unless_the_file_says_otherwise(files: Files) -> None:
    model = {"folder": "model", "latency": {"cpu": TABLE}}
    plain, second = files.read().settings, files.read(model=model | {"version": "2"}).settings
    assert (plain.version, plain.route_prefix, plain.repository.control) == ("1", "/", "none")
    assert (second.version, second.route_prefix) == ("2", "/v2/models/m/versions/2")
    said = files.read(
        model=model | {"version": "2"}, ingress={"route_prefix": "/b"}, repository={"control": "explicit"}
    )
    assert (said.settings.route_prefix, said.settings.repository.control) == ("/b", "explicit")


def test_the_problem_has_the_survival_of_the_exit_records(files: Files) -> None:
    problem = problem_of(files.read())
    assert problem.survival_N == (1.0, 0.5, 0.25)
    assert problem.ramps == (0, 1)
    assert problem.slo.latency_s == 1
    assert problem.devices["cpu"].count == 4


def test_only_ramps_with_a_threshold_are_in_the_problem_each_with_its_own_row(files: Files) -> None:
    problem = problem_of(files.read(accuracy={"thresholds": {1: 0.5}}))
    assert problem.ramps == (1,)
    assert problem.latency["cpu"].ramp_s_EB.tolist() == [[0.003, 0.004]]
    assert problem.survival_N == (1.0, 1.0, 0.25)


def test_one_threshold_is_that_of_every_recorded_ramp(files: Files) -> None:
    service = files.read(accuracy={"policy": "entropy", "thresholds": 0.05, "budget": 0.1})
    assert problem_of(service).survival_N == (1.0, 1.0, 1.0)
    assert control_of(service).accuracy_budget == 0.1


def test_a_budget_of_harm_is_nothing_that_a_service_can_watch(files: Files) -> None:
    path = files.model / "calibration.json"
    written = json.loads(path.read_text(encoding="utf-8")) | {"metric": "harm"}
    path.write_text(json.dumps(written), encoding="utf-8")
    assert control_of(files.read()).accuracy_budget is None
    assert control_of(files.read(accuracy={"budget": 0.03})).accuracy_budget == 0.03  # of agreement, which it can


def test_thresholds_are_tuned_to_the_budget_and_with_the_confidence_of_the_calibration(files: Files) -> None:
    control = control_of(files.read(planner={"tuning": "guarantee"}))
    assert (control.tuning, control.accuracy_budget, control.accuracy_confidence) == ("guarantee", 0.01, 0.9)
    assert control_of(files.read()).tuning == "off"
    said = files.read(accuracy={"budget": 0.01}, planner={"tuning": "guarantee", "probe_share": 0.1})
    assert said.settings.probe_share == 0.1


def test_a_model_without_thresholds_is_planned_without_ramps(tmp_path: Path) -> None:
    files = Files(tmp_path / "a")
    write_model(tmp_path / "a" / "none", thresholds={})
    problem = problem_of(files.read(model={"folder": "none", "latency": {"cpu": TABLE}}))
    assert (problem.ramps, problem.survival_N) == ((), (1.0, 1.0, 1.0))


def test_thresholds_that_are_not_there_are_not_tuned(tmp_path: Path) -> None:
    files = Files(tmp_path / "a")
    write_model(tmp_path / "a" / "none", thresholds={})
    with pytest.raises(InputError, match="tuning 'guarantee' moves thresholds, and the model has none"):
        files.read(model={"folder": "none", "latency": {"cpu": TABLE}}, planner={"tuning": "guarantee"})


def test_bytes_between_stages_are_those_of_the_longest_input(files: Files) -> None:
    assert problem_of(files.read()).bytes_per_sample_N == (16 * 8 * 4,) * 3  # max_length, hidden_size, float32


def test_bytes_between_stages_follow_the_type_of_hops(files: Files) -> None:
    model = {"folder": "model", "latency": {"cpu": TABLE}, "hop_dtype": "float16"}
    service = files.read(model=model)
    assert service.settings.hop_dtype == "float16"
    assert problem_of(service).bytes_per_sample_N == (16 * 8 * 2,) * 3
    assert problem_of(files.read(model=model | {"bytes_per_sample": 7})).bytes_per_sample_N == (7,) * 3


def test_settings_the_file_leaves_out_are_the_applications_own(files: Files) -> None:
    for nothing in ({}, {"ingress": {"max_queued": None}, "planner": {"strategy": "serial", "period_s": None}}):
        service = files.read(**nothing)
        settings = service.settings
        assert settings.max_queued == ServeSettings(model="m", plan=settings.plan).max_queued
        assert control_of(service).period_s == 120
        assert control_of(service).state == str(files.folder / "demo.sqlite")
        assert (settings.probe_share, settings.tracing, settings.access) == (0.02, None, None)


def test_settings_the_file_names_are_taken(files: Files) -> None:
    service = files.read(
        planner={"strategy": "serial", "period_s": 30, "watch_s": 2, "least_gain": 0.1, "state": "s/x.sqlite"},
        ingress={"replicas": 2, "max_queued": 7, "port": 9000, "grpc_port": 9001, "front": "proxy", "access_log": True},
        tracing={"endpoint": "http://collector:4318", "ratio": 0.1},
    )
    settings = service.settings
    assert settings.tracing == TracingSettings(endpoint="http://collector:4318", ratio=0.1)
    control = control_of(service)
    assert (control.strategy, control.period_s, control.watch_s, control.least_gain) == ("serial", 30, 2, 0.1)
    assert control.state == str(files.folder / "s" / "x.sqlite")
    assert (settings.ingress_replicas, settings.max_queued, settings.access_log) == (2, 7, True)
    assert (service.ingress.port, service.ingress.grpc_port, service.ingress.front) == (9000, 9001, "proxy")


def test_the_first_plan_leaves_an_accelerator_to_every_idle_slot(files: Files) -> None:
    settings = files.read(planner={"max_stages": 2}).settings
    stages = settings.plan.stages
    assert settings.slots == {"cpu": 2}
    assert sum(stage.replicas for stage in stages) + 2 - len(stages) <= 4


def test_where_accelerators_are_few_the_slots_give_way(files: Files) -> None:
    settings = files.read(cluster={"devices": {"cpu": {"count": 1}}}, planner={"strategy": "serial"}).settings
    assert settings.slots == {"cpu": 1}


def test_a_fixed_plan_has_no_controller_no_probes_and_no_slots_but_its_own(files: Files) -> None:
    settings = files.read(planner={"control": False, "strategy": "serial"}).settings
    assert settings.control is None
    assert settings.probe_share == 0
    assert settings.slots == {}
    assert settings.plan.stages[0].replicas == 4


def test_a_plan_file_is_begun_with(files: Files) -> None:
    files.write_plan(replicas=2)
    settings = files.read(planner={"plan": "plan.yaml"}).settings
    assert settings.plan.stages == read_plan(files.folder / "plan.yaml").stages
    assert settings.slots == {"cpu": 3}  # two replicas, and one for each of the two idle slots


def test_the_order_is_the_plan_files_unless_the_service_says_another(files: Files) -> None:
    files.write_plan(replicas=2)
    path = files.folder / "plan.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "order: shortest\n", encoding="utf-8")
    assert files.read(planner={"plan": "plan.yaml"}).settings.plan.order == OrderSpec(name="shortest")
    other = files.read(planner={"plan": "plan.yaml", "order": {"name": "das", "eta": 0.3}}).settings.plan
    assert other.order == OrderSpec(name="das", eta=0.3)
    assert files.read(planner={"strategy": "serial", "order": "arrival"}).settings.plan.order.name == "arrival"
    assert files.read(planner={"strategy": "serial"}).settings.plan.order == OrderSpec()


def test_the_dispatch_is_the_plan_files_unless_the_service_says_another(files: Files) -> None:
    files.write_plan(replicas=2)
    assert files.read(planner={"plan": "plan.yaml"}).settings.plan.dispatch == "work-conserving"
    assert files.read(planner={"plan": "plan.yaml", "dispatch": "auto"}).settings.plan.dispatch == "auto"
    assert files.read(planner={"strategy": "serial", "dispatch": "auto"}).settings.plan.dispatch == "auto"
    assert files.read(planner={"strategy": "serial"}).settings.plan.dispatch == "work-conserving"


def test_emulated_time_is_stretched_for_the_controller_and_kept_for_the_replicas(files: Files) -> None:
    service = files.read(**emulated(scale=20.0))
    settings, problem = service.settings, problem_of(service)
    table = problem.latency["emulated:V100"]
    assert table.block_s_NB.tolist() == [pytest.approx([0.2, 0.4])] * 3
    assert problem.slo.latency_s == settings.slo_s == 20
    assert (problem.link.delay_s, problem.link.bandwidth_bytes_per_s) == (0.02, 5e4)
    kept = settings.emulated["emulated:V100"]
    assert (kept.batch, kept.block_s, kept.ramp_s, kept.time_scale) == (*TABLE.values(), 20)


def test_a_stretched_cluster_has_the_same_plan_at_a_fraction_of_the_rate(files: Files) -> None:
    plain, slow = (files.read(**emulated(scale=scale)).settings.plan for scale in (1.0, 20.0))
    assert plain.stages == slow.stages
    assert slow.predicted["rate_per_s"] == pytest.approx(plain.predicted["rate_per_s"] / 20)
    assert slow.predicted["latency_s"] == pytest.approx(plain.predicted["latency_s"] * 20)


def test_early_answers_are_sought_and_promised_in_stretched_time(files: Files) -> None:
    objective = {"minimize": "latency", "rate_per_s": 40.0, "ramp_budget": 0.5}
    service = files.read(**emulated(scale=20.0), planner={"objective": objective, "strategy": "apparate"})
    assert problem_of(service).objective == MinimizeLatency(rate_per_s=2.0, ramp_budget=0.5)
    plan = service.settings.plan
    assert plan.after_answer == "stay"
    figures = evaluate(problem_of(service), plan.stages)
    assert plan.predicted["mean_latency_s"] == pytest.approx(figures.mean_latency_s)
    assert plan.predicted["ramp_overhead"] == pytest.approx(figures.ramp_overhead)


def test_without_a_controller_exits_may_be_found_by_the_records_batches(files: Files) -> None:
    planner = {"objective": {"minimize": "latency", "rate_per_s": 40.0}, "strategy": "pame", "control": False}
    plan = files.read(**emulated(scale=20.0), planner=planner).settings.plan
    assert (len(plan.splits), plan.after_answer) == (1, "stop")


def test_emulated_accelerators_answer_from_the_exit_records(files: Files) -> None:
    service = files.read(**emulated())
    settings = service.settings
    records = str(files.model / "exit_records.npz")
    expected = PolicySpec(name="recorded", thresholds={0: 0.5, 1: 0.5}, records=records)
    assert settings.plan.policy == expected
    assert control_of(service).policy == expected
    assert settings.emulated["emulated:V100"].decisions == "recorded"


def test_emulated_accelerators_may_compute_instead(files: Files) -> None:
    settings = files.read(**emulated(decisions="computed")).settings
    assert settings.plan.policy is not None
    assert settings.plan.policy.name == "entropy"


def test_published_figures_of_an_emulated_accelerator_are_those_of_the_real_one(tmp_path: Path) -> None:
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


def test_a_cluster_may_stand_in_a_file_of_its_own(files: Files) -> None:
    (files.folder / "cluster.yaml").write_text("devices: {cpu: {count: 3}}\n", encoding="utf-8")
    assert files.read(cluster="cluster.yaml").inventory.counts == {"cpu": 3}


def test_exit_records_may_be_others_than_the_calibrations(files: Files) -> None:
    records = write_records(files.folder / "others.npz")
    accuracy = {"policy": "recorded", "records": "others.npz", "thresholds": 0.5}
    (files.model / "calibration.json").unlink()
    policy = files.read(accuracy=accuracy).settings.plan.policy
    assert policy is not None
    assert policy.records == str(records)


def test_replicas_run_on_nodes_with_the_labels_of_their_accelerators(files: Files) -> None:
    cpu = {"count": 4, "labels": {"tier": "fast"}}
    service = files.read(cluster={"devices": {"cpu": cpu}, "link": {"bandwidth_bytes_per_s": 1e6}})
    assert service.settings.node_labels == {"cpu": {"tier": "fast"}}
    assert files.read().settings.node_labels == {}


def test_who_may_use_it_is_said_in_the_file(files: Files) -> None:
    access = files.read(
        access={"keys_file": "keys", "rate_per_s": 5.0, "cors_origins": ["https://a.org"]}
    ).settings.access
    assert access is not None
    assert access.keys_file == str(files.folder / "keys")
    assert (access.rate_per_s, access.rate_of, access.cors_origins) == (5.0, "requests", ("https://a.org",))


def test_lengths_give_the_plan_budgets_of_tokens_and_the_controller_their_mean(files: Files) -> None:
    parts = emulated(latency={"emulated:V100": TABLE | {"length": 4}})
    settings = files.read(**parts, lengths=[2, 4]).settings
    budgets = {split.tokens for stage in settings.plan.stages for split in stage.splits}
    assert budgets <= {4, 8}
    assert settings.plan.predicted["tokens_per_input"] == 3.0
    assert settings.control is not None
    assert settings.control.problem.lengths == Lengths.of([2, 4])
    assert settings.emulated["emulated:V100"].length == 4


def test_without_lengths_inputs_cost_alike(files: Files) -> None:
    settings = files.read(**emulated(latency={"emulated:V100": TABLE | {"length": 4}})).settings
    assert {split.tokens for stage in settings.plan.stages for split in stage.splits} == {None}
    assert settings.emulated["emulated:V100"].length is None


def test_a_latency_that_is_written_out_keeps_what_context_costs(files: Files) -> None:
    table = TABLE | {"context": 64, "context_s": 1e-6}
    found = problem_of(files.read(model={"folder": "model", "latency": {"cpu": table}})).latency["cpu"]
    assert (found.context, found.context_s) == (64, 1e-6)
