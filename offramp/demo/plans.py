"""Plans for processors of this machine, measured just now, and for emulated accelerators by published times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deployments.settings import EmulatedSettings
from earlyexit.codecs.text import TextTokenizer
from earlyexit.errors import PlanError
from earlyexit.network.boundary import FloatName
from earlyexit.network.store import read_card
from offramp.commands.jobs import ProfileJob
from offramp.commands.profile import profile_model
from optimizer.decision import NoPlan, Strategy
from optimizer.plan import Plan, PolicySpec
from optimizer.planner import solve
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.rescore import joint_reach, rechosen, rescore
from profiles.catalogue import published_profile
from profiles.records import ExitRecords
from profiles.table import LatencyTable

SLACK = 0.5
"""Of the SLO, what plans for processors leave for queues. E3 has 0.2 (section 4), for bursts; but an input that arrives
at a busy replica waits for the batch under way, then for its own: both must fit (so Nexus, SOSP'19, takes batches of
half the SLO). On CPUs, where a batch of eight takes six times as long as one, that is what decides."""
HIDDEN_BYTES: Mapping[FloatName, int] = {"float32": 4, "bfloat16": 2}
V100 = "emulated:V100"
NUM_V100, V100_BATCH, TIME_SCALE = 16, 8, 40.0
"""E3's cluster and largest batch (section 5.1.1); an emulated second takes so many seconds."""
SLOWER = 6.5
"""TensorRT's V100 takes 1.23 ms for BERT-base at batch 1. E3 does not print its V100's time; 8 ms is an estimate."""
V100_SLO_S = 0.05
"""Emulated."""
LENGTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """What every side may use of this machine."""

    workers: int = 2
    """Processes with a copy of the model."""
    threads: int = 1
    """Of each."""
    batch_limit: int = 32


def measured_problem(
    folder: Path,
    texts: Sequence[str],
    records: ExitRecords,
    thresholds: Mapping[int, float],
    machine: Processors,
    dtype: FloatName,
    *,
    repeats: int = 5,
) -> PlanProblem:
    """The most that this machine does, by a profile that is measured now, in a second."""
    length = mean_length(folder, texts)
    batches = tuple(2**k for k in range(machine.batch_limit.bit_length()))
    job = ProfileJob(dtype=dtype, batches=batches, lengths=(length,), threads=machine.threads, repeats=repeats)
    profile, _ = profile_model(folder, job)
    ramps = tuple(sorted(thresholds))
    table = profile.at(length)
    own = replace(table, ramp_s_EB=table.ramp_s_EB[[profile.ramps.index(ramp) for ramp in ramps]])
    return PlanProblem(
        num_blocks=profile.num_blocks,
        ramps=ramps,
        survival_N=records.nested_survival(thresholds),
        latency={"cpu": own},
        devices={"cpu": Supply(count=machine.workers, usd_per_hour=0.0)},
        link=Link(bandwidth_bytes_per_s=1e9, delay_s=0.002),
        bytes_per_sample_N=(float(HIDDEN_BYTES[dtype] * length),) * profile.num_blocks,
        slo=Slo(latency_s=1.0, slack=SLACK),
        objective=MaximizeRate(),
    )


def mean_length(folder: Path, texts: Sequence[str]) -> int:
    """Tokens of a text as the model sees it."""
    tokenizer = TextTokenizer.load(folder, read_card(folder).max_length)
    return round(np.mean([each.length for each in tokenizer.encode(texts, truncate=True)]))


def stock_s(problem: PlanProblem, batch: int = 1) -> float:
    """Seconds of the whole model on a full batch, on the first accelerator type."""
    return float(next(iter(problem.latency.values())).blocks_at(np.array(float(batch))).sum())


def with_slo(problem: PlanProblem, latency_s: float) -> PlanProblem:
    """The same within another time."""
    return replace(problem, slo=replace(problem.slo, latency_s=latency_s))


def v100_table(num_blocks: int, num_ramps: int) -> LatencyTable:
    """A model of so many of BERT-base's blocks on a V100, in emulated seconds, up to the largest batch."""
    table = published_profile("bert-base", "V100").at(LENGTH)
    known = table.batches.index(V100_BATCH) + 1
    return LatencyTable(
        batches=table.batches[:known],
        block_s_NB=SLOWER * np.resize(table.block_s_NB[:, :known], (num_blocks, known)),
        ramp_s_EB=SLOWER * np.resize(table.ramp_s_EB[:, :known], (num_ramps, known)),
    )


def emulated_problem(records: ExitRecords, thresholds: Mapping[int, float]) -> PlanProblem:
    """The most that 16 V100 do with a model of so many blocks, in wall-clock seconds."""
    table = v100_table(records.num_blocks, len(thresholds))
    return PlanProblem(
        num_blocks=records.num_blocks,
        ramps=tuple(sorted(thresholds)),
        survival_N=records.nested_survival(thresholds),
        latency={
            V100: replace(table, block_s_NB=TIME_SCALE * table.block_s_NB, ramp_s_EB=TIME_SCALE * table.ramp_s_EB)
        },
        devices={V100: Supply(count=NUM_V100)},
        link=Link(bandwidth_bytes_per_s=1e15, delay_s=0.01),
        bytes_per_sample_N=(0.0,) * records.num_blocks,
        slo=Slo(latency_s=TIME_SCALE * V100_SLO_S),
        objective=MaximizeRate(),
    )


def emulated_settings(num_blocks: int, num_ramps: int) -> dict[str, EmulatedSettings]:
    """The same times for a service of a model with so many ramps."""
    table = v100_table(num_blocks, num_ramps)
    of_table = {"block_s": table.block_s_NB.tolist(), "ramp_s": table.ramp_s_EB.tolist()}
    return {V100: EmulatedSettings(batch=list(table.batches), time_scale=TIME_SCALE, **of_table)}


def plan_for(problem: PlanProblem, strategy: Strategy, policy: PolicySpec, records: ExitRecords) -> Plan:
    """The strategy's plan; of its good plans the one that the records prefer. Raises PlanError where there is none."""
    decision = solve(problem, strategy)
    if isinstance(decision, NoPlan):
        raise PlanError(f"no {strategy} plan keeps {problem.slo.limit_s:.3g} s here: {decision.binding}")
    assert isinstance(policy.thresholds, Mapping)
    chosen = rechosen(problem, decision, rescore(problem, decision, joint_reach(records, policy.thresholds)))
    predicted = {"rate_per_s": chosen.figures.rate_per_s, "latency_s": chosen.figures.latency_s}
    return Plan(stages=chosen.stages, shares=chosen.figures.shares, policy=policy, predicted=predicted)
