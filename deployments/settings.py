"""The settings with which an application starts. A change of any setting restarts replicas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator

from deployments.choices import IngressSettings, ModelSettings, Settings, TracingSettings, VersionSettings
from deployments.keys import AccessSettings
from earlyexit.errors import ModelFolderError, PlanError
from earlyexit.network.store import ModelCard, read_card
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec
from optimizer.plans.plan_file import parse_plan, parse_policy, plan_document, policy_document
from optimizer.problems.problem import PlanProblem
from optimizer.problems.problem_file import parse_problem, problem_document
from optimizer.search.decision import Strategy


def _plan(value: Any) -> Plan:
    return value if isinstance(value, Plan) else parse_plan(value)


def _policy(value: Any) -> PolicySpec:
    return value if isinstance(value, PolicySpec) else parse_policy(value, where="control.policy")


def _problem(value: Any) -> PlanProblem:
    return value if isinstance(value, PlanProblem) else parse_problem(value, where="control.problem").problem


class EmulatedSettings(Settings):
    """An emulated accelerator, whose batches take the time of a latency profile, multiplied by `time_scale`."""

    batch: list[int] = Field(min_length=1)
    block_s: list[list[float]]
    """Seconds by block and batch size, before `time_scale` is applied."""
    ramp_s: list[list[float]]
    """Seconds by ramp of the model and batch size."""
    length: int | None = Field(default=None, ge=1)
    """Tokens of each measured input: a batch's time then follows its tokens. None: all inputs take the same time."""
    time_scale: float = Field(default=1.0, gt=0)
    """Real seconds per emulated second."""
    decisions: Literal["recorded", "computed"] = "recorded"
    """recorded: exits come from the plan's exit records, without torch. computed: the model runs."""


Tuning = Annotated[
    Literal["off", "guarantee", "apparate", "pame"],
    BeforeValidator(lambda value: "off" if value is False else value),  # which is what YAML reads for off
]


class PlanningSettings(Settings):
    """How and when a controller plans. All times are in wall-clock seconds."""

    strategy: Strategy = "best"
    """Plans among which the planner chooses: best (all), stock, early-exit, e3, serial, apparate or pame."""
    period_s: float = Field(default=120.0, gt=0)
    """Seconds between plans while nothing changes, and the length of the windows of the forecast."""
    time_limit_s: float = Field(default=60.0, gt=0)
    """Seconds after which a search for a plan ends with its best plan so far, also the search for the first plan.
    If the controller needs several searches for a plan, they share this time, but each has at least a quarter of it."""
    watch_s: float = Field(default=5.0, gt=0)
    """Interval at which observations are collected and compared with the forecast."""
    coverage: float = Field(default=0.95, gt=0, lt=1)
    """Coverage of the forecast intervals. If the stream leaves an interval, the controller plans at once."""
    least_gain: float = Field(default=0.02, ge=0)
    """Share by which a new plan must be better than the present one, beyond the cost of the change."""
    start_s: float = Field(default=10.0, ge=0)
    """Seconds of service that a starting replica is expected to miss."""
    starts_at_once: int | None = Field(default=None, ge=1)
    """Most replicas that a change starts at the same time, if they share cores with serving replicas; None: all."""
    straggler_ratio: float = Field(default=1.5, gt=1)
    """A replica is a straggler if it is slower than its peers by more than this factor."""
    rollback_margin: float = Field(default=0.2, gt=0, lt=1)
    """Share of the predicted goodput that a new plan may miss before the controller returns to the old plan."""
    tuning: Tuning = "off"
    """How thresholds follow the stream. off: they are constant. guarantee: new thresholds must pass a test on probes,
    and an alarm restores safe ones when the budget is exceeded. apparate: the trigger and the search of that paper.
    pame: one exit moves later when batches are slow, and its threshold rises when precision is low. All methods except
    off need probes and a budget."""


class ControlSettings(PlanningSettings):
    """Settings of the controller. An application without a controller keeps its plan."""

    problem: Annotated[PlanProblem, PlainValidator(_problem), PlainSerializer(problem_document)]
    """A document as in `optimizer.problems.problem_file`, in wall-clock seconds (for emulated accelerators, after
    `time_scale`). Its survival is the forecast until there are observations."""
    policy: Annotated[PolicySpec, PlainValidator(_policy), PlainSerializer(policy_document)]
    """The exit policy, as in plan files, with a threshold for each ramp of the problem."""
    state: str
    """SQLite file with the controller's state, on the node of the controller, on a disk that outlives the process."""
    accuracy_budget: float | None = Field(default=None, ge=0, lt=1)
    """Share of answers that may differ from the full model's; None: the share is only reported."""
    accuracy_confidence: float = Field(default=0.9, gt=0, lt=1)
    """Confidence with which thresholds that are found while serving must keep the budget."""


