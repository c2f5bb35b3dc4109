"""Which plans a strategy chooses from."""

from __future__ import annotations

from dataclasses import dataclass

from optimizer.decision import Strategy
from optimizer.moves import RampRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that it does not rule out."""

    ramps: RampRule = "choose"
    splits_per_stage: bool = True
    """Whether a stage may have several splits."""
    several_stages: bool = True
    one_batch: bool = False
    """Whether all splits have the same batch size."""


SPACES: dict[Strategy, Space] = {
    "best": Space(),
    # The model without exits, replicated.
    "stock": Space(ramps="none", splits_per_stage=False, several_stages=False),
    # All ramps in one split: the batch shrinks (E3 section 2.3).
    "early-exit": Space(ramps="all", splits_per_stage=False, several_stages=False),
    # Each split on replicas of its own, one batch size, ramps as the model has them (E3 sections 3.2 and 3.3).
    "e3": Space(ramps="all", splits_per_stage=False, one_batch=True),
    # One device runs all splits.
    "serial": Space(several_stages=False),
}
