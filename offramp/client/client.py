"""Clients for a running Offramp server, asynchronous and blocking.

Every call is written once, as a coroutine of `AsyncClient`, which awaits only httpx and `sleep`. With httpx's blocking
client and a blocking sleep, these return their results directly, so that the coroutine ends without suspending.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack, cast

import httpx
from pydantic import Field
from pydantic_core import from_json

from deployments.api.operations import OPERATION_BY_NAME, new_id
from earlyexit.clock import Clock, MonotonicClock
from earlyexit.errors import DeadlineError, InputError, OfframpError, raising
from offramp.client.protocol import (
    Failure,
    Input,
    Outcome,
    Prediction,
    Request,
    adapter,
    are_texts,
    connection_failure,
    failure_of,
    key_header,
    predict_request,
    read_predictions,
    read_reply,
    reading,
    resolve,
    send_with_retries,
    shape,
    split_address,
)

DATA, DONE = "data: ", "[DONE]"
# What is read of generated texts. Other fields of answers, here and below, may have any value.
_TEXT: Any = shape(content=(str, ""))
_CHOICE: Any = shape(finish_reason=str | None, text=(str, ""), message=(_TEXT, _TEXT()), delta=(_TEXT, _TEXT()))
_EXITS: Any = shape(token_exits=(list[int], []), cut_short=(str | None, None))
_FACTS: Any = {"usage": (shape(prompt_tokens=int) | None, None), "offramp": (_EXITS, _EXITS())}
_EVENT = shape(choices=list[_CHOICE], **_FACTS)
_GENERATED = shape(choices=Annotated[list[_CHOICE], Field(min_length=1, max_length=1)], **_FACTS)

Message: TypeAlias = Mapping[str, str]
"""A `role` and its `content`."""
Prompt: TypeAlias = str | Sequence[Message]
"""A text to continue, or messages to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a streamed text."""

    text: str
    exits: tuple[int, ...] = ()
    """The blocks after which its tokens left, counted from 0; several if it took several tokens to make a character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generated answer, or the beginning of one."""

    text: str = ""
    ended: str = ""
    """`stop`: at an end token or a stop string. `length`: at `max_tokens` or at a time limit (`cut_short`)."""
    exits: tuple[int, ...] = ()
    """The block after which each token left."""
    num_prompt: int = 0
    """Number of tokens of the prompt."""
    cut_short: str | None = None
    """The time limit that ended the answer, if any."""
    request_id: str = field(default="", compare=False)

    def plus(self, event: Any) -> Generation:
        """Returns the answer with the next event of its stream, or with an answer that holds all of it."""
        ended = [each.finish_reason for each in event.choices if each.finish_reason]
        return replace(
            self,
            text=self.text + "".join(each.text + each.message.content + each.delta.content for each in event.choices),
            ended=ended[-1] if ended else self.ended,
            exits=(*self.exits, *event.offramp.token_exits),
            num_prompt=event.usage.prompt_tokens if event.usage else self.num_prompt,
            cut_short=event.offramp.cut_short or self.cut_short,
        )


class PredictOptions(TypedDict, total=False):
    """Options of predictions."""

    truncate: bool
    """Whether a text that is too long is truncated instead of refused."""
    timeout_s: float | None
    """Timeout of the whole call in seconds; None for the client's."""
    request_id: str | None
    in_words: bool
    """Whether answers to image files are those of `POST /predict` in JSON: a class map is a PNG file in base64 with its
    classes, and keypoints have the names of their joints."""


class Options(TypedDict, total=False):
    """Options of generation."""

    max_tokens: int
    """Maximum number of tokens of the answer; the server's default is 16 for a text and 256 for messages."""
    temperature: float
    """Sampling temperature; 0, the default here, always takes the most probable token."""
    top_p: float
    """Sample from the most probable tokens whose probabilities add up to this sum."""
    seed: int
    """Seed of sampling: the same seed draws the same tokens."""
    stop: Sequence[str]
    """Texts that end the answer and are not part of it."""
    timeout_s: float | None
    """Timeout of the whole answer in seconds; streams have none by default."""
    request_id: str


