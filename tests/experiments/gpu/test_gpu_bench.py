from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from earlyexit.clock import MonotonicClock
from earlyexit.engine.queue import Member
from earlyexit.network.model import TorchRunner
from earlyexit.network.piece import Piece
from earlyexit.policies.threshold import EntropyPolicy
from experiments.engine.gpu import NEVER, POLICY, Workbench, baselines, find_exits, main, parse, workbench
from experiments.engine.side import Side
from optimizer.plans.plan import Plan, serial_plan
from tests.answers import label_of

ROOT = Path(__file__).parents[3]
ABSENT = ("ray", "deployments", "numba", "statsmodels", "scipy", "aiohttp", "pandas", "matplotlib", "httpx")
"""Packages that a bare machine lacks."""
RAMPS = tuple(range(11))
DRY = ("--dry-run", "--records", "synthetic", "--models", "bert-base", "--rounds", "1", "--seconds", "0.01")
PLANNED = ["early-exit, best ramps", "serial"]
SIDES = ["stock", "early-exit", "early-exit, best ramps", "serial", "serial, every ramp"]
PLANS = {**baselines(12, RAMPS, 4), "serial, every ramp": serial_plan(12, RAMPS, POLICY, batch=4)}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def bench_of(*arguments: str) -> Workbench:
    records, _ = find_exits("synthetic", np.random.default_rng(0))
    return workbench("bert-base", parse([*DRY, *arguments]), records, MonotonicClock(), np.random.default_rng(1))


def answers_of(side: Side) -> dict[str, tuple[int, int]]:
    answers = {answer.sample_id: (answer.exit, label_of(answer)) for answer in side.log.answers}
    assert len(answers) == len(side.log.answers)
    return answers


def expected_of(bench: Workbench, members: list[Member[Piece]], plan: Plan) -> dict[str, tuple[int, int]]:
    expected = bench.expected(plan.ramps)
    return {member.sample_id: expected[member.sample_id.partition("#")[0]] for member in members}


def test_it_runs_where_only_torch_is_without_the_planned_sides(tmp_path: Path) -> None:
    code = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
from experiments.engine.gpu import main
main({[*DRY, "--out", str(tmp_path), "--batches", "1"]!r})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the planner needs numba, which is not installed" in done.stdout
    document = json.loads((tmp_path / "bert-base.json").read_text(encoding="utf-8"))
    assert [row["side"] for row in document["rows"]] == [side for side in SIDES if side not in PLANNED]


def test_a_dry_run_prints_and_writes_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*DRY, "--out", str(tmp_path), "--batches", "2"])
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "bert-base.json").read_text(encoding="utf-8"))
    assert [(row["batch"], row["side"]) for row in document["rows"]] == [(2, side) for side in SIDES]
    assert all(side in printed for side in SIDES)
    assert "graphs on" in printed
    assert "exits: synthetic: drawn to survive 1, 0.75, 0.6" in printed
    assert document["provenance"]["driver"] is None
    for row in document["rows"]:
        assert min(row["rounds_per_s"]) > 0
        assert 0 < row["p50_s"] <= row["p99_s"]
        assert 0 < row["mean_batch"] <= row["batch"]


@each_plan
def test_every_side_answers_every_input_once_as_the_records_have_it(plan: Plan) -> None:
    bench = bench_of()
    bench.prepare([plan])
    members = bench.members(30)
    side = bench.side(plan)
    assert side.saturate(members) > 0
    assert answers_of(side) == expected_of(bench, members, plan)


def test_an_answer_that_differs_from_the_records_is_detected() -> None:
    bench = bench_of()
    wrong = Side(
        PLANS["stock"].splits, TorchRunner(bench.model, EntropyPolicy(NEVER)), bench.clock, bench.expected(RAMPS)
    )
    with pytest.raises(AssertionError, match="Answer"):
        wrong.saturate(bench.members(30))


@pytest.mark.gpu
def test_a_gpu_gives_every_answer_with_graphs() -> None:
    options = parse(["--models", "bert-base", "--batches", "4", "--records", "synthetic"])
    records, _ = find_exits("synthetic", np.random.default_rng(0))
    bench = workbench("bert-base", options, records, MonotonicClock(), np.random.default_rng(1))
    bench.prepare(PLANS.values())
    members = bench.members(30)
    for plan in PLANS.values():
        side = bench.side(plan)
        side.saturate(members)
        assert answers_of(side) == expected_of(bench, members, plan)
