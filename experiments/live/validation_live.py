"""The live side of the validation: plans on the real service, loads on the plans, and every run kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from typing import Any

import aiohttp
import numpy as np

from experiments.live.emulation import Bench
from experiments.live.load import INPUTS_PER_REQUEST, Driven, Phase
from experiments.live.scenario import played
from experiments.live.service import Service
from experiments.live.validation_runs import IDLE, Run, SplitDocument, digest, exits_of, stages_left
from offramp.jobs.provenance import provenance
from optimizer.plan import Plan, Stage
from optimizer.plan_file import plan_document
from optimizer.problem_file import problem_document
from profiles.records import ExitRecords

NUM_DRAWN = 8000
"""Inputs drawn for a load; a longer one begins with the first of them again."""
WARM_SLOS = 3.0
IDLE_SLOS = 10.0
"""How long one request at a time is asked: a few dozen, each some fifth of an SLO."""


def plan_of(on: Bench, stages: tuple[Stage, ...]) -> Plan:
    """A plan, carrying what is predicted of it by the joint records: the admission starts from that."""
    plan = on.plan(stages)
    expected = on.predicted(plan)
    return replace(plan, predicted={"rate_per_s": expected.rate_per_s, "latency_s": expected.latency_s})


def load_phase(on: Bench, plan: Plan, share: float, num_requests: int) -> Phase:
    """Poisson arrivals at a share of the predicted rate, some `num_requests` of them after the warm-up."""
    rate_per_s = share * plan.predicted["rate_per_s"]
    rng = np.random.default_rng(on.options.seed)
    rows_N = rng.integers(len(on.records), size=NUM_DRAWN)
    return Phase(
        name=f"{share:g}",
        seconds=WARM_SLOS * on.emulation.wall_slo_s + num_requests * INPUTS_PER_REQUEST / rate_per_s,
        keys=tuple(on.records.sample_ids[row] for row in rows_N),
        rate_per_s=rate_per_s,
    )


def idle_phase(on: Bench, plan: Plan) -> Phase:
    """One request at a time; the inputs of each all leave in the same stage, the stages take turns."""
    requests = islice(cycle(_by_stage(on.records, plan)), NUM_DRAWN // INPUTS_PER_REQUEST)
    return Phase(
        name=IDLE,
        seconds=IDLE_SLOS * on.emulation.wall_slo_s,
        keys=tuple(on.records.sample_ids[row] for rows_N in requests for row in rows_N),
        workers=1,
    )


def _by_stage(records: ExitRecords, plan: Plan) -> list[Any]:
    """Per stage in which anybody leaves, the rows of one request."""
    stage_N = stages_left(plan, exits_of(records, plan))
    groups = [np.flatnonzero(stage_N == stage) for stage in range(len(plan.stages))]
    return [np.resize(rows_N, INPUTS_PER_REQUEST) for rows_N in groups if len(rows_N)]


def serve_run(on: Bench, name: str, plan: Plan, phase: Phase) -> Run:
    """A fresh service of the plan under one load: nothing that another run has taught it is left."""
    result = played(on, plan, [phase], after=_stats)
    return kept_run(on, name, plan, phase, result.driven, result.after)


async def _stats(service: Service) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{service.url}/stats") as response:
        stats: dict[str, Any] = await response.json()
        return stats


def kept_run(on: Bench, name: str, plan: Plan, phase: Phase, driven: Driven, stats: Mapping[str, Any]) -> Run:
    """What is kept of it."""
    row_of = {sample_id: row for row, sample_id in enumerate(on.records.sample_ids)}
    records = driven.records
    return Run(
        plan_name=name,
        load=phase.name,
        time_scale=on.emulation.time_scale,
        slo_s=on.emulation.wall_slo_s,
        warm_s=0.0 if phase.name == IDLE else WARM_SLOS * on.emulation.wall_slo_s,
        seconds=phase.seconds,
        problem=problem_document(on.problem),
        plan=plan_document(plan),
        records_sha256=digest(on.records),
        rows=[[row_of[driven.keys[index]] for index in record.input_indices] for record in records],
        scheduled_s=[record.scheduled_s for record in records],
        sent_s=[record.sent_s for record in records],
        done_s=[record.done_s for record in records],
        errors=[record.error for record in records],
        exits=[[prediction.exit for prediction in record.predictions] for record in records],
        splits=splits_of(stats["stages"]),
        usage=asdict(driven.usage),
        provenance=provenance(seed=on.options.seed, data=(on.records.provenance or {}).get("data")),
    )


def splits_of(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[SplitDocument]:
    """What `GET /stats` tells per stage and replica, summed over replicas; ordered by first block."""
    of_split: defaultdict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for split in (split for replicas in stages for replica in replicas for split in replica["splits"]):
        of_split[split["first"], split["end"]].append(split)
    return [_together(first, end, parts) for (first, end), parts in sorted(of_split.items())]


def _together(first: int, end: int, parts: Sequence[Mapping[str, Any]]) -> SplitDocument:
    sums = {name: sum(part[name] for part in parts) for name in ("batches", "inputs", "busy_s", "dropped")}
    capacity = parts[0]["batch"] * sums["batches"]
    return SplitDocument(first=first, end=end, fill=sums["inputs"] / capacity if capacity else 0.0, **sums)
