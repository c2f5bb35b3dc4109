"""The comparison: sides at equal batch limits, in turns; its figures as text and as a file."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from experiments.gpu.side import (
    Plan,
    Side,
    can_plan,
    early_exit,
    planned,
    poisson_arrivals,
    predicted_per_s,
    problem_of,
    serial_every_ramp,
    stock,
)
from experiments.gpu.workbench import BenchOptions, Workbench, no_collections
from offramp.commands.progress import provenance
from optimizer.problem import PlanProblem
from profiles.table import LatencyTable

# Measures what blocks and ramps cost on the live device, and how long a run should be.

ROUNDS = 3
FIRST_BATCHES = 8
"""Run to warm up, and to see how many inputs make a run as long as it should be."""
MOST_INPUTS = 100_000
"""Of one run: their tokens, and their objects, are all made before it."""


def measured_sizes(batches: Sequence[int]) -> tuple[int, ...]:
    """The batch limits, and every power of two below the largest: batches shrink through those."""
    largest = max(batches)
    powers = [1 << k for k in range(largest.bit_length()) if 1 << k <= largest]
    return tuple(sorted({*powers, *batches}))


def measure_costs(bench: Workbench, sizes: Sequence[int], seconds: float) -> LatencyTable:
    """By batch size, from two plans under which nobody leaves, so that all their batches are full.

    With R ramps, N blocks and t a batch's seconds: a block is stock / N, a ramp (all ramps on - stock) / R; embedding
    and head are spread over the blocks. What selecting survivors costs, or one more split, is in neither.
    """
    block_s, ramp_s = zip(*(_costs_of(bench, size, seconds) for size in sizes), strict=True)
    blocks, ramps = bench.size.num_blocks, len(bench.exits.ramps)
    return LatencyTable(
        batches=tuple(sizes), block_s_NB=np.tile(block_s, (blocks, 1)), ramp_s_EB=np.tile(ramp_s, (ramps, 1))
    )


def _costs_of(bench: Workbench, batch: int, seconds: float) -> tuple[float, float]:
    blocks, ramps = bench.size.num_blocks, bench.exits.ramps
    plans = (stock(blocks, batch), early_exit(blocks, ramps, batch))
    bench.prepare(plans)
    sides = [bench.side(plan, leaving=False) for plan in plans]
    numbers = [num_inputs(bench, side, batch, seconds) for side in sides]
    rounds = [
        [batch * saturated_s(bench, side, number) / number for side, number in zip(sides, numbers, strict=True)]
        for _ in range(ROUNDS)
    ]
    stock_s, ramps_s = (median(column) for column in zip(*rounds, strict=True))
    return stock_s / blocks, max((ramps_s - stock_s) / len(ramps), 0.0)


def num_inputs(bench: Workbench, side: Side, batch: int, seconds: float) -> int:
    """Full batches that take about these seconds; the side is warm afterwards."""
    first = FIRST_BATCHES * batch
    saturated_s(bench, side, first)
    rate_per_s = first / saturated_s(bench, side, first)
    wanted = min(int(rate_per_s * seconds), MOST_INPUTS)
    return max(wanted // batch, FIRST_BATCHES) * batch


def saturated_s(bench: Workbench, side: Side, number: int) -> float:
    """Seconds from queueing that many inputs to the last answer."""
    members = bench.members(number)
    with no_collections():
        return side.saturate(members)


# The comparison: three sides and two variants of them at equal batch limits, in turns.

LOAD = 0.8
"""Of a side's own saturated rate: what arrives while latencies are measured."""
FEWEST_ARRIVALS = 20
"""Only a dry run, which tells no figures, has so few."""
COST_SHARE = 0.2
"""Of a run's seconds: how long each of the many runs takes that measure costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One side at one batch limit."""

    model: str
    batch: int
    side: str
    splits: str
    """As `Plan` says them."""
    samples_per_s: float
    """Median of the rounds, all inputs queued."""
    rounds_per_s: tuple[float, ...]
    predicted_per_s: float
    """By the planner's cost model, on the costs measured before."""
    over_early_exit: float
    over_stock: float
    """Its rate over that side's."""
    offered_per_s: float
    """Poisson arrivals while latencies are measured."""
    p50_s: float
    p99_s: float
    """From arrival to answer."""
    mean_batch: float
    """Inputs in a batch as it starts, saturated."""
    compute_share: float
    gather_share: float
    """Of the wall time of a saturated run of its own, metered."""

    @property
    def wait_share(self) -> float:
        """What is left: the device waits for the host, or the meter."""
        return 1 - self.compute_share - self.gather_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All of one model."""

    rows: tuple[Row, ...]
    costs: LatencyTable


def run_model(bench: Workbench, report: Callable[[Row], None]) -> Outcome:
    """Measure costs, choose cuts by them, and compare; every row is reported as soon as it is known."""
    options = bench.options
    costs = measure_costs(bench, measured_sizes(options.batches), COST_SHARE * options.seconds)
    rows: list[Row] = []
    for batch in options.batches:
        for row in _compare(bench, problem_of(_up_to(costs, batch), bench.exits.ramps, bench.exits.survival), batch):
            report(row)
            rows.append(row)
    return Outcome(rows=tuple(rows), costs=costs)


def plans_of(problem: PlanProblem, batch: int) -> tuple[Plan, ...]:
    """Stock, early-exit, and cut everywhere; where it can plan also the best ramps and the best cuts."""
    blocks, ramps = problem.num_blocks, problem.ramps
    return (
        stock(blocks, batch),
        early_exit(blocks, ramps, batch),
        *(planned(problem) if can_plan() else ()),
        serial_every_ramp(blocks, ramps, batch),
    )


def _up_to(costs: LatencyTable, batch: int) -> LatencyTable:
    """Without the sizes above a batch limit."""
    last = costs.batches.index(batch) + 1
    return LatencyTable(
        batches=costs.batches[:last], block_s_NB=costs.block_s_NB[:, :last], ramp_s_EB=costs.ramp_s_EB[:, :last]
    )


def _compare(bench: Workbench, problem: PlanProblem, batch: int) -> list[Row]:
    plans = plans_of(problem, batch)
    bench.prepare(plans)
    sides = [bench.side(plan) for plan in plans]
    rates = _interleaved_rates(bench, sides, batch)
    middle = {name: median(each) for name, each in rates.items()}
    return [
        replace(
            _row(bench, side, batch, tuple(rates[side.plan.name]), predicted_per_s(problem, side.plan)),
            over_early_exit=middle[side.plan.name] / middle["early-exit"],
            over_stock=middle[side.plan.name] / middle["stock"],
        )
        for side in sides
    ]


def _interleaved_rates(bench: Workbench, sides: list[Side], batch: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {side.plan.name: [] for side in sides}
    numbers = {side.plan.name: num_inputs(bench, side, batch, bench.options.seconds) for side in sides}
    for _ in range(bench.options.rounds):
        for side in sides:
            number = numbers[side.plan.name]
            rates[side.plan.name].append(number / saturated_s(bench, side, number))
    return rates


def _row(bench: Workbench, side: Side, batch: int, rates: tuple[float, ...], predicted: float) -> Row:
    plan, rate_per_s = side.plan, median(rates)
    mean_batch = side.log.mean_batch
    latency_s_N = _latencies(bench, side, LOAD * rate_per_s)
    compute_share, gather_share = _shares(bench, plan, rate_per_s)
    return Row(
        model=bench.size.name,
        batch=batch,
        side=plan.name,
        splits=str(plan),
        samples_per_s=rate_per_s,
        rounds_per_s=rates,
        predicted_per_s=predicted,
        over_early_exit=1.0,
        over_stock=1.0,
        offered_per_s=LOAD * rate_per_s,
        p50_s=float(np.percentile(latency_s_N, 50)),
        p99_s=float(np.percentile(latency_s_N, 99)),
        mean_batch=mean_batch,
        compute_share=compute_share,
        gather_share=gather_share,
    )


def _latencies(bench: Workbench, side: Side, rate_per_s: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    number = max(int(rate_per_s * bench.options.seconds), FEWEST_ARRIVALS)
    members = bench.members(number)
    with no_collections():
        return side.serve(members, poisson_arrivals(number, rate_per_s, bench.rng))


def _shares(bench: Workbench, plan: Plan, rate_per_s: float) -> tuple[float, float]:
    """Of computing and gathering, in a run of half the seconds."""
    side, meter = bench.metered_side(plan)
    number = max(int(rate_per_s * bench.options.seconds / 2), plan.splits[0].batch)
    wall_s = saturated_s(bench, side, number)
    return meter.seconds("compute") / wall_s, meter.seconds("gather") / wall_s


# The bench's figures as text for people and as a file.

SCHEMA = 1
HEADER = (
    f"{'model':<15} {'batch':>5}  {'side':<22} {'samples/s':>9} {'p50 ms':>7} {'p99 ms':>7} {'/early':>6} "
    f"{'/stock':>6} {'compute':>7} {'gather':>6} {'wait':>5}  {'mean batch':>10}  blocks of each split (active ramps)"
)
LEGEND = (
    "samples/s: all inputs queued, median of the rounds. p50, p99: from arrival to answer, Poisson arrivals at "
    f"{LOAD:.0%} of\nthe side's own rate. /early, /stock: its rate over that of early-exit and of stock at the same "
    "batch limit.\ncompute, gather, wait: shares of the wall time of a metered saturated run."
)


def line(row: Row) -> str:
    """One row of the table."""
    return (
        f"{row.model:<15} {row.batch:>5}  {row.side:<22} {row.samples_per_s:>9.0f} {1000 * row.p50_s:>7.2f} "
        f"{1000 * row.p99_s:>7.2f} {row.over_early_exit:>6.2f} {row.over_stock:>6.2f} {row.compute_share:>7.0%} "
        f"{row.gather_share:>6.0%} {row.wait_share:>5.0%}  {row.mean_batch:>10.1f}  {row.splits}"
    )


def write_result(outcome: Outcome, options: BenchOptions, exits: str, path: Path) -> None:
    """One JSON file with all that is known of the run."""
    document = {
        "schema_version": SCHEMA,
        "provenance": provenance(seed=options.seed, **_device(options)),
        "exits": exits,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "decisions": options.decisions,
        "graphs": options.graphs,
        "latencies": f"from arrival to answer, Poisson arrivals at {LOAD:g} of the side's own samples_per_s",
        "costs": {
            "batches": outcome.costs.batches,
            "block_s": outcome.costs.block_s_NB[0].tolist(),
            "ramp_s": outcome.costs.ramp_s_EB[0].tolist(),
        },
        "rows": [asdict(row) | {"wait_share": row.wait_share} for row in outcome.rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _device(options: BenchOptions) -> dict[str, object]:
    on_gpu = options.device != "cpu"
    return {
        "device": torch.cuda.get_device_name(options.device) if on_gpu else f"CPU, {platform.machine()}",
        "driver": _driver() if on_gpu else None,
        "cuda": torch.version.cuda,
    }


def _driver() -> str | None:
    """None where nobody can say."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
