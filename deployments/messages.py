"""What ingress and stages say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from earlyexit.errors import OfframpError
from earlyexit.wire import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCall:
    """A batch of inputs, or of survivors, for a stage."""

    piece: Any
    """A WirePiece, or the reference to one in the object store."""
    remaining_s: tuple[float, ...]
    """Per input, the seconds left until its deadline; durations, because machines do not share a clock."""
    reserve_s: float
    """What the stages after this one are expected to take."""
    epoch: int
    """The plan that the sender follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where an input's time in a stage went."""

    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingOn:
    """Survivors for the next stage."""

    sample_ids: tuple[str, ...]
    next_block: int
    num_tokens: int
    piece: Any
    """A WirePiece, or the reference to one in the object store."""
    timings: tuple[Timing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One part of a stage's streamed reply; every input of the call is in exactly one part."""

    answers: tuple[tuple[Answer, Timing], ...] = ()
    going_on: GoingOn | None = None
    lost: tuple[tuple[str, OfframpError], ...] = ()

    @property
    def num_inputs(self) -> int:
        """Inputs that this part settles."""
        survivors = 0 if self.going_on is None else len(self.going_on.sample_ids)
        return len(self.answers) + survivors + len(self.lost)
