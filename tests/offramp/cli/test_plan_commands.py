from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from earlyexit.engine.queue import OrderSpec
from earlyexit.errors import InputError
from offramp.commands.plan import draw_plan
from optimizer.cost.evaluate import evaluate
from optimizer.plans.plan_file import read_plan
from optimizer.problems.problem_file import parse_problem
from optimizer.search.decision import Planned
from profiles.latency import LatencyProfile
from tests.offramp.cli import runs
from tests.offramp.cli.runs import Captured, printed, refused, run, run_alone, written
from tests.optimizer.plain_problem import BEST, DOCUMENT

PROBLEM = runs.PROBLEM.replace("count: 1", "count: 3")
"""A block takes 1 ms at any batch. Of 4 inputs 2 are left for block 1: 3 devices do at most 3 * 4 / 1.5 ms = 8000/s."""
PLAN_KEYS = ["stages", "rate_per_s", "latency_s", "usd_per_hour"]


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    return written(tmp_path / "problem.yaml", PROBLEM)


def test_plans_for_early_answers_report_whether_answered_inputs_run_on(tmp_path: Path, capsys: Captured) -> None:
    sought = "{minimize: latency, rate_per_s: 500}"
    path = written(tmp_path / "soonest.yaml", PROBLEM.replace("{maximize: rate}", sought))
    assert run("plan", path, "--strategy", "apparate") == 0
    said = capsys.readouterr().out
    for words in ("mean answer time", "answered inputs", "run on to the end", "apparate", "mean ms"):
        assert words in said
    out = tmp_path / "plan.yaml"
    answer = printed(capsys, "plan", path, "--strategy", "apparate", "--no-compare", "--out", out, "--threshold", 0.4)
    assert (answer["after_answer"], read_plan(out).after_answer) == ("stay", "stay")
    assert read_plan(out).predicted["mean_latency_s"] == pytest.approx(answer["mean_latency_s"])
    assert list(answer)[:4] == PLAN_KEYS


def test_a_plan_is_printed_as_json_and_as_tables(problem: Path, capsys: Captured) -> None:
    answer = printed(capsys, "plan", problem)
    assert list(answer)[:4] == PLAN_KEYS
    assert answer["rate_per_s"] == pytest.approx(8000)
    assert answer["usd_per_hour"] == 9
    assert answer["latency_s"] <= 0.08
    assert sum(stage["replicas"] for stage in answer["stages"]) == 3
    assert [split["ramps"] for stage in answer["stages"] for split in stage["splits"]] == [[0], []]
    assert answer["gap"] == 0
    assert list(answer["baselines"]) == ["stock", "early-exit", "e3", "serial"]
    assert answer["baselines"]["stock"]["rate_per_s"] == pytest.approx(6000)  # 3 * 4 inputs in 2 ms
    assert answer["baselines"]["stock"]["times_better"] == pytest.approx(8000 / 6000)
    assert run("plan", problem) == 0
    out = capsys.readouterr().out
    assert "all 3 V100 are used" in out
    assert "exact: no plan of its space is better" in out


def test_a_plan_of_two_chains_is_printed_written_drawn_and_simulated(tmp_path: Path, capsys: Captured) -> None:
    """A V100 takes 1 ms a block and a T4 2 ms: each type serves alone."""
    entry = "{batch: [4], block_s: [[0.002], [0.002]], ramp_s: [[0.0]]}"
    text = PROBLEM.replace("latency:", f"most_chains: 2\nlatency:\n  T4: {entry}", 1)
    text = text.replace("devices:", "devices:\n  T4: {count: 1, usd_per_hour: 1}", 1)
    path, out = written(tmp_path / "problem.yaml", text), tmp_path / "plan.yaml"
    answer = printed(capsys, "plan", path, "--out", out, "--threshold", 0.4, "--plot", tmp_path / "plan.svg")
    assert answer["rate_per_s"] == pytest.approx(8000 + 4 / 0.003, rel=1e-3)
    shares = {chain["stages"][0]["device"]: chain["share"] for chain in answer["chains"]}
    assert shares == pytest.approx({"V100": 6 / 7, "T4": 1 / 7}, rel=1e-3)
    assert sorted(read_plan(out).shares) == pytest.approx(sorted(shares.values()))
    assert (tmp_path / "plan.svg").stat().st_size > 10_000
    assert run("plan", path) == 0
    assert "of the inputs" in capsys.readouterr().out
    played = written(tmp_path / "answer.json", json.dumps(answer))
    options = ("--plan", played, "--arrivals", "poisson:6000", "--duration", 2, "--seed", 0)
    figures = printed(capsys, "simulate", path, *options)
    assert figures["plan"]["chains"] == answer["chains"]
    assert figures["simulated"]["in_slo_share"] > 0.99


