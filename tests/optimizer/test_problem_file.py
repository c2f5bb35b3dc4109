from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import PlanError
from offramp.commands.plan import answer, answer_document, best_answer, serving_plan
from optimizer.live.plan_changes import StartCost, weigh
from optimizer.plans.plan import PolicySpec
from optimizer.problems.problem import (
    LEAST_BLOCK_S,
    LEAST_RATE,
    MOST_BLOCK_S,
    Link,
    MaximizeRate,
    MinimizeCost,
    MinimizeLatency,
    PlanProblem,
    Slo,
    Supply,
)
from optimizer.problems.problem_file import ProblemFile, parse_problem, problem_document, read_problem, read_problems
from optimizer.problems.what_if import Axis, variants, with_batch_limit
from optimizer.search.decision import Decision, NoPlan, Strategy
from optimizer.search.planner import solve
from optimizer.search.soonest.search import planes_of
from optimizer.search.space import SPACES
from optimizer.search.tables import tables_of
from profiles.catalogue import published_profile
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from tests.exit_records import exit_records
from tests.latency_profile import latency_profile
from tests.offramp.cli.runs import written
from tests.offramp.service.service_folders import write_beside, write_chain, write_model, write_pruned
from tests.optimizer.answers import plan_json, planned
from tests.optimizer.plain_problem import DOCUMENT, plain_problem

GOOD = (Path(__file__).parent / "files/problem.yaml").read_text(encoding="utf-8")
TABLE = LatencyTable(batches=(1, 2), block_s_NB=np.array([[0.001, 0.0015]] * 3), ramp_s_EB=np.array([[1e-4, 1e-4]] * 2))


def read(folder: Path, text: str) -> PlanProblem:
    return read_problem(written(folder / "problem.yaml", text)).problem


def changed(before: str, after: str) -> str:
    assert before in GOOD
    return GOOD.replace(before, after)


def test_a_problem_is_read_from_yaml_and_from_json(tmp_path: Path) -> None:
    problem = read(tmp_path, GOOD)
    assert (problem.num_blocks, problem.ramps, problem.survival_N) == (3, (0, 1), (1.0, 0.5, 0.25))
    assert dict(problem.devices) == {"V100": Supply(count=4, usd_per_hour=2.93)}
    assert problem.link == Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4)
    assert (problem.slo, problem.objective) == (Slo(latency_s=0.1, slack=0.25), MaximizeRate())
    assert (problem.bytes_per_sample_N, problem.budget_usd_per_hour) == ((10.0, 20.0, 30.0), None)
    assert list(problem.latency) == ["V100"]
    assert problem.latency["V100"].batches == (1, 2)
    np.testing.assert_array_equal(problem.latency["V100"].block_s_NB, TABLE.block_s_NB)
    np.testing.assert_array_equal(problem.latency["V100"].ramp_s_EB, TABLE.ramp_s_EB)
    assert read_problem(written(tmp_path / "problem.yaml", GOOD)).policy((0,)) is None
    problem = read(tmp_path, changed("[1.0, 0.5, 0.25]", "[1.0, 1.0, 0.0]").replace("count: 4", "count: 0"))
    assert problem.devices["V100"] == Supply(count=0, usd_per_hour=2.93)
    assert problem.survival_N == (1.0, 1.0, 0.0)
    path = written(tmp_path / "problem.json", json.dumps(problem_document(read(tmp_path, GOOD))))
    assert problem_document(read_problem(path).problem) == problem_document(read(tmp_path, GOOD))


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        changed("{maximize: rate}", "{minimize: cost, rate_per_s: 6000}"),
        GOOD + "budget: {usd_per_hour: 40}\n",
        changed("count: 4", "count: 4, per_node: 8"),
        GOOD + "ingress: {inputs_per_s: 3000.0, replicas: 2}\n",
        changed("ramps: [0, 1]", "ramps: []").replace("[[1.0e-4, 1.0e-4], [1e-4, 1e-4]]", "[]"),
    ],
    ids=["rate", "cost", "budget", "a shared network card", "ingress", "no ramps"],
)
def test_what_is_written_is_read_back(text: str, tmp_path: Path) -> None:
    document = problem_document(read(tmp_path, text))
    assert document["schema_version"] == 1
    assert problem_document(parse_problem(document).problem) == document


@pytest.mark.parametrize(
    ("given", "read_as"),
    [("7", (7.0, 7.0, 7.0)), ("[1, 2]", (1.0, 2.0, 0.0)), ("[1, 2, 3]", (1.0, 2.0, 3.0))],
    ids=["one for all", "none after the last block", "one per block"],
)
def test_bytes_per_sample_come_in_three_forms(given: str, read_as: tuple[float, ...], tmp_path: Path) -> None:
    assert read(tmp_path, changed("[10, 20, 30]", given)).bytes_per_sample_N == read_as


