"""The sides of a comparison: plans of a workload, running servers, and a side's turn.

A side is a peer with its best settings of a sweep, or Offramp under one plan. In its turn its processor time and
latency are measured at rates that are the same for all sides. Then the highest rate that it sustains is searched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from deployments.settings import ServeSettings
from earlyexit.backends import BackendName
from earlyexit.clock import MonotonicClock
from earlyexit.errors import OfframpError
from experiments.peers.client import ClientOptions, LoadResult, run_client
from experiments.peers.offramp_server import OfframpOptions, offramp_process
from experiments.peers.processes import Server, serving
from experiments.peers.stock import Dtype, Kernel, ServerOptions, StockModel
from experiments.peers.workloads import FOLDER, Processors, Workload
from offramp.commands.jobs import ProfileJob
from offramp.commands.profile import kept_profile, on_cores, plan_for, processor_problem
from offramp.demo.turns import manual_control
from offramp.load.sustained import Search
from optimizer.plans.plan import Plan
from optimizer.problems.entries import Recorded
from optimizer.problems.problem import PlanProblem
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Strategy

# Offramp's plans of a workload, by a profile of this machine: one per strategy.

SLO_FACTOR = 12.5
"""Ratio of the SLO to the time of one input: E3's 100 ms are 12.5 times the 8 ms of its V100 (section 5)."""
STOCK_RUNS = 60
STRATEGIES: dict[str, Strategy] = {"offramp": "serial", "early-exit": "early-exit", "stock": "stock"}
"""The planner's strategy of each side. One machine has one stage: its replicas run every split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A workload measured on this machine, and its plans."""

    stock_s: float
    """Seconds of one text alone through the full model: the median over texts."""
    slo_s: float
    problem: PlanProblem
    plans: dict[str, Plan]
    """Plans by side."""
    backend: BackendName
    """The backend of Offramp's sides."""


def prepare(workload: Workload, dtype: Dtype, machine: Processors, backend: BackendName) -> Prepared:
    """Measures the model on one thread, and plans; raises PlanError if a strategy has no plan.

    The SLO is `SLO_FACTOR` times the time of one text alone. `offramp serve` chooses replicas and dispatch.
    """
    stock_s = stock_alone_s(workload, dtype, machine)
    slo_s = SLO_FACTOR * stock_s
    profile = kept_profile(workload.folder, ProfileJob(dtype=dtype, backend=backend), print)
    recorded = Recorded(records=workload.records, thresholds=workload.thresholds)
    problem = with_batch_limit(processor_problem(profile, recorded, machine.workers, slo_s), machine.batch_limit)
    plans = {side: plan_for(problem, each, workload.policy, recorded) for side, each in STRATEGIES.items()}
    plans = {side: on_cores(plan, problem, machine.workers, profile.backend) for side, plan in plans.items()}
    return Prepared(stock_s=stock_s, slo_s=slo_s, problem=problem, plans=plans, backend=profile.backend)


