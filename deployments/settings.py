"""The settings with which an application starts. Changing any of them restarts replicas."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator

from deployments.choices import IngressSettings, ModelSettings, Settings, TracingSettings, VersionSettings
from deployments.keys import AccessSettings
from earlyexit.errors import PlanError
from optimizer.decision import Strategy
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, PolicySpec
from optimizer.plan_file import parse_plan, parse_policy, plan_document, policy_document
from optimizer.problem import PlanProblem
from optimizer.problem_file import parse_problem, problem_document


def _plan(given: Any) -> Plan:
    return given if isinstance(given, Plan) else parse_plan(given)


def _policy(given: Any) -> PolicySpec:
    return given if isinstance(given, PolicySpec) else parse_policy(given, where="control.policy")


def _problem(given: Any) -> PlanProblem:
    return given if isinstance(given, PlanProblem) else parse_problem(given, where="control.problem").problem


class EmulatedSettings(Settings):
    """An emulated accelerator: its batches take the time of a latency profile, stretched."""

    batch: list[int] = Field(min_length=1)
    block_s: list[list[float]]
    """One row per block, one value per batch size: real seconds, before `time_scale`."""
    ramp_s: list[list[float]]
    """One row per ramp of the model."""
    length: int | None = Field(default=None, ge=1)
    """Tokens of the inputs that were measured. A batch then takes the time of as many of these inputs as hold its
    tokens. None: all inputs take the same time."""
    time_scale: float = Field(default=1.0, gt=0)
    """Seconds that one emulated second takes."""
    decisions: Literal["recorded", "computed"] = "recorded"
    """recorded: exits are taken from the plan's exit records, without torch. computed: the model is run."""


Tuning = Literal["off", "guarantee", "apparate", "pame"]


class PlanningSettings(Settings):
    """How and when a controller plans; seconds are those of the wall clock."""

    strategy: Strategy = "best"
    period_s: float = Field(default=120.0, gt=0)
    watch_s: float = Field(default=5.0, gt=0)
    """Seconds between two looks, at which observations are collected and compared with the forecast."""
    coverage: float = Field(default=0.95, gt=0, lt=1)
    """Coverage of the forecast intervals. Where the stream leaves them, the controller plans at once."""
    least_gain: float = Field(default=0.02, ge=0)
    """Share by which a new plan must be better, in addition to the cost of the change."""
    start_s: float = Field(default=10.0, ge=0)
    """Seconds of service that a replica which moves is expected to miss."""
    starts_at_once: int | None = Field(default=None, ge=1)
    """Replicas that one change starts at a time, where they share cores with replicas that serve; None: all."""
    straggler_ratio: float = Field(default=1.5, gt=1)
    """A replica is a straggler if it is slower than its peers by more than this factor."""
    rollback_margin: float = Field(default=0.2, gt=0, lt=1)
    """Share of the predicted goodput that a new plan may miss before the old plan returns."""
    tuning: Tuning = "off"
    """How thresholds follow the stream. off: they stay. guarantee: new ones pass a test on probes, and an alarm returns
    to safe ones when the budget is exceeded. apparate: by that paper's trigger and search. pame: one exit moves later
    when batches are slow, and its threshold rises when precision is low. All but off need probes and a budget."""


class ControlSettings(PlanningSettings):
    """Settings of the controller. Without them an application keeps its plan."""

    problem: Annotated[PlanProblem, PlainValidator(_problem), PlainSerializer(problem_document)]
    """A document as of `optimizer.problem_file`, in wall-clock seconds: of emulated accelerators, stretched ones. Its
    survival is what is expected before anything was seen."""
    policy: Annotated[PolicySpec, PlainValidator(_policy), PlainSerializer(policy_document)]
    """The exit policy, as plan files have it, with a threshold for each ramp of the problem."""
    state: str
    """SQLite file with what the controller remembers; where the controller runs, on a disk that outlives it."""
    accuracy_budget: float | None = Field(default=None, ge=0, lt=1)
    """Share of answers that may differ from the full model's; None: reported, held against nothing."""
    accuracy_confidence: float = Field(default=0.9, gt=0, lt=1)
    """How sure it must be of thresholds that are found while serving that they keep the budget."""


class ServeSettings(IngressSettings, ModelSettings):
    """Boot-time settings of one application."""

    model: str
    """Model folder; every node must be able to read it."""
    plan: Annotated[Plan, PlainValidator(_plan), PlainSerializer(plan_document)]
    """The plan to begin with: a document as of `optimizer.plan_file`, whose mistakes are a PlanError."""
    app: str = "offramp"
    """The Serve application's name."""
    route_prefix: str = Field(default="/", pattern=r"^/(.*[^/])?$")
    """What the service's paths begin with; different for every application of a cluster."""
    repository: VersionSettings = VersionSettings()
    emulated: dict[str, EmulatedSettings] = Field(default_factory=dict)
    """By accelerator type, for every type `emulated:...`."""
    node_labels: dict[str, dict[str, str]] = Field(default_factory=dict)
    """By accelerator type, Ray's labels of the nodes that its replicas run on. A type that is not named runs on any
    node."""
    control: ControlSettings | None = None
    probe_share: float = Field(default=0.0, ge=0, le=1)
    """Share of first batches that are probes; of a model that generates, of sequences."""
    slo_s: float | None = Field(default=None, gt=0)
    """Latency within which an answer counts, in wall-clock seconds: the latest deadline of any request. None: the
    requests' own timeouts alone."""
    slack: float = Field(default=0.2, ge=0, lt=1)
    """Share of the SLO that plans, and stages which wait for full batches, leave in hand (E3 section 4). Without an SLO
    such a stage leaves this share of the time from an input's arrival to its deadline."""
    ingress_replicas: int = Field(default=1, ge=1)
    listener: str | None = None
    """Where the only ingress gets the socket that callers reach (`deployments/local_ray/ports.py`).

    None: Serve or its proxy listens."""
    calls_per_replica: int = Field(default=2, ge=1)
    """Calls per replica of the first stage that nothing has come back from yet. The first takes whatever waits; those
    that queue behind it are sent only when full, so that what arrives meanwhile is not spent on small batches."""
    tracing: TracingSettings | None = None
    """None: requests are not traced, and nothing is spent on it."""
    max_attempts: int = Field(default=8, ge=1)
    """Times an input is sent from the start, when replicas die under it, before its owner is told."""
    access: AccessSettings | None = None
    """Keys, rates and origins. None: every caller that reaches the service may use it."""

    @property
    def starting_policy(self) -> PolicySpec | None:
        """The exit policy that the application begins with: its plan's, or else its controller's."""
        return self.plan.policy or (None if self.control is None else self.control.policy)


def initial_replicas(settings: ServeSettings) -> dict[str, int]:
    """Returns the replicas that every accelerator type starts with: those of the plan and of the controller's problem.

    Serve refuses to start with none: a type that the plan leaves idle has one, until the controller takes it away.
    Raises PlanError where there are too few accelerators for those.
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
    used = Counter(initial_replicas(settings))
    if settings.control is not None:
        supplies = settings.control.problem.devices
        used |= Counter({device: supply.count for device, supply in supplies.items()})
    return dict(used)
