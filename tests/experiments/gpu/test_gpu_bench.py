from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from earlyexit.clock import MonotonicClock
from earlyexit.engine.queue import Member
from earlyexit.engine.runner import TorchRunner
from earlyexit.errors import InputError
from earlyexit.network.piece import Piece
from earlyexit.network.split import Split
from earlyexit.policies.threshold import EntropyPolicy
from experiments.gpu.__main__ import main, parse
from experiments.gpu.bench import measured_sizes
from experiments.gpu.side import (
    Plan,
    Side,
    early_exit,
    planned,
    poisson_arrivals,
    predicted_per_s,
    problem_of,
    serial_every_ramp,
    stock,
)
from experiments.gpu.workbench import NEVER, Workbench, build_workbench, find_exits
from profiles.table import LatencyTable
from tests.answers import label_of

ROOT = Path(__file__).parents[3]
ABSENT = ("ray", "deployments", "numba", "statsmodels", "scipy", "aiohttp", "pandas", "matplotlib", "httpx")
"""What a bare machine lacks."""
RAMPS = tuple(range(11))
QUICK = ["--models", "bert-base", "--batches", "2", "--rounds", "1", "--seconds", "0.01"]
PLANNED = ["early-exit, best ramps", "serial"]
SIDES = ["stock", "early-exit", "early-exit, best ramps", "serial", "serial, every ramp"]


def bench_of(*arguments: str) -> Workbench:
    options = parse(["--dry-run", "--models", "bert-base", *arguments])
    exits = find_exits("synthetic", np.random.default_rng(0))
    return build_workbench(options.models[0], options, exits, MonotonicClock(), np.random.default_rng(1))


def test_it_runs_where_only_torch_is_without_the_planned_sides(tmp_path: Path) -> None:
    arguments = ["--dry-run", "--records", "synthetic", "--out", str(tmp_path), *QUICK, "--batches", "1"]
    code = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
from experiments.gpu.__main__ import main
main({arguments!r})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the planner needs numba, which is missing" in done.stdout
    document = json.loads((tmp_path / "bert-base-dry.json").read_text(encoding="utf-8"))
    assert [row["side"] for row in document["rows"]] == [side for side in SIDES if side not in PLANNED]


def test_a_dry_run_prints_and_writes_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry-run", "--records", "synthetic", "--out", str(tmp_path), *QUICK])
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "bert-base-dry.json").read_text(encoding="utf-8"))
    assert [(row["batch"], row["side"]) for row in document["rows"]] == [(2, side) for side in SIDES]
    assert printed.count("bert-base-dry  ") == 5
    assert "graphs on" in printed
    assert "exits: synthetic: drawn to survive 1, 0.75, 0.6" in printed
    assert document["exits"].startswith("synthetic")
    assert document["provenance"]["driver"] is None
    for row in document["rows"]:
        assert row["samples_per_s"] > 0
        assert 0 < row["p50_s"] <= row["p99_s"]
        assert row["compute_share"] + row["gather_share"] + row["wait_share"] == pytest.approx(1)
        assert 0 < row["mean_batch"] <= row["batch"]
    ones = {row["side"] for row in document["rows"] if row["over_stock"] == 1.0}
    assert "stock" in ones


PLANS = [stock(12, 4), early_exit(12, RAMPS, 4), serial_every_ramp(12, RAMPS, 4)]
each_plan = pytest.mark.parametrize("plan", [pytest.param(plan, id=plan.name) for plan in PLANS])


@pytest.mark.parametrize("decisions", ["waited", "known"])
@each_plan
def test_every_side_answers_every_input_once_as_the_records_have_it(plan: Plan, decisions: str) -> None:
    bench = bench_of("--decisions", decisions)
    bench.prepare([plan])
    members = bench.members(30)
    side = bench.side(plan)
    assert side.saturate(members) > 0
    assert answers_of(side) == expected_of(bench, members, plan)


@each_plan
def test_where_nobody_is_leaving_all_batches_are_full(plan: Plan) -> None:
    bench = bench_of()
    side = bench.side(plan, leaving=False)
    members = bench.members(12)
    side.saturate(members)
    assert {place for place, _ in answers_of(side).values()} == {11}
    assert side.log.sizes == [4] * (3 * len(plan.splits))


def test_inputs_that_arrive_are_answered_with_their_latencies() -> None:
    bench = bench_of()
    members = bench.members(20)
    side = bench.side(PLANS[2])
    latency_s_N = side.serve(members, np.linspace(0, 0.02, 20))
    assert answers_of(side) == expected_of(bench, members, PLANS[2])
    assert latency_s_N.shape == (20,)
    assert (latency_s_N > 0).all()


