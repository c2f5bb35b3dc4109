"""Running every ramp on known inputs, for exit records and temperatures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from earlyexit.model import EarlyExitModel
from earlyexit.signature import Encoded
from earlyexit.train import Progress, batches_by_length, no_progress, pack


@torch.inference_mode()
def exit_outputs(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> dict[int, Tensor]:
    """Temperature-scaled outputs (N, C), float32, of every ramp and of the full model's head, by block."""
    exits = [*model.ramp_indices, model.num_blocks - 1]
    outputs = {block: torch.empty(len(encoded), model.task.num_outputs) for block in exits}
    done = 0
    for rows in batches_by_length(encoded, batch):
        values, layout = pack([encoded[row] for row in rows], model.device)
        for block in range(model.num_blocks):
            values = model.run_blocks(block, block + 1, values, layout)
            if block in outputs:
                outputs[block][rows] = model.exit_outputs(block, values, layout).cpu()
        done += len(rows)
        progress("records", done, len(encoded))
    return outputs
