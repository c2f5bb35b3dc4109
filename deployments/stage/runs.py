"""Of a traced input the batches that it was in, and its time in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.messages import SplitRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A batch of an input, and the input's times as it began."""

    first: int
    end: int
    batch: int
    target: int
    queue_s: float
    compute_s: float


def split_runs(begun: Sequence[Begun], compute_s: float) -> tuple[SplitRun, ...]:
    """Every batch's own share of an input's times; `compute_s`: in all, as the last batch let it go."""
    if not begun:
        return ()
    waited_s = [0.0, *(each.queue_s for each in begun[:-1])]
    until_s = [*(each.compute_s for each in begun[1:]), compute_s]
    return tuple(
        SplitRun(
            first=each.first,
            end=each.end,
            batch=each.batch,
            target=each.target,
            queue_s=each.queue_s - before_s,
            compute_s=after_s - each.compute_s,
        )
        for each, before_s, after_s in zip(begun, waited_s, until_s, strict=True)
    )
