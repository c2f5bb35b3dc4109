"""Requests to generating models, and a reader of their streams. It uses no HTTP library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict

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


class StreamReader:
    """Parses a stream into pieces, and into the whole answer at the end."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._texts: list[str] = []
        self._exits: list[int] = []
        self._ended: str | None = None
        self._cut_short: str | None = None
        self._num_prompt = 0
        self._is_done = False
        self._unfinished = ""

    def feed(self, text: str) -> Iterator[Piece]:
        """Parses a part of the stream and yields its pieces of text; raises an error that the server reports in it."""
        # Python's and httpx's functions for lines would also divide a text at its U+2028 or U+0085.
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        events = (line.removeprefix(DATA) for line in lines if line.startswith(DATA))
        yield from filter(None, map(self._event, events))

    def _event(self, data: str) -> Piece | None:
        if data == DONE:
            self._is_done = True
            return None
        try:
            return self._piece(json.loads(data))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OfframpError(f"the server's stream has an invalid event: {data:.200}") from error

    def _piece(self, event: Any) -> Piece | None:
        if "error" in event:
            raise self._noted(error_of(Reply(status=STREAM_STATUS, payload=event)))
        if event.get("usage"):
            self._num_prompt = event["usage"]["prompt_tokens"]
        ours = event.get("offramp", {})
        exits = tuple(ours.get("token_exits", ()))
        self._cut_short = ours.get("cut_short", self._cut_short)
        self._exits += exits
        for choice in event["choices"]:
            self._ended = choice["finish_reason"] or self._ended
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            if text:
                self._texts.append(text)
                return Piece(text=text, exits=exits)
        return None

    def result(self) -> Generation:
        """Returns the whole answer; raises OfframpError if the stream has not ended."""
        if not self._is_done or self._ended is None:
            raise self._noted(OfframpError("the server's stream broke off before its end"))
        return Generation(
            text="".join(self._texts),
            ended=self._ended,
            exits=tuple(self._exits),
            num_prompt=self._num_prompt,
            cut_short=self._cut_short,
            request_id=self._request_id,
        )

    def _noted(self, error: OfframpError) -> OfframpError:
        error.add_note(f"request id {self._request_id}")
        return error
