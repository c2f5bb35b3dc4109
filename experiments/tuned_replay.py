"""A recorded stream replayed to a tuner: what it would have answered, input by input, with thresholds tuned on the way.

No service and no clock: inputs come in batches, all of a batch are answered under the same thresholds, and what the
tuner makes of a batch is in force `delay` inputs later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from optimizer.live.tuning.base import Tuned, Tuner
from profiles.records import ExitRecords
from profiles.scores import BoolArray, FloatArray
from profiles.stream import Observations, shape_of


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What became of the stream's inputs (N)."""

    exits_N: npt.NDArray[np.int64]
    losses_N: FloatArray
    """Of the answers given, against the full model's."""
    changes: list[Tuned] = field(default_factory=list)
    """Times are positions in the stream."""

    @property
    def agreement(self) -> float:
        """1 - mean loss of all answers."""
        return 1 - float(self.losses_N.mean())


def replay(
    records: ExitRecords,
    tuner: Tuner | None,
    thresholds: Mapping[int, float],
    *,
    batch: int = 16,
    delay: int = 0,
    probe_share: float | None = None,
    seed: int = 0,
) -> Replayed:
    """Of records in order of arrival; the ramps of `thresholds` are active, and these in force at first.

    `probe_share`: of inputs that leave for good; None where all stay after their answer. Without a tuner the thresholds
    are those at first to the end.
    """
    probe_N = np.random.default_rng(seed).random(len(records)) < (probe_share or 0.0)
    stay = probe_share is None
    parts: list[tuple[npt.NDArray[np.int64], FloatArray]] = []
    changes: list[Tuned] = []
    coming: list[tuple[int, Tuned]] = []
    if tuner is not None:
        tuner.follow(thresholds, 0.0)
    for first in range(0, len(records), batch):
        while coming and coming[0][0] <= first:
            thresholds = coming.pop(0)[1].thresholds
            if tuner is not None:
                tuner.follow(thresholds, float(first))
        rows = np.arange(first, min(first + batch, len(records)))
        part = records.subset(rows)
        outcome = part.outcome(thresholds)
        parts.append((outcome.exits_N, outcome.losses_N))
        found = (
            None if tuner is None else tuner.observe(observed(part, thresholds, probe_N[rows], stay=stay, first=first))
        )
        if found is not None:
            changes.append(found)
            coming.append((int(rows[-1]) + 1 + delay, found))
    exits, losses = zip(*parts, strict=True)
    return Replayed(exits_N=np.concatenate(exits), losses_N=np.concatenate(losses), changes=changes)


def observed(
    records: ExitRecords, thresholds: Mapping[int, float], probe_N: BoolArray, *, stay: bool, first: int = 0
) -> Observations:
    """What a service with these ramps and thresholds sees of some inputs; times are positions, counted from `first`."""
    exits_N = records.outcome(thresholds).exits_N
    active_NR = np.tile([ramp in thresholds for ramp in records.ramps], (len(records), 1))
    seen_NR = (active_NR & ((np.array(records.ramps) <= exits_N[:, None]) | stay)) | probe_N[:, None]
    end_N1 = ((exits_N == records.num_blocks - 1) | stay | probe_N)[:, None]
    return Observations(
        shape=shape_of(records),
        times_s_N=first + np.arange(len(records), dtype=np.float64),
        probe_N=probe_N,
        stayed_N=np.full(len(records), stay),
        active_NR=active_NR,
        exits_N=exits_N.astype(np.int16),
        scores_NR=np.where(seen_NR, records.scores_NR, np.nan).astype(np.float32),
        losses_NR=np.where(seen_NR & end_N1, records.losses_NR, np.nan).astype(np.float32),
    )
