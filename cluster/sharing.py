"""Two batches on one emulated accelerator: how fast each is while the other runs beside it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cluster.pace import Pace


@dataclass(slots=True, kw_only=True)
class _Step:
    """Consecutive blocks that one batch runs now."""

    pace: Pace
    first: int
    end: int
    ramps: Collection[int]
    inside: float
    """In inputs as the profile has them."""
    left_s: float
    """Of its seconds, were it alone."""


class Sharing:
    """What batches that run at once have left to do.

    PAME says only that "the co-location may slow down the current batch" (section 4.2). Here each batch is as slow as
    the latency profile has its blocks at the inputs of both together: where the profile is flat two small batches cost
    nothing more than one, where it is steep they share the accelerator by their sizes, and never do they do better
    than one batch of all of them would. Real devices may: two streams read the weights twice, but hide each other's
    gaps between kernels.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        """Until when all progress is counted."""
        self._steps: dict[int, _Step] = {}
        """By lane."""

    def __len__(self) -> int:
        return len(self._steps)

    def step(
        self, lane: int, pace: Pace, first: int, end: int, ramps: Collection[int], *, inside: float, at_s: float
    ) -> None:
        """Have a lane's batch begin blocks first to end - 1, with these active ramps, at `at_s`.

        Where that is before what is counted already, the batch has done as much since as it does now in that time.
        """
        self.advance(at_s)
        alone_s = pace.seconds_of_any(first, end, inside, ramps)
        step = _Step(pace=pace, first=first, end=end, ramps=ramps, inside=inside, left_s=alone_s)
        self._steps[lane] = step
        if at_s < self.now_s:
            step.left_s = max(0.0, alone_s - (self.now_s - at_s) * self._speed(step))

    def shrink(self, lane: int, inside: float, at_s: float) -> None:
        """A lane's step is over, at `at_s`; so many inputs are still inside, for another."""
        self.advance(at_s)
        self._steps[lane].inside, self._steps[lane].left_s = inside, 0.0

    def leave(self, lane: int, at_s: float) -> None:
        """A lane's batch is over, if one was there."""
        self.advance(at_s)
        self._steps.pop(lane, None)

    def due_s(self, lane: int) -> float:
        """When a lane's step is over, if nothing changes until then."""
        step = self._steps[lane]
        return self.now_s + step.left_s / self._speed(step)

    def advance(self, at_s: float) -> None:
        """Count what was done until then; what lies before `now_s` is counted."""
        if at_s > self.now_s:
            for step in self._steps.values():
                step.left_s = max(0.0, step.left_s - (at_s - self.now_s) * self._speed(step))
            self.now_s = at_s

    def _speed(self, step: _Step) -> float:
        """Of a step, 1 while it is alone."""
        together = sum(each.inside for each in self._steps.values())
        if together == step.inside or not step.left_s:
            return 1.0
        alone_s = step.pace.seconds_of_any(step.first, step.end, step.inside, step.ramps)
        return alone_s / max(alone_s, step.pace.seconds_of_any(step.first, step.end, together, step.ramps))
