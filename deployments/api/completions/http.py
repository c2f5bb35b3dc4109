"""The routes of a model that generates: whole answers, and streams of server-sent events, each in its route's form.

The chunk that ends an answer brings no text, as clients expect (vLLM #35705). An error in mid-stream is an event.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive
from tokenizers import Tokenizer

from deployments.api.access import Gate
from deployments.api.completions.bodies import ChatBody, CompletionBody, GenerateBody
from deployments.api.endpoint import CALLER, FAILED, Api, Backend, json_response, log_error, openai_error, request_id
from deployments.api.events import Departure, EventStream
from deployments.api.generation import CutShortError, GenerateRequest, Stream
from deployments.api.parsing import validated
from deployments.process_setup import HideExceptionMessages
from earlyexit.clock import Clock
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import ContextLengthError, OfframpError
from earlyexit.sequences.sequence import Ended, StepResult
from earlyexit.tasks.token import TokenTask

logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(HideExceptionMessages())

T = TypeVar("T")
NOTHING: Mapping[str, Any] = {}
LONG_BODY_BYTES = 20_000
"""Reading a longer body takes milliseconds, most of them for tokenizing, and is done in a thread."""
OWNER = "offramp"


LEAST = -9999.0
"""OpenAI's log-probability of impossible tokens; JSON has no infinite numbers."""
SPACE = "\u2581"
"""How SentencePiece writes a space."""


class Probabilities:
    """Writes the log-probabilities of tokens, and of the likeliest alternatives."""

    def __init__(self, tokenizer: Tokenizer, num_likeliest: int) -> None:
        self._tokenizer = tokenizer
        self._num_likeliest = num_likeliest
        self._offset = 0
        """Characters of the tokens of a text so far."""

    def of_chat(self, said: Sequence[StepResult]) -> dict[str, Any]:
        """Returns `logprobs` of a message's choice."""
        return {
            "content": [
                {
                    **self._entry(each.chosen.token, each.chosen.log_probability),
                    "top_logprobs": [self._entry(token, value) for token, value in self._likeliest(each)],
                }
                for each in said
            ]
        }

    def of_text(self, said: Sequence[StepResult]) -> dict[str, Any]:
        """Returns `logprobs` of a text's choice, or of its next part."""
        texts = [self._text(each.chosen.token) for each in said]
        *offsets, self._offset = accumulate(map(len, texts), initial=self._offset)
        return {
            "tokens": texts,
            "token_logprobs": [_bounded(each.chosen.log_probability) for each in said],
            "top_logprobs": [{self._text(token): value for token, value in self._likeliest(each)} for each in said]
            if self._num_likeliest
            else None,
            "text_offset": offsets,
        }

    def _likeliest(self, said: StepResult) -> list[tuple[int, float]]:
        tokens_k, log_probabilities_k = said.likeliest_2k[:, : self._num_likeliest]
        pairs = zip(tokens_k.tolist(), log_probabilities_k.tolist(), strict=True)
        return [(int(token), _bounded(value)) for token, value in pairs]

    def _entry(self, token: int, log_probability: float) -> dict[str, Any]:
        text = self._text(token)
        is_whole = "\ufffd" not in text
        return {
            "token": text,
            "logprob": _bounded(log_probability),
            "bytes": list(text.encode()) if is_whole else None,
        }

    def _text(self, token: int) -> str:
        """Returns a token's text by itself; half a character becomes the replacement character."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        begins_word = (self._tokenizer.id_to_token(token) or "").startswith(SPACE) and not text.startswith(" ")
        return f" {text}" if begins_word else text


def _bounded(log_probability: float) -> float:
    return max(log_probability, LEAST) if math.isfinite(log_probability) else LEAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some text and its tokens: several if text was held back, as half a character or the start of a stop string."""

    text: str
    said: tuple[StepResult, ...]


DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """Returns a server-sent event of JSON."""
    return b"data: %b\n\n" % to_json(content)


