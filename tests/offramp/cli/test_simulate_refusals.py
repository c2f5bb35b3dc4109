from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from profiles.records import ExitRecords
from tests.offramp.cli import runs
from tests.offramp.cli.runs import PLAN, Captured, records, written


def refused(captured: Captured, problem: Path, *options: object, arrivals: str = "uniform:100") -> str:
    return runs.refused(captured, "simulate", problem, "--arrivals", arrivals, *options)


@pytest.mark.parametrize(
    ("arrivals", "options", "said"),
    [
        ("poissson:9", (), "arrivals 'poissson:9': no such process 'poissson'; allowed: poisson:RATE"),
        ("poisson:-9", (), "arrivals 'poisson:-9': its rate is '-9'; a number above 0"),
        ("trace:gone.txt", (), "gone.txt: no such file"),
        ("poisson:0.001", (), "--arrivals poisson:0.001: no request arrives in 60 s"),
        ("uniform:0.1", ("--duration", 5), "--arrivals uniform:0.1: no request arrives after the 1 s of --warm-up"),
        ("uniform:9", ("--duration", -3), "--duration -3; a finite number of seconds above 0 is needed"),
        ("uniform:9", ("--duration", "nan"), "--duration nan; a finite number of seconds above 0 is needed"),
        ("uniform:9", ("--warm-up", 60), "--warm-up 60; seconds from 0 on are needed, fewer than the 60 of"),
        ("poisson:1e9", (), "about 6e+10 arrivals in one draw; at most 200,000,000 are drawn"),
        ("uniform:10", ("--inputs-per-request", 10**6), "600,000,000 inputs, 600 requests of 1,000,000; at most 200,0"),
        ("uniform:9", ("--strategy", "luck"), "--strategy 'luck'; allowed: best, stock,"),
        ("uniform:9", ("--strategy", "e3", "--plan", "x"), "--plan and --strategy exclude each other"),
        ("uniform:9", ("--plan", "gone.yaml"), "gone.yaml: no such file"),
        ("uniform:9", ("--thresholds", "x"), "--thresholds 'x'; a number, one for each ramp"),
        ("uniform:9", ("--thresholds", "0=1,0=2"), "--thresholds '0=1,0=2': a ramp is named twice"),
        ("uniform:9", ("--thresholds", "0.4"), "--thresholds: only exit records need them"),
        ("uniform:9", ("--records", "gone.npz"), "gone.npz does not hold exit records"),
        ("uniform:9", ("--lengths", "gone.txt"), "--lengths gone.txt: gone.txt: cannot be read"),
        ("uniform:9", ("--lengths", "20,x,3,100"), "--lengths '20,x,3,100'; a file, or mean,variance,low,high"),
        ("uniform:9", ("--lengths", "20,4"), "--lengths '20,4'; a file, or mean,variance,low,high, four"),
        ("uniform:9", ("--lengths", "nan,4,3,100"), "--lengths 'nan,4,3,100'; a file, or mean,variance,low,high, four"),
        ("uniform:9", ("--lengths", "20,4,3.5,100"), "--lengths '20,4,3.5,100'; low and high are whole numbers"),
        ("uniform:9", ("--lengths", "20,-4,3,100"), "--lengths 20,-4,3,100: the variance of lengths must be"),
        ("uniform:9", ("--lengths", "20,4,0,100"), "--lengths 20,4,0,100: lengths must lie between 1 and more"),
        ("uniform:9", ("--lengths", "20,4,3,100"), "--lengths: latency of"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_a_line(
    problem: Path, capsys: Captured, arrivals: str, options: tuple[object, ...], said: str
) -> None:
    assert refused(capsys, problem, *options, arrivals=arrivals).startswith(said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("3.5\n4\n1.5\n", ":3: '1.5' is before the line above it; arrivals must ascend"),
        ("-3\n4\n", ":1: '-3' is negative"),
        ("0 0 0\n", ": no requests: every count is 0"),
    ],
    ids=["not ascending", "negative", "empty"],
)
def test_a_trace_that_cannot_be_is_refused(
    problem: Path, tmp_path: Path, capsys: Captured, content: str, said: str
) -> None:
    trace = written(tmp_path / "trace.txt", content)
    assert refused(capsys, problem, arrivals=f"trace:{trace}").startswith(f"{trace}{said}")


@pytest.mark.parametrize(
    ("changed", "to", "said"),
    [
        ("end: 2", "end: 3", ":2: the last split ends at block 3, the model has 2 blocks"),
        ("replicas: 1", "replicas: 2", ": the plan needs 2 V100, the problem has 1"),
        ("device: V100", "device: K80", ": unknown device 'K80'; the problem's devices are ['V100']"),
        ("batch: 4}]", "batch: 3}]", ": batch 3 is not measured on V100; measured are [1, 2, 4]"),
        ("policy: {name: entropy, thresholds: 0.4}", "", ": ramps [0] are active, but no exit policy says when"),
        ("stages:", "no_plan: {}\nstages:", ": holds the answer that there is no plan"),
        (
            "stages:",
            "predicted: {rate_per_s: fast}\nstages:",
            ": rate_per_s must be a number, at least 0, not 'fast'",
        ),
    ],
    ids=["blocks", "count", "device", "batch", "policy", "no plan", "predicted"],
)
def test_a_plan_that_does_not_fit_the_problem_is_refused(
    problem: Path, plan: Path, capsys: Captured, changed: str, to: str, said: str
) -> None:
    written(plan, PLAN.replace(changed, to))
    line = refused(capsys, problem, "--plan", plan)
    assert line.startswith(str(plan))
    assert said in line


def test_a_printed_plan_that_does_not_fit_the_problem_is_refused(problem: Path, plan: Path, capsys: Captured) -> None:
    answer = {"stages": [{"device": "V100", "splits": [{"first": 0, "end": 3, "batch": 4}]}], "rate_per_s": 1.0}
    written(plan, json.dumps(answer))
    said = refused(capsys, problem, "--plan", plan)
    assert said == f"{plan}:1: the last split ends at block 3, the model has 2 blocks"


def test_records_that_do_not_fit_are_refused(problem: Path, plan: Path, tmp_path: Path, capsys: Captured) -> None:
    other = records(tmp_path / "other.npz", 0.1, num_blocks=3)
    said = refused(capsys, problem, "--records", other, "--thresholds", 0.4)
    assert said == f"{other}: records of a model of 3 blocks; the problem has 2"
    without = records(tmp_path / "without.npz", 0.1, ramps=())
    said = refused(capsys, problem, "--plan", plan, "--records", without)
    assert said == f"{without}: no records of the plan's ramps [0]; recorded are []"


def test_shares_of_other_values_than_the_recorded_ones_are_refused(
    problem: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = records(tmp_path / "shares.npz", 0.1)
    replace(ExitRecords.load(path), score="share", confidences={0: 0.5}).save(path)
    written(plan, PLAN.replace("{name: entropy, thresholds: 0.4}", "{name: share, thresholds: 0.4, confidences: 0.9}"))
    said = refused(capsys, problem, "--plan", plan, "--records", path)
    assert said == f"the plan's shares at ramp 0 are of values above 0.9, those of {path} of values above 0.5"


def test_thresholds_that_fall_along_an_answer_want_records_of_that(
    problem: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = records(tmp_path / "tokens.npz", 0.1)
    replace(ExitRecords.load(path), score="foreseen", provenance={"decay": 8.0}).save(path)
    policy = "{name: foreseen, thresholds: 0.4, decay: 4.0}"
    written(plan, PLAN.replace("{name: entropy, thresholds: 0.4}", policy))
    said = refused(capsys, problem, "--plan", plan, "--records", path)
    assert said == f"{path} holds scores of decay 8, not of decay 4"
    written(plan, PLAN.replace("{name: entropy, thresholds: 0.4}", "{name: foreseen, thresholds: 0.4}"))
    assert refused(capsys, problem, "--plan", plan, "--records", path).endswith("decay 8, not of no decay")


def test_a_policy_that_records_do_not_show_is_refused(
    problem: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = records(tmp_path / "exits.npz", 0.1)
    written(plan, PLAN.replace("name: entropy", "name: confidence"))
    said = refused(capsys, problem, "--plan", plan, "--records", path)
    assert said == f"the plan leaves by confidence, {path} holds scores of entropy"
    written(plan, PLAN.replace("{name: entropy, thresholds: 0.4}", "{name: voting, votes: 2}"))
    said = refused(capsys, problem, "--plan", plan, "--records", path)
    assert said == "the plan leaves by voting, which exit records do not show; give --thresholds"


def test_thresholds_that_do_not_fit_the_plan_are_refused(
    problem: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    path = records(tmp_path / "exits.npz", 0.1)
    said = refused(capsys, problem, "--records", path)
    assert said == "ramps [0] are active and nothing says when to leave there; give --thresholds"
    said = refused(capsys, problem, "--plan", plan, "--records", path, "--thresholds", "1=0.4")
    assert said == "--thresholds: the problem has no ramps [1]; its ramps are [0]"
    assert refused(capsys, problem, "--records", path, "--thresholds", "nan") == "thresholds must be finite numbers"
