"""The simulator against the live service: three plans under several loads, the same requests at the same times on both.

    python -m experiments.live.validation [--plans stock,e3,best] [--loads 0.4,0.7,0.95,1.2] [--requests 600]

6 EMULATED V100, batches up to 8, SLO 100 ms, all stretched by the time scale; exits as recorded; no controller. Loads
are shares of each plan's predicted rate, Poisson arrivals of requests of 8 inputs, a fresh service for every run. What
calls cost beyond the accelerators' time is measured per plan, one request at a time, in a run that is not compared.
Writes runs/live/validation.json. Minutes: 27, of which the simulations take seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any, cast

import httpx
import numpy as np

from deployments.settings import ServeSettings
from earlyexit.errors import DataError
from experiments.kit import show
from experiments.live.emulation import Bench, command
from experiments.live.load import INPUTS_PER_REQUEST, Driven, Phase, WindowFigures, figures, played
from offramp.client.protocol import Prediction
from offramp.demo.service import RunningService
from offramp.load.report import RequestRecord
from optimizer.decision import Strategy
from optimizer.plan import Plan, Stage
from optimizer.problem import Link, PlanProblem
from profiles.records import ExitRecords, IntArray
from simulator.inputs import recorded
from simulator.outcome import DROPS, Outcome
from simulator.scenario import Scenario
from simulator.simulate import simulate

BOUNDS: Mapping[str, float] = {"goodput_per_s": 0.05, "p50_s": 0.10, "p99_s": 0.20}
"""How far a simulated figure may be from the live one, as a share of it."""
NUM_DRAWN = 8000
"""Inputs drawn for a load; a longer one begins with the first of them again."""
WARM_SLOS, IDLE_SLOS = 3.0, 10.0
"""Left out of a load's figures; and how long one request at a time is asked, a few dozen of them."""
IDLE = "idle"
ENDLESS_BYTES_PER_S = 1e15
"""Emulated accelerators send no hidden state to each other: only the delay counts."""
MAX_QUEUED: int = ServeSettings.model_fields["max_queued"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What requests take beyond the accelerators' time, at idle: HTTP, calls, Python."""

    entry_s: float = 0.0
    """In all, of a request that is answered by the first stage."""
    hop_s: float = 0.0
    """More for every further stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One plan under one load on the live service."""

    name: str
    plan: Plan
    problem: PlanProblem
    driven: Driven
    warm_s: float = 0.0
    fill: Mapping[str, float]
    """By the blocks of a split, how full its batches were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run on both sides."""

    run: str
    live: WindowFigures
    simulated: WindowFigures
    fill: Mapping[str, tuple[float | None, float | None]]
    """By the blocks of a split, live and simulated; None where it ran no batch."""
    other_exits: int
    """Requests of which the service let an input out elsewhere than the records say."""
    machine: float
    """Share of the CPU in the live run."""

    @property
    def ratios(self) -> dict[str, float | None]:
        """Simulated over live; None where one side has no such figure."""
        pairs = {name: (getattr(self.simulated, name), getattr(self.live, name)) for name in BOUNDS}
        return {name: ours / live if ours is not None and live else None for name, (ours, live) in pairs.items()}

    @property
    def within(self) -> dict[str, bool]:
        """Whether each figure is as near as it must be."""
        return {name: ratio is not None and abs(ratio - 1) <= BOUNDS[name] for name, ratio in self.ratios.items()}


def run(on: Bench) -> dict[str, Any]:
    """Every plan idle, then under every load; each run is simulated and compared."""
    rows: list[Compared] = []
    overheads: dict[str, Overhead] = {}
    for name in on.options.plans.split(","):
        plan = plan_of(on, on.best(cast(Strategy, name)).stages)
        overheads[name] = overhead_of(serve_run(on, name, plan, idle_phase(on, plan)), on.records)
        print(f"{name}: {plan.predicted['rate_per_s']:.1f}/s predicted, {overheads[name]}")
        for share in on.options.loads.split(","):
            phase = load_phase(on, plan, float(share), on.options.requests)
            rows.append(compare(serve_run(on, name, plan, phase), on.records, overheads[name]))
    columns = ("run", *(f"{name}{part}" for name in BOUNDS for part in ("", " simulated", " ratio")), "CPU", "failed")
    show("live and simulated", columns, [_cells(row) for row in rows])
    print(*verdicts(rows), sep="\n")
    told = [asdict(row) | {"ratios": row.ratios, "within": row.within} for row in rows]
    return {"bounds": dict(BOUNDS), "overheads": overheads, "runs": told}


def plan_of(on: Bench, stages: tuple[Stage, ...]) -> Plan:
    """A plan, carrying what is predicted of it by the joint records: the admission starts from that."""
    plan = on.plan(stages)
    expected = on.predicted(plan)
    return replace(plan, predicted={"rate_per_s": expected.rate_per_s, "latency_s": expected.latency_s})


def load_phase(on: Bench, plan: Plan, share: float, num_requests: int) -> Phase:
    """Poisson arrivals at a share of the predicted rate, some `num_requests` of them after the warm-up."""
    rate_per_s = share * plan.predicted["rate_per_s"]
    rows_N = np.random.default_rng(on.options.seed).integers(len(on.records), size=NUM_DRAWN)
    return Phase(
        name=f"{share:g}",
        seconds=WARM_SLOS * on.emulation.wall_slo_s + num_requests * INPUTS_PER_REQUEST / rate_per_s,
        keys=tuple(on.records.sample_ids[row] for row in rows_N),
        rate_per_s=rate_per_s,
    )


def idle_phase(on: Bench, plan: Plan) -> Phase:
    """One request at a time; the inputs of each all leave in the same stage, the stages take turns."""
    stage_N = stages_left(plan, on.records.outcome(active_thresholds(plan)).exits_N)
    groups = [np.flatnonzero(stage_N == stage) for stage in range(len(plan.stages))]
    by_stage = [np.resize(rows_N, INPUTS_PER_REQUEST) for rows_N in groups if len(rows_N)]
    requests = islice(cycle(by_stage), NUM_DRAWN // INPUTS_PER_REQUEST)
    keys = tuple(on.records.sample_ids[row] for rows_N in requests for row in rows_N)
    return Phase(name=IDLE, seconds=IDLE_SLOS * on.emulation.wall_slo_s, keys=keys, workers=1)


def serve_run(on: Bench, name: str, plan: Plan, phase: Phase) -> Run:
    """A fresh service of the plan under one load: nothing that another run has taught it is left."""
    result = played(on, plan, phase, after=_stages)
    print(f"{name}-{phase.name}: {len(result.driven.records)} requests; {result.driven.told()}", flush=True)
    return Run(
        name=f"{name}-{phase.name}",
        plan=plan,
        problem=on.problem,
        driven=result.driven,
        warm_s=0.0 if phase.name == IDLE else WARM_SLOS * on.emulation.wall_slo_s,
        fill=fill_of(result.after),
    )


async def _stages(service: RunningService) -> Any:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{service.url}/stats")).raise_for_status().json()["stages"]


def fill_of(stages: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """From what `GET /stats` tells per stage and replica: by split, inputs over what its batches could have held."""
    held: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for split in (split for replicas in stages for replica in replicas for split in replica["splits"]):
        sums = held[f"{split['first']}-{split['end'] - 1}"]
        sums[0] += split["inputs"]
        sums[1] += split["batch"] * split["batches"]
    return {blocks: inputs / room for blocks, (inputs, room) in sorted(held.items()) if room}


def compare(run: Run, records: ExitRecords, overhead: Overhead) -> Compared:
    """The run's figures and the simulator's."""
    window = (run.warm_s, run.driven.phase.seconds)
    outcome = simulate(scenario_of(run, records, overhead))
    simulated = as_driven(run.driven, outcome)
    fill = {f"{split.first}-{split.end - 1}": split.fill for split in outcome.splits}
    said = outcome.exit_N.reshape(-1, INPUTS_PER_REQUEST).tolist()
    return Compared(
        run=run.name,
        live=figures(run.driven, window),
        simulated=figures(simulated, window),
        fill={blocks: (run.fill.get(blocks), fill.get(blocks)) for blocks in {**run.fill, **fill}},
        other_exits=sum(
            live.error is None and ours.error is None and [each.exit for each in live.predictions] != exits
            for live, ours, exits in zip(run.driven.records, simulated.records, said, strict=True)
        ),
        machine=run.driven.machine,
    )


def scenario_of(run: Run, records: ExitRecords, overhead: Overhead) -> Scenario:
    """The run's plan, inputs and times of arrival.

    Half of the entry's overhead is taken to come before the first stage, half after the last: from outside only their
    sum is seen.
    """
    driven, row_of = run.driven, {sample_id: row for row, sample_id in enumerate(records.sample_ids)}
    rows = [row_of[driven.phase.keys[index]] for record in driven.records for index in record.input_indices]
    link = Link(bandwidth_bytes_per_s=ENDLESS_BYTES_PER_S, delay_s=overhead.hop_s)
    return Scenario(
        problem=replace(run.problem, link=link),
        plan=run.plan,
        decisions=recorded(records, active_thresholds(run.plan)),
        rows_N=np.array(rows, dtype=np.int64),
        arrivals_s=np.array([record.scheduled_s for record in driven.records]),
        duration_s=driven.phase.seconds,
        inputs_per_request=INPUTS_PER_REQUEST,
        slo_s=driven.slo_s,
        warm_up_s=run.warm_s,
        entry_s=overhead.entry_s / 2,
        answer_s=overhead.entry_s / 2,
        max_queued=MAX_QUEUED,
    )


def as_driven(live: Driven, outcome: Outcome) -> Driven:
    """Requests as the client of a service sees them: whole or failed, and failed where the deadline has passed."""
    parts = (outcome.latency_s_N, outcome.drop_N, outcome.exit_N)
    whole = zip(*(part.reshape(-1, INPUTS_PER_REQUEST).tolist() for part in parts), strict=True)
    records = [
        _record(record, latencies_s, drops, exits, live.slo_s)
        for record, (latencies_s, drops, exits) in zip(live.records, whole, strict=True)
    ]
    return replace(live, records=tuple(records))


def _record(
    live: RequestRecord, latencies_s: list[float], drops: list[int], exits: list[int], slo_s: float
) -> RequestRecord:
    error = next((DROPS[drop] for drop in drops if drop >= 0), "deadline" if max(latencies_s) > slo_s else None)
    answers = tuple(Prediction(label="", score=0.0, exit=left, request_id=live.request_id) for left in exits)
    return replace(
        live,
        sent_s=live.scheduled_s,
        done_s=live.scheduled_s + (0.0 if error else max(latencies_s)),
        predictions=() if error else answers,
        error=error,
    )


def overhead_of(idle: Run, records: ExitRecords) -> Overhead:
    """From the run with one request at a time: what its requests took beyond a simulation in which calls cost nothing.

    Medians by the stage that answers a request, and the line through them. Raises DataError for a run that failed.
    """
    if any(record.error is not None for record in idle.driven.records):
        raise DataError(f"requests of the idle run {idle.name} failed")
    bare = as_driven(idle.driven, simulate(scenario_of(idle, records, Overhead())))
    pairs = zip(idle.driven.records, bare.records, strict=True)
    beyond_s = np.array([live.latency_s - simulated.latency_s for live, simulated in pairs])
    last = np.array([max(each.exit for each in record.predictions) for record in idle.driven.records])
    stages = stages_left(idle.plan, last)
    reached = np.unique(stages)
    medians_s = [float(np.median(beyond_s[stages == stage])) for stage in reached]
    if len(reached) == 1:
        return Overhead(entry_s=max(0.0, medians_s[0]))
    hop_s, entry_s = np.polyfit(reached, medians_s, 1)
    return Overhead(entry_s=max(0.0, float(entry_s)), hop_s=max(0.0, float(hop_s)))


def active_thresholds(plan: Plan) -> dict[int, float]:
    """Of the ramps that are on."""
    given = None if plan.policy is None else plan.policy.thresholds
    return {ramp: given[ramp] for ramp in plan.ramps} if isinstance(given, Mapping) else {}


def stages_left(plan: Plan, exits_N: IntArray) -> IntArray:
    """The stage that each input leaves in."""
    return np.searchsorted([stage.end for stage in plan.stages], exits_N, side="right")


def _cells(row: Compared) -> list[str]:
    cells = [row.run]
    for name, ratio in row.ratios.items():
        pair = [getattr(side, name) for side in (row.live, row.simulated)]
        cells += ["-" if value is None else f"{value:.3f}" for value in (*pair, ratio)]
    return [*cells, f"{row.machine:.0%}", f"{sum(row.live.errors.values())}, {sum(row.simulated.errors.values())}"]


def verdicts(rows: Sequence[Compared]) -> list[str]:
    """How many figures are near enough, and which runs left elsewhere than recorded."""
    near = [
        f"{name}: {sum(row.within[name] for row in rows)} of {len(rows)} within {bound:.0%}"
        for name, bound in BOUNDS.items()
    ]
    return near + [f"{row.run}: {row.other_exits} requests left elsewhere" for row in rows if row.other_exits]


if __name__ == "__main__":
    command("validation", __doc__, run, {"V100": 6}, plans="stock,e3,best", loads="0.4,0.7,0.95,1.2", requests=600)
