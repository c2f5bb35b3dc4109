"""One workload's whole comparison: measured, planned, swept, then all sides in turns, and written down step by step."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from experiments.kit import keep
from experiments.peers.answers import check_answers
from experiments.peers.client import ClientOptions
from experiments.peers.costs import step_s
from experiments.peers.goodput import Bounds, Target
from experiments.peers.limit import compute_limit
from experiments.peers.options import Dtype
from experiments.peers.plans import Machine, Prepared, prepare
from experiments.peers.processes import PEERS, Server, serving
from experiments.peers.rounds import PROBE_HEADER, Comparison, Hunt, Probe, at_rate, interleave, probe_line
from experiments.peers.sides import ServedSide, Tried, offramp_sides, settings, sweep
from experiments.peers.workloads import FOLDER, WORKLOADS, Name, Workload
from offramp.jobs.provenance import provenance
from optimizer.plan_file import plan_document

LIGHT_LOAD = 0.3
"""Of the best peer's goodput: where latency without queues is compared."""
HEAVY_LOAD = 0.8
"""Of a side's own goodput: where processor time is taken apart, and answers are checked."""
SWEPT_S = 3.0
SWEPT_SHARE = 0.6
"""Of the requests that the engine alone could answer within the SLO: the workers of a sweep's closed loop."""
START_SHARE = 0.8
LIMIT_SHARE = 0.65
"""Of what a sweep got, and of the compute-bound limit: where a search starts."""
IDLE_S = 5.0
WARM_UP_S = 2.0
"""Of every probe: servers come from standing still, Offramp to another plan."""
NUM_REQUESTS = 5000
"""That are drawn; then they are sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a comparison is about."""

    workload: Name
    dtype: Dtype
    inputs_per_request: int
    machine: Machine
    rounds: int
    seconds: float
    """Of a probe, after its warm-up."""
    peers: tuple[str, ...] = tuple(PEERS)
    port: int = 8000
    seed: int = 0
    sweep_again: bool = True
    """False: the settings that the last comparison of this kind found."""

    @property
    def result(self) -> Path:
        """Where it is written."""
        return FOLDER / f"{self.workload}-{self.dtype}-{self.inputs_per_request}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What is asked, measured, planned, and what is sent."""

    asked: Asked
    workload: Workload
    prepared: Prepared
    drawn: Sequence[int]
    """The texts that are sent."""
    load: ClientOptions
    """But for the address, the rate and the seed."""

    @property
    def target(self) -> Target:
        return Target(slo_s=self.prepared.slo_s)


