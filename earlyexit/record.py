"""Running every ramp on known inputs, for exit records and temperatures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from earlyexit.model import EarlyExitModel
from earlyexit.tokenizer import TokenIds
from earlyexit.train import Progress, batches_by_length, no_progress, pack


@torch.inference_mode()
def exit_logits(
    model: EarlyExitModel, encoded: Sequence[TokenIds], *, batch: int = 64, progress: Progress = no_progress
) -> dict[int, Tensor]:
    """Temperature-scaled logits (N, C), float32, of every ramp and of the full model's head, by block."""
    exits = [*model.ramp_indices, model.num_blocks - 1]
    logits = {block: torch.empty(len(encoded), model.num_classes) for block in exits}
    done = 0
    for rows in batches_by_length(encoded, batch):
        values, layout = pack([encoded[row] for row in rows], model.device)
        for block in range(model.num_blocks):
            values = model.run_blocks(block, block + 1, values, layout)
            if block in logits:
                logits[block][rows] = model.exit_logits(block, values, layout).cpu()
        done += len(rows)
        progress("records", done, len(encoded))
    return logits


def fit_temperature(logits_NC: Tensor, labels_N: Sequence[int]) -> float:
    """The factor that logits must be divided by for the least negative log likelihood (temperature scaling)."""
    targets_N = torch.tensor(labels_N)

    def loss(log_temperature: float) -> float:
        scaled = logits_NC / float(np.exp(log_temperature))
        return float(torch.nn.functional.cross_entropy(scaled, targets_N))

    best = minimize_scalar(loss, bounds=(np.log(0.05), np.log(20.0)), method="bounded")
    return float(np.exp(best.x))
