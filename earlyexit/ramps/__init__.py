"""Exit heads; `base.py` holds the contract, one file per style beside it."""

from __future__ import annotations

from typing import Literal

from earlyexit.ramps.base import Pooling, Ramp, pooled_size
from earlyexit.ramps.light import LightRamp
from earlyexit.ramps.pooler import PoolerRamp

RampStyle = Literal["light", "pooler", "pooler-relu"]


def build_ramp(style: RampStyle, size: int, num_outputs: int, pooling: Pooling) -> Ramp:
    """An untrained ramp on pooled vectors of `size` numbers.

    `pooler` is DeeBERT's, `pooler-relu` the same with DistilBERT's activation.
    """
    match style:
        case "light":
            return LightRamp(size, num_outputs, pooling=pooling)
        case "pooler":
            return PoolerRamp(size, num_outputs, pooling=pooling)
        case "pooler-relu":
            return PoolerRamp(size, num_outputs, pooling=pooling, activation="relu")


__all__ = ["LightRamp", "PoolerRamp", "Pooling", "Ramp", "RampStyle", "build_ramp", "pooled_size"]
