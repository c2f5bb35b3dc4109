"""What is noted of a watched input, and what many of them come to. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from earlyexit.wire import Seen, stacked
from profiles.records import Loss
from profiles.stream import Observations, SmallArray, StreamShape

Watch = Literal["probe", "stay", "whole"]
"""What is to be seen of an input: what every ramp says, or the active ones alone; or what the full model says of the
whole text of a probe that lost words."""


@dataclass(slots=True)
class Entry:
    """One input, and what was seen of it so far."""

    arrived_s: float
    deadline_s: float
    watch: Watch
    stays: bool
    """Whether its plan has it stay; probes go on to the end under any."""
    active: frozenset[int]
    """The active ramps of the plan that it counts for."""
    exit: int | None = None
    said: dict[int, Seen] = field(default_factory=dict)
    """By block; the full model's is the last one's, unless there is a `beside`."""
    beside: Hashable | None = None
    """What goes on with all words, where this one lost some."""
    whole: Seen | None = None
    """What the full model says of that."""

    def has_ended(self, last: int) -> bool:
        """Whether it was answered, and nothing more is to be seen of it; `last`: the model's last block."""
        return self.exit is not None and last in self.said and (self.beside is None or self.whole is not None)

    def full(self, last: int) -> Seen:
        """What the full model said."""
        return self.said[last] if self.whole is None else self.whole


def observations_of(entries: Sequence[Entry], shape: StreamShape, loss: Loss) -> Observations:
    """Entries that were answered, and seen by every ramp that was to see them and by the full model."""
    size = len(entries), len(shape.ramps)
    columns = [(column, ramp) for column, ramp in enumerate(shape.ramps)]
    cells, scores, early = [], [], []
    for row, entry in enumerate(entries):
        said, is_probe = entry.said, entry.watch == "probe"
        for column, ramp in columns:
            if is_probe or ramp in entry.active:
                seen = said[ramp]
                cells.append(row * size[1] + column)
                scores.append(seen.score)
                early.append(seen.value)
    scores_NR = np.full(size, np.nan, dtype=np.float32)
    losses_NR = np.full(size, np.nan, dtype=np.float32)
    if cells:
        scores_NR.flat[cells] = scores
        full = stacked([entry.full(shape.num_blocks - 1).value for entry in entries])  # unpacked once, not per ramp
        losses_NR.flat[cells] = loss(stacked(early), full[np.array(cells) // size[1]])
    active = [ramp in entry.active for entry in entries for ramp in shape.ramps]
    return Observations(
        shape=shape,
        times_s_N=np.array([entry.arrived_s for entry in entries]),
        probe_N=np.array([entry.watch == "probe" for entry in entries], dtype=bool),
        stayed_N=np.array([entry.stays for entry in entries], dtype=bool),
        active_NR=np.array(active, dtype=bool).reshape(size),
        exits_N=np.array([entry.exit for entry in entries], dtype=np.int16),
        scores_NR=scores_NR,
        losses_NR=losses_NR,
        end_losses_N=_end_losses_N(entries, shape.num_blocks - 1, loss),
    )


def _end_losses_N(entries: Sequence[Entry], last: int, loss: Loss) -> SmallArray | None:
    """What the end says of texts that lost words, against what it says of them whole; NaN of others."""
    rows = [(row, entry.said[last].value, entry.whole.value) for row, entry in enumerate(entries) if entry.whole]
    if not rows:
        return None
    losses_N = np.full(len(entries), np.nan, dtype=np.float32)
    at, pruned, whole = zip(*rows, strict=True)
    losses_N[list(at)] = loss(stacked(pruned), stacked(whole))
    return losses_N


def losses_of_answers(seen: Observations) -> float:
    """The sum of what the inputs' answers cost against the full model's, all of which were seen."""
    left_NE = seen.exits_N[:, None] == np.array([*seen.shape.ramps, seen.shape.num_blocks - 1])
    return float(seen.losses_NE[left_NE].sum(dtype=np.float64))
