"""The fields that `offramp serve` and service files share: settings of the application, and where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from deployments.choices import IngressSettings, ModelSettings, TracingSettings, VersionSettings
from deployments.keys import AccessSettings
from earlyexit.data.strict import StrictDocument
from earlyexit.named import NAME_PATTERN
from offramp.commands.options import OrderOption

BUILT_IN = ("stock", "early-exit", "serial")
"""Names of built-in plans, which need no file."""


class PartDocument(StrictDocument):
    """Base of parts with fields that may be null, which has the same effect as leaving them out."""

    nullable: ClassVar[frozenset[str]]

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.nullable}


class ServedModelDocument(StrictDocument, ModelSettings):
    """The served model."""

    folder: str
    """Model folder of `offramp train` and `offramp calibrate`, relative to the service file's folder."""


class IngressDocument(PartDocument, IngressSettings):
    """Where the service listens, and the limits of requests."""

    nullable = frozenset({*IngressSettings.model_fields, "replicas"})

    replicas: int = Field(default=1, ge=1)
    """Replicas of the ingress."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the HTTP API."""
    grpc_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Open Inference Protocol over gRPC. None: none."""
    host: str = "127.0.0.1"
    """Address to listen on. On a cluster it must be 0.0.0.0, because HAProxy connects to ingresses of other nodes."""
    front: Literal["auto", "direct", "haproxy", "proxy"] = "auto"
    """Proxy in front of the ingresses: none (direct, for a single ingress), haproxy, proxy (Serve's own), or auto:
    direct on one machine if possible, else haproxy, as on a cluster."""
    route_prefix: str | None = Field(default=None, pattern=r"^/(.*[^/])?$")
    """Prefix of all paths. None: `/` for version 1, `/v2/models/MODEL/versions/VERSION` for others."""

    @model_validator(mode="after")
    def _check_timeout(self) -> IngressDocument:
        if self.default_timeout_s > self.max_timeout_s:
            words = "requests may take at most {longest_s} s (max_timeout_s)"
            error = PydanticCustomError("timeout", words, {"longest_s": f"{self.max_timeout_s:g}"})
            details = InitErrorDetails(type=error, loc=("default_timeout_s",), input=self.default_timeout_s)
            raise ValidationError.from_exception_data(type(self).__name__, [details])
        return self


class PlanOptions(StrictDocument, OrderOption):
    """The first plan of `offramp serve` for a model folder."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    plan: str | None = Field(default=None, examples=list(BUILT_IN))
    """Plan file, or a built-in plan: stock, early-exit, serial. None: the best plan for this machine, by a profile that
    is measured once and kept with the model (for decoders, chains and accelerators elsewhere: serial)."""
    batch: int = Field(default=32, ge=1)
    """Batch size of a built-in plan, or the largest batch size of a plan that is made for this machine."""
    replicas: int = Field(default=1, ge=1)
    """Number of replicas."""
    device: str = Field(default="cpu", examples=["cpu", "cuda"])
    """Device of a plan that is not from a file."""
    dispatch: Literal["work-conserving", "deferred", "filling"] | None = None
    """When a batch starts: at once (work-conserving), at once but next to a running batch only if it is full (filling),
    or when it is full or a deadline is near (deferred). None: the plan file's rule, else what suits the machine."""


class VersionsDocument(StrictDocument, VersionSettings):
    """Control of versions over HTTP; `folder` is a path on the nodes."""


class TracingDocument(StrictDocument, TracingSettings):
    """Traces of requests, sent to an OpenTelemetry collector over OTLP/HTTP."""


class AccessDocument(StrictDocument, AccessSettings):
    """API keys and rate limits of callers; `keys_file` is relative to the service file's folder."""


class ApplicationDocument(StrictDocument):
    """The fields that `offramp serve` for a model folder and service files share."""

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
    """The options of `offramp serve` for a model folder, as a document."""

    plan: PlanOptions = Field(default_factory=PlanOptions)
