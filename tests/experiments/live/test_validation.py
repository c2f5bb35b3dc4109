from __future__ import annotations

import numpy as np
import pytest

from earlyexit.errors import DataError
from earlyexit.network.boundary import Split
from experiments.live.validation import (
    Driven,
    Overhead,
    Phase,
    Run,
    active_thresholds,
    as_driven,
    compare,
    emulated,
    overhead_of,
    scenario_of,
)
from offramp.client.protocol import Prediction
from offramp.load.report import RequestRecord
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.simulate import simulate

DEVICE = emulated("V100")
EASY, HARD = ["easy"] * 8, ["hard"] * 8
"""An easy input leaves after block 0 where its ramp is on, a hard one nowhere."""


def two_inputs() -> ExitRecords:
    return ExitRecords.of_answers(
        np.column_stack([np.array([[1], [1]]), np.array([1, 0])]),
        score="entropy",
        num_blocks=2,
        ramps=(0,),
        sample_ids=("easy", "hard"),
        scores_NR=np.array([[0.1], [0.6]], dtype=np.float32),
    )


def problem() -> PlanProblem:
    """Two blocks of 1 s at any batch, and a ramp that costs nothing."""
    table = LatencyTable(batches=(1, 8), block_s_NB=np.ones((2, 2)), ramp_s_EB=np.zeros((1, 2)))
    return PlanProblem(
        num_blocks=2,
        ramps=(0,),
        survival_N=(1.0, 0.5),
        latency={DEVICE: table},
        devices={DEVICE: Supply(count=2)},
        link=Link(bandwidth_bytes_per_s=1e15, delay_s=0.01),
        bytes_per_sample_N=(0.0, 0.0),
        slo=Slo(latency_s=10.0),
        objective=MaximizeRate(),
    )


def whole() -> Plan:
    """The model without exits on one accelerator."""
    return Plan(stages=(Stage(device=DEVICE, replicas=1, splits=(Split(first=0, end=2, batch=8),)),))


def pipeline() -> Plan:
    """A stage per block."""
    splits = (Split(first=0, end=1, batch=8, ramps=(0,)), Split(first=1, end=2, batch=8))
    spec = PolicySpec(name="recorded", thresholds={0: 0.4}, records="records.npz")
    return Plan(stages=tuple(Stage(device=DEVICE, replicas=1, splits=(split,)) for split in splits), policy=spec)


def run_of(
    plan: Plan, asked: list[list[str]], scheduled_s: list[float], done_s: list[float], *, slo_s: float = 10.0
) -> Run:
    """A live run that answered every request, its inputs leaving where the records say."""
    exit_of = dict(zip(("easy", "hard"), two_inputs().outcome(active_thresholds(plan)).exits_N.tolist(), strict=True))
    records = tuple(
        RequestRecord(
            request_id=str(k),
            input_indices=tuple(range(8 * k, 8 * k + 8)),
            scheduled_s=at_s,
            sent_s=at_s,
            done_s=end_s,
            num_attempts=1,
            predictions=tuple(Prediction(label="", score=0, exit=exit_of[key], request_id="") for key in keys),
        )
        for k, (keys, at_s, end_s) in enumerate(zip(asked, scheduled_s, done_s, strict=True))
    )
    keys = tuple(key for each in asked for key in each)
    phase = Phase(name="0.5", seconds=20.0, keys=keys, rate_per_s=1.0)
    driven = Driven(phase=phase, slo_s=slo_s, records=records, machine=0.3)
    return Run(name="plan-0.5", plan=plan, problem=problem(), driven=driven, fill={"0-1": 0.75})


def simulated(run: Run, overhead: Overhead | None = None) -> Driven:
    return as_driven(run.driven, simulate(scenario_of(run, two_inputs(), overhead or Overhead())))


def latencies_s(driven: Driven) -> list[float]:
    return [round(record.latency_s, 6) for record in driven.records]


def test_a_simulated_request_is_answered_with_its_last_input() -> None:
    run = run_of(pipeline(), [[*["easy"] * 7, "hard"], EASY], [0.0, 5.0], [2.0, 6.0])
    driven = simulated(run, Overhead(hop_s=0.25))
    assert latencies_s(driven) == [2.25, 1.0], "the hard one hops to the second stage"
    assert [prediction.exit for prediction in driven.records[0].predictions] == [0] * 7 + [1]


def test_a_simulated_request_fails_at_its_deadline_as_a_served_one_does() -> None:
    driven = simulated(run_of(whole(), [HARD, HARD], [0.0, 0.5], [2.0, 4.0], slo_s=3.0))
    assert [record.error for record in driven.records] == [None, "deadline"], "it would be answered after 3.5 s"


def test_overhead_is_what_idle_requests_take_beyond_their_blocks() -> None:
    # Easy requests take one block and 30 ms, hard ones two blocks and 50 ms: 30 ms, and 20 ms for the second stage.
    asked, scheduled_s = [EASY, HARD, EASY, HARD, EASY], [0.0, 3.0, 6.0, 9.0, 12.0]
    took_s = [1.03, 2.05, 1.9, 2.05, 1.03]  # one was disturbed
    done_s = [at_s + each_s for at_s, each_s in zip(scheduled_s, took_s, strict=True)]
    overhead = overhead_of(run_of(pipeline(), asked, scheduled_s, done_s), two_inputs())
    assert [overhead.entry_s, overhead.hop_s] == pytest.approx([0.03, 0.02])
    of_one_stage = overhead_of(run_of(whole(), [HARD, HARD], [0.0, 3.0], [2.01, 5.03]), two_inputs())
    assert [of_one_stage.entry_s, of_one_stage.hop_s] == pytest.approx([0.02, 0.0])
    late = simulated(run_of(whole(), [HARD, HARD], [0.0, 0.5], [2.0, 4.0], slo_s=3.0))
    failed = Run(name="", plan=whole(), problem=problem(), driven=late, fill={})
    with pytest.raises(DataError, match="failed"):
        overhead_of(failed, two_inputs())


def test_a_run_that_the_simulator_repeats_has_ratios_of_one() -> None:
    found = compare(run_of(whole(), [HARD, HARD], [0.0, 0.5], [2.0, 4.0]), two_inputs(), Overhead())
    assert found.ratios == pytest.approx({"goodput_per_s": 1.0, "p50_s": 1.0, "p99_s": 1.0})
    # The service is said to have run batches of six; the simulator's are full.
    assert found.fill == {"0-1": (0.75, 1.0)}
    assert found.other_exits == 0
