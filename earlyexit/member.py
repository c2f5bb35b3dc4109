"""One input in the batch engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(slots=True, kw_only=True)
class Member(Generic[P]):
    """One input, in one replica."""

    sample_id: str
    payload: P
    """Its hidden state; the engine hands it on untouched."""
    deadline_s: float = math.inf
    """When its answer must be out, on the engine's clock."""
    reserve_s: float = 0.0
    """What must be left until the deadline for whatever comes after this engine."""
    origin: object = None
    """Whoever gave it to the engine."""
    probe: bool = False
    """Whether every ramp looks at it; it is never in one batch with inputs that are no probes."""
    queued_since_s: float = 0.0
    queued_serial: int = 0
    """Counts what was submitted to the engine; the same for all that came at once."""
    queue_s: float = 0.0
    """Time spent waiting here so far."""
    compute_s: float = 0.0
    """Time spent running here so far."""
