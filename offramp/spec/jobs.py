"""The options of the commands that serve models, locally or on a Ray cluster, and that look after services."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model, field_validator, model_validator

from earlyexit.errors import InputError
from offramp.commands.options import Address, KeyFile, Printed, refusal
from offramp.load.job import Job
from offramp.spec.documents import FolderDocument

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

JobT = TypeVar("JobT", bound=Job)
OPTIONS = {
    "plan": "plan.plan",
    "batch": "plan.batch",
    "replicas": "plan.replicas",
    "device": "plan.device",
    "order": "plan.order",
    "port": "ingress.port",
    "host": "ingress.host",
    "front": "ingress.front",
    "ingress_replicas": "ingress.replicas",
    "dtype": "model.dtype",
    "hop_dtype": "model.hop_dtype",
    "backend": "model.backend",
    "attention": "model.attention",
    "threads": "model.threads_per_replica",
    "kv_tokens": "model.kv_tokens",
    "kv_fill": "model.kv_fill",
    "max_queued": "ingress.max_queued",
    "max_body_bytes": "ingress.max_body_bytes",
    "max_held_bytes": "ingress.max_held_bytes",
    "timeout_s": "ingress.default_timeout_s",
    "token_timeout_s": "ingress.token_timeout_s",
    "grpc_port": "ingress.grpc_port",
    "trace_ratio": "tracing.ratio",
    "api_keys": "access.keys_file",
    "rate_limit": "access.rate_per_s",
    "cors_origin": "access.cors_origins",
}
"""Options of `offramp serve`, and the fields of `FolderDocument` that they are."""
BESIDE_A_FILE = ("port", "grpc_port", "metrics_port", "restart")
"""Options of `offramp serve` that a service file leaves to the command line."""


def _field_at(shape: type[BaseModel], path: str) -> FieldInfo:
    """Returns a copy of the field at a path of names."""
    *above, last = path.split(".")
    for name in above:
        annotation = shape.model_fields[name].annotation
        [shape] = [each for each in (annotation, *getattr(annotation, "__args__", ())) if isinstance(each, type(shape))]
    return copy.copy(shape.model_fields[last])


def _with_options(job: type[JobT]) -> type[JobT]:
    """Adds the fields of `OPTIONS` to a job."""
    found = {option: _field_at(FolderDocument, path) for option, path in OPTIONS.items()}
    fields: Mapping[str, Any] = {option: (field.annotation, field) for option, field in found.items()}
    return create_model(job.__name__, __base__=job, __doc__=job.__doc__, **fields)


@_with_options
class ServeJob(Job):
    """Serve a model, or a service file's, on this machine until it is told to stop (Ctrl-C or SIGTERM)."""

    model: Path = Field(json_schema_extra={"argument": "MODEL"})
    """Model folder, or a service file, which says all but the ports itself."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Prometheus metrics. None: a free one."""
    otlp_endpoint: Address | None = None
    """OpenTelemetry collector, for traces. None: no traces."""
    restart: bool = False
    """Start anew when Ray's head has died, rather than end with status 4."""

    @model_validator(mode="after")
    def _agrees(self) -> ServeJob:
        given = self.model_fields_set
        if self.model.is_file():
            refused = sorted(f"--{name.replace('_', '-')}" for name in given - {"model", *BESIDE_A_FILE})
            if refused:
                allowed = "--port, --grpc-port, --metrics-port, --restart"
                raise InputError(f"{' and '.join(refused)}: the service file says it; only {allowed} go with one")
        elif "trace_ratio" in given and self.otlp_endpoint is None:
            raise InputError("--trace-ratio is of the requests whose traces go to --otlp-endpoint, which is missing")
        return self

    @property
    def ports(self) -> dict[str, int]:
        """The ports that are given."""
        return {name: getattr(self, name) for name in ("port", "grpc_port") if name in self.model_fields_set}

    @property
    def document(self) -> FolderDocument:
        """The given options as a document; raises InputError for those that contradict each other."""
        document: dict[str, Any] = {"model": {"folder": str(self.model)}}
        if self.otlp_endpoint is not None:
            document["tracing"] = {"endpoint": self.otlp_endpoint}
        for name in self.model_fields_set & set(OPTIONS):
            part, _, field = OPTIONS[name].partition(".")
            document.setdefault(part, {})[field] = getattr(self, name)
        try:
            return FolderDocument.model_validate(document)
        except ValidationError as error:
            [first, *_] = error.errors()
        path = ".".join(map(str, first["loc"]))
        raise refusal(next((name for name, at in OPTIONS.items() if at == path), path), first)