class Form(ABC):
    """One answer in the form of its route, and what was written of it so far."""

    def __init__(self, num_prompt: int, *, reports_exits: bool) -> None:
        """`num_prompt`: tokens of the prompt; `reports_exits`: whether to report the exit of each token."""
        self._num_prompt = num_prompt
        self._reports_exits = reports_exits
        self._exits: Counter[int] = Counter()
        """Tokens by the block after which they left."""
        self.ended: Ended | None = None
        self._cut_short: str | None = None
        """The time limit that ended the sequence; None if none did."""
        self._held: list[StepResult] = []

    def take(self, said: StepResult) -> Stretch | None:
        """Adds a token; returns None if it brings no text."""
        self._exits[said.exit] += 1
        self.ended = said.ended
        self._held.append(said)
        return self._let_go(said.text) if said.text else None

    def cut(self, error: CutShortError) -> Stretch | None:
        """Ends the sequence by a time limit; returns None if no text was held back."""
        self.ended, self._cut_short = "length", str(error)
        return self._let_go(error.text) if error.text else None

    def _let_go(self, text: str) -> Stretch:
        part = Stretch(text=text, said=tuple(self._held))
        self._held.clear()
        return part

    def _rest(self) -> Stretch:
        """Returns the last tokens that brought no text, such as the one that ends the sequence."""
        return self._let_go("")

    def _summary(self) -> dict[str, Any]:
        """Returns the tokens by block, for JSON, whose keys are strings, and why the answer was cut short."""
        why = {} if self._cut_short is None else {"cut_short": self._cut_short}
        return {"exits": {str(block): self._exits[block] for block in sorted(self._exits)}, **why}

    def _token_exits(self, *parts: Stretch) -> dict[str, Any]:
        return {"token_exits": [each.exit for part in parts for each in part.said]} if self._reports_exits else {}

    def begin(self) -> bytes:
        """Returns the events before the first part, with which they are sent."""
        return b""

    @abstractmethod
    def part(self, part: Stretch) -> bytes:
        """Returns the event of a part."""

    @abstractmethod
    def end(self) -> bytes:
        """Returns the events after the last part."""

    @abstractmethod
    def error(self, kind: str, message: str, status: int) -> bytes:
        """Returns the events that end a stream by an error."""

    @abstractmethod
    def whole(self, parts: Sequence[Stretch]) -> dict[str, Any]:
        """Returns the answer that is not a stream, once it has ended."""


