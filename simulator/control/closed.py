"""A closed loop: so many inputs are always under way, and who has an outcome is followed by the next."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np

from earlyexit.errors import DataError
from simulator.control.faults import Mix
from simulator.decisions import IntArray
from simulator.outcome import Outcome
from simulator.service import SimulatedService

ARRIVES = 4
"""Priority of the next input: new inputs come after everything else of the same moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A load that needs no rate."""

    in_flight: int
    """Inputs."""
    mixes: tuple[Mix, ...]
    """As many rows in each."""
    pause_s: float = 0.1
    """Whoever got no answer comes again after so long; at once, a service that refuses would have no end of it."""

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise DataError(f"at least one input must be in flight, not {self.in_flight}")
        if len({len(mix.rows_N) for mix in self.mixes}) != 1:
            raise DataError("all mixes of a closed loop have as many rows")

    @property
    def rows_N(self) -> IntArray:
        """What the scenario of this load takes."""
        return np.concatenate([mix.rows_N for mix in self.mixes])


class ClosedSender:
    """Sends a closed load. Inputs of one mix are numbered so that their number is that of a row of it."""

    def __init__(self, service: SimulatedService, load: Closed) -> None:
        assert service.scenario.inputs_per_request == 1, "requests of a closed loop have one input"
        self._service = service
        self._events = service.events
        self._load = load
        self._turns = [0] * len(load.mixes)
        self._due = 0
        """To be sent at this moment."""
        self.numbers = array("q")
        """Those sent so far, in their order."""

    def begin(self) -> None:
        """Send the first."""
        self._events.at(0.0, ARRIVES, self._send, self._load.in_flight)

    def settled(self, number: int, answered: bool) -> None:
        """Inputs have their outcome; those who follow them at one moment are sent together."""
        if not answered:
            self._events.at(self._events.time_s + self._load.pause_s, ARRIVES, self._send, number)
        else:
            if not self._due:
                self._events.at(self._events.time_s, ARRIVES, self._send_due)
            self._due += number

    def compact(self, outcome: Outcome) -> Outcome:
        """The outcome of the inputs that were sent, in their order."""
        numbers_N = np.frombuffer(self.numbers, dtype=np.int64)
        return replace(
            outcome,
            arrived_s_R=np.frombuffer(self._service.ledger.arrived_s)[numbers_N],
            latency_s_N=outcome.latency_s_N[numbers_N],
            exit_N=outcome.exit_N[numbers_N],
            drop_N=outcome.drop_N[numbers_N],
        )

    def _send_due(self, _: None) -> None:
        number, self._due = self._due, 0
        self._send(number)

    def _send(self, number: int) -> None:
        now_s = self._events.time_s
        if now_s >= self._service.scenario.duration_s:
            return
        sent = [self._next_number(now_s) for _ in range(number)]
        ledger, ingresses = self._service.ledger, self._service.ingresses
        for each in sent:
            if each >= len(ledger.latency_s):
                ledger.extend(np.full(self._service.cycle, np.nan))
            ledger.arrived_s[each] = now_s
        first = len(self.numbers)
        self.numbers.extend(sent)
        for turn, ingress in enumerate(ingresses):
            ingress.arrive_together(sent[(turn - first) % len(ingresses) :: len(ingresses)])

    def _next_number(self, now_s: float) -> int:
        mixes = self._load.mixes
        index = max(index for index, mix in enumerate(mixes) if mix.at_s <= now_s)
        turn, self._turns[index] = self._turns[index], self._turns[index] + 1
        rounds, place = divmod(turn, len(mixes[index].rows_N))
        return rounds * self._service.cycle + index * len(mixes[index].rows_N) + place
