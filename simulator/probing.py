"""Which calls are probes, and what exits say of their inputs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from deployments.ingress.core.flights import Flight
from earlyexit.wire import Seen
from profiles.records import ExitRecords, ValueArray
from profiles.scores import FloatArray
from profiles.stream import shape_of
from simulator.decisions import IntArray


class Probing:
    """One ingress's."""

    def __init__(self, records: ExitRecords, rows_N: IntArray, share: float, rng: random.Random) -> None:
        """`records`: what every exit says of every row of the decisions; `share`: of first calls."""
        self.share = share
        self.rng = rng
        self.shape = shape_of(records)
        self._records = records
        self._rows_N = rows_N

    def seen(self, flights: Sequence[Flight[int]]) -> Iterator[tuple[Flight[int], Seen]]:
        """How sure every exit is of inputs; the answer is what it costs. The full model is last."""
        records = self._records
        for flight in flights:
            row = self._rows_N[flight.input % len(self._rows_N)]
            for column, ramp in enumerate(records.ramps):
                score, loss = float(records.scores_NR[row, column]), float(records.losses_NR[row, column])
                yield flight, Seen(sample_id="", block=ramp, score=score, value=loss)
            yield flight, Seen(sample_id="", block=records.num_blocks - 1, score=float("nan"), value=0.0)


def recorded_loss(early: ValueArray, full: ValueArray) -> FloatArray:
    """Of answers that are their own losses."""
    return np.asarray(early - full, dtype=np.float64)
