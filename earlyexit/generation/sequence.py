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
from earlyexit.generation.sampling import Chosen, Sampling, choose
from earlyexit.generation.shown import Shown
from earlyexit.generation.text import TextStream, Unread
from earlyexit.signature import Encoded

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
