"""Inference layers for CPUs, with weights in oneDNN's own memory layout.

Torch multiplies float32 matrices with MKL, and converts bfloat16 weights to oneDNN's layout in every call. Weights that
already have this layout are 2.0 to 2.3 times as fast in float32 and 1.1 to 1.4 times as fast in bfloat16, above all in
small batches (`experiments.networks.linear_layers@654e280`).

Convolutions use the same layout, with the norms after them folded into their weights. The channels-last format alone
gains little (`experiments.networks.convolution_layers@654e280`).
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
from earlyexit.network.boundary import round_up
from earlyexit.network.model import EarlyExitModel, SegmentRunner

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
"""Activations by their names in `transformers`."""
LEAST_STEP = 4
STEPS_PER_OCTAVE = 16


class ActivatedLinear(nn.Linear):
    """A linear layer and its activation."""

    def __init__(self, inputs: int, outputs: int, activation: str) -> None:
        """`activation`: a key of `ACTIVATIONS`."""
        super().__init__(inputs, outputs)
        self.activation = activation

    def forward(self, values: Tensor) -> Tensor:
        """Maps (N, inputs) to (N, outputs)."""
        return ACTIVATIONS[self.activation](super().forward(values))


class SummedLinear(nn.Linear):
    """A linear layer to whose outputs other values are added: the end of a residual branch."""

    def forward(self, values: Tensor, others: Tensor) -> Tensor:  # type: ignore[override] # has one input more
        """Maps (N, inputs) and (N, outputs) to (N, outputs)."""
        return super().forward(values) + others


def padded_num_rows(rows: int) -> int:
    """Returns the number of rows to which a batch of `rows` rows is padded.

    oneDNN generates code for each number of rows, which takes 0.3 to 0.6 ms and 0.6 MB, and caches 1024 of them. Packed
    batches of mixed lengths, which shrink at ramps, would rarely have the same number of rows twice.
    """
    return round_up(rows, STEPS_PER_OCTAVE, least=LEAST_STEP)


def pad_rows(values: Tensor) -> Tensor:
    """Returns (N, D) padded with zeros to `padded_num_rows` rows."""
    rows, width = values.shape
    num_rows = padded_num_rows(rows)
    if num_rows == rows:
        return values
    padded = values.new_empty(num_rows, width)
    padded[:rows] = values
    padded[rows:] = 0
    return padded


TYPICAL_ROWS = 256
"""The number of rows for which oneDNN optimizes its layout. The layout works with any number."""
FUSED: Mapping[str | None, tuple[str, str]] = {
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
"""The activations that oneDNN can fuse: torch's name and algorithm for each."""
REORDERED = (nn.Linear, ActivatedLinear, SummedLinear)
"""The classes of layers that are replaced. Other subclasses of `nn.Linear` may compute something else."""

_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_LINEAR_AND_SUM = torch.ops.mkldnn._linear_pointwise.binary


class ReorderedLinear(nn.Module):
    """A linear layer for inference on a CPU, with a copy of the original layer's weights.

    The activation of an `ActivatedLinear` and the sum of a `SummedLinear` are fused, because with few rows the number
    of operations decides the time.
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
        raise ModelFolderError("a model with reordered linear layers cannot be saved; save it before reordering")


class ReorderedConvolution(nn.Module):
    """An `nn.Conv2d` and the batch norm after it, for inference on a CPU in float32."""

    def __init__(self, convolution: nn.Conv2d, norm: nn.BatchNorm2d | None = None) -> None:
        super().__init__()
        fused = convolution if norm is None else fuse_conv_bn_eval(convolution, norm)
        assert not isinstance(fused.padding, str)
        self._geometry = (list(fused.padding), list(fused.stride), list(fused.dilation), fused.groups)
        weight = fused.weight.detach().to_mkldnn()
        self._weight: Tensor = torch._C._nn.mkldnn_reorder_conv2d_weight(weight, *self._geometry)
        # It is a parameter because the model derives its dtype from its first parameter.
        self.bias = None if fused.bias is None else nn.Parameter(fused.bias.detach().clone(), requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        results: Tensor = torch.ops.mkldnn._convolution_pointwise(
            values, self._weight, self.bias, *self._geometry, "none", [], ""
        )
        return results

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ModelFolderError("a model with reordered convolutions cannot be saved; save it before reordering")


def _onednn_supports(weight: Tensor) -> bool:
    """Whether oneDNN can multiply by these weights. It needs a CPU, and AVX-512 for bfloat16."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())


def reorder_convolutions(model: nn.Module) -> None:
    """Replaces the convolutions, and their norms, that modules declare in `folds` by reordered convolutions.

    Does nothing without oneDNN, on other devices than CPUs, or for weights that are not float32. Afterwards the model
    cannot be trained, moved, exported or saved.
    """
    for parent in list(model.modules()):
        for name, norm_name in getattr(parent, "folds", {}).items():
            convolution, norm = getattr(parent, name), getattr(parent, norm_name)
            if convolution.weight.dtype == torch.float32 and _onednn_supports(convolution.weight):
                folded = norm if isinstance(norm, nn.BatchNorm2d) else None
                setattr(parent, name, ReorderedConvolution(convolution, folded))
                setattr(parent, norm_name, nn.Identity())


def reorder_linears(model: nn.Module) -> None:
    """Replaces the model's linear layers by reordered ones, without using more memory.

    Layers that oneDNN does not support are not replaced, nor are layers whose backbone accesses their weights.
    Afterwards the model cannot be trained, moved, exported or saved.
    """
    excluded = {
        inner for each in model.modules() if not getattr(each, "reorders_linears", True) for inner in each.modules()
    }
    for parent in [each for each in model.modules() if each not in excluded]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and type(child) in REORDERED and _onednn_supports(child.weight):
                setattr(parent, name, ReorderedLinear(child))
    for backbone in model.modules():
        if getattr(backbone, "fills_rows", None) is False:
            backbone.fills_rows = True  # type: ignore[assignment] # nn.Module declares attributes as tensors or modules
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # a view would keep the weights' whole file in memory


def torch_segments(model: EarlyExitModel, _: object = None) -> SegmentRunner:
    """Opens the backend `torch`.

    On a CPU this is the model itself, with reordered layers; on a GPU, its captured segments. Models with memory of
    sequences are never captured, because each run reads keys and values of another length.
    """
    if model.device.type == "cuda":
        if model.backbone.kept_bytes or model.backbone.own_runtime:
            return model
        return CapturedSegments(model, recorder_of(model.device))
    # Reordered linear layers have no parameters, and the model derives its dtype from its first parameter.
    model.backbone.dtype_of_weights = nn.Parameter(torch.empty(0, dtype=model.dtype), requires_grad=False)
    reorder_convolutions(model)
    reorder_linears(model)
    return model
