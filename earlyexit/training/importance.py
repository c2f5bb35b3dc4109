"""The attention that the tokens of inputs receive in a whole network, for calibration and studies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Encoded
from earlyexit.training.ramps import batches_by_length, no_progress, pack

if TYPE_CHECKING:
    from earlyexit.network.model import EarlyExitModel
    from earlyexit.training.ramps import Progress

TIMED_INPUTS, TIMED_BATCH = 32, 8
"""Inputs that are timed, few so that calibration stays short, and their batch size, similar to a replica's."""


@torch.inference_mode()
def importance_of(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> list[npt.NDArray[np.float32]]:
    """Returns the attention of every input's tokens, (N,), summed over blocks, heads and queries.

    Raises PlanError for networks that do not measure it.
    """
    check_measures(model)
    found: list[npt.NDArray[np.float32]] = [np.zeros(0, dtype=np.float32)] * len(encoded)
    for rows in batches_by_length(encoded, batch):
        inputs, layout = pack([encoded[row] for row in rows], model.device)
        begun = (*inputs, torch.zeros(layout.num_tokens, device=model.device))
        importance_N = model.run_blocks(0, model.num_blocks, begun, layout)[-1]
        for row, own in zip(rows, torch.split(importance_N, layout.lengths_B.tolist()), strict=True):
            found[row] = own.cpu().numpy()
        progress("attention", sum(len(each) > 0 for each in found), len(encoded))
    return found


@torch.inference_mode()
def times_measured(model: EarlyExitModel, encoded: Sequence[Encoded], *, rounds: int = 5) -> float:
    """Returns the factor by which measuring attention increases a network's processor time; at least 1.

    It is the median over rounds that alternate with and without the measurement, on inputs of all lengths.
    """
    step = max(1, len(encoded) // TIMED_INPUTS)
    some = sorted(encoded, key=lambda each: each.length)[::step][-TIMED_INPUTS:]
    packed = [pack(some[first : first + TIMED_BATCH], model.device) for first in range(0, len(some), TIMED_BATCH)]

    def took_s(*, measured: bool) -> float:
        began_s = time.process_time()
        for inputs, layout in packed:
            more = (torch.zeros(layout.num_tokens, device=model.device),) if measured else ()
            model.run_blocks(0, model.num_blocks, (*inputs, *more), layout)
        return time.process_time() - began_s

    took_s(measured=True)  # the first one warms up
    return max(1.0, median(took_s(measured=True) / took_s(measured=False) for _ in range(rounds)))


def check_measures(model: EarlyExitModel) -> None:
    """Raise PlanError for a network that does not measure how much attention tokens receive."""
    if not model.measures_importance:
        raise PlanError(
            f"{model.info.name}: words are pruned by the attention that they receive, which networks of the family "
            f"{model.info.family!r} do not tell"
        )
