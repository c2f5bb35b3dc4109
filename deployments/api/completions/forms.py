"""Writes answers in the form of each route: whole, or as an event for each part. Pure.

The chunk that ends an answer brings no text, as clients expect (vLLM #35705). An error in mid-stream is an event.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json
from tokenizers import Tokenizer

from deployments.api.completions.bodies import ChatBody, CompletionBody, GenerateBody
from deployments.api.endpoint import openai_error
from deployments.api.generation import CutShortError
from earlyexit.sequences.sequence import Ended, Said

LEAST = -9999.0
"""OpenAI's log-probability of impossible tokens; JSON has no infinite numbers."""
SPACE = "\u2581"
"""How SentencePiece writes a space."""


class Probabilities:
    """Writes the log-probabilities of tokens, and of the likeliest alternatives."""

    def __init__(self, tokenizer: Tokenizer, num_likeliest: int) -> None:
        self._tokenizer = tokenizer
        self._num_likeliest = num_likeliest

    def of_chat(self, said: Sequence[Said]) -> dict[str, Any]:
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

    def of_text(self, said: Sequence[Said], offset: int) -> dict[str, Any]:
        """Returns `logprobs` of a text's choice; `offset`: characters before it."""
        texts = [self._text(each.chosen.token) for each in said]
        offsets = [offset + sum(map(len, texts[:k])) for k in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [_bounded(each.chosen.log_probability) for each in said],
            "top_logprobs": [{self._text(token): value for token, value in self._likeliest(each)} for each in said]
            if self._num_likeliest
            else None,
            "text_offset": offsets,
        }

    def _likeliest(self, said: Said) -> list[tuple[int, float]]:
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
    said: tuple[Said, ...]


@dataclass(slots=True, kw_only=True)
class Telling:
    """The part of a sequence that was written so far."""

    num_prompt: int
    num_said: int = 0
    exits: Counter[int] = field(default_factory=Counter)
    """Tokens by the block after which they left."""
    ended: Ended | None = None
    cut_short: str | None = None
    """The time limit that ended the sequence; None if none did."""
    _held: list[Said] = field(default_factory=list)

    def take(self, said: Said) -> Stretch | None:
        """Adds a token; returns None if it brings no text."""
        self.num_said += 1
        self.exits[said.exit] += 1
        self.ended = said.ended
        self._held.append(said)
        return self._let_go(said.text) if said.text else None

    def cut(self, error: CutShortError) -> Stretch | None:
        """Ends the sequence by a time limit; returns None if no text was held back."""
        self.ended, self.cut_short = "length", str(error)
        return self._let_go(error.text) if error.text else None

    def rest(self) -> Stretch:
        """Returns the last tokens that brought no text, such as the one that ends the sequence."""
        return self._let_go("")

    def _let_go(self, text: str) -> Stretch:
        part = Stretch(text=text, said=tuple(self._held))
        self._held.clear()
        return part

    @property
    def usage(self) -> dict[str, int]:
        """The counts, as OpenAI names them."""
        total = self.num_prompt + self.num_said
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_said, "total_tokens": total}

    @property
    def exits_by_block(self) -> dict[str, int]:
        """Tokens by block, for JSON, whose keys are strings."""
        return {str(block): self.exits[block] for block in sorted(self.exits)}


DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """Returns a server-sent event of JSON."""
    return b"data: %b\n\n" % to_json(content)


def _exits(telling: Telling) -> dict[str, Any]:
    why = {} if telling.cut_short is None else {"cut_short": telling.cut_short}
    return {"exits": telling.exits_by_block, **why}


def _of_tokens(said: Iterable[Said]) -> dict[str, Any]:
    return {"token_exits": [each.exit for each in said]}


