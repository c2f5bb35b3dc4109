"""Ramps chosen from records of all of them, beside Apparate's mover, which sees only the active ones.

    OFFRAMP_DATA=... python -m experiments.tuning.ramp_moves

Both look at one period, the first half of the records: the best set is chosen among all; the mover gets as many rounds
on that period as it takes until a set of ramps comes back. Thresholds are Apparate's greedy search for both, at a
budget of 1 % on the period. Told is what both save in the second half, which neither saw, and what they lose there; the
mover's at its last set and at the best that it met. A ramp costs 5 % of a block (DistilBERT's in Apparate's
profile), so that four or five fit into 2 %. Writes runs/ramp_moves.json. Minutes: 1 on one core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.recorded_exits import bert12_sst2
from experiments.tuning.guarantee import known_blocks
from experiments.tuning.threshold_search import drawn_records
from optimizer.live.best_ramps import Tune, best_ramps, greedily, of_ramps
from optimizer.live.exit_times import ExitTimes
from optimizer.live.ramp_mover import RAMP_BUDGET, settled, spread_out
from profiles.records import ExitRecords

BUDGET = 0.01
RAMP_SHARE = 0.05
DIVISIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramps:
    """A set of ramps with thresholds of the first period."""

    chosen: str
    ramps: tuple[int, ...]
    saved: float
    """Share of the model's time that answers came earlier in the period that it was chosen by."""
    saved_later: float
    """In the period after it."""
    lost_later: float
    rounds: int
    """Of adjustments, 128 samples each."""


def compared(period: ExitRecords, later: ExitRecords, times: ExitTimes, tune: Tune) -> list[Ramps]:
    """The best set, the mover's last and best ones, and the ramps that it began with."""
    history = settled(period, times, tune)
    met = [each.active for each in history if each.active]
    best_met = max(met, key=lambda ramps: _saved(period, ramps, times, tune), default=())
    sets: list[tuple[str, Sequence[int], int]] = [
        ("planned", best_ramps(period, times, RAMP_BUDGET, tune).ramps, 0),
        ("mover, at last", history[-1].active, len(history)),
        ("mover, at best", best_met, len(history)),
        ("as begun", spread_out(times), 0),
    ]
    return [_judged(name, ramps, rounds, (period, later), times, tune) for name, ramps, rounds in sets]


def cases() -> Iterator[tuple[str, ExitRecords]]:
    """Records in random order: halves that are alike."""
    kinds = {
        "BERT, SST-2, confidence": known_blocks(bert12_sst2("confidence")),
        "BERT, SST-2, entropy": known_blocks(bert12_sst2("entropy")),
        "drawn": drawn_records(2, number=2000),
    }
    for name, records in kinds.items():
        for seed in range(DIVISIONS):
            order = np.random.default_rng(seed).permutation(len(records)).astype(np.int64)
            yield name, records.subset(order)


def times_of(records: ExitRecords) -> ExitTimes:
    """All blocks alike."""
    return ExitTimes(block_s=(1.0,) * records.num_blocks, ramp_s=dict.fromkeys(records.ramps, RAMP_SHARE))


def main() -> None:
    """Print the table and write it."""
    rows = []
    for name, records in cases():
        half, times = len(records) // 2, times_of(records)
        period, later = records.subset(np.arange(half)), records.subset(np.arange(half, len(records)))
        rows += [(name, each) for each in compared(period, later, times, greedily(times, BUDGET))]
    columns = ("records", "chosen", "ramps", "saved", "saved later", "lost later", "rounds")
    table = [
        (name, each.chosen, str(each.ramps), each.saved, each.saved_later, each.lost_later, each.rounds)
        for name, each in rows
    ]
    show(f"ramps of at most {RAMP_BUDGET:.0%}", columns, table)
    print(f"written: {keep([dict(zip(columns, row, strict=True)) for row in table], RUNS / 'ramp_moves.json')}")


def _judged(
    name: str, ramps: Sequence[int], rounds: int, periods: tuple[ExitRecords, ExitRecords], times: ExitTimes, tune: Tune
) -> Ramps:
    period, later = (of_ramps(records, ramps) for records in periods)
    thresholds = tune(period) if ramps else {}
    outcome = later.outcome(thresholds)
    return Ramps(
        chosen=name,
        ramps=tuple(ramps),
        saved=times.saved(period.outcome(thresholds), ramps),
        saved_later=times.saved(outcome, ramps),
        lost_later=float(outcome.losses_N.mean()),
        rounds=rounds,
    )


def _saved(records: ExitRecords, ramps: Sequence[int], times: ExitTimes, tune: Tune) -> float:
    window = of_ramps(records, ramps)
    return times.saved(window.outcome(tune(window)), ramps)


if __name__ == "__main__":
    main()
