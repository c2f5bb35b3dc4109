"""What a service file holds, field by field, as pydantic checks it; `offramp.service.file` says what becomes of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.inventory_file import InventoryDocument
from earlyexit.backends import BackendName
from earlyexit.source_file import StrictDocument
from earlyexit.store import NAME_PATTERN
from optimizer.decision import Strategy
from optimizer.problem_shape import (
    BudgetDocument,
    LatencyDocument,
    ObjectiveDocument,
    SloDocument,
    ThresholdsDocument,
)

Seconds = Annotated[float, Field(gt=0)]


class ModelDocument(StrictDocument):
    """What is served, and what is known of it."""

    folder: str
    """As `offramp train` and `offramp calibrate` leave it; relative to the service file's folder."""
    version: str = Field(default="1", pattern=NAME_PATTERN)
    """Of the model; services of other versions have other names."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    backend: BackendName = "torch"
    threads_per_replica: int = Field(default=1, ge=1)
    """Of a CPU replica."""
    latency: dict[str, LatencyDocument] = Field(min_length=1)
    """Per accelerator type of the cluster: a table, a published profile or a profile's file."""
    slower: float = Field(default=1.0, gt=0)
    """Every latency times this, where all accelerators are emulated: E3's V100 takes 6.5 times what is published."""
    decisions: Literal["recorded", "computed"] = "recorded"
    """Of emulated accelerators: taken from exit records, or by really running the model."""
    bytes_per_sample: float | None = Field(default=None, ge=0)
    """Hidden state of one input; None: the latency's tokens, or the longest input's, times the hidden size."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """What a replica needs of its accelerator; None: the parameters, in `dtype`."""


class AccuracyDocument(StrictDocument):
    """When inputs may leave."""

    budget: float | None = Field(default=None, ge=0, lt=1)
    """Share of answers that may differ from the full model's; None: the calibration's."""
    policy: Literal["entropy", "confidence", "recorded"] | None = None
    """None: the calibration's; where emulated accelerators decide from records, recorded."""
    thresholds: ThresholdsDocument | None = None
    """One for all ramps, or one per ramp, of which only those are used; None: the calibration's."""
    records: str | None = None
    """Exit records: survival before anything was seen. None: those of the model's calibration."""


class PlannerDocument(StrictDocument):
    """How plans are made."""

    strategy: Strategy = "best"
    objective: ObjectiveDocument = Field(default_factory=lambda: ObjectiveDocument(maximize="rate"))
    budget: BudgetDocument | None = None
    control: bool = True
    """False: no controller; the first plan stays."""
    plan: str | None = None
    """Plan file to begin with; None: the planner's, by the exit records."""
    batch_limit: int | None = Field(default=None, ge=1)
    """Largest batch size that a plan may use; None: the largest with a latency."""
    max_stages: int = Field(default=3, ge=1)
    """Slots per accelerator type, at most: stages that a plan may have on it."""
    state: str | None = None
    """SQLite file with what the controller remembers; None: the service's name, beside the service file."""
    probe_share: float = Field(default=0.02, ge=0, le=1)
    period_s: Seconds | None = None
    watch_s: Seconds | None = None
    coverage: float | None = Field(default=None, gt=0, lt=1)
    least_gain: float | None = Field(default=None, ge=0)
    start_s: float | None = Field(default=None, ge=0)
    starts_at_once: int | None = Field(default=None, ge=1)
    straggler_ratio: float | None = Field(default=None, gt=1)
    rollback_margin: float | None = Field(default=None, gt=0, lt=1)


CONTROL_FIELDS = (
    "period_s",
    "watch_s",
    "coverage",
    "least_gain",
    "start_s",
    "starts_at_once",
    "straggler_ratio",
    "rollback_margin",
)
"""Of the planner; meaning and default are those of `deployments.settings.ControlSettings`, seconds those of a clock."""


class IngressDocument(StrictDocument):
    """Where requests come in."""

    replicas: int | None = Field(default=None, ge=1)
    max_queued: int | None = Field(default=None, ge=1)
    default_timeout_s: Seconds | None = None
    max_timeout_s: Seconds | None = None
    max_inputs_per_request: int | None = Field(default=None, ge=1)
    max_body_bytes: int | None = Field(default=None, ge=1)
    access_log: bool | None = None
    port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int | None = Field(default=None, ge=1, le=65535)
    """The Open Inference Protocol over gRPC; None: not at all. With `front: proxy` on every interface."""
    host: str = "127.0.0.1"
    """Address to listen on; on a cluster, where HAProxy asks ingresses of other nodes, 0.0.0.0."""
    front: Literal["haproxy", "proxy"] = "haproxy"
    route_prefix: str | None = Field(default=None, pattern=r"^/(.*[^/])?$")
    """What all its paths begin with; None: `/` for version 1, its place below the model's name for others."""


class RepositoryDocument(StrictDocument):
    """Which versions of the model there are, and who decides on them."""

    control: Literal["none", "explicit"] = "none"
    """Explicit: by HTTP, whoever reaches the service."""
    folder: str | None = None
    """As the nodes find it: versions that can be loaded by name."""


class TracingDocument(StrictDocument):
    """Where traces go; meaning and defaults are those of `deployments.settings.TracingSettings`."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    ratio: float | None = Field(default=None, ge=0, le=1)
    service_name: str | None = None


class AccessDocument(StrictDocument):
    """Who may use it, and how much; meaning and defaults are those of `deployments.access.AccessSettings`."""

    keys_file: str | None = None
    """Relative to the service file's folder."""
    keys_env: str | None = Field(default=None, min_length=1)
    rate_per_s: float | None = Field(default=None, gt=0)
    rate_of: Literal["requests", "inputs"] = "requests"
    burst: float | None = Field(default=None, gt=0)
    cors_origins: list[str] = Field(default_factory=list)


class ServiceDocument(StrictDocument):
    """A whole service."""

    schema_version: Literal[1]
    name: str = Field(pattern=NAME_PATTERN)
    model: ModelDocument
    slo: SloDocument
    """In emulated seconds, where the cluster is emulated."""
    accuracy: AccuracyDocument = Field(default_factory=AccuracyDocument)
    cluster: str | InventoryDocument
    """Inline, or a file relative to the service file's folder."""
    planner: PlannerDocument = Field(default_factory=PlannerDocument)
    ingress: IngressDocument = Field(default_factory=IngressDocument)
    tracing: TracingDocument | None = None
    """None: requests are not traced."""
    access: AccessDocument | None = None
    """None: open to all who reach it."""
    repository: RepositoryDocument = Field(default_factory=RepositoryDocument)
