"""The settings of an application that its operator chooses: service files and command-line options are these fields.

This module imports neither numpy nor the planner, for the command line shows the fields as options.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from earlyexit.backends.backends import BackendName
from earlyexit.engine.order import Attention
from earlyexit.named import NAME_PATTERN, Fill, HopDtype


class Settings(BaseModel):
    """Base of all parts: plain data, as cluster YAML carries it. Service files take the same fields, strictly."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
