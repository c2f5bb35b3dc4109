"""A cascade under load: what kills of replicas of either network, and changes between cascade and single, cost.

    python -m experiments.live.crossings [--parts kills,changes] [--seconds 60]

EMULATED V100s; a small network of six blocks, of 60 % of BERT-base's hidden size, stands before it, and half of the
inputs leave at its end. Load at 60 % of what the large network alone does on its accelerators. Kills: kill -9 of one
replica of each network, twice. Changes: cascade, single, both on one device, and back, one every `--every` seconds.
Printed: answers, errors, lost requests, whether every answer is one that the chain's records give, and how long inputs
waited at the ingress to cross (`experiments.costs.crossings` has that alone, by texts and survivors). Writes
runs/live/crossings.json. Minutes: 3.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from earlyexit.split import Split
from experiments.data import RUNS
from experiments.kit import show
from experiments.live.changes import Change, change
from experiments.live.emulation import Bench, Emulation, emulated
from experiments.live.meter import replica_pids
from experiments.live.model import NUM_MADE_UP, card, made_up
from experiments.live.scenario import EMULATED, Played, judged, parser, played, write
from experiments.live.service import Service, hand_control
from offramp.jobs.chaining import chain_models
from optimizer.calibration_file import CALIBRATION_FILE, RECORDS_FILE
from optimizer.plan import Plan, Stage
from optimizer.problem import PlanProblem
from profiles.records import ExitRecords
from profiles.table import LatencyTable

FOLDER = RUNS / "emulated" / "cascade"
BLOCKS = (6, 12)
NETWORKS = (6, 18)
SMALLER = 0.36
"""A block's seconds in the small network over the large one's: a hidden size of 60 %, squared."""
SURVIVAL = (*([1.0] * 6), *([0.5] * 4), *([0.4] * 4), *([0.3] * 4))
RAMPS = (5, 9, 13)
"""Of the plans: the end of the small network, and two inside the large one."""
REPLICAS = (2, 4)
SHARE_OF_CAPACITY = 0.6
WARM_S = 5.0
KILLS_S = (10.0, 30.0)
BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEmulation(Emulation):
    """BERT-base behind half as many, smaller blocks."""

    def problem(self, survival: tuple[float, ...], *, time_scale: float | None = None) -> PlanProblem:
        large = Emulation.problem(self, (1.0,) * BLOCKS[1], time_scale=time_scale)
        num_bytes = large.bytes_per_sample_N
        return replace(
            large,
            num_blocks=NETWORKS[-1],
            ramps=tuple(range(NETWORKS[-1] - 1)),
            survival_N=survival,
            latency={device: _longer(table) for device, table in large.latency.items()},
            bytes_per_sample_N=(*num_bytes[: BLOCKS[0] - 1], 0.0, *num_bytes),
            networks=NETWORKS,
        )


def _longer(table: LatencyTable) -> LatencyTable:
    """Of the chain: every block of the small network is as the large one's first."""
    block_s = np.repeat(SMALLER * table.block_s_NB[:1], BLOCKS[0], axis=0)
    ramp_s = np.repeat(SMALLER * table.ramp_s_EB[:1], BLOCKS[0], axis=0)
    return replace(
        table,
        block_s_NB=np.concatenate([block_s, table.block_s_NB]),
        ramp_s_EB=np.concatenate([ramp_s, table.ramp_s_EB]),
    )


def ensure_chain(folder: Path = FOLDER) -> ExitRecords:
    """A chain's folder, its networks random and tiny beside it, and its made-up records."""
    if (folder / RECORDS_FILE).is_file():
        return ExitRecords.load(folder / RECORDS_FILE)
    from experiments.models import tiny_model  # torch, which a process that only loads a service need not import

    members = []
    for place, num_blocks in enumerate(BLOCKS):
        member = folder.parent / f"cascade-m{place}"
        tiny_model(member, name=f"m{place}", num_blocks=num_blocks, hidden_size=8, max_length=128 - place)
        alone = made_up(SURVIVAL[-num_blocks:], num_inputs=NUM_MADE_UP, rng=np.random.default_rng(0))
        (member / CALIBRATION_FILE).write_text(card(alone).model_dump_json(indent=2) + "\n", encoding="utf-8")
        members.append(member)
    chain_models(members, folder, name="emulated-cascade")
    records = made_up(SURVIVAL, num_inputs=NUM_MADE_UP, rng=np.random.default_rng(0))
    (folder / CALIBRATION_FILE).write_text(card(records).model_dump_json(indent=2) + "\n", encoding="utf-8")
    records.save(folder / RECORDS_FILE)
    return records


def split_of(first: int, end: int, on: Bench) -> Split:
    """One split, with those of the ramps that are inside."""
    batch = min(BATCH, on.emulation.batch_limit)
    return Split(first=first, end=end, batch=batch, ramps=tuple(ramp for ramp in RAMPS if first <= ramp < end))