def test_objective_strategy_batch_limit_and_no_comparison_are_respected(problem: Path, capsys: Captured) -> None:
    answer = printed(capsys, "plan", problem, "--strategy", "stock")
    assert (answer["strategy"], answer["rate_per_s"]) == ("stock", pytest.approx(6000))
    answer = printed(capsys, "plan", problem, "--batch-limit", 3)
    assert answer["rate_per_s"] == pytest.approx(4000)  # half of 8000/s
    assert {split["batch"] for stage in answer["stages"] for split in stage["splits"]} == {2}
    assert printed(capsys, "plan", problem, "--objective", '{"minimize": "cost", "rate_per_s": 9}')["usd_per_hour"] == 3
    alone = printed(capsys, "plan", problem, "--no-compare")
    assert alone == {**printed(capsys, "plan", problem, "--compare"), "baselines": {}}
    assert run("plan", problem, "--no-compare") == 0
    assert "Other strategies" not in capsys.readouterr().out


def test_no_plan_is_exit_status_3_with_the_binding_limit_and_possible_limits(problem: Path, capsys: Captured) -> None:
    tight = written(problem, PROBLEM.replace("latency_s: 0.1,", "latency_s: 0.001,"))  # half of what the model takes
    assert run("plan", tight) == 3
    said = capsys.readouterr()
    assert said.err.startswith("no plan: the SLO of 1 ms (0.8 ms after 20 % slack) binds; the tightest SLO with a plan")
    assert said.out.strip() == ""
    assert run("plan", tight, "--json") == 3
    said = capsys.readouterr()
    no_plan = json.loads(said.out)["no_plan"]
    assert set(no_plan) == {"binding", "message", "nearest_slo_s", "highest_rate_per_s"}
    assert no_plan["binding"] == "latency"
    assert no_plan["nearest_slo_s"] == pytest.approx(0.002 / 0.8)  # two blocks of 1 ms, below a slack of 20 %
    assert said.err == ""


