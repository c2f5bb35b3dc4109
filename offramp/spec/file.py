"""Reads service files: model, latency limit, accuracy, cluster and planner of a service.

Errors are reported as `file:line: what is wrong` before anything starts. If accelerators are emulated, times in the
file are emulated seconds. The settings of the service have real seconds, which are `time_scale` times as many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.devices import find_device
from cluster.inventory import Inventory, missing_accelerators
from deployments.controller.settings import check_control, check_tuning
from deployments.settings import ControlSettings, EmulatedSettings, PlanningSettings, ServeSettings
from earlyexit.errors import InputError, PlanError
from offramp.commands.plan import NoPlanAnswer, Solve, answer, best_index, plan_of
from offramp.spec.application import application_settings
from offramp.spec.documents import IngressDocument
from offramp.spec.model import ServiceParts, bytes_per_sample, calibrated_parts, read_parts, scaled_table
from optimizer.latency_file import with_rows
from optimizer.lengths_file import lengths_of, stayers_length_N
from optimizer.plan import PlacedPlan, Plan, PolicySpec, stock_plan
from optimizer.plan_file import ModelShape, order_of, read_plan
from optimizer.problem import Link, MinimizeCost, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.problem_file import ProblemFile, objective_of
from optimizer.survival_file import with_recorded_batches
from optimizer.tokens import in_tokens
from optimizer.what_if import with_batch_limit
from profiles.networks import survival_of

MODEL = "model"
"""Name of the model folder in the folder that all nodes have."""
CROSSING_S = 0.0005
"""Real seconds that a chain needs to pass survivors to the next network (`experiments.costs.crossings@654e280`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service: the settings of its application, its accelerators, and where it listens."""

    settings: ServeSettings
    inventory: Inventory
    ingress: IngressDocument

    @property
    def name(self) -> str:
        return self.settings.app

    def moved_to(self, at: str | None) -> Service:
        """Returns the service with its files in the folder `at` of every node; None: in their present folders."""
        return self if at is None else replace(self, settings=at_folder(self.settings, PurePosixPath(at)))


def read_service(path: Path, solve: Solve | None = None) -> Service:
    """Reads a service file, and makes its first plan unless it names one; `solve`: None for the planner's.

    Raises InputError with file, line, the mistake and what is allowed.
    """
    from optimizer import planner

    candidates: list[tuple[ServiceParts, PlanProblem, Plan]] = []
    errors: list[InputError] = []
    for each in calibrated_parts(read_parts(path)):  # a chain may have several calibrations
        try:
            problem = service_problem(each)
            make = partial(_solved, each, problem, solve or planner.solve)
            candidates.append((each, problem, first_plan(each, make)))
        except InputError as error:  # such as no plan within the SLO
            errors.append(error)
    if not candidates:
        raise errors[0]
    best = best_index(candidates[0][1].objective, [plan.predicted for _, _, plan in candidates])
    parts, problem, plan = candidates[best]
    return Service(settings=_settings(parts, problem, plan), inventory=parts.inventory, ingress=parts.document.ingress)


def check_service(path: Path) -> ServiceParts:
    """Reads and checks a service file as `offramp serve` does, but makes no plan, which may take minutes."""
    parts = calibrated_parts(read_parts(path))[0]
    problem, device = service_problem(parts), next(iter(parts.inventory.counts))
    stand_in = stock_plan(parts.card.num_blocks, networks=problem.networks, device=device, batch=1)
    check_control(_settings(parts, problem, first_plan(parts, lambda: stand_in)), ModelShape.of(parts.card))
    return parts


def _settings(parts: ServiceParts, problem: PlanProblem, plan: Plan) -> ServeSettings:
    document, controlled = parts.document, parts.document.planner.control
    with parts.source.errors_at(("planner", "tuning")):
        if not controlled and document.planner.tuning != "off":
            raise PlanError(f"tuning {document.planner.tuning!r} needs the controller, and planner.control is false")
    with parts.source.errors_at(("planner", "strategy")):
        if controlled and document.planner.strategy == "pame":
            raise PlanError("strategy pame plans from recorded batches, which a controller lacks: set control: false")
    return application_settings(
        document,
        plan,
        parts.base,
        node_labels={name: dict(each.labels) for name, each in parts.inventory.devices.items() if each.labels},
        emulated={
            name: EmulatedSettings(
                batch=list(table.batches),
                block_s=table.block_s_NB.tolist(),
                ramp_s=table.ramp_s_EB.tolist(),
                length=None if problem.lengths is None else table.length,
                time_scale=parts.inventory.time_scale,
                decisions=document.model.decisions,
            )
            for name, table in parts.tables.items()
            if find_device(name).emulated
        },
        control=_control(parts, problem) if controlled else None,
        probe_share=document.planner.probe_share if controlled else 0.0,
        slo_s=document.slo.latency_s * parts.inventory.time_scale,
        slack=document.slo.slack,
    )


def _control(parts: ServiceParts, problem: PlanProblem) -> ControlSettings:
    planner = parts.document.planner
    state = (parts.base / (planner.state or f"{parts.document.name}.sqlite")).resolve()
    confidence: dict[str, Any] = (
        {} if parts.exits.confidence is None else {"accuracy_confidence": parts.exits.confidence}
    )
    control = ControlSettings(
        problem=scaled_problem(problem, parts.inventory.time_scale),
        policy=parts.exits.policy,
        state=str(state),
        accuracy_budget=parts.exits.budget,
        **confidence,
        **planner.model_dump(include=set(PlanningSettings.model_fields)),
    )
    with parts.source.errors_at(("planner", "tuning")):
        check_tuning(control, planner.probe_share)
    return control


def service_problem(parts: ServiceParts) -> PlanProblem:
    """Returns the problem for the planner, with times in the seconds of the file."""
    _check_generating(parts)
    document, card, thresholds = parts.document, parts.card, parts.exits.thresholds
    ramps, link, budget = tuple(thresholds), parts.inventory.link, document.planner.budget
    with parts.source.errors_at(("planner", "objective")):
        objective = objective_of(document.planner.objective, "planner.objective")
    devices, by_price = parts.inventory.devices, isinstance(objective, MinimizeCost) or budget is not None
    unpriced = [name for name in parts.inventory.counts if devices[name].usd_per_hour is None]
    with parts.source.errors_at(("cluster", "devices", *unpriced[:1])):
        if by_price and unpriced:
            raise InputError(f"plans are made by cost, and {', '.join(unpriced)} has no usd_per_hour")
    with parts.source.errors_at(("model",)):
        problem = PlanProblem(
            num_blocks=card.num_blocks,
            ramps=ramps,
            survival_N=parts.exits.records.outcome(thresholds).survival,
            latency={name: with_rows(table, card.ramps, ramps) for name, table in parts.tables.items()},
            devices={
                name: Supply(count=count, usd_per_hour=devices[name].usd_per_hour or 0.0)
                for name, count in parts.inventory.counts.items()
            },
            link=Link(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, delay_s=link.delay_s),
            bytes_per_sample_N=bytes_per_sample(document.model, card),
            slo=Slo(latency_s=document.slo.latency_s, slack=document.slo.slack),
            objective=objective,
            budget_usd_per_hour=None if budget is None else budget.usd_per_hour,
            networks=card.chain.networks,
            survival_of=None
            if card.chain.is_one
            else survival_of(parts.exits.records, thresholds, card.chain, parts.exits.alone),
            crossing_s=0.0 if card.chain.is_one else CROSSING_S / parts.inventory.time_scale,
            crossing_tokens=parts.exits.kept,
        )
    problem = _with_lengths(problem, parts)
    if document.planner.strategy == "pame":
        problem = with_recorded_batches(problem, parts.exits.records, thresholds)
    limit = document.planner.batch_limit
    with parts.source.errors_at(("planner", "batch_limit")):
        return problem if limit is None else with_batch_limit(problem, limit)


def _check_generating(parts: ServiceParts) -> None:
    """Raises InputError for options that models that generate do not support."""
    if not parts.card.generates:
        return
    planner, model = parts.document.planner, "a model that generates, whose inputs are steps of sequences"
    with parts.source.errors_at(("lengths",)):
        if parts.document.lengths is not None:
            raise InputError(f"lengths are not for {model}: a problem file has those of prompts under `generation`")
    with parts.source.errors_at(("planner", "objective")):
        if isinstance(objective_of(planner.objective, "planner.objective"), MinimizeLatency):
            raise InputError(f"minimal latency is not for {model}: choose the highest rate, or minimal cost")
    with parts.source.errors_at(("planner", "strategy")):
        if planner.strategy in ("apparate", "pame"):
            raise InputError(f"strategy {planner.strategy} is not for {model}")


def _with_lengths(problem: PlanProblem, parts: ServiceParts) -> PlanProblem:
    """Returns the problem with the lengths in the file, if any; raises InputError for impossible lengths."""
    document, card, exits = parts.document, parts.card, parts.exits
    if document.lengths is None:
        return problem
    with parts.source.errors_at(("planner", "strategy")):
        if document.planner.strategy == "pame":
            raise InputError("strategy pame plans from recorded batches, counted in inputs; leave lengths out")
    with parts.source.errors_at(("lengths",)):
        if not card.has_tokens:
            raise InputError("lengths: the model's inputs have no tokens; leave lengths out")
    lengths = lengths_of(document.lengths, parts.source, parts.base)
    with parts.source.errors_at(("lengths",)):
        longest = lengths.mean if lengths.longest is None else lengths.longest
        if longest > card.max_length:
            raise InputError(f"lengths: an input of {longest:g} tokens; the model takes at most {card.max_length}")
        longer_N = stayers_length_N(exits.records, exits.thresholds)
        problem = replace(problem, lengths=lengths, stayers_length_N=longer_N)
        in_tokens(problem)  # raises if batches of such inputs were not measured
    return problem


def first_plan(parts: ServiceParts, make: Callable[[], Plan]) -> Plan:
    """Returns the first plan: the file's, or a new one. Later plans keep its order of inputs and its dispatch."""
    planner = parts.document.planner
    from_file = None if planner.plan is None else _given_plan(parts, parts.base / planner.plan)
    plan = from_file or make()
    if planner.dispatch is not None:
        plan = replace(plan, dispatch=planner.dispatch)
    if planner.order is None:
        return plan
    with parts.source.errors_at(("planner", "order")):
        return replace(plan, order=order_of(planner.order))


def _solved(parts: ServiceParts, problem: PlanProblem, solve: Solve) -> Plan:
    exits = parts.exits
    file = ProblemFile(problem=problem, recorded=exits)
    result = answer(file, parts.document.planner.strategy, solve, compared=())
    if isinstance(result, NoPlanAnswer):
        with parts.source.errors_at(("slo",)):
            raise InputError(result.message)
    figures, scale = result.planned.figures, parts.inventory.time_scale
    in_real_seconds = replace(
        figures,
        rate_per_s=figures.rate_per_s / scale,
        latency_s=figures.latency_s * scale,
        mean_latency_s=figures.mean_latency_s * scale,
    )
    return replace(plan_of(file, replace(result.planned, figures=in_real_seconds), exits.policy), prune=exits.prune)


def _given_plan(parts: ServiceParts, path: Path) -> Plan:
    card = parts.card
    plan = read_plan(path, ModelShape.of(card))
    policy = plan.policy or parts.exits.policy
    with parts.source.errors_at(("planner", "plan")):
        missing = missing_accelerators(PlacedPlan(plan=plan).occupied, parts.inventory)
        if missing:
            listed = ", ".join(f"{count} {name}" for name, count in missing.items())
            raise InputError(f"{path} needs {listed} more than the cluster has")
        unknown = sorted(set(plan.ramps) - set(parts.exits.thresholds)) if parts.document.planner.control else []
        if unknown:
            raise InputError(
                f"{path} has ramps {unknown}; the controller has thresholds for {[*parts.exits.thresholds]}"
            )
        if parts.exits.policy.name == "recorded" and policy.name != "recorded":
            raise InputError(
                f"{path} has the policy {policy.name}; emulated accelerators with recorded answers need recorded"
            )
    return replace(plan, policy=policy)


def scaled_problem(problem: PlanProblem, scale: float) -> PlanProblem:
    """Returns the problem with all times multiplied by `scale`, which turns emulated seconds into real ones."""
    if problem.required_per_s is not None:
        problem = problem.with_rate(problem.required_per_s / scale)
    return replace(
        problem,
        latency={name: scaled_table(table, scale) for name, table in problem.latency.items()},
        link=Link(
            bandwidth_bytes_per_s=problem.link.bandwidth_bytes_per_s / scale, delay_s=problem.link.delay_s * scale
        ),
        slo=replace(problem.slo, latency_s=problem.slo.latency_s * scale),
        crossing_s=problem.crossing_s * scale,
    )


def at_folder(settings: ServeSettings, folder: PurePosixPath) -> ServeSettings:
    """Returns settings for nodes that have all files in `folder`: `model/`, other exit records, state and keys."""
    model, plan, control, access = Path(settings.model), settings.plan, settings.control, settings.access
    if plan.policy is not None:
        plan = replace(plan, policy=_moved(plan.policy, model, folder))
    if control is not None:
        state, policy = str(folder / Path(control.state).name), _moved(control.policy, model, folder)
        control = control.model_copy(update={"state": state, "policy": policy})
    if access is not None and access.keys_file is not None:
        access = access.model_copy(update={"keys_file": str(folder / Path(access.keys_file).name)})
    return settings.model_copy(
        update={"model": str(folder / MODEL), "plan": plan, "control": control, "access": access}
    )


def _moved(policy: PolicySpec, model: Path, folder: PurePosixPath) -> PolicySpec:
    if policy.records is None:
        return policy
    records = Path(policy.records)
    inside = folder / MODEL / records.relative_to(model) if records.is_relative_to(model) else folder / records.name
    return replace(policy, records=str(inside))
