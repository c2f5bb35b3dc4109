"""One sequence: a prompt, the tokens generated so far with their text, and the tokens that a decoder must see next.

It is pure: it neither sends nor waits. A step is an input like any other, whose answer is a token. A prompt is one or
several steps, so that batches do not get too long for others. A sequence that must begin anew, on another replica, has
its tokens so far as its prompt; no token is produced twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from earlyexit.errors import ContextLengthError, InputError
from earlyexit.network.boundary import Encoded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAGE_TOKENS = 16
"""The page size of vLLM: on average half a page of each sequence is reserved and never used."""
HALF = "\ufffd"
"""The replacement for an incomplete character."""


class TextStream:
    """The text of a sequence's new tokens, piece by piece.

    Text that might become a stop string is held back until it cannot; the text ends before the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        """`prompt`: the tokens before, which decide how the first token is spelt."""
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        said: str = tokenizer.decode(list(prompt), skip_special_tokens=True)
        # A prompt that ends within a character is repeated with the first text, which completes the character.
        self._again = said if said.endswith(HALF) else ""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string has come; no text follows it."""

    def push(self, token: int) -> str:
        """Returns the text that has become certain; it may be empty."""
        if self.stopped:
            return ""
        new = self._stream.step(self._tokenizer, token) or ""
        if new and self._again:  # without the repeated prompt
            new = new.removeprefix(self._again if new.startswith(self._again) else self._again.rstrip(HALF))
            self._again = ""
        self._held += new
        found = min((at for at in map(self._held.find, self._stops) if at >= 0), default=None)
        if found is not None:
            self.stopped = True
            given, self._held = self._held[:found], ""
            return given
        return self._let_go(len(self._held) - self._might_stop())

    def finish(self) -> str:
        """Returns the text that was held back, after the last token."""
        return self._let_go(len(self._held))

    def _let_go(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        return given

    def _might_stop(self) -> int:
        """Returns how many held characters at the end may be the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        ends = (self._held[-length:] for length in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)


class SequenceProgress:
    """How much of a growing sequence the decoder has been shown."""

    def __init__(self, num_prompt: int, limit: int, chunk: int, first_chunk: int | None = None) -> None:
        """`limit`: the most tokens of the sequence; `chunk`, `first_chunk`: of a step, of the first."""
        assert chunk >= 1
        self.num_prompt = num_prompt
        self.limit = limit
        self.num_tokens = num_prompt
        """Tokens of the sequence so far."""
        self.seen = 0
        """Tokens of these that the decoder has seen."""
        self._chunk = chunk
        self._first_chunk = chunk if first_chunk is None else first_chunk

    @property
    def until(self) -> int:
        """The end of the next step, or of the step under way."""
        return min(self.seen + (self._chunk if self.seen else self._first_chunk), self.num_tokens)

    @property
    def is_whole(self) -> bool:
        """Whether the sequence has reached its limit."""
        return self.num_tokens >= self.limit

    @property
    def says(self) -> bool:
        """Whether the answer to that step is the next token."""
        return self.until >= self.num_tokens

    def begin(self) -> None:
        """Begin anew where nothing of the sequence is known."""
        self.seen = 0

    def answered(self) -> bool:
        """Note the answer to a step; returns whether it was the next token, which is then part of the sequence."""
        self.seen = self.until
        if self.seen < self.num_tokens:
            return False
        self.num_tokens += 1
        return True


LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; raises InputError for invalid values."""

    temperature: float = 0.0
    """0: always the likeliest (greedy)."""
    top_p: float = 1.0
    """Draw from the likeliest tokens with this probability together (Holtzman et al. 2020, nucleus sampling)."""
    top_k: int | None = None
    """Draw from this many likeliest tokens; None: from all that an answer holds."""
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
    """A token and its log-probability, without temperature."""

    token: int
    log_probability: float


def choose(answer_2k: npt.NDArray[np.floating], sampling: Sampling, place: int) -> Chosen:
    """Returns the token at `place` of a sequence, from an answer of `TokenTask`."""
    tokens_k, log_probabilities_k = answer_2k
    drawn = 0 if sampling.temperature == 0 else _drawn(log_probabilities_k, sampling, place)
    return Chosen(int(tokens_k[drawn]), float(log_probabilities_k[drawn]))


def _drawn(log_probabilities_k: npt.NDArray[np.floating], sampling: Sampling, place: int) -> int:
    logits_k = log_probabilities_k[: sampling.top_k].astype(np.float64) / sampling.temperature
    weights_k = np.exp(logits_k - logits_k[0])
    cumulative_k = np.cumsum(weights_k)
    # The nucleus: the tokens up to the one that reaches the share.
    kept = 1 + int(np.searchsorted(cumulative_k, sampling.top_p * cumulative_k[-1] * (1 - 1e-12)))
    cumulative_k = cumulative_k[:kept]
    # Every place has its own generator: a sequence that begins anew elsewhere draws the same tokens.
    number = np.random.Generator(np.random.Philox(key=[sampling.seed, place])).random()
    return int(np.searchsorted(cumulative_k, number * cumulative_k[-1], side="right"))


RUN = "run"
"""The name of the tensor with `run_of` each input."""
Ended = Literal["stop", "length"]
"""Why a sequence is over, in OpenAI's terms: by a token or text that ends it, or by its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step for its caller."""

    chosen: Chosen
    text: str
    """Empty while a character is incomplete, or while the text may be the beginning of a stop string."""
    ended: Ended | None
    exit: int
    """The block after which the token left."""
    likeliest_2k: npt.NDArray[np.floating] = field(
        default_factory=lambda: np.empty((2, 0), dtype=np.float32), compare=False, repr=False
    )
    """The answer from which the token was chosen: see `TokenTask`."""