def test_a_plan_has_the_order_of_its_problem_or_of_the_option(problem: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "plan.yaml"
    written(problem, PROBLEM + "order: {name: das, eta: 0.25}\n")
    printed(capsys, "plan", problem, "--out", out, "--threshold", 0.4)
    assert read_plan(out).order == OrderSpec(name="das", eta=0.25)
    printed(capsys, "plan", problem, "--out", out, "--threshold", 0.4, "--order", "shortest")
    assert read_plan(out).order == OrderSpec(name="shortest")
    written(problem, PROBLEM + "order: {name: das, eta: 1.25}\n")
    assert refused(capsys, "plan", problem).endswith(": eta must be between 0 and 1, not 1.25")


def lines(captured: Captured, *arguments: object) -> list[dict[str, Any]]:
    assert run("what-if", *arguments, "--json") == 0
    return [json.loads(line) for line in captured.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("option", "given", "key", "values", "sought", "found"),
    [
        ("--batch-limit", "1,2,4", "batch_limit", [1, 2, 4], "rate_per_s", [2000, 4000, 8000]),
        ("--count", "V100=1,2", "count", [1, 2], "rate_per_s", [8000 / 3, 16000 / 3]),
        ("--budget", "3,6.5", "usd_per_hour", [3, 6.5], "rate_per_s", [8000 / 3, 16000 / 3]),
        ("--rate", "100,7000", "rate_per_s", [100, 7000], "usd_per_hour", [3, 9]),
        ("--slo-ms", "50,100", "slo_s", [0.05, 0.1], "rate_per_s", [8000, 8000]),
    ],
)
def test_a_what_if_prints_a_line_per_value(
    problem: Path,
    capsys: Captured,
    option: str,
    given: str,
    key: str,
    values: list[float],
    sought: str,
    found: list[float],
) -> None:
    answers = lines(capsys, problem, option, given)
    assert [answer[key] for answer in answers] == values
    assert [answer["strategies"]["best"][sought] for answer in answers] == pytest.approx(found)


@pytest.mark.parametrize(("option", "binding"), [("--budget", "budget"), ("--slo-ms", "latency")])
def test_a_what_if_reports_values_without_a_plan(problem: Path, capsys: Captured, option: str, binding: str) -> None:
    too_little = "0" if option == "--budget" else "1"
    [none] = lines(capsys, problem, option, too_little)
    assert none["strategies"]["best"]["no_plan"]["binding"] == binding


def test_plans_promise_no_more_than_the_ingresses_carry(problem: Path, capsys: Captured) -> None:
    written(problem, PROBLEM + "ingress: {inputs_per_s: 2500.0, replicas: 2}\n")
    answer = printed(capsys, "plan", problem)
    # Two of the three V100 serve 16000/3 per second, one does 8000/3.
    assert (answer["rate_per_s"], answer["bound"], answer["gap"], answer["usd_per_hour"]) == (5000, 5000, 0, 6)
    text = "2 ingresses carry at most 5000/s: a higher rate needs more ingress.replicas"
    assert answer["binds"] == [{"kind": "ingress", "stage": None, "text": text}]
    assert answer["note"] == "with 4 ingress replicas, a plan could serve 8000/s"
    served, refused = (each["strategies"]["best"] for each in lines(capsys, problem, "--rate", "4999,5001"))
    assert (served["rate_per_s"], refused["no_plan"]["binding"]) == (5000, "ingress")
    simulated = printed(capsys, "simulate", problem, "--arrivals", "poisson:4000", "--duration", 2)
    assert simulated["notes"][-1].endswith("by the problem's figures, 2 ingresses carry at most 5000/s")
    written(problem, problem.read_text().replace("{maximize: rate}", "{minimize: cost, rate_per_s: 6000}"))
    assert run("plan", problem) == 3
    assert capsys.readouterr().err == f"no plan: {text.split(':')[0]}, and 6000/s need 3 ingress.replicas\n"


def test_planning_loads_nothing_that_it_does_not_need(problem: Path) -> None:
    heavy = "torch ray transformers statsmodels pandas matplotlib httpx aiohttp httptools"
    run_alone("plan", problem, "--json", without=heavy).check_returncode()


def test_a_measured_profile_can_be_planned_with(model: Path, tmp_path: Path, capsys: Captured) -> None:
    out, points = tmp_path / "cpu.json", tmp_path / "points.jsonl"
    measure = ("profile", model, "--out", out, "--batches", "1,2", "--lengths", "4", "--repeats", 2)
    figures = printed(capsys, *measure, "--jsonl", points)
    assert [(row["length"], row["batch"]) for row in figures["rows"]] == [(4, 1), (4, 2)]
    assert run(*measure) == 0
    said = capsys.readouterr().out
    assert "m on cpu" in said
    assert said.endswith(f"latency profile: {out}\n")
    assert (LatencyProfile.load(out).num_blocks, LatencyProfile.load(out).lengths) == (3, (4,))
    assert len(points.read_text(encoding="utf-8").splitlines()) >= 2
    text = PROBLEM.replace("blocks: 2", "blocks: 3").replace("[0]", "[0, 1]").replace("[1.0, 0.5]", "[1.0, 0.5, 0.5]")
    before, _, after = text.partition("latency:\n")
    _, _, after = after.partition("devices:\n")
    after = after.replace("V100", "cpu").replace("latency_s: 0.1,", "latency_s: 60,")
    latency = "latency:\n  cpu: {profile: cpu.json, length: 4}\ndevices:\n"
    assert printed(capsys, "plan", written(tmp_path / "problem.yaml", before + latency + after))["rate_per_s"] > 0


PICTURED = parse_problem(DOCUMENT).problem
PLANNED = Planned(strategy="best", stages=BEST, figures=evaluate(PICTURED, BEST), bound=1.0, gap=0.0)


def test_a_plan_is_drawn_with_its_splits_in_its_endings_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_plan(PLANNED, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    for words in ("1 x V100", "2 x V100", "with fusing", "one batch of 4 shrinks", "Batch at every block"):
        assert words in text
    draw_plan(PLANNED, tmp_path / "a.svg")
    draw_plan(PLANNED, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "USD/h" in text
    draw_plan(replace(PLANNED, figures=replace(PLANNED.figures, usd_per_hour=0.0)), tmp_path / "free.svg")
    assert "USD/h" not in (tmp_path / "free.svg").read_text(encoding="utf-8")
    draw_plan(PLANNED, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"plan.bmp; allowed endings: .svg, .png, .pdf"):
        draw_plan(PLANNED, tmp_path / "plan.bmp")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pictures need matplotlib; run in Offramp's clone: pip install '\.\[demo\]'"):
        draw_plan(PLANNED, tmp_path / "plan.svg")
