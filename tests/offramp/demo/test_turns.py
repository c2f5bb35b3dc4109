from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from earlyexit.network.boundary import Split
from offramp.client.protocol import Prediction
from offramp.commands.profile import plan_for, stock_s
from offramp.demo.run import V100, draw, emulated_problem
from offramp.demo.turns import Load, PlanRun, batch_at_block, mean, results_table, summarize
from offramp.load.generator import RequestRecord
from optimizer.plans.plan import Plan, PolicySpec, Stage
from optimizer.problems.entries import Recorded
from tests.exit_records import exit_records

FUSED = (Split(first=0, end=1, batch=16, ramps=(0,)), Split(first=1, end=4, batch=16, ramps=(2,)))
SHRINKING = (Split(first=0, end=4, batch=16, ramps=(0, 2)),)
EXITS = {0: 60, 2: 20, 3: 20}
"""The exits of a hundred answers."""
LOAD = Load(texts=("a", "b"), keys=None, full_model=("yes", "no"), slo_s=1.0, seconds=10.0, warm_s=2.0)


def plan(splits: tuple[Split, ...]) -> Plan:
    stage = Stage(device="cpu", replicas=2, splits=splits)
    return Plan(stages=(stage,), policy=PolicySpec(thresholds=0.4))


def request(due_s: float, took_s: float, label: str, left: int) -> RequestRecord:
    """Returns the record of a request with the first text."""
    answer = Prediction(label=label, score=0.9, exit=left, request_id="")
    return RequestRecord(
        input_indices=(0,),
        scheduled_s=due_s,
        sent_s=due_s,
        done_s=due_s + took_s,
        num_attempts=1,
        predictions=(answer,),
    )


def ran(splits: tuple[Split, ...]) -> PlanRun:
    return PlanRun(
        plan=plan(splits),
        in_time=0.7,
        in_time_per_s=70.0,
        p50_s=0.01,
        p99_s=0.05,
        cpu_per_answer_s=0.002,
        batch_at_block=(10.0, 4.0, 4.0, 2.0),
        mean_blocks=2.0,
        agreement=0.99,
    )


def test_requests_of_the_demo_count_after_the_warm_up() -> None:
    assert batch_at_block(plan(SHRINKING), {0: (10, 100)}, EXITS) == pytest.approx((10, 4, 4, 2))
    assert batch_at_block(plan(FUSED), {0: (10, 100), 1: (5, 40)}, EXITS) == pytest.approx((10, 8, 8, 4))
    assert batch_at_block(plan(FUSED), {0: (10, 100)}, {0: 100}) == (10, 0, 0, 0)
    records = [request(0.5, 0.1, "yes", 0), request(3.0, 0.4, "yes", 0), request(4.0, 2.0, "no", 3)]
    found = summarize(plan(SHRINKING), LOAD, records, {0: (2, 3)}, spent_s=0.6)
    assert (found.in_time, found.in_time_per_s) == (0.5, 0.1), "one of two, in ten seconds"
    assert found.p50_s == pytest.approx(1.2)
    assert found.cpu_per_answer_s == pytest.approx(0.2), "of all three answers"
    assert found.agreement == pytest.approx(2 / 3)
    assert found.mean_blocks == pytest.approx(2.0)
    assert found.load_late_s == 0.0
    both = mean([replace(ran(SHRINKING), in_time=0.5), replace(ran(SHRINKING), in_time=1.0, p99_s=0.07)])
    assert (both.in_time, both.p99_s) == pytest.approx((0.75, 0.06))
    assert both.batch_at_block == (10.0, 4.0, 4.0, 2.0)


def test_the_results_of_all_plans_become_a_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sides = {"stock": ran(SHRINKING), "early-exit": ran(SHRINKING), "planned": ran(FUSED)}
    console = Console(width=160, record=True, file=StringIO())
    console.print(results_table("load", sides))
    console.print(results_table("emulated", sides, time_scale=40.0))
    rows = [line.split() for line in console.export_text().splitlines() if "%" in line]
    batches = ["10.0", "4.0", "4.0", "2.0"]
    assert rows[:3] == [[name, "70.0%", "70", "10", "50", "2.00", "99.0%", *batches] for name in sides]
    emulated = ["70.0%", "2,800", "0", "1", "99.0%"]
    assert rows[3:] == [[name, *emulated, *batches] for name in sides], "emulated seconds, no processor time"
    draw(sides, sides, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_fusing_survivors_improves_the_rate_of_sixteen_emulated_accelerators() -> None:
    leaves_NR = np.arange(100)[:, None] < np.array([60, 70, 70, 70, 70])
    scores_NR = np.where(leaves_NR, 0.1, 0.6)
    records = exit_records(scores_NR, answers_NE=np.zeros((100, 6), dtype=np.int64), score="entropy")
    thresholds = dict.fromkeys(records.ramps, 0.4)
    recorded = Recorded(records=records, thresholds=thresholds)
    problem = emulated_problem(recorded)
    assert problem.devices[V100].count == 16
    assert problem.survival_N == pytest.approx((1.0, 0.4, 0.3, 0.3, 0.3, 0.3))
    policy = PolicySpec(name="recorded", thresholds=thresholds, records="records.npz")
    planned, shrinking = (plan_for(problem, each, policy, recorded) for each in ("serial", "early-exit"))
    assert len(planned.stages) == len(shrinking.stages) == 1
    assert planned.predicted["rate_per_s"] > 1.2 * shrinking.predicted["rate_per_s"]
    assert stock_s(problem, 4) < 2 * stock_s(problem), "a batch of four takes less than twice as long as one input"
