"""The routes of a model that generates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.access import Gate
from deployments.api.bodies import validated
from deployments.api.completions.bodies import (
    Asked,
    ChatBody,
    CompletionBody,
    GenerateBody,
    asked_chat,
    asked_completion,
    asked_generate,
)
from deployments.api.completions.forms import (
    ChatForm,
    CompletionForm,
    Form,
    GenerateForm,
    OpenAiFacts,
    Probabilities,
    Stretch,
    Telling,
)
from deployments.api.endpoint import CALLER, FAILED, Api, Backend, json_response, log_error, request_id
from deployments.api.generation import CutShortError, Stream
from deployments.api.operations import Handler, bound
from deployments.process_setup import WithoutWords
from earlyexit.clock import Clock, WallClock
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import ContextLengthError, OfframpError
from earlyexit.sequences.sequence import Said
from earlyexit.tasks.token import TokenTask

logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(WithoutWords())

HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""No proxy may gather events, compress or keep them."""


class Departure:
    """Aborts a sequence when its caller leaves, also while nothing is said."""

    def __init__(self, receive: Receive, abort: Callable[[], None]) -> None:
        """Watches from now on, until it is closed; the request's body has been read."""
        self._task = asyncio.get_running_loop().create_task(self._watch(receive, abort))

    async def _watch(self, receive: Receive, abort: Callable[[], None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        abort()

    def close(self) -> None:
        """Watch no longer."""
        self._task.cancel()


async def respond(stream: Stream, receive: Receive, form: Form, *, streams: bool, request_id: str) -> Response:
    """The answer, begun when the first token is there: what goes wrong before it is raised, and has a status.

    Raises what the stream does, and ClientDisconnect where the caller left.
    """
    departure = Departure(receive, stream.abort)
    try:
        first = await _next(stream)
        if streams:
            return TokenStream(stream, first, departure, form, request_id)
        response = await _whole(stream, first, form)
    except BaseException:
        _close(stream, departure)
        raise
    _close(stream, departure)
    return response


async def _whole(stream: Stream, first: Said, form: Form) -> Response:
    telling = Telling(num_prompt=stream.num_prompt)
    part, parts = telling.take(first), []
    while True:
        parts += [] if part is None else [part]
        if telling.ended is not None:
            return json_response(form.whole(telling, parts, telling.rest()))
        part = await _next_part(stream, telling)


async def _next_part(stream: Stream, telling: Telling) -> Stretch | None:
    """The text of what is said next; None where that brings no text. Raises what `_next` raises."""
    try:
        return telling.take(await _next(stream))
    except CutShortError as error:
        return telling.cut(error)


async def _next(stream: Stream) -> Said:
    """What is said next; raises ClientDisconnect if the caller has disconnected."""
    try:
        return await anext(stream)
    except StopAsyncIteration:  # it was aborted: sequences end with a word
        raise ClientDisconnect from None


def _close(stream: Stream, departure: Departure) -> None:
    departure.close()
    stream.abort()


class TokenStream(Response):
    """Server-sent events, each sent as soon as there is text. A slow reader is waited for."""

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, first: Said, departure: Departure, form: Form, request_id: str) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._stream = stream
        self._first = first
        self._departure = departure
        self._form = form
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._tell(send)
            await send({"type": "http.response.body", "body": b""})
        finally:
            _close(self._stream, self._departure)

    async def _tell(self, send: Send) -> None:
        form, telling = self._form, Telling(num_prompt=self._stream.num_prompt)
        begun, part = b"".join(form.begin()), telling.take(self._first)
        try:
            while True:
                if part is not None or begun:
                    await _send(send, begun + (b"" if part is None else form.part(part)))
                    begun = b""
                if telling.ended is not None:
                    break
                part = await _next_part(self._stream, telling)
            await _send(send, b"".join(form.end(telling, telling.rest())))
        except ClientDisconnect:
            return
        except OfframpError as error:
            log_error(logger, self._request_id, error)
            await _send(send, b"".join(form.error(error.kind, str(error), error.http_status)))
        except Exception:
            logger.exception("request %s: a stream broke off", self._request_id, extra={"request_id": self._request_id})
            await _send(send, b"".join(form.error("internal", FAILED, 500)))


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


T = TypeVar("T")
LONG_BODY_BYTES = 20_000
"""Above, reading a body takes milliseconds, most of them for tokens: it leaves the event loop."""
_COMPLETION = TypeAdapter(CompletionBody)
_CHAT = TypeAdapter(ChatBody)
_GENERATE = TypeAdapter(GenerateBody)
OWNER = "offramp"


class GenerateRoutes:
    """Handlers over a backend whose model generates."""

    def __init__(self, backend: Backend, gate: Gate | None, clock: Clock) -> None:
        """`clock`: seconds since 1970, which answers name."""
        codec, task = backend.signature.codec, backend.signature.task
        assert isinstance(codec, PromptCodec)
        assert isinstance(task, TokenTask)
        self._backend = backend
        self._codec = codec
        self._task = task
        self._gate = gate
        self._face = Api(backend, gate)
        self._clock = clock
        self._created_s = int(clock.now_s())
        """When this service began: a model's folder does not say when it was made."""

    async def completions(self, request: Request) -> Response:
        """OpenAI's `/v1/completions`."""
        name, codec, vocab_size = request_id(request), self._codec, self._task.vocab_size

        def read(body: bytes) -> tuple[str, Asked]:
            parsed = validated(_COMPLETION, body)
            self._check_model(parsed.model)
            return parsed.model, asked_completion(parsed, codec, vocab_size, name)

        model, asked = await self._read(request, read)
        return await self._respond(request, asked, CompletionForm(self._facts(asked, model)))

    async def chat(self, request: Request) -> Response:
        """OpenAI's `/v1/chat/completions`."""
        name, codec = request_id(request), self._codec

        def read(body: bytes) -> tuple[str, Asked]:
            parsed = validated(_CHAT, body)
            self._check_model(parsed.model)
            return parsed.model, asked_chat(parsed, codec, name)

        model, asked = await self._read(request, read)
        return await self._respond(request, asked, ChatForm(self._facts(asked, model)))

    async def models(self, request: Request) -> Response:
        """OpenAI's `/v1/models`."""
        return json_response({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        self._check_model(request.path_params["model"])
        return json_response(self._described())

    async def generate(self, request: Request) -> Response:
        """Triton's `/v2/models/{model}/generate`."""
        return await self._generate(request, streams=False)

    async def generate_stream(self, request: Request) -> Response:
        """Triton's `/v2/models/{model}/generate_stream`."""
        return await self._generate(request, streams=True)

    async def _generate(self, request: Request, *, streams: bool) -> Response:
        self._face.check_model(request.path_params["model"], request.path_params.get("version"))
        name, codec = request_id(request), self._codec

        def read(body: bytes) -> tuple[str | None, Asked]:
            parsed = validated(_GENERATE, body)
            return parsed.id, asked_generate(parsed, codec, name, streams=streams)

        given_id, asked = await self._read(request, read)
        card, version = self._backend.card, self._backend.version
        return await self._respond(request, asked, GenerateForm(card.name, version, given_id, exits=asked.exits))

    async def _read(self, request: Request, read: Callable[[bytes], T]) -> T:
        body = await self._backend.bodies.read(request)
        return read(body) if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(partial(read, body))

    async def _respond(self, request: Request, asked: Asked, form: Form) -> Response:
        if self._gate is not None:
            self._gate.charge(request.scope[CALLER], 1)
        try:
            stream = await self._backend.generate(asked.request)
        except ContextLengthError as error:
            error.param = asked.source
            raise
        return await respond(stream, request.receive, form, streams=asked.streams, request_id=asked.request.request_id)

    def _facts(self, asked: Asked, model: str) -> OpenAiFacts:
        likeliest = asked.num_likeliest
        return OpenAiFacts(
            request_id=asked.request.request_id,
            model=model,
            created_s=int(self._clock.now_s()),
            include_usage=asked.include_usage,
            exits=asked.exits,
            echo=asked.echo,
            probabilities=None if likeliest is None else Probabilities(self._codec.tokenizer, likeliest),
        )

    def _check_model(self, given: str) -> None:
        """Of OpenAI's routes: the model's name, or with a version behind a colon, which names have none of."""
        name, _, version = given.partition(":")
        self._face.check_model(name, version or None)

    def _described(self) -> dict[str, Any]:
        card = self._backend.card
        ours = {"chats": self._codec.chats, "version": self._backend.version, "num_blocks": card.num_blocks}
        return {
            "id": card.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": OWNER,
            "max_model_len": self._codec.max_length,
            "offramp": {**ours, "ramps": list(card.ramps)},
        }


def generate_paths(
    backend: Backend, gate: Gate | None, clock: Clock | None = None
) -> list[tuple[str, Mapping[str, Handler]]]:
    """For `build_app` and `build_lane`; none where the model does not generate, or takes no prompts."""
    signature = backend.signature
    if not isinstance(signature.task, TokenTask) or not isinstance(signature.codec, PromptCodec):
        return []
    return list(bound(GenerateRoutes(backend, gate, clock or WallClock())).items())
