"""Exit heads: `heads.py` holds the contract and every style. Without torch, until one is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from earlyexit.named import imported
from earlyexit.ramps.pooling import Pooling

if TYPE_CHECKING:
    from earlyexit.ramps.heads import Ramp

BRIDGE = "bridge"
"""The style of ramps that are a copy of some blocks and a head of the full model's style."""

# Style -> where its Ramp is. A style is one class there and one line here.
RAMPS = {
    "adapted": "earlyexit.ramps.vocabulary:AdaptedRamp",
    BRIDGE: "earlyexit.ramps.bridge:BridgeRamp",
    "conv": "earlyexit.ramps.heads:ConvRamp",
    "deconv": "earlyexit.ramps.maps:DeconvRamp",
    "given": "earlyexit.ramps.heads:GivenHead",
    "light": "earlyexit.ramps.heads:LightRamp",
    "maps": "earlyexit.ramps.maps:MapsRamp",
    "mlp": "earlyexit.ramps.heads:MlpRamp",
    "normed": "earlyexit.ramps.vocabulary:NormedRamp",
    "pooler": "earlyexit.ramps.heads:PoolerRamp",
    "pooler-relu": "earlyexit.ramps.heads:ReluPoolerRamp",
    "reduced": "earlyexit.ramps.heads:ReducedRamp",
    "vocabulary": "earlyexit.ramps.vocabulary:VocabularyHead",
    "vocabulary-bias": "earlyexit.ramps.vocabulary:BiasedVocabularyHead",
}
if TYPE_CHECKING:
    RampStyle = str
else:  # what reads files refuses other names, and lists these
    RampStyle = Literal[tuple(RAMPS)]


def build_ramp(style: RampStyle, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> Ramp:
    """An untrained ramp on a hidden state whose rows have this shape: (D,), or a map's (C, H, W).

    `output_shape` is what it gives for an input, as its task has it. Raises ModelFolderError where the style or the
    pooling does not fit the one or the other.
    """
    ramp: Ramp = imported(RAMPS[style])(row, output_shape, pooling)
    return ramp
