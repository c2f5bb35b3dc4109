"""Runs the comparison of one workload: measure, plan and sweep once, then rounds in which servers take turns.

Each server runs alone on the machine. It is started, warmed up, measured, and ended before the next one starts. Its
results are written to disk as soon as it ends.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from earlyexit.backends import BackendName
from experiments.kit import write_json
from experiments.peers.client import ClientOptions
from experiments.peers.processes import PEERS, serving
from experiments.peers.sides import (
    PROBE_HEADER,
    STRATEGIES,
    Prepared,
    ServedSide,
    Swept,
    Turn,
    offramp_sides,
    prepare,
    settings,
    sustained,
    sweep,
    take_turn,
)
from experiments.peers.stock import Dtype
from experiments.peers.workloads import FOLDER, WORKLOADS, Name, Processors, Workload
from offramp.commands.output import provenance
from optimizer.plans.plan_file import plan_document
from optimizer.problems.problem_file import problem_document

OURS = tuple(STRATEGIES)
SERVICE = "offramp"
"""The server that runs all of Offramp's sides; each side is a plan."""
LIGHT_LOAD, HEAVY_LOAD = 0.3, 0.7
"""Shares of the best peer's capacity. The light rate shows latency without queues, the heavy rate processor time. All
sides get the same rates."""
SWEPT_S = 3.0
SWEPT_SHARE = 0.6
"""Workers of a closed loop, as a share of the requests that stock answers within the SLO by the planner's estimate."""
START_SHARE = 0.9
"""Start of a side's search for its sustained rate, as a share of its closed loop's rate."""
SATURATED_S = 4.0
IDLE_S = 5.0
WARM_UP_S = 2.0
"""Warm-up of every run of the client, in seconds."""
NUM_REQUESTS = 5000
"""Requests that are drawn; a longer load repeats them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """The options of a comparison."""

    workload: Name
    dtype: Dtype
    inputs_per_request: int
    machine: Processors
    seconds: float
    """Seconds of a run of the client, after its warm-up."""
    sides: tuple[str, ...] = (*OURS, *PEERS)
    backend: BackendName = "auto"
    """Backend of Offramp, as `offramp serve` chooses it; backends of peers are swept."""
    port: int = 8000
    seed: int = 0

    @property
    def result(self) -> Path:
        """The path of the result."""
        return FOLDER / f"{self.workload}-{self.dtype}-{self.inputs_per_request}.json"

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(side for side in self.sides if side in PEERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison with its workload, plans and load."""

    options: ComparisonOptions
    workload: Workload
    prepared: Prepared
    drawn: Sequence[int]
    """Rows of the texts that are sent."""
    load: ClientOptions
    """The load, without address, rate and seed."""


