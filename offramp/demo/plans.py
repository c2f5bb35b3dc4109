"""Plans for processors of this machine, measured just now, and for emulated accelerators by published times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deployments.settings import EmulatedSettings
from earlyexit.backends import BackendName
from earlyexit.codecs import find_codec
from earlyexit.network.boundary import FloatName
from earlyexit.network.store import read_card
from offramp.commands.jobs import ProfileJob
from offramp.commands.machine import ProcessorClock, processor_problem
from offramp.commands.profile import profile_model
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.catalogue import published_profile
from profiles.records import ExitRecords
from profiles.table import LatencyTable

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
    backend: BackendName = "torch",
) -> tuple[PlanProblem, BackendName]:
    """The most that this machine does within a second, by a profile that is measured now; and its backend."""
    batches = tuple(2**k for k in range(machine.batch_limit.bit_length()))
    encoded = find_codec(read_card(folder).codec, folder).encode(texts, truncate=True)
    lengths = (round(np.mean([each.length for each in encoded])),)
    job = ProfileJob(dtype=dtype, backend=backend, batches=batches, lengths=lengths, threads=machine.threads, repeats=5)
    clock = ProcessorClock() if machine.threads == 1 else None  # of several threads it would be the sum
    profile, _ = profile_model(folder, job, clock=clock)
    ramps = tuple(sorted(thresholds))
    return processor_problem(profile, records.nested_survival(thresholds), ramps, machine.workers), profile.backend


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
