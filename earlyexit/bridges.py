"""Bridges of a model: made of its backbone, and begun with the weights that the whole model has (PAME, ICS'22, 5.2)."""

from __future__ import annotations

from torch import nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone
from earlyexit.model import EarlyExitModel
from earlyexit.ramps.bridge import BridgeRamp


def bridge_of(backbone: Backbone, block: int) -> nn.Module:
    """The bridge behind a block; raises ModelFolderError for a family that has none."""
    bridge = backbone.bridge(block)
    if bridge is None:
        raise ModelFolderError(
            f"{type(backbone).__name__} has no bridges: its blocks all give the same shape, or do not say which "
            "of them begin a region; take the ramp style of the full model's head"
        )
    return bridge


def begin_bridges(model: EarlyExitModel) -> None:
    """Give every ramp with a bridge the weights of the backbone's blocks and of the full model's head."""
    for block in model.ramp_indices:
        ramp = model.exit_head(block)
        if isinstance(ramp, BridgeRamp):
            ramp.transfer(bridge_of(model.backbone, block), model.head)
