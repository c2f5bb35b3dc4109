"""What an application is told at its start; changing any of it restarts replicas."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from deployments.keys import AccessSettings
from earlyexit.backends.backends import BackendName
from earlyexit.engine.order import Attention
from earlyexit.network.boundary import HopDtype
from earlyexit.network.store import NAME_PATTERN
from earlyexit.sequences.memory import Fill
from optimizer.decision import Strategy
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


class Settings(BaseModel):
    """Base of all parts: plain data, as cluster YAML carries it. Service files take the same fields, strictly."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EmulatedSettings(Settings):
    """An accelerator that is not there: its time is a latency profile's, stretched."""

    batch: list[int] = Field(min_length=1)
    block_s: list[list[float]]
    """One row per block, one value per batch size: real seconds, before `time_scale`."""
    ramp_s: list[list[float]]
    """One row per ramp of the model."""
    length: int | None = Field(default=None, ge=1)
    """Tokens of the inputs that were measured: a batch then takes the time of as many of them as hold its tokens. None:
    inputs cost alike, however long they are."""
    time_scale: float = Field(default=1.0, gt=0)
    """An emulated second takes so many seconds."""
    decisions: Literal["recorded", "computed"] = "recorded"
    """Taken from the plan's exit records, without torch; or by really running the model."""


Tuning = Literal["off", "guarantee", "apparate", "pame"]


class PlanningSettings(Settings):
    """How a controller plans, and when; seconds are those of a clock."""

    strategy: Strategy = "best"
    period_s: float = Field(default=120.0, gt=0)
    watch_s: float = Field(default=5.0, gt=0)
    """How often observations are collected and held against the forecast."""
    coverage: float = Field(default=0.95, gt=0, lt=1)
    """Of the forecast intervals whose leaving makes it plan out of turn."""
    least_gain: float = Field(default=0.02, ge=0)
    """Share by which a new plan must be better, beyond what the change costs."""
    start_s: float = Field(default=10.0, ge=0)
    """What a replica that moves is expected to miss of service."""
    starts_at_once: int | None = Field(default=None, ge=1)
    """Replicas that one change starts at a time, where they share cores with those that serve; None: all."""
    straggler_ratio: float = Field(default=1.5, gt=1)
    """Slower than its peers, or its profile, by this: a straggler."""
    rollback_margin: float = Field(default=0.2, gt=0, lt=1)
    """Share of the predicted goodput that a new plan may miss before the old one comes back."""
    tuning: Tuning = "off"
    """How thresholds follow the stream: not at all; `guarantee`: tested on what was seen, and back to safe ones when an
    alarm says that the budget is broken; `apparate`: by that paper's trigger and search; `pame`: one exit, that goes
    later where batches become slow, and whose threshold goes up where precision is low. Needs probes and a budget."""


class ControlSettings(PlanningSettings):
    """What the controller plans with; without it an application keeps its plan."""

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
    dashboard_url: str | None = None
    """Where Ray's dashboard takes scale requests; None: port 8265 of the head."""


class TracingSettings(Settings):
    """Traces of requests, sent to an OpenTelemetry collector over OTLP/HTTP.

    What is left out is what the SDK's environment variables (OTEL_...) say, in the ingress's process; headers, which
    hold secrets, are said there only.
    """

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    """The collector, such as http://collector:4318; spans go to /v1/traces of it, or to the path that it names."""
    ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of the requests that are traced, of those that come without a trace of their own; None: what
    OTEL_TRACES_SAMPLER says, else 1 %."""
    service_name: str | None = None
    """None: what OTEL_SERVICE_NAME says, else the application's name."""


class VersionSettings(Settings):
    """What may be done with versions by HTTP."""

    control: Literal["none", "explicit"] = "none"
    """Explicit: whoever reaches the service may load and unload versions, and say which one answers."""
    folder: str | None = None
    """Versions that can be loaded by name: settings of each in `<model>/<version>/settings.json`."""


class RepositorySettings(VersionSettings):
    """The same, and who is asked for applications."""

    dashboard_url: str | None = None
    """Where Ray's dashboard takes applications; None: port 8265 of the head."""


