"""What is promised of a cascade, kept or not: ramps and networks tested together, and Tabi's search for c beside it.

    OFFRAMP_DATA=... python -m experiments.cascades.guarantee [clinc150 ag_news sst2] [--trials 200]

MiniLM-L6 before all-mpnet-base-v2, every block of either with a ramp, as `experiments.cascades.models` makes them, on
rows that neither was trained or calibrated by: CLINC150's test part (4,500), 2,500 texts of AG News' test part, the 872
sentences of SST-2's dev part. Budget 1 %, confidence 90 %, of agreement with the large model, and of harm.

*Divided*: rows are halved at random; thresholds are found on one half as `offramp calibrate` does and tried on the
other, whose own noise may break the budget. *Drawn*: as many are drawn with replacement, and all rows are the
population, whose loss is known. *All*: thresholds of all ramps and of the small network's end together. Tried are the
cascade by its networks alone, with the ramps inside, the large network with its ramps, the small one's ramps without
its end, and sets of ramps drawn at random. *End*: the small network's end alone (`offramp calibrate --ramps ends`).
*Picked*: as in a service, both calibrations that `offramp calibrate` makes of a chain, and the one is tried whose
cheapest plan is the cheapest on the calibration rows; `plan` is what that saves.
Kept: none of what is tried loses more than the budget. The worst set of all is not searched for: `bound` counts an
input as lost where any ramp that is sure of it is wrong, and no set loses more than that.

*Tabi*: on the same halves c is searched for as section 5 says (from 0.95 down by 0.05 until the cascade is less
accurate than its models on average), and the last one is taken. *Tabi, target*: of those, the cheapest whose accuracy
falls by no more than the budget. Losses are expected ones, over the coins of the band. Costs are parameters of the
blocks run, in those of the large network: saved is the share of its cost alone.

*Coins*: at equal shares returned by the small network, what the band loses, and what a threshold loses.
What heads look at is kept in runs/ensemble. Writes runs/cascade_guarantee. Minutes: about 6 for each data on one core.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Literal, get_args

import numpy as np

from earlyexit.reroute import reroute_probability
from experiments.cascades.case import Case, case_of, mean_cost
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.trained.mpnet import DataName
from offramp.jobs.calibration import CalibrateJob
from offramp.jobs.progress import progress_bars
from optimizer.few_ramps import few_ramps
from optimizer.risk import Guarantee, Metric
from optimizer.tabi import cutoffs
from optimizer.thresholds import design_rows, divide, learn_then_test
from profiles.records import ExitRecords
from profiles.scores import FloatArray

GUARANTEE = Guarantee(budget=0.01, confidence=0.90)
WRITTEN = RUNS / "cascade_guarantee"
RANDOM_SETS = 24
CUTOFFS = (0.5, 0.7, 0.8, 0.9, 0.95)
"""Of the bands that are held against thresholds."""
How = Literal["divided", "drawn"]
METRICS: tuple[Metric, ...] = ("agreement", "harm")
"""Of labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way, learnt on one part and tried on another."""

    kept: bool
    bound_kept: bool | None
    """Whether the bound of all sets of ramps keeps the budget; None of Tabi, who has one."""
    loss: float
    """Of the cascade: by networks alone, without ramps inside."""
    saved: float
    """Of the large network alone, by the cascade."""
    saved_inside: float | None
    """With the ramps inside; None where only the end has a threshold."""
    saved_large: float | None
    """By the large network with its ramps, and no small one."""
    plan: float | None = None
    """By the plan that is the cheapest on the calibration rows."""
    by: str | None = None
    """The calibration that was picked."""


def sets_of_ramps(case: Case, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Ramps that are on: the named ways first, then sets drawn at random."""
    ramps, end = case.records.ramps, case.end
    inside = tuple(ramp for ramp in ramps if ramp < end)
    large = tuple(ramp for ramp in ramps if ramp > end)
    drawn = [tuple(np.array(ramps)[rng.random(len(ramps)) < rng.random()].tolist()) for _ in range(RANDOM_SETS)]
    return [(end,), ramps, large, (*inside, end), inside, *drawn]


def ours(calibration: Case, tried: Case, metric: Metric, seed: int, *, ends: bool = False) -> Trial:
    """Thresholds with a guarantee, tried on every set of ramps; `ends`: only the small network's end gets one."""
    ramps = (calibration.end,) if ends else calibration.records.ramps
    design, tested = design_and_tested(calibration, metric, seed, GUARANTEE)
    found = learn_then_test(design.of_ramps(ramps), tested.of_ramps(ramps), GUARANTEE, calibration.costs).thresholds
    return tried_with(found, tried, metric, seed, inside=not ends)


