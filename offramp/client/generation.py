"""What clients say to a model that generates, and how they read its streams; free of any HTTP library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict

from earlyexit.errors import InputError, OfframpError
from offramp.client.protocol import Reply, error_of

DATA, DONE = "data: ", "[DONE]"
STREAM_STATUS = 500
"""What an error in mid-stream would have been, had nothing been said before it."""

Message: TypeAlias = Mapping[str, str]
"""A `role` and its `content`."""
Prompt: TypeAlias = str | Sequence[Message]
"""A text that is gone on with, or messages that are answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some text of a stream."""

    text: str
    exits: tuple[int, ...] = ()
    """The blocks after which its tokens left, counted from 0: several where a token alone makes no character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """An answer."""

    text: str
    ended: str
    """`stop`: by itself, or at a stop string; `length`: at `max_tokens`, or at a limit of time: see `cut_short`."""
    exits: tuple[int, ...]
    """Of every token the block after which it left."""
    num_prompt: int
    """Tokens."""
    cut_short: str | None = None
    """Which limit of time ended the answer, where one did."""
    request_id: str = field(default="", compare=False)


class Options(TypedDict, total=False):
    """How a text is asked for."""

    max_tokens: int
    """At most; the server's default is 16 for a text and 256 for messages."""
    temperature: float
    """0, the default here: always the likeliest token."""
    top_p: float
    """Of the likeliest tokens that come to this probability together."""
    seed: int
    """The same seed draws the same tokens."""
    stop: Sequence[str]
    """Texts that end the answer, and are not said."""
    timeout_s: float
    """For the whole answer; streams have no such limit by default."""
    request_id: str


def generate_body(prompt: Prompt, model: str, options: Options, *, streams: bool) -> dict[str, object]:
    """The JSON; raises InputError for an empty prompt."""
    if not prompt:
        raise InputError("the prompt is empty")
    said = {"prompt": prompt} if isinstance(prompt, str) else {"messages": [dict(message) for message in prompt]}
    drawn = {name: value for name, value in options.items() if name not in ("timeout_s", "request_id")}
    streaming = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    return {"model": model, "temperature": 0.0, "exits": True, **said, **drawn, **streaming}


def read_generation(payload: Any, request_id: str) -> Generation:
    """A whole answer; raises OfframpError for what is none."""
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
        raise OfframpError(f"the server's answer is no generated text: {payload!r:.200}") from error


class Reading:
    """A stream on its way: lines in, pieces out, and the answer as a whole once it has ended."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._texts: list[str] = []
        self._exits: list[int] = []
        self._ended: str | None = None
        self._cut_short: str | None = None
        self._num_prompt = 0
        self._is_done = False

    def line(self, line: str) -> Piece | None:
        """A line of the stream; None where it brings no text. Raises the error that the server tells of."""
        if not line.startswith(DATA):
            return None
        data = line.removeprefix(DATA)
        if data == DONE:
            self._is_done = True
            return None
        try:
            return self._event(json.loads(data))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OfframpError(f"the server's stream has an event that is none: {data:.200}") from error

    def _event(self, event: Any) -> Piece | None:
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

    def whole(self) -> Generation:
        """What came; raises OfframpError where the stream broke off."""
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
