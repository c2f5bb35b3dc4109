"""`offramp plan` and `offramp what-if`: runs the planner, and returns its result as JSON data or as a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster.devices import find_device
from earlyexit.errors import InputError
from optimizer.decision import Decision, NoPlan, Planned, Strategy, strategies_for
from optimizer.evaluate import TOLERANCE, predictions, step_figures
from optimizer.explain import Bottleneck, Comparison, answered_by, bottlenecks, compare, no_plan_text
from optimizer.generation.figures import sequence_figures
from optimizer.plan import Plan, PolicySpec
from optimizer.plan_file import batches_document, chains_document, stages_document
from optimizer.planner import more_devices
from optimizer.problem import MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem, reach_of
from optimizer.problem_file import ProblemFile
from optimizer.rescore import Rescoring, apply_rescoring, by_networks, joint_reach, rescore
from optimizer.what_if import Axis, variants

Solve = Callable[[PlanProblem, Strategy], Decision]
NO_PLAN = 3
"""Exit status if the problem is valid and no plan meets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """A plan with its explanation."""

    problem: PlanProblem
    planned: Planned
    comparisons: tuple[Comparison, ...]
    rescoring: Rescoring | None = None
    """The plan's scores by exit records or recorded batches; None without them."""
    calibration: Path | None = None
    """The calibration that the plan uses, if the problem file names a model folder."""

    @property
    def binds(self) -> tuple[Bottleneck, ...]:
        """The limits that keep the plan from being better."""
        return tuple(bottlenecks(self.problem, self.planned.stages, self.planned.figures))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlanAnswer:
    """The result that no plan exists, with the reason."""

    problem: PlanProblem
    decision: NoPlan
    comparisons: tuple[Comparison, ...]

    @property
    def message(self) -> str:
        return no_plan_text(self.problem, self.decision)


def answer(
    file: ProblemFile, strategy: Strategy, solve: Solve, *, compared: Sequence[Strategy] | None = None
) -> PlanAnswer | NoPlanAnswer:
    """Plans with a strategy and with others for comparison (`compared`; None: all that fit the problem).

    Comparisons use the planner's own model, nested survival. With exit records, `rescoring` has the scores by these
    records, and the plan is the candidate that they prefer. Plans of the compared strategies are candidates for `best`.
    """
    problem = file.problem
    compared = strategies_for(problem) if compared is None else compared
    decisions = {each: solve(problem, each) for each in compared}
    decision = decisions[strategy] if strategy in decisions else solve(problem, strategy)
    if isinstance(decision, NoPlan):
        decision = replace(decision, more=more_devices(problem, strategy))
        return NoPlanAnswer(problem=problem, decision=decision, comparisons=compare(problem, decisions))
    if strategy == "best":  # exit records may prefer the plan of another strategy
        others = [each.stages for each in decisions.values() if isinstance(each, Planned) and each is not decision]
        decision = replace(decision, candidates=(*decision.candidates, *others))
    rescoring = _rescoring(file, decision)
    if rescoring is not None:
        decision = apply_rescoring(problem, decision, rescoring)
    return PlanAnswer(
        problem=problem,
        planned=decision,
        comparisons=compare(problem, decisions),
        rescoring=rescoring,
        calibration=None if file.recorded is None else file.recorded.calibration,
    )


def best_answer(
    files: Sequence[ProblemFile], strategy: Strategy, solve: Solve, *, compared: Sequence[Strategy] | None = None
) -> tuple[ProblemFile, PlanAnswer | NoPlanAnswer]:
    """Returns the best plan over several calibrations, and its problem file; the first of equally good ones.

    If no calibration has a plan, returns the reason of the first one.
    """
    answers = [(file, answer(file, strategy, solve, compared=compared)) for file in files]
    plans = [(file, each) for file, each in answers if isinstance(each, PlanAnswer)]
    if not plans:
        return answers[0]
    promises = [predictions(each.problem, each.planned.figures) for _, each in plans]
    return plans[best_index(plans[0][1].problem.objective, promises)]


def best_index(objective: Objective, promises: Sequence[Mapping[str, float]]) -> int:
    """Returns the index of the plan that is best by the objective, or of the first of equally good ones."""
    if isinstance(objective, MaximizeRate):
        name, sign = "rate_per_s", -1
    else:
        name, sign = "usd_per_hour" if isinstance(objective, MinimizeCost) else "mean_latency_s", 1
    best = 0
    for index, promise in enumerate(promises[1:], start=1):
        cost, lowest = sign * promise[name], sign * promises[best][name]
        if cost < lowest - TOLERANCE * abs(lowest):
            best = index
    return best


