"""Reads service files: model, latency limit, accuracy, cluster and planner of a service.

Errors are reported as `file:line: what is wrong` before anything starts. If accelerators are emulated, times in the
file are emulated seconds. The settings of the service have real seconds, which are `time_scale` times as many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field

from cluster.devices import EMULATED, find_device
from cluster.inventory import Inventory, read_inventory
from deployments.controller.settings import check_control, check_tuning
from deployments.local_ray.applications import check_devices
from deployments.settings import ControlSettings, EmulatedSettings, PlanningSettings, ServeSettings
from earlyexit.data.source_file import Source, StrictDocument, read_source
from earlyexit.engine.engine import Dispatch
from earlyexit.errors import DataError, InputError, PlanError, within
from earlyexit.named import NAME_PATTERN
from earlyexit.network.boundary import FLOAT_BYTES, bytes_per_input, hop_float_bytes
from earlyexit.network.store import WEIGHTS_FILE, ModelCard, read_card
from earlyexit.policies import Score
from offramp.commands.folders import model_records, read_calibration
from offramp.commands.output import command
from offramp.commands.plan import Solve, best_answer
from offramp.spec.application import application_settings, checked_card
from offramp.spec.documents import ApplicationDocument, IngressDocument, PartDocument, ServedModelDocument
from optimizer.calibration.calibration_file import (
    CALIBRATION_FILE,
    PRUNED,
    CalibrationCard,
    beside_of,
    check_policy,
    policy_of_records,
    records_of,
)
from optimizer.cost.evaluate import evaluate
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, stock_plan
from optimizer.plans.plan_file import ModelShape, Order, read_plan
from optimizer.problems.entries import FileLengths, FileThresholds, Latencies, Recorded, latency_tables, with_rows
from optimizer.problems.networks import with_slower_networks
from optimizer.problems.problem import (
    IN_TIME,
    Ingresses,
    InTime,
    Link,
    MaximizeRate,
    MinimizeCost,
    MinimizeLatency,
    ObjectiveWith,
    PlanProblem,
    Rate,
    Slo,
    Supply,
)
from optimizer.problems.problem_file import BudgetDocument, ProblemFile
from optimizer.problems.tokens import in_tokens
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import NoPlan
from optimizer.search.planner import solve
from profiles.networks import alone_of, kept_of, measuring_of, survival_of
from profiles.records import ExitRecords
from profiles.table import LatencyTable


class ModelDocument(ServedModelDocument):
    """The served model, its latencies, and how exits are decided."""

    models: list[str] | None = Field(default=None, min_length=2)
    """Models that the folder's chain must have, smallest first, relative to the service file's folder. None: any."""
    latency: Latencies
    """Latency per accelerator type of the cluster: a table, a published profile or a profile file."""
    slower: float = Field(default=1.0, gt=0)
    """Factor on every latency, if all accelerators are emulated. E3's V100 takes 6.5 times the published seconds."""
    decisions: Literal["recorded", "computed"] = "recorded"
    """How emulated accelerators decide exits: from exit records, or by running the model."""
    bytes_per_sample: float | None = Field(default=None, ge=0)
    """Bytes that a hop transfers per input. None: the size of the hidden state after each block, in `hop_dtype`, at the
    latency's length or the longest input."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory that a replica needs on its accelerator. None: the size of the parameters in `dtype`."""


