"""One sequence: a prompt, the tokens that came of it, and which of them a decoder must see next.

Pure: it neither sends nor waits. A step is an input like any other, whose answer is a token; a prompt is one too, or
several, cut where a batch would get too long for others. Where a sequence has to begin anew, on another replica, what
it has come to is its prompt, and no token is said twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from earlyexit.errors import ContextLengthError, InputError
from earlyexit.network.wire import Encoded
from earlyexit.sequences.text import TextStream, Unread


class Shown:
    """Of one sequence, which grows by the tokens that come of it."""

    __slots__ = ("_chunk", "_first_chunk", "limit", "num_prompt", "num_tokens", "seen")

    def __init__(self, num_prompt: int, limit: int, chunk: int, first_chunk: int | None = None) -> None:
        """`limit`: how many tokens it may come to; `chunk`: the most that are shown at once, or first of all."""
        assert chunk >= 1
        self.num_prompt = num_prompt
        self.limit = limit
        self.num_tokens = num_prompt
        """What it has come to."""
        self.seen = 0
        """Of these."""
        self._chunk = chunk
        self._first_chunk = chunk if first_chunk is None else first_chunk

    @property
    def until(self) -> int:
        """Up to where the next step comes, or the one that is under way came."""
        return min(self.seen + (self._chunk if self.seen else self._first_chunk), self.num_tokens)

    @property
    def is_whole(self) -> bool:
        """Whether no more may come of it."""
        return self.num_tokens >= self.limit

    @property
    def says(self) -> bool:
        """Whether the answer to that step is its next token."""
        return self.until >= self.num_tokens

    def begin(self) -> None:
        """Nothing of it is known where it goes on."""
        self.seen = 0

    def answered(self) -> bool:
        """Whether the answer to the step is its next token, by which it has grown then."""
        self.seen = self.until
        if self.seen < self.num_tokens:
            return False
        self.num_tokens += 1
        return True


LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; raises InputError for what means nothing."""

    temperature: float = 0.0
    """0: always the likeliest (greedy)."""
    top_p: float = 1.0
    """Of the likeliest tokens that come to this probability together (Holtzman et al. 2020, nucleus sampling)."""
    top_k: int | None = None
    """Of this many likeliest tokens; None, and more than an answer holds: of all that it holds."""
    seed: int = 0
    """The same seed draws the same tokens, whatever the batch-mates, and on any replica."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise InputError(f"temperature must be from 0 to 2, not {self.temperature:g}", param="temperature")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p:g}", param="top_p")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, not {self.top_k}", param="top_k")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise InputError(f"seed must be from 0 to {LARGEST_SEED}, not {self.seed}", param="seed")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and how likely the model thought it, temperature aside."""

    token: int
    log_probability: float


def choose(answer_2k: npt.NDArray[np.floating], sampling: Sampling, place: int) -> Chosen:
    """The token at `place` of a sequence, of an answer of `TokenTask`."""
    tokens_k, log_probabilities_k = answer_2k
    drawn = 0 if sampling.temperature == 0 else _drawn(log_probabilities_k, sampling, place)
    return Chosen(int(tokens_k[drawn]), float(log_probabilities_k[drawn]))


def _drawn(log_probabilities_k: npt.NDArray[np.floating], sampling: Sampling, place: int) -> int:
    logits_k = log_probabilities_k[: sampling.top_k].astype(np.float64) / sampling.temperature
    weights_k = np.exp(logits_k - logits_k[0])
    cumulative_k = np.cumsum(weights_k)
    # The nucleus: all before the share is reached, and the one that reaches it.
    kept = 1 + int(np.searchsorted(cumulative_k, sampling.top_p * cumulative_k[-1] * (1 - 1e-12)))
    cumulative_k = cumulative_k[:kept]
    # A generator of its own for every place: a sequence that begins anew elsewhere goes on as it would have.
    number = np.random.Generator(np.random.Philox(key=[sampling.seed, place])).random()
    return int(np.searchsorted(cumulative_k, number * cumulative_k[-1], side="right"))


RUN = "run"
"""The tensor that holds `run_of` each input."""
Ended = Literal["stop", "length"]
"""Why a sequence is over, in OpenAI's words: by a token or text that ends it, or by its length."""


