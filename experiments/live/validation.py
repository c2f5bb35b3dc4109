"""Compares the simulator with the live service: three plans under several loads, the same requests at the same times.

    python -m experiments.live.validation [--plans stock,e3,best] [--loads 0.4,0.7,0.95,1.2] [--requests 600]

6 EMULATED V100, batches up to 8, SLO 100 ms, all stretched by the time scale. Exits are recorded ones, and there is no
controller. Emulated times are the published BERT-base profile of E3's accelerators, slowed to what E3's may be (its
V100 at about 8 ms for a batch of 1, an estimate). A time scale stretches them, so that the cluster fits one machine.
Loads are shares of each plan's predicted rate, Poisson arrivals of requests of 8 inputs, a fresh service for every run.
What calls cost beyond the accelerators' time is measured per plan in a run that is not compared, one request at a time.
Writes runs/live/validation.json. Minutes: 27, of which the simulations take seconds.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import psutil

from deployments.local_ray.cluster import LocalCluster
from deployments.settings import EmulatedSettings, ServeSettings
from earlyexit.errors import DataError
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.live.model import FOLDER, TEXT, ensure_model, thresholds
from experiments.problems import PROBLEMS, stretched
from offramp.client.protocol import Prediction
from offramp.demo.service import served
from offramp.load.generator import LoadConfig, run_load
from offramp.load.processes import Poisson
from offramp.load.report import RequestRecord, percentile
from optimizer.calibration_file import RECORDS_FILE
from optimizer.decision import NoPlan, Strategy
from optimizer.evaluate import evaluate
from optimizer.plan import Plan, PolicySpec
from optimizer.planner import solve
from optimizer.problem import Link, PlanProblem, Slo, Supply
from optimizer.problem_file import read_problem
from optimizer.rescore import joint_reach, rechosen, rescore
from optimizer.what_if import with_batch_limit
from profiles.records import ExitRecords, IntArray
from simulator.inputs import recorded
from simulator.outcome import DROPS, Outcome
from simulator.scenario import Scenario
from simulator.simulate import simulate

BOUNDS: Mapping[str, float] = {"goodput_per_s": 0.05, "p50_s": 0.10, "p99_s": 0.20}
"""How far a simulated figure may be from the live one, as a share of it."""
INPUTS_PER_REQUEST = 8
NUM_DRAWN = 8000
"""Inputs drawn for a load; a longer one begins with the first of them again."""
WARM_SLOS = 3.0
"""Left out of a load's figures."""
IDLE_REQUESTS = 40
"""Requests that are sent one at a time to measure the overhead."""
TIMEOUT_SLOS = 4.0
"""A client's patience, in SLOs."""
OK_SHARE = 0.6
"""Of the CPU; above it emulated accelerators are late because the machine is, not because they are."""
IDLE = "idle"
HOP_S = 0.01
"""What a call between two replicas takes here. It is no emulated time: accelerators are emulated, networks are not."""
ENDLESS_BYTES_PER_S = 1e15
"""Emulated accelerators send no hidden state to each other: only the delay counts."""
MAX_QUEUED: int = ServeSettings.model_fields["max_queued"].default


# The emulated cluster.


