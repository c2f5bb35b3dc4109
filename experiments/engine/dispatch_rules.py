"""Work-conserving or deferred dispatch: one device, the live engine on a manual clock.

    python -m experiments.engine.dispatch_rules

A stage of two splits, half of the inputs leave after the first; a batch of b takes fixed_s + per_input_s * b, twice as
long in the second split. Poisson arrivals, SLO 100 ms, 20,000 inputs, seed 0. Simulated, seconds on any machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.clock import ManualClock
from earlyexit.engine import BatchEngine, Dispatch
from earlyexit.member import Member
from earlyexit.split import Split
from experiments.kit import show

SLO_S = 0.1
RULES: tuple[Dispatch, ...] = ("work-conserving", "deferred")
BATCH = 16
NUM_INPUTS = 20_000
SPLITS = (Split(first=0, end=2, batch=BATCH, ramps=(1,)), Split(first=2, end=6, batch=BATCH))
STAYS = 0.5
DEVICES = {"GPU-like (5 ms + 0.3 ms per input)": (0.005, 0.0003), "CPU-like (1 ms + 2 ms per input)": (0.001, 0.002)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTimes:
    """Known times of a device; learns nothing."""

    fixed_s: float
    per_input_s: float

    def batch_s(self, split: Split, tokens: float) -> float:
        """Seconds of a batch of inputs without tokens."""
        return (self.fixed_s + self.per_input_s * tokens) * (1 if split.first == 0 else 2)

    def mean_tokens(self, split: Split) -> float:
        """Inputs have none."""
        return 1.0

    def soonest_s(self, split: Split) -> float:
        """Seconds of a batch of one."""
        return self.batch_s(split, 1)

    def observe(self, split: Split, size: int, tokens: int, first_s: float, total_s: float) -> None:
        """Nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run gave."""

    latencies_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    dropped: int
    fills: dict[int, float]


def simulate(times: LinearTimes, dispatch: Dispatch, arrivals_s: Sequence[float], seed: int) -> Outcome:
    """Every arrival through the engine; a device runs one batch at a time."""
    rng = np.random.default_rng(seed)
    clock = ManualClock()
    engine: BatchEngine[float] = BatchEngine(SPLITS, times, dispatch=dispatch)
    waiting = [(at_s, index) for index, at_s in enumerate(arrivals_s)]
    heapq.heapify(waiting)
    latencies_s: list[float] = []
    dropped = 0
    while True:
        _admit(engine, waiting, clock.now_s())
        choice = engine.choose(clock.now_s())
        dropped += len(choice.dropped)
        if choice.batch is None:
            next_s = _next_event_s(waiting, choice.wake_s)
            if next_s is None:
                break
            clock.advance(max(0.0, next_s - clock.now_s()))
            continue
        total_s = times.batch_s(choice.batch.split, len(choice.batch.members))
        clock.advance(total_s)
        _admit(engine, waiting, clock.now_s())  # what came while the device was busy
        stays = rng.random(len(choice.batch.members)) < STAYS
        if choice.batch.split.first == 0:
            survivors = [member for member, stay in zip(choice.batch.members, stays, strict=True) if stay]
            engine.submit(SPLITS[1].first, survivors, clock.now_s())
            left = [member for member, stay in zip(choice.batch.members, stays, strict=True) if not stay]
        else:
            left = list(choice.batch.members)
        latencies_s.extend(clock.now_s() - member.payload for member in left)
    fills = {first: counts.fill or 0.0 for first, counts in engine.counts.items()}
    return Outcome(latencies_s=np.array(latencies_s), dropped=dropped, fills=fills)


def main() -> None:
    """Both rules at several loads, side by side."""
    for name, (fixed_s, per_input_s) in DEVICES.items():
        times = LinearTimes(fixed_s=fixed_s, per_input_s=per_input_s)
        full_s = times.batch_s(SPLITS[0], BATCH) + STAYS * times.batch_s(SPLITS[1], BATCH)
        capacity_rps = BATCH / full_s
        rows = []
        for load in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2):
            gaps_s = np.random.default_rng(0).exponential(1 / (load * capacity_rps), NUM_INPUTS)
            arrivals_s = np.cumsum(gaps_s).tolist()
            rows += [(load, *_row(rule, simulate(times, rule, arrivals_s, seed=1))) for rule in RULES]
        columns = ("load", "rule", "fill 0", "fill 1", "p50 ms", "p99 ms", "dropped", "in SLO")
        show(f"{name}: {capacity_rps:.0f} inputs/s with full batches", columns, rows)


def _row(rule: Dispatch, outcome: Outcome) -> tuple[str, ...]:
    p50_s, p99_s = np.percentile(outcome.latencies_s, [50, 99])
    in_slo = float((outcome.latencies_s <= SLO_S).sum()) / NUM_INPUTS
    shares = (*(f"{outcome.fills[split.first]:.1%}" for split in SPLITS), f"{p50_s * 1000:.1f}", f"{p99_s * 1000:.1f}")
    return rule, *shares, f"{outcome.dropped / NUM_INPUTS:.1%}", f"{in_slo:.1%}"


def _admit(engine: BatchEngine[float], waiting: list[tuple[float, int]], now_s: float) -> None:
    while waiting and waiting[0][0] <= now_s:
        at_s, index = heapq.heappop(waiting)
        engine.submit(0, [Member(sample_id=str(index), payload=at_s, deadline_s=at_s + SLO_S)], at_s)


def _next_event_s(waiting: list[tuple[float, int]], wake_s: float | None) -> float | None:
    events_s = [waiting[0][0]] if waiting else []
    if wake_s is not None:
        events_s.append(wake_s)
    return min(events_s, default=None)


if __name__ == "__main__":
    main()
