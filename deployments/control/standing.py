"""Where the controller stands: what a controller that starts anew takes up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from optimizer.live.blame import Blame, Blamed
from optimizer.live.stragglers import Rest, Resting
from optimizer.live.trial import Delivered, Trial
from optimizer.placement import PlacedPlan, parse_placed, placed_document
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import parse_plan, plan_document
from optimizer.problem_file import parse_problem, problem_document


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The plan in force, and everything that decisions about the next one take into account."""

    placed: PlacedPlan
    """What shall be followed."""
    reason: str
    """Why it is in force."""
    at_s: float
    """When it was put in force."""
    followed: PlacedPlan | None = None
    """What all ingresses were last told to follow; None: not known."""
    followed_s: float = 0.0
    planned_s: float
    """When it was last planned; at first, when the controller began."""
    changed_s: float
    """When the stream last became another, as far as its exits go."""
    rate_changed_s: float
    sized_for_rps: float | None = None
    """The rate that the plan was made for; None: it gives the highest there is."""
    suspended: str | None = None
    """Why nothing is served."""
    hold: bool = False
    """Whether planning rests until it is asked for."""
    trial: Trial | None = None
    previous: PlacedPlan | None = None
    """What a plan on trial goes back to."""
    resting: Resting = field(default_factory=Resting)
    blamed: Blamed = field(default_factory=Blamed)


class StandingChanges(TypedDict, total=False):
    """Fields of a `Standing` that become others."""

    placed: PlacedPlan
    reason: str
    at_s: float
    followed: PlacedPlan | None
    followed_s: float
    planned_s: float
    changed_s: float
    rate_changed_s: float
    sized_for_rps: float | None
    suspended: str | None
    hold: bool
    trial: Trial | None
    previous: PlacedPlan | None
    resting: Resting
    blamed: Blamed


def standing_document(standing: Standing) -> dict[str, Any]:
    """Plain data that `parse_standing` reads back."""
    return {
        **{name: getattr(standing, name) for name in PLAIN},
        **{name: _placed_or_none(getattr(standing, name)) for name in PLANS},
        "trial": None if standing.trial is None else asdict(standing.trial),
        "resting": [asdict(rest) for rest in standing.resting.rests],
        "blamed": [_blame_document(blame) for blame in standing.blamed.blames],
    }


def parse_standing(document: Mapping[str, Any]) -> Standing:
    """Read what `standing_document` wrote; raises PlanError for plans that this version refuses."""
    trial = document["trial"]
    return Standing(
        **{name: document[name] for name in PLAIN},
        placed=parse_placed(document["placed"]),
        followed=_parse_or_none(document["followed"]),
        previous=_parse_or_none(document["previous"]),
        trial=None if trial is None else Trial(**trial | {"before": _served_or_none(trial["before"])}),
        resting=Resting(tuple(Rest(**rest) for rest in document["resting"])),
        blamed=Blamed(tuple(_parse_blame(blame) for blame in document["blamed"])),
    )


PLAIN = (
    "reason",
    "at_s",
    "followed_s",
    "planned_s",
    "changed_s",
    "rate_changed_s",
    "sized_for_rps",
    "suspended",
    "hold",
)
PLANS = ("placed", "followed", "previous")


def _placed_or_none(placed: PlacedPlan | None) -> dict[str, Any] | None:
    return None if placed is None else placed_document(placed)


def _parse_or_none(document: Mapping[str, Any] | None) -> PlacedPlan | None:
    return None if document is None else parse_placed(document)


def _served_or_none(document: Mapping[str, Any] | None) -> Delivered | None:
    return None if document is None else Delivered(**document)


def _blame_document(blame: Blame) -> dict[str, Any]:
    return {
        "stages": _stages_document(blame.stages),
        "problem": problem_document(blame.problem),
        "until": blame.until,
    }


def _parse_blame(document: Mapping[str, Any]) -> Blame:
    return Blame(
        stages=parse_plan(document["stages"]).stages,
        problem=parse_problem(document["problem"]).problem,
        until=document["until"],
    )


def _stages_document(stages: Sequence[Stage]) -> dict[str, Any]:
    """As a plan, whose policy does not matter."""
    return plan_document(Plan(stages=tuple(stages), policy=PolicySpec(name="patience", patience=1)))