@contextmanager
def loaded(asked: Asked) -> Iterator[Loaded]:
    """The workload, its plans, and its texts in a file that lasts as long as the block."""
    workload = WORKLOADS[asked.workload]()
    prepared = prepare(workload, asked.dtype, asked.machine)
    drawn = workload.draw(NUM_REQUESTS * asked.inputs_per_request, asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        load = ClientOptions(
            url="",
            inputs=workload.write(drawn, Path(folder) / "inputs.jsonl"),
            inputs_per_request=asked.inputs_per_request,
            truncate=workload.truncate,
            concurrency=1,
            duration_s=asked.seconds,
            warmup_s=WARM_UP_S + prepared.slo_s,
            slo_s=prepared.slo_s,
            timeout_s=max(2.0, 4 * prepared.slo_s),
        )
        yield Loaded(asked=asked, workload=workload, prepared=prepared, drawn=drawn, load=load)


def compare(asked: Asked) -> dict[str, Any]:
    """Run it all; every step is on disk as soon as it is done."""
    with loaded(asked) as bench:
        prepared = bench.prepared
        print(f"{asked.workload}, {asked.dtype}: alone {prepared.stock_s * 1e3:.1f} ms, SLO {bench.load.slo_s:.3f} s")
        result: dict[str, Any] = {
            "workload": asked.workload,
            "dtype": asked.dtype,
            "inputs_per_request": asked.inputs_per_request,
            "machine": asdict(asked.machine),
            "provenance": provenance(seed=asked.seed, seconds=asked.seconds, rounds=asked.rounds),
            "stock_s": prepared.stock_s,
            "slo_s": prepared.slo_s,
            "plans": {name: plan_document(plan) for name, plan in prepared.plans.items()},
            "limit_per_s": _limits(bench),
        }
        swept = _sweeps(bench, result["limit_per_s"]["stock"])
        result["sweeps"] = {name: [each.model_dump(mode="json") for each in tried] for name, tried in swept.items()}
        keep(result, asked.result)
        with ExitStack() as stack:  # all at once: starting them anew for every turn would cost minutes
            sides = _started(bench, swept, stack)
            servers = {"offramp" if side.is_ours else side.name: side.server for side in sides}
            result["memory_bytes"] = {name: server.memory_bytes() for name, server in servers.items()}
            result["idle_cores"] = _idle_cores(servers)
            for server in servers.values():
                server.pause()
            comparison = _goodput(bench, sides, _starts_per_s(bench, sides, swept, result["limit_per_s"]))
            result["goodput"] = comparison.document()
            keep(result, asked.result)
            result["light_load"] = _light_load(bench, sides, comparison)
            keep(result, asked.result)
            result["costs"], result["answers"] = _heavy_load(bench, sides, comparison)
        keep(result, asked.result)
    return result


def _limits(bench: Loaded) -> dict[str, float]:
    """Inputs per second of the engine alone, by plan."""
    found = {}
    for name, plan in bench.prepared.plans.items():
        found[name] = compute_limit(bench.workload, plan, bench.asked.dtype, bench.asked.machine)
        splits = [(split.first, split.end, split.batch, len(split.ramps)) for split in plan.splits]
        print(f"engine alone, {name:<12} {found[name]:8.1f} inputs/s   splits (first, end, batch, ramps) {splits}")
    return found


def _sweeps(bench: Loaded, limit_per_s: float) -> dict[str, list[Tried]]:
    """What every peer did with each of its settings, best first."""
    asked, slo_s = bench.asked, bench.prepared.slo_s
    if not asked.sweep_again and asked.result.is_file():
        before = json.loads(asked.result.read_text(encoding="utf-8"))["sweeps"]
        return {name: [Tried.model_validate(each) for each in before[name]] for name in asked.peers}
    # So many that they wait about as long as the SLO allows: full batches, and a bad setting shows as answers too late.
    concurrency = max(2, round(SWEPT_SHARE * slo_s * limit_per_s / asked.inputs_per_request))
    batch = max(1, asked.machine.batch_limit // asked.inputs_per_request)
    short = bench.load.model_copy(update={"duration_s": SWEPT_S})
    swept = {}
    for name, port in zip(asked.peers, count(asked.port + 1000, 10), strict=False):  # some take several ports
        tried = settings(bench.workload, asked.dtype, asked.machine, slo_s=slo_s, batch=batch, port=port)
        swept[name] = sweep(name, tried, short, concurrency, partial(_print_tried, name))
    return swept


def _started(bench: Loaded, swept: Mapping[str, list[Tried]], stack: ExitStack) -> list[ServedSide]:
    asked = bench.asked
    ours = offramp_sides(bench.workload, bench.prepared, asked.dtype, asked.machine, bench.load, port=asked.port)
    sides = stack.enter_context(ours)
    peers = [
        ServedSide(name=name, server=stack.enter_context(serving(name, tried[0].options)), load=bench.load)
        for name, tried in swept.items()
    ]
    return [*sides, *peers]


def _idle_cores(servers: Mapping[str, Server]) -> dict[str, float]:
    """What every server takes of a core while nobody asks it anything."""
    before = {name: server.cpu_s() for name, server in servers.items()}
    time.sleep(IDLE_S)
    return {name: (server.cpu_s() - before[name]) / IDLE_S for name, server in servers.items()}


def _starts_per_s(
    bench: Loaded, sides: Sequence[ServedSide], swept: Mapping[str, list[Tried]], limit_per_s: Mapping[str, float]
) -> dict[str, float]:
    """Near where the searches will end: below the compute-bound limit, or what the sweep got."""
    starts = {}
    for side in sides:
        if side.is_ours:
            starts[side.name] = LIMIT_SHARE * limit_per_s[side.name] / bench.asked.inputs_per_request
        else:
            best = swept[side.name][0]
            starts[side.name] = max(1.0, START_SHARE * max(best.in_slo_per_s, best.answered_per_s / 2))
    return starts


def _goodput(bench: Loaded, sides: Sequence[ServedSide], starts: Mapping[str, float]) -> Comparison:
    hunt = Hunt(
        num_rounds=bench.asked.rounds,
        starts_per_s=starts,
        bounds=Bounds(low_per_s=min(starts.values()) / 50, high_per_s=max(starts.values()) * 50, most_probes=12),
        target=bench.target,
        seed=bench.asked.seed,
        cold_growth=1.15,
    )
    print(PROBE_HEADER, flush=True)
    return interleave(sides, hunt, _print_probe)


def _light_load(bench: Loaded, sides: Sequence[ServedSide], comparison: Comparison) -> dict[str, Any]:
    spreads = [comparison.spread(side.name) for side in sides if not side.is_ours]
    rate_per_s = LIGHT_LOAD * max(spread.median for spread in spreads if spread is not None)
    print(f"all sides at {rate_per_s:.1f} requests/s, {LIGHT_LOAD:.0%} of the best peer's goodput")
    return at_rate(
        sides,
        rate_per_s,
        num_rounds=bench.asked.rounds,
        target=bench.target,
        seed=bench.asked.seed,
        on_probe=_print_probe,
    )


def _heavy_load(
    bench: Loaded, sides: Sequence[ServedSide], comparison: Comparison
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Processor seconds per input, of our processes by part, of each peer as a whole; and the answers, checked."""
    num_inputs = bench.asked.inputs_per_request
    costs: dict[str, Any] = {"steps_s": step_s(bench.workload, bench.workload.bodies(bench.drawn, num_inputs))}
    answers: dict[str, Any] = {}
    for side in sides:
        spread = comparison.spread(side.name)
        if spread is None or not spread.median:
            continue
        before = side.server.cpu_s_by_part()
        result = side.measure(HEAVY_LOAD * spread.median, bench.asked.seed)
        parts = per_input(before, side.server.cpu_s_by_part(), result.num_sent * num_inputs)
        of_server = parts if side.is_ours else {"server": sum(parts.values())}
        costs[side.name] = {"client": result.cpu_per_request_s / num_inputs} | of_server
        path = bench.load.inputs.with_name(f"{side.name}.answers")
        keeping = replace(side, load=bench.load.model_copy(update={"answers": path}))
        keeping.measure(HEAVY_LOAD * spread.median, 1)
        answers[side.name] = check_answers(bench.workload, bench.drawn, path)
    return costs, answers


def per_input(before: Mapping[str, float], after: Mapping[str, float], num_inputs: int) -> dict[str, float]:
    """Processor seconds that were spent between, by part."""
    return {part: (after[part] - before.get(part, 0.0)) / num_inputs for part in after}


def _print_probe(probe: Probe) -> None:
    print(probe_line(probe), flush=True)


def _print_tried(name: str, one: Tried) -> None:
    options = one.options
    p99 = "-" if one.p99_s is None else f"{one.p99_s * 1e3:.0f}"
    print(
        f"swept {name:<10} {options.workers} x {options.threads} threads, batch {options.batch:>3}, wait "
        f"{options.wait_s * 1e3:.0f} ms, {options.kernel:<12} {one.in_slo_per_s:8.1f} in SLO/s, p99 {p99} ms",
        flush=True,
    )
