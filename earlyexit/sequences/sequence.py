"""One sequence: a prompt, the tokens generated so far and their text, and the tokens of the next step.

This module neither sends nor waits. A step is an input like any other; its answer is a token. A long prompt is divided
into several steps, so that it does not delay other inputs. A sequence that restarts on another replica has its tokens
so far as its prompt, so that no token is generated twice.
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
"""Tokens per page. It is vLLM's page size: on average, half a page of each sequence is never used."""
REPLACEMENT = "\ufffd"
"""The character that decoders return for an incomplete character."""
CONTEXT_TOKENS, LONGEST_CHARACTER = 64, 4
"""The tokens of a prompt on which later text may depend, and the most bytes of a character."""


class TextStream:
    """Turns the new tokens of a sequence into text, piece by piece.

    Text that may be the beginning of a stop string is held back. The text ends before the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        """`prompt`: the tokens before the text. The text of the first new token may depend on them."""
        self._tokenizer = tokenizer
        # A whole prompt may take 0.1 s to decode. Its end must not begin within a character.
        ends = [list(prompt[cut - CONTEXT_TOKENS :]) for cut in range(LONGEST_CHARACTER)]
        self._before = next((end for end in ends if not tokenizer.decode(end).startswith(REPLACEMENT)), ends[0])
        """The tokens before the next text, which may depend on them."""
        self._new: list[int] = []
        """Later tokens, which have no text yet."""
        self._decoded: str = tokenizer.decode(self._before, skip_special_tokens=True)
        self._stops = tuple(stops)
        self.held = ""
        """The text that may be the beginning of a stop string. At the end of a sequence, it is final."""
        self.num_decoded = 0
        """Number of characters so far, including those that are held back."""
        self.stopped = False
        """Whether a stop string was found. No text follows it."""

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that is final now, which may be empty."""
        if self.stopped:
            return ""
        new = self._decode(token)
        self.held += new
        self.num_decoded += len(new)
        stop = min((at for at in map(self.held.find, self._stops) if at >= 0), default=None)
        self.stopped = stop is not None
        end = len(self.held) - self._length_of_possible_stop() if stop is None else stop
        final, self.held = self.held[:end], "" if self.stopped else self.held[end:]
        return final

    def _decode(self, token: int) -> str:
        """Returns the new text; none while a few tokens end with U+FFFD, which may be the beginning of a character."""
        self._new.append(token)
        text: str = self._tokenizer.decode(self._before + self._new, skip_special_tokens=True)
        # The text before changes if a prompt ends within a character, which this token completes, and if invalid bytes
        # follow characters that are decoded from bytes. `DecodeStream` of `tokenizers` fails on the latter.
        is_longer = text.startswith(self._decoded)
        new = text[len(self._decoded if is_longer else self._decoded.rstrip(REPLACEMENT)) :]
        if text == self._decoded and len(self._new) >= CONTEXT_TOKENS:
            self._new.clear()  # special tokens, which take longer and longer to decode
        if not new or (text.endswith(REPLACEMENT) and len(self._new) < CONTEXT_TOKENS):
            return ""
        self._before, self._new = self._new if is_longer else self._before + self._new, []
        self._decoded = self._tokenizer.decode(self._before, skip_special_tokens=True)
        return new

    def _length_of_possible_stop(self) -> int:
        """Returns how many characters at the end of the held text may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        lengths = range(min(len(self.held), longest), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self.held[-n:]) for stop in self._stops)), 0)


class SequenceProgress:
    """How many tokens of a growing sequence the decoder has processed."""

    def __init__(self, num_prompt: int, limit: int, chunk: int, undivided: int = 0) -> None:
        """`chunk`: the most tokens of a step, except that the first `undivided` tokens are in the first step."""
        assert chunk >= 1
        self.num_prompt = num_prompt
        """The prompt's tokens. For an encoder-decoder, they include the first token of answers."""
        self.limit = limit
        """The most tokens of the sequence."""
        self.number = 0
        """The number of the sequence at its decoder."""
        self.num_tokens = num_prompt
        """The tokens of the sequence so far."""
        self.seen = 0
        """How many of them the decoder has processed."""
        self._chunk, self._undivided = chunk, undivided

    @property
    def until(self) -> int:
        """One past the last token of the current step."""
        return min(max(self.seen + self._chunk, self._undivided), self.num_tokens)

    @property
    def is_whole(self) -> bool:
        """Whether the sequence has reached its limit."""
        return self.num_tokens >= self.limit

    @property
    def yields_token(self) -> bool:
        """Whether the answer to the current step is a token. It is not for the parts of a prompt before the last."""
        return self.until >= self.num_tokens

    def begin(self, number: int = 0) -> None:
        """Starts or restarts the sequence at a decoder that has none of its tokens. `number` must be unique there."""
        self.number = number
        self.seen = 0

    def advance(self) -> bool:
        """Notes the answer to the current step. Returns whether it was the next token, and counts that token."""
        self.seen = self.until
        if self.seen < self.num_tokens:
            return False
        self.num_tokens += 1
        return True