class Form(ABC):
    """How a route writes one answer."""

    def begin(self) -> list[bytes]:
        """Returns the events before the first part, with which they are sent."""
        return []

    @abstractmethod
    def part(self, part: Stretch) -> bytes:
        """Returns the event of a part."""

    @abstractmethod
    def end(self, telling: Telling, rest: Stretch) -> list[bytes]:
        """Returns the events after the last part."""

    @abstractmethod
    def error(self, kind: str, message: str, status: int) -> list[bytes]:
        """Returns the events that end a stream by an error."""

    @abstractmethod
    def whole(self, telling: Telling, parts: Sequence[Stretch], rest: Stretch) -> dict[str, Any]:
        """Returns the answer that is not a stream; the tokens of `rest` brought no text."""


class OpenAiForm(Form):
    """What both of OpenAI's routes share."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: CompletionBody | ChatBody, request_id: str, created_s: int, tokenizer: Tokenizer) -> None:
        """`created_s`: seconds since 1970."""
        likeliest = body.num_likeliest
        self._body = body
        self._exits = bool(body.exits)
        self._include_usage = body.include_usage
        self._id = f"{self.prefix}-{request_id}"
        self._created_s = created_s
        self._probabilities = None if likeliest is None else Probabilities(tokenizer, likeliest)
        self._offset = 0

    @abstractmethod
    def _choice(self, text: str, said: Sequence[Said]) -> dict[str, Any]:
        """Returns the choice of a part, without its index and finish reason."""

    @abstractmethod
    def _empty(self) -> dict[str, Any]:
        """Returns the choice of the chunk that ends an answer."""

    def _whole_choice(self, text: str, said: Sequence[Said]) -> dict[str, Any]:
        """Returns the choice of an answer that is not a stream."""
        return self._choice(text, said)

    def part(self, part: Stretch) -> bytes:
        more = {"offramp": _of_tokens(part.said)} if self._exits else {}
        return event(self._chunk(self._choice(part.text, part.said), None, more))

    def end(self, telling: Telling, rest: Stretch) -> list[bytes]:
        of_rest = _of_tokens(rest.said) if self._exits else {}
        last = self._chunk(self._empty(), telling.ended, {"offramp": _exits(telling) | of_rest})
        usage = [self._head(self.chunk_object) | {"choices": [], "usage": telling.usage}]
        return [event(each) for each in (last, *(usage if self._include_usage else []))] + [DONE]

    def error(self, kind: str, message: str, status: int) -> list[bytes]:
        return [event(openai_error(kind, message, status)), DONE]

    def whole(self, telling: Telling, parts: Sequence[Stretch], rest: Stretch) -> dict[str, Any]:
        said = [each for part in parts for each in part.said]
        choice = self._whole_choice(self._body.echoed + "".join(part.text for part in parts), said)
        of_tokens = _of_tokens([*said, *rest.said]) if self._exits else {}
        return {
            **self._head(self.whole_object),
            "choices": [{"index": 0, **choice, "finish_reason": telling.ended}],
            "usage": telling.usage,
            "offramp": _exits(telling) | of_tokens,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created_s, "model": self._body.model}

    def _chunk(self, choice: dict[str, Any], ended: Ended | None, more: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        choices = [{"index": 0, **choice, "finish_reason": ended}]
        return {**self._head(self.chunk_object), "choices": choices, **usage, **more}


class CompletionForm(OpenAiForm):
    """`/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def begin(self) -> list[bytes]:
        return [event(self._chunk(self._choice(self._body.echoed, ()), None, {}))] if self._body.echoed else []

    def _choice(self, text: str, said: Sequence[Said]) -> dict[str, Any]:
        probabilities = self._probabilities
        logprobs = None
        if probabilities is not None:
            logprobs = probabilities.of_text(said, self._offset)
            self._offset += sum(map(len, logprobs["tokens"]))
        return {"text": text, "logprobs": logprobs}

    def _empty(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}


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
        probabilities = self._probabilities
        return None if probabilities is None else probabilities.of_chat(said)


class GenerateForm(Form):
    """Triton's generate extension: an object for the whole, or for every part; the last says why the text ended."""

    def __init__(self, model: str, version: str, body: GenerateBody) -> None:
        self._head = {"model_name": model, "model_version": version} | ({"id": body.id} if body.id else {})
        self._exits = bool(body.drawn().exits)

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