class ModelSettings(Settings):
    """What of a model is served, and how it is computed."""

    version: str = Field(default="1", pattern=NAME_PATTERN)
    """What tells this application from others of the same model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    hop_dtype: HopDtype = "same"
    """In what hidden states travel between stages. float16, of float32 models: half the bytes, values rounded to three
    digits and held within 65504 of 0; answers of inputs that crossed a hop may differ."""
    backend: BackendName = "torch"
    attention: Attention = "auto"
    """How inputs of unequal lengths attend, each to its own tokens; answers are the same to rounding."""
    threads_per_replica: int = Field(default=1, ge=1)
    """Intra-op threads of a CPU replica; more than its share of cores slows every neighbour."""
    kv_tokens: int | None = Field(default=None, ge=1)
    """Tokens, prompts and answers, whose keys and values a decoder's replica holds at once. None: by the memory that is
    free as it starts (`earlyexit.sequences.memory_size`)."""
    kv_fill: Fill = "compute"
    """How blocks come to the keys and values of tokens that left before them: by running on them, so that later tokens
    are the full model's; or by copies of the state that they left with, which is less work (CALM)."""

    @field_validator("attention")
    @classmethod
    def _is_of_its_backend(cls, attention: Attention, info: ValidationInfo) -> Attention:
        if attention == "apart" and info.data.get("backend") == "onnx":
            raise PydanticCustomError("attention", "ONNX Runtime attends in rows: allowed is auto, padded or slotted")
        return attention

    @field_validator("hop_dtype")
    @classmethod
    def _is_narrower(cls, hop_dtype: HopDtype, info: ValidationInfo) -> HopDtype:
        if hop_dtype != "same" and info.data.get("dtype") == "bfloat16":
            raise PydanticCustomError("hop_dtype", "Hidden states in bfloat16 have two bytes already: allowed is same")
        return hop_dtype


class IngressSettings(Settings):
    """What an ingress takes of its clients."""

    max_queued: int = Field(default=2000, ge=1)
    """Inputs that one ingress holds unanswered before it refuses more with 503."""
    default_timeout_s: float = Field(default=30.0, gt=0)
    """Of requests that name no timeout; of models that generate, until the first token."""
    token_timeout_s: float = Field(default=30.0, gt=0)
    """Of models that generate: between two tokens. The whole answer has no limit but the request's own."""
    max_timeout_s: float = Field(default=600.0, gt=0)
    max_inputs_per_request: int = Field(default=256, ge=1)
    max_body_bytes: int = Field(default=2_000_000, ge=1)
    """Of one request; of a gzip body, decompressed."""
    max_held_bytes: int = Field(default=256_000_000, ge=1)
    """Of all bodies that one ingress receives or has not answered, before it refuses more with 503; one body of the
    largest size is always let in."""
    prompt_chunk: int = Field(default=256, ge=1)
    """Of models that generate: tokens of a prompt that run in one step, beside the steps of others. More make a first
    token sooner, and everybody else's next one later."""
    ttft_slo_s: float | None = Field(default=None, gt=0)
    """Of models that generate: until the first token. What cannot keep it is refused with 503; None: nothing is."""
    tpot_slo_s: float | None = Field(default=None, gt=0)
    """Of models that generate: per token after the first, on average over a sequence; the same."""
    access_log: bool = False
    """Log every request, as JSON with its id; costs about 5 % of an ingress."""


class ServeSettings(IngressSettings, ModelSettings):
    """Boot-time settings of one application."""

    model: str
    """Model folder; every node must be able to read it."""
    plan: Annotated[Plan, PlainValidator(_plan), PlainSerializer(plan_document)]
    """The plan to begin with: a document as of `optimizer.plan_file`, whose mistakes are a PlanError."""
    app: str = "offramp"
    """The Serve application's name."""
    route_prefix: str = Field(default="/", pattern=r"^/(.*[^/])?$")
    """What the service's paths begin with; one application of a cluster has each."""
    repository: RepositorySettings = RepositorySettings()
    slots: dict[str, int] = Field(default_factory=dict)
    """Slots per accelerator type; of those that are missing as many as the plan's stages need."""
    emulated: dict[str, EmulatedSettings] = Field(default_factory=dict)
    """By accelerator type, for every `emulated:...` one."""
    node_labels: dict[str, dict[str, str]] = Field(default_factory=dict)
    """By accelerator type, Ray's labels of the nodes that its replicas run on; of types that are missing any node."""
    control: ControlSettings | None = None
    probe_share: float = Field(default=0.0, ge=0, le=1)
    """Share of first batches that are probes; of a model that generates, of sequences."""
    slo_s: float | None = Field(default=None, gt=0)
    """Latency within which an answer counts, in wall-clock seconds: the latest deadline of any request. None: the
    requests' own timeouts alone."""
    slack: float = Field(default=0.2, ge=0, lt=1)
    """Share of the SLO that plans, and stages which wait for full batches, leave in hand (E3 section 4)."""
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
    """Keys, rates and origins; None: open to all who reach it."""
