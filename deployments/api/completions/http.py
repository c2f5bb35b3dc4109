"""The routes of models that generate. They send whole answers, or streams of server-sent events.

The last chunk of an answer has no text, as clients expect (vLLM issue 35705). An error within a stream is an event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from tokenizers import Tokenizer

from deployments.api.completions.bodies import MAX_ID, ChatBody, CompletionBody, GenerateBody, StreamOptions
from deployments.api.endpoint import CLIENT_CLOSED_REQUEST, Backend, check_model, failure_of
from deployments.api.exchange import EventStream, HttpRequest, openai_error, run, watching
from deployments.api.generation import CutShortError, GenerateRequest, Stream
from deployments.api.operations import parse_body
from earlyexit.clock import Clock
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.codecs.text import LONG_CHARS
from earlyexit.errors import InputError, OfframpError
from earlyexit.sequences.sequence import Ended, StepResult
from earlyexit.tasks.token import TokenTask

AnyBody = CompletionBody | ChatBody | GenerateBody
MIN_LOGPROB = -9999.0
"""OpenAI's log-probability of impossible tokens, because JSON has no infinite numbers."""
SPACE = "\u2581"
"""SentencePiece's symbol for a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The next text of an answer and its tokens. There are several tokens if text was held back."""

    text: str
    results: tuple[StepResult, ...]
    ended: Ended | None = None
    """Why the answer has ended. Only the last delta has a reason; it has no text."""
    cut_short: str | None = None
    """The message about the time limit that ended the answer; None if there was none."""


async def text_deltas(streams: Sequence[Stream], ends: Collection[int]) -> AsyncIterator[TextDelta]:
    """Yields the parts of each text, and last its tokens without text, such as the end-of-text token.

    One text follows the other, although all sequences run at the same time: a sequence does not wait for its reader.
    `ends`: the end-of-text tokens. Raises the streams' errors, except that a time limit ends a text.
    """
    for stream in streams:
        held = list[StepResult]()
        try:
            async for result in stream:
                end = [result] if result.ended == "stop" and result.token in ends else []
                held += [] if end else [result]  # its text, if there is any, is that of tokens that were held back
                if result.text:
                    yield TextDelta(text=result.text, results=tuple(held))
                    held.clear()
                if result.ended is not None:
                    yield TextDelta(text="", results=(*held, *end), ended=result.ended)
        except CutShortError as error:
            if error.text:
                yield TextDelta(text=error.text, results=tuple(held))
                held.clear()
            yield TextDelta(text="", results=tuple(held), ended="length", cut_short=str(error))


DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """Returns a server-sent event of JSON."""
    return b"data: %b\n\n" % to_json(content)


class ResponseWriter:
    """Writes one answer: in the format of Triton's generate extension, unless a subclass has another one.

    There is one object, or one per part. The last has a finish reason.
    """

    def __init__(self, num_prompt: int, head: Mapping[str, Any], *, reports_exits: bool) -> None:
        """`num_prompt`: tokens of the prompt. `head`: fields of every object. `reports_exits`: of each token."""
        self._num_prompt = num_prompt
        self._head = head
        self._reports_exits = reports_exits
        self._exits: Counter[int] = Counter()
        """Tokens by the block after which they left."""

    def begin(self) -> bytes:
        """Returns the event before the first part; empty if there is none."""
        return b""

    def part(self, part: TextDelta) -> bytes:
        """Returns the events of a part of the text."""
        if part.ended is not None:
            return event(self.whole([part]))
        return event({**self._head, "text_output": part.text, **self._ours(part)})

    def error(self, error: OfframpError) -> bytes:
        """Returns the events that end a stream with an error."""
        return event({"error": str(error)})

    def whole(self, parts: Sequence[TextDelta]) -> dict[str, Any]:
        """Returns the whole answer, for requests without a stream."""
        ours, text = self._ours(*parts), "".join(part.text for part in parts)
        counts = {"prompt_tokens": self._num_prompt, "completion_tokens": self._exits.total()}
        return {**self._head, "text_output": text, "finish_reason": parts[-1].ended, **counts, **ours}

    def _ours(self, *parts: TextDelta) -> dict[str, Any]:
        """Counts the tokens of parts by their exits, and returns the fields that are Offramp's own.

        They are the exit of each token, if it is to be reported. The last part also has the tokens by exit block, and
        the reason why the answer was cut short.
        """
        exits = [each.exit for part in parts for each in part.results]
        self._exits.update(exits)
        ours: dict[str, Any] = {}
        if parts[-1].ended is not None:
            ours["exits"] = {str(block): number for block, number in sorted(self._exits.items())}
        if reasons := [part.cut_short for part in parts if part.cut_short is not None]:
            ours["cut_short"] = reasons[0]
        return ours | ({"token_exits": exits} if self._reports_exits else {})


