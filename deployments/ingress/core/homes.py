"""Where the keys and values of a sequence are. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from earlyexit.errors import SequenceLostError

Layout = tuple[tuple[str, int, int], ...]
"""Of a plan: slot, first block, and the block after the last, leg by leg. Where two plans have the same, a replica that
kept keys and values under the one has them under the other, whatever its splits, ramps and batches are."""
LOST_RETRY_S: Final = 1.0
SERIAL_BITS: Final = 32
NAME_BITS: Final = 30
"""Together what a sequence's number may have: replicas know nothing of who counts."""


class Home:
    """Of one sequence from one beginning to its end, or until it is lost; its inputs share it.

    Whoever begins anew gets another: nothing of a late reply to the old one can be taken for the new.
    """

    __slots__ = ("avoids", "is_again", "is_over", "is_probe", "layout", "number", "replicas", "says")

    def __init__(
        self,
        number: int,
        *,
        is_again: bool = False,
        avoids: frozenset[str] = frozenset(),
        is_probe: bool | None = None,
    ) -> None:
        """`number`: one that no other sequence has at any replica; `is_probe`: of one that was let in before."""
        self.number = number
        self.is_probe = is_probe
        """Whether its sequence is a probe; None until its first input is sent, when that is drawn."""
        self.avoids = avoids
        """Replicas that had no room for its sequence, none of which it gets while there are others."""
        self.is_again = is_again
        """Whether its sequence was let in before, and lost."""
        self.layout: Layout | None = None
        """Of the plan by which its first input was sent; None before."""
        self.replicas: dict[str, str] = {}
        """By slot, the one that has what the blocks there made; whoever carries the first call there says which."""
        self.says = True
        """Whether the answer to its next step is a token: of the parts of a prompt, only to the last."""
        self.is_over = False
        """Whether nobody asks for it any more; a call that is under way may."""

    @property
    def newest(self) -> str | None:
        """The replica that was chosen last: who refuses its sequence for want of room."""
        return next(reversed(self.replicas.values()), None)


class Homes(NamedTuple):
    """Of a call's sequences at one slot: all have the same replica there, or none yet."""

    slot: str
    each: Sequence[Home]

    @property
    def replica(self) -> str | None:
        return self.each[0].replicas.get(self.slot)

    @property
    def avoids(self) -> frozenset[str]:
        """The same of all that have no replica yet."""
        return self.each[0].avoids

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple([home.number for home in self.each])

    def choose(self, replica: str) -> None:
        """They have their home there from now on."""
        for home in self.each:
            home.replicas[self.slot] = replica


class Sequential(Protocol):
    """An input that may be of a sequence."""

    @property
    def home(self) -> Home | None: ...


def homes_of(slot: str, inputs: Sequence[Sequential]) -> Homes:
    """Of a call to a slot, whose inputs are of sequences."""
    return Homes(slot, [each.home for each in inputs if each.home is not None])


def lost(why: str) -> SequenceLostError:
    """Of sequences that cannot go on where they were; whoever owns them begins them anew, and nobody else is told."""
    return SequenceLostError(f"the sequence is lost: {why}", retry_after_s=LOST_RETRY_S)


class SequenceNumbers:
    """Names the sequences of one ingress by numbers, none of which any other ingress, or the one before it, gives."""

    def __init__(self, rng: random.Random) -> None:
        self._next = rng.getrandbits(NAME_BITS) << SERIAL_BITS

    def new(self) -> int:
        """From 1 on: 0 is no sequence's."""
        self._next += 1
        return self._next
