"""Tokens to text as they arrive: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HALF = "\ufffd"
"""The replacement for an incomplete character."""


class Unread:
    """Stands in for the text of a sequence that is not decoded."""

    stopped = False

    def push(self, token: int) -> str:
        """Returns no text."""
        return ""

    def finish(self) -> str:
        """Returns no text."""
        return ""


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
        self._held += self._new(self._stream.step(self._tokenizer, token) or "")
        found = min((at for at in map(self._held.find, self._stops) if at >= 0), default=None)
        if found is not None:
            self.stopped = True
            given, self._held = self._held[:found], ""
            return given
        return self._let_go(len(self._held) - self._might_stop())

    def finish(self) -> str:
        """Returns the text that was held back, after the last token."""
        return self._let_go(len(self._held))

    def _new(self, text: str) -> str:
        """Returns text without the repeated prompt."""
        if text and self._again:
            whole = self._again.rstrip(HALF)
            text = text.removeprefix(self._again if text.startswith(self._again) else whole)
            self._again = ""
        return text

    def _let_go(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        return given

    def _might_stop(self) -> int:
        """Returns how many held characters at the end may be the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        ends = (self._held[-length:] for length in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