def answer_document(answer: PlanAnswer | NoPlanAnswer) -> dict[str, Any]:
    """Returns the answer as JSON data: first the plan, then its explanation."""
    if isinstance(answer, NoPlanAnswer):
        return {
            "no_plan": _no_plan_document(answer.decision) | {"message": answer.message},
            "strategy": answer.decision.strategy,
            "baselines": _baselines(answer.problem, answer.comparisons),
        }
    problem, planned, figures = answer.problem, answer.planned, answer.planned.figures
    sequences = problem.generation and asdict(sequence_figures(problem, planned.stages, **step_figures(figures)))
    chains = {"schema_version": 2, "chains": chains_document(planned.stages, figures.shares)}
    return {
        **({"networks": list(answer.problem.networks)} if answer.problem.networks else {}),
        **({"stages": stages_document(planned.stages)} if len(figures.shares) == 1 else chains),
        **predictions(answer.problem, figures),
        **batches_document(planned.stages),
        "strategy": planned.strategy,
        "served_per_s": figures.served_per_s,
        "latency_limit_s": answer.problem.slo.limit_s,
        "bound": planned.bound,
        "gap": planned.gap,
        **({"note": planned.note} if planned.note else {}),
        **({} if answer.calibration is None else {"calibration": str(answer.calibration)}),
        "binds": [{"kind": each.kind, "stage": each.stage_index, "text": each.text} for each in answer.binds],
        "splits": [
            {
                "stage": each.stage_index,
                "seconds": each.seconds,
                "wait_s": each.wait_s,
                "reached_by": each.reached_by,
                "batch_at_block": list(each.batch_at_block),
                "fill": each.fill,
                **({"crossing_s": each.crossing_s} if each.crossing_s else {}),
            }
            for each in figures.splits
        ],
        "stage_figures": [
            {"rate_per_s": each.rate_per_s, "hop_s": each.hop_s, "hop_rate_per_s": finite}
            for each in figures.stages
            for finite in [each.hop_rate_per_s if math.isfinite(each.hop_rate_per_s) else None]
        ],
        **({"answered_by": answered_by(answer.problem, planned.stages)} if answer.problem.networks else {}),
        **({"generation": sequences} if sequences else {}),
        "baselines": _baselines(answer.problem, answer.comparisons),
        "joint": None if answer.rescoring is None else _joint_document(answer.problem, answer.rescoring),
    }


def serving_plan(file: ProblemFile, planned: Planned, threshold: float | None = None) -> Plan:
    """Returns the plan for `offramp serve`, with an exit policy.

    Thresholds are those of the problem's exit records, or `threshold`, an entropy in nats, for all ramps. Raises
    InputError if both or neither are given, and PlanError for an unknown device.
    """
    for stage in planned.stages:
        find_device(stage.device)
    ramps = tuple(ramp for stage in planned.stages for split in stage.splits for ramp in split.ramps)
    plan = plan_of(file, planned, _policy(file, ramps, threshold) if ramps else None)
    return replace(plan, prune=file.prune) if len(plan.used) > 1 else plan


def plan_of(file: ProblemFile, planned: Planned, policy: PolicySpec | None) -> Plan:
    """Returns the planner's plan with an exit policy, without word pruning."""
    return Plan(
        stages=planned.stages,
        shares=planned.figures.shares,
        policy=policy,
        order=file.order,
        predicted=predictions(file.problem, planned.figures),
        networks=file.problem.networks,
    )


def what_if(problem: PlanProblem, axis: Axis, solve: Solve) -> Iterator[tuple[float, dict[Strategy, Decision]]]:
    """Yields each value of an axis with the decisions of all strategies."""
    for value, variant in zip(axis.values, variants(problem, axis), strict=True):
        yield value, {strategy: solve(variant, strategy) for strategy in strategies_for(variant)}


def what_if_document(
    problem: PlanProblem, axis: Axis, value: float, decisions: Mapping[Strategy, Decision]
) -> dict[str, Any]:
    """Returns the result for one value of an axis as JSON data."""
    device = {} if axis.device is None else {"device": axis.device}
    strategies = {name: _decision(problem, each) for name, each in decisions.items()}
    return {**device, axis.name: value, "strategies": strategies}


def _rescoring(file: ProblemFile, planned: Planned) -> Rescoring | None:
    recorded, by_tokens = file.recorded, file.problem.lengths is not None
    if recorded is not None:
        reach = joint_reach(recorded.records, recorded.thresholds, by_tokens=by_tokens)
        if recorded.alone is not None:
            alone = joint_reach(recorded.alone, recorded.thresholds, by_tokens=by_tokens)
            reach = by_networks(file.problem, reach, alone)
        return rescore(file.problem, planned, reach)
    batches = file.problem.batches
    return None if batches is None else rescore(file.problem, planned, reach_of(batches))


def _policy(file: ProblemFile, ramps: tuple[int, ...], threshold: float | None) -> PolicySpec:
    recorded = file.policy(ramps)
    if recorded is not None and threshold is not None:
        raise InputError("--threshold: the problem's exit records already define thresholds")
    if recorded is not None:
        return recorded
    if threshold is None:
        raise InputError(
            f"--out: ramps {list(ramps)} are active and have no thresholds; give --threshold, or survival from exit "
            "records in the problem"
        )
    return PolicySpec(name="entropy", thresholds=threshold)


def _no_plan_document(decision: NoPlan) -> dict[str, Any]:
    return {
        "binding": decision.binding,
        "nearest_slo_s": decision.nearest_slo_s,
        "highest_rate_per_s": decision.highest_rate_per_s,
        **({} if decision.more is None else {"more_devices": dict([decision.more])}),
    }


def _decision(problem: PlanProblem, decision: Decision) -> dict[str, Any]:
    if isinstance(decision, NoPlan):
        return {"no_plan": _no_plan_document(decision)}
    batches = batches_document(decision.stages)
    return {**predictions(problem, decision.figures), **batches, "gap": decision.gap}


def _baselines(problem: PlanProblem, comparisons: tuple[Comparison, ...]) -> dict[str, Any]:
    return {
        each.strategy: {**_decision(problem, each.decision), "times_better": each.times_better} for each in comparisons
    }


def _joint_document(problem: PlanProblem, rescoring: Rescoring) -> dict[str, Any]:
    shown = rescoring.chosen or rescoring.candidates[0]
    is_objective = isinstance(problem.objective, MinimizeLatency)
    mean = {"mean_latency_s": shown.joint.mean_latency_s} if is_objective else {}
    return {
        "rate_per_s": shown.joint.rate_per_s,
        "latency_s": shown.joint.latency_s,
        "usd_per_hour": shown.joint.usd_per_hour,
        **mean,
        "broken": list(shown.broken),
        "candidates": len(rescoring.candidates),
        "chosen": rescoring.chosen_index,
    }
