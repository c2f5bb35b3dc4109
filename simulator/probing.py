"""Which calls are probes, and what exits say of their inputs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from deployments.ingress.core.flights import Flight
from earlyexit.wire import Seen
from profiles.records import ExitRecords
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
        self._answers_NE = records.answers()
        self._rows_N = rows_N

    def seen(self, flights: Sequence[Flight[int]]) -> Iterator[tuple[Flight[int], Seen]]:
        """What every exit says of inputs, the full model last."""
        records = self._records
        for flight in flights:
            row = self._rows_N[flight.input % len(self._rows_N)]
            for column, ramp in enumerate(records.ramps):
                score, label = float(records.scores_NR[row, column]), int(self._answers_NE[row, column])
                yield flight, Seen(sample_id="", block=ramp, score=score, value=label)
            label = int(self._answers_NE[row, -1])
            yield flight, Seen(sample_id="", block=records.num_blocks - 1, score=float("nan"), value=label)