def stock_alone_s(workload: Workload, dtype: Dtype, machine: Processors) -> float:
    """Returns the full model's seconds for one encoded text alone: the median over texts."""
    model = StockModel.load(ServerOptions(model=workload.folder, dtype=dtype, threads=machine.threads))
    clock = MonotonicClock()
    seconds = []
    order = np.random.default_rng(0).permutation(len(workload.texts))[:STOCK_RUNS]
    for encoded in model.encode([workload.texts[row] for row in order]):
        started_s = clock.now_s()
        model.predict_encoded([encoded])
        seconds.append(clock.now_s() - started_s)
    return median(seconds[STOCK_RUNS // 6 :])  # the first runs are cold


# Running servers.

WAIT_S = 0.005
"""Seconds that a server waits for a batch to fill, if it waits at all."""


class Swept(BaseModel):
    """One setting of a sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: ServerOptions
    in_slo_per_s: float
    """Requests per second that a closed loop got answered within the SLO."""
    answered_per_s: float
    p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSide:
    """A running server, alone on the machine."""

    name: str
    server: Server = field(repr=False)
    load: ClientOptions
    """The load, without rate and seed."""
    is_ours: bool = False
    begin: Callable[[], None] = lambda: None
    """Brings the server into the state to measure; raises OfframpError if it has ended."""

    def measure(self, rate_per_s: float, seed: int) -> LoadResult:
        """Sends requests at this rate."""
        self.begin()
        changes = {"url": self.server.url, "rate_per_s": rate_per_s, "concurrency": None, "seed": seed}
        return run_client(self.load.model_copy(update=changes))

    def saturate(self, concurrency: int, seconds: float) -> LoadResult:
        """Runs a closed loop with this number of workers."""
        self.begin()
        changes = {"url": self.server.url, "concurrency": concurrency, "rate_per_s": None, "duration_s": seconds}
        return run_client(self.load.model_copy(update=changes))


def settings(workload: Workload, dtype: Dtype, machine: Processors, *, batch: int, port: int) -> list[ServerOptions]:
    """Returns the settings that a sweep tries: division of the cores, batches, waits, kernels."""
    base = ServerOptions(model=workload.folder.resolve(), dtype=dtype, port=port)
    all_cores = machine.workers * machine.threads
    onnx: list[Kernel] = ["onnx"] if dtype == "float32" else []
    shapes: list[tuple[int, int, int, float, Kernel]] = [
        *((machine.workers, machine.threads, each, 0.0, "packed") for each in sorted({max(1, batch // 4), batch})),
        (machine.workers, machine.threads, batch, WAIT_S, "packed"),
        (1, all_cores, batch, 0.0, "packed"),
        *((machine.workers, machine.threads, batch, 0.0, kernel) for kernel in onnx),
    ]
    names = ("workers", "threads", "batch", "wait_s", "kernel")
    return [base.model_copy(update=dict(zip(names, shape, strict=True))) for shape in shapes]


def sweep(
    name: str, tried: Sequence[ServerOptions], load: ClientOptions, concurrency: int, on_swept: Callable[[Swept], None]
) -> list[Swept]:
    """Measures every setting by a closed loop; returns them by answers within the SLO, then by all answers."""
    results = []
    for options in tried:
        with serving(name, options) as server:
            changes = {"url": server.url, "rate_per_s": None, "concurrency": concurrency}
            result = run_client(load.model_copy(update=changes))
        setting = Swept(
            options=options,
            in_slo_per_s=result.goodput_per_s,
            answered_per_s=result.answered_per_s,
            p99_s=result.p99_s,
        )
        on_swept(setting)
        results.append(setting)
    return sorted(results, key=lambda setting: (setting.in_slo_per_s, setting.answered_per_s), reverse=True)


@contextmanager
def offramp_sides(
    workload: Workload,
    prepared: Prepared,
    dtype: Dtype,
    machine: Processors,
    load: ClientOptions,
    *,
    port: int,
) -> Iterator[list[ServedSide]]:
    """Runs one service whose controller never plans, and yields a side for each plan that it can follow.

    The service has its default settings, but no probes, which do not matter to this comparison.
    """
    service = ServeSettings(
        model=str(workload.folder.resolve()),
        plan=prepared.plans["stock"],
        control=manual_control(prepared.problem, workload.policy, FOLDER / "state" / f"{workload.name}.sqlite"),
        slo_s=prepared.slo_s,
        dtype=dtype,
        backend=prepared.backend,
        threads_per_replica=machine.threads,
    )
    with offramp_process(OfframpOptions.of(service, prepared.plans, port=port)) as remote:
        begins = {name: partial(remote.change_to, name) for name in prepared.plans}
        yield [
            ServedSide(name=name, server=remote.server, load=load, is_ours=True, begin=begin)
            for name, begin in begins.items()
        ]


# A side's turn.

SEEDS_PER_ROUND = 1000
"""More than the probes of a round, so that no two probes have the same arrivals."""
PROBE_HEADER = "round  side                  rate/s   p50 ms   p99 ms     lost  verdict"
SPAN = 20.0
"""Largest ratio of a search's end to its start."""
MOST_PROBES = 6
PROBE_SHARE = 0.5
"""Seconds of a probe, as a share of a run's seconds."""
RESOLUTION = 0.05
COLD_GROWTH, WARM_GROWTH = 1.15, 1.06
"""The first step from a guessed start, and from the result of the previous round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The task of a side in its turn."""

    workload: Workload
    drawn: Sequence[int]
    light_per_s: float
    """Rate of Poisson requests per second, and so is the next."""
    heavy_per_s: float
    start_per_s: float
    is_known: bool
    """Whether the start is the result of an earlier round."""
    slo_s: float
    index: int
    """Index of the round, whose arrivals are the same for all sides."""


def take_turn(side: ServedSide, turn: Turn) -> dict[str, Any]:
    """Measures a warm side; returns a JSON document."""
    seed = turn.index * SEEDS_PER_ROUND
    answers = side.load.inputs.with_name(f"{side.name}.answers")
    keeping = replace(side, load=side.load.model_copy(update={"answers": answers}))
    light = costed(side, turn.light_per_s, seed, turn)
    heavy = costed(keeping, turn.heavy_per_s, seed + 1, turn)
    search = Search(
        start_per_s=turn.start_per_s,
        low_per_s=turn.start_per_s / SPAN,
        high_per_s=turn.start_per_s * SPAN,
        resolution=RESOLUTION,
        most_probes=MOST_PROBES,
        growth=WARM_GROWTH if turn.is_known else COLD_GROWTH,
    )
    probing = replace(side, load=side.load.model_copy(update={"duration_s": PROBE_SHARE * side.load.duration_s}))
    search, probes = _searched(probing, search, turn, seed + 2)
    return {
        "light": light,
        "heavy": heavy,
        "answers": check_answers(turn.workload, turn.drawn, answers),
        "sustained_per_s": 0.0 if search.ending is None else search.best_per_s,
        "ending": search.ending,
        "probes": probes,
    }


def _searched(side: ServedSide, search: Search, turn: Turn, seed: int) -> tuple[Search, list[dict[str, Any]]]:
    """Runs a search, and returns it with its probes; a side that dies ends its search without a result."""
    probes: list[dict[str, Any]] = []
    while (rate_per_s := search.next_rate()) is not None:
        probe: dict[str, Any] = {"side": side.name, "rate_per_s": rate_per_s, "seed": seed + len(probes)}
        try:
            result = side.measure(rate_per_s, seed + len(probes))
        except OfframpError as error:
            print(f"{_head(side.name, rate_per_s, turn)}  {error}", flush=True)
            return search, [*probes, probe | {"result": None, "verdict": None, "error": str(error)}]
        verdict = result.verdict(turn.slo_s)
        print(probe_line(side.name, rate_per_s, result, turn), flush=True)
        probes.append(probe | {"result": asdict(result), "verdict": verdict, "error": None})
        search.add(rate_per_s, verdict)
    return search, probes


def _head(name: str, rate_per_s: float, turn: Turn) -> str:
    return f"{turn.index + 1:>5}  {name:<18} {rate_per_s:9.1f}"


def probe_line(name: str, rate_per_s: float, result: LoadResult, turn: Turn) -> str:
    """Returns the line of a client's run for the table of `PROBE_HEADER`."""
    p50, p99 = ("-" if seconds is None else f"{seconds * 1000:.1f}" for seconds in (result.p50_s, result.p99_s))
    verdict = result.verdict(turn.slo_s)
    return f"{_head(name, rate_per_s, turn)} {p50:>8} {p99:>8} {result.lost_share:>8.1%}  {verdict}"


def sustained(turn: Mapping[str, Any]) -> float | None:
    """Returns the sustained rate of a turn, or None; results before 23 November 2026 name it goodput."""
    return float(turn["sustained_per_s"] if "sustained_per_s" in turn else turn["goodput_per_s"]) or None


def costed(side: ServedSide, rate_per_s: float, seed: int, turn: Turn) -> dict[str, Any]:
    """Returns the figures at a rate with processor seconds per answer: of Offramp by part, of a peer in total."""
    side.begin()
    before = side.server.cpu_s_by_part()
    result = side.measure(rate_per_s, seed)
    answered_share = result.num_answered / max(1, result.num_counted)  # the warm-up is not counted
    num_answered = max(1.0, result.num_sent * answered_share * side.load.inputs_per_request)
    parts = per_input(before, side.server.cpu_s_by_part(), num_answered)
    cost_text = f"{1e3 * sum(parts.values()):.2f} ms of processor time per answer"
    print(f"{probe_line(side.name, rate_per_s, result, turn)}  {cost_text}", flush=True)
    return asdict(result) | {"cpu_s": parts if side.is_ours else {"server": sum(parts.values())}}


def per_input(before: Mapping[str, float], after: Mapping[str, float], num_inputs: float) -> dict[str, float]:
    """Returns processor seconds per input between two readings, by part."""
    return {part: (after[part] - before.get(part, 0.0)) / num_inputs for part in after}


def check_answers(workload: Workload, drawn: Sequence[int], answers: Path) -> dict[str, float | None]:
    """Returns the number of answers in a client's file, and the share with the true label."""
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    right = sum(row["label"] == workload.labels[drawn[row["input"]]] for row in rows)
    return {"num_inputs": len(rows), "accuracy": right / len(rows) if rows else None}