LARGEST_SEED = 2**63 - 1
MAX_TOP = 20
"""How many of the most probable tokens a result has: OpenAI's limit for chat completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. Raises InputError for invalid values."""

    temperature: float = 0.0
    """0: greedy decoding. Below 1e-300 it counts as 1e-300, because dividing by less overflows."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose probabilities sum to this (Holtzman et al. 2020, nucleus sampling)."""
    top_k: int | None = None
    """Sample from this many most probable tokens. None: from all tokens of an answer."""
    seed: int = 0
    """The same seed gives the same tokens, in any batch and on any replica."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise InputError(f"temperature must be from 0 to 2, not {self.temperature:g}", param="temperature")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p:g}", param="top_p")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, not {self.top_k}", param="top_k")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise InputError(f"seed must be from 0 to {LARGEST_SEED}, not {self.seed}", param="seed")


def choose(log_probabilities_k: npt.NDArray[np.floating], sampling: Sampling, place: int) -> int:
    """Samples the token at `place` of a sequence. Returns its index among the most probable tokens, see `TokenTask`."""
    if sampling.temperature == 0:
        return 0
    logits_k = log_probabilities_k[: sampling.top_k].astype(np.float64) / max(sampling.temperature, 1e-300)
    weights_k = np.exp(logits_k - logits_k[0])
    cumulative_k = np.cumsum(weights_k)
    total = cumulative_k[-1]
    rest = round(1 - float(np.exp(log_probabilities_k, dtype=np.float64).sum()), 6)  # later digits are rounding errors
    if rest > 0:
        # The tokens that are not in the answer count too, as if each was as probable as the last one in it.
        others = rest / np.exp(log_probabilities_k[-1], dtype=np.float64)
        room = others if sampling.top_k is None else max(0, sampling.top_k - len(log_probabilities_k))
        total += weights_k[-1] * min(others, room)
    # The nucleus: the tokens up to the first one whose cumulative probability reaches top_p.
    kept = 1 + int(np.searchsorted(cumulative_k, sampling.top_p * total * (1 - 1e-6)))
    cumulative_k = cumulative_k[:kept]
    # Each place has its own generator, so that a sequence which restarts on another replica gets the same tokens.
    number = np.random.Generator(np.random.Philox(key=[sampling.seed, place])).random()
    return int(np.searchsorted(cumulative_k, number * cumulative_k[-1], side="right"))


RUN = "run"
"""The name of the tensor with the result of `run_of` for each input."""
Ended = Literal["stop", "length"]
"""Why a sequence ended, in OpenAI's terms: a stop token or stop string, or its maximum length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step that generated a token."""

    token: int
    log_probability: float
    """The token's log-probability at temperature 1."""
    start: int
    """Number of characters of the answer before the token's text, or before the character that it is a part of."""
    text: str
    """The new final text. Empty while a character is incomplete, or while the text may begin a stop string."""
    ended: Ended | None
    exit: int
    """The block after which the token left."""
    likeliest_2k: npt.NDArray[np.floating] = field(compare=False, repr=False)
    """The most probable tokens of the answer from which the token was sampled: see `TokenTask`."""