class OpenAiWriter(ResponseWriter):
    """Writes the answers of `/v1/chat/completions`, which are messages, and of `/v1/completions`, which are texts."""

    def __init__(
        self, num_prompt: int, body: CompletionBody | ChatBody, request_id: str, created_s: int, tokenizer: Tokenizer
    ) -> None:
        """`created_s`: seconds since 1970."""
        self._is_chat = isinstance(body, ChatBody)
        self._echoed: Sequence[str]
        """The text before each answer."""
        self._num_top: int | None
        """Number of alternatives to report per token; None if no log-probabilities are reported."""
        if isinstance(body, ChatBody):
            kind, id_prefix, self._echoed = "chat.completion", "chatcmpl-", [""] * body.value("n")
            self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        else:
            kind, id_prefix = "text_completion", "cmpl-"
            self._echoed = [str(each) if body.echo else "" for each in body.prompts for _ in range(body.value("n"))]
            self._num_top = body.logprobs
        head = {"id": id_prefix + request_id[:MAX_ID], "object": kind, "created": created_s, "model": body.model}
        num_prompt //= body.value("n")  # as with OpenAI, the tokens of a prompt count once
        super().__init__(num_prompt, head, reports_exits=bool(body.exits))
        self._chunk_head = head | ({"object": f"{kind}.chunk"} if self._is_chat else {})
        self._options = body.stream_options or StreamOptions()
        self._tokenizer = tokenizer
        self._index = 0
        """The number of the present answer."""

    def begin(self) -> bytes:
        if self._is_chat:
            return self._chunk({"delta": {"role": "assistant", "content": ""}})
        echoed = self._echoed[self._index]
        return self._chunk({"text": echoed}) if echoed else b""

    def part(self, part: TextDelta) -> bytes:
        delta = {"content": part.text} if part.text else {}
        chunk = self._chunk({"delta": delta} if self._is_chat else {"text": part.text}, [part], self._ours(part))
        if part.ended is None:
            return chunk
        if self._index < len(self._echoed):
            return chunk + self.begin()
        usage = event(self._chunk_head | {"choices": [], "usage": self._usage}) if self._options.include_usage else b""
        return b"".join((chunk, usage, DONE))

    def error(self, error: OfframpError) -> bytes:
        return event(openai_error(error)) + DONE

    def whole(self, parts: Sequence[TextDelta]) -> dict[str, Any]:
        ours, choices, answer = self._ours(*parts), list[dict[str, Any]](), list[TextDelta]()
        for part in parts:
            answer.append(part)
            if part.ended is not None:
                text = self._echoed[self._index] + "".join(each.text for each in answer)
                message = {"role": "assistant", "content": text, "refusal": None}
                choices.append(self._choice({"message": message} if self._is_chat else {"text": text}, answer))
                answer = []
        return {**self._head, "choices": choices, "usage": self._usage, "offramp": ours}

    @property
    def _usage(self) -> dict[str, int]:
        prompt, answer = self._num_prompt, self._exits.total()
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def _chunk(
        self, content: Mapping[str, Any], parts: Sequence[TextDelta] = (), ours: Mapping[str, Any] | None = None
    ) -> bytes:
        chunk = self._chunk_head | {"choices": [self._choice(content, parts)]}
        if self._options.include_usage:
            chunk["usage"] = self._usage if self._options.continuous_usage_stats else None
        return event(chunk | {"offramp": ours} if ours else chunk)

    def _choice(self, content: Mapping[str, Any], parts: Sequence[TextDelta]) -> dict[str, Any]:
        """Returns a choice, after whose last part the next one begins.

        It has the log-probabilities of its tokens, if there are some and they are reported.
        """
        ended = parts[-1].ended if parts else None
        reported = [each for part in parts if part.ended != "stop" for each in part.results]
        logprobs = self._logprobs(reported) if reported and self._num_top is not None else None
        choice = {"index": self._index, **content, "logprobs": logprobs, "finish_reason": ended}
        self._index += ended is not None
        return choice

    def _logprobs(self, results: Sequence[StepResult]) -> dict[str, Any]:
        """Returns the log-probabilities of tokens, and of the most probable alternatives."""
        chosen = [self._rated(each.token, each.log_probability) for each in results]
        top = [[self._rated(*pair) for pair in each.likeliest_2k[:, : self._num_top].T.tolist()] for each in results]
        if self._is_chat:
            pairs = zip(chosen, [[_entry(*each) for each in of_token] for of_token in top], strict=True)
            return {"content": [{**_entry(*each), "top_logprobs": others} for each, others in pairs]}
        return {
            "tokens": [text for text, _ in chosen],
            "token_logprobs": [value for _, value in chosen],
            # Tokens with the same text share an entry, which has the place and the value of the most probable one.
            "top_logprobs": [dict(each) | dict(reversed(each)) for each in top] if self._num_top else None,
            "text_offset": [each.start for each in results],
        }

    def _rated(self, token: float, log_probability: float) -> tuple[str, float]:
        """Returns a token's text, in which U+FFFD replaces incomplete characters, and its log-probability."""
        text: str = self._tokenizer.decode([int(token)], skip_special_tokens=False)
        begins_word = (self._tokenizer.id_to_token(int(token)) or "").startswith(SPACE) and not text.startswith(" ")
        return f" {text}" if begins_word else text, max(MIN_LOGPROB, log_probability)  # also for NaN


