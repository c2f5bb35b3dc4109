"""What may be asked of the repository of versions, as Triton's extension words it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class IndexBody(BaseModel):
    """`POST /v2/repository/index`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ready: bool = False
    """Only what can be asked now."""


class LoadParameters(BaseModel):
    """Triton's parameters of loading and unloading, and the version."""

    model_config = ConfigDict(extra="forbid", strict=True)

    config: str | None = None
    """Settings as JSON, as `offramp load` sends them; None: those in the repository's folder."""
    version: str | None = None
    """None: the one there is to choose from."""
    unload_dependents: bool = False
    """Of no consequence: nothing depends on a version."""


class LoadBody(BaseModel):
    """`POST /v2/repository/models/{model}/load`, and `/unload`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    parameters: LoadParameters = LoadParameters()