class TokenSequence:
    """A sequence that is being generated."""

    def __init__(
        self,
        prompt: Sequence[int],
        text: TextStream | None,
        *,
        max_tokens: int,
        max_length: int,
        ends: Sequence[int],
        sampling: Sampling,
        chunk: int,
        start: int | None = None,
    ) -> None:
        """Call `begin` before the first step; `text`: None for a sequence that is not decoded.

        `max_length`: the model's, for prompt and answer together; `ends`: tokens that end it; `chunk`: the most tokens
        of a prompt in one step; `start`: for an encoder-decoder, the token that answers start with: the prompt is then
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
        """With the token that an answer starts with."""
        self.limit = min(self.num_prompt + max_tokens, max_length)
        """The most tokens of the sequence."""
        first_chunk = chunk if start is None else max(chunk, self.num_prompt)
        self._shown = SequenceProgress(self.num_prompt, self.limit, chunk, first_chunk)
        self.ended: Ended | None = None
        self._text = text
        self._ends = frozenset(ends)
        self._sampling = sampling
        self._number = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def says(self) -> bool:
        """Whether the answer to the next step is a token: for parts of a prompt, only the last part's."""
        return self._shown.says

    def begin(self, number: int) -> None:
        """Begin, or begin anew, at a decoder that has seen nothing of it; `number` must be unique there."""
        self._number = number
        self._shown.begin()

    def step(self) -> Encoded:
        """Returns the input that the decoder must see next."""
        assert self.ended is None
        seen = self._shown.seen
        return step_of(self.tokens[seen : self._shown.until], self._number, seen, self.limit, self.num_prompt)

    def answered(self, answer_2k: npt.NDArray[np.floating], exit_block: int) -> StepResult | None:
        """Take the answer to the last step; returns None while parts of the prompt remain."""
        if not self._shown.answered():
            return None
        chosen = choose(answer_2k, self._sampling, len(self.tokens))
        self.tokens.append(chosen.token)
        is_end = chosen.token in self._ends
        text = "" if is_end or self._text is None else self._text.push(chosen.token)
        if is_end or (self._text is not None and self._text.stopped):
            self.ended = "stop"
        elif self._shown.is_whole:
            self.ended = "length"
        if self.ended is not None and self._text is not None:
            text += self._text.finish()
        return StepResult(chosen=chosen, text=text, ended=self.ended, exit=exit_block, likeliest_2k=answer_2k)

    def cut(self) -> str:
        """End the sequence before its length; returns the text that was held back."""
        self.ended = "length"
        return "" if self._text is None else self._text.finish()


def step_of(tokens: Sequence[int], sequence: int, seen: int, limit: int, prompt: int) -> Encoded:
    """Returns an input of a sequence's tokens, after `seen` tokens that the decoder has seen; see `run_of`."""
    run = np.array([run_of(sequence, seen, limit, prompt)], dtype=np.int32)
    return Encoded(len(tokens), (np.array(tokens, dtype=np.int32), run))


def run_of(sequence: int, start: int, limit: int, prompt: int) -> list[int]:
    """Returns what an input of a sequence brings beside its tokens.

    These are the sequence's number in two halves, from 0 (no sequence) to 2**62 - 1, how many of its tokens came
    before, the most tokens that it may have, and the length of its prompt. The prompt of an encoder-decoder is its
    source and the token that answers start with.
    """
    return [sequence >> HALF_BITS, sequence & (1 << HALF_BITS) - 1, start, limit, prompt]


def sequence_of(high: int, low: int) -> int:
    """Returns the number of two halves as in `run_of`."""
    return high << HALF_BITS | low


HALF_BITS = 31
