from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from earlyexit.errors import PlanError

AfterAnswer = Literal["stop", "stay"]
"""What inputs do after their answer at a ramp: leave, so that batches shrink (E3), or run on to the model's end, so
that the full model's answer to every input is known (Apparate, section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive blocks with nothing to decide between them."""

    first: int
    end: int
    ramp: int | None
    """The active ramp at its end, `end - 1`; None without a decision there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The most that a batch may hold."""

    inputs: int
    tokens: int | None = None
    """None: any number of them."""

    def room_for(self, num_inputs: int, num_tokens: int, more_tokens: int) -> bool:
        """Whether a batch of so many inputs and tokens may take one more input, of `more_tokens`.

        An empty batch always may, so that an input larger than the budget runs alone.
        """
        if not num_inputs:
            return True
        return num_inputs < self.inputs and (self.tokens is None or num_tokens + more_tokens <= self.tokens)

    def tokens_when_full(self, mean_tokens: float, num_inputs: int = 0, num_tokens: int = 0) -> float:
        """Returns the expected tokens of a full batch with these inputs and others of `mean_tokens`.

        If one such input is larger than the budget, it is the batch.
        """
        expected = num_tokens + max(0, self.inputs - num_inputs) * mean_tokens
        return expected if self.tokens is None else min(expected, max(self.tokens, mean_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Consecutive blocks run as one batch, at one batch size.

    Answers leave at the active ramps inside; the other inputs go on at its end. Raises PlanError when the values
    contradict each other.
    """

    first: int
    """First block."""
    end: int
    """One past the last block."""
    batch: int
    """The batch size that the split is fused to, in inputs."""
    ramps: tuple[int, ...] = ()
    """Active ramps, ascending; ramp r sits after block r."""
    after_answer: AfterAnswer = "stop"
    overlap_below: int | None = None
    """While fewer than this many of a running batch's inputs remain inside, the device may run its next batch beside it
    (PAME section 4.2: the batch size threshold tau_b of parallel batch scheduling). None: never."""
    tokens: int | None = None
    """The most tokens in a batch; a larger input runs alone. None: only `batch` bounds it."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise PlanError(f"a split needs 0 <= first < end, not first {self.first} and end {self.end}")
        if self.batch < 1:
            raise PlanError(f"a split's batch must be at least 1, not {self.batch}")
        if self.tokens is not None and self.tokens < 1:
            raise PlanError(f"a split's tokens must be at least 1, not {self.tokens}; without them inputs alone count")
        if self.overlap_below is not None and self.overlap_below < 1:
            raise PlanError(f"overlap_below must be at least 1, not {self.overlap_below}; without it nothing overlaps")
        if list(self.ramps) != sorted(set(self.ramps)):
            raise PlanError(f"a split's ramps must ascend without repeats, not {list(self.ramps)}")
        for ramp in self.ramps:
            if not self.first <= ramp < self.end:
                raise PlanError(f"ramp {ramp} is outside its split, whose blocks are {self.first} to {self.end - 1}")

    @property
    def budget(self) -> Budget:
        """The budget of one batch."""
        return Budget(inputs=self.batch, tokens=self.tokens)

    @property
    def stays(self) -> bool:
        """Whether its inputs run on after they are answered."""
        return self.after_answer == "stay"

    def segments(self) -> tuple[Segment, ...]:
        """Returns the split cut at its active ramps: first to last, without gaps."""
        bounds = [*(ramp + 1 for ramp in self.ramps)]
        if not bounds or bounds[-1] != self.end:
            bounds.append(self.end)
        firsts = [self.first, *bounds[:-1]]
        return tuple(
            Segment(first=first, end=end, ramp=end - 1 if end - 1 in self.ramps else None)
            for first, end in zip(firsts, bounds, strict=True)
        )

    def rest(self, block: int) -> Split:
        """Returns the rest of the split from `block` on, which must be one of its blocks."""
        if block == self.first:
            return self
        return replace(self, first=block, ramps=tuple(ramp for ramp in self.ramps if ramp >= block))


def rest_of(block: int, splits: Sequence[Split], fallback: Sequence[Split] = ()) -> Split:
    """Returns the rest, from a block on, of the split that holds it; raises PlanError where none does."""
    for split in (*splits, *fallback):
        if split.first <= block < split.end:
            return split.rest(block)
    held = ", ".join(f"{split.first} to {split.end - 1}" for split in splits)
    raise PlanError(f"no split here holds block {block}; splits hold the blocks {held or 'of no model'}")
