"""Learn-then-Test on recorded exits: whether the bound is kept, for the worst subset of ramps too, and what it saves.

    OFFRAMP_DATA=... python -m experiments.guarantee [--trials 200]

Records: a 12-exit BERT-base on SST-2 dev (blocks 1 to 11, exit 11 stands for the full model), and CLINC150 where
`experiments.trained clinc150` left its model. *Divided*: they are divided at random into a calibration and a test part;
thresholds are learnt on the one, as `offramp calibrate` does, and tried on the other, which may break the budget by its
own noise. *Drawn*: calibration inputs are drawn with replacement, and the records are the population whose rate is
known. Empty: no input leaves. Broken: the mean loss on what is tried on is above the budget, with all ramps active, and
with that subset active which loses most (all subsets are tried). Writes runs/guarantee.json. Minutes: 15 on one core.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Literal, get_args

import numpy as np

from earlyexit.data.rows import LabelledRows, read_labelled
from experiments.data import RUNS, data_folder
from experiments.kit import keep, show
from experiments.recorded_exits import bert12_sst2
from experiments.trained import CLINC150
from offramp.commands.jobs import CalibrateJob
from offramp.commands.progress import progress_bars
from offramp.commands.recording import record_exits
from optimizer.risk import Guarantee
from optimizer.thresholds import design_rows, divide, learn_then_test
from profiles.records import ExitRecords

CONFIDENCE = 0.90
DESIGN_SHARE = CalibrateJob().design_share
How = Literal["divided", "drawn"]
HOWS: tuple[How, ...] = get_args(How)
OF_LABELS: tuple[Literal["entropy", "confidence"], ...] = ("entropy", "confidence")
"""The scores that a label can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Records, and what is promised of them."""

    name: str
    records: ExitRecords
    budget: float
    num_inputs: int
    """Of a calibration."""
    how: How


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One division or draw."""

    empty: bool
    blocks: float
    loss: float
    worst_loss: float
    """Of the subset of ramps that loses most."""


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


def worst_subset_loss(records: ExitRecords, thresholds: Mapping[int, float]) -> float:
    """The mean loss with that subset of the ramps active that loses most: all are tried."""
    sure_NR = records.sure_NR(thresholds)
    active_MR = np.array(list(product((False, True), repeat=len(records.ramps))), dtype=bool)
    loss_MN = np.zeros((len(active_MR), len(records)), dtype=np.float32)
    for column in reversed(range(len(records.ramps))):  # an earlier ramp that is sure comes first
        leaves_MN = active_MR[:, column, None] & sure_NR[:, column]
        loss_MN = np.where(leaves_MN, records.losses_NR[:, column].astype(np.float32), loss_MN)
    return float(loss_MN.sum(1, dtype=np.float64).max()) / len(records)


def trial(case: Case, seed: int) -> Trial:
    """One division or draw, learnt from as `offramp calibrate` does."""
    records, guarantee = case.records, Guarantee(budget=case.budget, confidence=CONFIDENCE)
    if case.how == "divided":
        calibration, tried = (records.subset(rows) for rows in divide(len(records), case.num_inputs, seed))
    else:
        rows = np.random.default_rng(seed).integers(0, len(records), case.num_inputs)
        calibration, tried = records.subset(rows), records
    parts = divide(len(calibration), design_rows(len(calibration), guarantee, DESIGN_SHARE), seed)
    design, tested = (calibration.subset(rows) for rows in parts)
    thresholds = learn_then_test(design, tested, guarantee).thresholds
    outcome = tried.outcome(thresholds)
    return Trial(
        empty=outcome.mean_blocks == tried.num_blocks,
        blocks=outcome.mean_blocks,
        loss=float(outcome.losses_N.mean()),
        worst_loss=worst_subset_loss(tried, thresholds),
    )


def summary(case: Case, trials: Sequence[Trial]) -> dict[str, str | float]:
    """Means over the trials of a case."""
    return {
        "records": case.name,
        "how": case.how,
        "budget": case.budget,
        "num_inputs": case.num_inputs,
        "empty_share": fmean(each.empty for each in trials),
        "blocks": fmean(each.blocks for each in trials),
        "num_blocks": case.records.num_blocks,
        "broken_share": fmean(each.loss > case.budget for each in trials),
        "broken_worst_share": fmean(each.worst_loss > case.budget for each in trials),
    }


def cases() -> Iterator[Case]:
    """Every kind of records, budget and size."""
    for score in OF_LABELS:
        records = known_blocks(bert12_sst2(score))
        for (budget, num_inputs), how in product(((0.01, 436), (0.02, 436), (0.02, 610)), HOWS):
            yield Case(name=f"SST-2, {score}", records=records, budget=budget, num_inputs=num_inputs, how=how)
    model, data = RUNS / "clinc150", data_folder()
    if not (model / "calibration.json").is_file() or data is None:
        print("CLINC150 is left out: python -m experiments.trained clinc150 makes its model")
        return
    val, test = (read_labelled(data / CLINC150, part=part) for part in ("val", "test"))
    both = LabelledRows.of_texts([*val.texts, *test.texts], [*val.labels, *test.labels])
    for score in OF_LABELS:
        records = record_exits(model, both, score)
        for how in HOWS:
            yield Case(name=f"CLINC150, {score}", records=records, budget=0.01, num_inputs=3000, how=how)


def run(asked: Sequence[Case], trials: int, progress: Callable[[str, int, int], None]) -> list[dict[str, str | float]]:
    """Every case, with the same seeds."""
    summaries = []
    for position, case in enumerate(asked):
        done = []
        for seed in range(trials):
            done.append(trial(case, seed))
            progress("trial", position * trials + seed + 1, len(asked) * trials)
        summaries.append(summary(case, done))
    return summaries


def main() -> None:
    """Print the table and write it."""
    parser = ArgumentParser(prog="python -m experiments.guarantee", description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    trials = parser.parse_args().trials
    asked = list(cases())
    with progress_bars() as progress:
        summaries = run(asked, trials, progress)
    columns = list(summaries[0])
    show(f"confidence {CONFIDENCE:.0%}, {trials} trials each", columns, [list(each.values()) for each in summaries])
    print(f"written: {keep(summaries, RUNS / 'guarantee.json')}")


if __name__ == "__main__":
    main()
