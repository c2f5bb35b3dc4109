"""The routes of a model that generates: whole answers, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from deployments.api.access import Gate
from deployments.api.completions.bodies import ChatBody, CompletionBody, GenerateBody
from deployments.api.completions.forms import ChatForm, CompletionForm, Form, GenerateForm, Stretch, Telling
from deployments.api.endpoint import CALLER, FAILED, Api, Backend, json_response, log_error, request_id
from deployments.api.events import Departure, EventStream
from deployments.api.generation import CutShortError, GenerateRequest, Stream
from deployments.api.parsing import validated
from deployments.process_setup import WithoutWords
from earlyexit.clock import Clock
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import ContextLengthError, OfframpError
from earlyexit.sequences.sequence import Said
from earlyexit.tasks.token import TokenTask

logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(WithoutWords())

T = TypeVar("T")
LONG_BODY_BYTES = 20_000
"""Reading a longer body takes milliseconds, most of them for tokenizing, and is done in a thread."""
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
        self._api = Api(backend, gate)
        self._clock = clock
        self._created_s = int(self._clock.now_s())
        """The start of this service, since a model's folder does not tell when it was made."""

    async def completions(self, request: Request) -> Response:
        """Answers OpenAI's `POST /v1/completions`."""
        return await self._openai(request, CompletionBody, CompletionForm)

    async def chat(self, request: Request) -> Response:
        """Answers OpenAI's `POST /v1/chat/completions`."""
        return await self._openai(request, ChatBody, ChatForm)

    async def models(self, request: Request) -> Response:
        """Answers OpenAI's `GET /v1/models`."""
        return json_response({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        """Answers OpenAI's `GET /v1/models/{model}`."""
        self._check_model(request.path_params["model"])
        return json_response(self._described())

    async def generate(self, request: Request) -> Response:
        """Answers Triton's `generate`."""
        return await self._generate(request, streams=False)

    async def generate_stream(self, request: Request) -> Response:
        """Answers Triton's `generate_stream`."""
        return await self._generate(request, streams=True)

    async def _openai(
        self,
        request: Request,
        kind: type[CompletionBody] | type[ChatBody],
        form: type[CompletionForm] | type[ChatForm],
    ) -> Response:
        name = request_id(request)

        def read(content: bytes) -> tuple[CompletionBody | ChatBody, GenerateRequest]:
            body = validated(kind, content)
            self._check_model(body.model)
            return body, body.request(self._codec, self._task.vocab_size, name)

        body, asked = await self._read(request, read)
        told = form(body, name, int(self._clock.now_s()), self._codec.tokenizer)
        return await self._respond(request, asked, told, source=body.source, streams=bool(body.stream))

    async def _generate(self, request: Request, *, streams: bool) -> Response:
        self._api.check_model(request.path_params["model"], request.path_params.get("version"))
        name = request_id(request)

        def read(content: bytes) -> tuple[GenerateBody, GenerateRequest]:
            body = validated(GenerateBody, content)
            return body, body.request(self._codec, name)

        body, asked = await self._read(request, read)
        form = GenerateForm(self._backend.card.name, self._backend.version, body)
        return await self._respond(request, asked, form, source="text_input", streams=streams)

    async def _read(self, request: Request, read: Callable[[bytes], T]) -> T:
        content = await self._backend.bodies.read(request)
        return read(content) if len(content) < LONG_BODY_BYTES else await asyncio.to_thread(partial(read, content))

    async def _respond(
        self, request: Request, asked: GenerateRequest, form: Form, *, source: str, streams: bool
    ) -> Response:
        self._api.charge(request.scope.get(CALLER), 1)
        try:
            stream = await self._backend.generate(asked)
        except ContextLengthError as error:
            error.param = source
            raise
        return await respond(stream, request.receive, form, streams=streams, request_id=asked.request_id)

    def _check_model(self, given: str) -> None:
        """Checks the model of an OpenAI request, `name` or `name:version`; names of models have no colon."""
        name, _, version = given.partition(":")
        self._api.check_model(name, version or None)

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


async def respond(stream: Stream, receive: Receive, form: Form, *, streams: bool, request_id: str) -> Response:
    """Returns the answer once the first token is there: earlier errors are raised, and get a status.

    Raises what the stream raises, and ClientDisconnect if the caller left.
    """
    departure = Departure(receive, stream.abort)
    try:
        first = await _next(stream)
        if streams:
            return EventStream(_events(stream, first, form, request_id), departure)
        response = await _whole(stream, first, form)
    except BaseException:
        departure.close()
        raise
    departure.close()
    return response


async def _whole(stream: Stream, first: Said, form: Form) -> Response:
    telling = Telling(num_prompt=stream.num_prompt)
    part, parts = telling.take(first), []
    while True:
        parts += [] if part is None else [part]
        if telling.ended is not None:
            return json_response(form.whole(telling, parts, telling.rest()))
        part = await _next_part(stream, telling)


async def _events(stream: Stream, first: Said, form: Form, request_id: str) -> AsyncIterator[bytes]:
    """Yields an event for each part of the text; an error in mid-stream is an event, too."""
    telling = Telling(num_prompt=stream.num_prompt)
    begun, part = b"".join(form.begin()), telling.take(first)
    try:
        while True:
            if part is not None or begun:
                yield begun + (b"" if part is None else form.part(part))
                begun = b""
            if telling.ended is not None:
                break
            part = await _next_part(stream, telling)
        yield b"".join(form.end(telling, telling.rest()))
    except ClientDisconnect:
        return
    except OfframpError as error:
        log_error(logger, request_id, error)
        yield b"".join(form.error(error.kind, str(error), error.http_status))
    except Exception:
        logger.exception("request %s: a stream broke off", request_id, extra={"request_id": request_id})
        yield b"".join(form.error("internal", FAILED, 500))


async def _next_part(stream: Stream, telling: Telling) -> Stretch | None:
    """Returns the text of the next token; None if it brings no text. Raises what `_next` raises."""
    try:
        return telling.take(await _next(stream))
    except CutShortError as error:
        return telling.cut(error)


async def _next(stream: Stream) -> Said:
    """Returns the next token; raises ClientDisconnect if the caller has disconnected."""
    try:
        return await anext(stream)
    except StopAsyncIteration:  # the stream was aborted: a sequence that ends says why
        raise ClientDisconnect from None
