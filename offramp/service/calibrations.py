"""By which of its model's calibrations a service is planned: by every one that may be, and the best plan is taken."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path

from cluster.devices import EMULATED
from earlyexit.errors import InputError
from offramp.jobs.planning import is_worth_more
from offramp.service.model import read_exits
from offramp.service.parts import ServiceParts
from optimizer.calibration_file import CALIBRATION_FILE, PRUNED, beside_of
from optimizer.networks import measuring
from optimizer.plan import Plan
from optimizer.problem import PlanProblem
from profiles.networks import measuring_of

Planned = tuple[ServiceParts, PlanProblem, Plan]


def calibrated_parts(parts: ServiceParts) -> tuple[ServiceParts, ...]:
    """The same by each of the model's calibrations, its own first; by the file's where that says what there is to say.

    Blocks of networks that measure attention take as many times as long as was found at the calibration. Raises
    InputError where `accuracy.prune` asks for what cannot be, and for a calibration of other models.
    """
    asked, reason = parts.document.accuracy.prune, _why_whole(parts)
    with parts.source.said_at(("accuracy", "prune") if asked else ("accuracy",)):
        if asked and reason is not None:
            raise InputError(f"accuracy.prune: {reason}")
        path = parts.model / PRUNED / CALIBRATION_FILE
        if asked and not path.is_file():
            raise InputError(f"{path} is not there; run: offramp calibrate {parts.model} --data FILE --prune 0.14")
    if _given(parts) is not None or parts.document.planner.plan is not None:
        return (parts,)
    beside = [each for each in beside_of(parts.model) if each.name != PRUNED or reason is None]
    every = (parts, *(_by(folder, parts) for folder in beside))
    return tuple(each for each in every if asked is None or bool(each.exits.prune) == asked)


def most_worth(planned: list[Planned]) -> Planned:
    """The best of plans by what is sought; of equal ones the first."""
    return reduce(_better, planned)


def _better(one: Planned, other: Planned) -> Planned:
    return other if is_worth_more(one[1].objective, other[2].predicted, one[2].predicted) else one


def _given(parts: ServiceParts) -> str | None:
    """What the file says itself that calibrations say."""
    names = ("policy", "thresholds", "records")
    return next((name for name in names if getattr(parts.document.accuracy, name) is not None), None)


def _why_whole(parts: ServiceParts) -> str | None:
    """What speaks against pruned texts, in words."""
    document = parts.document
    if parts.card.chain.is_one:
        return f"{parts.card.name} is a single model; words are pruned where inputs go on to another"
    given = _given(parts)
    if given is not None:
        return f"the calibration of pruned texts says the {given}; leave one of the two out"
    if document.planner.objective.minimize == "latency":
        return "where early answers are sought inputs may stay, to tell what the reference says of whole texts"
    if document.planner.plan is not None:
        return "the plan file says itself whose words are pruned; leave one of the two out"
    if document.model.backend != "torch":
        return f"attention is measured by torch, and the backend is {document.model.backend}"
    if _recorded(parts):
        return "emulated accelerators that answer from records measure no attention"
    return None


def _recorded(parts: ServiceParts) -> bool:
    """Whether emulated accelerators answer from records."""
    return parts.document.model.decisions == "recorded" and any(name.startswith(EMULATED) for name in parts.tables)


def _by(folder: Path, parts: ServiceParts) -> ServiceParts:
    document, card = parts.document.accuracy, parts.card
    recorded = _recorded(parts)
    exits = read_exits(document, parts.model, card, parts.source, parts.base, recorded=recorded, beside=folder)
    if not exits.prune:
        return replace(parts, exits=exits)
    times = measuring_of(exits.records)
    tables = {device: measuring(table, card.chain.bounds, times) for device, table in parts.tables.items()}
    return replace(parts, exits=exits, tables=tables)
