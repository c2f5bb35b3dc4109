"""Exit heads; `base.py` holds the contract, one file per style beside it."""

from __future__ import annotations

from typing import Literal

from earlyexit.ramps.base import Pooling, Ramp
from earlyexit.ramps.light import LightRamp
from earlyexit.ramps.pooler import PoolerRamp

RampStyle = Literal["light", "pooler", "pooler-relu"]


def build_ramp(style: RampStyle, hidden_size: int, num_classes: int, pooling: Pooling) -> Ramp:
    """An untrained ramp; `pooler` is DeeBERT's, `pooler-relu` the same with DistilBERT's activation."""
    match style:
        case "light":
            return LightRamp(hidden_size, num_classes, pooling=pooling)
        case "pooler":
            return PoolerRamp(hidden_size, num_classes, pooling=pooling)
        case "pooler-relu":
            return PoolerRamp(hidden_size, num_classes, pooling=pooling, activation="relu")


__all__ = ["LightRamp", "PoolerRamp", "Pooling", "Ramp", "RampStyle", "build_ramp"]
