"""The demo's load: the same requests to one service that follows three plans in turns.

`stock` runs every input to the end, `early-exit` has all ramps in one split, whose batch shrinks, and `planned` is the
planner's: survivors are fused into new batches between its splits. A closed loop finds what the planned one can do, and
warms all of them up; then each gets that as an open loop: far below it batches would stay small.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from earlyexit.network.store import read_card
from experiments.demo.prepare import Prepared
from experiments.kit import show
from experiments.peers.client import ClientOptions, LoadResult
from experiments.peers.plans import Machine
from experiments.peers.plans import Prepared as Planned
from experiments.peers.sides import ServedSide, offramp_sides
from experiments.peers.workloads import Workload
from optimizer.plan import Plan

SIDES = ("stock", "early-exit", "planned")
MACHINE = Machine(workers=2, threads=1, batch_limit=16)
SLO_FACTOR = 30.0
"""The SLO, in runs of the full model on one text: batches of 16 fit into half of it, wherever this is run."""
CLIENTS = 96
"""Of the closed loop: more than all batches hold."""
CLOSED_S, OPEN_S, AGAIN_S, WARM_UP_S = 4.0, 10.0, 1.0, 1.5
SEED = 0
COLUMNS = ("plan", "in time", "p50 ms", "p99 ms", "CPU ms per answer", "blocks run", "as full model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one plan made of the load."""

    plan: Plan
    result: LoadResult
    cpu_per_answer_s: float
    """Of all processes of the service."""
    batch_at_block: tuple[float, ...]
    """Mean number of inputs in a batch as it runs through each block."""
    fill: Mapping[int, tuple[int, float]]
    """By a split's first block: batches, and how full they were."""
    mean_blocks: float
    agreement: float
    """Share of the answers that are the full model's."""

    @property
    def in_time(self) -> float:
        """Share of the requests that were answered within the SLO."""
        return self.result.goodput_per_s * self.result.duration_s / max(1, self.result.num_counted)


def loaded(workload: Workload, prepared: Prepared, planned: Planned, *, port: int) -> dict[str, Ran]:
    """Serve, load every plan in turn, and end the service; by plan."""
    drawn = workload.draw(len(workload.texts), SEED)
    with TemporaryDirectory() as folder:
        load = ClientOptions(
            url="",
            inputs=workload.write(drawn, Path(folder) / "inputs.jsonl"),
            truncate=True,
            concurrency=1,
            duration_s=OPEN_S,
            warmup_s=WARM_UP_S,
            slo_s=planned.slo_s,
            timeout_s=4 * planned.slo_s,
        )
        with offramp_sides(workload, planned, "float32", MACHINE, load, port=port) as served:
            sides = {side.name: side for side in served}
            capacity = {name: sides[name].saturate(CLIENTS, CLOSED_S).answered_per_s for name in SIDES}
            print(f"a closed loop of {CLIENTS}: " + ", ".join(f"{name} {capacity[name]:.0f}/s" for name in SIDES))
            rate_per_s = capacity[SIDES[-1]]
            print(f"now each of them at {rate_per_s:.0f} requests/s, for {OPEN_S:g} s")
            return {
                name: _ran(sides[name], planned.plans[name], rate_per_s, Path(folder), _full_model(prepared, drawn))
                for name in SIDES
            }


def _full_model(prepared: Prepared, drawn: Sequence[int]) -> list[str]:
    """What the full model says of every text that is sent."""
    names = read_card(prepared.folder).label_names
    return [names[label] for label in prepared.expected.answers()[drawn, -1].tolist()]


def _ran(side: ServedSide, plan: Plan, rate_per_s: float, folder: Path, full_model: Sequence[str]) -> Ran:
    answers = folder / f"{side.name}.answers"
    side.saturate(CLIENTS, AGAIN_S)  # replicas follow a plan, and count its batches, from its first call on
    counts, spent_s = _counts(side.server.url), side.server.cpu_s()
    result = replace(side, load=side.load.model_copy(update={"answers": answers})).measure(rate_per_s, SEED)
    spent_s, counts = side.server.cpu_s() - spent_s, _since(counts, _counts(side.server.url))
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    exits = Counter[int](row["exit"] for row in rows)
    counted_share = result.num_counted / result.num_sent  # the rest is the warm-up's
    return Ran(
        plan=plan,
        result=result,
        cpu_per_answer_s=spent_s * counted_share / max(1, result.num_answered),
        batch_at_block=batch_at_block(plan, counts, exits),
        fill={
            split.first: (batches, inputs / (batches * split.batch) if batches else 0.0)
            for split in plan.splits
            for batches, inputs in [counts[split.first]]
        },
        mean_blocks=sum((exit_block + 1) * count for exit_block, count in exits.items()) / max(1, len(rows)),
        agreement=sum(row["label"] == full_model[row["input"]] for row in rows) / max(1, len(rows)),
    )


def batch_at_block(plan: Plan, counts: Mapping[int, tuple[int, int]], exits: Mapping[int, int]) -> tuple[float, ...]:
    """Mean batch at every block: what a split began with, times the share of it that its ramps have left."""
    reach = [sum(count for exit_block, count in exits.items() if exit_block >= at) for at in range(plan.num_blocks)]
    return tuple(
        inputs / max(1, batches) * reach[block] / max(1, reach[split.first])
        for split in plan.splits
        for batches, inputs in [counts[split.first]]
        for block in range(split.first, split.end)
    )


def _counts(url: str) -> dict[int, tuple[int, int]]:
    """By a split's first block: batches and inputs of all replicas so far."""
    stats: dict[str, Any] = httpx.get(f"{url}/stats", timeout=10.0).raise_for_status().json()
    found: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for replicas in stats["stages"]:
        for split in (split for replica in replicas for split in replica["splits"]):
            batches, inputs = found[split["first"]]
            found[split["first"]] = (batches + split["batches"], inputs + split["inputs"])
    return found


def _since(before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    return {first: (after[first][0] - before[first][0], after[first][1] - before[first][1]) for first in after}


def tell(ran: Mapping[str, Ran], slo_s: float) -> None:
    """Print the table."""
    rows = [
        (
            name,
            f"{each.in_time:.1%}",
            *(None if seconds is None else 1e3 * seconds for seconds in (each.result.p50_s, each.result.p99_s)),
            1e3 * each.cpu_per_answer_s,
            each.mean_blocks,
            f"{each.agreement:.2%}",
        )
        for name, each in ran.items()
    ]
    show(f"the same requests to all three, to be answered within {1e3 * slo_s:.0f} ms", COLUMNS, rows)