def _entry(text: str, log_probability: float) -> dict[str, Any]:
    """Returns a token of a chat completion's `logprobs`."""
    return {"token": text, "logprob": log_probability, "bytes": None if "\ufffd" in text else list(text.encode())}


class GenerateRoutes:
    """Handlers of the operations of a model that generates."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        """`clock`: seconds since 1970, for the creation times in answers."""
        codec, task = backend.signature.codec, backend.signature.task
        assert isinstance(codec, PromptCodec)
        assert isinstance(task, TokenTask)
        self._backend = backend
        self._codec = codec
        self._task = task
        self._clock = clock
        self._created_s = int(self._clock.now_s())
        """The start time of this service, because a model folder does not have its creation time."""

    async def models(self, request: HttpRequest) -> object:
        return {"object": "list", "data": [self._described()]}

    async def model(self, request: HttpRequest) -> object:
        self._check_model(request.path_params["model"])
        return self._described()

    async def _answer(self, request: HttpRequest, kind: type[AnyBody], *, in_events: bool = False) -> object:
        """Returns the response once the first text is there, so that earlier errors can have an HTTP status.

        Raises the streams' errors, and ClientDisconnect.
        """

        def parse(content: bytes) -> tuple[AnyBody, list[GenerateRequest]]:
            body = parse_body(kind, content)
            if not isinstance(body, GenerateBody):
                self._check_model(body.model)
            return body, body.requests(self._codec, self._task.vocab_size, request.id)

        def abort() -> None:
            for each in streams:
                each.abort()

        content = await request.body()
        body, sequences = await run(partial(parse, content), in_thread=len(content) > LONG_CHARS)
        streams = list[Stream]()
        try:
            for sequence in sequences:
                streams.append(await self._backend.generate(sequence))
            writer = self._writer(body, sum(each.num_prompt for each in streams), request.id)
            parts = text_deltas(streams, self._task.ends)
            with watching(request.receive, abort):
                first = await anext(parts)
                if not in_events and (isinstance(body, GenerateBody) or not body.stream):
                    return writer.whole([first, *[part async for part in parts]])
        except BaseException as error:
            abort()
            if isinstance(error, InputError):  # of a prompt, unless it names another field
                error.param = error.param or body.source
            raise
        return EventStream(_events(first, parts, writer, request), abort)

    completions = partialmethod(_answer, kind=CompletionBody)
    chat = partialmethod(_answer, kind=ChatBody)
    generate = partialmethod(_answer, kind=GenerateBody)
    generate_stream = partialmethod(_answer, kind=GenerateBody, in_events=True)

    def _writer(self, body: AnyBody, num_prompt: int, request_id: str) -> ResponseWriter:
        if isinstance(body, GenerateBody):
            head = {"model_name": self._backend.card.name, "model_version": self._backend.version}
            head |= {"id": body.id} if body.id else {}
            return ResponseWriter(num_prompt, head, reports_exits=bool(body.sampling.exits))
        return OpenAiWriter(num_prompt, body, request_id, int(self._clock.now_s()), self._codec.tokenizer)

    def _check_model(self, model: str) -> None:
        """Checks the model of an OpenAI request, which is `name` or `name:version`. Names have no colon."""
        name, _, version = model.partition(":")
        check_model(self._backend, name, version or None)

    def _described(self) -> dict[str, Any]:
        card = self._backend.card
        details = {"chats": self._codec.chats, "version": self._backend.version, "num_blocks": card.num_blocks}
        return {
            "id": card.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "offramp",
            "max_model_len": self._codec.max_length,
            "offramp": {**details, "ramps": list(card.ramps)},
        }


async def _events(
    first: TextDelta, later: AsyncIterator[TextDelta], writer: ResponseWriter, request: HttpRequest
) -> AsyncIterator[bytes]:
    """Yields an event for each part of an answer. An error within the stream is an event, too."""
    try:
        if begin := writer.begin():
            yield begin
        yield writer.part(first)
        async for part in later:
            yield writer.part(part)
    except ClientDisconnect:
        request.late_status = CLIENT_CLOSED_REQUEST
    except Exception as error:
        error = failure_of(error, request.id, "the stream failed")  # no other variable: it would be in a cycle
        request.late_status = error.http_status
        yield writer.error(error)
