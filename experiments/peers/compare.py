"""One workload's whole comparison: measured, planned, swept, then all sides in turns, and written down step by step."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.peers.answers import Checked, check_answers
from experiments.peers.client import ClientOptions
from experiments.peers.comparison import PROBE_HEADER, Comparison, probe_line
from experiments.peers.costs import cpu_s_by_part, spent, step_s
from experiments.peers.goodput import Bounds, Target
from experiments.peers.limit import compute_limit
from experiments.peers.offramp_side import OfframpSide, offramp_sides
from experiments.peers.options import Dtype
from experiments.peers.peer_side import PeerSide, Tried, peer_side, ports, settings, sweep
from experiments.peers.plans import Machine, Prepared, prepare
from experiments.peers.processes import PEERS, PeerProcess
from experiments.peers.rounds import Hunt, Journal, at_rate, interleave
from experiments.peers.workloads import FOLDER, Name, Workload, load_workload
from offramp.jobs.provenance import provenance
from optimizer.plan_file import plan_document

Bisected = OfframpSide | PeerSide
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


def compare(asked: Asked) -> dict[str, Any]:
    """Run it all; every step is on disk as soon as it is done."""
    workload = load_workload(asked.workload)
    asked.result.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "workload": asked.workload,
        "dtype": asked.dtype,
        "inputs_per_request": asked.inputs_per_request,
        "machine": asdict(asked.machine),
        "provenance": provenance(seed=asked.seed, seconds=asked.seconds, rounds=asked.rounds),
    }
    prepared = prepare(workload, asked.dtype, asked.machine)
    print(f"{asked.workload}, {asked.dtype}: alone {prepared.stock_s * 1e3:.1f} ms, SLO {prepared.slo_s * 1e3:.0f} ms")
    result |= {
        "stock_s": prepared.stock_s,
        "slo_s": prepared.slo_s,
        "plans": {name: plan_document(plan) for name, plan in prepared.plans.items()},
        "limit_per_s": limits(workload, prepared, asked),
    }
    with load_of(workload, prepared, asked) as (load, drawn):
        swept = _sweeps(workload, prepared, load, asked, result["limit_per_s"]["stock"])
        result["sweeps"] = {name: [each.model_dump(mode="json") for each in tried] for name, tried in swept.items()}
        _save(asked, result)
        with _sides(workload, prepared, load, swept, asked) as sides:
            servers = {"offramp" if isinstance(side, OfframpSide) else side.name: side.process for side in sides}
            result["memory_bytes"] = {name: server.memory_bytes() for name, server in servers.items()}
            result["idle_cores"] = _idle_cores(servers)
            for server in servers.values():
                server.pause()
            comparison = _goodput(sides, prepared, swept, asked, result)
            _light_load(sides, prepared, comparison, asked, result)
            result["costs"] = _costs(sides, comparison, workload, drawn, asked)
            result["answers"] = _answers(sides, comparison, workload, drawn, load)
    _save(asked, result)
    return result


def limits(workload: Workload, prepared: Prepared, asked: Asked) -> dict[str, float]:
    """Inputs per second of the engine alone, by plan."""
    found = {}
    for name, plan in prepared.plans.items():
        found[name] = compute_limit(workload, plan, asked.dtype, asked.machine)
        splits = [(split.first, split.end, split.batch, len(split.ramps)) for split in plan.splits]
        print(f"engine alone, {name:<12} {found[name]:8.1f} inputs/s   splits (first, end, batch, ramps) {splits}")
    return found


@contextmanager
def load_of(
    workload: Workload, prepared: Prepared, asked: Asked
) -> Iterator[tuple[ClientOptions, list[tuple[int, ...]]]]:
    """What is sent, in a file, and which texts each body holds."""
    drawn = workload.draw(asked.inputs_per_request, num_requests=5000, seed=asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder) / "bodies.jsonl"
        bodies.write_bytes(b"\n".join(map(workload.body, drawn)) + b"\n")
        yield (
            ClientOptions(
                url="http://127.0.0.1:1",
                bodies=bodies,
                concurrency=1,
                duration_s=asked.seconds,
                warmup_s=WARM_UP_S + prepared.slo_s,
                slo_s=prepared.slo_s,
                timeout_s=max(2.0, 4 * prepared.slo_s),
            ),
            drawn,
        )


def _sweeps(
    workload: Workload, prepared: Prepared, load: ClientOptions, asked: Asked, limit_per_s: float
) -> dict[str, list[Tried]]:
    batch = max(1, asked.machine.batch_limit // asked.inputs_per_request)
    short = load.model_copy(update={"duration_s": SWEPT_S})
    if not asked.sweep_again and asked.result.is_file():
        before = json.loads(asked.result.read_text(encoding="utf-8"))["sweeps"]
        return {name: [Tried.model_validate(each) for each in before[name]] for name in asked.peers}
    # So many that they wait about as long as the SLO allows: full batches, and a bad setting shows as answers too late.
    in_time = prepared.slo_s * limit_per_s / asked.inputs_per_request
    concurrency = max(2, round(SWEPT_SHARE * in_time))
    swept = {}
    for name, port in zip(asked.peers, ports(asked.port + 1000), strict=False):
        tried = settings(workload, asked.dtype, asked.machine, slo_s=prepared.slo_s, batch=batch, port=port)
        swept[name] = sweep(name, tried, short, concurrency, partial(_print_tried, name))
    return swept


@contextmanager
def _sides(
    workload: Workload, prepared: Prepared, load: ClientOptions, swept: dict[str, list[Tried]], asked: Asked
) -> Iterator[list[Bisected]]:
    """All at once: starting them anew for every turn would cost minutes."""
    with ExitStack() as stack:
        ours = stack.enter_context(
            offramp_sides(
                workload,
                prepared,
                asked.dtype,
                asked.machine,
                load,
                port=asked.port,
            )
        )
        peers = [stack.enter_context(peer_side(name, tried[0].options, load)) for name, tried in swept.items()]
        yield [*ours, *peers]


def _idle_cores(servers: Mapping[str, PeerProcess]) -> dict[str, float]:
    """What every server takes of a core while nobody asks it anything."""
    before = {name: server.cpu_s() for name, server in servers.items()}
    time.sleep(IDLE_S)
    return {name: (server.cpu_s() - before[name]) / IDLE_S for name, server in servers.items()}


def _goodput(
    sides: Sequence[Bisected],
    prepared: Prepared,
    swept: dict[str, list[Tried]],
    asked: Asked,
    result: dict[str, Any],
) -> Comparison:
    starts = {side.name: _start_per_s(side, swept, asked, result) for side in sides}
    hunt = Hunt(
        num_rounds=asked.rounds,
        starts_per_s=starts,
        bounds=Bounds(low_per_s=min(starts.values()) / 50, high_per_s=max(starts.values()) * 50, most_probes=12),
        target=Target(slo_s=prepared.slo_s),
        seed=asked.seed,
        cold_growth=1.15,
    )
    print(PROBE_HEADER, flush=True)
    journal = Journal(on_probe=lambda probe: print(probe_line(probe), flush=True))
    comparison = interleave(sides, hunt, journal)
    result["goodput"] = comparison.document()
    _save(asked, result)
    return comparison


def _start_per_s(side: Bisected, swept: dict[str, list[Tried]], asked: Asked, result: dict[str, Any]) -> float:
    """Near where the search will end: below the compute-bound limit, or what the sweep got."""
    if isinstance(side, OfframpSide):
        return float(LIMIT_SHARE * result["limit_per_s"][side.name] / asked.inputs_per_request)
    best = swept[side.name][0]
    return max(1.0, START_SHARE * max(best.in_slo_per_s, best.answered_per_s / 2))


def _light_load(
    sides: Sequence[Bisected], prepared: Prepared, comparison: Comparison, asked: Asked, result: dict[str, Any]
) -> None:
    spreads = [comparison.spread(side.name) for side in sides if isinstance(side, PeerSide)]
    best_peer_per_s = max(spread.median for spread in spreads if spread is not None)
    print(f"all sides at {LIGHT_LOAD * best_peer_per_s:.1f} requests/s, {LIGHT_LOAD:.0%} of the best peer's goodput")
    light = at_rate(
        sides,
        LIGHT_LOAD * best_peer_per_s,
        num_rounds=asked.rounds,
        target=Target(slo_s=prepared.slo_s),
        seed=asked.seed,
        journal=Journal(on_probe=lambda probe: print(probe_line(probe), flush=True)),
    )
    result["light_load"] = light.document()
    _save(asked, result)


def _costs(
    sides: Sequence[Bisected],
    comparison: Comparison,
    workload: Workload,
    drawn: Sequence[tuple[int, ...]],
    asked: Asked,
) -> dict[str, Any]:
    """Processor seconds per input at a heavy load: of our processes by part, of each peer as a whole."""
    found: dict[str, Any] = {"steps_s": step_s(workload, [workload.body(rows) for rows in drawn])}
    for side in sides:
        spread = comparison.spread(side.name)
        if spread is None or not spread.median:
            continue
        before = cpu_s_by_part(side.process)
        result = side.measure(HEAVY_LOAD * spread.median, asked.seed)
        parts = spent(before, cpu_s_by_part(side.process), result.num_sent * asked.inputs_per_request)
        found[side.name] = {"client": result.cpu_per_request_s / asked.inputs_per_request} | (
            parts if isinstance(side, OfframpSide) else {"server": sum(parts.values())}
        )
    return found


def _answers(
    sides: Sequence[Bisected],
    comparison: Comparison,
    workload: Workload,
    drawn: Sequence[tuple[int, ...]],
    load: ClientOptions,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side in sides:
        spread = comparison.spread(side.name)
        if spread is None or not spread.median:
            continue
        path = load.bodies.with_name(f"{side.name}.answers")
        _keeping(side, path).measure(HEAVY_LOAD * spread.median, 1)
        checked: Checked = check_answers(workload, drawn, path)
        found[side.name] = checked.model_dump()
    return found


def _keeping(side: Bisected, answers: Path) -> Bisected:
    """The same side, which keeps its answers."""
    return replace(side, load=side.load.model_copy(update={"answers": answers}))


def _print_tried(name: str, one: Tried) -> None:
    options = one.options
    p99 = "-" if one.p99_s is None else f"{one.p99_s * 1e3:.0f}"
    print(
        f"swept {name:<10} {options.workers} x {options.threads} threads, batch {options.batch:>3}, wait "
        f"{options.wait_s * 1e3:.0f} ms, {options.kernel:<12} {one.in_slo_per_s:8.1f} in SLO/s, p99 {p99} ms",
        flush=True,
    )


def _save(asked: Asked, result: dict[str, Any]) -> None:
    fresh = asked.result.with_suffix(".new")
    fresh.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    fresh.replace(asked.result)