def emulated(name: str) -> str:
    """Returns the accelerator type that stands for a real one."""
    return f"emulated:{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A cluster that is not there."""

    counts: Mapping[str, int] = field(default_factory=lambda: {"V100": 6})
    """Accelerators by their published name."""
    time_scale: float = 40.0
    slower: float = 6.5
    """Published seconds times this are an emulated accelerator's."""
    batch_limit: int = 8
    slo_s: float = 0.1
    """Emulated, as E3's."""

    @property
    def wall_slo_s(self) -> float:
        return self.slo_s * self.time_scale

    def problem(self, survival: tuple[float, ...], *, time_scale: float) -> PlanProblem:
        """Returns the planning problem of this cluster, in wall-clock seconds unless the time scale is 1."""
        published = read_problem(PROBLEMS / "bert_base_hetero.yaml").problem
        problem = with_batch_limit(stretched(published, self.slower * time_scale), self.batch_limit)
        return replace(
            problem,
            survival_N=survival,
            latency={emulated(name): problem.latency[name] for name in self.counts},
            devices={
                emulated(name): Supply(count=count, usd_per_hour=problem.devices[name].usd_per_hour)
                for name, count in self.counts.items()
            },
            link=Link(bandwidth_bytes_per_s=ENDLESS_BYTES_PER_S, delay_s=HOP_S),
            slo=Slo(latency_s=self.slo_s * time_scale, slack=problem.slo.slack),
        )

    def settings(self, model: Path, plan: Plan) -> ServeSettings:
        """Returns the settings of a service that follows `plan`."""
        problem = self.problem((1.0,) * plan.num_blocks, time_scale=1.0)
        emulated = {
            device: EmulatedSettings(
                batch=list(table.batches),
                block_s=table.block_s_NB.tolist(),
                ramp_s=table.ramp_s_EB.tolist(),
                time_scale=self.time_scale,
            )
            for device, table in problem.latency.items()
        }
        return ServeSettings(
            model=str(model.resolve()),
            plan=plan,
            emulated=emulated,
            slo_s=self.wall_slo_s,
            probe_share=0.0,
            slack=problem.slo.slack,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the comparison runs on."""

    emulation: Emulation
    model: Path
    records: ExitRecords
    options: Namespace

    @property
    def thresholds(self) -> dict[int, float]:
        return thresholds(self.records)

    @property
    def policy(self) -> PolicySpec:
        """Recorded exits, at E3's threshold for every ramp."""
        path = str((self.model / RECORDS_FILE).resolve())
        return PolicySpec(name="recorded", thresholds=self.thresholds, records=path)

    @property
    def problem(self) -> PlanProblem:
        """In wall-clock seconds, with the survival of the records."""
        survival = self.records.outcome(self.thresholds).survival
        return self.emulation.problem(survival, time_scale=self.emulation.time_scale)

    def best(self, strategy: Strategy) -> Plan:
        """Returns the strategy's plan: of its good plans the one that the records prefer.

        It carries what the joint records predict of it, from which admission starts. The policy is there even where no
        ramp is on, because it says what the answers are.
        """
        problem, reach = self.problem, joint_reach(self.records, self.thresholds)
        decision = solve(problem, strategy)
        assert not isinstance(decision, NoPlan), decision.binding
        stages = rechosen(problem, decision, rescore(problem, decision, reach)).stages
        expected = evaluate(problem, stages, reach)
        predicted = {"rate_per_s": expected.rate_per_s, "latency_s": expected.latency_s}
        return Plan(stages=stages, policy=self.policy, networks=problem.networks, predicted=predicted)


# A load on a live service, and its figures.


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A load: Poisson arrivals at `rate_per_s` for so many seconds, or without a rate one request at a time."""

    name: str
    seconds: float
    """0 where requests are sent one at a time."""
    keys: tuple[str, ...]
    """Sample ids, sent in turn."""
    rate_per_s: float | None = None
    """Inputs per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What became of every request; times are seconds after the start."""

    phase: Phase
    slo_s: float
    records: tuple[RequestRecord, ...]
    """In the order in which they were due."""
    machine: float
    """Share of the machine's processors that was busy."""

    @property
    def duration_s(self) -> float:
        """Of the phase; where requests are sent one at a time, until the last is answered."""
        return self.phase.seconds or max(record.done_s for record in self.records)


async def drive(url: str, phase: Phase, *, slo_s: float, seed: int = 0) -> Driven:
    """Sends a load; returns when every request has its outcome."""
    times_s: list[float] | None = None
    if phase.rate_per_s is not None:
        process = Poisson(rate_per_s=phase.rate_per_s / INPUTS_PER_REQUEST)
        times_s = process.draw(phase.seconds, np.random.default_rng(seed)).tolist()
    config = LoadConfig(
        url=url,
        inputs=(TEXT,) * len(phase.keys),
        keys=phase.keys,
        num_requests=IDLE_REQUESTS if times_s is None else len(times_s),
        send_times_s=times_s,
        concurrency=1 if times_s is None else None,
        inputs_per_request=INPUTS_PER_REQUEST,
        timeout_s=TIMEOUT_SLOS * slo_s,
        slo_s=slo_s,
        seed=seed,
    )
    psutil.cpu_percent()
    found = (await run_load(config)).records
    machine = psutil.cpu_percent() / 100
    records = tuple(sorted(found, key=lambda record: record.scheduled_s))
    return Driven(phase=phase, slo_s=slo_s, records=records, machine=machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """A window of a run. Goodput counts inputs that were answered in it, the rest requests that were due in it."""

    requests: int
    goodput_per_s: float
    p50_s: float | None
    p99_s: float | None
    errors: Mapping[str, int]


def figures(driven: Driven, since_s: float) -> WindowFigures:
    """Returns the figures of a run from `since_s` to its end."""
    until_s = driven.duration_s
    due = [record for record in driven.records if since_s <= record.scheduled_s < until_s]
    answered = [record for record in driven.records if record.error is None]
    good = [each for each in answered if since_s <= each.done_s < until_s and each.latency_s <= driven.slo_s]
    latencies_s = [record.latency_s for record in due if record.error is None]
    return WindowFigures(
        requests=len(due),
        goodput_per_s=sum(len(record.predictions) for record in good) / (until_s - since_s),
        p50_s=percentile(latencies_s, 50),
        p99_s=percentile(latencies_s, 99),
        errors=dict(Counter(record.error for record in due if record.error is not None)),
    )


# The comparison.


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
        plan = on.best(cast(Strategy, name))
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
    requests = islice(cycle(by_stage), IDLE_REQUESTS)
    keys = tuple(on.records.sample_ids[row] for rows_N in requests for row in rows_N)
    return Phase(name=IDLE, seconds=0.0, keys=keys)


def serve_run(on: Bench, name: str, plan: Plan, phase: Phase) -> Run:
    """Runs a load on a service of its own, so that nothing that another run has taught it is left."""
    settings = on.emulation.settings(on.model, plan)
    with served(settings, plan, LocalCluster(port=on.options.port, front=on.options.front)) as service:
        driven = asyncio.run(drive(service.url, phase, slo_s=on.emulation.wall_slo_s, seed=on.options.seed))
        stats = httpx.get(f"{service.url}/stats", trust_env=False).raise_for_status().json()
    verdict = "undisturbed" if driven.machine < OK_SHARE else "DISTURBED: use a larger --time-scale"
    print(f"{name}-{phase.name}: {len(driven.records)} requests; CPU {driven.machine:.0%}: {verdict}", flush=True)
    return Run(
        name=f"{name}-{phase.name}",
        plan=plan,
        problem=on.problem,
        driven=driven,
        warm_s=0.0 if phase.name == IDLE else WARM_SLOS * on.emulation.wall_slo_s,
        fill=fill_of(stats["stages"]),
    )


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
    outcome = simulate(scenario_of(run, records, overhead))
    simulated = as_driven(run.driven, outcome)
    fill = {f"{split.first}-{split.end - 1}": split.fill for split in outcome.splits}
    said = outcome.exit_N.reshape(-1, INPUTS_PER_REQUEST).tolist()
    return Compared(
        run=run.name,
        live=figures(run.driven, run.warm_s),
        simulated=figures(simulated, run.warm_s),
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
        duration_s=driven.duration_s,
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


def main() -> None:
    """Compares, prints and writes."""
    parser = ArgumentParser(prog="python -m experiments.live.validation", description=__doc__)
    parser.add_argument("--model", type=Path, default=FOLDER, help="made where it is missing")
    parser.add_argument("--time-scale", type=float, default=40.0, help="wall-clock seconds of an emulated one")
    parser.add_argument("--plans", default="stock,e3,best", help="strategies")
    parser.add_argument("--loads", default="0.4,0.7,0.95,1.2", help="shares of a plan's predicted rate")
    parser.add_argument("--requests", type=int, default=600, help="of a load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--front", choices=("haproxy", "proxy"), default="haproxy")
    options = parser.parse_args()
    emulation = Emulation(time_scale=options.time_scale)
    on = Bench(emulation=emulation, model=options.model, records=ensure_model(options.model), options=options)
    print(f"emulated V100, {emulation.time_scale:g} times stretched; SLO {emulation.wall_slo_s:g} s")
    told = {"emulated": True, "time_scale": emulation.time_scale, "slo_s": emulation.wall_slo_s, **run(on)}
    print(f"written: {keep(told, RUNS / 'live' / 'validation.json')}")


if __name__ == "__main__":
    main()
