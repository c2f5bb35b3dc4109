from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from earlyexit.errors import DataError
from earlyexit.split import Split
from experiments.live.emulation import Bench, Emulation, emulated, policy
from experiments.live.figures import WindowFigures, figures
from experiments.live.load import Driven, Phase, closed_keys
from experiments.live.model import made_up
from experiments.live.validation import Compared, compare, compare_all, verdicts
from experiments.live.validation_live import IDLE_SLOS, WARM_SLOS, idle_phase, kept_run, load_phase, splits_of
from experiments.live.validation_runs import (
    IDLE,
    Run,
    SplitDocument,
    active_thresholds,
    digest,
    exits_of,
    keep_run,
    read_run,
    stages_left,
)
from experiments.live.validation_simulated import LATER_S, NO_OVERHEAD, Overhead, later, overhead_of, simulated
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import plan_document
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.problem_file import problem_document
from profiles.records import ExitRecords
from profiles.table import LatencyTable

DEVICE = emulated("V100")
EASY, HARD = [0] * 8, [1] * 8
"""Row 0 leaves after block 0 where its ramp is on, row 1 nowhere."""


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
    plan: Plan,
    rows: list[list[int]],
    scheduled_s: list[float],
    done_s: list[float],
    *,
    load: str = "0.5",
    slo_s: float = 10.0,
    errors: list[str | None] | None = None,
) -> Run:
    left = exits_of(two_inputs(), plan)
    failed = errors or [None] * len(rows)
    return Run(
        plan_name="plan",
        load=load,
        time_scale=1.0,
        slo_s=slo_s,
        warm_s=0.0,
        seconds=20.0,
        problem=problem_document(problem()),
        plan=plan_document(plan),
        records_sha256=digest(two_inputs()),
        rows=rows,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        done_s=done_s,
        errors=failed,
        exits=[[] if error else left[asked].tolist() for asked, error in zip(rows, failed, strict=True)],
        splits=[SplitDocument(first=0, end=2, batches=2, inputs=12, fill=0.75, busy_s=4.0, dropped=0)],
        usage={"machine": 0.3, "ours": 0.2, "client": 0.1},
        provenance={},
    )


def latencies_s(driven: Driven) -> list[float]:
    return [round(record.latency_s, 6) for record in driven.records]


def test_a_kept_run_reads_back_as_it_was(tmp_path: Path) -> None:
    run = run_of(pipeline(), [EASY, HARD], [0.0, 1.0], [1.2, 3.4])
    path = keep_run(run, tmp_path)
    assert path.name == "plan-0.5.json"
    assert read_run(path).model_dump_json() == run.model_dump_json()


