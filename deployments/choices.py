"""The settings of an application that its operator chooses. Service files and command-line options have these fields.

This module imports neither numpy nor the planner, so that the command line starts fast.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from earlyexit.backends import BackendName
from earlyexit.data.strict import StrictDocument
from earlyexit.engine.queue import Attention
from earlyexit.errors import InputError
from earlyexit.named import NAME_PATTERN, Fill, HopDtype


class Settings(BaseModel):
    """Base class of settings, which are plain data in cluster YAML. Service files have the same fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True)


class TracingSettings(StrictDocument, Settings):
    """Traces of requests, sent to an OpenTelemetry collector over OTLP/HTTP.

    The SDK's environment variables (OTEL_...) of the ingress's process replace fields that are not set. Headers, which
    hold secrets, can be set only there.
    """

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    """The collector, such as http://collector:4318. Spans go to its path /v1/traces, unless the URL has a path."""
    ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of the requests to trace, where the caller sends no traceparent. None: OTEL_TRACES_SAMPLER, else 0.01."""
    service_name: str | None = None
    """None: OTEL_SERVICE_NAME, else the application's name."""

    def check(self) -> None:
        """Raises InputError if the exporter is not installed."""
        try:
            import opentelemetry.exporter.otlp.proto.http  # noqa: F401 # checks only that it is installed
        except ImportError as error:
            raise InputError(
                "tracing needs OpenTelemetry's exporter over OTLP/HTTP: install Offramp with its extra 'tracing', "
                f"in Offramp's clone: pip install '.[tracing]' ({error})"
            ) from error


class VersionSettings(StrictDocument, Settings):
    """Control of versions over HTTP; `folder` must be on the nodes."""

    control: Literal["none", "explicit"] = "none"
    """explicit: every caller may load and unload versions, and select the version that answers. none: no caller may."""
    folder: str | None = None
    """Folder of versions to load by name, relative to the file's folder. It has `<model>/<version>/settings.json`."""


class ModelSettings(Settings):
    """How a model is run."""

    version: str = Field(default="1", pattern=NAME_PATTERN)
    """Name of this version, which distinguishes applications of the same model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation: float32 or bfloat16."""
    hop_dtype: HopDtype = "same"
    """Data type of hidden states between stages: same (as `dtype`) or float16. float16 halves the bytes of float32
    models. Values are rounded to three digits and limited to 65504, so answers of inputs that pass through several
    stages may differ."""
    backend: BackendName = "torch"
    """Library that runs the model: torch, onnx, or auto (whichever is faster here)."""
    attention: Attention = "auto"
    """How attention handles batches of unequal lengths: auto, padded, slotted or apart. Inputs attend only to their own
    tokens, so answers differ only by rounding."""
    threads_per_replica: int = Field(default=1, ge=1)
    """Threads of a CPU replica. More threads than its share of the cores slow down the other replicas."""
    kv_tokens: int | None = Field(default=None, ge=16)  # one page
    """For decoders: most tokens of prompts and answers whose keys and values a replica holds. None: as many as fit into
    the memory that is free when it starts."""
    kv_fill: Fill = "compute"
    """For decoders: keys and values of blocks that a token skipped, compute or copy. `compute` runs the blocks later,
    so that later tokens are exact. `copy` uses the state with which the token left, which is less work (CALM)."""

    @field_validator("hop_dtype", "attention")
    @classmethod
    def _check_combination(cls, choice: str, info: ValidationInfo) -> str:
        if choice == "float16" and info.data.get("dtype") == "bfloat16":
            raise PydanticCustomError("hop_dtype", "bfloat16 has two bytes already; only same is allowed")
        if choice == "apart" and info.data.get("backend") == "onnx":
            raise PydanticCustomError("attention", "ONNX Runtime supports only auto, padded or slotted")
        return choice


HttpFront = Literal["auto", "direct", "haproxy", "proxy"]


class FrontSettings(Settings):
    """Where a service listens. A change restarts no replica, so these settings are not part of an application."""

    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the HTTP API."""
    grpc_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Open Inference Protocol over gRPC. None: none."""
    host: str = "127.0.0.1"
    """Address to listen on. On a cluster it must be 0.0.0.0, because HAProxy connects to ingresses of other nodes."""
    front: HttpFront = "auto"
    """Proxy in front of the ingresses: none (direct, for a single ingress), haproxy, proxy (Serve's own), or auto:
    direct on one machine if possible, else haproxy, as on a cluster."""


class IngressSettings(Settings):
    """Limits of an ingress for requests."""

    max_queued: int = Field(default=2000, ge=1)
    """Unanswered inputs that one ingress holds before it refuses more with 503."""
    default_timeout_s: float = Field(default=30.0, gt=0)
    """Timeout in seconds of requests without one; for models that generate, until the first token."""
    token_timeout_s: float = Field(default=30.0, gt=0)
    """For models that generate: timeout in seconds between two tokens. The whole answer has no default timeout."""
    max_timeout_s: float = Field(default=600.0, gt=0)
    """Longest timeout in seconds that a request may ask for; requests with a longer one get 400."""
    max_inputs_per_request: int = Field(default=256, ge=1)
    """Most inputs of one request; requests with more get 400."""
    max_body_bytes: int = Field(default=2_000_000, ge=1)
    """Bytes of one request's body (decompressed) before it is refused with 413."""
    max_held_bytes: int = Field(default=256_000_000, ge=1)
    """Bytes of all bodies that one ingress holds before it refuses more with 503. One body is always accepted."""
    prompt_chunk: int = Field(default=256, ge=1)
    """For models that generate: prompt tokens per step, which runs together with steps of other sequences. More of
    them mean earlier first tokens, and later next tokens of other sequences."""
    ttft_slo_s: float | None = Field(default=None, gt=0)
    """For models that generate: seconds until the first token. Requests that cannot keep it get 503. None: no limit."""
    tpot_slo_s: float | None = Field(default=None, gt=0)
    """For models that generate: mean seconds per later token. Requests that cannot keep it get 503. None: no limit."""
    access_log: bool = False
    """Log every request as JSON with its id (measured: 5 % of an ingress's time)."""
