"""Every call of the clients, written once: what to send, when to send it again, what the answer means.

A flow is a generator that yields what to send, gets back what came of it, and returns what the caller asked for. It
knows no HTTP library: the blocking and the asynchronous client only send and sleep.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, Unpack

from deployments.api.operations import OPERATION_BY_NAME, path_of
from earlyexit.clock import Clock
from earlyexit.errors import DeadlineError, InputError, OfframpError
from offramp.client.generation import Generation, Options, Prompt, Reading, generate_body, read_generation
from offramp.client.inputs import Input, TensorBody, answers_are_large, files_as_json, tensor_body, travel_as_json
from offramp.client.protocol import (
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

READY_POLL_S = 0.2
"""Well below the seconds a model takes to load, and no load for the server."""
POLL_S = 0.5
"""Below the seconds that a version takes to start or to end."""

T = TypeVar("T")
Row: TypeAlias = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One attempt: wait `after_s`, then send and allow `timeout_s` for the answer."""

    method: str
    path: str
    request_id: str
    body: dict[str, object] | TensorBody | None = None
    tells_timeout: bool = True
    """Whether the body says how long we shall wait."""
    streams: bool = False
    """Whether the caller reads an answer of status 200: the reply's payload is then the open response."""
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
    known_names: dict[str, str] = field(default_factory=dict)
    """The model's, likewise."""

    def predict(
        self,
        given: Input,
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        in_words: bool = False,
    ) -> Flow[Prediction]:
        """Answer one input: a text, a pair of texts, an image file's bytes or path, an array, or several by name.

        `truncate` cuts a text beyond the model's length instead of refusing it. Answers of many numbers are arrays;
        `in_words`, those to image files are what `POST /predict` says in JSON: a class map is a PNG file in base64,
        with the classes that are there, and keypoints have their joints' names.
        """
        body = yield from self._body([given], given, truncate=truncate, in_words=in_words)
        [prediction] = yield from self._predictions(body, 1, timeout_s, request_id)
        return prediction

    def predict_many(
        self,
        given: Sequence[Input],
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        in_words: bool = False,
    ) -> Flow[list[Prediction]]:
        """Answer several inputs of one kind, in their order, as one request; they are answered, or fail, together."""
        if isinstance(given, str | bytes | Path | Mapping):
            raise InputError("predict_many takes a list of inputs; predict takes one")
        rows = list(given)
        if not rows:
            return []
        body = yield from self._body(rows, rows, truncate=truncate, in_words=in_words)
        return (yield from self._predictions(body, len(rows), timeout_s, request_id))

    def _body(
        self, rows: Sequence[Input], as_json: object, *, truncate: bool, in_words: bool
    ) -> Flow[dict[str, object] | TensorBody]:
        """`as_json`: the same inputs in JSON, if they are texts."""
        if travel_as_json(rows):
            return predict_body(as_json, truncate=truncate)
        if not self.known:
            self.known.update((yield from self.metadata()))
        if in_words and answers_are_large(self.known) and (files := files_as_json(rows)) is not None:
            return predict_body(files, truncate=truncate)
        return tensor_body(rows, self.known, {"truncate": True} if truncate else {})

    def live(self) -> Flow[bool]:
        """Whether the server runs; a server that cannot be reached does not."""
        return _is_ok((yield question(path_of("live"), timeout_s=self.timeout_s)))

    def ready(self) -> Flow[bool]:
        """Whether the server would take a prediction now."""
        return _is_ok((yield question(path_of("ready"), timeout_s=self.timeout_s)))

    def metadata(self, name: str | None = None) -> Flow[dict[str, Any]]:
        """Ask what the server knows of the model `name`, or about the one it serves."""
        return dict((yield from self._order("model_metadata", model=name or (yield from self.served_model()))))

    def _order(
        self, operation: str, body: dict[str, object] | None = None, *, after_s: float = 0.0, **named: str
    ) -> Flow[Any]:
        """The server's answer to an operation that may be repeated; `named` are the parts of its path."""
        method, path = OPERATION_BY_NAME[operation].method, path_of(operation, **named)
        limit_s = self.timeout_s
        return (yield from self._exchange(method, path, _new_id(), limit_s, body, after_s=after_s, tells_timeout=False))

    def served_model(self) -> Flow[str]:
        """The name of the model that the server is for."""
        return _served_model((yield from self._order("server_metadata")))

    def wait_until_ready(self, timeout_s: float) -> Flow[None]:
        """Return as soon as the server is ready; raises DeadlineError after `timeout_s`."""
        until_s, after_s = self.clock.now_s() + timeout_s, 0.0
        while (left_s := until_s - self.clock.now_s() - after_s) > 0:
            outcome = yield question(path_of("ready"), after_s=after_s, timeout_s=left_s)
            if _is_ok(outcome):
                return
            after_s = READY_POLL_S
        raise DeadlineError(f"the server was not ready within {timeout_s:g} s")

    def generates(self) -> Flow[dict[str, Any]]:
        """What the server says of a model that generates: its `max_model_len`, and in `offramp` its `ramps`."""
        return dict((yield from self._order("models"))["data"][0])

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Flow[Generation]:
        """Go on with a text, or answer messages; `Options` says what may be asked."""
        request_id = options.get("request_id") or _new_id()
        payload = yield from self._generated(prompt, options, request_id, streams=False)
        return read_generation(payload, request_id)

    def stream(self, prompt: Prompt, options: Options) -> Flow[tuple[Any, Reading]]:
        """The open response, and what reads its lines."""
        request_id = options.get("request_id") or _new_id()
        response = yield from self._generated(prompt, options, request_id, streams=True)
        return response, Reading(request_id)

    def _generated(self, prompt: Prompt, options: Options, request_id: str, *, streams: bool) -> Flow[Any]:
        if "model" not in self.known_names:
            self.known_names["model"] = yield from self.served_model()
        body = generate_body(prompt, self.known_names["model"], options, streams=streams)
        limit_s = options.get("timeout_s", self.timeout_s)
        path = path_of("completions" if isinstance(prompt, str) else "chat")
        # Of a stream the limit is on each wait for a part, which is the client's own affair.
        tells = not streams or "timeout_s" in options
        return (
            yield from self._exchange("POST", path, request_id, limit_s, body, streams=streams, tells_timeout=tells)
        )

    def _predictions(
        self, body: dict[str, object] | TensorBody, num_inputs: int, timeout_s: float | None, request_id: str | None
    ) -> Flow[list[Prediction]]:
        request_id = request_id or _new_id()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        path = body.path if isinstance(body, TensorBody) else path_of("predict")
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
        streams: bool = False,
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
                streams=streams,
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

    def versions(self) -> Flow[list[Row]]:
        """Every model and version on the server's cluster, and its state."""
        return list((yield from self._order("index", {})))

    def canary(self) -> Flow[dict[str, Any]]:
        """The default version and the canary, side by side."""
        return (yield from self._of_model("canary"))

    def set_canary(self, version: str, *, share: float, compare_share: float = 0.0) -> Flow[dict[str, Any]]:
        """Let a version answer a share of the requests that name none; ask both for `compare_share` of them."""
        body: dict[str, object] = {"version": version, "share": share, "compare_share": compare_share}
        return (yield from self._of_model("set_canary", body))

    def end_canary(self) -> Flow[dict[str, Any]]:
        """Let the default version answer all requests that name none."""
        return (yield from self._of_model("end_canary"))

    def promote(self, version: str) -> Flow[dict[str, Any]]:
        """Make a version the default one."""
        return (yield from self._of_model("set_default", {"version": version}))

    def _of_model(self, operation: str, body: dict[str, object] | None = None) -> Flow[dict[str, Any]]:
        model = yield from self.served_model()
        return dict((yield from self._order(operation, body, model=model)))

    def load(self, model: str, version: str, *, settings: str | None = None, timeout_s: float = 600.0) -> Flow[None]:
        """Start a version, by its settings as JSON or from the server's folder, and wait until it is ready."""
        parameters = {"version": version} if settings is None else {"version": version, "config": settings}
        yield from self._order("load", {"parameters": parameters}, model=model)

        def is_ready(row: Row | None) -> bool:
            if row is not None and row["state"] == "UNAVAILABLE":
                raise OfframpError(f"version {version!r} of {model!r} did not start: {row['reason']}")
            return row is not None and row["state"] == "READY"

        until_s = self.clock.now_s() + timeout_s
        yield from self._wait(model, version, is_ready, timeout_s)
        yield from self._wait_under_its_path(model, version, until_s)

    def unload(self, model: str, version: str, *, timeout_s: float = 600.0) -> Flow[None]:
        """End a version, and wait until it is gone."""
        yield from self._order("unload", {"parameters": {"version": version}}, model=model)
        yield from self._wait(model, version, lambda row: row is None or row["state"] == "UNAVAILABLE", timeout_s)

    def _wait_under_its_path(self, model: str, version: str, until_s: float) -> Flow[None]:
        """Serve may call an application running before its ingress has seen every stage, or a proxy the ingress.

        A version with a route prefix of its own is not found under this path: then the index has to do. Raises
        DeadlineError.
        """
        after_s = 0.0
        while (left_s := until_s - self.clock.now_s() - after_s) > 0:
            path = path_of("model_ready", model=model, version=version)
            outcome = yield question(path, after_s=after_s, timeout_s=left_s)
            if isinstance(outcome, Reply) and outcome.status != HTTPStatus.SERVICE_UNAVAILABLE:
                return
            after_s = POLL_S
        raise DeadlineError(f"version {version!r} of {model!r} runs but was not ready in time")

    def _wait(self, model: str, version: str, is_so: Callable[[Row | None], bool], timeout_s: float) -> Flow[None]:
        """Until the index has it so; raises DeadlineError."""
        until_s, after_s = self.clock.now_s() + timeout_s, 0.0
        while True:
            rows = yield from self._order("index", {}, after_s=after_s)
            after_s = POLL_S
            row = next((each for each in rows if (each["name"], each["version"]) == (model, version)), None)
            if is_so(row):
                return
            if self.clock.now_s() + POLL_S >= until_s:
                state = "not there" if row is None else row["state"]
                raise DeadlineError(f"version {version!r} of {model!r} is {state} after {timeout_s:g} s")


def question(path: str, *, timeout_s: float, after_s: float = 0.0) -> Send:
    """A GET that is sent once, whatever comes of it."""
    return Send(method="GET", path=path, request_id=_new_id(), after_s=after_s, timeout_s=timeout_s)


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