def test_a_file_that_is_no_kept_run_or_lacks_an_outcome_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    lacking = run_of(whole(), [HARD], [0.0], [2.0]).model_dump_json().replace('"done_s":[2.0]', '"done_s":[]')
    for text, said in (
        ('{"schema_version": 1}', r"run\.json"),
        ("no JSON", "not a kept run"),
        (lacking, "one entry per request"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            read_run(path)


def test_figures_of_a_kept_run_count_whole_requests() -> None:
    run = run_of(whole(), [HARD, HARD, HARD], [0.0, 1.0, 2.0], [2.0, 4.0, 3.0], errors=[None, None, "admission"])
    found = figures(run.driven(), (run.warm_s, run.seconds))
    assert (found.requests, found.answered, found.errors) == (3, 2, {"admission": 1})
    assert found.goodput_per_s == pytest.approx(16 / 20)
    assert found.p50_s == pytest.approx(2.5), "of 2 s and 3 s"


def test_a_simulated_request_takes_its_blocks_and_its_turn() -> None:
    run = run_of(whole(), [HARD, HARD], [0.0, 0.5], [2.0, 4.0])
    # Two blocks of 1 s each; the second request begins when the first has ended, at 2 s.
    assert latencies_s(simulated(run, two_inputs(), NO_OVERHEAD)) == [2.0, 3.5]
    # 0.1 s on the way in, 0.1 s on the way out: in the queue the second does not wait for them.
    assert latencies_s(simulated(run, two_inputs(), Overhead(entry_s=0.2, hop_s=0.0))) == [2.2, 3.7]


def test_a_simulated_request_is_answered_with_its_last_input() -> None:
    run = run_of(pipeline(), [[0, 0, 0, 0, 0, 0, 0, 1], EASY], [0.0, 5.0], [2.0, 6.0])
    driven = simulated(run, two_inputs(), Overhead(entry_s=0.0, hop_s=0.25))
    assert latencies_s(driven) == [2.25, 1.0], "the hard one hops to the second stage"
    assert [prediction.exit for prediction in driven.records[0].predictions] == [0] * 7 + [1]


def test_a_simulated_request_fails_at_its_deadline_as_a_served_one_does() -> None:
    run = run_of(whole(), [HARD, HARD], [0.0, 0.5], [2.0, 4.0], slo_s=3.0)
    driven = simulated(run, two_inputs(), NO_OVERHEAD)
    assert [record.error for record in driven.records] == [None, "deadline"], "it would be answered after 3.5 s"


def test_other_exit_records_than_the_run_asked_are_refused() -> None:
    records = two_inputs()
    others = replace(records, scores_NR=records.scores_NR + np.float32(0.1))
    with pytest.raises(DataError, match="other exit records"):
        simulated(run_of(whole(), [HARD], [0.0], [2.0]), others, NO_OVERHEAD)


def test_overhead_is_what_idle_requests_take_beyond_their_blocks() -> None:
    # Easy requests take one block and 30 ms, hard ones two blocks and 50 ms: 30 ms, and 20 ms for the second stage.
    rows, scheduled_s = [EASY, HARD, EASY, HARD, EASY], [0.0, 3.0, 6.0, 9.0, 12.0]
    took_s = [1.03, 2.05, 1.9, 2.05, 1.03]  # one was disturbed
    done_s = [at_s + each_s for at_s, each_s in zip(scheduled_s, took_s, strict=True)]
    overhead = overhead_of(run_of(pipeline(), rows, scheduled_s, done_s, load=IDLE), two_inputs())
    assert overhead.entry_s == pytest.approx(0.03)
    assert overhead.hop_s == pytest.approx(0.02)


def test_overhead_is_taken_from_an_idle_run_that_did_not_fail_and_one_stage_has_no_hop() -> None:
    idle = run_of(whole(), [HARD, HARD], [0.0, 3.0], [2.01, 5.03], load=IDLE)
    overhead = overhead_of(idle, two_inputs())
    assert [overhead.entry_s, overhead.hop_s] == pytest.approx([0.02, 0.0])
    with pytest.raises(DataError, match="idle run"):
        overhead_of(run_of(whole(), [HARD], [0.0], [2.0]), two_inputs())
    with pytest.raises(DataError, match="failed"):
        overhead_of(run_of(whole(), [HARD], [0.0], [2.0], load=IDLE, errors=["deadline"]), two_inputs())


def test_requests_that_come_later_stay_the_same_requests() -> None:
    run = run_of(whole(), [EASY, HARD], [1.0, 1.001], [3.0, 5.0])
    moved = [later(run, np.random.default_rng(seed)) for seed in range(20)]
    assert all(each.scheduled_s == sorted(each.scheduled_s) for each in moved)
    assert all(1.0 <= at_s <= 1.001 + LATER_S for each in moved for at_s in each.scheduled_s)
    assert {str(each.rows) for each in moved} == {str([EASY, HARD]), str([HARD, EASY])}, "some overtake others"


def window(goodput_per_s: float, p50_s: float | None, p99_s: float | None) -> WindowFigures:
    counts = {"seconds": 1.0, "requests": 1, "answered": 1, "in_slo": 1, "answers_per_s": goodput_per_s, "errors": {}}
    return WindowFigures(goodput_per_s=goodput_per_s, p50_s=p50_s, p99_s=p99_s, **counts)  # type: ignore[arg-type]


def compared(live: WindowFigures, simulated_figures: WindowFigures) -> Compared:
    return Compared(
        run="plan-0.5", live=live, simulated=simulated_figures, scatter={}, fill={}, other_exits=0, machine=0.3
    )


def test_figures_are_within_5_10_and_20_percent_or_not() -> None:
    near = compared(window(100.0, 1.0, 2.0), window(95.5, 1.09, 2.3))
    assert near.within == {"goodput_per_s": True, "p50_s": True, "p99_s": True}
    far = compared(window(100.0, 1.0, 2.0), window(94.0, 0.89, 1.5))
    assert far.within == {"goodput_per_s": False, "p50_s": False, "p99_s": False}
    assert not any(compared(window(0.0, None, None), window(1.0, 1.0, 1.0)).within.values()), "one side has none"
    assert verdicts([near, far]) == [
        "goodput_per_s: 1 of 2 within 5%",
        "p50_s: 1 of 2 within 10%",
        "p99_s: 1 of 2 within 20%",
    ]


def test_a_run_that_the_simulator_repeats_has_ratios_of_one() -> None:
    run = run_of(whole(), [HARD, HARD], [0.0, 0.5], [2.0, 4.0])
    found = compare(run, two_inputs(), NO_OVERHEAD, num_again=2)
    assert found.ratios == pytest.approx({"goodput_per_s": 1.0, "p50_s": 1.0, "p99_s": 1.0})
    assert found.scatter["p50_s"] < 0.01
    # The service is said to have run two batches of six; the simulator's are full.
    assert found.fill == {"0-1": (0.75, 1.0)}
    assert found.other_exits == 0
    elsewhere = run.model_copy(update={"exits": [[1] * 7 + [0], [1] * 8]})
    assert compare(elsewhere, two_inputs(), NO_OVERHEAD, num_again=0).other_exits == 1


def test_a_plan_is_not_compared_without_its_idle_run(tmp_path: Path) -> None:
    keep_run(run_of(whole(), [HARD], [0.0], [2.0]), tmp_path)
    with pytest.raises(DataError, match="no idle run of plan"):
        compare_all(tmp_path, two_inputs())


def test_inputs_leave_in_the_stage_that_holds_their_exit() -> None:
    assert stages_left(pipeline(), np.array([0, 1, 0])).tolist() == [0, 1, 0]
    assert exits_of(two_inputs(), pipeline()).tolist() == [0, 1]
    assert exits_of(two_inputs(), whole()).tolist() == [1, 1], "without an active ramp nobody leaves early"
    assert active_thresholds(whole()) == {}


SURVIVAL = (1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)


def on_two_accelerators() -> tuple[Bench, Plan]:
    """Half of the inputs leave after block 1, in the first of two stages; 40 inputs/s are predicted."""
    records = made_up(SURVIVAL, num_inputs=100, rng=np.random.default_rng(0))
    emulation = Emulation(counts={"V100": 2}, time_scale=10.0)
    on = Bench(emulation=emulation, model=Path("model"), records=records, options=Namespace(seed=0))
    splits = (Split(first=0, end=4, batch=8, ramps=(1,)), Split(first=4, end=12, batch=8))
    stages = tuple(Stage(device=DEVICE, replicas=1, splits=(split,)) for split in splits)
    return on, Plan(stages=stages, policy=policy(records, on.model), predicted={"rate_per_s": 40.0})


def test_idle_requests_leave_whole_in_the_first_stage_and_in_the_last_in_turn() -> None:
    on, plan = on_two_accelerators()
    phase = idle_phase(on, plan)
    row_of = {sample_id: row for row, sample_id in enumerate(on.records.sample_ids)}
    left = exits_of(on.records, plan)[[row_of[key] for key in closed_keys([phase])[:32]]]
    assert left.tolist() == [1] * 8 + [11] * 8 + [1] * 8 + [11] * 8
    assert phase.workers == 1
    assert phase.seconds == pytest.approx(IDLE_SLOS * 1.0), "an SLO of 0.1 s, 10 times stretched"
    assert active_thresholds(plan) == {1: 0.4}


def test_a_load_is_a_share_of_what_is_predicted_and_begins_with_a_warm_up() -> None:
    on, plan = on_two_accelerators()
    phase = load_phase(on, plan, 0.5, num_requests=100)
    assert phase.rate_per_s == 20.0
    assert phase.seconds == pytest.approx(WARM_SLOS * 1.0 + 40.0), "100 requests of 8 at 20 inputs/s"
    assert phase == load_phase(on, plan, 0.5, num_requests=100), "with the same seed"


def test_what_is_kept_of_a_run_is_what_was_asked_and_what_came() -> None:
    on, plan = on_two_accelerators()
    asked = on.records.sample_ids[:8]
    driven = replace(run_of(whole(), [HARD], [0.0], [2.0]).driven(), keys=asked)
    phase = Phase(name="0.5", seconds=4.0, keys=asked, rate_per_s=20.0)
    run = kept_run(on, "e3", plan, phase, driven, {"stages": []})
    assert run.name == "e3-0.5"
    assert run.rows == [list(range(8))]
    assert (run.scheduled_s, run.done_s, run.errors) == ([0.0], [2.0], [None])
    assert run.slo_s == pytest.approx(1.0)


def test_splits_are_summed_over_replicas() -> None:
    split = {"first": 0, "end": 2, "batch": 8, "batches": 2, "inputs": 16, "busy_s": 1.0, "dropped": 0}
    idle = {**split, "batches": 0, "inputs": 0, "busy_s": 0.0}
    half = {**split, "batches": 2, "inputs": 8, "dropped": 1}
    last = {**idle, "first": 2, "end": 3}
    found = splits_of([[{"splits": [last]}], [{"splits": [split]}, {"splits": [half]}]])
    assert [(each.first, each.batches, each.inputs, each.fill, each.dropped) for each in found] == [
        (0, 4, 24, 0.75, 1),
        (2, 0, 0, 0.0, 0),
    ]
