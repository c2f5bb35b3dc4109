"""What a controller is told, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deployments.control.history import History
from deployments.settings import ServeSettings
from earlyexit.errors import PlanError
from optimizer.plan import PolicySpec
from optimizer.plan_file import ModelShape
from optimizer.problem import PlanProblem


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
    problem = control.problem
    if problem.num_blocks != shape.num_blocks or not set(problem.ramps) <= set(shape.ramps):
        raise PlanError(
            f"control.problem has {problem.num_blocks} blocks and ramps {list(problem.ramps)}; "
            f"the model has {shape.num_blocks} and {list(shape.ramps)}"
        )
    unknown = sorted(set(settings.plan.ramps) - set(problem.ramps))
    if unknown:
        raise PlanError(f"the plan to begin with has ramps {unknown}, control.problem has {list(problem.ramps)}")
    thresholds_of(control.policy, problem)
    History.check(Path(control.state), settings.app)
