"""E3, figure 21: batch sizes forecast at two cuts, and what they were.

    OFFRAMP_DATA=... python -m experiments.studies.fig21_forecast [--quick]

Computed: ten windows of two minutes at 100 requests/s, mixed from recorded easy and hard inputs. A history of 60
windows holds the probes (2 % of the inputs), or every input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from experiments.studies.kit import Comparison, Effort, Lines, Study, StudyResult, command

NUM_INPUTS = RATE_RPS * WINDOW_S
HISTORIES = {"probes": PROBE_SHARE * NUM_INPUTS, "all inputs": float(NUM_INPUTS)}
"""Inputs seen in each window of the past."""
DRAWN = ("gradual, 60 one way", TWO_SWITCHES.name)
"""Workloads that have a picture: a drift that can be foreseen, and a jump that cannot."""
SEEDS: dict[Effort, int] = {"full": 3, "quick": 1}

Found = Mapping[str, Mapping[str, Sequence[Batches]]]
"""By history and workload, one per seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Mean absolute errors, in inputs of a batch of 8."""

    forecast: float
    last: float
    """Of the window before, taken as the forecast."""


def errors(found: Sequence[Batches]) -> Errors:
    """On average."""
    return Errors(
        forecast=float(np.mean([each.forecast_error for each in found])),
        last=float(np.mean([each.last_error for each in found])),
    )


def forecasts(kinds: Kinds, cuts: list[int], workloads: Sequence[Workload], effort: Effort) -> Found:
    """Every workload, seen through either history; through the probes alone with quick effort."""
    histories = HISTORIES if effort == "full" else {"probes": HISTORIES["probes"]}
    return {
        history: {
            workload.name: [forecast_batches(workload, kinds, seen, cuts, seed) for seed in range(SEEDS[effort])]
            for workload in workloads
        }
        for history, seen in histories.items()
    }


def compare(kinds: Kinds, workloads: Sequence[Workload], effort: Effort) -> StudyResult:
    """Forecasts beside what came, at the cuts of `figure_21_cuts`."""
    cuts = figure_21_cuts(kinds)
    found = forecasts(kinds, cuts, workloads, effort)
    told = {
        history: {name: errors(each) for name, each in by_workload.items()} for history, by_workload in found.items()
    }
    return StudyResult(
        comparisons=tuple(each for history, rows in told.items() for each in _comparisons(history, rows)),
        pictures=tuple(_lines(name, cuts, found["probes"][name][0]) for name in DRAWN if name in found["probes"]),
        figures={
            "cuts": cuts,
            "errors": {
                history: {name: {"forecast": each.forecast, "last": each.last} for name, each in rows.items()}
                for history, rows in told.items()
            },
            "windows": {name: _document(each[0]) for name, each in found["probes"].items()},
        },
        notes=(
            f"The cuts are before blocks {cuts[0]} and {cuts[1]}: there the 50:50 mix has first lost a third of its "
            "inputs, and half of them.",
            *(_told(history, rows) for history, rows in told.items()),
        ),
    )


def _comparisons(history: str, rows: Mapping[str, Errors]) -> tuple[Comparison, ...]:
    """The worst, and the mean without the jumps in every window's past that nothing foretells."""
    usual = [each for name, each in rows.items() if name != TWO_SWITCHES.name] or list(rows.values())
    worst = max(rows, key=lambda name: rows[name].forecast)
    return (
        Comparison(
            name=f"mean error of {INPUT_BATCH} inputs, {history}",
            ours=float(np.mean([each.forecast for each in usual])),
        ),
        Comparison(name=f"the same of the last value, {history}", ours=float(np.mean([each.last for each in usual]))),
        Comparison(name=f"worst workload ({worst}), {history}", ours=rows[worst].forecast),
    )


def _lines(name: str, cuts: Sequence[int], found: Batches) -> Lines:
    series: dict[str, tuple[float, ...]] = {}
    for position, cut in enumerate(cuts):
        series[f"before block {cut}: forecast"] = tuple(found.forecast_WC[:, position].tolist())
        series[f"before block {cut}: actual"] = tuple(found.true_WC[:, position].tolist())
    return Lines(
        title=f"What is left of a batch of {INPUT_BATCH}: {name}",
        x_label="window of two minutes",
        y_label="inputs",
        x=tuple(float(window) for window in range(1, FIGURE_21_WINDOWS + 1)),
        series=series,
    )


def _told(history: str, rows: Mapping[str, Errors]) -> str:
    words = "; ".join(f"{name} {each.forecast:.2f} ({each.last:.2f})" for name, each in rows.items())
    return f"Mean absolute error in inputs, from {history} (of the last value): {words}."


def _document(found: Batches) -> dict[str, Any]:
    return {"forecast": found.forecast_WC, "last": found.last_WC, "actual": found.true_WC}


def run(effort: Effort) -> StudyResult:
    """Recorded inputs; quick effort has the workloads that are drawn."""
    records = bert12_sst2("entropy")
    kinds = easy_and_hard(records.outcome(dict.fromkeys(records.ramps, ENTROPY)))
    workloads = [each for each in (*WORKLOADS, TWO_SWITCHES) if effort == "full" or each.name in DRAWN]
    return compare(kinds, workloads, effort)


STUDY = Study(
    name="fig21_forecast",
    figure="21",
    section="5.8.2",
    title="forecasts of batch sizes",
    claim="At two cuts, over ten windows, forecast batch sizes closely match those that come",
    detail="Input batches of 8. The paper gives no figures and does not say how its workload changes.",
    how="computed",
    exits=f"recorded: BERT-base on SST-2 dev, entropy {ENTROPY:g}, in changing mixes of easy and hard",
    hardware="none: one core",
    minutes=1,
    quick_s=4,
    seed=0,
    needs=(BERT12_SST2,),
    differs="There is no figure to compare with. A drift is foreseen to a tenth of an input where the history holds "
    "all inputs, and to a fifth of one from probes, whose own chance is that large in a single window. A jump is not "
    "foreseen: the window that it comes with is wrong by all of it. A window of two minutes has 12,000 inputs here; "
    "the paper does not tell its number. E3 counts what leaves at its ramps, all of which are on, and so sees every "
    "input; Offramp switches ramps off, and sees what these would do from the probes alone.",
    run=run,
)

if __name__ == "__main__":
    command(STUDY)