PROFILED = (
    GOOD[: GOOD.index("    batch:")] + "    profile: v100.json\n    length: 32\n" + GOOD[GOOD.index("devices:") :]
)


def test_latency_is_taken_from_a_profile_beside_the_problem_or_from_published_figures(tmp_path: Path) -> None:
    latency_profile().save(tmp_path / "v100.json")
    table = read(tmp_path, PROFILED).latency["V100"]
    assert (table.batches, table.block_s_NB.tolist()) == ((1, 2), [[0.001, 0.001]] * 3)
    table = read(tmp_path, PUBLISHED).latency["V100"]
    assert table.block_s_NB.tolist() == published_profile("bert-base", "V100").at(128).block_s_NB.tolist()


PUBLISHED = (Path(__file__).parent / "files/published.yaml").read_text(encoding="utf-8")


def problem_records(*, ramps: tuple[int, ...] = (0, 1)) -> ExitRecords:
    """Returns exit records of four inputs: one may leave at ramp 0, one at ramp 1 only, one at both, one never."""
    scores = np.array([[0.1, 0.9], [0.9, 0.1], [0.1, 0.1], [0.9, 0.9]], dtype=np.float32)[:, : len(ramps)]
    answers_NE = np.zeros((4, len(ramps) + 1), dtype=np.int64)
    return exit_records(scores, answers_NE=answers_NE, score="entropy", num_blocks=3, ramps=ramps)


def recorded(thresholds: str) -> str:
    return changed("[1.0, 0.5, 0.25]", f"\n  records: records.npz\n  thresholds: {thresholds}")


def test_survival_is_taken_from_exit_records_with_one_threshold_or_one_per_ramp(tmp_path: Path) -> None:
    problem_records().save(tmp_path / "records.npz")
    file = read_problem(written(tmp_path / "problem.yaml", recorded("0.4")))
    assert file.problem.survival_N == (1.0, 0.5, 0.25)
    assert file.recorded is not None
    assert len(file.recorded.records) == 4
    assert file.policy((1,)) == PolicySpec(name="entropy", thresholds={1: 0.4})
    file = read_problem(written(tmp_path / "problem.yaml", recorded("{0: 0.0, 1: 0.4}")))
    assert file.problem.survival_N == (1.0, 1.0, 0.5)


@pytest.mark.parametrize("sought", [MinimizeCost, MinimizeLatency])
@pytest.mark.parametrize(("seconds", "rate_per_s"), [(LEAST_BLOCK_S, 1e6), (MOST_BLOCK_S, LEAST_RATE)])
def test_the_most_extreme_allowed_latencies_have_plans(
    tmp_path: Path, seconds: float, rate_per_s: float, sought: type[MinimizeCost | MinimizeLatency]
) -> None:
    table = replace(TABLE, block_s_NB=np.full((3, 2), seconds))
    problem = replace(read(tmp_path, GOOD), latency={"V100": table}, slo=Slo(latency_s=1e15))
    planned(problem)
    assert planned(replace(problem, objective=sought(rate_per_s=rate_per_s))).stages


def test_a_bound_is_given_where_numbers_are_too_far_apart_for_the_linear_program(tmp_path: Path) -> None:
    problem = replace(read(tmp_path, GOOD), objective=MinimizeLatency(rate_per_s=50.0), slo=Slo(latency_s=1e-300))
    tables = tables_of(problem, SPACES["best"], "stop")
    patient = replace(problem, slo=Slo(latency_s=1e15))
    assert planes_of(problem, tables).least_time(50.0).value >= planes_of(patient, tables).least_time(50.0).value


PROBLEM = (Path(__file__).parent / "files/folder.yaml").read_text(encoding="utf-8")


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    small, large = (write_model(tmp_path / name, num_blocks=blocks, name=name) for name, blocks in (("s", 2), ("l", 3)))
    write_beside(write_chain(tmp_path / "cascade", small, large), "", dict.fromkeys(range(4), 0.05))
    return written(tmp_path / "problem.yaml", PROBLEM)


def test_each_calibration_leaves_its_own_ramps_and_their_seconds(problem: Path) -> None:
    write_beside(problem.parent / "cascade", "", {0: 0.5, 1: 0.5})
    write_beside(problem.parent / "cascade", "reference", {2: 0.05, 3: 0.5})
    own, reference = read_problems(problem)
    assert own.problem.ramps == (0, 1)
    assert own.problem.survival_N == (1.0, 0.5, 0.25, 0.25, 0.25)
    assert own.problem.latency["cpu"].ramp_s_EB.tolist() == [[0.001, 0.002], [0.002, 0.003]]
    assert reference.problem.ramps == (2, 3)
    assert reference.problem.latency["cpu"].ramp_s_EB.tolist() == [[0.003, 0.004], [0.004, 0.005]]
    assert [each.recorded and each.recorded.calibration for each in (own, reference)] == [
        problem.parent / "cascade" / name / "calibration.json" for name in ("", "reference")
    ]


