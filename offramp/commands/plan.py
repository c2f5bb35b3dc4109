"""`offramp plan` and `offramp what-if`: asks the planner, and writes its answer as JSON or as a plan file."""

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
from optimizer.problem import MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem
from optimizer.problem_file import ProblemFile
from optimizer.rescore import Rescoring, apply_rescoring, by_networks, joint_reach, reach_of, rescore
from optimizer.what_if import Axis, variants

Solve = Callable[[PlanProblem, Strategy], Decision]
NO_PLAN = 3
"""Exit status if the problem is valid and no plan meets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """A plan, and what to say of it beside."""

    problem: PlanProblem
    planned: Planned
    comparisons: tuple[Comparison, ...]
    rescoring: Rescoring | None = None
    """The plan scored by exit records or known batches; None without them."""
    calibration: Path | None = None
    """The calibration that it uses, if the problem's file names a model's folder."""

    @property
    def binds(self) -> tuple[Bottleneck, ...]:
        """What keeps the plan from being better."""
        return tuple(bottlenecks(self.problem, self.planned.stages, self.planned.figures))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlanAnswer:
    """The answer that there is no plan, and why."""

    problem: PlanProblem
    decision: NoPlan
    comparisons: tuple[Comparison, ...]

    @property
    def message(self) -> str:
        return no_plan_text(self.problem, self.decision)


def answer(
    file: ProblemFile, strategy: Strategy, solve: Solve, *, compared: Sequence[Strategy] | None = None
) -> PlanAnswer | NoPlanAnswer:
    """Asks for a plan and for those of other strategies, and explains it.

    `compared`: by default all that make sense for the problem.

    Comparisons are by the planner's own view, nested survival, of every strategy: what exit records prefer, and what
    they say of it, stands apart in `rescoring`. Of the plans compared, the records may prefer one to that of `best`.
    """
    problem = file.problem
    compared = strategies_for(problem) if compared is None else compared
    decisions = {each: solve(problem, each) for each in compared}
    decision = decisions[strategy] if strategy in decisions else solve(problem, strategy)
    if isinstance(decision, NoPlan):
        decision = replace(decision, more=more_devices(problem, strategy))
        return NoPlanAnswer(problem=problem, decision=decision, comparisons=compare(problem, decisions))
    if strategy == "best":  # by the records, a part of the space may hold the better plan
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
    """Returns the best plan of a problem with several calibrations, the first of equal ones, and its file.

    Where none has a plan: why the first has none.
    """
    answers = [(file, answer(file, strategy, solve, compared=compared)) for file in files]
    found = [(file, each) for file, each in answers if isinstance(each, PlanAnswer)]
    if not found:
        return answers[0]
    promises = [predictions(each.problem, each.planned.figures) for _, each in found]
    return found[most_worth(found[0][1].problem.objective, promises)]


def most_worth(objective: Objective, promises: Sequence[Mapping[str, float]]) -> int:
    """Returns the index of the plan that is best by the objective, the first of equal ones (`promised`)."""
    rate = isinstance(objective, MaximizeRate)
    name = "rate_per_s" if rate else "usd_per_hour" if isinstance(objective, MinimizeCost) else "mean_latency_s"
    best = 0
    for index, promise in enumerate(promises[1:], start=1):
        value, than = promise[name], promises[best][name]
        if value > than * (1 + TOLERANCE) if rate else value < than * (1 - TOLERANCE):
            best = index
    return best


def answer_document(answer: PlanAnswer | NoPlanAnswer) -> dict[str, Any]:
    """Returns the answer as plain JSON data: first the plan, then its explanation."""
    if isinstance(answer, NoPlanAnswer):
        return {
            "no_plan": _no_plan_document(answer.decision) | {"message": answer.message},
            "strategy": answer.decision.strategy,
            "baselines": _baselines(answer.problem, answer.comparisons),
        }
    planned, figures = answer.planned, answer.planned.figures
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
        **({} if answer.problem.generation is None else {"generation": _generation(answer.problem, planned)}),
        "baselines": _baselines(answer.problem, answer.comparisons),
        "joint": None if answer.rescoring is None else _joint_document(answer.problem, answer.rescoring),
    }


def serving_plan(file: ProblemFile, planned: Planned, threshold: float | None = None) -> Plan:
    """Returns the plan for `offramp serve`: the stages with the exit policy.

    That rule comes from the problem's exit records, or is `threshold`, an entropy in nats for all ramps. Raises
    InputError where both or neither say it, PlanError for devices that nothing can serve on.
    """
    for stage in planned.stages:
        find_device(stage.device)
    ramps = tuple(ramp for stage in planned.stages for split in stage.splits for ramp in split.ramps)
    plan = plan_of(file, planned, _policy(file, ramps, threshold) if ramps else None)
    return replace(plan, prune=file.prune) if len(plan.used) > 1 else plan


def plan_of(file: ProblemFile, planned: Planned, policy: PolicySpec | None) -> Plan:
    """Returns the planner's plan with an exit policy; no words are pruned."""
    return Plan(
        stages=planned.stages,
        shares=planned.figures.shares,
        policy=policy,
        order=file.order,
        predicted=predictions(file.problem, planned.figures),
        networks=file.problem.networks,
    )


def what_if(problem: PlanProblem, axis: Axis, solve: Solve) -> Iterator[tuple[float, dict[Strategy, Decision]]]:
    """Yields every strategy's decision at each value of an axis, as they are found."""
    for value, other in zip(axis.values, variants(problem, axis), strict=True):  # checked before the first is solved
        yield value, {each: solve(other, each) for each in strategies_for(other)}


def what_if_document(
    problem: PlanProblem, axis: Axis, value: float, decisions: Mapping[Strategy, Decision]
) -> dict[str, Any]:
    """Returns one value of an axis as plain JSON data."""
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
        raise InputError("--threshold: the problem's exit records have thresholds already")
    if recorded is not None:
        return recorded
    if threshold is None:
        raise InputError(
            f"--out: ramps {list(ramps)} are active and nothing says when to leave there; give --threshold, "
            "or survival from exit records in the problem"
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
    is_sought = isinstance(problem.objective, MinimizeLatency)
    mean = {"mean_latency_s": shown.joint.mean_latency_s} if is_sought else {}
    return {
        "rate_per_s": shown.joint.rate_per_s,
        "latency_s": shown.joint.latency_s,
        "usd_per_hour": shown.joint.usd_per_hour,
        **mean,
        "broken": list(shown.broken),
        "candidates": len(rescoring.candidates),
        "chosen": rescoring.chosen_index,
    }


def _generation(problem: PlanProblem, planned: Planned) -> dict[str, Any]:
    """Returns the plan's figures for sequences."""
    return asdict(sequence_figures(problem, planned.stages, **step_figures(planned.figures)))
