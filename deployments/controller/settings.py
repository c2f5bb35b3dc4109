"""Checks the settings of a controller before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deployments.controller.remember import History
from deployments.settings import ControlSettings, ServeSettings
from earlyexit.errors import PlanError
from optimizer.live.tuning.base import check_tunable
from optimizer.plans.plan import PolicySpec
from optimizer.plans.plan_file import ModelShape
from optimizer.problems.problem import PlanProblem


def thresholds_of(policy: PolicySpec, problem: PlanProblem) -> dict[int, float]:
    """Returns one threshold for each ramp of the problem.

    Raises PlanError if one is missing. Inactive ramps need thresholds too, to forecast the effect of their activation.
    """
    own = policy.thresholds
    if own is None:
        raise PlanError(f"a controller needs thresholds; the policy {policy.name!r} has none")
    thresholds = dict(own) if isinstance(own, Mapping) else dict.fromkeys(problem.ramps, own)
    if missing := sorted(set(problem.ramps) - set(thresholds)):
        raise PlanError(f"the policy has no threshold for ramps {missing} of the problem")
    return {ramp: thresholds[ramp] for ramp in problem.ramps}


def check_tuning(control: ControlSettings, probe_share: float, *, generates: bool = False) -> None:
    """Raises PlanError if thresholds cannot be tuned, for example without probes or without an accuracy budget."""
    if control.tuning == "off":
        return
    if generates:
        raise PlanError(
            f"tuning {control.tuning!r} needs a loss per input, but generated sequences have one loss for all tokens: "
            "probes show ramps after the full model's tokens, not after their own; set tuning to off"
        )
    check_tunable(control.policy)
    if not control.problem.ramps:
        raise PlanError(f"tuning {control.tuning!r} needs ramps, and the model has none")
    if not control.accuracy_budget:
        actual = "none" if control.accuracy_budget is None else "0"
        raise PlanError(f"tuning {control.tuning!r} needs an accuracy.budget above 0 (got {actual})")
    if not probe_share:
        raise PlanError(
            f"tuning {control.tuning!r} needs probes, and probe_share is 0: inputs that stay show active ramps only"
        )


def check_control(settings: ServeSettings, shape: ModelShape) -> None:
    """Raises PlanError for settings that contradict the model, and DataError for a state file that cannot be used."""
    control = settings.control
    if control is None:
        return
    problem = control.problem
    if problem.num_blocks != shape.num_blocks or not set(problem.ramps) <= set(shape.ramps):
        raise PlanError(
            f"control.problem has {problem.num_blocks} blocks and ramps {list(problem.ramps)}; "
            f"the model has {shape.num_blocks} and {list(shape.ramps)}"
        )
    if problem.networks != shape.networks:
        raise PlanError(
            f"control.problem has networks that end at {list(problem.networks)}, the model's end at "
            f"{list(shape.networks)}"
        )
    unknown = sorted(set(settings.plan.ramps) - set(problem.ramps))
    if unknown:
        raise PlanError(f"the first plan has ramps {unknown}, control.problem has {list(problem.ramps)}")
    thresholds_of(control.policy, problem)
    check_tuning(control, settings.probe_share, generates=shape.generates)
    History.check(Path(control.state), settings.app)
