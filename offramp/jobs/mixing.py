"""An ensemble at calibration: whether it pays, and the exit records of it under every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from earlyexit.chain import Chain
from earlyexit.errors import DataError
from offramp.jobs.ensemble import Ensemble, find_ensemble
from offramp.jobs.recording import records_of_ensemble
from optimizer.risk import Guarantee
from optimizer.thresholds import learn_then_test
from profiles.networks import subsets
from profiles.records import ExitRecords

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.tasks.base import IntArray, Task, ValueArray

AS_LIKELY_AS_NOT = 0.5
"""The confidence at which these are found."""


def likely_thresholds(
    design: ExitRecords, budget: float, block_costs: Sequence[float] | None = None
) -> Mapping[int, float]:
    """About the thresholds that will be found at this budget, by the design part alone.

    They only say which inputs are rerouted. Raises DataError for too few inputs.
    """
    about = Guarantee(budget=budget, confidence=AS_LIKELY_AS_NOT)
    return learn_then_test(design, design, about, block_costs).thresholds


def mix_where_it_pays(
    outputs: Mapping[int, Tensor],
    alone: ExitRecords,
    likely: Mapping[int, float],
    chain: Chain,
    task: Task,
    labels: ValueArray,
    design: IntArray,
) -> tuple[Ensemble, list[ExitRecords]]:
    """An ensemble, and records as every choice of networks gives them, all networks first; `alone` where it is off.

    Its weights and its gain are found on the design part alone, so that what is promised is tested on rows that chose
    nothing. Rerouted are inputs that no exit up to an end is sure of by the `likely` thresholds. Raises DataError for
    scores that are shares.
    """
    if alone.score == "share":
        raise DataError("an ensemble's exits leave by entropy or confidence, not by share")
    sure_NR = alone.sure_NR(likely)
    until = [np.array(alone.ramps) <= end for end in chain.end_ramps]
    goes_on_NE = np.stack([~sure_NR[:, columns].any(1) for columns in until], axis=1)
    found = find_ensemble(outputs, chain, labels, goes_on_NE, design)
    if not found.is_on:
        return found, [alone]
    views = sorted(subsets(chain), key=len, reverse=True)
    return found, [records_of_ensemble(outputs, alone, chain, task, labels, found.weights, used) for used in views]
