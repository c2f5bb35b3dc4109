"""Learn-then-Test on recorded exits: whether the bound is kept, for the worst subset of ramps too, and what it costs.

    OFFRAMP_DATA=... python -m experiments.tuning.guarantee [--trials 200]

Records: a 12-exit BERT-base on SST-2 dev (blocks 1 to 11, exit 11 stands for the full model), and CLINC150 where
`experiments.trained clinc150` left its model. *Divided*: they are divided at random into a calibration and a test part;
thresholds are learnt on the one, as `offramp calibrate` does, and tried on the other, which may break the budget by its
own noise. *Drawn*: calibration inputs are drawn with replacement, and the records are the population whose rate is
known. Three ways to learn:

- `before`: a path that begins at a price of 1e-5, where many leave already, tested with all ramps active, laid on a
  quarter of the inputs;
- `all ramps`: today's path, which begins at never, tested with all ramps active;
- `every subset`: today's path, tested by the worst that any subset of the ramps can do. What is promised today.

Empty: nobody leaves. Broken: the mean loss on what is tried on is above the budget, with all ramps active, and with
that subset active which loses most (all of them are tried). The oracle knows what is tried on: the one threshold for
all ramps that saves most there within the budget. Writes runs/guarantee.json. Minutes: 40 on one core.
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
from offramp.commands.calibrate import CalibrateJob
from offramp.commands.progress import progress_bars
from offramp.commands.recording import record_exits
from optimizer.risk import Guarantee
from optimizer.thresholds import Path, design_rows, divide, lay_path, learn_then_test
from profiles.outcome import ExitOutcome
from profiles.records import ExitRecords
from profiles.scores import FloatArray

CONFIDENCE = 0.90
DESIGN_SHARE = CalibrateJob().design_share
FIRST_LOG_PRICE, LAST_LOG_PRICE = np.log(1e-5), np.log(0.5)
"""Of the path as it was before."""
STEPS = 400
ORACLE = 300
"""Scores that the oracle chooses from."""

How = Literal["divided", "drawn"]
HOWS: tuple[How, ...] = get_args(How)
Learnt = dict[int, float]
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
    oracle_blocks: float


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


def worst_subset_loss(records: ExitRecords, thresholds: Mapping[int, float]) -> float:
    """The mean loss with that subset of the ramps active that loses most: all are tried."""
    sure_NR = records.sure_NR(thresholds)
    active_MR = np.array(list(product((False, True), repeat=len(records.ramps))), dtype=bool)
    loss_MN = np.zeros((len(active_MR), len(records)), dtype=np.float32)
    for column in reversed(range(len(records.ramps))):  # an earlier ramp that is sure comes first
        leaves_MN = active_MR[:, column, None] & sure_NR[:, column]
        loss_MN = np.where(leaves_MN, records.losses_NR[:, column].astype(np.float32), loss_MN)
    return float(loss_MN.sum(1, dtype=np.float64).max()) / len(records)


def as_before(calibration: ExitRecords, guarantee: Guarantee, seed: int) -> Learnt:
    """Laid on a quarter, from a price of 1e-5, tested with all ramps active."""
    first, rest = divide(len(calibration), round(len(calibration) * DESIGN_SHARE), seed)
    prices = np.linspace(FIRST_LOG_PRICE, LAST_LOG_PRICE, STEPS)
    return _walk(lay_path(calibration.subset(first)), calibration.subset(rest), prices, guarantee)


def for_all_ramps(calibration: ExitRecords, guarantee: Guarantee, seed: int) -> Learnt:
    """Today's path, in steps."""
    design, tested = _parts(calibration, guarantee, seed)
    path = lay_path(design)
    prices = np.quantile(np.unique(path.log_prices_NR(tested)), np.linspace(0, 1, STEPS))
    return _walk(path, tested, prices, guarantee)


def for_every_subset(calibration: ExitRecords, guarantee: Guarantee, seed: int) -> Learnt:
    """As `offramp calibrate` does."""
    return learn_then_test(*_parts(calibration, guarantee, seed), guarantee).thresholds


WAYS: dict[str, Callable[[ExitRecords, Guarantee, int], Learnt]] = {
    "before": as_before,
    "all ramps": for_all_ramps,
    "every subset": for_every_subset,
}


def _parts(calibration: ExitRecords, guarantee: Guarantee, seed: int) -> tuple[ExitRecords, ExitRecords]:
    design, tested = divide(len(calibration), design_rows(len(calibration), guarantee, DESIGN_SHARE), seed)
    return calibration.subset(design), calibration.subset(tested)


def _walk(path: Path, tested: ExitRecords, log_prices: FloatArray, guarantee: Guarantee) -> Learnt:
    kept: Learnt = {}
    for log_price in log_prices.tolist():
        thresholds = path.thresholds(log_price)
        if not guarantee.holds(tested.outcome(thresholds).total_loss, len(tested), zero_one=tested.zero_one):
            break
        kept = thresholds
    return kept


def trials_of(case: Case, seed: int, population_best: ExitOutcome) -> dict[str, Trial]:
    """One division or draw, learnt from in every way; the population of draws is always the same."""
    calibration, tried = _draw(case, seed)
    guarantee = Guarantee(budget=case.budget, confidence=CONFIDENCE)
    best = population_best if tried is case.records else _oracle(tried, case.budget)
    return {name: _trial(learn(calibration, guarantee, seed), tried, best) for name, learn in WAYS.items()}


def _oracle(tried: ExitRecords, budget: float) -> ExitOutcome:
    return oracle(tried, budget, np.quantile(tried.scores_NR, np.linspace(0, 1, ORACLE)).tolist())


def _draw(case: Case, seed: int) -> tuple[ExitRecords, ExitRecords]:
    records = case.records
    if case.how == "divided":
        calibration, test = divide(len(records), case.num_inputs, seed)
        return records.subset(calibration), records.subset(test)
    rows = np.random.default_rng(seed).integers(0, len(records), case.num_inputs)
    return records.subset(rows), records


def _trial(thresholds: Learnt, tried: ExitRecords, best: ExitOutcome) -> Trial:
    outcome = tried.outcome(thresholds)
    return Trial(
        empty=outcome.mean_blocks == tried.num_blocks,
        blocks=outcome.mean_blocks,
        loss=float(outcome.losses_N.mean()),
        worst_loss=worst_subset_loss(tried, thresholds),
        oracle_blocks=best.mean_blocks,
    )


def summary(case: Case, learnt: str, trials: Sequence[Trial]) -> dict[str, str | float]:
    """Means over the trials of a case under one way to learn."""
    return {
        "records": case.name,
        "how": case.how,
        "budget": case.budget,
        "num_inputs": case.num_inputs,
        "learnt": learnt,
        "empty_share": fmean(each.empty for each in trials),
        "blocks": fmean(each.blocks for each in trials),
        "num_blocks": case.records.num_blocks,
        "oracle_blocks": fmean(each.oracle_blocks for each in trials),
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
        done, best = [], _oracle(case.records, case.budget)
        for seed in range(trials):
            done.append(trials_of(case, seed, best))
            progress("trial", position * trials + seed + 1, len(asked) * trials)
        summaries += [summary(case, name, [each[name] for each in done]) for name in WAYS]
    return summaries


def main() -> None:
    """Print the table and write it."""
    parser = ArgumentParser(prog="python -m experiments.tuning.guarantee", description=__doc__)
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
