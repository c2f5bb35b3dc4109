"""What may be asked of versions: the repository, as Triton's extension words it, and the canary."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from earlyexit.store import NAME_PATTERN

Version = Annotated[str, Field(pattern=NAME_PATTERN)]
Share = Annotated[float, Field(ge=0, le=1)]


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


class Canary(BaseModel):
    """A version on trial."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Version
    share: Share = 0.0
    """Of the requests that name no version, those which it answers."""
    compare_share: Share = 0.0
    """Of the same, those which both versions are asked; the caller gets the answer of the one whose request it is."""


class DefaultVersion(BaseModel):
    """The version that requests get which name none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Version
