"""The bench's figures as text for people and as a file."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch

from experiments.gpu.bench import LOAD, Outcome, Row
from experiments.gpu.options import BenchOptions
from offramp.jobs.provenance import provenance

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
