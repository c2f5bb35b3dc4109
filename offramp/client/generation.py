"""Requests to generating models, and their streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias, TypedDict

import httpx

from earlyexit.errors import InputError, OfframpError
from offramp.client.protocol import Reply, error_of

DATA, DONE = "data: ", "[DONE]"
STREAM_STATUS = 500
"""Status of an error that the server reports within a stream."""

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
    """A generated answer."""

    text: str
    ended: str
    """`stop`: at an end token or a stop string. `length`: at `max_tokens` or at a time limit (`cut_short`)."""
    exits: tuple[int, ...]
    """The block after which each token left."""
    num_prompt: int
    """Number of tokens of the prompt."""
    cut_short: str | None = None
    """The time limit that ended the answer, if any."""
    request_id: str = field(default="", compare=False)


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
    timeout_s: float
    """Timeout of the whole answer in seconds; streams have none by default."""
    request_id: str


def generate_body(prompt: Prompt, model: str, options: Options, *, streams: bool) -> dict[str, object]:
    """Returns the JSON of a request; raises InputError for an empty prompt."""
    if not prompt:
        raise InputError("the prompt is empty")
    content = {"prompt": prompt} if isinstance(prompt, str) else {"messages": [dict(message) for message in prompt]}
    sampling = {name: value for name, value in options.items() if name not in ("timeout_s", "request_id")}
    streaming = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    return {"model": model, "temperature": 0.0, "exits": True, **content, **sampling, **streaming}


def read_generation(payload: Any, request_id: str) -> Generation:
    """Returns the answer in a payload; raises OfframpError for any other payload."""
    try:
        [choice] = payload["choices"]
        return Generation(
            text=choice["text"] if "text" in choice else choice["message"]["content"],
            ended=choice["finish_reason"],
            exits=tuple(payload["offramp"]["token_exits"]),
            num_prompt=payload["usage"]["prompt_tokens"],
            cut_short=payload["offramp"].get("cut_short"),
            request_id=request_id,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise OfframpError(f"the server's answer is not a generated text: {payload!r:.200}") from error


class PieceStream:
    """An iterator over the pieces of a generated text, from either client, and a context manager that closes it."""

    def __init__(self, response: httpx.Response, request_id: str) -> None:
        self._response = response
        self._answer = Generation(text="", ended="", exits=(), num_prompt=0, request_id=request_id)
        """The answer so far."""
        self._is_done = False
        self._unfinished = ""
        self._pieces, self._async_pieces = self._read(), self._read_async()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._async_pieces

    def close(self) -> None:
        """Closes the stream, which ends the sequence on the server."""
        self._response.close()

    async def aclose(self) -> None:
        """Closes the stream of the asynchronous client."""
        await self._response.aclose()

    def result(self) -> Generation:
        """Returns the whole answer; raises OfframpError if the stream has not ended."""
        if not self._is_done or not self._answer.ended:
            raise self._noted(OfframpError("the server's stream broke off before its end"))
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
        """Raises OfframpError if the stream breaks, or ends before the text does."""
        try:
            yield
        except httpx.RequestError as error:
            raise OfframpError(f"the server's stream broke off: {error or type(error).__name__}") from error
        self.result()

    def _feed(self, text: str) -> Iterator[Piece]:
        """Parses a part of the stream and yields its pieces of text; raises an error that the server reports in it."""
        # Python's and httpx's functions for lines would also divide a text at its U+2028 or U+0085.
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for data in (line.removeprefix(DATA) for line in lines if line.startswith(DATA)):
            if data == DONE:
                self._is_done = True
                continue
            try:
                piece = self._add(json.loads(data))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise OfframpError(f"the server's stream has an invalid event: {data:.200}") from error
            if piece.text:
                yield piece

    def _add(self, event: Any) -> Piece:
        """Adds an event to the answer, and returns its text and exits."""
        if "error" in event:
            raise self._noted(error_of(Reply(status=STREAM_STATUS, payload=event)))
        ours, usage, answer = event.get("offramp", {}), event.get("usage"), self._answer
        text, ended, exits = "", answer.ended, tuple(ours.get("token_exits", ()))
        for choice in event["choices"]:
            ended = choice["finish_reason"] or ended
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        self._answer = replace(
            answer,
            text=answer.text + text,
            ended=ended,
            exits=answer.exits + exits,
            num_prompt=usage["prompt_tokens"] if usage else answer.num_prompt,
            cut_short=ours.get("cut_short", answer.cut_short),
        )
        return Piece(text=text, exits=exits)

    def _noted(self, error: OfframpError) -> OfframpError:
        error.add_note(f"request id {self._answer.request_id}")
        return error
