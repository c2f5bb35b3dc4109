"""What it gives, and what it costs, that answered inputs run on.

    python -m experiments.engine.staying

First, simulated: a model without ramps, and with three whose inputs stop or stay, on equal devices at equal loads; 12
blocks, batches up to 16, two stages of two devices, 60 % of the inputs leave early. Then processor time beside the
model, in turns: of a device that takes its decisions from records, and of the ingress's book. Minutes: about 1.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from cluster.emulated import EmulatedPiece, RecordedRunner
from deployments.ingress.core.entries import Watch
from deployments.ingress.core.flights import Flight
from deployments.ingress.core.probes import ProbeBook
from earlyexit.clock import ManualClock
from earlyexit.device import Device
from earlyexit.engine import BatchEngine
from earlyexit.member import Member
from earlyexit.release import Release
from earlyexit.split import AfterAnswer, Split
from earlyexit.tasks.label import differ
from earlyexit.times import ObservedTimes
from earlyexit.wire import Seen
from experiments.kit import show
from experiments.turns import Figures, in_turns, tell
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.records import ExitRecords
from profiles.stream import shape_of
from profiles.table import LatencyTable
from simulator.decisions import nested
from simulator.outcome import Outcome
from simulator.scenario import Scenario
from simulator.simulate import simulate
from simulator.sustained import poisson_arrivals

NUM_BLOCKS = 12
RAMPS = tuple(range(NUM_BLOCKS - 1))
ACTIVE = (1, 4, 7)
SIZES = (1, 2, 4, 8, 16)
BATCH = SIZES[-1]
BLOCK_S = (0.001, 0.0002)
"""Of a block: at any batch, and for every input in it."""
RAMP_S = 2e-5
SLO_S = 0.2
SURVIVAL = tuple(np.linspace(1.0, 0.4, NUM_BLOCKS).tolist())
CAPACITY_PER_S = 2 * BATCH / (NUM_BLOCKS / 2 * (BLOCK_S[0] + BLOCK_S[1] * BATCH))
"""Of a stage of two devices, without ramps."""
LOADS = (0.3, 0.6, 0.9, 1.2)
SURE = 0.8
ROUNDS = 5


def plan_of(after_answer: AfterAnswer, ramps: tuple[int, ...] = ACTIVE) -> Plan:
    """Two stages of two devices."""
    stages = tuple(
        Stage(
            device="cpu",
            replicas=2,
            splits=(Split(first=first, end=end, batch=BATCH, ramps=tuple(r for r in ramps if first <= r < end)),),
        )
        for first, end in ((0, NUM_BLOCKS // 2), (NUM_BLOCKS // 2, NUM_BLOCKS))
    )
    plan = Plan(stages=stages, policy=PolicySpec(thresholds=SURE), predicted={"rate_per_s": CAPACITY_PER_S})
    return plan.with_after_answer(after_answer)


SIDES = {"stock": plan_of("stop", ()), "stop": plan_of("stop"), "stay": plan_of("stay")}


def problem() -> PlanProblem:
    """Blocks that are all alike."""
    fixed_s, each_s = BLOCK_S
    table = LatencyTable(
        batches=SIZES,
        block_s_NB=np.tile([fixed_s + each_s * size for size in SIZES], (NUM_BLOCKS, 1)),
        ramp_s_EB=np.full((len(RAMPS), len(SIZES)), RAMP_S),
    )
    return PlanProblem(
        num_blocks=NUM_BLOCKS,
        ramps=RAMPS,
        survival_N=SURVIVAL,
        latency={"cpu": table},
        devices={"cpu": Supply(count=4, usd_per_hour=1.0)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(1e4,) * NUM_BLOCKS,
        slo=Slo(latency_s=SLO_S),
        objective=MaximizeRate(),
    )


def served(side: str, load: float, duration_s: float = 30.0) -> Outcome:
    """A side at a share of the capacity without ramps; the same inputs at the same moments on every side."""
    rng = np.random.default_rng(0)
    decisions = nested(SURVIVAL, RAMPS, rng, num_rows=5000)
    return simulate(
        Scenario(
            problem=problem(),
            plan=SIDES[side],
            decisions=decisions,
            rows_N=rng.permutation(5000),
            arrivals_s=poisson_arrivals(load * CAPACITY_PER_S, duration_s, seed=1),
            duration_s=duration_s,
            slo_s=SLO_S,
            warm_up_s=duration_s / 6,
        )
    )


def row_of(side: str, load: float, outcome: Outcome) -> tuple[object, ...]:
    """Milliseconds, and answers in time per second."""
    figures = outcome.figures()
    p25_s, p50_s, p99_s = np.nanpercentile(outcome.latency_s_N, [25, 50, 99])
    busy = tuple(f"{slot.utilisation:.0%}" for slot in outcome.slots)
    return f"{load:g}", side, 1000 * p25_s, 1000 * p50_s, 1000 * p99_s, figures.goodput_per_s, *busy


def device_us(after_answer: AfterAnswer, *, probe: bool = False, num_inputs: int = 4000) -> float:
    """Processor time of an input on a device that computes nothing, but decides and tells."""
    rng = np.random.default_rng(0)
    records = ExitRecords.of_answers(
        rng.integers(0, 3, (num_inputs, NUM_BLOCKS)),
        score="confidence",
        num_blocks=NUM_BLOCKS,
        ramps=RAMPS,
        sample_ids=tuple(map(str, range(num_inputs))),
        scores_NR=rng.random((num_inputs, len(RAMPS))).astype(np.float32),
    )
    runner = RecordedRunner(records, NUM_BLOCKS)
    runner.follow(SURE)
    told: list[Release[EmulatedPiece]] = []
    engine = BatchEngine[EmulatedPiece](plan_of(after_answer).splits, ObservedTimes())
    device = Device(engine, runner, ManualClock(), told.extend)
    lengths_B = np.ones(num_inputs, dtype=np.int32)
    singles = EmulatedPiece(sample_ids=records.sample_ids, next_block=0, lengths_B=lengths_B).singles()
    members = [Member(sample_id=each.sample_ids[0], payload=each, probe=probe) for each in singles]
    began_s = time.process_time()
    for first in range(0, num_inputs, BATCH):
        device.engine.submit(0, members[first : first + BATCH], 0.0)
        device.run_until_idle()
    return 1e6 * (time.process_time() - began_s) / num_inputs


def book_us(watch: Watch, *, num_inputs: int = 8000) -> float:
    """Processor time of an input in the ingress's book, from its departure to its record; half are answered early."""
    shape = replace(shape_of(_one_record()), ramps=RAMPS)
    book, plan, active = ProbeBook(shape, differ, outlive_s=1.0), plan_of("stay"), frozenset(ACTIVE)
    departures = [[Flight(k, 0.0, 10.0, 0) for k in range(BATCH)] for _ in range(num_inputs // BATCH)]
    asked = (*(RAMPS if watch == "probe" else ACTIVE), NUM_BLOCKS - 1)
    said = {block: Seen(sample_id="x", block=block, score=0.5, value=1) for block in asked}
    said[NUM_BLOCKS - 1] = replace(said[NUM_BLOCKS - 1], score=math.nan)
    began_s = time.process_time()
    for flights in departures:
        book.begin(flights, plan, watch, 0.0)
        for early in flights[::2]:
            book.answered(early, ACTIVE[0], active)
        for block in asked:
            book.see([(flight, said[block]) for flight in flights])
        for late in flights[1::2]:
            book.answered(late, NUM_BLOCKS - 1, active)
    found = book.hand_over()
    assert found is not None
    assert len(found) == len(departures) * BATCH
    return 1e6 * (time.process_time() - began_s) / len(found)


def _one_record() -> ExitRecords:
    return ExitRecords.of_answers(
        np.zeros((1, NUM_BLOCKS), dtype=np.int64),
        score="entropy",
        num_blocks=NUM_BLOCKS,
        ramps=RAMPS,
        sample_ids=("x",),
        scores_NR=np.zeros((1, len(RAMPS)), dtype=np.float32),
    )


def main() -> None:
    """Both tables."""
    rows = [row_of(side, load, served(side, load)) for load in LOADS for side in SIDES]
    columns = ("load", "side", "p25 ms", "p50 ms", "p99 ms", "goodput/s", "stage 0 busy", "stage 1 busy")
    show(f"simulated, of {CAPACITY_PER_S:,.0f} inputs/s without ramps", columns, rows)

    def stop() -> Figures:
        return {"device, us per input": device_us("stop")}

    def stay() -> Figures:
        return {"device, us per input": device_us("stay"), "book, us per input": book_us("stay")}

    def probe() -> Figures:
        return {"device, us per input": device_us("stop", probe=True), "book, us per input": book_us("probe")}

    found = in_turns({"stop": stop, "stay": stay, "probe": probe}, ROUNDS)
    tell("processor time beside the model", found)
    book = {
        side: {name: values for name, values in found[side].items() if "book" in name} for side in ("stay", "probe")
    }
    tell("of the ingress's book", book)


if __name__ == "__main__":
    main()
