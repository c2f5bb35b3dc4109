"""Learn-then-Test on recorded exits: whether the agreement bound is kept, and what the promise costs.

    python -m experiments.guarantee [--trials 200]

The recorded exits (12-exit BERT-base on SST-2 dev; blocks 1 to 11, exit 11 stands for the full model) are divided at
random into a calibration and a test part. Thresholds are learnt on the one, as `offramp calibrate` does, and tried on
the other. Violated: more of the test inputs than the budget are answered otherwise than by the full model; the
guarantee is on the rate behind them, so a small test part is violated by its own noise as well. Therefore a second
table: calibration inputs are drawn from the records with replacement, and the records are the population whose rate is
known. The oracle knows what is tried on: the one threshold for all ramps that saves most there within the budget.
Writes runs/guarantee.json. Minutes: 8 on one core.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.data import RUNS
from experiments.recorded_exits import bert12_sst2
from offramp.calibration import CalibrateJob
from offramp.progress import progress_bars
from optimizer.risk import Guarantee
from optimizer.thresholds import design_rows, divide, learn_then_test
from profiles.outcome import ExitOutcome
from profiles.records import ExitRecords

GUARANTEE = Guarantee(budget=0.02, confidence=0.90)
CALIBRATION_SHARES = (0.5, 0.6, 0.7, 0.8)
DRAWN_SHARES = (0.5, 0.7, 1.0)
DESIGN_SHARE = CalibrateJob().design_share
ONE_THRESHOLD = np.geomspace(1e-4, np.log(2), 300)
"""Entropies in nats of two classes that the oracle chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One division."""

    violated: bool
    saved_blocks: float
    oracle_blocks: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All trials of one size of calibration."""

    how: str
    num_inputs: int
    violated_share: float
    saved_blocks: float
    oracle_blocks: float
    share_of_oracle: float


def known_blocks(records: ExitRecords) -> ExitRecords:
    """The same records of a model that ends at its deepest recorded ramp, whose answer is then the full model's."""
    return ExitRecords.of_answers(
        records.answers()[:, :-1],
        score=records.score,
        num_blocks=records.ramps[-1] + 1,
        ramps=records.ramps[:-1],
        sample_ids=records.sample_ids,
        scores_NR=records.scores_NR[:, :-1],
    )


def oracle(records: ExitRecords, budget: float, thresholds: Sequence[float]) -> ExitOutcome:
    """What saves most of these very inputs within the budget, one threshold for all ramps."""
    outcomes = [records.outcome(dict.fromkeys(records.ramps, float(each))) for each in thresholds]
    kept = [each for each in outcomes if each.total_loss <= budget * len(records)]
    return min([records.outcome({}), *kept], key=lambda each: each.mean_blocks)


def trial(calibration: ExitRecords, test: ExitRecords, best: ExitOutcome, seed: int) -> Trial:
    """Learn on the one, try on the other."""
    design, tested = divide(len(calibration), design_rows(len(calibration), GUARANTEE, DESIGN_SHARE), seed)
    learnt = learn_then_test(calibration.subset(design), calibration.subset(tested), GUARANTEE)
    outcome = test.outcome(learnt.thresholds)
    return Trial(
        violated=outcome.total_loss > GUARANTEE.budget * len(test),
        saved_blocks=test.num_blocks - outcome.mean_blocks,
        oracle_blocks=test.num_blocks - best.mean_blocks,
    )


def divided(records: ExitRecords, share: float, seed: int) -> Trial:
    """Calibration and test are parts of the records."""
    calibration_rows, test_rows = divide(len(records), round(len(records) * share), seed)
    test = records.subset(test_rows)
    return trial(records.subset(calibration_rows), test, oracle(test, GUARANTEE.budget, ONE_THRESHOLD.tolist()), seed)


def drawn(records: ExitRecords, best: ExitOutcome, share: float, seed: int) -> Trial:
    """Calibration inputs are drawn from the records, which are then the population."""
    rows = np.random.default_rng(seed).integers(0, len(records), round(len(records) * share))
    return trial(records.subset(rows), records, best, seed)


def summary(how: str, num_inputs: int, trials: Sequence[Trial]) -> Summary:
    """Means over the trials."""
    saved_blocks, oracle_blocks = (
        fmean(each.saved_blocks for each in trials),
        fmean(each.oracle_blocks for each in trials),
    )
    return Summary(
        how=how,
        num_inputs=num_inputs,
        violated_share=fmean(each.violated for each in trials),
        saved_blocks=saved_blocks,
        oracle_blocks=oracle_blocks,
        share_of_oracle=saved_blocks / oracle_blocks,
    )


def run(records: ExitRecords, trials: int, progress: Callable[[str, int, int], None]) -> list[Summary]:
    """Every size, with the same seeds."""
    population_best = oracle(records, GUARANTEE.budget, ONE_THRESHOLD.tolist())
    asked: list[tuple[str, float, Callable[[float, int], Trial]]] = [
        *(("divided", share, partial(divided, records)) for share in CALIBRATION_SHARES),
        *(("drawn", share, partial(drawn, records, population_best)) for share in DRAWN_SHARES),
    ]
    summaries = []
    for position, (how, share, ask) in enumerate(asked):
        done = []
        for seed in range(trials):
            done.append(ask(share, seed))
            progress("trial", position * trials + seed + 1, len(asked) * trials)
        summaries.append(summary(how, round(len(records) * share), done))
    return summaries


def main() -> None:
    """Print the table and write it."""
    parser = ArgumentParser(prog="python -m experiments.guarantee", description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    trials = parser.parse_args().trials
    records = known_blocks(bert12_sst2("entropy"))
    with progress_bars() as progress:
        summaries = run(records, trials, progress)
    title = f"budget {GUARANTEE.budget:.0%}, confidence {GUARANTEE.confidence:.0%}, {trials} trials each"
    table = Table(title=title, title_justify="left")
    for name in ("records", "calibrated on", "violated", "blocks saved", "oracle saves", "share of oracle"):
        table.add_column(name, justify="right")
    for each in summaries:
        table.add_row(
            each.how,
            f"{each.num_inputs} inputs",
            f"{each.violated_share:.1%}",
            f"{each.saved_blocks:.2f} of {records.num_blocks}",
            f"{each.oracle_blocks:.2f}",
            f"{each.share_of_oracle:.3f}",
        )
    Console().print(table)
    RUNS.mkdir(exist_ok=True)
    path = RUNS / "guarantee.json"
    path.write_text(json.dumps([asdict(each) for each in summaries], indent=1), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
