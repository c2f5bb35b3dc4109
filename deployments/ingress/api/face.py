"""What every face of an ingress does alike, REST or gRPC: whom it asks, and what it says of models and of errors."""

from __future__ import annotations

import logging
import math
import uuid
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from deployments.ingress.access.gate import Gate
from deployments.ingress.api.bodies import InferRequest
from deployments.ingress.api.request_body import Bodies
from deployments.ingress.api.signature import Signature
from earlyexit.errors import AdmissionError, InputError, OfframpError, RateLimitError, UnknownModelError
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


VERSION = version("offramp")
"""Read once: it lies in a file."""
EXTENSIONS = ("binary_tensor_data", "parameters", "model_repository")
"""Of the protocol, by Triton's names."""
GENERATES = "token"
"""The task whose answers only make sense one after the other."""
WHERE_IT_GENERATES = "ask /v1/completions, /v1/chat/completions or /v2/models/{model}/generate"
GONE = 499
"""The status where nobody is left to read the response; so it is counted."""
REFUSALS = (InputError, AdmissionError, RateLimitError)
"""They come by the thousand, and are counted, not logged."""
FAILED = "the server failed on this request; its log says why, under the request's id"


class Backend(Served, Protocol):
    """What the faces need of an ingress."""

    @property
    def signature(self) -> Signature: ...

    @property
    def versions(self) -> Names: ...

    @property
    def bodies(self) -> Bodies: ...

    def choose(self, request_id: str) -> Chooser | None: ...

    def is_ready(self) -> bool: ...

    def count_request(self, route: str, status: int) -> None: ...


class Face:
    """Over a backend, behind a gate where there is one."""

    def __init__(self, backend: Backend, gate: Gate | None) -> None:
        self._backend = backend
        self._gate = gate

    def charge(self, caller: str | None, asked: InferRequest) -> None:
        """Count a request's inputs; raises RateLimitError. `caller`: whom the gate let in, where there is one."""
        if self._gate is not None:
            assert caller is not None
            self._gate.charge(caller, len(asked.rows))

    async def answer(self, asked: InferRequest, *, names_version: bool) -> tuple[Served, list[Answer]]:
        """Who answered: another version's ingress where the request names none and is that one's to answer.

        Raises InputError of a model that generates.
        """
        if self._backend.signature.task.name == GENERATES:
            raise InputError(f"model {self._backend.card.name!r} generates text: {WHERE_IT_GENERATES}")
        chosen = None if names_version else self._backend.choose(asked.request_id)
        return (self._backend, await self._backend.infer(asked)) if chosen is None else await chosen.answer(asked)

    def check_model(self, name: str, version: str | None) -> None:
        """Raise UnknownModelError for what is not served; no `version` stands for whichever is."""
        card, served = self._backend.card, self._backend.version
        if name != card.name:
            raise UnknownModelError(f"unknown model {name!r}; served is {card.name!r}")
        if (version or served) != served:
            raise UnknownModelError(f"unknown version {version!r} of {name!r}; served is {served!r}")

    async def model_metadata(self) -> dict[str, Any]:
        """As the protocol names its parts."""
        return {
            "name": self._backend.card.name,
            "versions": await self._backend.versions.names(),
            "platform": "offramp",
            "inputs": self._backend.signature.input_tensors,
            "outputs": self._backend.signature.output_tensors,
        }

    def server_metadata(self) -> dict[str, Any]:
        """As the protocol names its parts."""
        return {"name": "offramp", "version": VERSION, "extensions": EXTENSIONS}


def log_error(logger: logging.Logger, request_id: str, error: OfframpError) -> None:
    """Log what became of a request, unless it is a refusal."""
    if not isinstance(error, REFUSALS):
        said = {"request_id": request_id}  # Serve's field; it fills it only where it has passed the request on itself
        logger.warning("request %s: %s: %s", request_id, error.kind, error.log_text, extra=said)


def retry_after(error: OfframpError) -> str | None:
    """When to come back, in whole seconds; None where that would not help."""
    retry_after_s = getattr(error, "retry_after_s", None)
    return None if retry_after_s is None else str(max(1, math.ceil(retry_after_s)))


def own_id(given: object) -> str:
    """A request's id: the caller's, or a new one."""
    return str(given or uuid.uuid4().hex)