def plan_of(on: Bench, *stages: tuple[int, tuple[tuple[int, int], ...]]) -> Plan:
    """Stages of so many replicas, each with splits from here to there."""
    made = tuple(
        Stage(
            device=emulated("V100"),
            replicas=replicas,
            splits=tuple(split_of(first, end, on) for first, end in splits),
        )
        for replicas, splits in stages
    )
    return Plan(stages=made, policy=on.spec, networks=NETWORKS)


def plans(on: Bench) -> dict[str, Plan]:
    """By name, in the order of the changes."""
    small, large = REPLICAS
    return {
        "cascade": plan_of(on, (small, ((0, 6),)), (large, ((6, 18),))),
        "single": plan_of(on, (small + large, ((6, 18),))),
        "both on one device": plan_of(on, (small + large, ((0, 6), (6, 10), (10, 18)))),
        "large in two stages": plan_of(on, (large, ((6, 10),)), (small, ((10, 18),))),
    }


def kills(on: Bench, rate_per_s: float) -> dict[str, Any]:
    """One replica of each network, kill -9, twice."""

    async def event(service: Service) -> Any:
        began_s, killed = time.monotonic(), list[int]()
        for at_s in KILLS_S:
            await asyncio.sleep(max(0.0, at_s - (time.monotonic() - began_s)))
            pids = replica_pids(service.app)
            for slot in (await service.current())["slots"]:
                os.kill(pids[slot][0], signal.SIGKILL)
                killed.append(pids[slot][0])
        return killed

    result = run_load(on, "kills", rate_per_s, event)
    told = report(on, "kills", rate_per_s, result)
    return {"killed": len(result.meanwhile), **told}


def changes(on: Bench, rate_per_s: float) -> dict[str, Any]:
    """To every plan in turn, and back."""

    async def event(service: Service) -> list[Change]:
        began_s, done = time.monotonic(), list[Change]()
        await asyncio.sleep(WARM_S)
        turns = list(plans(on).items())
        while time.monotonic() - began_s < on.options.seconds - 2 * on.options.every:
            kind, plan = turns[(len(done) + 1) % len(turns)]
            done.append(await change(service, kind, plan, began_s))
            await asyncio.sleep(on.options.every)
        return done

    result = run_load(on, "changes", rate_per_s, event)
    told = report(on, "changes", rate_per_s, result)
    rows = [(each.kind, f"{each.until_s - each.from_s:.1f}", each.error or "none") for each in result.meanwhile]
    show("changes", ("to", "s", "error"), rows)
    return {"changes": result.meanwhile, **told}


def run_load(on: Bench, name: str, rate_per_s: float, event: Any) -> Played:
    """The cascade in force at first."""
    control = hand_control(on.problem, on.spec, state=f"crossings-{name}")
    phases = [on.steady(name, on.options.seconds, rate_per_s)]
    return played(on, plans(on)["cascade"], phases, control, event=event, after=crossed, probe_share=0.0)


async def crossed(service: Service) -> dict[str, Any]:
    """What the ingress says of crossings, over HTTP."""
    import httpx

    async with httpx.AsyncClient() as client:
        found = (await client.get(f"{service.url}/stats")).raise_for_status().json()
    return dict(found["crossings"])


def report(on: Bench, name: str, rate_per_s: float, result: Played) -> dict[str, Any]:
    """Print a part and give its figures."""
    windows = {"whole": [(0.0, on.options.seconds)]}
    figures = judged(on, result.driven, windows, title=f"{name}, {rate_per_s:.0f} inputs/s")
    after = result.after
    print(f"crossings {after['inputs']}: p50 {1e3 * after['p50_s']:.2f} ms, p99 {1e3 * after['p99_s']:.2f} ms")
    return {"crossings": after, **figures}


def main() -> None:
    """Measure and print."""
    options = parser("crossings", __doc__, time_scale=20.0, parts="kills,changes", seconds=60.0, every=6.0).parse_args()
    options.model = FOLDER
    records = ensure_chain()
    emulation = ChainEmulation(counts={"V100": sum(REPLICAS)}, time_scale=options.time_scale)
    on = Bench(emulation=emulation, model=FOLDER, records=records, options=options)
    alone = plan_of(on, (REPLICAS[1], ((6, 18),)))
    rate_per_s = SHARE_OF_CAPACITY * on.predicted(alone).rate_per_s
    print(f"{EMULATED} {emulation.time_scale:g} times; SLO {emulation.wall_slo_s:g} s")
    parts = {"kills": kills, "changes": changes}
    write("crossings", {part: parts[part](on, rate_per_s) for part in options.parts.split(",")})


if __name__ == "__main__":
    main()
