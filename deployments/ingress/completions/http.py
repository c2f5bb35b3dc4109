"""The routes of a model that generates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.access.gate import Gate
from deployments.ingress.api.bodies import validated
from deployments.ingress.api.completion_bodies import ChatBody, CompletionBody, GenerateBody
from deployments.ingress.api.endpoint import CALLER, Handler, json_response, request_id
from deployments.ingress.api.face import Backend, Face
from deployments.ingress.completions.asked import Asked, asked_chat, asked_completion, asked_generate
from deployments.ingress.completions.forms import ChatForm, CompletionForm, Form, GenerateForm, OpenAiFacts
from deployments.ingress.completions.probabilities import Probabilities
from deployments.ingress.completions.streaming import respond
from deployments.ingress.generation.request import GenerateRequest
from deployments.ingress.generation.stream import Stream
from earlyexit.clock import Clock, WallClock
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.tasks.token import TokenTask

T = TypeVar("T")
LONG_BODY_BYTES = 20_000
"""Above, reading a body takes milliseconds, most of them for tokens: it leaves the event loop."""
_COMPLETION = TypeAdapter(CompletionBody)
_CHAT = TypeAdapter(ChatBody)
_GENERATE = TypeAdapter(GenerateBody)
OWNER = "offramp"


class GenerateBackend(Backend, Protocol):
    """What the routes need of an ingress."""

    async def generate(self, request: GenerateRequest) -> Stream:
        """Begin a sequence; raises what refuses it."""
        ...


class GenerateRoutes:
    """Handlers over a backend whose model generates."""

    def __init__(self, backend: GenerateBackend, gate: Gate | None, clock: Clock) -> None:
        """`clock`: seconds since 1970, which answers name."""
        codec, task = backend.signature.codec, backend.signature.task
        assert isinstance(codec, PromptCodec)
        assert isinstance(task, TokenTask)
        self._backend = backend
        self._codec = codec
        self._task = task
        self._gate = gate
        self._face = Face(backend, gate)
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
        stream = await self._backend.generate(asked.request)
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
    backend: GenerateBackend, gate: Gate | None, clock: Clock | None = None
) -> list[tuple[str, Mapping[str, Handler]]]:
    """For `build_app` and `build_lane`; none where the model does not generate, or takes no prompts."""
    signature = backend.signature
    if not isinstance(signature.task, TokenTask) or not isinstance(signature.codec, PromptCodec):
        return []
    routes = GenerateRoutes(backend, gate, clock or WallClock())
    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    return [
        ("/v1/completions", {"POST": routes.completions}),
        ("/v1/chat/completions", {"POST": routes.chat}),
        *((f"{named}/generate", {"POST": routes.generate}) for named in (model, version)),
        *((f"{named}/generate_stream", {"POST": routes.generate_stream}) for named in (model, version)),
        ("/v1/models", {"GET": routes.models}),
        ("/v1/models/{model}", {"GET": routes.model}),
    ]