class OpenAiForm(Form):
    """OpenAI's answers: those of `/v1/chat/completions` have messages, those of `/v1/completions` texts."""

    def __init__(
        self,
        num_prompt: int,
        body: CompletionBody | ChatBody,
        request_id: str,
        created_s: int,
        tokenizer: Tokenizer,
    ) -> None:
        """`created_s`: seconds since 1970."""
        super().__init__(num_prompt, reports_exits=bool(body.exits))
        self._body = body
        self._chats = isinstance(body, ChatBody)
        self._object = "chat.completion" if self._chats else "text_completion"
        self._id = f"{'chatcmpl' if self._chats else 'cmpl'}-{request_id}"
        self._created_s = created_s
        self._reports_usage = body.include_usage
        likeliest = body.num_likeliest
        self._probabilities = None if likeliest is None else Probabilities(tokenizer, likeliest)

    def begin(self) -> bytes:
        if self._chats:
            return event(self._chunk({"delta": {"role": "assistant", "content": ""}, "logprobs": None}))
        return event(self._chunk({"text": self._body.echoed, "logprobs": None})) if self._body.echoed else b""

    def part(self, part: Stretch) -> bytes:
        more = {"offramp": self._token_exits(part)} if self._reports_exits else {}
        choice = {"delta": {"content": part.text}} if self._chats else {"text": part.text}
        return event(self._chunk(choice | self._logprobs(part.said), more=more))

    def end(self) -> bytes:
        choice: dict[str, Any] = {"delta": {}} if self._chats else {"text": ""}
        more = {"offramp": self._summary() | self._token_exits(self._rest())}
        last = event(self._chunk({**choice, "logprobs": None}, self.ended, more))
        usage = event(self._head(is_chunk=True) | {"choices": [], "usage": self._usage})
        return b"".join((last, usage if self._reports_usage else b"", DONE))

    def error(self, kind: str, message: str, status: int) -> bytes:
        return event(openai_error(kind, message, status)) + DONE

    def whole(self, parts: Sequence[Stretch]) -> dict[str, Any]:
        text = self._body.echoed + "".join(part.text for part in parts)
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"message": message} if self._chats else {"text": text}
        choice |= self._logprobs([each for part in parts for each in part.said])
        return {
            **self._head(is_chunk=False),
            "choices": [{"index": 0, **choice, "finish_reason": self.ended}],
            "usage": self._usage,
            "offramp": self._summary() | self._token_exits(*parts, self._rest()),
        }

    @property
    def _usage(self) -> dict[str, int]:
        asked, said = self._num_prompt, self._exits.total()
        return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}

    def _head(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = f"{self._object}.chunk" if is_chunk and self._chats else self._object
        return {"id": self._id, "object": kind, "created": self._created_s, "model": self._body.model}

    def _chunk(
        self, choice: Mapping[str, Any], ended: Ended | None = None, more: Mapping[str, Any] = NOTHING
    ) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self._reports_usage else {}
        choices = [{"index": 0, **choice, "finish_reason": ended}]
        return {**self._head(is_chunk=True), "choices": choices, **usage, **more}

    def _logprobs(self, said: Sequence[StepResult]) -> dict[str, Any]:
        probabilities = self._probabilities
        if probabilities is None:
            return {"logprobs": None}
        return {"logprobs": probabilities.of_chat(said) if self._chats else probabilities.of_text(said)}


class GenerateForm(Form):
    """Triton's generate extension: an object for the whole, or for every part; the last says why the text ended."""

    def __init__(self, num_prompt: int, model: str, version: str, body: GenerateBody) -> None:
        super().__init__(num_prompt, reports_exits=bool(body.drawn().exits))
        self._head = {"model_name": model, "model_version": version} | ({"id": body.id} if body.id else {})

    def part(self, part: Stretch) -> bytes:
        return event({**self._head, "text_output": part.text, **self._token_exits(part)})

    def end(self) -> bytes:
        return event({**self._head, "text_output": "", **self._summary(), **self._token_exits(self._rest())})

    def error(self, kind: str, message: str, status: int) -> bytes:
        return event({"error": message})

    def whole(self, parts: Sequence[Stretch]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        of_tokens = self._token_exits(*parts, self._rest())
        return {**self._head, "text_output": text, **self._summary(), **of_tokens}

    def _summary(self) -> dict[str, Any]:
        counts = {"prompt_tokens": self._num_prompt, "completion_tokens": self._exits.total()}
        return {"finish_reason": self.ended, **counts, **super()._summary()}


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
        return await self._openai(request, CompletionBody)

    async def chat(self, request: Request) -> Response:
        """Answers OpenAI's `POST /v1/chat/completions`."""
        return await self._openai(request, ChatBody)

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

    async def _openai(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response:
        name = request_id(request)

        def read(content: bytes) -> tuple[CompletionBody | ChatBody, GenerateRequest]:
            body = validated(kind, content)
            self._check_model(body.model)
            return body, body.request(self._codec, self._task.vocab_size, name)

        body, asked = await self._read(request, read)
        now_s, tokenizer = int(self._clock.now_s()), self._codec.tokenizer
        form = partial(OpenAiForm, body=body, request_id=name, created_s=now_s, tokenizer=tokenizer)
        return await self._respond(request, asked, form, source=body.source, streams=bool(body.stream))

    async def _generate(self, request: Request, *, streams: bool) -> Response:
        name = request_id(request)

        def read(content: bytes) -> tuple[GenerateBody, GenerateRequest]:
            body = validated(GenerateBody, content)
            return body, body.request(self._codec, name)

        body, asked = await self._read(request, read)
        form = partial(GenerateForm, model=self._backend.card.name, version=self._backend.version, body=body)
        return await self._respond(request, asked, form, source="text_input", streams=streams)

    async def _read(self, request: Request, read: Callable[[bytes], T]) -> T:
        content = await self._backend.bodies.read(request)
        return read(content) if len(content) < LONG_BODY_BYTES else await asyncio.to_thread(partial(read, content))

    async def _respond(
        self, request: Request, asked: GenerateRequest, form: Callable[[int], Form], *, source: str, streams: bool
    ) -> Response:
        self._api.charge(request.scope.get(CALLER), 1)
        try:
            stream = await self._backend.generate(asked)
        except ContextLengthError as error:
            error.param = source
            raise
        told = form(stream.num_prompt)
        return await respond(stream, request.receive, told, streams=streams, request_id=asked.request_id)

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
        parts = [part async for part in _parts(stream, first, form) if part is not None]
    except BaseException:
        departure.close()
        raise
    departure.close()
    return json_response(form.whole(parts))


async def _events(stream: Stream, first: StepResult, form: Form, request_id: str) -> AsyncIterator[bytes]:
    """Yields an event for each part of the text; an error in mid-stream is an event, too."""
    begun = form.begin()
    try:
        async for part in _parts(stream, first, form):
            if part is not None or begun:
                yield begun + (b"" if part is None else form.part(part))
                begun = b""
        yield form.end()
    except ClientDisconnect:
        return
    except OfframpError as error:
        log_error(logger, request_id, error)
        yield form.error(error.kind, str(error), error.http_status)
    except Exception:
        logger.exception("request %s: a stream broke off", request_id, extra={"request_id": request_id})
        yield form.error("internal", FAILED, 500)


async def _parts(stream: Stream, first: StepResult, form: Form) -> AsyncIterator[Stretch | None]:
    """Yields the text of each token until the answer ends, None if it brings no text; raises what `_next` raises."""
    yield form.take(first)
    while form.ended is None:
        try:
            said = await _next(stream)
        except CutShortError as error:
            yield form.cut(error)
        else:
            yield form.take(said)


async def _next(stream: Stream) -> StepResult:
    """Returns the next token; raises ClientDisconnect if the caller has disconnected."""
    try:
        return await anext(stream)
    except StopAsyncIteration:  # the stream was aborted: a sequence that ends says why
        raise ClientDisconnect from None
