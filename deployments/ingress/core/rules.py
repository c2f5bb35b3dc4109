"""What an ingress goes by, whatever the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from earlyexit.tasks.label import differ
from profiles.records import Loss
from profiles.stream import StreamShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Of one ingress."""

    max_queued: float = math.inf
    """Inputs without an outcome that it takes."""
    calls_per_replica: int
    """Of the first stage, that nothing has come back from."""
    max_attempts: int
    """Times an input is sent from the start, before its owner is told."""
    slo_s: float | None = None
    slack: float = 0.0
    """Share of the SLO that stages which wait for full batches leave (E3 section 4)."""
    num_ingresses: int = 1
    admits: bool = True
    """Whether what cannot be in time is refused; never where there is no SLO."""
    shape: StreamShape | None = None
    """What is seen of probes, and of inputs that stay; None: nothing."""
    loss: Loss = differ
    """The task's, by which early answers are compared with the full model's."""
    probe_share: float = 0.0
    """Of the calls with new inputs, those that are probes; where inputs are steps, of the sequences."""
