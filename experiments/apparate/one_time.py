"""Thresholds that are set once and stay: what early-exit models have without Apparate (its sections 2.3 and 5.3)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from experiments.apparate.times import Answered
from optimizer.live.best_ramps import greedily, of_ramps
from optimizer.live.exit_times import ExitTimes
from profiles.records import ExitRecords
from profiles.scores import SCORES

GRID = 200
"""Thresholds that are tried where all ramps have the same."""


def answered(
    records: ExitRecords, thresholds: Mapping[int, float], times: ExitTimes, *, evaluated: Collection[int] | None = None
) -> Answered:
    """What these ramps, and no others, do with these inputs; `evaluated`: the ramps that cost time, None: the same."""
    outcome = records.outcome(thresholds)
    released_s_K = times.released_s(thresholds if evaluated is None else evaluated)
    return Answered(answer_s_N=released_s_K[outcome.exits_N], losses_N=outcome.losses_N, whole_s=times.whole_s)


def optimal(records: ExitRecords, times: ExitTimes) -> Answered:
    """Every input leaves at the earliest ramp that answers right, and ramps cost nothing (Apparate section 2.2)."""
    right_NE = np.column_stack([records.losses_NR == 0, np.ones(len(records), dtype=bool)])
    exits_N = np.array([*records.ramps, records.num_blocks - 1])[right_NE.argmax(1)]
    return Answered(answer_s_N=times.released_s(())[exits_N], losses_N=np.zeros(len(records)), whole_s=times.whole_s)


def same_threshold(records: ExitRecords, budget: float, times: ExitTimes, ramps: tuple[int, ...]) -> dict[int, float]:
    """The one threshold for all of these ramps that saves most while at most the budget is lost on these inputs.

    On a grid of the scores' quantiles, which is exact to one in 200 of them. Nobody leaves where none keeps it.
    """
    columns = [records.ramps.index(ramp) for ramp in ramps]
    grid = np.quantile(records.scores_NR[:, columns], np.linspace(0, 1, GRID + 1))
    found = dict.fromkeys(ramps, SCORES[records.score].never)
    most = answered(records, found, times).mean_saved
    for threshold in np.unique(grid).tolist():
        tried = dict.fromkeys(ramps, threshold)
        outcome = answered(records, tried, times)
        if outcome.losses_N.mean() <= budget and outcome.mean_saved > most:
            found, most = tried, outcome.mean_saved
    return found


def sampled(records: ExitRecords, share: float, rng: np.random.Generator) -> ExitRecords:
    """Inputs drawn evenly over a stream, in order."""
    rows = rng.choice(len(records), size=round(len(records) * share), replace=False)
    return records.subset(np.sort(rows).astype(np.int64))


def greedy_thresholds(
    records: ExitRecords, budget: float, times: ExitTimes, ramps: tuple[int, ...]
) -> dict[int, float]:
    """One threshold per ramp, as Apparate's greedy search finds them on these inputs."""
    return dict(greedily(times, budget)(of_ramps(records, ramps)))
