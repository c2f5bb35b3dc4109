"""Checks of a controller's settings before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.controller.remember import History
from deployments.settings import ControlSettings, ServeSettings
from earlyexit.errors import PlanError
from earlyexit.network.store import check_prunable, read_card
from optimizer.live.tuning.base import check_tunable
from optimizer.plan import PolicySpec
from optimizer.plan_file import ModelShape, parse_plan
from optimizer.problem import PlanProblem


def thresholds_of(policy: PolicySpec, problem: PlanProblem) -> dict[int, float]:
    """Returns one threshold for each ramp of the problem.

    Raises PlanError where one is missing: without it the effect of a ramp that is off is not known.
    """
    given = policy.thresholds
    if given is None:
        raise PlanError(f"a controller plans by thresholds; the policy {policy.name!r} has none")
    thresholds = dict(given) if isinstance(given, Mapping) else dict.fromkeys(problem.ramps, given)
    missing = sorted(set(problem.ramps) - set(thresholds))
    if missing:
        raise PlanError(f"the policy has no threshold for ramps {missing} of the problem")
    return {ramp: thresholds[ramp] for ramp in problem.ramps}


def check_tuning(control: ControlSettings, probe_share: float, *, generates: bool = False) -> None:
    """Raises PlanError where thresholds cannot be tuned: no probes would be seen, or no budget is given."""
    if control.tuning == "off":
        return
    if generates:
        raise PlanError(
            f"tuning {control.tuning!r} keeps a loss per input, and a sequence's is of all its tokens: probes tell "
            "what ramps say behind the full model's tokens, not what would come behind their own; leave it off"
        )
    check_tunable(control.policy)
    if not control.problem.ramps:
        raise PlanError(f"tuning {control.tuning!r} moves thresholds, and the model has none")
    if not control.accuracy_budget:
        given = "none is given" if control.accuracy_budget is None else "it is 0"
        raise PlanError(
            f"tuning {control.tuning!r} keeps an accuracy budget above 0, and {given}: accuracy.budget says it"
        )
    if not probe_share:
        raise PlanError(
            f"tuning {control.tuning!r} needs probes, and probe_share is 0: "
            "inputs that stay tell of the active ramps only"
        )


def check_control(settings: ServeSettings, shape: ModelShape) -> None:
    """Checks the settings before anything starts: raises PlanError, and DataError for another application's memory."""
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
        raise PlanError(f"the plan to begin with has ramps {unknown}, control.problem has {list(problem.ramps)}")
    thresholds_of(control.policy, problem)
    check_tuning(control, settings.probe_share, generates=shape.generates)
    History.check(Path(control.state), settings.app)


def check_own_plan(model: Path, document: Mapping[str, Any]) -> None:
    """Raises PlanError for an operator's plan that the model in this folder cannot do on any accelerators."""
    check_prunable(model, parse_plan(dict(document), ModelShape.of(read_card(model))).prune)
