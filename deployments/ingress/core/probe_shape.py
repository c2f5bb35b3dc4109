"""What an ingress's probes see: which ramps, and in which unit."""

from __future__ import annotations

import logging
from pathlib import Path

from deployments.settings import ServeSettings
from earlyexit.store import ModelCard
from earlyexit.tasks import find_task
from optimizer.plan import NO_RAMPS
from profiles.records import ExitRecords
from profiles.scores import SCORES
from profiles.stream import StreamShape, shape_of

logger = logging.getLogger(f"ray.serve.{__name__}")


def probe_shape(settings: ServeSettings, card: ModelCard) -> StreamShape | None:
    """None where no probes are wanted, or where the exit policy has no score that another plan could use."""
    if not settings.probe_share:
        return None
    of_control = None if settings.control is None else settings.control.policy
    policy = settings.plan.policy or of_control or NO_RAMPS
    if policy.records is not None:
        # Only what the records hold can be decided, whatever ramps the model has.
        return shape_of(ExitRecords.load(Path(policy.records)))
    for score in SCORES:
        if policy.name == score:
            zero_one = find_task(card.task).zero_one
            return StreamShape(score=score, num_blocks=card.num_blocks, ramps=card.ramps, zero_one=zero_one)
    logger.warning("exit policy %s cannot be probed: there are no probes", policy.name)
    return None
