"""What a model costs on this machine: a profile that is measured once, in seconds, and kept with the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from earlyexit.clock import Clock, MonotonicClock
from earlyexit.network.store import ModelCard, read_card
from offramp.commands.jobs import ProfileJob
from offramp.commands.profile import cpu_name, open_bench, splits_of
from optimizer.calibration_file import RECORDS_FILE
from profiles.latency import LatencyProfile
from profiles.records import ExitRecords

Say = Callable[[str], None]
KEPT_FILE = "profile.json"
MOST_S = 20.0
"""Seconds that measuring takes at most, beside loading the model."""
BATCHES = (1, 2, 4, 8, 16)
MOST_ROUNDS = 6
"""Of all batch sizes; the first one only warms up."""
TYPICAL_TOKENS = 16
"""Of an input, where no exit records tell the mean."""
ASKED = "asked"
"""In the provenance of a kept profile: what it is of, but for the weights, which change no times."""


def kept_profile(folder: Path, job: ProfileJob, say: Say, clock: Clock | None = None) -> LatencyProfile:
    """Returns the profile that is kept with a model; measures it where there is none, or one of other circumstances.

    Batch sizes and repeats are not the job's but what `MOST_S` leaves time for; lengths default to the mean length.
    """
    path, card = folder / KEPT_FILE, read_card(folder)
    asked = {
        "processor": cpu_name(),
        "cores": num_cores(),
        "ramps": list(card.ramps),
        **job.model_dump(mode="json", include={"backend", "dtype", "threads"}),
    }
    kept = LatencyProfile.load(path) if path.is_file() else None
    if kept is not None and kept.provenance.get(ASKED) == asked:
        say(f"profile: {path}, of {kept.provenance['created_at']}")
        return kept
    clock = clock or MonotonicClock()
    began_s = clock.now_s()
    profile = _measured(folder, job.model_copy(update={"lengths": job.lengths or (mean_tokens(folder, card),)}), clock)
    why = "" if kept is None else ", for the one there was of another machine, of other ramps or of other options"
    profile = replace(profile, provenance={**profile.provenance, ASKED: asked})
    profile.save(path)
    say(f"profile: measured in {clock.now_s() - began_s:.0f} s{why}; kept in {path}")
    return profile


def _measured(folder: Path, job: ProfileJob, clock: Clock) -> LatencyProfile:
    """Measures as many batch sizes and rounds as there is time for, by what single inputs take."""
    with open_bench(folder, job) as bench:
        single = job.model_copy(update={"batches": (1,), "repeats": 1})
        bench.time(splits_of(single, bench.model), clock)
        began_s = clock.now_s()
        bench.time(splits_of(single, bench.model), clock)
        rounds = (MOST_S / 2) / max(1e-9, clock.now_s() - began_s)  # of single inputs, of which one warmed up
        batches = tuple(batch for batch, sum_ in zip(BATCHES, accumulate(BATCHES), strict=True) if 2 * sum_ <= rounds)
        repeats = min(MOST_ROUNDS, int(rounds / sum(batches or (1,)))) - 1
        job = job.model_copy(update={"batches": batches or (1,), "repeats": max(1, repeats)})
        bench = replace(bench, job=job)
        return bench.profile(bench.time(splits_of(job, bench.model), clock))


def mean_tokens(folder: Path, card: ModelCard) -> int:
    """Tokens of an input, by the exit records of a calibration where there are some."""
    path = folder / RECORDS_FILE
    tokens_N = ExitRecords.load(path).tokens_N if path.is_file() else None
    mean = TYPICAL_TOKENS if tokens_N is None else round(float(tokens_N.mean()))
    return max(1, min(mean, card.max_length))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
