"""Who may use a service, and how much: where its keys are, never the keys."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

KEYS_VARIABLE = "OFFRAMP_API_KEYS"


class AccessSettings(BaseModel):
    """Serve shows its applications' settings to whoever may see them, so keys stand in a file or a variable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys_file: str | None = None
    """File with one `name:key` or `key` per line; every node that runs an ingress must be able to read it."""
    keys_env: str | None = Field(default=None, min_length=1)
    """Environment variable with the same, separated by commas or lines; every node that runs an ingress must have it.
    With neither, everything is open."""
    rate_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What one key, or everybody where there are no keys, may send for ever. None: no limit."""
    rate_of: Literal["requests", "inputs"] = "requests"
    """What is counted; of inputs, those of predictions only."""
    burst: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What may come at once after a pause; None: one second's, at least 1."""
    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    """Origins, like `https://example.org`, whose pages browsers let use the service; `*` for all. None by default."""

    @property
    def has_keys(self) -> bool:
        """Whether callers must have one."""
        return self.keys_file is not None or self.keys_env is not None

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                words = "{origin} is no origin like https://example.org"
                raise PydanticCustomError("origin", words, {"origin": repr(origin)})
        return origins

    @model_validator(mode="after")
    def _is_one_place(self) -> AccessSettings:
        if self.keys_file is not None and self.keys_env is not None:
            raise PydanticCustomError("keys", "keys_file and keys_env exclude each other: give one of them")
        if self.burst is not None and self.rate_per_s is None:
            raise PydanticCustomError("burst", "a burst goes with rate_per_s")
        return self