class ServeSettings(IngressSettings, ModelSettings):
    """The settings of one application."""

    model: str
    """The model folder, which every node must be able to read."""
    card: ModelCard | None = Field(default=None, exclude=True)
    """The card of the model with which the service started, for its processes. None: before the start."""
    plan: Annotated[Plan, PlainValidator(_plan), PlainSerializer(plan_document)]
    """The first plan: a document as in `optimizer.plans.plan_file`. An invalid document raises PlanError."""
    app: str = "offramp"
    """The Serve application's name."""
    route_prefix: str = Field(default="/", pattern=r"^/([^?#{}\s]*[^?#{}\s/])?$")
    """The prefix of the service's paths, which must be unique among the cluster's applications."""
    repository: VersionSettings = VersionSettings()
    emulated: dict[str, EmulatedSettings] = Field(default_factory=dict)
    """Settings of each accelerator type `emulated:...`, by type."""
    node_labels: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Ray's labels of the nodes for the replicas of an accelerator type, by type. Other types run on any node."""
    control: ControlSettings | None = None
    probe_share: float = Field(default=0.0, ge=0, le=1)
    """Share of first batches that are probes; for models that generate, share of sequences."""
    slo_s: float | None = Field(default=None, gt=0)
    """Seconds of wall-clock time within which an answer counts, and the longest timeout. None: no SLO."""
    slack: float = Field(default=0.2, ge=0, lt=1)
    """Share of the SLO that plans, and stages that wait for full batches, keep in reserve (E3 section 4). Without an
    SLO, such a stage reserves this share of the time from an input's arrival to its deadline."""
    ingress_replicas: int = Field(default=1, ge=1)
    listener: str | None = None
    """Path at which the only ingress receives its socket (`local_ray/ports.py`). None: Serve or its proxy listens."""
    tracing: TracingSettings | None = None
    """None: requests are not traced, at no cost."""
    access: AccessSettings | None = None
    """Keys, rates and origins. None: every caller may use the service."""

    def read_card(self) -> ModelCard:
        """Returns the model's card. Raises ModelFolderError for another model than the one that the service runs."""
        card = read_card(Path(self.model))
        if (self.card or card).model_dump_json() != card.model_dump_json():
            raise ModelFolderError(f"{self.model} has changed since the service started: end the service, and start it")
        return card

    @property
    def starting_policy(self) -> PolicySpec | None:
        """The first exit policy: the plan's, or else the controller's."""
        return self.plan.policy or (None if self.control is None else self.control.policy)

    def on_one_machine(self) -> ServeSettings:
        """Returns the settings without labels of nodes, and with at most half as many starting replicas as cores.

        All replicas share the machine's cores, and a starting Python process needs a core for one or two seconds.
        """
        control = self.control
        if control is not None and control.starts_at_once is None:
            control = control.model_copy(update={"starts_at_once": max(1, (os.cpu_count() or 1) // 2)})
        return self.model_copy(update={"node_labels": {}, "control": control})


def initial_replicas(settings: ServeSettings) -> dict[str, int]:
    """Returns the number of replicas with which each accelerator type of the plan and the controller's problem starts.

    A type that the plan does not use starts with one replica, because Serve does not allow zero, and the controller
    then removes it. Raises PlanError if there are too few accelerators.
    """
    replicas = dict(PlacedPlan(plan=settings.plan).occupied)
    if settings.control is None:
        return replicas
    supplies = settings.control.problem.devices
    for device, needed in replicas.items():
        if device not in supplies:
            raise PlanError(f"the plan has stages on {device}, which the controller's problem does not have")
        if needed > supplies[device].count:
            raise PlanError(f"the plan needs {needed} {device}, there are {supplies[device].count}")
    return {device: replicas.get(device, 1) for device, supply in supplies.items() if supply.count}


def max_accelerators(settings: ServeSettings) -> dict[str, int]:
    """Returns the number of accelerators of each type that the application may use at most."""
    supplies = {} if settings.control is None else settings.control.problem.devices
    replicas = initial_replicas(settings)
    return {device: supplies[device].count if supplies else number for device, number in replicas.items()}