def test_the_best_plan_names_its_calibration(problem: Path) -> None:
    write_beside(problem.parent / "cascade", "reference", {2: 0.5, 3: 0.5})
    files = read_problems(problem)
    found = best_answer(files, "best", compared=())
    assert answer_document(found)["calibration"] == str(problem.parent / "cascade" / "reference" / "calibration.json")
    assert serving_plan(found).ramps == (2,)
    assert best_answer(files[:1], "best", compared=()).planned.figures.rate_per_s < found.planned.figures.rate_per_s

    def gives_up_first(asked: PlanProblem, strategy: Strategy, **_: object) -> Decision:
        if asked is files[0].problem:
            raise PlanError("no plan was found, though there may be one")
        return solve(asked, strategy)

    assert best_answer(files, "best", gives_up_first, compared=()).planned == found.planned
    with pytest.raises(PlanError, match="there may be one"):
        best_answer(files[:1], "best", gives_up_first, compared=())
    # Without exits, an input takes 300 ms instead of 303, but at 6/s two devices are 90 % busy: too many are late.
    files = read_problems(written(problem, PROBLEM.replace("maximize: rate", "minimize: cost, rate_per_s: 6")))
    assert best_answer(files, "best", compared=()).file is files[1]
    assert "at random may be in time" in answer(files[0], "best", compared=["stock"]).baselines["stock"]["note"]
    write_beside(problem.parent / "cascade", "reference", {2: 0.05, 3: 0.05})
    files = read_problems(written(problem, PROBLEM))
    assert best_answer(files, "best", compared=()).file is files[0]


def test_pruned_texts_bring_their_own_records(problem: Path) -> None:
    write_pruned(problem.parent / "cascade", end=1, kept=0.5, measuring=1.5)
    own, pruned = read_problems(problem)
    assert (own.prune, pruned.prune) == ({}, {1: 0.6})
    assert pruned.problem.crossing_tokens == (1.0, 0.5)
    assert pruned.recorded is not None
    assert pruned.recorded.alone is not None


def test_if_no_calibration_has_a_plan_the_first_reason_is_reported(problem: Path) -> None:
    problem.write_text(PROBLEM.replace("latency_s: 2.0", "latency_s: 0.001"), encoding="utf-8")
    write_beside(problem.parent / "cascade", "reference", {2: 0.5})
    files = read_problems(problem)
    found = best_answer(files, "best", compared=())
    assert found.file is files[0]
    assert isinstance(found.decision, NoPlan)


@pytest.mark.parametrize(
    ("survival", "words"),
    [
        ("{folder: cascade, thresholds: 0.5}", "survival: the folder has its own thresholds; leave out one of the two"),
        ("{thresholds: 0.5}", "survival: neither of records and folder are given; one of them is needed"),
        ("{folder: gone}", "gone/exit_records.npz"),
    ],
)
def test_fields_beside_a_folder_are_refused_at_their_line(problem: Path, survival: str, words: str) -> None:
    problem.write_text(PROBLEM.replace("{folder: cascade}", survival), encoding="utf-8")
    with pytest.raises(PlanError) as refused:
        read_problems(problem)
    assert str(refused.value).startswith(f"{problem}:4: ")
    assert words in str(refused.value)


def test_read_problem_takes_the_models_own_calibration_or_another_by_its_folder(problem: Path) -> None:
    write_beside(problem.parent / "cascade", "reference", {2: 0.5})
    assert read_problem(problem).problem.ramps == (0, 1, 2, 3)
    problem.write_text(PROBLEM.replace("{folder: cascade}", "{folder: cascade/reference}"), encoding="utf-8")
    assert read_problem(problem).problem.ramps == (2,)
    assert len(read_problems(problem)) == 1


STEPPED = LatencyTable(batches=(1, 2, 4), block_s_NB=np.array([[0.001, 0.002, 0.003]]), ramp_s_EB=np.ones((0, 3)))
VARIED = plain_problem(survival_N=(1.0,), latency={"V100": STEPPED}, slo=Slo(latency_s=1.0, slack=0.2))


def test_varied_slos_keep_their_slack() -> None:
    found = variants(VARIED, Axis(name="slo_s", values=(0.025, 0.05)))
    assert [each.slo for each in found] == [Slo(latency_s=0.025, slack=0.2), Slo(latency_s=0.05, slack=0.2)]


