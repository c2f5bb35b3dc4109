"""What every peer's server is told; the same for all of them, so that only the server differs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]
Kernel = Literal["packed", "onnx"]
"""How the full model is computed: by Offramp's own modules, which spend nothing on padding, on torch or (in float32) by
ONNX Runtime."""
VARIABLE = "OFFRAMP_PEER_OPTIONS"
"""Of the environment: some servers make their workers without arguments, in processes of their own."""


class ServerOptions(BaseModel):
    """One peer's settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    """Model folder, as `offramp train` leaves it: weights, tokenizer, label names."""
    dtype: Dtype = "float32"
    kernel: Kernel = "packed"
    workers: int = Field(default=1, ge=1)
    """Processes, or replicas, that each hold the model."""
    threads: int = Field(default=1, ge=1)
    """Intra-op threads of each."""
    batch: int = Field(default=16, ge=1)
    """Requests in a batch, at most."""
    wait_s: float = Field(default=0.0, ge=0)
    """How long a batch waits to be filled."""
    slo_s: float = Field(default=1.0, gt=0)
    """How late an answer may be; told to servers that drop what would be later (BentoML)."""
    max_queued: int = Field(default=2000, ge=1)
    """Requests that wait before more are refused, where a server can say so."""
    port: int = Field(default=8100, ge=1, le=65535)

    @classmethod
    def told(cls) -> ServerOptions:
        """What this process was started with."""
        return cls.model_validate_json(os.environ[VARIABLE])
