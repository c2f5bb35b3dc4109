from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from earlyexit.errors import InputError, PlanError
from earlyexit.network.boundary import Split
from earlyexit.network.model import ChainNetwork
from earlyexit.policies.ensemble import EnsemblePolicy
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.training.ramps import exit_outputs
from offramp.commands.calibrate import find_ensemble, mixed_outputs
from offramp.commands.forecast import forecast_document, forecast_table, read_series
from offramp.commands.plan import PlanAnswer, answer, answer_document, plan_tables, serving_plan, what_if, what_if_table
from optimizer.calibration.ensemble import mix_networks
from optimizer.cost.evaluate import evaluate
from optimizer.plans.plan import PolicySpec, Stage
from optimizer.plans.plan_file import read_plan, write_plan
from optimizer.problems.entries import Recorded
from optimizer.problems.problem import PlanProblem
from optimizer.problems.problem_file import ProblemFile, parse_problem
from optimizer.problems.what_if import Axis
from optimizer.search.decision import Decision, NoPlan, Planned, Strategy
from profiles.forecast import Method, SurvivalForecast
from tests.earlyexit.network.chains import Inputs, chained, follow, inputs_for
from tests.exit_records import exit_records
from tests.offramp.cli.runs import Captured, printed, run, written
from tests.optimizer.plain_problem import BEST, DOCUMENT

FILE = parse_problem(DOCUMENT)
STOCK = (Stage(device="V100", replicas=1, splits=(Split(first=0, end=2, batch=4),)),)
"""A plan that runs 4 inputs in 2 ms, which is 2000/s."""


def solve(problem: PlanProblem, strategy: Strategy, **_: object) -> Decision:
    """A planner with two plans and no serial one. It finds no plan for an SLO below 4 ms."""
    if strategy == "serial" or problem.slo.latency_s < 0.004:
        return NoPlan(strategy=strategy, binding="latency", nearest_slo_s=0.005)
    stages = BEST if strategy == "best" else STOCK
    return Planned(strategy=strategy, stages=stages, figures=evaluate(problem, stages), bound=5000.0, gap=0.2)


def planned_answer(file: ProblemFile = FILE) -> PlanAnswer:
    return answer(file, "best", solve)


def test_a_user_is_told_that_the_planner_is_compiled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("offramp.commands.plan.cache_folder", lambda: tmp_path)
    planned_answer()
    assert capsys.readouterr().err == "compiling the planner, once on this machine: up to a minute\n"
    (tmp_path / "kernel.nbi").touch()
    planned_answer()
    assert capsys.readouterr().err == ""


def tables_of(found: PlanAnswer) -> str:
    return shown(*plan_tables(found, answer_document(found)))


def shown(*tables: object) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(*tables)
    return console.export_text()


def recorded(*, sure: list[bool]) -> ProblemFile:
    scores = [[0.9 if each else 0.1] for each in sure]
    records = exit_records(scores, answers_NE=np.zeros((len(sure), 2), dtype=np.int64))
    return ProblemFile(problem=FILE.problem, recorded=Recorded(records=records, thresholds={0: 0.5}))


def test_the_document_of_a_plan_begins_with_the_plan() -> None:
    document = answer_document(planned_answer())
    assert list(document)[:4] == ["stages", "rate_per_s", "latency_s", "usd_per_hour"]
    assert document["stages"] == [
        {"device": "V100", "replicas": 1, "splits": [{"first": 0, "end": 1, "batch": 4, "ramps": [0]}]},
        {"device": "V100", "replicas": 2, "splits": [{"first": 1, "end": 2, "batch": 2, "ramps": []}]},
    ]
    assert document["rate_per_s"] == pytest.approx(4000)
    assert document["latency_s"] == pytest.approx(0.004002)
    assert document["usd_per_hour"] == 9
    assert (document["strategy"], document["bound"], document["gap"], document["joint"]) == ("best", 5000, 0.2, None)
    assert [each["fill"] for each in document["splits"]] == [1.0, 1.0]
    assert document["binds"] == [{"kind": "stage", "stage": 0, "text": "stage 0 serves at most 4000/s"}]
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    baselines = document["baselines"]
    assert list(baselines) == ["stock", "early-exit", "e3", "serial"]
    assert baselines["stock"]["times_better"] == pytest.approx(2.0)
    assert baselines["serial"] == {
        "no_plan": {"binding": "latency", "nearest_slo_s": 0.005, "highest_rate_per_s": None},
        "times_better": None,
    }


