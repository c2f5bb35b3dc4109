"""Answers in the forms of the routes: whole, or an event for every part. Pure.

A chunk that ends an answer brings no text, as clients expect (vLLM #35705), and an error in mid-stream is an event.
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

from deployments.api.endpoint import openai_error
from deployments.api.generation import CutShortError
from earlyexit.sequences.sequence import Ended, Said

LEAST = -9999.0
"""OpenAI's word for what is as good as impossible; JSON has no infinite numbers."""
SPACE = "\u2581"
"""How SentencePiece writes a space."""


class Probabilities:
    """Tokens with their texts and log-probabilities, and the likeliest ones beside them."""

    def __init__(self, tokenizer: Tokenizer, num_likeliest: int) -> None:
        self._tokenizer = tokenizer
        self._num_likeliest = num_likeliest

    def of_chat(self, said: Sequence[Said]) -> dict[str, Any]:
        """`logprobs` of a message's choice."""
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
        """`logprobs` of a text's choice; `offset`: characters before it."""
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
        """Alone: of half a character it is the sign for what cannot be read."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        begins_word = (self._tokenizer.id_to_token(token) or "").startswith(SPACE) and not text.startswith(" ")
        return f" {text}" if begins_word else text


def _bounded(log_probability: float) -> float:
    return max(log_probability, LEAST) if math.isfinite(log_probability) else LEAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some text, and the tokens that it came of: several where a character, or what might be a stop string, held on."""

    text: str
    said: tuple[Said, ...]


@dataclass(slots=True, kw_only=True)
class Telling:
    """How far a sequence is told."""

    num_prompt: int
    num_said: int = 0
    exits: Counter[int] = field(default_factory=Counter)
    """Tokens by the block that they left after."""
    ended: Ended | None = None
    cut_short: str | None = None
    """Which limit of time ended the sequence, where one did."""
    _held: list[Said] = field(default_factory=list)

    def take(self, said: Said) -> Stretch | None:
        """A token came; None while it brings no text."""
        self.num_said += 1
        self.exits[said.exit] += 1
        self.ended = said.ended
        self._held.append(said)
        return self._let_go(said.text) if said.text else None

    def cut(self, error: CutShortError) -> Stretch | None:
        """A limit of time came instead of a token; None where no text was held back."""
        self.ended, self.cut_short = "length", str(error)
        return self._let_go(error.text) if error.text else None

    def rest(self) -> Stretch:
        """Tokens at the end that brought no text, such as the one that ends it."""
        return self._let_go("")

    def _let_go(self, text: str) -> Stretch:
        part = Stretch(text=text, said=tuple(self._held))
        self._held.clear()
        return part

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's count."""
        total = self.num_prompt + self.num_said
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_said, "total_tokens": total}

    @property
    def exits_by_block(self) -> dict[str, int]:
        """In JSON, whose keys are texts."""
        return {str(block): self.exits[block] for block in sorted(self.exits)}


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
