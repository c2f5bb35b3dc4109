"""Whose inputs the parts of a reply name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from deployments.ingress.core.flights import Flight
from deployments.ingress.dispatch.departure import LiveFlight, Query
from deployments.messages import Timing
from earlyexit.signature import Encoded
from earlyexit.wire import Answer

NOBODY: LiveFlight = Flight(
    Query(key="", encoded=Encoded(0, ()), serial=0, request_id="", settle=lambda *_: None), 0.0, 0.0, 0
)
"""Whom a reply names that its call does not have."""


class DispatchMetrics(Protocol):
    """What is counted of inputs and calls; `IngressMetrics` does. None of it is told of no inputs at all."""

    def answers(self, exits: list[int]) -> None: ...

    def dropped(self, reason: str, num_inputs: int) -> None: ...

    def hop(self, slot: str, seconds: float) -> None: ...

    def retried(self, slot: str, num_inputs: int) -> None: ...


def by_block(
    flights: Mapping[str, LiveFlight], answers: Sequence[tuple[Answer, Timing]]
) -> Iterable[tuple[int, list[LiveFlight], list[Answer]]]:
    """Answers by the block after which they left; nearly always one."""
    found: defaultdict[int, tuple[list[LiveFlight], list[Answer]]] = defaultdict(lambda: ([], []))
    for answer, _ in answers:
        mine, said = found[answer.exit]
        mine.append(flights.get(answer.sample_id, NOBODY))
        said.append(answer)
    for block, (mine, said) in found.items():
        yield block, mine, said


def requests_of(flights: Sequence[LiveFlight]) -> str:
    """The first few requests of the inputs, for the log."""
    found = sorted({flight.input.request_id for flight in flights})
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