class PieceStream(AbstractContextManager["PieceStream"], AbstractAsyncContextManager["PieceStream"]):
    """An iterator over the pieces of a generated text, from either client, and a context manager that closes it."""

    def __init__(self, response: httpx.Response, request_id: str) -> None:
        self._response, self._url = response, response.url
        self.close, self.aclose = response.close, response.aclose
        """Close the stream, which ends the sequence on the server."""
        self._answer = Generation(request_id=request_id)
        """The answer so far."""
        self._is_done = False
        self._unfinished = ""
        self._pieces, self._async_pieces = self._read(), self._read_async()

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._async_pieces

    def result(self) -> Generation:
        """Returns the whole answer; raises OfframpError if the stream has not ended."""
        if not self._is_done or not self._answer.ended:
            raise self._noted(OfframpError(f"{self._url}: the stream broke off before its end, or was not read to it"))
        return self._answer

    def _read(self) -> Iterator[Piece]:
        with self, self._check_end():
            for text in self._response.iter_text():
                yield from self._feed(text)

    async def _read_async(self) -> AsyncIterator[Piece]:
        async with self:
            with self._check_end():
                async for text in self._response.aiter_text():
                    for piece in self._feed(text):
                        yield piece

    @contextmanager
    def _check_end(self) -> Iterator[None]:
        """Raises OfframpError if the stream breaks, is closed, or ends before the text does."""
        try:
            yield
        except (httpx.RequestError, httpx.StreamError) as error:
            raise OfframpError(f"{self._url}: the stream broke off: {error or type(error).__name__}") from error
        self.result()

    def _feed(self, text: str) -> Iterator[Piece]:
        """Parses a part of the stream and yields its pieces of text; raises an error that the server reports in it."""
        # Python's and httpx's functions for lines would also divide a text at its U+2028 or U+0085.
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for data in (line.removeprefix(DATA) for line in lines if line.startswith(DATA)):
            if data == DONE:
                self._is_done = True
                continue
            with reading(data, self._url, str):
                event, before = from_json(data), self._answer
                if isinstance(event, dict) and "error" in event:
                    raise self._noted(failure_of(HTTPStatus.INTERNAL_SERVER_ERROR, event).error)
                self._answer = before.plus(adapter(_EVENT).validate_python(event, strict=True))
            if text := self._answer.text[len(before.text) :]:
                yield Piece(text=text, exits=self._answer.exits[len(before.exits) :])

    def _noted(self, error: OfframpError) -> OfframpError:
        error.add_note(f"request id {self._answer.request_id}")
        return error


DEFAULT_URL = "http://127.0.0.1:8000"
READY_POLL_S = 0.2
"""Interval between readiness checks: short compared with loading a model."""
ABSENT = "not there"
"""The state of a version that the index does not have."""
ANSWER_S = 1.0
"""Time after the timeout of a generation in which the server's text so far may arrive, in seconds."""
LONGEST_S = 1e6
"""Longest timeout of an attempt, in seconds. Sockets refuse much longer ones, such as infinity."""
POLL_S = 0.5
"""Interval between checks of a version's state: short compared with its start."""

# What is read of metadata, of the list of models, of plans, and of reports on two versions side by side.
_INPUT: Any = shape(name=str, datatype=str)
_OUTPUT: Any = shape(name=str, shape=(list[int], []))
_METADATA = shape(name=str, inputs=Annotated[list[_INPUT], Field(min_length=1)], outputs=list[_OUTPUT])
_MODEL: Any = shape(offramp=shape(chats=bool, num_blocks=int, ramps=list[int]))
_MODELS = shape(data=Annotated[list[_MODEL], Field(min_length=1)])
_NUMBER: Any = float | None
_COUNTS: Any = dict[str, int]
_PLAN = shape(plan=dict, reason=(str | None, None), suspended=(str | None, None), hops=(dict[str, Any] | None, None))
_SIDE: Any = shape(requests=int, errors=_COUNTS, exits=_COUNTS, p50_s=_NUMBER, p99_s=_NUMBER, agreement=_NUMBER)
_CANARY, _COMPARED = shape(version=str, share=float), shape(inputs=int, agreement=_NUMBER)
_SIDES = shape(model=str, default=str, canary=_CANARY | None, versions=dict[str, _SIDE], compared=_COMPARED)

T = TypeVar("T")
P = ParamSpec("P")
Row: TypeAlias = dict[str, str]


