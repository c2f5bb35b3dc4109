"""Where one exit should be, by how many of each batch would move on: how PAME chooses a first exit (6.2 to 6.4).

Online the same is asked of the last inputs (section 7.6): an exit behind which too many inputs move on makes batches
slower than the model without exits, and goes to a later place. Later exits that are there already stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optimizer.pame.on_batches import Batching
from optimizer.pame.precision import normalised
from optimizer.pame.search import SearchOptions
from optimizer.pame.thresholds import GRIDS
from profiles.records import ExitRecords

TAIL = SearchOptions().slower
"""The share of batches that may be slower than the model without exits, as the search has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An exit that could be, and what it would have done."""

    ramp: int
    thresholds: Mapping[int, float]
    """Its own, and those of later exits that stay."""
    violated: float
    """Share of the batches slower than without exits; of several windows, in the worst."""
    precision: float
    """Of the model without exits: 1 where nothing is lost; of several windows, in the worst."""
    mean_s: float
    """Mean answer time."""


def best_place(
    windows: Sequence[ExitRecords],
    batching: Batching,
    precision: float,
    ramps: Sequence[int],
    *,
    behind: Mapping[int, float] | None = None,
    tail: float = TAIL,
) -> Place | None:
    """The ramp with the least mean answer time of those whose tail is bearable in all windows; None where none is.

    Windows are of one length, at least a batch, in order of arrival.

    `behind`: exits that stay where they are behind it, with their thresholds.
    """
    found = (place_at(windows, batching, precision, ramp, behind or {}) for ramp in ramps)
    bearable = [place for place in found if place is not None and place.violated <= tail]
    return min(bearable, key=lambda place: (place.mean_s, place.ramp), default=None)


def place_at(
    windows: Sequence[ExitRecords], batching: Batching, precision: float, ramp: int, behind: Mapping[int, float]
) -> Place | None:
    """With the boldest threshold that keeps the precision in all windows (6.2); None without one."""
    for threshold in GRIDS[windows[0].score]:
        thresholds = {ramp: threshold, **{later: value for later, value in behind.items() if later > ramp}}
        outcomes = [window.outcome(thresholds) for window in windows]
        worst = min(map(normalised, outcomes))
        if worst >= precision:
            times = [batching.times(outcome.exits_N, thresholds) for outcome in outcomes]
            return Place(
                ramp=ramp,
                thresholds=thresholds,
                violated=max(each.slower for each in times),
                precision=worst,
                mean_s=sum(each.mean_s for each in times) / len(times),
            )
    return None
