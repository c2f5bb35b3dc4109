"""Apparate's greedy search for thresholds beside a grid search, on recorded exits and on drawn ones.

    OFFRAMP_DATA=... python -m experiments.tuning.threshold_search [--sets 10]

Section 3.2 and figure 11 of the paper: the greedy search saves within 0 to 3.8 % of what the grid's best saves, and is
up to three orders of magnitude faster (11.9 ms against 3.0 s on 30 cores). Both searches look at a threshold vector by
the same function here, on one core; times are ratios of processor time. The grid's step is the finest that ends: 0.01
for one ramp and two, 0.02 for three, 0.05 for four. Windows: the last so many of the records; sets of ramps drawn at
random, seed 0. A ramp costs 0.8 % of a block. Writes runs/threshold_search.json. Minutes: 1 on one core, per set.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median
from time import process_time

import numpy as np

from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.recorded_exits import bert12_sst2
from experiments.tuning.guarantee import known_blocks
from optimizer.live.best_ramps import of_ramps
from optimizer.live.exit_times import ExitTimes
from optimizer.live.tuning.greedy import FoundThresholds, ThresholdGame, greedy, grid
from profiles.records import ExitRecords

STEPS: Mapping[int, float] = {1: 0.01, 2: 0.01, 3: 0.02, 4: 0.05}
"""Of the grid, by the number of ramps."""
WINDOWS = (128, 512)
BUDGETS = (0.01, 0.02)
RAMP_SHARE = 0.008
"""Of a block: DistilBERT's ramps in a profile of Apparate's own, 0.12 ms, are 5 % of a block; light heads cost less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Greedy and grid on one window, one set of ramps."""

    records: str
    window: int
    budget: float
    ramps: tuple[int, ...]
    saved: float
    """Share of the model's time, by greedy."""
    best: float
    """By the grid."""
    ratio: float
    """Processor time of the grid in that of greedy."""
    looked_at: int
    grid_looked_at: int

    @property
    def missing(self) -> float:
        """Share of the grid's savings that greedy leaves; negative where it saves more, having finer steps."""
        return 1 - self.saved / self.best if self.best > 0 else 0.0


def compare(name: str, records: ExitRecords, ramps: tuple[int, ...], window: int, budget: float) -> Compared:
    """Both searches."""
    times = ExitTimes(block_s=(1.0,) * records.num_blocks, ramp_s=dict.fromkeys(records.ramps, RAMP_SHARE))
    last = of_ramps(records.subset(np.arange(len(records) - window, len(records))), ramps)
    step = STEPS[len(ramps)]
    quick, quick_s = _timed(lambda: greedy(ThresholdGame(last, times, budget)), repeats=5)
    slow, slow_s = _timed(lambda: grid(ThresholdGame(last, times, budget), step), repeats=1)
    return Compared(
        records=name,
        window=window,
        budget=budget,
        ramps=ramps,
        saved=quick.earlier_s / times.whole_s,
        best=slow.earlier_s / times.whole_s,
        ratio=slow_s / quick_s,
        looked_at=quick.looked_at,
        grid_looked_at=slow.looked_at,
    )


def drawn_records(seed: int, num_ramps: int = 11, number: int = 1000) -> ExitRecords:
    """Inputs of different ease: the deeper a ramp the surer it is, and it is as often right as its confidence says."""
    rng = np.random.default_rng(seed)
    ramps = tuple(range(num_ramps))
    ease_N1 = rng.beta(1.2, 0.8, (number, 1))
    depth_R = np.linspace(0.3, 1.3, num_ramps)
    scores_NR = 0.5 + 0.5 * np.clip(ease_N1 * depth_R + rng.normal(0, 0.08, (number, num_ramps)), 0, 0.999)
    return ExitRecords(
        score="confidence",
        num_blocks=num_ramps + 1,
        ramps=ramps,
        sample_ids=tuple(map(str, range(number))),
        scores_NR=scores_NR.astype(np.float32),
        losses_NR=(rng.random((number, num_ramps)) > scores_NR).astype(np.float64),
    )


def cases() -> Iterator[tuple[str, ExitRecords]]:
    """Recorded and drawn."""
    yield "BERT, SST-2, confidence", known_blocks(bert12_sst2("confidence"))
    yield "BERT, SST-2, entropy", known_blocks(bert12_sst2("entropy"))
    yield "drawn", drawn_records(0)


def summary(name: str, number: int, found: list[Compared]) -> dict[str, str | float]:
    """Of all windows, budgets and sets of so many ramps."""
    missing = [each.missing for each in found]
    return {
        "records": name,
        "ramps": number,
        "grid_step": STEPS[number],
        "cases": len(found),
        "missing_median": median(missing),
        "missing_ninth_decile": float(np.quantile(missing, 0.9)),
        "missing_most": max(missing),
        "times_faster": median(each.ratio for each in found),
        "looked_at": median(each.looked_at for each in found),
        "grid_looked_at": found[0].grid_looked_at,
    }


def main() -> None:
    """Print the table and write it."""
    parser = ArgumentParser(prog="python -m experiments.tuning.threshold_search", description=__doc__)
    parser.add_argument("--sets", type=int, default=10)
    sets: int = parser.parse_args().sets
    summaries, rng = [], np.random.default_rng(0)
    for name, records in cases():
        for number in STEPS:
            chosen = [tuple(sorted(rng.choice(records.ramps, number, replace=False).tolist())) for _ in range(sets)]
            asked = product(WINDOWS, BUDGETS, chosen)
            found = [compare(name, records, ramps, window, budget) for window, budget, ramps in asked]
            summaries.append(summary(name, number, found))
    show("greedy beside a grid", list(summaries[0]), [list(each.values()) for each in summaries])
    print(f"written: {keep(summaries, RUNS / 'threshold_search.json')}")


def _timed(search: Callable[[], FoundThresholds], repeats: int) -> tuple[FoundThresholds, float]:
    began_s = process_time()
    for _ in range(repeats):
        found = search()
    return found, (process_time() - began_s) / repeats


if __name__ == "__main__":
    main()
