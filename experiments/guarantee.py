"""Learn-then-Test on recorded exits: whether the agreement bound is kept, and what the promise costs.

    python -m experiments.guarantee [--divisions 200]

The recorded exits (12-exit BERT-base on SST-2 dev; blocks 1 to 11, exit 11 stands for the full model) are divided at
random into a calibration and a test part. Thresholds are learnt on the one, as `offramp calibrate` does, and tried on
the other. Violated: more of the test inputs than the budget are answered otherwise than by the full model; the
guarantee is on the rate behind them, so a small test part is violated by its own noise as well. The oracle knows the
test part: the one threshold for all ramps that saves most there within the budget. Writes runs/guarantee.json.
Minutes: 6 on one core.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.data import RUNS
from experiments.recorded_exits import bert12_sst2
from offramp.calibration import CalibrateJob
from offramp.progress import progress_bars
from optimizer.thresholds import Guarantee, divide, learn_then_test
from profiles.records import ExitOutcome, ExitRecords

GUARANTEE = Guarantee(budget=0.02, confidence=0.90)
CALIBRATION_SHARES = (0.5, 0.6, 0.7, 0.8)
DESIGN_SHARE = CalibrateJob().design_share
ONE_THRESHOLD = np.geomspace(1e-4, np.log(2), 300)
"""Entropies in nats of two classes that the oracle chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One division."""

    calibration_share: float
    violated: bool
    saved_blocks: float
    oracle_blocks: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All divisions of one share."""

    calibration_share: float
    violated_share: float
    saved_blocks: float
    oracle_blocks: float

    @property
    def share_of_oracle(self) -> float:
        return self.saved_blocks / self.oracle_blocks


def known_blocks(records: ExitRecords) -> ExitRecords:
    """The same records of a model that ends at its deepest recorded ramp, whose answer is then the full model's."""
    return replace(
        records,
        num_blocks=records.ramps[-1] + 1,
        ramps=records.ramps[:-1],
        scores_NR=records.scores_NR[:, :-1],
        labels_NR=records.labels_NR[:, :-1],
        final_labels_N=records.labels_NR[:, -1],
    )


def oracle(records: ExitRecords, budget: float, thresholds: Sequence[float]) -> ExitOutcome:
    """What saves most of these very inputs within the budget, one threshold for all ramps."""
    outcomes = [records.outcome(dict.fromkeys(records.ramps, float(each))) for each in thresholds]
    kept = [each for each in outcomes if each.disagreements <= budget * len(records)]
    return min([records.outcome({}), *kept], key=lambda each: each.mean_blocks)


def trial(records: ExitRecords, calibration_share: float, seed: int) -> Trial:
    """Learn on one part, try on the other."""
    calibration_rows, test_rows = divide(len(records), calibration_share, seed)
    calibration, test = records.subset(calibration_rows), records.subset(test_rows)
    design_rows, tested_rows = divide(len(calibration), DESIGN_SHARE, seed)
    learnt = learn_then_test(calibration.subset(design_rows), calibration.subset(tested_rows), GUARANTEE)
    outcome = test.outcome(learnt.thresholds)
    best = oracle(test, GUARANTEE.budget, ONE_THRESHOLD.tolist())
    return Trial(
        calibration_share=calibration_share,
        violated=outcome.disagreements > GUARANTEE.budget * len(test),
        saved_blocks=records.num_blocks - outcome.mean_blocks,
        oracle_blocks=records.num_blocks - best.mean_blocks,
    )


def summary(trials: Sequence[Trial]) -> Summary:
    """Means over the divisions of one share."""
    return Summary(
        calibration_share=trials[0].calibration_share,
        violated_share=fmean(each.violated for each in trials),
        saved_blocks=fmean(each.saved_blocks for each in trials),
        oracle_blocks=fmean(each.oracle_blocks for each in trials),
    )


def run(records: ExitRecords, divisions: int, progress: Callable[[str, int, int], None]) -> list[Summary]:
    """Every share, with the same seeds."""
    summaries = []
    for position, share in enumerate(CALIBRATION_SHARES):
        trials = []
        for seed in range(divisions):
            trials.append(trial(records, share, seed))
            progress("divide", position * divisions + seed + 1, len(CALIBRATION_SHARES) * divisions)
        summaries.append(summary(trials))
    return summaries


def main() -> None:
    """Print the table and write it."""
    parser = ArgumentParser(prog="python -m experiments.guarantee", description=__doc__)
    parser.add_argument("--divisions", type=int, default=200)
    divisions = parser.parse_args().divisions
    records = known_blocks(bert12_sst2("entropy"))
    with progress_bars() as progress:
        summaries = run(records, divisions, progress)
    title = f"budget {GUARANTEE.budget:.0%}, confidence {GUARANTEE.confidence:.0%}, {divisions} divisions"
    table = Table(title=title, title_justify="left")
    for name in ("calibrated on", "violated", "blocks saved", "oracle saves", "share of oracle"):
        table.add_column(name, justify="right")
    for each in summaries:
        table.add_row(
            f"{each.calibration_share:.0%}",
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