def compare(options: ComparisonOptions, num_rounds: int) -> dict[str, Any]:
    """Measures, plans and sweeps, then runs the rounds; writes every result to disk at once."""
    workload = WORKLOADS[options.workload]()
    prepared = prepare(workload, options.dtype, options.machine, options.backend)
    result, drawn = _document(options, prepared), workload.draw(NUM_REQUESTS * options.inputs_per_request, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        load = ClientOptions(
            url="",
            inputs=workload.write(drawn, Path(folder) / "inputs.jsonl"),
            inputs_per_request=options.inputs_per_request,
            concurrency=1,
            duration_s=options.seconds,
            warmup_s=WARM_UP_S + prepared.slo_s,
            slo_s=prepared.slo_s,
            timeout_s=max(2.0, 4 * prepared.slo_s),
        )
        bench = Comparison(options=options, workload=workload, prepared=prepared, drawn=drawn, load=load)
        swept = _sweeps(bench)
        result["sweeps"] = {name: [each.model_dump(mode="json") for each in tried] for name, tried in swept.items()}
        write_json(result, options.result)
        for _ in range(num_rounds):
            _run_round(bench, result)
    return result


def _document(options: ComparisonOptions, prepared: Prepared) -> dict[str, Any]:
    """Returns the part of a result that is known before the rounds."""
    return {
        "workload": options.workload,
        "dtype": options.dtype,
        "backend": prepared.backend,
        "inputs_per_request": options.inputs_per_request,
        "machine": options.machine._asdict(),
        "provenance": provenance(seed=options.seed, seconds=options.seconds),
        "stock_s": prepared.stock_s,
        "slo_s": prepared.slo_s,
        "problem": problem_document(prepared.problem),
        "predicted_per_s": {name: plan.predicted["rate_per_s"] for name, plan in prepared.plans.items()},
        "plans": {name: plan_document(plan) for name, plan in prepared.plans.items()},
        "rounds": [],
    }


def _workers(bench: Comparison) -> int:
    """Returns the number of workers of a closed loop, so that requests wait about as long as the SLO allows.

    Then batches are full, and bad settings show as late answers.
    """
    predicted_per_s = float(bench.prepared.plans["stock"].predicted["rate_per_s"])
    return max(2, round(SWEPT_SHARE * bench.prepared.slo_s * predicted_per_s / bench.options.inputs_per_request))


def _sweeps(bench: Comparison) -> dict[str, list[Swept]]:
    """Returns the results of every peer with each of its settings, best first."""
    options = bench.options
    batch = max(1, options.machine.batch_limit // options.inputs_per_request)
    short = bench.load.model_copy(update={"duration_s": SWEPT_S})
    swept = {}
    for name in options.peers:
        tried = settings(bench.workload, options.dtype, options.machine, batch=batch, port=options.port + 1000)
        swept[name] = sweep(name, tried, short, _workers(bench), partial(_print_setting, name))
    return swept


def _run_round(bench: Comparison, result: dict[str, Any]) -> None:
    """Measures every server once, in a rotated order, and writes each result to disk as soon as the server ends."""
    before, index = dict(result), len(result["rounds"])
    names = [*([SERVICE] if set(OURS) & set(bench.options.sides) else []), *bench.options.peers]
    round_result: dict[str, Any] = {
        "began_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg()[0],
        "sides": {},
        "servers": {},
    }
    print(PROBE_HEADER, flush=True)
    for name in _rotated(names, index):
        with _started_sides(bench, before, name) as sides:
            server = sides[0].server
            spent_s = server.cpu_s()
            time.sleep(IDLE_S)
            idle_cores = (server.cpu_s() - spent_s) / IDLE_S
            for side in _rotated(sides, index):
                round_result["sides"][side.name] = _take_turn(bench, before, side, index)
            round_result["servers"][name] = {"idle_cores": idle_cores, "memory_bytes": server.memory_bytes()}
        result["rounds"] = [*before["rounds"], round_result]
        write_json(result, bench.options.result)


def _rotated(all_of: Sequence[Any], index: int) -> list[Any]:
    first = index % len(all_of)
    return [*all_of[first:], *all_of[:first]]


@contextmanager
def _started_sides(bench: Comparison, result: Mapping[str, Any], name: str) -> Iterator[list[ServedSide]]:
    """Starts a server and yields its sides."""
    options = bench.options
    if name != SERVICE:
        best = Swept.model_validate(result["sweeps"][name][0])
        with serving(name, best.options) as server:
            yield [ServedSide(name=name, server=server, load=bench.load)]
        return
    ours = offramp_sides(bench.workload, bench.prepared, options.dtype, options.machine, bench.load, port=options.port)
    with ours as sides:
        yield [side for side in sides if side.name in options.sides]


def _take_turn(bench: Comparison, result: Mapping[str, Any], side: ServedSide, index: int) -> dict[str, Any]:
    # The best closed loop of all peers with all settings, in requests/s.
    peer_per_s = max(float(tried["in_slo_per_s"]) for of_peer in result["sweeps"].values() for tried in of_peer)
    turns = [each["sides"][side.name] for each in result["rounds"] if side.name in each["sides"]]
    before = [sustained(each) or 0.0 for each in turns]
    closed = side.saturate(_workers(bench), SATURATED_S)  # also warms it up
    turn = Turn(
        workload=bench.workload,
        drawn=bench.drawn,
        light_per_s=LIGHT_LOAD * peer_per_s,
        heavy_per_s=HEAVY_LOAD * peer_per_s,
        start_per_s=max([*before[-1:], 1.0]) if before else max(1.0, START_SHARE * closed.answered_per_s),
        is_known=bool(before),
        slo_s=bench.prepared.slo_s,
        index=index,
    )
    return take_turn(side, turn)


def _print_setting(name: str, one: Swept) -> None:
    options = one.options
    p99 = "-" if one.p99_s is None else f"{one.p99_s * 1e3:.0f}"
    print(
        f"swept {name:<10} {options.workers} x {options.threads} threads, batch {options.batch:>3}, wait "
        f"{options.wait_s * 1e3:.0f} ms, {options.kernel:<12} {one.in_slo_per_s:8.1f} in SLO/s, p99 {p99} ms",
        flush=True,
    )
