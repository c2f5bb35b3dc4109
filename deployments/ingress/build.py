"""Builds the core of an ingress from the settings."""

from __future__ import annotations

import logging
import math
import random
import uuid
from pathlib import Path

from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import IngressOptions
from deployments.settings import ServeSettings
from earlyexit.errors import PlanError
from earlyexit.network.store import ModelCard
from earlyexit.tasks import find_task
from optimizer.plans.plan import NO_RAMPS, PlacedPlan, Plan
from profiles.records import ExitRecords
from profiles.scores import SCORES
from profiles.stream import StreamShape, shape_of

logger = logging.getLogger(f"ray.serve.{__name__}")


def build_core(settings: ServeSettings, card: ModelCard) -> IngressCore:
    """Returns a core that follows the plan of the settings."""
    options = IngressOptions(
        max_queued=settings.max_queued,
        slo_s=(settings.tpot_slo_s if card.generates else settings.slo_s) or math.inf,
        ttft_slo_s=settings.ttft_slo_s or math.inf,
        tpot_slo_s=settings.tpot_slo_s or math.inf,
        admits=not card.generates,  # `GenerationLoop.admit` admits whole sequences instead of their steps
        slack=settings.slack,
        num_ingresses=settings.ingress_replicas,
        shape=probe_shape(settings, card),
        loss=find_task(card.task).loss,
        probe_share=settings.probe_share,
    )
    rng = random.Random()  # not seeded, so that every ingress draws other probes
    return IngressCore(uuid.uuid4().hex[:8], PlacedPlan(plan=settings.plan), options, rng)


def check_staying(plan: Plan) -> None:
    """Raises PlanError for a plan with `after_answer: stay` whose exit policy has no scores to record."""
    policy = plan.policy
    if plan.after_answer == "stay" and policy is not None and policy.name not in (*SCORES, "recorded"):
        raise PlanError(
            f"after_answer: stay needs an exit policy with scores ({', '.join(SCORES)}, recorded), "
            f"because nothing could be recorded with {policy.name!r}"
        )


def probe_shape(settings: ServeSettings, card: ModelCard) -> StreamShape | None:
    """Returns the ramps and the score that are observed of probes and of inputs that stay.

    Returns None if there are no such inputs, or if the exit policy has no score that another plan could use.
    """
    is_needed = settings.probe_share > 0 or settings.plan.after_answer == "stay"
    if not is_needed and settings.control is None:  # with a controller, a later plan may need it
        return None
    policy = settings.starting_policy or NO_RAMPS
    if policy.records is not None:
        # The records may have fewer ramps than the model.
        return shape_of(ExitRecords.load(Path(policy.records)))
    for score in SCORES:
        if policy.name == score:
            zero_one = find_task(card.task).zero_one
            # `similar` compares the states after two blocks, so ramp 0 has no score.
            ramps = tuple(ramp for ramp in card.ramps if ramp or score != "similar")
            return StreamShape(score=score, num_blocks=card.num_blocks, ramps=ramps, zero_one=zero_one)
    if is_needed:
        logger.warning("exit policy %s has no scores: nothing is recorded of probes", policy.name)
    return None
