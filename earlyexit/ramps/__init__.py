"""Exit heads; `base.py` holds the contract, one file per style beside it."""

from __future__ import annotations

from typing import Literal

from earlyexit.ramps.base import Ramp
from earlyexit.ramps.light import LightRamp
from earlyexit.ramps.mlp import MlpRamp
from earlyexit.ramps.pooler import PoolerRamp
from earlyexit.ramps.pooling import Pooling, pooled_size

RampStyle = Literal["light", "mlp", "pooler", "pooler-relu"]


def build_ramp(style: RampStyle, size: int, num_outputs: int, pooling: Pooling) -> Ramp:
    """An untrained ramp on pooled vectors of `size` numbers.

    `pooler` is DeeBERT's, `pooler-relu` the same with DistilBERT's activation.
    """
    match style:
        case "light":
            return LightRamp(size, num_outputs, pooling=pooling)
        case "mlp":
            return MlpRamp(size, num_outputs, pooling=pooling)
        case "pooler":
            return PoolerRamp(size, num_outputs, pooling=pooling)
        case "pooler-relu":
            return PoolerRamp(size, num_outputs, pooling=pooling, activation="relu")


__all__ = ["LightRamp", "MlpRamp", "PoolerRamp", "Pooling", "Ramp", "RampStyle", "build_ramp", "pooled_size"]
