"""Running every ramp on known inputs, for exit records and temperatures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from earlyexit.model import EarlyExitModel
from earlyexit.signature import Encoded
from earlyexit.train import Progress, after_every_block, no_progress


@torch.inference_mode()
def exit_outputs(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> dict[int, Tensor]:
    """Temperature-scaled outputs (N, C), float32, of every ramp and of the full model's head, by block."""
    exits = [*model.ramp_indices, model.num_blocks - 1]
    outputs = {block: torch.empty(len(encoded), model.task.num_outputs) for block in exits}
    for rows, block, hidden, layout in after_every_block(model, encoded, batch, lambda *n: progress("records", *n)):
        if block in outputs:
            outputs[block][rows] = model.exit_outputs(block, hidden, layout).cpu()
    return outputs
