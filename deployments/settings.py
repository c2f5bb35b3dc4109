"""What an application is told at its start; changing any of it restarts replicas."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ServeSettings(BaseModel):
    """Boot-time settings of one application; plain data, so that cluster YAML can carry them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    """Model folder; every node must be able to read it."""
    plan: dict[str, Any]
    """A plan document, see `optimizer.plan_file`."""
    ingress_replicas: int = Field(default=1, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    backend: Literal["torch", "onnx"] = "torch"
    threads_per_replica: int = Field(default=1, ge=1)
    """Intra-op threads of a CPU replica; more than its share of cores slows every neighbour."""
    max_queued: int = Field(default=2000, ge=1)
    """Inputs that one ingress holds unanswered before it refuses more with 503."""
    default_timeout_s: float = Field(default=30.0, gt=0)
    max_timeout_s: float = Field(default=600.0, gt=0)
    max_inputs_per_request: int = Field(default=256, ge=1)
    max_body_bytes: int = Field(default=2_000_000, ge=1)
    calls_per_replica: int = Field(default=2, ge=1)
    """Calls per replica of the first stage that nothing has come back from yet. The first takes whatever waits; those
    that queue behind it are sent only when full, so that what arrives meanwhile is not spent on small batches."""
    by_reference_bytes: int = Field(default=1_000_000, ge=0)
    """Survivors of a call above this go through the object store; below it a message by value over gRPC is 2-3 times
    cheaper, above it the other way round."""
    access_log: bool = False
    """Log every request, as JSON with its id; costs about 5 % of an ingress."""
    max_attempts: int = Field(default=8, ge=1)
    """Times an input is sent from the start, when replicas die under it, before its owner is told."""
