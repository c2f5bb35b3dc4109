"""Answers in the forms of the routes: whole, or an event for every part. Pure.

A chunk that ends an answer brings no text, as clients expect (vLLM #35705), and an error in mid-stream is an event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from deployments.ingress.api.endpoint import openai_error
from deployments.ingress.completions.probabilities import Probabilities
from deployments.ingress.completions.told import Stretch, Telling
from earlyexit.generation.sequence import Ended, Said

DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """A server-sent event of JSON."""
    return b"data: %b\n\n" % to_json(content)


def _exits(telling: Telling) -> dict[str, Any]:
    why = {} if telling.cut_short is None else {"cut_short": telling.cut_short}
    return {"exits": telling.exits_by_block, **why}


def _of_tokens(said: Iterable[Said]) -> dict[str, Any]:
    return {"token_exits": [each.exit for each in said]}


class Form(ABC):
    """How a route tells an answer; of one answer."""

    @abstractmethod
    def begin(self) -> list[bytes]:
        """Events before the first part; sent together with it."""

    @abstractmethod
    def part(self, part: Stretch) -> bytes:
        """The event of a part."""

    @abstractmethod
    def end(self, telling: Telling, rest: Stretch) -> list[bytes]:
        """Events after the last part."""

    @abstractmethod
    def error(self, kind: str, message: str, status: int) -> list[bytes]:
        """Events of an answer that breaks off."""

    @abstractmethod
    def whole(self, telling: Telling, parts: Sequence[Stretch], rest: Stretch) -> dict[str, Any]:
        """The answer that is no stream; `rest` came without text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiFacts:
    """Of one answer in OpenAI's form."""

    request_id: str
    model: str
    created_s: int
    """Since 1970."""
    include_usage: bool
    exits: bool
    echo: str
    probabilities: Probabilities | None


class OpenAiForm(Form):
    """What both of OpenAI's routes share."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, facts: OpenAiFacts) -> None:
        self._facts = facts
        self._offset = 0

    @abstractmethod
    def _choice(self, text: str, said: Sequence[Said]) -> dict[str, Any]:
        """A part, but for its index and why it ended."""

    @abstractmethod
    def _empty(self) -> dict[str, Any]:
        """The choice of the chunk that ends an answer."""

    @abstractmethod
    def _whole_choice(self, text: str, said: Sequence[Said]) -> dict[str, Any]:
        """The choice of an answer that is no stream."""

    def part(self, part: Stretch) -> bytes:
        more = {"offramp": _of_tokens(part.said)} if self._facts.exits else {}
        return event(self._chunk(self._choice(part.text, part.said), None, more))

    def end(self, telling: Telling, rest: Stretch) -> list[bytes]:
        of_rest = _of_tokens(rest.said) if self._facts.exits else {}
        last = self._chunk(self._empty(), telling.ended, {"offramp": _exits(telling) | of_rest})
        usage = [self._head(self.chunk_object) | {"choices": [], "usage": telling.usage}]
        return [event(each) for each in (last, *(usage if self._facts.include_usage else []))] + [DONE]

    def error(self, kind: str, message: str, status: int) -> list[bytes]:
        return [event(openai_error(kind, message, status)), DONE]

    def whole(self, telling: Telling, parts: Sequence[Stretch], rest: Stretch) -> dict[str, Any]:
        said = [each for part in parts for each in part.said]
        choice = self._whole_choice(self._facts.echo + "".join(part.text for part in parts), said)
        of_tokens = _of_tokens([*said, *rest.said]) if self._facts.exits else {}
        return {
            **self._head(self.whole_object),
            "choices": [{"index": 0, **choice, "finish_reason": telling.ended}],
            "usage": telling.usage,
            "offramp": _exits(telling) | of_tokens,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        facts = self._facts
        name = f"{self.prefix}-{facts.request_id}"
        return {"id": name, "object": kind, "created": facts.created_s, "model": facts.model}

    def _chunk(self, choice: dict[str, Any], ended: Ended | None, more: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self._facts.include_usage else {}
        choices = [{"index": 0, **choice, "finish_reason": ended}]
        return {**self._head(self.chunk_object), "choices": choices, **usage, **more}


class CompletionForm(OpenAiForm):
    """`/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def begin(self) -> list[bytes]:
        return [event(self._chunk(self._choice(self._facts.echo, ()), None, {}))] if self._facts.echo else []

    def _choice(self, text: str, said: Sequence[Said]) -> dict[str, Any]:
        probabilities = self._facts.probabilities
        logprobs = None
        if probabilities is not None:
            logprobs = probabilities.of_text(said, self._offset)
            self._offset += sum(map(len, logprobs["tokens"]))
        return {"text": text, "logprobs": logprobs}

    def _empty(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _whole_choice(self, text: str, said: Sequence[Said]) -> dict[str, Any]:
        return self._choice(text, said)


class ChatForm(OpenAiForm):
    """`/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self) -> list[bytes]:
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return [event(self._chunk(role, None, {}))]

    def _choice(self, text: str, said: Sequence[Said]) -> dict[str, Any]:
        return {"delta": {"content": text}, "logprobs": self._logprobs(said)}

    def _empty(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _whole_choice(self, text: str, said: Sequence[Said]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(said)}

    def _logprobs(self, said: Sequence[Said]) -> dict[str, Any] | None:
        probabilities = self._facts.probabilities
        return None if probabilities is None else probabilities.of_chat(said)


class GenerateForm(Form):
    """Triton's generate extension: an object for the whole, or for every part; the last says why the text ended."""

    def __init__(self, model: str, version: str, given_id: str | None, *, exits: bool) -> None:
        self._head = {"model_name": model, "model_version": version} | ({"id": given_id} if given_id else {})
        self._exits = exits

    def begin(self) -> list[bytes]:
        return []

    def part(self, part: Stretch) -> bytes:
        of_tokens = _of_tokens(part.said) if self._exits else {}
        return event({**self._head, "text_output": part.text, **of_tokens})

    def end(self, telling: Telling, rest: Stretch) -> list[bytes]:
        of_tokens = _of_tokens(rest.said) if self._exits else {}
        return [event({**self._head, "text_output": "", **_summary(telling), **of_tokens})]

    def error(self, kind: str, message: str, status: int) -> list[bytes]:
        return [event({"error": message})]

    def whole(self, telling: Telling, parts: Sequence[Stretch], rest: Stretch) -> dict[str, Any]:
        of_tokens = _of_tokens(each for part in (*parts, rest) for each in part.said) if self._exits else {}
        text = "".join(part.text for part in parts)
        return {**self._head, "text_output": text, **_summary(telling), **of_tokens}


def _summary(telling: Telling) -> dict[str, Any]:
    counts = {"prompt_tokens": telling.num_prompt, "completion_tokens": telling.num_said}
    return {"finish_reason": telling.ended, **counts, **_exits(telling)}