class TokenSequence(SequenceProgress):
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
        """Creates a sequence. Call `begin` before its first step.

        `text`: decodes the tokens; None: they are not decoded. `max_length`: the model's limit for prompt and answer.
        `ends`: end-of-sequence tokens. `chunk`: the most prompt tokens of a step. `start`: for an encoder-decoder, the
        first token of answers; the prompt is then its source, which is never divided. Raises InputError for an empty
        prompt, and ContextLengthError for one that is too long.
        """
        if not prompt:
            raise InputError("the prompt is empty; at least one token is needed")
        if max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, not {max_tokens}")
        if len(prompt) + (start is not None) >= max_length:
            limit = f"this model's maximum context length is {max_length} tokens, with the answer"
            raise ContextLengthError(f"the prompt is too long: it has {len(prompt)} tokens, and {limit}")
        self.tokens = [*prompt] if start is None else [*prompt, start]
        num_prompt = len(self.tokens)
        undivided = 0 if start is None else num_prompt
        super().__init__(num_prompt, min(num_prompt + max_tokens, max_length), chunk, undivided)
        self.ended: Ended | None = None
        self._text = text
        self._ends = frozenset(ends)
        self._sampling = sampling

    def step(self) -> Encoded:
        """Returns the next input of the decoder."""
        assert self.ended is None
        new = self.tokens[self.seen : self.until]
        return step_of(new, self.number, self.seen, self.limit, self.num_prompt)

    def answered(self, answer_2k: npt.NDArray[np.floating], exit_block: int) -> StepResult | None:
        """Handles the answer to the last step. Returns None if it was a part of the prompt before the last."""
        if not self.advance():
            return None
        index = choose(answer_2k[1], self._sampling, len(self.tokens))
        token, log_probability = int(answer_2k[0, index]), float(answer_2k[1, index])
        self.tokens.append(token)
        self.ended = "stop" if token in self._ends else "length" if self.is_whole else None
        start, text = 0, ""
        if self._text is not None:
            start = self._text.num_decoded
            text = "" if token in self._ends else self._text.push(token)
            self.ended = "stop" if self._text.stopped else self.ended
            text += "" if self.ended is None else self._text.held
        return StepResult(
            token=token,
            log_probability=log_probability,
            start=start,
            text=text,
            ended=self.ended,
            exit=exit_block,
            likeliest_2k=answer_2k[:, :MAX_TOP].copy(),  # a view would keep the answers of a batch
        )

    def cut(self) -> str:
        """Returns the text that was held back, if the sequence ends before its limit."""
        return "" if self._text is None else self._text.held


def step_of(tokens: Sequence[int], sequence: int, seen: int, limit: int, prompt: int) -> Encoded:
    """Returns the input for a step of a sequence. `seen`: the tokens before it; for the others see `run_of`."""
    run = np.array([run_of(sequence, seen, limit, prompt)], dtype=np.int32)
    return Encoded(len(tokens), (np.array(tokens, dtype=np.int32), run))


def run_of(sequence: int, start: int, limit: int, prompt: int) -> list[int]:
    """Returns the row of the tensor `run` for an input of a sequence.

    It holds the sequence's number as two halves (0: no sequence, at most 2**62 - 1), the number of its earlier tokens,
    the most tokens that it may have, and the length of its prompt. The prompt of an encoder-decoder is its source and
    the first token of answers.
    """
    return [sequence >> HALF_BITS, sequence & (1 << HALF_BITS) - 1, start, limit, prompt]


def sequence_of(high: int, low: int) -> int:
    """Returns the sequence's number from the two halves that `run_of` makes."""
    return high << HALF_BITS | low


HALF_BITS = 31
