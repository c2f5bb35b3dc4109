"""A version of a model, wherever it is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deployments.ingress.api.bodies import InferRequest
from earlyexit.store import ModelCard
from earlyexit.tasks.base import Task
from earlyexit.wire import Answer


class Served(Protocol):
    """Answers requests as one version; raises what `InferService.infer` raises."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def task(self) -> Task:
        """What its answers are."""
        ...

    @property
    def version(self) -> str: ...

    async def infer(self, request: InferRequest) -> list[Answer]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """What one ingress says of its version to another's."""

    card: ModelCard
    version: str
    agreement: float | None
    """Of this ingress's probes with the full model; None before the first."""


class Chooser(Protocol):
    """A version that was chosen for a request: tells who answered, and what."""

    async def answer(self, request: InferRequest) -> tuple[Served, list[Answer]]: ...


class Names(Protocol):
    """Knows which versions of the model there are."""

    async def names(self) -> list[str]: ...