def _nothing() -> npt.NDArray[np.floating]:
    return np.empty((2, 0), dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a step brought its caller."""

    chosen: Chosen
    text: str
    """Nothing where a character is not whole yet, or what was said may be the beginning of a stop string."""
    ended: Ended | None
    exit: int
    """The block after which the token left."""
    likeliest_2k: npt.NDArray[np.floating] = field(default_factory=_nothing, compare=False, repr=False)
    """The answer that the token was chosen of: see `TokenTask`."""


class TokenSequence:
    """A sequence in the making."""

    def __init__(
        self,
        prompt: Sequence[int],
        text: TextStream | Unread,
        *,
        max_tokens: int,
        max_length: int,
        ends: Sequence[int],
        sampling: Sampling,
        chunk: int,
        start: int | None = None,
    ) -> None:
        """Before its first step: see `begin`.

        `max_length`: of prompt and answer together, the model's; `ends`: tokens that end it; `chunk`: the most tokens
        of a prompt in one step; `start`: of an encoder-decoder, the token that answers start with: the prompt is then
        its source, which is not cut. Raises InputError, and ContextLengthError for a prompt that is too long.
        """
        if not prompt:
            raise InputError("the prompt is empty; at least one token is needed")
        if max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, not {max_tokens}")
        if len(prompt) + (start is not None) >= max_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; this model takes {max_length} with the answer"
            )
        self.tokens = [*prompt] if start is None else [*prompt, start]
        self.num_prompt = len(self.tokens)
        """Also of what the decoder starts with."""
        self.limit = min(self.num_prompt + max_tokens, max_length)
        """How many tokens it may come to."""
        first_chunk = chunk if start is None else max(chunk, self.num_prompt)
        self._shown = Shown(self.num_prompt, self.limit, chunk, first_chunk)
        self.ended: Ended | None = None
        self._text = text
        self._ends = frozenset(ends)
        self._sampling = sampling
        self._number = 0

    @property
    def num_said(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def says(self) -> bool:
        """Whether the answer to the next step is a token: of the parts of a prompt, only to the last."""
        return self._shown.says

    def begin(self, number: int) -> None:
        """Let a decoder that knows nothing of it see all of it, under a number that no other sequence has there."""
        self._number = number
        self._shown.begin()

    def step(self) -> Encoded:
        """What the decoder must see next."""
        assert self.ended is None
        seen = self._shown.seen
        return step_of(self.tokens[seen : self._shown.until], self._number, seen, self.limit, self.num_prompt)

    def answered(self, answer_2k: npt.NDArray[np.floating], exit_block: int) -> Said | None:
        """Take the answer to the last step; None where the prompt is not over yet."""
        if not self._shown.answered():
            return None
        chosen = choose(answer_2k, self._sampling, len(self.tokens))
        self.tokens.append(chosen.token)
        is_end = chosen.token in self._ends
        text = "" if is_end else self._text.push(chosen.token)
        if is_end or self._text.stopped:
            self.ended = "stop"
        elif self._shown.is_whole:
            self.ended = "length"
        if self.ended is not None:
            text += self._text.finish()
        return Said(chosen=chosen, text=text, ended=self.ended, exit=exit_block, likeliest_2k=answer_2k)

    def cut(self) -> str:
        """End the sequence before its length; returns the text that was held back."""
        self.ended = "length"
        return self._text.finish()


def step_of(tokens: Sequence[int], sequence: int, seen: int, limit: int, prompt: int) -> Encoded:
    """Tokens that a decoder is shown of a sequence, of which it has `seen` so many before; see `run_of`."""
    run = np.array([run_of(sequence, seen, limit, prompt)], dtype=np.int32)
    return Encoded(len(tokens), (np.array(tokens, dtype=np.int32), run))


def run_of(sequence: int, start: int, limit: int, prompt: int) -> list[int]:
    """What an input of a sequence brings beside its tokens.

    That is the sequence's number in two halves, from 0 (no sequence at all) to 2**62 - 1, how many of its tokens came
    before, how many it may come to, and how many of these were given, whatever has been said since. An encoder-decoder
    is given its source and the token that answers start with: all but one of these are the source.
    """
    return [sequence >> HALF_BITS, sequence & (1 << HALF_BITS) - 1, start, limit, prompt]


def sequence_of(high: int, low: int) -> int:
    """The number that `run_of` has in two halves."""
    return high << HALF_BITS | low


HALF_BITS = 31