def design_and_tested(case: Case, metric: Metric, seed: int, guarantee: Guarantee) -> tuple[ExitRecords, ExitRecords]:
    """The rows that lay the path, and those that test it."""
    known = promised(case.records, metric)
    num_design = design_rows(len(known), guarantee, CalibrateJob().design_share)
    first, second = (known.subset(rows) for rows in divide(len(known), num_design, seed))
    return first, second


def picked(calibration: Case, tried: Case, metric: Metric, seed: int) -> Trial:
    """Both calibrations of a chain, of which the one with the cheapest plan is tried."""
    end, costs, first = calibration.end, calibration.costs, calibration.chain.starts[-1]
    guarantee = replace(GUARANTEE, among=2)
    design, tested = design_and_tested(calibration, metric, seed, guarantee)
    of_large = design.of_ramps([ramp for ramp in design.ramps if ramp >= first])
    by_name = {
        "cascade": few_ramps(design, guarantee, len(tested), (end,), block_costs=costs),
        "large": few_ramps(of_large, guarantee, len(tested), (), first=first, block_costs=costs),
    }
    found = {
        name: learn_then_test(design.of_ramps(ramps), tested.of_ramps(ramps), guarantee, costs).thresholds
        for name, ramps in by_name.items()
    }
    plans = [(name, plan) for name, thresholds in found.items() for plan in plans_of(thresholds, end)]
    name, (thresholds, used) = min(plans, key=lambda each: mean_cost(calibration, *each[1]))
    trial = tried_with(found[name], tried, metric, seed, inside=True)
    return replace(trial, plan=1 - mean_cost(tried, thresholds, used), by=name)


def plans_of(thresholds: dict[int, float], end: int) -> list[tuple[dict[int, float], Sequence[int]]]:
    """Ramps that are on, and networks: all of either, the small one's end alone, the large one with its ramps."""
    ends = {ramp: value for ramp, value in thresholds.items() if ramp == end}
    large = {ramp: value for ramp, value in thresholds.items() if ramp > end}
    return [(thresholds, (0, 1)), (ends, (0, 1)), (large, (1,))]


def tried_with(found: dict[int, float], tried: Case, metric: Metric, seed: int, *, inside: bool) -> Trial:
    """What these thresholds do on other rows; `inside`: some of them are of ramps inside networks."""
    unseen = promised(tried.records, metric)
    sets = {
        tuple(ramp for ramp in ramps if ramp in found) for ramps in sets_of_ramps(tried, np.random.default_rng(seed))
    }
    losses = {
        ramps: float(unseen.outcome({ramp: found[ramp] for ramp in ramps}).losses_N.mean()) for ramps in sorted(sets)
    }
    end = {ramp: value for ramp, value in found.items() if ramp == tried.end}
    large = {ramp: value for ramp, value in found.items() if ramp > tried.end}
    return Trial(
        kept=max(losses.values()) <= GUARANTEE.budget,
        bound_kept=bool(unseen.worst_losses_N(found).mean() <= GUARANTEE.budget),
        loss=losses[tuple(end)],
        saved=1 - mean_cost(tried, end, (0, 1)),
        saved_inside=None if not inside else 1 - mean_cost(tried, found, (0, 1)),
        saved_large=None if not inside else 1 - mean_cost(tried, large, (1,)),
    )


def promised(records: ExitRecords, metric: Metric) -> ExitRecords:
    """The records whose losses are what is promised."""
    return records if metric == "agreement" else records.of_harm()


def tabis(calibration: Case, tried: Case, metric: Metric, *, target: bool) -> Trial:
    """Its search for c on the calibration rows; `target`: the accuracy may fall by the budget, and no further."""
    truth_NE = calibration.records.true_losses_NE
    assert truth_NE is not None
    right_NL = 1 - truth_NE[:, [calibration.records.ramps.index(calibration.end), -1]]
    confidence_NL = np.column_stack([calibration.confidence_N, np.ones(len(truth_NE))])  # the last is unread
    least = float(right_NL[:, 1].mean()) - GUARANTEE.budget if target else 0.0
    found = [each for each in cutoffs(confidence_NL, right_NL) if each.accuracy >= least]
    c = found[-1].c if found else 1.0  # at 1 everything goes on
    small = sum(tried.costs[: tried.end + 1])
    goes_on_N = reroute_probability(tried.confidence_N, c)
    loss = float(((1 - goes_on_N) * end_losses_N(tried, metric)).mean())
    return Trial(
        kept=loss <= GUARANTEE.budget,
        bound_kept=None,
        loss=loss,
        saved=1 - small - float(goes_on_N.mean()),
        saved_inside=None,
        saved_large=None,
    )


