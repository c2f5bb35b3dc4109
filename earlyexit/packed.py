"""Linear layers whose weights are kept in oneDNN's own layout: how a CPU serves a model that no longer changes.

Torch multiplies float32 matrices by MKL, and lays bfloat16 weights out anew in every call. oneDNN with the layout kept
is 2.2 to 2.9 times as fast in float32 and 1.1 to 1.7 times in bfloat16, most where batches are small (one core of an
AMD EPYC with AVX-512, BERT-base's feed-forward layer, 10 to 800 tokens; `python -m experiments.linear_layers`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError

TYPICAL_TOKENS = 256
"""Rows that the layout is chosen for; any number can be multiplied with it."""


class PackedLinear(nn.Module):
    """What `nn.Linear` computes, for inference on a CPU; the layer that it is made of may be thrown away."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_TOKENS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(values, self._weight, self._bias, "none", [], "")
        return result

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ModelFolderError("a model with packed linear layers cannot be saved: save it as it was loaded")


def pack_linears(model: nn.Module) -> None:
    """Put packed layers in the place of the model's linear ones; nothing where oneDNN or a CPU is missing.

    The model can then be neither trained, moved, exported nor saved. It takes no more memory than before.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call] # torch's, not ours
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(child))
