"""A recorded stream served batch by batch, while something watches what was seen and sets ramps and thresholds.

No service and no clock: inputs come in batches, all of a batch are answered under the same thresholds, and what is set
after a batch holds from the next one on, or some inputs later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from optimizer.live.tuning.base import Tuned, Tuner
from profiles.records import ExitRecords
from profiles.scores import BoolArray, FloatArray
from profiles.stream import Observations, shape_of

BATCH = 16
"""Inputs between two looks: Apparate's window (section 3.2)."""


class Controller(Protocol):
    """What watches and sets."""

    @property
    def thresholds(self) -> Mapping[int, float]:
        """Of the ramps that are active now, and of no others."""
        ...

    def told(self, seen: Observations) -> None:
        """Inputs that were answered under `thresholds`, in their order; their times are positions in the stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Nobody watches."""

    thresholds: Mapping[int, float]

    def told(self, seen: Observations) -> None: ...


class TunedThresholds:
    """Ramps that stay as they are, and a tuner that sets their thresholds."""

    def __init__(self, tuner: Tuner, thresholds: Mapping[int, float], *, delay: int = 0) -> None:
        """`thresholds`: of the active ramps at the beginning. `delay`: inputs until what the tuner says is in force."""
        self.thresholds = thresholds
        self.changes: list[Tuned] = []
        """What the tuner said; times are positions in the stream."""
        self._tuner = tuner
        self._delay = delay
        self._coming: list[tuple[float, Tuned]] = []
        tuner.follow(thresholds, 0.0)

    @property
    def alarms(self) -> int:
        """How often the tuner raised one."""
        return sum(each.why == "alarm" for each in self.changes)

    def told(self, seen: Observations) -> None:
        """What the tuner says holds from the next batch on that begins after the delay."""
        found = self._tuner.observe(seen)
        if found is not None:
            self.changes.append(found)
            self._coming.append((after(seen) + self._delay, found))
        while self._coming and self._coming[0][0] <= after(seen):
            self.set(self._coming.pop(0)[1].thresholds, after(seen))

    def set(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """From a time on."""
        self.thresholds = thresholds
        self._tuner.follow(thresholds, since_s)


def after(seen: Observations) -> float:
    """A time between these inputs and the next."""
    return float(seen.times_s_N[-1]) + 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What became of the stream's inputs (N)."""

    exits_N: npt.NDArray[np.int64]
    losses_N: FloatArray
    """Of the answers given, against the full model's."""
    settings: Sequence[Mapping[int, float]]
    """The thresholds of every batch."""

    @property
    def agreement(self) -> float:
        """1 - mean loss of all answers."""
        return 1 - float(self.losses_N.mean())


def replay(
    records: ExitRecords,
    controller: Controller,
    *,
    batch: int = BATCH,
    probe_N: BoolArray | None = None,
    stay: bool = True,
) -> Replayed:
    """Of records in order of arrival; the ramps of the controller's thresholds are active.

    `stay`: whether all inputs run on to the end of the model after their answer, so that they are seen at every active
    ramp. Of those that leave for good only probes (`probe_N`) are; probes see the inactive ramps too.
    """
    if probe_N is None:
        probe_N = np.zeros(len(records), dtype=bool)
    parts: list[tuple[npt.NDArray[np.int64], FloatArray]] = []
    settings = []
    for first in range(0, len(records), batch):
        rows_N = np.arange(first, min(first + batch, len(records)))
        part, thresholds = records.subset(rows_N), dict(controller.thresholds)
        outcome = part.outcome(thresholds)
        parts.append((outcome.exits_N, outcome.losses_N))
        settings.append(thresholds)
        controller.told(observed(part, thresholds, probe_N[rows_N], stay=stay, first=first))
    exits, losses = zip(*parts, strict=True)
    return Replayed(exits_N=np.concatenate(exits), losses_N=np.concatenate(losses), settings=tuple(settings))


def observed(
    records: ExitRecords, thresholds: Mapping[int, float], probe_N: BoolArray, *, stay: bool, first: int = 0
) -> Observations:
    """What a service with these ramps and thresholds sees of some inputs; times are positions, counted from `first`."""
    exits_N = records.outcome(thresholds).exits_N
    active_NR = np.tile([ramp in thresholds for ramp in records.ramps], (len(records), 1))
    seen_NR = (active_NR & ((np.array(records.ramps) <= exits_N[:, None]) | stay)) | probe_N[:, None]
    end_N1 = ((exits_N == records.num_blocks - 1) | stay | probe_N)[:, None]
    truth_NE = records.true_losses_NE
    return Observations(
        shape=shape_of(records),
        times_s_N=first + np.arange(len(records), dtype=np.float64),
        probe_N=probe_N,
        stayed_N=np.full(len(records), stay),
        active_NR=active_NR,
        exits_N=exits_N.astype(np.int16),
        scores_NR=np.where(seen_NR, records.scores_NR, np.nan).astype(np.float32),
        losses_NR=np.where(seen_NR & end_N1, records.losses_NR, np.nan).astype(np.float32),
        true_losses_NE=None
        if truth_NE is None
        else np.where(np.column_stack([seen_NR, end_N1]), truth_NE, np.nan).astype(np.float32),
    )
