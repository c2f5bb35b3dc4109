"""Exit heads. `heads.py` has the contract. torch is imported when a head is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from earlyexit.named import import_attribute
from earlyexit.ramps.pooling import Pooling

if TYPE_CHECKING:
    from earlyexit.ramps.heads import Ramp

BRIDGE = "bridge"
"""The style of ramps that consist of copies of some blocks and a head of the full model's style."""

# Style -> import path of its Ramp. To add a style, write its class and add one line here.
RAMPS = {
    "adapted": "earlyexit.ramps.heads:AdaptedRamp",
    BRIDGE: "earlyexit.ramps.heads:BridgeRamp",
    "conv": "earlyexit.ramps.heads:ConvRamp",
    "deconv": "earlyexit.ramps.heads:DeconvRamp",
    "given": "earlyexit.ramps.heads:IdentityHead",
    "light": "earlyexit.ramps.heads:LightRamp",
    "maps": "earlyexit.ramps.heads:MapsRamp",
    "mlp": "earlyexit.ramps.heads:MlpRamp",
    "normed": "earlyexit.ramps.heads:NormedRamp",
    "pooler": "earlyexit.ramps.heads:PoolerRamp",
    "pooler-relu": "earlyexit.ramps.heads:ReluPoolerRamp",
    "reduced": "earlyexit.ramps.heads:ReducedRamp",
    "vocabulary": "earlyexit.ramps.heads:VocabularyHead",
    "vocabulary-bias": "earlyexit.ramps.heads:BiasedVocabularyHead",
}
if TYPE_CHECKING:
    RampStyle = str
else:  # at run time, so that pydantic checks names in files against the table
    RampStyle = Literal[tuple(RAMPS)]


def build_ramp(style: RampStyle, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> Ramp:
    """Returns an untrained ramp. `row`: the shape of a hidden state's rows, (D,), or (C, H, W) for a map.

    `output_shape`: the task's. Raises ModelFolderError if the style or the pooling does not fit the shapes.
    """
    ramp: Ramp = import_attribute(RAMPS[style])(row, output_shape, pooling)
    return ramp
