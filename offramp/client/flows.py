"""Every call of the clients, written once: what to send, when to send it again, what the answer means.

A flow is a generator that yields what to send, gets back what came of it, and returns what the caller asked for. It
knows no HTTP library: the blocking and the asynchronous client only send and sleep.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from earlyexit.clock import Clock
from earlyexit.errors import DeadlineError, InputError, OfframpError
from offramp.client.inputs import Input, TensorBody, tensor_body, travel_as_json
from offramp.client.protocol import (
    PREDICT_PATH,
    REQUEST_ID_HEADER,
    Outcome,
    Prediction,
    Reply,
    error_kind,
    error_of,
    predict_body,
    read_predictions,
    retry_wait_s,
)

LIVE_PATH = "/v2/health/live"
READY_PATH = "/v2/health/ready"
READY_POLL_S = 0.2
"""Well below the seconds a model takes to load, and no load for the server."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One attempt: wait `after_s`, then send and allow `timeout_s` for the answer."""

    method: str
    path: str
    request_id: str
    body: dict[str, object] | TensorBody | None = None
    tells_timeout: bool = True
    """Whether the body says how long we shall wait."""
    after_s: float = 0.0
    timeout_s: float

    def arguments(self) -> dict[str, Any]:
        """Spell it for `httpx.Client.request`."""
        body, headers = self.body, {REQUEST_ID_HEADER: self.request_id}
        arguments = {"method": self.method, "url": self.path, "headers": headers, "timeout": self.timeout_s}
        if isinstance(body, TensorBody):
            content, more = body.content(self.timeout_s if self.tells_timeout else None)
            return arguments | {"content": content, "headers": headers | more}
        if body is not None and self.tells_timeout:
            body = body | {"timeout_s": self.timeout_s}
        return arguments | {"json": body}


Flow: TypeAlias = Generator[Send, Outcome, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    """Every call of both clients, without the sending."""

    timeout_s: float
    """For a whole call: all its attempts and the waits between them."""
    max_attempts: int
    clock: Clock
    rng: random.Random
    known: dict[str, Any] = field(default_factory=dict)
    """The model's metadata, once it was asked for."""

    def predict(
        self, given: Input, *, truncate: bool, timeout_s: float | None, request_id: str | None
    ) -> Flow[Prediction]:
        if travel_as_json([given]):
            body: dict[str, object] | TensorBody = predict_body(given, truncate=truncate)
        else:
            body = yield from self._tensor_body([given], truncate=truncate)
        [prediction] = yield from self._predictions(body, 1, timeout_s, request_id)
        return prediction

    def predict_many(
        self, given: Sequence[Input], *, truncate: bool, timeout_s: float | None, request_id: str | None
    ) -> Flow[list[Prediction]]:
        if isinstance(given, str | bytes | Path | Mapping):
            raise InputError("predict_many takes a list of inputs; predict takes one")
        rows = list(given)
        if not rows:
            return []
        if travel_as_json(rows):
            body: dict[str, object] | TensorBody = predict_body(rows, truncate=truncate)
        else:
            body = yield from self._tensor_body(rows, truncate=truncate)
        return (yield from self._predictions(body, len(rows), timeout_s, request_id))

    def _tensor_body(self, rows: Sequence[Input], *, truncate: bool) -> Flow[TensorBody]:
        if not self.known:
            self.known.update((yield from self.metadata(None)))
        return tensor_body(rows, self.known, {"truncate": True} if truncate else {})

    def probe(self, path: str) -> Flow[bool]:
        """Whether the server answers 200 right now; never retried, never an error."""
        outcome = yield Send(method="GET", path=path, request_id=_new_id(), timeout_s=self.timeout_s)
        return _is_ok(outcome)

    def metadata(self, name: str | None) -> Flow[dict[str, Any]]:
        if name is None:
            name = yield from self.served_model()
        model = yield from self._exchange("GET", f"/v2/models/{name}", _new_id(), self.timeout_s)
        return dict(model)

    def order(
        self, method: str, path: str, body: dict[str, object] | None = None, *, after_s: float = 0.0
    ) -> Flow[Any]:
        """What the server answers to an order of an operator, which may be given twice."""
        limit_s = self.timeout_s
        return (yield from self._exchange(method, path, _new_id(), limit_s, body, after_s=after_s, tells_timeout=False))

    def served_model(self) -> Flow[str]:
        """The name of the model that the server is for."""
        server = yield from self._exchange("GET", "/v2", _new_id(), self.timeout_s)
        return _served_model(server)

    def wait_until_ready(self, timeout_s: float) -> Flow[None]:
        until_s, after_s = self.clock.now_s() + timeout_s, 0.0
        while (left_s := until_s - self.clock.now_s() - after_s) > 0:
            outcome = yield Send(method="GET", path=READY_PATH, request_id=_new_id(), after_s=after_s, timeout_s=left_s)
            if _is_ok(outcome):
                return
            after_s = READY_POLL_S
        raise DeadlineError(f"the server was not ready within {timeout_s:g} s")

    def _predictions(
        self, body: dict[str, object] | TensorBody, num_inputs: int, timeout_s: float | None, request_id: str | None
    ) -> Flow[list[Prediction]]:
        request_id = request_id or _new_id()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        path = body.path if isinstance(body, TensorBody) else PREDICT_PATH
        payload = yield from self._exchange("POST", path, request_id, limit_s, body)
        return read_predictions(payload, num_inputs=num_inputs, request_id=request_id)

    def _exchange(
        self,
        method: str,
        path: str,
        request_id: str,
        timeout_s: float,
        body: dict[str, object] | TensorBody | None = None,
        *,
        after_s: float = 0.0,
        tells_timeout: bool = True,
    ) -> Flow[Any]:
        """Send, again where that may help, always under the same id; the answer's JSON, or the error it means."""
        left_s, wait_s, attempt = after_s + timeout_s, after_s, 0
        until_s = self.clock.now_s() + after_s + timeout_s
        while True:
            attempt += 1
            outcome = yield Send(
                method=method,
                path=path,
                request_id=request_id,
                body=body,
                tells_timeout=tells_timeout,
                after_s=wait_s,
                timeout_s=left_s - wait_s,
            )
            left_s = until_s - self.clock.now_s()
            retry_s = retry_wait_s(
                outcome, attempt=attempt, max_attempts=self.max_attempts, left_s=left_s, jitter=self.rng.random()
            )
            if retry_s is None:
                return _answer(outcome, request_id)
            wait_s = retry_s


def _is_ok(outcome: Outcome) -> bool:
    return isinstance(outcome, Reply) and outcome.status == 200


def _answer(outcome: Outcome, request_id: str) -> Any:
    if isinstance(outcome, Reply) and error_kind(outcome) is None:
        return outcome.payload
    error = error_of(outcome)
    error.add_note(f"request id {request_id}")
    raise error


def _served_model(server: Any) -> str:
    """Find the model's name in an answer to `GET /v2`: the first of its `models`, else the server's own name."""
    match server:
        case {"models": [str(name), *_]} | {"models": [{"name": str(name)}, *_]} | {"name": str(name)}:
            return name
    raise OfframpError(f"the server names no model: {server!r:.200}")


def _new_id() -> str:
    return uuid.uuid4().hex
