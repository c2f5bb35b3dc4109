"""Layers with weights in oneDNN's own layout, by which a CPU serves a model that no longer changes.

Torch multiplies float32 matrices by MKL and converts the layout of bfloat16 weights in every call. oneDNN with weights
in its layout is 2.0 to 2.3 times as fast in float32 and 1.1 to 1.4 times in bfloat16, most for small batches (one core
of an AMD EPYC with AVX-512, feed-forward layers of MiniLM and BERT-base; `experiments.networks.linear_layers@654e280`).

Convolutions are treated alike, with the norms behind them folded into their weights. Channels-last weights alone gain
little (`experiments.networks.convolution_layers@654e280`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from earlyexit.backends.captured import CapturedSegments, recorder_of
from earlyexit.errors import ModelFolderError
from earlyexit.network.model import EarlyExitModel, SegmentRunner

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
"""By their names in `transformers`."""
LEAST_STEP = 4
STEPS_PER_OCTAVE = 16


class ActivatedLinear(nn.Linear):
    """A linear layer and its activation."""

    def __init__(self, inputs: int, outputs: int, activation: str) -> None:
        """Raises KeyError for an activation that is not in `ACTIVATIONS`."""
        super().__init__(inputs, outputs)
        self.activation = activation

    def forward(self, values: Tensor) -> Tensor:
        """(N, inputs) to (N, outputs)."""
        return ACTIVATIONS[self.activation](super().forward(values))


class SummedLinear(nn.Linear):
    """A linear layer plus other values: the end of a residual branch."""

    def forward(self, values: Tensor, others: Tensor) -> Tensor:  # type: ignore[override] # has one input more
        """(N, inputs) and (N, outputs) to (N, outputs)."""
        return super().forward(values) + others


def padded_num_rows(rows: int) -> int:
    """Returns how many rows to multiply for `rows`: a few more, so that the same numbers repeat.

    oneDNN generates code for every number of rows, in 0.3 to 0.6 ms and 0.6 MB each, and keeps 1024 of them. Packed
    batches of mixed lengths, which shrink at ramps, would hardly ever have the same number of rows twice.
    """
    step = max(LEAST_STEP, 1 << (max(rows, 1).bit_length() - 1) >> STEPS_PER_OCTAVE.bit_length() - 1)
    return -(-rows // step) * step


def pad_rows(values: Tensor) -> Tensor:
    """Returns (N, D) padded with zeros to `padded_num_rows` rows."""
    rows, width = values.shape
    more = padded_num_rows(rows) - rows
    if not more:
        return values
    filled = values.new_empty(rows + more, width)
    filled[:rows] = values
    filled[rows:] = 0
    return filled


TYPICAL_ROWS = 256
"""The number of rows that the layout is chosen for; it works with any number."""
FUSED: Mapping[str | None, tuple[str, str]] = {
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
"""Activations that oneDNN can fuse, with torch's names and algorithms for them."""
REORDERED = (nn.Linear, ActivatedLinear, SummedLinear)
"""Exactly these classes: a subclass of `nn.Linear` may do more."""

_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_LINEAR_AND_SUM = torch.ops.mkldnn._linear_pointwise.binary


class ReorderedLinear(nn.Module):
    """Computes a linear layer for inference on a CPU; the original layer may be deleted.

    The activation of an `ActivatedLinear` and the sum of a `SummedLinear` are part of the same operation: with few
    rows, the number of operations decides the time.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach().clone()
        activation = linear.activation if isinstance(linear, ActivatedLinear) else None
        self._fused = FUSED.get(activation)
        self._after = None if activation is None or self._fused else ACTIVATIONS[activation]

    def forward(self, values: Tensor, others: Tensor | None = None) -> Tensor:
        rows = values.shape[0]
        values = pad_rows(values)
        results: Tensor
        if others is None:
            how, algorithm = self._fused or ("none", "")
            results = _LINEAR(values, self._weight, self._bias, how, [], algorithm)
        else:
            results = _LINEAR_AND_SUM(values, pad_rows(others), self._weight, self._bias, "add")
        if len(values) > rows:
            results = results[:rows]
        return results if self._after is None else self._after(results)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ModelFolderError("a model with reordered linear layers cannot be saved: save it as it was loaded")


class ReorderedConvolution(nn.Module):
    """Computes an `nn.Conv2d` and a batch norm behind it, in float32, for inference on a CPU."""

    def __init__(self, convolution: nn.Conv2d, norm: nn.BatchNorm2d | None = None) -> None:
        super().__init__()
        whole = convolution if norm is None else fuse_conv_bn_eval(convolution, norm)
        assert not isinstance(whole.padding, str)
        self._places = (list(whole.padding), list(whole.stride), list(whole.dilation), whole.groups)
        weight = whole.weight.detach().to_mkldnn()
        self._weight: Tensor = torch._C._nn.mkldnn_reorder_conv2d_weight(weight, *self._places)
        # A parameter, from which the model derives its float type when no other is left.
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone(), requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        results: Tensor = torch.ops.mkldnn._convolution_pointwise(
            values, self._weight, self.bias, *self._places, "none", [], ""
        )
        return results

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ModelFolderError("a model with reordered convolutions cannot be saved: save it as it was loaded")


def _multiplies(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by these weights: on a CPU, bfloat16 only with AVX-512."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())


def reorder_convolutions(model: nn.Module) -> None:
    """Replace convolutions that modules declare with their norms (`folds`) by reordered ones.

    It does nothing without oneDNN, off the CPU, or for weights that are not float32. Afterwards the model can be
    neither trained, moved, exported nor saved.
    """
    for parent in list(model.modules()):
        for name, norm_name in getattr(parent, "folds", {}).items():
            convolution, norm = getattr(parent, name), getattr(parent, norm_name)
            if convolution.weight.dtype == torch.float32 and _multiplies(convolution.weight):
                folded = norm if isinstance(norm, nn.BatchNorm2d) else None
                setattr(parent, name, ReorderedConvolution(convolution, folded))
                setattr(parent, norm_name, nn.Identity())


def reorder_linears(model: nn.Module) -> None:
    """Replace the model's linear layers by reordered ones.

    It does nothing where oneDNN does not multiply by them, or in a backbone that does more with its layers than call
    them. Afterwards the model can be neither trained, moved, exported nor saved. It takes no more memory than before.
    """
    left = {
        inner for each in model.modules() if not getattr(each, "reorders_linears", True) for inner in each.modules()
    }
    for parent in [each for each in model.modules() if each not in left]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and type(child) in REORDERED and _multiplies(child.weight):
                setattr(parent, name, ReorderedLinear(child))
    for backbone in model.modules():
        if getattr(backbone, "fills_rows", None) is False:
            backbone.fills_rows = True  # type: ignore[assignment] # no module of its own
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # a view would keep the weights' whole file in memory


def torch_segments(model: EarlyExitModel, *_: object) -> SegmentRunner:
    """Returns the model itself, with its linear layers and convolutions reordered; on a GPU its captured segments.

    Models that keep memory of sequences are never captured: every run reads another number of places.
    """
    if model.device.type == "cuda":
        if model.backbone.kept_bytes:
            return model
        return CapturedSegments(model, recorder_of(model.device))
    reorder_convolutions(model)
    reorder_linears(model)
    return model
