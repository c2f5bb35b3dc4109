"""The fields that `offramp serve` and service files share, and the options of `offramp serve`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from deployments.choices import FrontSettings, IngressSettings, ModelSettings, TracingSettings, VersionSettings
from deployments.keys import AccessSettings
from earlyexit.backends import BackendName
from earlyexit.data.strict import StrictDocument, mistake_at
from earlyexit.errors import InputError
from earlyexit.named import NAME_PATTERN
from offramp.commands.options import Address, Job, Model, Order, validated

BUILT_IN = ("stock", "early-exit", "serial")
"""Names of built-in plans, which need no file."""


class PartDocument(StrictDocument):
    """Base of parts whose fields of `deployments` may be null, which has the same effect as leaving them out."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        nullable = cls.model_fields.keys() - cls.__annotations__.keys()
        return {name: value for name, value in data.items() if value is not None or name not in nullable}


class ServedModelDocument(StrictDocument, ModelSettings):
    """The served model."""

    folder: str
    """Model folder of `offramp train` and `offramp calibrate`, relative to the service file's folder."""


class IngressDocument(PartDocument, FrontSettings, IngressSettings):
    """Where the service listens, and the limits of requests."""

    replicas: int = Field(default=1, ge=1)
    """Replicas of the ingress."""
    inputs_per_s: float | None = Field(default=None, ge=1e-3, le=1e9)
    """Inputs that one replica of the ingress carries per wall-clock second, which limits plans. None: no limit. The
    figure depends on machine and requests, and one that is too low would leave accelerators unused."""
    route_prefix: str | None = Field(default=None, pattern=r"^/([^?#{}\s]*[^?#{}\s/])?$")
    """Prefix of all paths. None: `/` for version 1, `/v2/models/MODEL/versions/VERSION` for others."""

    @model_validator(mode="after")
    def _check_consistent(self) -> IngressDocument:
        if self.default_timeout_s > self.max_timeout_s:
            message = f"requests may take at most {self.max_timeout_s:g} s (max_timeout_s)"
            raise mistake_at(("default_timeout_s",), PydanticCustomError("timeout", message), self.default_timeout_s)
        if self.grpc_port == self.port:
            raise mistake_at(("grpc_port",), PydanticCustomError("port", "it must differ from port"), self.port)
        return self


class ApplicationDocument(StrictDocument):
    """The fields that `offramp serve` for a model folder and service files share."""

    schema_version: Literal[1] = 1
    name: str = Field(default="offramp", pattern=NAME_PATTERN)
    model: ServedModelDocument
    ingress: IngressDocument = Field(default_factory=IngressDocument)
    tracing: TracingSettings | None = None
    """None: requests are not traced."""
    access: AccessSettings | None = None
    """None: every caller that reaches the service may use it."""
    repository: VersionSettings = Field(default_factory=VersionSettings)


OPTIONS = {
    **{name: ("ingress", name) for name in ("port", "host", "front")},
    "ingress_replicas": ("ingress", "replicas"),
    **{name: ("model", name) for name in ("dtype", "hop_dtype", "backend", "attention")},
    "threads": ("model", "threads_per_replica"),
    **{name: ("model", name) for name in ("kv_tokens", "kv_fill")},
    **{name: ("ingress", name) for name in ("max_queued", "max_body_bytes", "max_held_bytes")},
    "timeout_s": ("ingress", "default_timeout_s"),
    **{name: ("ingress", name) for name in ("token_timeout_s", "grpc_port")},
    "otlp_endpoint": ("tracing", "endpoint"),
    "trace_ratio": ("tracing", "ratio"),
    "api_keys": ("access", "keys_file"),
    "rate_limit": ("access", "rate_per_s"),
    "cors_origin": ("access", "cors_origins"),
}
"""Options of `offramp serve` that are fields of `ApplicationDocument`, with their part and their name in it."""
WITH_A_FILE = ("port", "grpc_port", "metrics_port", "restart")
"""Options of `offramp serve` that are allowed with a service file."""


def _with_options(job: type[Model]) -> type[Model]:
    """Adds the fields of `OPTIONS` that a job does not declare."""
    fields: dict[str, Any] = {}
    for option, (part, name) in OPTIONS.items():
        shape: Any = ApplicationDocument.model_fields[part].annotation
        [document, *_] = get_args(shape) or (shape,)  # `tracing` and `access` may be None
        if option not in job.model_fields:
            fields[option] = (document.model_fields[name].annotation, document.model_fields[name])
    return create_model(job.__name__, __base__=job, __doc__=job.__doc__, **fields)


@_with_options
class ServeJob(Job):
    """Serve a model folder, a checkpoint or a service file on this machine until Ctrl-C or SIGTERM."""

    model: Path = Field(json_schema_extra={"argument": "MODEL"})
    """Model folder, checkpoint of transformers, or service file, which contains all settings but the ports."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Prometheus metrics. None: a free one."""
    otlp_endpoint: Address | None = None
    """Address of an OpenTelemetry collector, for traces. None: no traces."""
    restart: bool = False
    """Restart if Ray's head dies, instead of ending with status 4."""
    plan: str | None = Field(default=None, examples=list(BUILT_IN))
    """Plan file, or a built-in plan: stock, early-exit, serial. None: the best plan for this machine, by a profile that
    is measured once and kept with the model (for decoders, chains and accelerators elsewhere: serial)."""
    batch: int | None = Field(default=None, ge=1)
    """Batch size of a built-in plan, or the largest batch size of a plan that is made for this machine. None: 32;
    without --plan as measured, up to 16."""
    replicas: int | None = Field(default=None, ge=1)
    """Number of replicas. None: 1; without --plan as many as this machine has room for."""
    device: str = Field(default="cpu", examples=["cpu", "cuda"])
    """Device of a plan that is not from a file."""
    order: Order = None
    dispatch: Literal["work-conserving", "deferred", "filling"] | None = None
    """When a batch starts: at once (work-conserving), at once but next to a running batch only if it is full (filling),
    or when it is full or a deadline is near (deferred). None: the plan file's rule, else what suits the machine."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of a CPU replica. More threads than its share of the cores slow down the other replicas. None: 1; without
    --plan more if memory limits the number of replicas."""
    backend: BackendName | None = None
    """Library that runs the model: torch, onnx, or auto (whichever is faster here). None: torch; without --plan the
    faster one on this machine."""

    def check(self) -> None:
        given = self.model_fields_set
        if self.model.is_file():
            if refused := sorted(f"--{name.replace('_', '-')}" for name in given - {"model", *WITH_A_FILE}):
                allowed = "--port, --grpc-port, --metrics-port, --restart"
                raise InputError(f"{' and '.join(refused)}: the service file sets this; only {allowed} go with a file")
        elif "trace_ratio" in given and self.otlp_endpoint is None:
            raise InputError("--trace-ratio goes with --otlp-endpoint, the collector of the traces")

    @cached_property
    def document(self) -> ApplicationDocument:
        """The options other than the plan's, as a document; raises InputError if they contradict each other."""
        document: dict[str, Any] = {"model": {"folder": str(self.model)}}
        for name in self.model_fields_set & set(OPTIONS):
            part, field = OPTIONS[name]
            document.setdefault(part, {})[field] = getattr(self, name)
        names = {place: name for name, place in OPTIONS.items()}
        return validated(ApplicationDocument, document, lambda *at: names.get(at) or ".".join(map(str, at)))
