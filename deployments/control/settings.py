"""What a controller is told, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deployments.control.history import History
from deployments.settings import ControlSettings, ServeSettings
from earlyexit.errors import PlanError
from earlyexit.source_file import Source
from optimizer.plan import PolicySpec
from optimizer.plan_file import ModelShape, PolicyDocument, parse_plan
from optimizer.problem import PlanProblem
from optimizer.problem_file import parse_problem


def control_policy(control: ControlSettings) -> PolicySpec:
    """The settings' policy; raises PlanError saying what is wrong with it."""
    source = Source(document=control.policy, where="control.policy", raises=PlanError)
    return PolicySpec(**source.parse(PolicyDocument, called="the policy").model_dump())


def thresholds_of(policy: PolicySpec, problem: PlanProblem) -> dict[int, float]:
    """One for each ramp of the problem.

    Raises PlanError where one is missing: without it nobody can say what a ramp that is off would do.
    """
    given = policy.thresholds
    if given is None:
        raise PlanError(f"a controller plans by thresholds; the policy {policy.name!r} has none")
    thresholds = dict(given) if isinstance(given, Mapping) else dict.fromkeys(problem.ramps, given)
    missing = sorted(set(problem.ramps) - set(thresholds))
    if missing:
        raise PlanError(f"the policy has no threshold for ramps {missing} of the problem")
    return {ramp: thresholds[ramp] for ramp in problem.ramps}


def check_control(settings: ServeSettings, shape: ModelShape) -> None:
    """Say what is wrong before anything starts: raises PlanError, and DataError for the memory of somebody else."""
    control = settings.control
    if control is None:
        return
    problem = parse_problem(control.problem, where="control.problem").problem
    if problem.num_blocks != shape.num_blocks or not set(problem.ramps) <= set(shape.ramps):
        raise PlanError(
            f"control.problem has {problem.num_blocks} blocks and ramps {list(problem.ramps)}; "
            f"the model has {shape.num_blocks} and {list(shape.ramps)}"
        )
    unknown = sorted(set(parse_plan(settings.plan).ramps) - set(problem.ramps))
    if unknown:
        raise PlanError(f"the plan to begin with has ramps {unknown}, control.problem has {list(problem.ramps)}")
    thresholds_of(control_policy(control), problem)
    History.check(Path(control.state), settings.app)
