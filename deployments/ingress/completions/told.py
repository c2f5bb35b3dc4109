"""What a sequence says, gathered into what its caller is told: never a chunk without text, never a token left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deployments.ingress.generation.stream import CutShortError
from earlyexit.generation.sequence import Ended, Said


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