def test_the_tables_show_stages_figures_and_the_other_strategies() -> None:
    text = tables_of(planned_answer())
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    words = [line.split() for line in text.splitlines()]
    assert ["0:", "1", "x", "V100", "0-0", "4", "0", "1.00", "1.00", "100%", "4000", "0.00"] in words
    assert ["1:", "2", "x", "V100", "1-1", "2", "-", "1.00", "1.00", "100%", "8000", "-"] in words
    assert ["worst-case latency", "4.00 ms of 80.00 ms allowed"] in rows
    assert ["binds", "stage 0 serves at most 4000/s"] in rows
    assert ["proof", "within 20.00% of the best"] in rows
    assert ["stock", "2000", "4.00", "3.00", "2.00 x"] in rows
    assert ["serial", "no plan", "latency binds", "-", "-"] in rows
    found = answer(parse_problem({**DOCUMENT, "slo": {"latency_s": 0.003}}), "best", solve)
    assert isinstance(found.decision, NoPlan)
    assert plan_tables(found, answer_document(found)) == []
    found = answer(FILE, "serial", solve)
    assert isinstance(found.decision, NoPlan)
    assert "2000" in tables_of(found)


def test_a_plan_is_scored_again_by_exit_records_and_served_with_their_thresholds(tmp_path: Path) -> None:
    found = planned_answer(recorded(sure=[True, False, False, False]))
    assert found.rescoring is not None
    document = answer_document(found)
    # Three quarters go on, 2 replicas do 2 of them in 1 ms each: the first stage still binds.
    assert document["joint"]["rate_per_s"] == pytest.approx(4000)
    # The plan itself, and those of stock and the other strategies where they differ: here one more.
    assert (document["joint"]["broken"], document["joint"]["chosen"], document["joint"]["candidates"]) == ([], 0, 2)
    assert "By the exit records" in tables_of(found)
    file = recorded(sure=[True, False])
    plan = serving_plan(planned_answer(file))
    assert plan.policy == PolicySpec(name="confidence", thresholds={0: 0.5})
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    assert plan.predicted["rate_per_s"] == pytest.approx(4000)
    with pytest.raises(InputError, match="from either --threshold or the problem's exit records"):
        serving_plan(planned_answer(file), 0.4)


def test_a_batch_that_never_fills_by_the_exit_records_takes_an_endless_time() -> None:
    found = answer(recorded(sure=[True]), "best", solve, compared=())
    document = answer_document(found)
    assert (document["joint"]["latency_s"], document["joint"]["chosen"]) == (None, None)
    assert "endless" in tables_of(found)


def test_strategies_are_compared_with_nested_survival_although_the_records_prefer_another_plan() -> None:
    """Behind the ramp, 3 replicas serve 6000/s: 12000/s if half of the inputs pass the ramp. Stock serves 8000/s."""
    stock = (replace(STOCK[0], replicas=4),)
    ramped = (
        replace(BEST[0], replicas=4, splits=(Split(first=0, end=1, batch=8, ramps=(0,)),)),
        replace(BEST[1], replicas=3),
    )
    whole = {"block_s": [[0.001] * 4] * 2, "ramp_s": [[0.0] * 4], "batch": [1, 2, 4, 8]}
    problem = parse_problem({**DOCUMENT, "latency": {"V100": whole}, "devices": {"V100": {"count": 7}}}).problem
    file = replace(recorded(sure=[False, False]), problem=problem)

    def solve_seven(problem: PlanProblem, strategy: Strategy, **_: object) -> Decision:
        stages = ramped if strategy == "best" else stock
        return Planned(strategy=strategy, stages=stages, figures=evaluate(problem, stages), bound=9e9, gap=0.0)

    found = answer(file, "best", solve_seven)
    assert found.planned.stages == stock
    assert found.rescoring is not None
    assert found.rescoring.chosen is not None
    assert found.rescoring.chosen.joint.rate_per_s == pytest.approx(8000)
    assert [each["times_better"] for each in found.baselines.values()] == pytest.approx([12_000 / 8000] * 4)
    assert "All figures are for nested survival" in tables_of(found)
    assert "0.00 USD/h" not in tables_of(found), "no device has a price"


def test_a_strategy_whose_search_proves_nothing_does_not_hide_the_plans_of_the_others() -> None:
    def solve_some(problem: PlanProblem, strategy: Strategy, **_: object) -> Decision:
        if strategy == "e3":
            raise PlanError("no plan was found, though there may be one: plans do at most 9000")
        return solve(problem, strategy)

    found = answer(FILE, "best", solve_some)
    assert found.planned.figures.rate_per_s == pytest.approx(4000)
    unknown = {"binding": None, "message": "no plan was found, though there may be one: plans do at most 9000"}
    assert found.baselines["e3"] == {"no_plan": unknown, "times_better": None}
    assert "none found" in tables_of(found)
    by_slo = Axis(name="slo_s", values=(0.1,))
    [row] = what_if(FILE.problem, by_slo, solve_some)
    assert (row["strategies"]["e3"], row["strategies"]["best"]["rate_per_s"]) == ({"no_plan": unknown}, 4000)
    with pytest.raises(PlanError, match="plans do at most 9000"):
        _ = answer(FILE, "e3", solve_some).planned


