"""The live side of the validation: plans on the real service, loads on the plans, and every run kept."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import aiohttp
import numpy as np

from experiments.live.emulation import best_plan, plan_of
from experiments.live.load import Driven, drive
from experiments.live.options import Bench
from experiments.live.phases import INPUTS_PER_REQUEST, Phase
from experiments.live.service import emulated_settings, served
from experiments.live.validation_runs import IDLE, Run, SplitDocument, UsageDocument, digest
from offramp.jobs.provenance import provenance
from optimizer.decision import Strategy
from optimizer.evaluate import evaluate
from optimizer.plan import Plan
from optimizer.plan_file import plan_document
from optimizer.problem import PlanProblem
from optimizer.problem_file import problem_document
from optimizer.rescore import joint_reach
from profiles.records import ExitRecords, IntArray

NUM_DRAWN = 8000
"""Inputs drawn for a load; a longer one begins with the first of them again."""
WARM_SLOS = 3.0
IDLE_SLOS = 10.0
"""How long one request at a time is asked: a few dozen, each some fifth of an SLO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One plan that is served."""

    name: str
    problem: PlanProblem
    """In wall-clock seconds."""
    plan: Plan

    @property
    def rate_per_s(self) -> float:
        """Inputs per second that the plan should do."""
        rate: float = self.plan.predicted["rate_per_s"]
        return rate


def side_of(on: Bench, strategy: Strategy) -> Side:
    """A strategy's plan, carrying what is predicted of it by the joint records: the admission starts from that."""
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    planned = best_plan(problem, strategy, on.records)
    expected = evaluate(problem, planned.stages, joint_reach(on.records, on.thresholds))
    predicted = {"rate_per_s": expected.rate_per_s, "latency_s": expected.latency_s}
    return Side(name=strategy, problem=problem, plan=replace(plan_of(planned.stages, on.spec), predicted=predicted))


def load_phase(on: Bench, side: Side, share: float, num_requests: int) -> Phase:
    """Poisson arrivals at a share of the predicted rate, some `num_requests` of them after the warm-up."""
    rate_per_s = share * side.rate_per_s
    rng = np.random.default_rng(on.options.seed)
    rows_N = rng.integers(len(on.records), size=NUM_DRAWN)
    return Phase(
        name=f"{share:g}",
        seconds=WARM_SLOS * on.emulation.wall_slo_s + num_requests * INPUTS_PER_REQUEST / rate_per_s,
        keys=tuple(on.records.sample_ids[row] for row in rows_N),
        rate_per_s=rate_per_s,
    )


def idle_phase(on: Bench, side: Side) -> Phase:
    """One request at a time; the inputs of each all leave in the same stage, the stages take turns."""
    requests = islice(cycle(_by_stage(on.records, side.plan)), NUM_DRAWN // INPUTS_PER_REQUEST)
    return Phase(
        name=IDLE,
        seconds=IDLE_SLOS * on.emulation.wall_slo_s,
        keys=tuple(on.records.sample_ids[row] for rows_N in requests for row in rows_N),
        workers=1,
    )


def _by_stage(records: ExitRecords, plan: Plan) -> list[IntArray]:
    """Per stage in which anybody leaves, the rows of one request."""
    stage_N = stages_left(plan, exits_of(records, plan))
    groups = [np.flatnonzero(stage_N == stage) for stage in range(len(plan.stages))]
    return [np.resize(rows_N, INPUTS_PER_REQUEST) for rows_N in groups if len(rows_N)]


def exits_of(records: ExitRecords, plan: Plan) -> IntArray:
    """Per record, the block that it leaves after under the plan."""
    return records.outcome(active_thresholds(plan)).exits_N


def active_thresholds(plan: Plan) -> dict[int, float]:
    """Of the ramps that are on."""
    given = None if plan.policy is None else plan.policy.thresholds
    assert isinstance(given, Mapping) or not plan.ramps, "emulated plans have a threshold per ramp"
    return {ramp: given[ramp] for ramp in plan.ramps} if isinstance(given, Mapping) else {}


def stages_left(plan: Plan, exits_N: IntArray) -> IntArray:
    """The stage that each input leaves in."""
    return np.searchsorted(np.array([stage.end for stage in plan.stages]), exits_N, side="right")


def serve_run(on: Bench, side: Side, phase: Phase) -> Run:
    """A fresh service of the plan under one load: nothing that another run has taught it is left."""
    settings = emulated_settings(on.emulation, on.model, side.plan)
    with served(settings, side.plan, port=on.options.port, front=on.options.front) as service:
        driven, stats = asyncio.run(_driven(service.url, phase, on))
    return kept_run(on, side, phase, driven, stats)


async def _driven(url: str, phase: Phase, on: Bench) -> tuple[Driven, dict[str, Any]]:
    driven = await drive(url, [phase], slo_s=on.emulation.wall_slo_s, seed=on.options.seed)
    async with aiohttp.ClientSession() as session, session.get(f"{url}/stats") as response:
        stats: dict[str, Any] = await response.json()
    return driven, stats


def kept_run(on: Bench, side: Side, phase: Phase, driven: Driven, stats: Mapping[str, Any]) -> Run:
    """What is kept of it."""
    row_of = {sample_id: row for row, sample_id in enumerate(on.records.sample_ids)}
    records = driven.records
    return Run(
        plan_name=side.name,
        load=phase.name,
        time_scale=on.emulation.time_scale,
        slo_s=on.emulation.wall_slo_s,
        warm_s=0.0 if phase.name == IDLE else WARM_SLOS * on.emulation.wall_slo_s,
        seconds=phase.seconds,
        problem=problem_document(side.problem),
        plan=plan_document(side.plan),
        records_sha256=digest(on.records),
        rows=[[row_of[driven.keys[index]] for index in record.input_indices] for record in records],
        scheduled_s=[record.scheduled_s for record in records],
        sent_s=[record.sent_s for record in records],
        done_s=[record.done_s for record in records],
        errors=[record.error for record in records],
        exits=[[prediction.exit for prediction in record.predictions] for record in records],
        splits=splits_of(stats["stages"]),
        usage=UsageDocument(machine=driven.usage.machine, ours=driven.usage.ours, client=driven.usage.client),
        provenance=provenance(seed=on.options.seed, data=(on.records.provenance or {}).get("data")),
    )


def splits_of(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[SplitDocument]:
    """What `GET /stats` tells per stage and replica, summed over replicas; ordered by first block."""
    of_split: defaultdict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for replicas in stages:
        for replica in replicas:
            for split in replica["splits"]:
                of_split[split["first"], split["end"]].append(split)
    return [_together(first, end, each) for (first, end), each in sorted(of_split.items())]


def _together(first: int, end: int, parts: Sequence[Mapping[str, Any]]) -> SplitDocument:
    batches, inputs = sum(part["batches"] for part in parts), sum(part["inputs"] for part in parts)
    capacity = parts[0]["batch"] * batches
    return SplitDocument(
        first=first,
        end=end,
        batches=batches,
        inputs=inputs,
        fill=inputs / capacity if capacity else 0.0,
        busy_s=float(sum(part["busy_s"] for part in parts)),
        dropped=sum(part["dropped"] for part in parts),
    )
