"""The fields of an application, in `offramp serve` and in service files: settings, strictly, and where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from deployments.choices import IngressSettings, ModelSettings, TracingSettings, VersionSettings
from deployments.keys import AccessSettings
from earlyexit.data.strict import StrictDocument
from earlyexit.named import NAME_PATTERN
from offramp.commands.options import OfOrder

BUILT_IN = ("stock", "early-exit", "serial")
"""Plans that need no file."""


class PartDocument(StrictDocument):
    """Base of parts in which null may stand for a setting: it says what leaving it out says."""

    nullable: ClassVar[frozenset[str]]

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in cls.nullable}


class ServedModelDocument(StrictDocument, ModelSettings):
    """What is served."""

    folder: str
    """As `offramp train` and `offramp calibrate` leave it; relative to the service file's folder."""


class IngressDocument(PartDocument, IngressSettings):
    """Where requests arrive, and the limits of what is accepted."""

    nullable = frozenset({*IngressSettings.model_fields, "replicas"})

    replicas: int = Field(default=1, ge=1)
    """Replicas of the ingress."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the HTTP API."""
    grpc_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Open Inference Protocol over gRPC. None: none."""
    host: str = "127.0.0.1"
    """Address to listen on. On a cluster, where HAProxy asks ingresses of other nodes, it is 0.0.0.0."""
    front: Literal["auto", "direct", "haproxy", "proxy"] = "auto"
    """Proxy before the ingresses: none (direct, for a single ingress), haproxy, proxy (Serve's own), or auto: direct on
    one machine where that is possible, else haproxy, as on a cluster."""
    route_prefix: str | None = Field(default=None, pattern=r"^/(.*[^/])?$")
    """Prefix of all paths. None: `/` for version 1, `/v2/models/MODEL/versions/VERSION` for others."""


class PlanOptions(StrictDocument, OfOrder):
    """The plan that `offramp serve` of a model's folder begins with."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    plan: str | None = Field(default=None, examples=list(BUILT_IN))
    """Plan file, or a built-in plan: stock, early-exit, serial. None: the best for this machine, by a profile that is
    measured once and kept with the model (for decoders, chains and other devices: serial)."""
    batch: int = Field(default=32, ge=1)
    """Batch size of a built-in plan, or the largest of a plan that is made for this machine."""
    replicas: int = Field(default=1, ge=1)
    """Replicas of the plan."""
    device: str = Field(default="cpu", examples=["cpu", "cuda"])
    """Device of a built-in plan."""
    dispatch: Literal["work-conserving", "deferred", "filling"] | None = None
    """When a batch starts: at once (work-conserving), at once but beside a running batch only if full (filling), or
    when it is full or deadlines press (deferred). None: as a plan file says, else what suits the machine."""


class VersionsDocument(StrictDocument, VersionSettings):
    """Control of versions over HTTP; `folder` is a path on the nodes."""


class TracingDocument(StrictDocument, TracingSettings):
    """Traces of requests, sent to an OpenTelemetry collector over OTLP/HTTP."""


class AccessDocument(StrictDocument, AccessSettings):
    """Which callers may use the service, and how much; `keys_file` is relative to the service file's folder."""


class ApplicationDocument(StrictDocument):
    """The fields that `offramp serve` of a model's folder and a service file share."""

    schema_version: Literal[1] = 1
    name: str = Field(default="offramp", pattern=NAME_PATTERN)
    model: ServedModelDocument
    ingress: IngressDocument = Field(default_factory=IngressDocument)
    tracing: TracingDocument | None = None
    """None: requests are not traced."""
    access: AccessDocument | None = None
    """None: every caller that reaches the service may use it."""
    repository: VersionsDocument = Field(default_factory=VersionsDocument)


class FolderDocument(ApplicationDocument):
    """The options of `offramp serve` for a model's folder, as a document."""

    plan: PlanOptions = Field(default_factory=PlanOptions)
