"""The settings of an application that its operator chooses: service files and command-line options are these fields.

This module imports neither numpy nor the planner, for the command line shows the fields as options.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from earlyexit.backends import BackendName
from earlyexit.engine.queue import Attention
from earlyexit.errors import InputError
from earlyexit.named import NAME_PATTERN, Fill, HopDtype


class Settings(BaseModel):
    """Base of all parts: plain data, as cluster YAML carries it. Service files take the same fields, strictly."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True)


class TracingSettings(Settings):
    """Traces of requests, sent to an OpenTelemetry collector over OTLP/HTTP.

    What is left out is what the SDK's environment variables (OTEL_...) say, in the ingress's process; headers, which
    hold secrets, are said there only.
    """

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    """The collector, such as http://collector:4318; spans go to /v1/traces of it, or to the path that it names."""
    ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of requests that are traced, among those that bring no trace of their own. None: what OTEL_TRACES_SAMPLER
    says, else 0.01."""
    service_name: str | None = None
    """None: what OTEL_SERVICE_NAME says, else the application's name."""

    def check(self) -> None:
        """Raises InputError if the exporter is not installed."""
        try:
            import opentelemetry.exporter.otlp.proto.http  # noqa: F401 # only whether it is there
        except ImportError as error:
            raise InputError(
                "tracing needs OpenTelemetry's exporter over OTLP/HTTP: install Offramp with its extra 'tracing', "
                f"pip install '.[tracing]' ({error})"
            ) from error


class VersionSettings(Settings):
    """Control of versions over HTTP."""

    control: Literal["none", "explicit"] = "none"
    """explicit: every caller may load and unload versions, and choose which one answers. none: no caller may."""
    folder: str | None = None
    """Versions that can be loaded by name: settings of each in `<model>/<version>/settings.json`."""


class ModelSettings(Settings):
    """How a model is computed."""

    version: str = Field(default="1", pattern=NAME_PATTERN)
    """Name of this version among other applications of the same model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the model computes: float32 or bfloat16."""
    hop_dtype: HopDtype = "same"
    """Type of hidden states between stages: same (as the model's dtype) or float16. float16, for float32 models, takes
    half the bytes. Values are rounded to three digits and limited to 65504, so answers of inputs that crossed a hop may
    differ."""
    backend: BackendName = "torch"
    """Library that runs the model: torch, onnx, or auto (whichever is faster here)."""
    attention: Attention = "auto"
    """How a batch of unequal lengths attends: auto, padded, slotted or apart. Each input attends to its own tokens
    alone; answers are the same to rounding."""
    threads_per_replica: int = Field(default=1, ge=1)
    """Threads of a CPU replica. More threads than its share of the cores slow the other replicas."""
    kv_tokens: int | None = Field(default=None, ge=1)
    """For decoders: tokens, of prompts and answers, whose keys and values a replica holds at once. None: by the memory
    that is free when it starts. See `earlyexit.network.chain_network`."""
    kv_fill: Fill = "compute"
    """For decoders, keys and values of blocks that a token skipped: compute or copy. `compute` runs the blocks, so that
    later tokens are the full model's; `copy` takes the state with which the token left, which is less work (CALM)."""

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
    """Limits of what an ingress accepts from its clients."""

    max_queued: int = Field(default=2000, ge=1)
    """Unanswered inputs that one ingress holds before it refuses more with 503."""
    default_timeout_s: float = Field(default=30.0, gt=0)
    """Timeout in seconds of requests that name none; for models that generate, until the first token."""
    token_timeout_s: float = Field(default=30.0, gt=0)
    """For models that generate: timeout in seconds between two tokens. The whole answer has no limit but the
    request's own."""
    max_timeout_s: float = Field(default=600.0, gt=0)
    max_inputs_per_request: int = Field(default=256, ge=1)
    max_body_bytes: int = Field(default=2_000_000, ge=1)
    """Bytes of one request's body (of a gzip body, decompressed) before it is refused with 413."""
    max_held_bytes: int = Field(default=256_000_000, ge=1)
    """Bytes of all bodies that one ingress holds before it refuses more with 503. One body of the largest size is
    always accepted."""
    prompt_chunk: int = Field(default=256, ge=1)
    """Models that generate: tokens of a prompt that run in one step, beside steps of other sequences. A larger value
    means earlier first tokens, and later next tokens of other sequences."""
    ttft_slo_s: float | None = Field(default=None, gt=0)
    """Models that generate: seconds until the first token. A request that cannot keep it is refused with 503. None: no
    limit."""
    tpot_slo_s: float | None = Field(default=None, gt=0)
    """Models that generate: seconds per token after the first, on average over a sequence. A request that cannot keep
    it is refused with 503. None: no limit."""
    access_log: bool = False
    """Log every request, as JSON with its id; costs about 5 % of an ingress."""
