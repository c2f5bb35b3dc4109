"""Which plan `offramp simulate` plays: the planner's, or one of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earlyexit.errors import InputError, PlanError
from earlyexit.source_file import read_source
from offramp.jobs.planning import NoPlanAnswer, answer
from optimizer.calibration_file import read_calibration_file
from optimizer.decision import Decision, Strategy, strategies_for
from optimizer.evaluate import promised
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import ModelShape, parse_plan, read_plan
from optimizer.problem import PlanProblem

if TYPE_CHECKING:
    from optimizer.problem_file import ProblemFile

ANSWER_KEYS = ("rate_per_s", "latency_s", "usd_per_hour")
"""At the top of what `offramp plan --json` prints; a plan file has them below `predicted`."""
STAND_IN = PolicySpec(name="entropy", thresholds=0.0)
"""Of plans without a policy. The simulator never reads it: its inputs leave as their decisions say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPlan:
    """A plan, and what it says itself."""

    plan: Plan
    policy: PolicySpec | None
    """None where it has active ramps and says nothing of when to leave."""
    words: str
    """Where it comes from."""


def planner_plan(
    file: ProblemFile, strategy: Strategy, solve: Callable[[PlanProblem, Strategy], Decision]
) -> PlayedPlan | NoPlanAnswer:
    """What `offramp plan` answers to the problem."""
    compared = (
        () if file.records is None else strategies_for(file.problem)
    )  # the records may prefer the plan of another strategy
    found = answer(file, strategy, solve, compared=compared)
    if isinstance(found, NoPlanAnswer):
        return found
    predicted = promised(file.problem, found.planned.figures)
    stages, policy = found.planned.stages, file.policy(ramps_of(found.planned.stages))
    plan = Plan(
        stages=stages,
        policy=policy or STAND_IN,
        order=file.order,
        predicted=predicted,
        networks=file.problem.networks,
    )
    return PlayedPlan(plan=plan, policy=policy, words=f"the planner's, {strategy}")


def plan_of_file(path: Path, problem: PlanProblem) -> PlayedPlan:
    """A plan file, or what `offramp plan --json` printed; raises PlanError for one that does not fit the problem."""
    document = read_source(path, PlanError).document
    shape = ModelShape(num_blocks=problem.num_blocks, ramps=problem.ramps, networks=problem.networks)
    if isinstance(document, Mapping) and "no_plan" in document:
        raise PlanError(f"{path}: holds the answer that there is no plan")
    if isinstance(document, Mapping) and any(key in document for key in ANSWER_KEYS):
        plan, policy = parse_plan(_of_answer(document), shape, where=str(path)), None
    else:
        plan = read_plan(path, shape)
        policy = plan.policy
    _check_predicted(path, plan)
    return PlayedPlan(plan=plan, policy=policy, words=str(path))


@contextmanager
def said_of(played: PlayedPlan) -> Iterator[None]:
    """Put the plan's file before the message of a PlanError raised inside."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{played.words}: {error}") from error


def ramps_of(stages: tuple[Stage, ...]) -> tuple[int, ...]:
    """All active ramps."""
    return tuple(ramp for stage in stages for split in stage.splits for ramp in split.ramps)


def thresholds_option(text: str) -> float | dict[int, float]:
    """What `--thresholds` says: one number for all ramps, one each like 0=0.4,3=0.2, or a calibration's file.

    Raises InputError for anything else.
    """
    if text.endswith(".json"):
        return read_calibration_file(Path(text)).thresholds
    try:
        if "=" not in text:
            return float(text)
        pairs = [part.partition("=") for part in text.split(",")]
        found = {int(ramp): float(value) for ramp, _, value in pairs}
    except ValueError as error:
        raise InputError(
            f"--thresholds {text!r}; a number, one for each ramp like 0=0.4,3=0.2, or a calibration's .json is needed"
        ) from error
    if len(found) < len(pairs):
        raise InputError(f"--thresholds {text!r}: a ramp is named twice")
    return found


def _check_predicted(path: Path, plan: Plan) -> None:
    """Admission reckons with these numbers; plan files may hold anything there."""
    for key in ANSWER_KEYS:
        value = plan.predicted.get(key)
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise PlanError(f"{path}: predicted.{key}: a finite number, 0 or above, is needed, not {value!r}")


def _of_answer(document: Mapping[str, Any]) -> dict[str, Any]:
    """An answer's plan as a plan file has it; it has no policy."""
    predicted = {key: document[key] for key in ANSWER_KEYS if key in document}
    plan = {key: document[key] for key in ("stages", "after_answer", "overlap_below", "networks") if key in document}
    return {**plan, "policy": {"name": STAND_IN.name, "thresholds": STAND_IN.thresholds}, "predicted": predicted}
