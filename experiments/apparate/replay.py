"""Recorded inputs served batch by batch, while something watches what was seen and sets ramps and thresholds.

Every input runs on to the end of the model (`stay`), so it is seen at every active ramp and by the full model. A share
of the batches are probes, which run the inactive ramps too. What is set holds from the next batch on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experiments.apparate.one_time import answered
from experiments.apparate.times import Answered
from experiments.tuned_replay import observed
from optimizer.live.exit_times import ExitTimes
from profiles.records import ExitRecords
from profiles.stream import Observations

BATCH = 16
"""Inputs between two looks: Apparate's window (section 3.2)."""


class Controller(Protocol):
    """What watches and sets."""

    @property
    def thresholds(self) -> Mapping[int, float]:
        """Of the ramps that are active now, and of no others."""
        ...

    def told(self, seen: Observations) -> None:
        """Inputs that were answered under `thresholds`, in their order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Nobody watches."""

    thresholds: Mapping[int, float]

    def told(self, seen: Observations) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What became of a stream."""

    answered: Answered
    settings: tuple[Mapping[int, float], ...]
    """The thresholds of every batch."""

    @property
    def changes(self) -> int:
        """How often a batch was served otherwise than the one before it."""
        return sum(one != other for one, other in zip(self.settings, self.settings[1:], strict=False))

    @property
    def mean_ramps(self) -> float:
        """Active ramps of the mean batch."""
        return float(np.mean([len(setting) for setting in self.settings]))


def replay(
    records: ExitRecords, controller: Controller, times: ExitTimes, *, probe_share: float = 0.0, seed: int = 0
) -> Replay:
    """Serve a stream; equal seeds probe the same batches."""
    rng = np.random.default_rng(seed)
    parts, settings = [], []
    for first in range(0, len(records), BATCH):
        rows_N = np.arange(first, min(first + BATCH, len(records)))
        batch, probe = records.subset(rows_N), bool(rng.random() < probe_share)
        thresholds = dict(controller.thresholds)
        parts.append(answered(batch, thresholds, times, evaluated=records.ramps if probe else None))
        settings.append(thresholds)
        controller.told(observed(batch, thresholds, np.full(len(batch), probe), stay=True, first=first))
    return Replay(answered=Answered.join(parts), settings=tuple(settings))
