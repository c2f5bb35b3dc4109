"""What exit heads look at, of a frozen backbone, kept in files: heads are then trained and judged in seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from earlyexit.boundary import FloatName
from earlyexit.dataset import LabelledRows
from earlyexit.reordered import reorder_linears
from earlyexit.train import exit_features
from offramp.jobs.progress import progress_bars
from offramp.jobs.recording import Outputs

if TYPE_CHECKING:
    from earlyexit.codecs.base import Codec
    from earlyexit.model import EarlyExitModel

BATCH = 64


def features_of(
    model: EarlyExitModel, rows: LabelledRows, codec: Codec[Any], path: Path, dtype: FloatName
) -> dict[int, Tensor]:
    """`exit_features` of rows, float32 though kept in half precision; read from the file if it is of these texts.

    The file does not know of which backbone it is: it lies beside one model.
    """
    texts = hashlib.sha256("\0".join(rows.texts).encode()).hexdigest()
    if path.is_file():
        kept = torch.load(path, weights_only=True)
        if (kept["texts"], kept["dtype"]) == (texts, dtype):
            return {block: feature.float() for block, feature in kept["features"].items()}
    computing = deepcopy(model).to(getattr(torch, dtype))
    reorder_linears(computing.backbone)
    with progress_bars() as progress:
        found = exit_features(computing, rows.encode(codec), batch=BATCH, progress=progress)
    features = {block: feature.half() for block, feature in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"texts": texts, "dtype": dtype, "features": features}, path)
    return {block: feature.float() for block, feature in features.items()}


@torch.inference_mode()
def outputs_of(model: EarlyExitModel, features: Mapping[int, Tensor]) -> Outputs:
    """All rows, and every exit's outputs of them with its temperature."""
    rows = range(len(next(iter(features.values()))))
    temperatures = model.temperatures_E
    return rows, {
        block: model.exit_head(block).classify(each).float() / temperatures[block] for block, each in features.items()
    }