def open_http(http: Callable[..., T], url: str, **options: Any) -> T:
    """Returns a client of httpx; raises InputError for an invalid address, or a proxy that cannot be used."""
    address = split_address(url)
    is_here = address.scheme == "http" and address.hostname in ("localhost", "127.0.0.1", "::1")
    unusable = ImportError, ValueError, httpx.InvalidURL  # such as for ALL_PROXY=socks5://..
    with raising(InputError, "the proxy that the environment names cannot be used", *unusable):
        return http(base_url=url, trust_env=not is_here, **options)  # no proxy leads to this machine


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """A client for asyncio, and an asynchronous context manager.

    Calls raise the errors of `earlyexit.errors`, with the request id as a note. `timeout_s` limits a whole call,
    retries included; a server that stalls during an attempt can exceed it. A retry may compute a prediction twice.

    `api_key` is sent with every request; over plain http, every machine on the way can read it. `compressed` asks for
    compressed answers, which only pays on slow networks.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        timeout_s: float = 30.0,
        max_attempts: int = 4,
        transport: httpx.AsyncBaseTransport | httpx.BaseTransport | None = None,
        *,
        api_key: str | None = None,
        compressed: bool = False,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        sleep: Callable[[float], object] = asyncio.sleep,
        http: Callable[..., httpx.AsyncClient | httpx.Client] = httpx.AsyncClient,
    ) -> None:
        headers = {**key_header(api_key), "Accept-Encoding": "gzip" if compressed else "identity"}
        self._http = open_http(http, url, transport=transport, headers=headers)
        self._sleep, self._timeout_s = sleep, timeout_s
        self._clock = clock or MonotonicClock()
        self._retry = partial(
            send_with_retries, max_attempts=max_attempts, clock=self._clock, rng=rng or random.Random(), sleep=sleep
        )
        self._metadata: dict[str, Any] = {}
        """The model's metadata, after the first request for it."""
        self._model_name: str | None = None
        """The model's name, after the first request for it."""

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        close = self._http.aclose if isinstance(self._http, httpx.AsyncClient) else self._http.close
        await resolve(close())

    async def predict(self, given: Input, **options: Unpack[PredictOptions]) -> Prediction:
        """Returns the answer to one input: a text, a pair of texts, an image (bytes or path), or arrays.

        Answers with many numbers are arrays.
        """
        [prediction] = await self._predict([given], options, many=False)
        return prediction

    async def predict_many(self, given: Sequence[Input], **options: Unpack[PredictOptions]) -> list[Prediction]:
        """Returns the answers to several inputs of one kind, in order. One request sends all, and fails as a whole."""
        if isinstance(given, str | bytes | Path | Mapping):
            raise InputError("predict_many takes a list of inputs; use predict for a single one")
        rows = list(given)
        return await self._predict(rows, options, many=True) if rows else []

    async def live(self) -> bool:
        """Returns whether the server is running and reachable."""
        return await self._is_ok("live", self._timeout_s)

    async def ready(self) -> bool:
        """Returns whether the server is ready to predict."""
        return await self._is_ok("ready", self._timeout_s)

    async def metadata(self, name: str | None = None) -> dict[str, Any]:
        """Returns the metadata of the model `name`, or of the served model."""
        return dict(await self._call("model_metadata", kind=_METADATA, model=name or await self._served_model()))

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Waits until the server is ready; raises DeadlineError after `timeout_s`."""
        async for left_s in self._checks(timeout_s, READY_POLL_S):
            if await self._is_ok("ready", left_s):
                return
        raise DeadlineError(f"the server was not ready within {timeout_s:g} s")

    async def generates(self) -> dict[str, Any]:
        """Returns facts about a generating model, such as `max_model_len`, and its `ramps` below `offramp`."""
        return dict((await self._call("models", kind=_MODELS))["data"][0])

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Continues a text, or answers messages, with the options of `Options`."""
        payload, request_id = await self._send_generation(prompt, options, streams=False)
        with reading(payload, self._http.base_url, _GENERATED) as answer:
            return Generation(request_id=request_id).plus(answer)

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> PieceStream:
        """Returns the answer as a stream: `with client.stream("Once") as pieces: for piece in pieces: ...`."""
        return PieceStream(*await self._send_generation(prompt, options, streams=True))

    async def versions(self) -> list[Row]:
        """Returns all models and versions of the server's cluster, with their states."""
        return list(await self._call("index", {}, list[Row]))

    async def plan(self) -> dict[str, Any]:
        """Returns the plan in force, and from a service with a controller the reason for it."""
        return dict(await self._call("plan", kind=_PLAN))

    async def canary(self) -> dict[str, Any]:
        """Returns statistics of the default version and the canary."""
        return await self._call_for_model("canary")

    async def set_canary(self, version: str, *, share: float, compare_share: float = 0.0) -> dict[str, Any]:
        """Routes a share of the requests to a version; the default answers `compare_share` of the requests too."""
        body: dict[str, object] = {"version": version, "share": share, "compare_share": compare_share}
        return await self._call_for_model("set_canary", body)

    async def end_canary(self) -> dict[str, Any]:
        """Routes all requests that name no version to the default version again."""
        return await self._call_for_model("end_canary")

    async def promote(self, version: str) -> dict[str, Any]:
        """Makes a version the default."""
        return await self._call_for_model("set_default", {"version": version})

    async def load(self, model: str, version: str, *, settings: str | None = None, timeout_s: float = 600.0) -> None:
        """Starts a version and waits until it is ready. Without `settings` (JSON), the server's folder has them."""
        parameters = {"version": version} if settings is None else {"version": version, "config": settings}
        await self._call("load", {"parameters": parameters}, model=model)
        until_s = self._clock.now_s() + timeout_s
        row = await self._await_state(model, version, ("READY", "UNAVAILABLE"), timeout_s)
        if row["state"] == "UNAVAILABLE":
            raise OfframpError(f"version {version!r} of {model!r} did not start: {row.get('reason', 'no reason told')}")
        # Serve may report an application as running a little earlier; another route prefix answers 404.
        async for left_s in self._checks(until_s - self._clock.now_s(), POLL_S):
            outcome = await self._attempt(Request("model_ready", named={"model": model, "version": version}), left_s)
            if not isinstance(outcome, Failure) or isinstance(outcome.error, InputError):
                return
        raise DeadlineError(f"version {version!r} of {model!r} runs but was not ready in time")

    async def unload(self, model: str, version: str, *, timeout_s: float = 600.0) -> None:
        """Stops a version, and waits until it is gone."""
        await self._call("unload", {"parameters": {"version": version}}, model=model)
        await self._await_state(model, version, (ABSENT, "UNAVAILABLE"), timeout_s)

    async def _await_state(self, model: str, version: str, states: Collection[str], timeout_s: float) -> Row:
        """Waits until the version has one of the states, and returns its row in the index; raises DeadlineError."""
        async for _ in self._checks(timeout_s, POLL_S):
            rows = await self.versions()
            named = (each for each in rows if (each.get("name"), each.get("version")) == (model, version))
            row = {"state": ABSENT} | next(named, {})  # Triton gives no state to versions that were never loaded
            if row["state"] in states:
                return row
        raise DeadlineError(f"version {version!r} of {model!r} is {row['state']} after {timeout_s:g} s")

    async def _predict(self, rows: Sequence[Input], options: PredictOptions, *, many: bool) -> list[Prediction]:
        """Sends one request with all inputs."""
        if not are_texts(rows) and not self._metadata:
            self._metadata.update(await self.metadata())
        of_request: dict[str, Any] = {name: value for name, value in options.items() if name != "timeout_s"}
        request = predict_request(rows, self._metadata, many=many, **of_request)
        payload = await self._send_with_retries(request, options.get("timeout_s"))
        address, request_id = self._http.base_url, request.request_id
        return read_predictions(payload, num_inputs=len(rows), request_id=request_id, address=address)

    async def _send_generation(self, prompt: Prompt, options: Options, *, streams: bool) -> tuple[Any, str]:
        """Returns the answer's payload and the request's id; raises InputError for an unsuitable prompt."""
        if not prompt:
            raise InputError("the prompt is empty")
        if not isinstance(prompt, str) and not all(isinstance(each, Mapping) for each in prompt):
            raise InputError("the prompt must be a text, or a list of messages such as {'role': ..., 'content': ...}")
        if self._model_name is None:
            self._model_name = await self._served_model()
        content = {"prompt": prompt} if isinstance(prompt, str) else {"messages": [dict(each) for each in prompt]}
        sampling = {name: value for name, value in options.items() if name not in ("timeout_s", "request_id")}
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
        request = Request(
            "completions" if isinstance(prompt, str) else "chat",
            {"model": self._model_name, "temperature": 0.0, "exits": True, **content, **sampling, **streaming},
            request_id=options.get("request_id") or new_id(),
            streams=streams,
            # The default timeout of a stream limits each wait for a piece, which the server need not know.
            sends_timeout=not streams or options.get("timeout_s") is not None,
        )
        return await self._send_with_retries(request, options.get("timeout_s")), request.request_id

    async def _served_model(self) -> str:
        """Returns the model's name from `GET /v2`: the first of its `models`, else the server's own name."""
        match server := await self._call("server_metadata"):
            case {"models": [str(name), *_]} | {"models": [{"name": str(name)}, *_]} | {"name": str(name)}:
                return name
        raise OfframpError(f"{self._http.base_url} names no model: {server!r:.200}")

    async def _call_for_model(self, operation: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        return dict(await self._call(operation, body, _SIDES, model=await self._served_model()))

    async def _call(self, operation: str, body: dict[str, object] | None = None, kind: Any = dict, **named: str) -> Any:
        """Returns the server's answer to an operation, of this kind; `named` are the parameters of its path."""
        answer = await self._send_with_retries(Request(operation, body, named=named))
        with reading(answer, self._http.base_url, kind):
            return answer

    async def _send_with_retries(self, request: Request, timeout_s: float | None = None) -> Any:
        """Sends a request, with retries under the same id; returns the payload, or raises the failure's error."""
        attempt = partial(self._attempt, request)
        outcome, _ = await self._retry(attempt, self._timeout_s if timeout_s is None else timeout_s)
        if isinstance(outcome, Failure):
            outcome.error.add_note(f"request id {request.request_id}")
            raise outcome.error
        return outcome

    async def _is_ok(self, operation: str, timeout_s: float) -> bool:
        return not isinstance(await self._attempt(Request(operation), timeout_s), Failure)

    async def _checks(self, timeout_s: float, interval_s: float) -> AsyncIterator[float]:
        """Yields the seconds that are left, at least once, at intervals until the timeout."""
        until_s = self._clock.now_s() + timeout_s
        while True:
            yield until_s - self._clock.now_s()
            if self._clock.now_s() + interval_s >= until_s:
                return
            await resolve(self._sleep(interval_s))

    async def _attempt(self, request: Request, timeout_s: float) -> Outcome:
        http, operation, timeout_s = self._http, OPERATION_BY_NAME[request.operation], min(timeout_s, LONGEST_S)
        content, headers = request.content(timeout_s)
        limit_s = timeout_s + (ANSWER_S if operation.models == "generates" else 0.0)
        with raising(InputError, "the address cannot be requested", httpx.InvalidURL):  # such as a name of 64 kB
            sent = http.build_request(operation.method, request.path, content=content, headers=headers, timeout=limit_s)
        try:
            response: httpx.Response = await resolve(http.send(sent, stream=request.streams))
            if request.streams and response.is_success:
                return response
            if request.streams:
                await resolve(response.aread() if isinstance(http, httpx.AsyncClient) else response.read())
        except httpx.TimeoutException:
            late = DeadlineError(f"no answer from {http.base_url} within {timeout_s:g} s")
            return Failure(error=late, kind="timeout")
        except httpx.RequestError as error:
            reason = str(error) or type(error).__name__
            return connection_failure(f"no connection to {http.base_url}: {reason}; is the service running?")
        return read_reply(response.status_code, response.content, response.headers)


def _blocking(
    call: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Returns the call, which never suspends, as a method of `Client`."""

    @wraps(call)
    def blocking(client: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        try:
            call(client._calls, *arguments, **options).send(None)
        except StopIteration as end:
            return cast(T, end.value)
        raise AssertionError("a call of the blocking client suspended")

    return blocking


class Client(AbstractContextManager["Client"]):
    """A blocking client with the methods of `AsyncClient`. It is a context manager, and threads may share it."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        timeout_s: float = 30.0,
        max_attempts: int = 4,
        transport: httpx.BaseTransport | None = None,
        *,
        sleep: Callable[[float], object] = time.sleep,
        **options: Any,
    ) -> None:
        self._calls = AsyncClient(url, timeout_s, max_attempts, transport, sleep=sleep, http=httpx.Client, **options)

    def __exit__(self, *raised: object) -> None:
        self.close()

    close = _blocking(AsyncClient.close)
    predict = _blocking(AsyncClient.predict)
    predict_many = _blocking(AsyncClient.predict_many)
    generate = _blocking(AsyncClient.generate)
    stream = _blocking(AsyncClient.stream)
    generates = _blocking(AsyncClient.generates)
    live = _blocking(AsyncClient.live)
    ready = _blocking(AsyncClient.ready)
    metadata = _blocking(AsyncClient.metadata)
    versions = _blocking(AsyncClient.versions)
    plan = _blocking(AsyncClient.plan)
    canary = _blocking(AsyncClient.canary)
    set_canary = _blocking(AsyncClient.set_canary)
    end_canary = _blocking(AsyncClient.end_canary)
    promote = _blocking(AsyncClient.promote)
    load = _blocking(AsyncClient.load)
    unload = _blocking(AsyncClient.unload)
    wait_until_ready = _blocking(AsyncClient.wait_until_ready)