class AccuracyDocument(StrictDocument):
    """Which inputs may leave at a ramp."""

    budget: float | None = Field(default=None, ge=0, lt=1)
    """Budget for the alarm and for tuned thresholds. The calibration's thresholds keep its own, the default."""
    policy: Score | Literal["recorded"] | None = None
    """Exit policy. None: the calibration's, or recorded if emulated accelerators decide from exit records."""
    thresholds: FileThresholds | None = None
    """One threshold for all ramps, or one per ramp, which then are the only ramps. None: the calibration's."""
    records: str | None = None
    """Exit records, which give the survival for the first plan. None: those of the model's calibration."""
    prune: bool | None = None
    """For a chain calibrated with `--prune`: whether words are pruned between its networks. None: if plans improve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostDocument(MinimizeCost):
    """Find the cheapest plan that serves the forecast rate."""

    rate_per_s: Rate | None = None  # type: ignore[assignment]  # `at` gives a rate
    """Rate of the first plan, before there is a forecast. None: the highest rate that the accelerators serve."""
    in_time: InTime = IN_TIME

    def at(self, rate_per_s: float | None) -> MinimizeCost | MaximizeRate:
        """Returns the objective at a rate; the highest rate while none is known."""
        return MaximizeRate() if rate_per_s is None else MinimizeCost(**{**asdict(self), "rate_per_s": rate_per_s})


class PlannerDocument(PartDocument, PlanningSettings):
    """How plans are made."""

    objective: ObjectiveWith[CostDocument] | None = None
    """What plans optimize: the highest rate, or for a rate the least cost or latency. None: the least cost at the
    forecast rate. Without control, for a model that generates, and if a price is unknown, None is the highest rate."""
    budget: BudgetDocument | None = None
    """The largest cost of a plan. None: no limit."""
    control: bool = True
    """Whether a controller makes new plans. False: the first plan remains."""
    plan: str | None = None
    """File of the first plan. None: the planner makes it from the exit records."""
    order: Order | None = None
    """Order in which queued inputs form batches, as in plan files. None: the plan file's order, else by deadline."""
    dispatch: Dispatch | None = None
    """When a batch starts, as in plan files. None: the plan file's rule, else work-conserving."""
    batch_limit: int | None = Field(default=None, ge=1)
    """Largest batch size that a plan may use. None: the largest measured one."""
    state: str | None = None
    """SQLite file with the controller's observations and plans. None: named after the service, in the file's folder."""
    probe_share: float = Field(default=0.02, ge=0, le=1)
    """Share of the inputs that run all blocks and ramps, so that the controller can observe them."""


class ServiceDocument(ApplicationDocument):
    """All settings of a service; each part has a section below."""

    schema_version: Literal[1]
    name: str = Field(pattern=NAME_PATTERN)
    model: ModelDocument
    slo: Slo
    """The latency limit, in emulated seconds where the cluster is emulated."""
    accuracy: AccuracyDocument = Field(default_factory=AccuracyDocument)
    cluster: str | Inventory
    """The accelerators: inline, or a file relative to the service file's folder."""
    planner: PlannerDocument = Field(default_factory=PlannerDocument)
    lengths: FileLengths | None = None
    """Input lengths in tokens, for first plans with token budgets. None: batches are counted in inputs."""


