"""Where the controller stands: what a controller that starts anew takes up again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypedDict, TypeVar

from optimizer.live.blame import Blame, Blamed
from optimizer.live.stragglers import Rest, Resting
from optimizer.live.trial import Delivered, Trial
from optimizer.placement import PlacedPlan, parse_placed, placed_document
from optimizer.plan import Plan, PolicySpec
from optimizer.plan_file import parse_plan, plan_document
from optimizer.problem_file import parse_problem, problem_document

T = TypeVar("T")


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
    thresholds: Mapping[int, float] | None = None
    """Of all ramps, where tuning has found others than the settings'; None: theirs."""


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
    thresholds: Mapping[int, float] | None


PLANS = ("placed", "followed", "previous")
PLAIN = tuple(
    each.name for each in fields(Standing) if each.name not in {*PLANS, "trial", "resting", "blamed", "thresholds"}
)


def standing_document(standing: Standing) -> dict[str, Any]:
    """Plain data that `parse_standing` reads back."""
    return {
        **{name: getattr(standing, name) for name in PLAIN},
        **{name: _unless_none(placed_document, getattr(standing, name)) for name in PLANS},
        "trial": _unless_none(asdict, standing.trial),
        "resting": [asdict(rest) for rest in standing.resting.rests],
        "blamed": [_blame_document(blame) for blame in standing.blamed.blames],
        "thresholds": _unless_none(dict, standing.thresholds),
    }


def parse_standing(document: Mapping[str, Any]) -> Standing:
    """Read what `standing_document` wrote; raises PlanError for plans that this version refuses."""
    plans: dict[str, Any] = {name: _unless_none(parse_placed, document[name]) for name in PLANS}
    return Standing(
        **{name: document[name] for name in PLAIN},
        **plans,
        trial=_unless_none(_parse_trial, document["trial"]),
        resting=Resting(tuple(Rest(**rest) for rest in document["resting"])),
        blamed=Blamed(tuple(_parse_blame(blame) for blame in document["blamed"])),
        thresholds=_unless_none(_parse_thresholds, document.get("thresholds")),
    )


def _unless_none(change: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else change(value)


def _parse_trial(document: Mapping[str, Any]) -> Trial:
    return Trial(**{**document, "before": _unless_none(lambda before: Delivered(**before), document["before"])})


def _parse_thresholds(document: Mapping[str, float]) -> dict[int, float]:
    """JSON has string keys only."""
    return {int(ramp): threshold for ramp, threshold in document.items()}


def _blame_document(blame: Blame) -> dict[str, Any]:
    """The stages as a plan, whose policy does not matter."""
    policy = PolicySpec(name="patience", patience=1)
    plan = Plan(stages=blame.stages, policy=policy, networks=blame.problem.networks)
    return {"stages": plan_document(plan), "problem": problem_document(blame.problem), "until": blame.until}


def _parse_blame(document: Mapping[str, Any]) -> Blame:
    stages, problem = parse_plan(document["stages"]).stages, parse_problem(document["problem"]).problem
    return Blame(stages=stages, problem=problem, until=document["until"])
