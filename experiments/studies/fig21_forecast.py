"""E3, figure 21: batch sizes forecast at two cuts, and what they were.

Computed: ten windows of two minutes at 100 requests/s, mixed from recorded easy and hard inputs. A history of 60
windows holds the probes (2 % of the inputs), or every input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from experiments.drift import Kinds, easy_and_hard
from experiments.forecasts import (
    ENTROPY,
    FIGURE_21_WINDOWS,
    INPUT_BATCH,
    PROBE_SHARE,
    RATE_RPS,
    TWO_SWITCHES,
    WINDOW_S,
    WORKLOADS,
    Batches,
    Workload,
    figure_21_cuts,
    forecast_batches,
)
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare

NUM_INPUTS = RATE_RPS * WINDOW_S
HISTORIES = {"probes": PROBE_SHARE * NUM_INPUTS, "all inputs": float(NUM_INPUTS)}
"""Inputs seen in each window of the past."""
DRAWN = ("gradual, 60 one way", TWO_SWITCHES.name)
"""Workloads that have a picture: a drift that can be foreseen, and a jump that cannot."""
SEEDS: dict[Effort, int] = {"full": 3, "quick": 1}

Errors = Mapping[str, float]
"""Mean absolute errors, in inputs of a batch of 8: `forecast`, and `last` of the window before taken as one."""


def errors(found: Sequence[Batches]) -> Errors:
    """On average."""
    return {
        "forecast": float(np.mean([each.forecast_error for each in found])),
        "last": float(np.mean([each.last_error for each in found])),
    }


def compare(kinds: Kinds, workloads: Sequence[Workload], effort: Effort) -> StudyResult:
    """Forecasts beside what came, seen through either history; through the probes alone with quick effort."""
    cuts = figure_21_cuts(kinds)
    found = {
        history: {
            workload.name: [forecast_batches(workload, kinds, seen, cuts, seed) for seed in range(SEEDS[effort])]
            for workload in workloads
        }
        for history, seen in HISTORIES.items()
        if effort == "full" or history == "probes"
    }
    told = {history: {name: errors(each) for name, each in rows.items()} for history, rows in found.items()}
    first = {name: each[0] for name, each in found["probes"].items()}
    return StudyResult(
        comparisons=tuple(each for history, rows in told.items() for each in _comparisons(history, rows)),
        pictures=tuple(_lines(name, cuts, first[name]) for name in DRAWN if name in first),
        figures={
            "cuts": cuts,
            "errors": told,
            "windows": {
                name: {"forecast": each.forecast_WC, "last": each.last_WC, "actual": each.true_WC}
                for name, each in first.items()
            },
        },
        tables=(
            Table(
                f"Mean absolute error in inputs; cuts before blocks {cuts[0]} and {cuts[1]}",
                ("history", "workload", "forecast", "last value"),
                tuple(
                    (history, name, each["forecast"], each["last"])
                    for history, rows in told.items()
                    for name, each in rows.items()
                ),
            ),
        ),
    )


def _comparisons(history: str, rows: Mapping[str, Errors]) -> Iterator[Comparison]:
    """The worst, and the mean without the jumps in every window's past that nothing foretells."""
    usual = [each for name, each in rows.items() if name != TWO_SWITCHES.name] or list(rows.values())
    worst = max(rows, key=lambda name: rows[name]["forecast"])
    forecast, last = (float(np.mean([each[of] for each in usual])) for of in ("forecast", "last"))
    yield Comparison(f"mean error of {INPUT_BATCH} inputs, {history}", forecast)
    yield Comparison(f"the same of the last value, {history}", last)
    yield Comparison(f"worst workload ({worst}), {history}", rows[worst]["forecast"])


def _lines(name: str, cuts: Sequence[int], found: Batches) -> Lines:
    series = {
        f"before block {cut}: {which}": tuple(values_WC[:, position].tolist())
        for position, cut in enumerate(cuts)
        for which, values_WC in (("forecast", found.forecast_WC), ("actual", found.true_WC))
    }
    x = tuple(float(window) for window in range(1, FIGURE_21_WINDOWS + 1))
    return Lines(f"What is left of a batch of {INPUT_BATCH}: {name}", "window of two minutes", "inputs", x, series)


def run(effort: Effort) -> StudyResult:
    """Recorded inputs; quick effort has the workloads that are drawn."""
    records = bert12_sst2("entropy")
    kinds = easy_and_hard(records.outcome(dict.fromkeys(records.ramps, ENTROPY)))
    workloads = [each for each in (*WORKLOADS, TWO_SWITCHES) if effort == "full" or each.name in DRAWN]
    return compare(kinds, workloads, effort)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
