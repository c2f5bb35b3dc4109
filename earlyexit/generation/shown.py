"""How much of a sequence a decoder was shown, and what comes next, in numbers of tokens; live and simulated alike."""

from __future__ import annotations


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
