"""What an ingress's probes see: which ramps, and in which unit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import get_args

from deployments.settings import ServeSettings
from earlyexit.store import ModelCard
from profiles.records import ExitRecords, Score
from profiles.stream import StreamShape

logger = logging.getLogger(f"ray.serve.{__name__}")


def probe_shape(settings: ServeSettings, card: ModelCard) -> StreamShape | None:
    """None where no probes are wanted, or where the exit policy has no score that another plan could use."""
    if not settings.probe_share:
        return None
    policy = settings.plan.get("policy") or ({} if settings.control is None else settings.control.policy)
    if policy.get("name") == "recorded":
        # Only what the records hold can be decided, whatever ramps the model has.
        records = ExitRecords.load(Path(policy["records"]))
        return StreamShape(score=records.score, num_blocks=records.num_blocks, ramps=records.ramps)
    for score in get_args(Score):
        if policy.get("name", "entropy") == score:
            return StreamShape(score=score, num_blocks=card.num_blocks, ramps=card.ramps)
    logger.warning("exit policy %s cannot be probed: there are no probes", policy.get("name"))
    return None
