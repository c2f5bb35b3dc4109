"""Whether a service's texts lose words where they cross: the plan by either calibration that is worth more."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.devices import EMULATED
from earlyexit.errors import InputError
from offramp.jobs.calibration import RECORDS_FILE
from offramp.jobs.chain_members import check_members
from offramp.jobs.pruning import FOLDER
from offramp.service.model import of_ramps
from offramp.service.parts import ServiceParts
from optimizer.calibration_file import CALIBRATION_FILE, read_calibration_file
from optimizer.evaluate import TOLERANCE
from optimizer.networks import measuring
from optimizer.plan import Plan
from optimizer.problem import MaximizeRate, MinimizeCost, PlanProblem
from profiles.networks import kept_of, measuring_of

if TYPE_CHECKING:
    from optimizer.calibration_file import CalibrationCard

Planned = tuple[ServiceParts, PlanProblem, Plan]


def pruned_parts(parts: ServiceParts) -> ServiceParts | None:
    """The same, by the calibration of texts that lose words at crossings; None where they are not to, or cannot.

    Blocks of networks that measure attention take as many times as long as was found at the calibration. Raises
    InputError where `accuracy.prune` asks for what cannot be, and for a calibration of other models.
    """
    asked = parts.document.accuracy.prune
    path = parts.model / FOLDER / CALIBRATION_FILE
    if asked is False or (asked is None and not path.is_file()):
        return None
    reason = _why_not(parts)
    with parts.source.said_at(("accuracy", "prune") if asked else ("accuracy",)):
        if reason is not None:
            if asked is None:
                return None
            raise InputError(f"accuracy.prune: {reason}")
        if not path.is_file():
            raise InputError(f"{path} is not there; run: offramp calibrate {parts.model} --data FILE --prune 0.14")
        card = read_calibration_file(path)
        check_members(card.provenance, parts.model, path)
    return _by(card, parts)


def worth_more(whole: Planned, pruned: Planned) -> Planned:
    """The better of two plans by what is sought; of equal ones that of whole texts, which loses nothing."""
    problem, one, other = whole[1], whole[2].predicted, pruned[2].predicted
    if isinstance(problem.objective, MaximizeRate):
        return pruned if other["rate_per_s"] > one["rate_per_s"] * (1 + TOLERANCE) else whole
    name = "usd_per_hour" if isinstance(problem.objective, MinimizeCost) else "mean_latency_s"
    return pruned if other[name] < one[name] * (1 - TOLERANCE) else whole


def _why_not(parts: ServiceParts) -> str | None:
    """What speaks against pruned texts, in words."""
    document = parts.document
    if parts.card.chain.is_one:
        return f"{parts.card.name} is a single model; words are pruned where inputs go on to another"
    given = [name for name in ("policy", "thresholds", "records") if getattr(document.accuracy, name) is not None]
    if given:
        return f"the calibration of pruned texts says the {given[0]}; leave one of the two out"
    if document.planner.objective.minimize == "latency":
        return "where early answers are sought inputs may stay, to tell what the reference says of whole texts"
    if document.planner.plan is not None:
        return "the plan file says itself whose words are pruned; leave one of the two out"
    if document.model.backend != "torch":
        return f"attention is measured by torch, and the backend is {document.model.backend}"
    if document.model.decisions == "recorded" and any(name.startswith(EMULATED) for name in parts.tables):
        return "emulated accelerators that answer from records measure no attention"
    return None


def _by(card: CalibrationCard, parts: ServiceParts) -> ServiceParts:
    from profiles.records import ExitRecords

    chain = parts.card.chain
    records = ExitRecords.load(parts.model / FOLDER / RECORDS_FILE)
    live = card.metric == "agreement"
    budget = card.budget if parts.document.accuracy.budget is None and live else parts.document.accuracy.budget
    exits = replace(
        parts.exits,
        policy=card.policy_spec(),
        thresholds=dict(sorted(card.thresholds.items())),
        records=records,
        alone=parts.exits.records,
        budget=of_ramps(budget, records, card.thresholds),
        confidence=card.confidence if live and card.confidence > 0 else None,
        prune=card.prune or {},
        kept=kept_of(records),
    )
    times = measuring_of(exits.records)
    tables = {device: measuring(table, chain.bounds, times) for device, table in parts.tables.items()}
    return replace(parts, exits=exits, tables=tables)