@dataclass(frozen=True, kw_only=True)
class ServiceParts:
    """A service file, with the contents of the files that it names."""

    document: ServiceDocument
    base: Path
    """The folder of the file, to which its paths are relative."""
    model: Path
    card: ModelCard
    inventory: Inventory
    calibration_folder: Path | None = None
    """Folder of the calibration to use. None: the model's own."""

    @property
    def unpriced(self) -> list[str]:
        """The accelerator types without a known price."""
        return [name for name in self.inventory.counts if self.inventory.devices[name].usd_per_hour is None]

    @property
    def objective(self) -> CostDocument | MaximizeRate | MinimizeLatency:
        """The objective. By default it is the least cost at the forecast rate, if the controller can follow it.

        Steps of a model that generates arrive as fast as earlier ones are answered: a smaller service lowers the rate.
        """
        planner = self.document.planner
        can_follow = planner.control and not (self.unpriced or self.card.generates)
        return planner.objective or (CostDocument() if can_follow else MaximizeRate())

    @property
    def is_recorded(self) -> bool:
        """Whether emulated accelerators answer from records."""
        emulated = any(name.startswith(EMULATED) for name in self.inventory.counts)
        return emulated and self.document.model.decisions == "recorded"

    @cached_property
    def tables(self) -> Mapping[str, LatencyTable]:
        """Latency tables by device, with all ramps, in the seconds of the file; raises InputError.

        If words are pruned, networks that measure attention are slower by the factor that the calibration has found.
        """
        document, card, devices = self.document.model, self.card, list(self.inventory.counts)
        with within("model", "latency"):
            if missing := [device for device in devices if device not in document.latency]:
                raise InputError(f"no latency for {', '.join(missing)}, but only for {', '.join(document.latency)}")
            entries = {device: document.latency[device] for device in devices}
            tables = latency_tables(entries, card.num_blocks, card.ramps, self.base)
        times = measuring_of(self.exits.records) if self.exits.prune else ()
        return {
            device: with_slower_networks(table.times(document.slower), card.chain.bounds, times)
            for device, table in tables.items()
        }

    @cached_property
    def exits(self) -> Exits:
        """The exit policy with its records, from the file or else the calibration.

        Raises InputError, with the path of a field that does not fit the model.
        """
        document = self.document.accuracy
        with within("accuracy"):
            complete = document.policy is not None and document.thresholds is not None
            calibration = None if complete else read_calibration(self.model, self.calibration_folder)
            score = document.policy or (calibration.policy if calibration else "recorded")
            name = "recorded" if self.is_recorded else score
            named = document.records and Path(os.path.realpath(self.base / document.records))
            path = named or records_of(self.calibration_folder or self.model)
            with within("records"):
                records = self._records(path, score, name, calibration)
                alone = alone_of(path, records)
            with within("thresholds"):
                thresholds = _thresholds(document, calibration, self.card, records)
            if name == "recorded":
                policy = PolicySpec(name=name, thresholds=thresholds, records=str(path))
            else:
                policy = policy_of_records(records, thresholds)
        # A running service has the full model's answers for probes, but no labels: it cannot monitor a budget of harm.
        promised = calibration if calibration is not None and calibration.metric == "agreement" else None
        budget = promised.budget if promised is not None and document.budget is None else document.budget
        pruned = (calibration.prune if calibration is not None else None) or {}
        return Exits(
            policy=policy,
            thresholds=thresholds,
            records=records,
            alone=alone,
            budget=budget if pruned else of_ramps(budget, records, thresholds),
            confidence=promised.confidence if promised is not None and promised.confidence > 0 else CONFIDENCE,
            prune=pruned,
        )

    def _records(self, path: Path, score: str, policy: str, calibration: CalibrationCard | None) -> ExitRecords:
        """Returns the exit records in a file; raises InputError if they do not fit the model or the policy."""
        records = model_records(path, self.model)
        if score not in ("recorded", records.score):
            raise InputError(f"the policy is {score}, {path} holds scores of {records.score}")
        if policy == "recorded" and records.answers_NE is None:
            instead = f"policy {records.score}, and " if self.document.accuracy.policy == "recorded" else ""
            raise InputError(
                f"{path} holds losses and no answers, as for all dense models, so policy recorded cannot use it: "
                f"set {instead}model.decisions: computed for emulated accelerators"
            )
        if calibration is not None:
            check_policy(calibration.policy_spec(), "the calibration", records, str(path), calibration.thresholds)
        return records

    @cached_property
    def problem(self) -> PlanProblem:
        """The problem of the first plan, with times in the seconds of the file; raises InputError."""
        document, card, inventory, exits = self.document, self.card, self.inventory, self.exits
        ramps, is_chain, planner = tuple(exits.thresholds), not card.chain.is_one, document.planner
        objective, front, scale = self.objective, self.document.ingress, inventory.time_scale
        with within("model"):
            problem = PlanProblem(
                num_blocks=card.num_blocks,
                ramps=ramps,
                survival_N=exits.records.outcome(exits.thresholds).survival,
                probe_share=planner.probe_share if planner.control else 0.0,
                latency={name: with_rows(table, card.ramps, ramps) for name, table in self.tables.items()},
                devices={
                    name: Supply(count=each.count, usd_per_hour=each.usd_per_hour or 0.0, per_node=each.per_node)
                    for name, each in inventory.devices.items()
                    if each.count
                },
                link=Link(bandwidth_bytes_per_s=inventory.link.bandwidth_bytes_per_s, delay_s=inventory.link.delay_s),
                ingress=None
                if front.inputs_per_s is None
                else Ingresses(inputs_per_s=front.inputs_per_s * scale, replicas=front.replicas),
                bytes_per_sample_N=bytes_per_sample(document.model, card),
                slo=document.slo,
                objective=objective.at(objective.rate_per_s) if isinstance(objective, CostDocument) else objective,
                budget_usd_per_hour=None if planner.budget is None else planner.budget.usd_per_hour,
                networks=card.chain.networks,
                survival_of=survival_of(exits.records, exits.thresholds, card.chain, exits.alone) if is_chain else None,
                crossing_s=CROSSING_S / scale if is_chain else 0.0,
                crossing_tokens=kept_of(exits.records) if exits.prune else (),
            )
        if document.lengths is not None:
            problem = replace(problem, lengths=document.lengths, stayers_length_N=exits.stayers_length_N)
            with within("lengths"):
                in_tokens(problem)  # raises if batches of such inputs were not measured
        if planner.strategy == "pame":
            problem = replace(problem, batches=exits.batches(problem))
        with within("planner", "batch_limit"):
            return problem if planner.batch_limit is None else with_batch_limit(problem, planner.batch_limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits(Recorded):
    """The exit policy of a service, with its exit records."""

    policy: PolicySpec
    """The policy, with a threshold for every ramp that may be active."""
    budget: float | None
    """The budget for losses at ramps, from which the loss of an ensemble's end is subtracted; None for no budget."""
    confidence: float
    """Confidence that the thresholds keep the budget of agreement, which new thresholds must reach too."""
    prune: Mapping[int, float] = field(default_factory=dict)
    """Alphas of word pruning by end ramp, as in a plan."""


def of_ramps(budget: float | None, records: ExitRecords, thresholds: Mapping[int, float]) -> float | None:
    """Returns the budget without the loss at an ensemble's end, which probes do not observe."""
    if budget is None or records.end_losses_N is None:
        return budget
    outcome = records.outcome(thresholds)
    at_end_N = outcome.exits_N == outcome.num_blocks - 1
    return max(0.0, budget - float(outcome.losses_N[at_end_N].sum()) / len(records))


def _thresholds(
    document: AccuracyDocument, calibration: CalibrationCard | None, card: ModelCard, records: ExitRecords
) -> dict[int, float]:
    own = document.thresholds
    if own is None:
        assert calibration is not None, "without thresholds in the file, the calibration was read"
        thresholds = dict(calibration.thresholds)
    else:
        thresholds = dict(own) if isinstance(own, Mapping) else dict.fromkeys(records.ramps, own)
    for ramps, what in ((card.ramps, "the model's ramps are"), (records.ramps, "the exit records hold ramps")):
        if unknown := sorted(set(thresholds) - set(ramps)):
            raise InputError(f"thresholds for ramps {unknown}; {what} {list(ramps)}")
    return dict(sorted(thresholds.items()))


def bytes_per_sample(document: ModelDocument, card: ModelCard) -> tuple[float, ...]:
    """Returns the bytes that a hop after each block transfers per input."""
    if document.bytes_per_sample is not None:
        return (document.bytes_per_sample,) * card.num_blocks
    lengths = [entry.length for entry in document.latency.values() if entry.length is not None]
    length = max(lengths, default=card.max_length)
    float_bytes = hop_float_bytes(document.dtype, document.hop_dtype)
    return tuple(bytes_per_input(each, length, float_bytes=float_bytes) for each in card.boundaries)


def _check_memory(file: ServiceParts) -> None:
    """Raises InputError if a replica does not fit into the memory of its accelerator."""
    document, card = file.document.model, file.card
    with within("model", "folder"):
        needed_bytes = document.memory_bytes or _parameter_bytes(file.model, card, document.dtype)
    for device, each in file.inventory.devices.items():
        if each.count and each.memory_bytes is not None and needed_bytes > each.memory_bytes:
            of = "" if card.chain.is_one else f" of {' and '.join(card.chain.names)}"
            reason = "memory_bytes" if document.memory_bytes else f"the parameters{of} in {document.dtype}"
            needed, available = (f"{size / 1e9:.3g} GB" for size in (needed_bytes, each.memory_bytes))
            raise InputError(f"a replica needs {needed} ({reason}), {device} has {available}", at=("model",))


def _parameter_bytes(model: Path, card: ModelCard, dtype: str) -> int:
    """Returns the bytes of all networks of the model: the weights in `dtype`, and files that are not converted."""
    num_bytes = 0
    for folder in card.network_folders(model):
        weights, *others = (folder / name for name in (WEIGHTS_FILE, *read_card(folder).network_files))
        if missing := [path.name for path in (weights, *others) if not path.is_file()]:
            raise DataError(f"{folder} has no {missing[0]}")
        num_bytes += weights.stat().st_size * FLOAT_BYTES[dtype] // FLOAT_BYTES["float32"]
        num_bytes += sum(path.stat().st_size for path in others)
    return num_bytes


def read_document(path: Path) -> tuple[ServiceDocument, Source]:
    """Reads a service file, but not the files that it names; raises InputError with file, line and what is wrong."""
    source = read_source(path, InputError)
    return source.parse(ServiceDocument, called="the service", folder=path.parent), source


def _read_parts(document: ServiceDocument, source: Source) -> ServiceParts:
    """Reads the files that a service file names; raises InputError."""
    cluster, base = document.cluster, Path(source.where).parent
    inventory = cluster if isinstance(cluster, Inventory) else read_inventory(base / cluster)
    if not inventory.counts:
        raise InputError("the cluster has no accelerator: every count is 0", at=("cluster",))
    model = Path(os.path.realpath(base / document.model.folder))
    with within("model", "folder"):
        card = checked_card(model, document.model)
    parts = ServiceParts(document=document, base=base, model=model, card=card, inventory=inventory)
    for at, mistake in _contradictions(parts):
        raise InputError(mistake, at=at)
    _check_memory(parts)
    _ = parts.tables, parts.exits  # reads and checks them
    return parts


def _contradictions(parts: ServiceParts) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields what does not fit the model, the cluster or another field: the path of a field, and a message."""
    document, planner, card, unpriced = parts.document, parts.document.planner, parts.card, parts.unpriced
    lengths, objective, folders = document.lengths, planner.objective, card.network_folders(parts.model)
    expected = [Path(os.path.realpath(parts.base / each)) for each in document.model.models or ()]
    if expected and [each.resolve() for each in folders] != expected:
        is_now = f"is a chain of {' and '.join(map(str, folders))}" if len(folders) > 1 else "is a single model"
        wanted = f"not a chain of {' and '.join(map(str, expected))}; `offramp chain` makes one"
        yield ("model", "models"), f"{parts.model} {is_now}, {wanted}"
    real = ", ".join(device for device in parts.inventory.counts if not device.startswith(EMULATED))
    if document.model.slower != 1 and real:
        yield ("model", "slower"), f"slower {document.model.slower:g} is only for emulated accelerators, not for {real}"
    if card.generates:
        model = "a model that generates, whose inputs are steps of sequences"
        if lengths is not None:
            yield ("lengths",), f"lengths are not for {model}: a problem file has those of prompts under `generation`"
        if isinstance(objective, MinimizeLatency):
            instead = "choose the highest rate, or minimal cost"
            yield ("planner", "objective"), f"minimal latency is not for {model}: {instead}"
        if planner.strategy in ("apparate", "pame"):
            yield ("planner", "strategy"), f"strategy {planner.strategy} is not for {model}"
    if unpriced and (isinstance(parts.objective, CostDocument) or planner.budget is not None):
        no_price = f"plans are made by cost, and {', '.join(unpriced)} has no usd_per_hour"
        yield ("cluster", "devices", unpriced[0]), no_price
    if planner.strategy == "pame":
        from_batches = "strategy pame plans from recorded batches"
        if lengths is not None:
            yield ("planner", "strategy"), f"{from_batches}, counted in inputs; leave lengths out"
        if planner.control:
            yield ("planner", "strategy"), f"{from_batches}, which a controller lacks: set control: false"
    if lengths is not None:
        longest = lengths.mean if lengths.longest is None else lengths.longest
        if not card.has_tokens:
            yield ("lengths",), "lengths: the model's inputs have no tokens; leave lengths out"
        elif longest > card.max_length:
            yield ("lengths",), f"lengths: an input of {longest:g} tokens; the model takes at most {card.max_length}"
    if not planner.control:
        if planner.tuning != "off":
            yield ("planner", "tuning"), f"tuning {planner.tuning!r} needs the controller, and planner.control is false"
        if isinstance(objective, CostDocument) and objective.rate_per_s is None:
            why = "without rate_per_s, the cost is that of the controller's forecast, and planner.control is false"
            yield ("planner", "objective"), f"{why}: set rate_per_s, or {{maximize: rate}}"


def _by_calibration(parts: ServiceParts) -> tuple[ServiceParts, ...]:
    """Returns the parts for each calibration of the model, its own first, or only `parts` if the file replaces them.

    Raises InputError if `accuracy.prune` is set and impossible, and for a calibration of other models.
    """
    prune, reason = parts.document.accuracy.prune, _why_not_pruned(parts)
    if prune and reason is not None:
        raise InputError(f"accuracy.prune: {reason}", at=("accuracy", "prune"))
    path = parts.model / PRUNED / CALIBRATION_FILE
    if prune and not path.is_file():
        calibrate = command("calibrate", parts.model, "--data", "FILE", "--prune", 0.14)
        raise InputError(f"{path} does not exist; run: {calibrate}", at=("accuracy", "prune"))
    if _replaced_field(parts) is not None or parts.document.planner.plan is not None:
        return (parts,)
    folders = [each for each in beside_of(parts.model) if each.name != PRUNED or reason is None]
    every = (parts, *(replace(parts, calibration_folder=folder) for folder in folders))
    return tuple(each for each in every if prune in (None, bool(each.exits.prune)))  # reads, and so checks, all exits


def _replaced_field(parts: ServiceParts) -> str | None:
    """Returns the first field of the file that replaces a calibration; None without one."""
    names = ("policy", "thresholds", "records")
    return next((name for name in names if getattr(parts.document.accuracy, name) is not None), None)


def _why_not_pruned(parts: ServiceParts) -> str | None:
    """Returns why texts cannot be pruned; None if they can."""
    document = parts.document
    if parts.card.chain.is_one:
        return f"{parts.card.name} is a single model; words are pruned only between the models of a chain"
    field_name = _replaced_field(parts)
    if field_name is not None:
        return f"the calibration of pruned texts sets the {field_name}; leave one of the two out"
    if isinstance(document.planner.objective, MinimizeLatency):
        return "with minimal latency as the objective, answered inputs may run on, and need the whole text"
    if document.planner.plan is not None:
        return "the plan file sets where words are pruned; leave one of the two out"
    if document.model.backend != "torch":
        return f"attention is measured by torch, and the backend is {document.model.backend}"
    if parts.is_recorded:
        return "emulated accelerators that answer from records measure no attention"
    return None


CONFIDENCE: float = ControlSettings.model_fields["accuracy_confidence"].default
"""Confidence for new thresholds if the calibration has not tested its own."""
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

    def moved_to(self, at: str | None) -> Service:
        """Returns the service with its files in the folder `at` of every node; None: in their present folders."""
        return self if at is None else replace(self, settings=at_folder(self.settings, PurePosixPath(at)))


def read_service(path: Path, solve: Solve = solve) -> Service:
    """Reads a service file, and makes its first plan unless it names one.

    Raises InputError with file, line, the mistake and what is allowed.
    """
    return build_service(*read_document(path), solve)


def build_service(document: ServiceDocument, source: Source, solve: Solve = solve) -> Service:
    """Returns the service of a file that `read_document` has read, as `read_service` does."""
    with source.located():
        each_parts = _by_calibration(_read_parts(document, source))  # a chain may have several
        given = _given_plan(each_parts[0])
        parts, plan = _best_plan(each_parts, solve) if given is None else (each_parts[0], given)
        return Service(settings=_settings(parts, plan), inventory=parts.inventory, ingress=document.ingress)


def check_service(path: Path) -> ServiceParts:
    """Reads and checks a service file as `offramp serve` does, but makes no plan, which may take minutes."""
    document, source = read_document(path)
    with source.located():
        parts = _by_calibration(_read_parts(document, source))[0]
        device = next(iter(parts.inventory.counts))
        batch = parts.tables[device].batches[0]
        stand_in = stock_plan(parts.card.num_blocks, networks=parts.problem.networks, device=device, batch=batch)
        check_control(_settings(parts, _given_plan(parts) or stand_in), ModelShape.of(parts.card))
        return parts


def _settings(parts: ServiceParts, plan: Plan) -> ServeSettings:
    """Returns the settings with a first plan. Later plans keep its order of inputs and its dispatch."""
    document, planner = parts.document, parts.document.planner
    return application_settings(
        document,
        replace(plan, dispatch=planner.dispatch or plan.dispatch, order=planner.order or plan.order),
        parts.base,
        node_labels={name: dict(each.labels) for name, each in parts.inventory.devices.items() if each.labels},
        emulated={
            name: EmulatedSettings(
                **table.document(as_measured=False),
                length=None if parts.problem.lengths is None else table.length,
                time_scale=parts.inventory.time_scale,
                decisions=document.model.decisions,
            )
            for name, table in parts.tables.items()
            if find_device(name).emulated
        },
        control=_control(parts, plan) if planner.control else None,
        probe_share=planner.probe_share if planner.control else 0.0,
        slo_s=document.slo.latency_s * parts.inventory.time_scale,
        slack=document.slo.slack,
    )


def _control(parts: ServiceParts, plan: Plan) -> ControlSettings:
    planner, objective, problem = parts.document.planner, parts.objective, parts.problem
    if isinstance(objective, CostDocument) and objective.rate_per_s is None:
        # A plan file may have batches that were not measured. Then the default is the highest rate.
        with suppress(PlanError) if planner.objective is None else within("planner", "plan"):
            figures = evaluate(problem, plan.stages, shares=plan.shares)
            problem = replace(problem, objective=objective.at(figures.rate_per_s))
    control = ControlSettings(
        problem=scaled_problem(problem, parts.inventory.time_scale),
        policy=parts.exits.policy,
        state=os.path.realpath(parts.base / (planner.state or f"{parts.document.name}.sqlite")),
        accuracy_budget=parts.exits.budget,
        accuracy_confidence=parts.exits.confidence,
        **planner.model_dump(include=set(PlanningSettings.model_fields)),
    )
    with within("planner", "tuning"):
        check_tuning(control, planner.probe_share)
    return control


def _best_plan(each_parts: Sequence[ServiceParts], solve: Solve) -> tuple[ServiceParts, Plan]:
    """Returns the best plan over several calibrations, and its parts; raises InputError if none has a plan."""
    files = [ProblemFile(problem=each.problem, recorded=each.exits) for each in each_parts]
    planner = each_parts[0].document.planner
    result = best_answer(files, planner.strategy, solve, compared=(), time_limit_s=planner.time_limit_s)
    is_ingress = isinstance(result.decision, NoPlan) and result.decision.binding == "ingress"
    with within(*(("ingress", "inputs_per_s") if is_ingress else ("slo",))):
        planned = result.planned
    parts = next(each for each in each_parts if each.exits is result.file.recorded)
    real = scaled_problem(parts.problem, parts.inventory.time_scale)
    figures = evaluate(real, planned.stages, shares=planned.figures.shares)
    plan = replace(result, decision=replace(planned, figures=figures)).plan(parts.exits.policy)
    return parts, replace(plan, prune=parts.exits.prune)


def _given_plan(parts: ServiceParts) -> Plan | None:
    """Returns the plan that the service file names, if any; raises InputError if it does not fit the service."""
    _ = parts.problem  # reads and checks it first
    if parts.document.planner.plan is None:
        return None
    path = parts.base / parts.document.planner.plan
    plan = read_plan(path, ModelShape.of(parts.card))
    policy = plan.policy or parts.exits.policy
    with within("planner", "plan"):
        check_devices(PlacedPlan(plan=plan).occupied, parts.inventory, claimed={})
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
    link = problem.link
    ingress = problem.ingress
    with within("cluster", "time_scale"):
        return replace(
            problem.with_rate((problem.required_per_s or 0.0) / scale),
            ingress=ingress and replace(ingress, inputs_per_s=ingress.inputs_per_s / scale),
            latency={name: table.times(scale) for name, table in problem.latency.items()},
            link=Link(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / scale, delay_s=link.delay_s * scale),
            slo=replace(problem.slo, latency_s=problem.slo.latency_s * scale),
            crossing_s=problem.crossing_s * scale,
        )


def at_folder(settings: ServeSettings, folder: PurePosixPath) -> ServeSettings:
    """Returns settings for nodes that have all files in `folder`: `model/`, other exit records, state and keys."""
    model, control, access = Path(settings.model), settings.control, settings.access
    plan = replace(settings.plan, policy=_moved(settings.plan.policy, model, folder))
    if control is not None:
        state, policy = str(folder / Path(control.state).name), _moved(control.policy, model, folder)
        control = control.model_copy(update={"state": state, "policy": policy})
    if access is not None and access.keys_file is not None:
        access = access.model_copy(update={"keys_file": str(folder / Path(access.keys_file).name)})
    return settings.model_copy(
        update={"model": str(folder / MODEL), "plan": plan, "control": control, "access": access}
    )


def _moved(policy: PolicySpec | None, model: Path, folder: PurePosixPath) -> PolicySpec | None:
    if policy is None or policy.records is None:
        return policy
    records = Path(policy.records)
    inside = folder / MODEL / records.relative_to(model) if records.is_relative_to(model) else folder / records.name
    return replace(policy, records=str(inside))