def test_a_meter_changes_no_answer_and_finds_computing_and_gathering() -> None:
    bench = bench_of()
    members = bench.members(20)
    side, meter = bench.metered_side(PLANS[1])
    took_s = side.saturate(members)
    assert answers_of(side) == expected_of(bench, members, PLANS[1])
    assert 0 < meter.seconds("gather") < took_s
    assert 0 < meter.seconds("compute") < took_s


def test_the_planner_cuts_where_inputs_leave_and_switches_off_ramps_that_cost_too_much() -> None:
    # A block costs its inputs. The ramp after block 0 lets half of them out of three further blocks; the others none.
    table = LatencyTable(
        batches=(1, 8),
        block_s_NB=np.tile([0.125, 1.0], (4, 1)),
        ramp_s_EB=np.tile([0.5, 0.5], (3, 1)),
    )
    problem = problem_of(table, (0, 1, 2), (1.0, 0.5, 0.5, 0.5))
    shrinking, serial = planned(problem)
    assert shrinking.splits == (Split(first=0, end=4, batch=8, ramps=(0,)),)
    assert serial.ramps == (0,)
    # 8 inputs take 1 s of block 0, 0.5 s of its ramp, and 3 blocks of 0.5 s each for the 4 that stay.
    assert predicted_per_s(problem, shrinking) == pytest.approx(8 / 3.0)
    assert predicted_per_s(problem, stock(4, 8)) == pytest.approx(8 / 4.0)


def test_a_side_that_answers_otherwise_than_the_records_is_found_out() -> None:
    bench = bench_of()
    wrong = Side(PLANS[0], TorchRunner(bench.model, EntropyPolicy(NEVER)), bench.clock, bench.exits.expected(RAMPS))
    with pytest.raises(AssertionError, match="stock"):
        wrong.saturate(bench.members(30))


def test_a_cut_after_every_ramp_leaves_no_ramp_inside() -> None:
    splits = serial_every_ramp(6, (1, 3), 8).splits
    assert [(split.first, split.end, split.ramps) for split in splits] == [(0, 2, (1,)), (2, 4, (3,)), (4, 6, ())]


def test_a_plan_says_its_splits_while_they_are_few() -> None:
    assert str(serial_every_ramp(6, (1, 3), 8)) == "0-1 (1) | 2-3 (1) | 4-5 (0)"
    assert str(PLANS[2]) == "12 splits (11)"


def test_costs_are_measured_at_the_limits_and_the_powers_of_two_below() -> None:
    assert measured_sizes([24]) == (1, 2, 4, 8, 16, 24)
    assert measured_sizes([1, 4]) == (1, 2, 4)


def test_arrivals_ascend_at_the_rate() -> None:
    arrival_s_N = poisson_arrivals(4000, 100.0, np.random.default_rng(0))
    assert (np.diff(arrival_s_N) >= 0).all()
    assert arrival_s_N[-1] == pytest.approx(40, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--batches", "0", "1"], "batch limits must ascend from at least 1", id="batch"),
        pytest.param(["--rounds", "0"], "at least one round", id="rounds"),
    ],
)
def test_options_that_contradict_themselves_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(arguments)


@pytest.mark.gpu
def test_a_gpu_gives_every_answer_with_graphs(tmp_path: Path) -> None:
    options = parse(["--models", "bert-base", "--batches", "4", "--records", "synthetic", "--out", str(tmp_path)])
    exits = find_exits("synthetic", np.random.default_rng(0))
    bench = build_workbench(options.models[0], options, exits, MonotonicClock(), np.random.default_rng(1))
    bench.prepare(PLANS)
    members = bench.members(30)
    for plan in PLANS:
        side = bench.side(plan)
        side.saturate(members)
        assert answers_of(side) == expected_of(bench, members, plan)


def answers_of(side: Side) -> dict[str, tuple[int, int]]:
    answers = {answer.sample_id: (answer.exit, label_of(answer)) for answer in side.log.answers}
    assert len(answers) == len(side.log.answers)
    return answers


def expected_of(bench: Workbench, members: list[Member[Piece]], plan: Plan) -> dict[str, tuple[int, int]]:
    expected = bench.exits.expected(plan.ramps)
    return {member.sample_id: expected[member.sample_id.partition("#")[0]] for member in members}
