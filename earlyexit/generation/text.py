"""Tokens to text as they come: never half a character, never a part of what ends the text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of a sequence's new tokens, in pieces that only grow.

    What might still become a stop string is held back until it cannot; the text ends before the first one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        """`prompt`: what came before, which decides how the first token is spelt."""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string has come; nothing is given after it."""

    def push(self, token: int) -> str:
        """What is certain by now and was not before; may be nothing."""
        if self.stopped:
            return ""
        self._held += self._stream.step(self._tokenizer, token) or ""
        found = min((at for at in map(self._held.find, self._stops) if at >= 0), default=None)
        if found is not None:
            self.stopped = True
            given, self._held = self._held[:found], ""
            return given
        return self._let_go(len(self._held) - self._might_stop())

    def finish(self) -> str:
        """What was held back, once no token comes any more."""
        return self._let_go(len(self._held))

    def _let_go(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        return given

    def _might_stop(self) -> int:
        """Of the characters held, how many at the end may be the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        ends = (self._held[-length:] for length in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
