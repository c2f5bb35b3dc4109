"""What is promised of a cascade, kept or not: ramps and networks tested together, and Tabi's search for c beside it.

    OFFRAMP_DATA=... python -m experiments.cascade_guarantee [clinc150 ag_news sst2] [--trials 200]

MiniLM-L6 before all-mpnet-base-v2, every block of either with a ramp, as `experiments.cascade_models` makes them, on
rows that neither was trained or calibrated by: CLINC150's test part (4,500), 2,500 texts of AG News' test part, the 872
sentences of SST-2's dev part. Budget 1 %, confidence 90 %, of agreement with the large model, and of harm.

*Divided*: rows are halved at random; thresholds are found on one half as `offramp calibrate` does and tried on the
other, whose own noise may break the budget. *Drawn*: as many are drawn with replacement, and all rows are the
population, whose loss is known. *All*: thresholds of all ramps and of the small network's end together. Tried are the
cascade by its networks alone, with the ramps inside, the large network with its ramps, the small one's ramps without
its end, and sets of ramps drawn at random. *End*: the small network's end alone (`offramp calibrate --ramps ends`).
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from earlyexit.chain import Chain, joined
from earlyexit.codecs import find_codec
from earlyexit.dataset import LabelledRows, read_labelled
from earlyexit.reroute import reroute_probability
from earlyexit.store import load_model, read_card
from experiments import ag_news, sst2
from experiments.cascade_models import make_large, make_small
from experiments.data import RUNS, require_data
from experiments.features import features_of, outputs_of
from experiments.kit import keep, show
from experiments.mpnet import CLINC150, DataName, labelled
from offramp.jobs.block_costs import block_sizes
from offramp.jobs.calibration import CalibrateJob
from offramp.jobs.progress import progress_bars
from offramp.jobs.recording import join_records
from optimizer.risk import Guarantee, Metric
from optimizer.tabi import cutoffs
from optimizer.thresholds import design_rows, divide, learn_then_test
from profiles.networks import of_networks
from profiles.records import ExitRecords
from profiles.scores import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

GUARANTEE = Guarantee(budget=0.01, confidence=0.90)
KEPT = RUNS / "ensemble"
"""Where heads' inputs are kept: `experiments.ensemble_gain` looks at the same rows."""
WRITTEN = RUNS / "cascade_guarantee"
RANDOM_SETS = 24
CUTOFFS = (0.5, 0.7, 0.8, 0.9, 0.95)
"""Of the bands that are held against thresholds."""
How = Literal["divided", "drawn"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A chain of two networks, and what its exits say of rows that it has not seen."""

    name: str
    chain: Chain
    records: ExitRecords
    """Of entropies, as `offramp calibrate` has them for labels."""
    confidence_N: FloatArray
    """Calibrated, at the small network's end."""
    costs: tuple[float, ...]
    """Of every block, in those of the large network together."""

    @property
    def end(self) -> int:
        """The ramp after which inputs cross."""
        return self.chain.end_ramps[0]

    def subset(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Case:
        """Some rows."""
        return Case(
            name=self.name,
            chain=self.chain,
            records=self.records.subset(rows),
            confidence_N=self.confidence_N[rows],
            costs=self.costs,
        )


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


def mean_cost(case: Case, thresholds: dict[int, float], used: Sequence[int]) -> float:
    """Of the blocks that inputs run, those of networks that are not used left out."""
    counted = [cost if case.chain.network_of(block) in used else 0.0 for block, cost in enumerate(case.costs, start=0)]
    records = of_networks(case.records, used, case.chain)
    return float(np.dot(records.outcome(thresholds).survival, counted))


def sets_of_ramps(case: Case, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Ramps that are on: the named ways first, then sets drawn at random."""
    ramps, end = case.records.ramps, case.end
    inside = tuple(ramp for ramp in ramps if ramp < end)
    large = tuple(ramp for ramp in ramps if ramp > end)
    drawn = [tuple(np.array(ramps)[rng.random(len(ramps)) < rng.random()].tolist()) for _ in range(RANDOM_SETS)]
    return [(end,), ramps, large, (*inside, end), inside, *drawn]


def ours(calibration: Case, tried: Case, metric: Metric, seed: int, *, ends: bool = False) -> Trial:
    """Thresholds with a guarantee, tried on every set of ramps; `ends`: only the small network's end gets one."""
    known = promised(calibration.records, metric)
    known = known.of_ramps((calibration.end,)) if ends else known
    num_design = design_rows(len(known), GUARANTEE, CalibrateJob().design_share)
    design, tested = (known.subset(rows) for rows in divide(len(known), num_design, seed))
    found = learn_then_test(design, tested, GUARANTEE, calibration.costs).thresholds
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
        saved_inside=None if ends else 1 - mean_cost(tried, found, (0, 1)),
        saved_large=None if ends else 1 - mean_cost(tried, large, (1,)),
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
    known = {
        name: [value for each in trials if (value := asdict(each)[name]) is not None] for name in asdict(trials[0])
    }
    means = {name: fmean(values) if values else None for name, values in known.items()}
    return {"data": case.name, "how": how, "of": metric, "way": way, **means}


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


def unseen_rows(data: DataName) -> LabelledRows:
    """Rows that no model of the cascade was trained or calibrated by."""
    if data == "clinc150":
        return read_labelled(require_data(CLINC150), part="test")
    return labelled(ag_news.unseen_pairs()[:2500] if data == "ag_news" else sst2.sentences())


def case_of(data: DataName) -> Case:
    """What the exits of both models say of the rows, at the temperatures of their own calibrations."""
    rows, folders = unseen_rows(data), (make_small(data), make_large(data))
    cards = [read_card(folder) for folder in folders]
    chain = joined(
        tuple(card.name for card in cards),
        tuple(card.num_blocks for card in cards),
        tuple(card.ramps for card in cards),
    )
    outputs: dict[int, Tensor] = {}
    costs: list[float] = []
    for network, (folder, size) in enumerate(zip(folders, ("small", "large"), strict=True)):
        model = load_model(folder)
        codec = find_codec(model.info.codec, folder)
        path = KEPT / data / f"{size}-unseen-{data}.pt"
        _, of_block = outputs_of(model, features_of(model, rows, codec, path, "bfloat16"))
        outputs |= {chain.starts[network] + block: each for block, each in of_block.items()}
        costs += block_sizes(folder).values()
        labels, task = rows.targets(model.task, codec), model.task
    end = chain.end_ramps[0]
    records = join_records([(range(len(rows)), outputs)], "entropy", task, labels)
    large = sum(costs[end + 1 :])
    return Case(
        name=data,
        chain=chain,
        records=records,
        confidence_N=task.score(outputs[end]).numpy().astype(np.float64),
        costs=tuple(cost / large for cost in costs),
    )


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
    parser = ArgumentParser(prog="python -m experiments.cascade_guarantee", description=__doc__)
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