def test_a_what_if_table_names_the_changed_quantity_and_the_objective() -> None:
    by_rate = Axis(name="rate_per_s", values=(1000.0,))
    table = what_if_table(FILE.problem, by_rate, list(what_if(FILE.problem, by_rate, solve)))
    names = [column.header for column in table.columns]
    assert names[:5] == ["rate /s", "best /s", "latency ms", "USD/h", "stock USD/h"]
    by_count = Axis(name="count", values=(8,), device="V100")
    rows = list(what_if(FILE.problem, by_count, solve))
    assert {"device": "V100", "count": 8}.items() <= rows[0].items()
    assert what_if_table(FILE.problem, by_count, rows).columns[0].header == "V100 count"


def test_two_models_share_a_cluster(tmp_path: Path, capsys: Captured) -> None:
    latency = {"V100": {"batch": [2], "block_s": [[0.001]] * 2, "ramp_s": [[0.0]]}}
    written(tmp_path / "problem.yaml", json.dumps(DOCUMENT | {"latency": latency}))
    model = {"problem": "problem.yaml", "rate_per_s": 1000}
    fleet = {"devices": {"V100": {"count": 4, "usd_per_hour": 3}}, "models": {"a": model, "b": model}}
    path = written(tmp_path / "fleet.yaml", json.dumps(fleet))
    found = printed(capsys, "fleet", path, "--out", tmp_path / "plans", "--threshold", 0.4)
    assert (found["share"], found["gap"], found["usd_per_hour"]) == (pytest.approx(found["bound"]), 0, 12)
    for name in ("a", "b"):
        assert found["models"][name]["rate_per_s"] == pytest.approx(1000 * found["share"])
        plan = read_plan(tmp_path / "plans" / f"{name}.yaml")
        assert sum(stage.replicas for stage in plan.stages) == 2
    unplanned = written(tmp_path / "plans" / "b.yaml", path.read_text())
    assert run("fleet", path, "--out", tmp_path / "plans", "--threshold", 0.5) == 2
    assert f"--out would overwrite {unplanned}, which is not a plan" in capsys.readouterr().err
    assert run("fleet", path) == 0
    assert "Each model can be served" in " ".join(capsys.readouterr().out.split())
    cheap = fleet | {"objective": {"minimize": "cost"}}
    found = printed(capsys, "fleet", written(path, json.dumps(cheap)))
    assert (found["bound"], found["gap"], found["usd_per_hour"]) == (6, 0, 6)
    for rate_per_s, why in ((9000, "the devices can serve each model at"), (1, "model 'b', even with all devices: no")):
        cheap["models"] = {"a": model, "b": model | {"rate_per_s": rate_per_s}}
        assert run("fleet", written(path, json.dumps(cheap))) == 3
        assert why in capsys.readouterr().err
    assert run("fleet", written(path, json.dumps(fleet | {"devices": {"V100": {"count": 1}}}))) == 3
    assert "the devices are too few for all of them" in capsys.readouterr().err
    written(tmp_path / "problem.yaml", json.dumps({**DOCUMENT, "slo": {"latency_s": 1e-6}}))
    assert run("fleet", path) == 3
    assert "model 'a', even with all devices: no plan: the SLO of 0.001 ms" in capsys.readouterr().err


CSV = "inputs,0,1,2\n100,1,0.5,0.25\n\n200,1,0.6,0.25\n"
"""Three windows, of which the second is unknown."""
FORECAST = SurvivalForecast(
    survival_K=np.array([1.0, 0.5]),
    survival_low_K=np.array([1.0, 0.4]),
    survival_high_K=np.array([1.0, 0.6]),
    go_on_R=np.array([0.5]),
    go_on_low_R=np.array([0.4]),
    go_on_high_R=np.array([0.6]),
    coverage=0.8,
    methods_R=(Method(how="last value", reason="only one window was seen"),),
)


@pytest.mark.parametrize(
    ("text", "encoding", "inputs"),
    [
        pytest.param(CSV, "utf-8", math.nan, id="no cells"),
        pytest.param(CSV.replace("\n\n", "\n,,,\n"), "utf-8", math.nan, id="empty cells"),
        pytest.param(CSV.replace("\n\n", "\n0,1,0.9,0.9\n"), "utf-8", 0.0, id="no inputs, whatever its shares"),
        pytest.param(CSV, "utf-8-sig", math.nan, id="the mark that spreadsheets write first"),
    ],
)
def test_a_missing_window_is_not_a_window_of_zeros(tmp_path: Path, text: str, encoding: str, inputs: float) -> None:
    path = tmp_path / "series.csv"
    path.write_text(text, encoding=encoding)
    history = read_series(path)
    assert history.missing_W.tolist() == [False, True, False]
    assert history.survival_WK[[0, 2]].tolist() == [[1.0, 0.5, 0.25], [1.0, 0.6, 0.25]]
    np.testing.assert_equal(history.inputs_WK[:, 0], [100, inputs, 200])


