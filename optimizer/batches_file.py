"""Recorded batches in a problem file: a bit mask of ramps for each input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from earlyexit.errors import PlanError
from optimizer.problem import PlanProblem
from optimizer.problem_shape import BatchesDocument
from profiles.records import ExitRecords, RecordedBatches
from profiles.scores import BoolArray, FloatArray

ROUNDING = 0.005
"""Allowed difference of survival, which may be written with two decimals."""


def recorded_document(batches: RecordedBatches) -> dict[str, Any]:
    """Returns plain data that `batches_of` reads."""
    document: dict[str, Any] = {"size": batches.size, "sure": _masks(batches.sure_NR)}
    if batches.zero_one:
        return {**document, "lost": _masks(batches.losses_NR > 0)}
    rows = zip(batches.losses_NR, batches.sure_NR, strict=True)
    return {**document, "losses": [losses_R[sure_R].tolist() for losses_R, sure_R in rows]}


def batches_of(document: BatchesDocument, num_blocks: int, ramps: tuple[int, ...]) -> RecordedBatches:
    """Returns the batches of a document; raises PlanError or DataError if they do not fit the ramps or each other."""
    sure_NR = _bits(document.sure, len(ramps), "sure")
    return RecordedBatches(
        num_blocks=num_blocks,
        ramps=ramps,
        sure_NR=sure_NR,
        losses_NR=_losses(document, sure_NR),
        size=document.size,
        zero_one=document.losses is None,
    )


def check_survival(batches: RecordedBatches, survival_N: Sequence[float]) -> None:
    """Raises PlanError, with the first block, if survival is not the mean of the batches."""
    exits_N = batches.exits_N(batches.ramps)
    for block, share in enumerate(survival_N):
        recorded = float((exits_N >= block).mean())
        if abs(recorded - share) > ROUNDING:
            raise PlanError(f"batches: {recorded:.3g} of their inputs reach block {block}; survival says {share:.3g}")


def with_recorded_batches(problem: PlanProblem, records: ExitRecords, thresholds: Mapping[int, float]) -> PlanProblem:
    """Returns the problem with recorded batches, as large as the largest batch that can be planned."""
    largest = max(table.batches[-1] for table in problem.latency.values())
    size = min(largest, len(records))
    return replace(problem, batches=RecordedBatches.of_records(records, thresholds, size, problem.ramps))


def _losses(document: BatchesDocument, sure_NR: BoolArray) -> FloatArray:
    if (document.lost is None) == (document.losses is None):
        found = "neither" if document.lost is None else "both"
        raise PlanError(f"batches: {found} of lost and losses are given; one of them is needed")
    rows: Sequence[object] = document.lost if document.lost is not None else document.losses or ()
    if len(rows) != len(sure_NR):
        raise PlanError(f"batches: {len(rows)} inputs have losses, {len(sure_NR)} are recorded")
    if document.lost is not None:
        return _bits(document.lost, sure_NR.shape[1], "lost").astype(np.float64)
    losses_NR = np.zeros(sure_NR.shape)
    for row, (costs, sure_R) in enumerate(zip(document.losses or (), sure_NR, strict=True)):
        if len(costs) != sure_R.sum():
            raise PlanError(f"batches: input {row} has {len(costs)} losses; {sure_R.sum()} ramps let it leave")
        losses_NR[row, sure_R] = costs
    return losses_NR


def _masks(bits_NR: BoolArray) -> list[int]:
    """Returns one bit mask per row, whose bit i is column i. They are Python integers: there may be over 64 ramps."""
    return [sum(1 << int(column) for column in np.flatnonzero(bits_R)) for bits_R in bits_NR]


def _bits(masks: Sequence[int], num_ramps: int, name: str) -> BoolArray:
    beyond = [row for row, mask in enumerate(masks) if mask >> num_ramps]
    if beyond:
        raise PlanError(
            f"batches.{name}.{beyond[0]} is {masks[beyond[0]]}; with {num_ramps} ramps at most {(1 << num_ramps) - 1}"
        )
    rows = [[bool(mask >> column & 1) for column in range(num_ramps)] for mask in masks]
    return np.array(rows, dtype=bool).reshape(len(masks), num_ramps)