def end_losses_N(case: Case, metric: Metric) -> FloatArray:
    """What the small network's answers cost."""
    return promised(case.records, metric).losses_NR[:, case.records.ramps.index(case.end)]


WAYS: dict[str, Callable[[Case, Case, Metric, int], Trial]] = {
    "all": ours,
    "end": partial(ours, ends=True),
    "picked": picked,
    "Tabi": lambda calibration, tried, metric, _: tabis(calibration, tried, metric, target=False),
    "Tabi, target": lambda calibration, tried, metric, _: tabis(calibration, tried, metric, target=True),
}


def parts(case: Case, how: How, seed: int) -> tuple[Case, Case]:
    """The rows that are learnt from, and those that are tried."""
    number = len(case.records)
    if how == "divided":
        calibration, tried = divide(number, number // 2, seed)
        return case.subset(calibration), case.subset(tried)
    return case.subset(np.random.default_rng(seed).integers(0, number, number // 2)), case


def summary(case: Case, how: How, metric: Metric, way: str, trials: Sequence[Trial]) -> dict[str, str | float | None]:
    """Means over the trials."""
    *names, last = asdict(trials[0])
    known = {name: [value for each in trials if (value := asdict(each)[name]) is not None] for name in names}
    means = {name: fmean(values) if values else None for name, values in known.items()}
    counted = Counter(each.by for each in trials if each.by is not None).most_common()
    by = ", ".join(f"{name} {number}" for name, number in counted) or None
    return {"data": case.name, "how": how, "of": metric, "way": way, **means, last: by}


def coins(case: Case, metric: Metric) -> list[dict[str, str | float]]:
    """At the share that a band returns, what it loses, and what the surest inputs lose: a threshold returns these."""
    losses_N = end_losses_N(case, metric)
    surest_N = losses_N[np.argsort(-case.confidence_N, kind="stable")]
    lost_N = np.concatenate([[0.0], np.cumsum(surest_N)])
    rows: list[dict[str, str | float]] = []
    for c in CUTOFFS:
        returns_N = 1 - reroute_probability(case.confidence_N, c)
        number = float(returns_N.sum())
        threshold = float(np.interp(number, np.arange(len(lost_N)), lost_N))
        band = float((returns_N * losses_N).sum())
        rows.append(
            {
                "data": case.name,
                "of": metric,
                "c": c,
                "returned": number / len(losses_N),
                "lost_by_band": band / len(losses_N),
                "lost_by_threshold": threshold / len(losses_N),
            }
        )
    return rows


def run(case: Case, trials: int, progress: Callable[[str, int, int], None]) -> list[dict[str, str | float | None]]:
    """Every way, of every metric, on the same divisions and draws."""
    summaries = []
    for how in get_args(How):
        divisions = [parts(case, how, seed) for seed in range(trials)]
        for metric in METRICS:
            done: dict[str, list[Trial]] = {way: [] for way in WAYS}
            for seed, division in enumerate(divisions):
                for way, learn in WAYS.items():
                    done[way].append(learn(*division, metric, seed))
                progress(f"{case.name} {how} {metric}", seed + 1, trials)
            summaries += [summary(case, how, metric, way, done[way]) for way in WAYS]
    return summaries


def main() -> None:
    """Print both tables of each data and write them."""
    parser = ArgumentParser(prog="python -m experiments.cascades.guarantee", description=__doc__)
    parser.add_argument("data", nargs="*", choices=get_args(DataName), default=get_args(DataName))
    parser.add_argument("--trials", type=int, default=200)
    options = parser.parse_args()
    for data in options.data:
        case = case_of(data)
        with progress_bars() as progress:
            summaries = run(case, options.trials, progress)
        bands = [row for metric in METRICS for row in coins(case, metric)]
        title = f"budget {GUARANTEE.budget:.0%}, confidence {GUARANTEE.confidence:.0%}, {options.trials} trials each"
        show(title, list(summaries[0]), [list(each.values()) for each in summaries])
        show("the band of equation 4 and a threshold", list(bands[0]), [list(each.values()) for each in bands])
        print(f"written: {keep({'trials': summaries, 'coins': bands}, WRITTEN / f'{data}.json')}")


if __name__ == "__main__":
    main()