def test_a_forecast_is_plain_data_and_a_table() -> None:
    document = forecast_document(FORECAST)
    ramp = {"ramp": 0, "go_on": 0.5, "low": 0.4, "high": 0.6}
    assert document == {
        "coverage": 0.8,
        "survival": [1.0, 0.5],
        "survival_low": [1.0, 0.4],
        "survival_high": [1.0, 0.6],
        "ramps": [ramp | {"method": "last value", "reason": "only one window was seen"}],
    }
    console = Console(width=120, record=True, file=StringIO())
    console.print(forecast_table(document))
    rows = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "1 0.500 0.400-0.600 0: 0.500 0.400-0.600 last value: only one window was seen" in rows
    assert "Intervals are for the true shares" in " ".join(rows)


def test_the_command_prints_the_next_window_and_its_rate(tmp_path: Path, capsys: Captured) -> None:
    path = written(tmp_path / "series.csv", CSV)
    survival = printed(capsys, "forecast", path)["survival"]
    assert survival[0] == 1
    assert max(0.4, survival[2]) < survival[1] < 0.7
    for rows, window_s, rate in (("", 10, "20.0"), ("", 100_000, "0.002"), ("0,1,1,1\n", 10, "0")):
        written(path, CSV + rows)
        assert run("forecast", path, "--window-s", window_s) == 0
        assert f"rate: {rate}/s" in capsys.readouterr().out


WEIGHTS = {1: 0.3, 2: 0.5}
HALF = 5e-4


@pytest.fixture(scope="module")
def network() -> ChainNetwork:
    return chained(2, 1, 2)


def outputs_of(network: ChainNetwork, inputs: Inputs) -> dict[int, Tensor]:
    """Returns the outputs of all networks, each run in full."""
    return {
        network.chain.starts[place] + block: outputs
        for place, member in enumerate(network.members)
        for block, outputs in exit_outputs(member, inputs.of_network[place]).items()
    }


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2), (1, 2), (2,)], ids=str)
def test_records_of_an_ensemble_equal_the_served_answers(network: ChainNetwork, used: Sequence[int]) -> None:
    inputs = inputs_for(network)
    outputs = mixed_outputs(outputs_of(network, inputs), network.chain, network.task, WEIGHTS, used)
    splits = [Split(first=network.chain.starts[k], end=network.chain.bounds[k], batch=4) for k in used]
    ended = [
        Split(first=each.first, end=each.end, batch=4, ramps=tuple({each.end - 1} & set(network.chain.end_ramps)))
        for each in splits
    ]
    nobody_leaves = EnsemblePolicy(ConfidencePolicy(2.0), WEIGHTS)
    _, seen = follow(network, nobody_leaves, inputs, ended, kind="probe")
    for block in network.ramp_indices:
        if network.chain.network_of(block) in used:
            score_N = outputs[block].softmax(-1).amax(-1).tolist()
            found = [seen[name, block].score for name in inputs.ids]
            assert found == pytest.approx(score_N, abs=HALF)


def test_the_end_of_an_ensemble_follows_equation_6(network: ChainNetwork) -> None:
    inputs = inputs_for(network)
    outputs = outputs_of(network, inputs)
    alone = [outputs[end].double().softmax(-1).numpy() for end in network.chain.ends]
    mixed = mixed_outputs(outputs, network.chain, network.task, WEIGHTS)
    expected_NC = mix_networks(alone, WEIGHTS, network.chain.end_ramps)
    assert np.abs(mixed[4].softmax(-1).numpy() - expected_NC).max() < HALF
    assert torch.equal(mixed[0], outputs[0])
    assert torch.equal(mixed[1], outputs[1])


def test_ensemble_weights_depend_only_on_the_design_rows(network: ChainNetwork) -> None:
    inputs = inputs_for(network, count=200)
    outputs = outputs_of(network, inputs)
    truth_N = outputs[4].argmax(1).numpy()  # no answer can be more right than the last network's
    goes_on_NE = np.ones((200, 2), dtype=bool)
    rows = np.arange(0, 200, 2)
    weights, found = find_ensemble(outputs, network.chain, truth_N, goes_on_NE, rows)
    assert (weights, found["on"], found["gain"]["num_inputs"]) == (None, False, 100)
    assert set(found["weights"]) == {1, 2}
    weights, none = find_ensemble(outputs, network.chain, truth_N, np.zeros((200, 2), dtype=bool), rows)
    assert (weights, none["on"], none["gain"]) == (None, False, None)