class OfService(Job):
    """A service file."""

    service: Path = Field(json_schema_extra={"argument": "SERVICE"})
    """Service file, YAML or JSON."""
    at: str | None = None
    """Folder where the nodes find model/, exit records and state. None: as here."""

    @field_validator("at")
    @classmethod
    def _is_absolute(cls, at: str | None) -> str | None:
        if at is not None and not PurePosixPath(at).is_absolute():
            raise InputError(f"--at {at}: an absolute folder of the nodes is needed")
        return at


class OfCluster(Job):
    """A Ray cluster."""

    address: Address = "http://127.0.0.1:8265"
    """Ray's dashboard."""


class OfRoot(Job):
    """The service of a cluster that knows all versions of its models."""

    url: Address = "http://127.0.0.1:8000"
    """The service at the root."""


class Waits(Job):
    """A command that ends when something is done."""

    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """How long to wait until it is done."""


class RenderJob(OfService):
    """Write what `serve deploy` takes, KubeRay's manifest, or the settings, for a service file."""

    kuberay: bool = False
    """A RayService instead of a Serve config."""
    image: str = "offramp"
    """For --kuberay: image with Ray and this repository."""
    claim: str = "offramp"
    """For --kuberay: volume claim that all pods mount."""
    redis: str | None = None
    """For --kuberay: host:port of a Redis, by which the service outlives Ray's head."""
    redis_secret: str | None = None
    """For --redis: the secret of Kubernetes with its `password`. None: none."""
    settings: bool = False
    """Only the settings, as a repository's folder keeps them."""
    out: Path | None = None
    """File to write. None: print."""

    @model_validator(mode="after")
    def _agrees(self) -> RenderJob:
        if self.kuberay and self.settings:
            raise InputError("--kuberay and --settings are two things: give one of them")
        if (self.redis is not None and not self.kuberay) or (self.redis_secret is not None and self.redis is None):
            raise InputError("--redis goes with --kuberay, and --redis-secret with --redis")
        return self


class DeployJob(Waits, OfCluster, OfService):
    """Put a service on a running Ray cluster, beside whatever else it serves, and wait until it runs."""


class StatusJob(Printed, KeyFile, OfCluster):
    """Say what a Ray cluster serves: applications, deployments, replicas, and the plan in force."""

    url: Address | None = None
    """The service, for its plan. None: Serve's port beside the dashboard."""


class DeleteJob(Waits, OfCluster):
    """End one application of a Ray cluster; the others stay."""

    name: str = Field(json_schema_extra={"argument": "NAME"})
    """The application's name."""


class VersionsJob(Printed, OfRoot):
    """List the models and versions of a cluster, and their states."""


class CanaryJob(Printed, OfRoot):
    """Let a version answer a share of the requests, or say how default and canary compare."""

    version: str | None = None
    """The version on trial. None: say how it goes."""
    share: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that it answers."""
    compare: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that both versions are asked."""
    end: bool = False
    """Send all requests to the default version again."""

    @model_validator(mode="after")
    def _agrees(self) -> CanaryJob:
        if self.end and self.version is not None:
            raise InputError("--end ends the canary, --version begins one: give one of them")
        if self.version is None and (self.share or self.compare):
            raise InputError("--share and --compare need --version")
        return self


class OfVersion(OfRoot):
    """A version."""

    version: str
    """The version."""


class PromoteJob(Printed, OfVersion):
    """Let a version answer all requests that name none."""


class LoadJob(Waits, OfRoot, OfService):
    """Start a service file's version beside the others, and wait until it is ready."""


class UnloadJob(Waits, OfVersion):
    """End a version that no request is sent to, and wait until it is gone."""

    model: str = Field(json_schema_extra={"argument": "MODEL"})
    """The model's name."""
