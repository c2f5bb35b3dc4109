"""The options of `offramp serve`, most of which are fields of the document that they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model, model_validator

from earlyexit.errors import InputError
from offramp.commands.options import Address, Job, order_option, refusal
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
    "dispatch": "plan.dispatch",
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
CHOSEN = {
    "batch": "32; without --plan as measured, up to 16",
    "replicas": "1; without --plan as many as this machine has room for",
    "threads": "1; without --plan more where memory holds few replicas",
    "backend": "torch; without --plan whichever is faster here",
}
"""Options that `offramp serve FOLDER` chooses where it makes the plan itself, with their defaults in words."""
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
    for option, default in CHOSEN.items():
        [meant, *_] = str(found[option].description).split(" None: ")
        found[option].default, found[option].description = None, f"{meant} None: {default}"
    fields: Mapping[str, Any] = {option: (field.annotation, field) for option, field in found.items()}
    return create_model(job.__name__, __base__=job, __doc__=job.__doc__, **fields)


@_with_options
class ServeJob(Job):
    """Serve a model folder, a checkpoint or a service file on this machine until Ctrl-C or SIGTERM."""

    model: Path = Field(json_schema_extra={"argument": "MODEL"})
    """Model folder, checkpoint of transformers, or a service file, which has all settings but the ports."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Prometheus metrics. None: a free one."""
    otlp_endpoint: Address | None = None
    """OpenTelemetry collector, for traces. None: no traces."""
    restart: bool = False
    """Restart when Ray's head has died, instead of ending with status 4."""

    @model_validator(mode="after")
    def _agrees(self) -> ServeJob:
        given = self.model_fields_set
        order_option(getattr(self, "order", None))  # before a model is measured
        if self.model.is_file():
            refused = sorted(f"--{name.replace('_', '-')}" for name in given - {"model", *BESIDE_A_FILE})
            if refused:
                allowed = "--port, --grpc-port, --metrics-port, --restart"
                raise InputError(f"{' and '.join(refused)}: the service file sets this; only {allowed} go with a file")
        elif "trace_ratio" in given and self.otlp_endpoint is None:
            raise InputError("--trace-ratio needs --otlp-endpoint, which says where traces go")
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