def test_a_batch_limit_keeps_devices_of_which_there_are_none() -> None:
    nothing = with_t4(("V100", 0))
    assert dict(with_batch_limit(nothing, 4).devices) == dict(nothing.devices)


COARSE = LatencyTable(batches=(8, 16), block_s_NB=np.array([[0.004, 0.006]]), ramp_s_EB=np.ones((0, 2)))


def with_t4(*devices: tuple[str, int]) -> PlanProblem:
    """Returns the problem with these counts, and a T4 whose smallest measured batch is 8."""
    counts = {device: Supply(count=count) for device, count in devices}
    return replace(VARIED, latency={**VARIED.latency, "T4": COARSE}, devices=counts)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(with_t4(("V100", 4)), id="no device of the problem"),
        pytest.param(with_t4(("V100", 4), ("T4", 0)), id="none of it there"),
        pytest.param(with_t4(("V100", 4), ("T4", 9)), id="another device does it"),
    ],
)
def test_a_batch_limit_drops_the_devices_that_were_not_measured_up_to_it(problem: PlanProblem) -> None:
    limited = with_batch_limit(problem, 4)
    assert (set(limited.latency), set(limited.devices)) == ({"V100"}, {"V100"})
    assert set(with_batch_limit(problem, 8).latency) == {"V100", "T4"}


def document(**objective: Any) -> dict[str, Any]:
    return {**DOCUMENT, "objective": objective}


def asked(**objective: Any) -> ProblemFile:
    return parse_problem(document(minimize="latency", **objective))


@pytest.mark.parametrize("more", [{"queues": True}, {"ramp_budget": 0.02, "queues": False}], ids=str)
def test_an_objective_is_read_back(more: dict[str, float]) -> None:
    objective = {"minimize": "latency", "rate_per_s": 60, **more}
    assert problem_document(parse_problem(document(**objective)).problem)["objective"] == objective


def test_the_json_output_has_mean_latency_overhead_and_after_answer() -> None:
    found = plan_json(asked(rate_per_s=500, queues=False), "apparate")
    # A batch of 1, without a wait: block 0, and block 1 for the half without an answer.
    assert found["mean_latency_s"] == pytest.approx(0.001 + 0.5 * 0.001)
    assert (found["ramp_overhead"], found["after_answer"]) == (0, "stay")
    assert found["baselines"]["stock"]["mean_latency_s"] == pytest.approx(0.002)
    assert found["baselines"]["stock"]["times_better"] == pytest.approx(0.002 / 0.0015)
    assert "after_answer" not in found["baselines"]["stock"]
    found = plan_json(parse_problem(DOCUMENT))
    assert not {"mean_latency_s", "ramp_overhead", "after_answer"} & found.keys()
    assert found["baselines"].keys() == {"stock", "early-exit", "e3", "serial"}
    assert list(plan_json(asked(rate_per_s=60))["baselines"])[-1] == "apparate"


def test_the_binding_constraint_of_an_infeasible_problem_is_reported() -> None:
    found = answer(asked(rate_per_s=100_000), "apparate")
    assert answer_document(found)["no_plan"]["message"] == (
        "no plan: the devices (4 V100) are too few for 100000/s; the highest rate with a plan is 8000/s"
    )
    dear = {"V100": {"batch": [1], "block_s": [[0.001]] * 2, "ramp_s": [[0.001]]}}
    sought = document(minimize="latency", rate_per_s=100, ramp_budget=0.02)
    found = answer(parse_problem({**sought, "latency": dear}), "early-exit", compared=())
    assert answer_document(found)["no_plan"]["message"] == (
        "no plan: the ramp budget of 2.000% of the blocks' time is too small"
    )


def test_rates_and_slos_of_a_latency_problem_are_varied() -> None:
    problem = asked(rate_per_s=60, ramp_budget=0.02).problem
    faster, _ = variants(problem, Axis(name="rate_per_s", values=(500, 600)))
    assert faster.objective == MinimizeLatency(rate_per_s=500, ramp_budget=0.02)


def test_a_plan_that_answers_sooner_is_worth_its_change() -> None:
    problem = asked(rate_per_s=500, queues=False).problem
    new, old = planned(problem).stages, planned(problem, "stock").stages
    free = StartCost(running={"V100": 4}, start_s=1, period_s=120)
    verdict = weigh(problem, old, new, start_cost=free, least_gain=0.05)
    assert verdict.change
    assert "answer 25.0% sooner" in verdict.words
    assert "answer 33.3% later" in weigh(problem, new, old, start_cost=free, least_gain=0.05).words
