"""What an ingress tells the controller: the live counts, and the live book of probes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.ingress.core.calls import HANG_S
from deployments.ingress.core.counts import IngressCounts
from deployments.ingress.core.probes import ProbeBook, can_look
from deployments.reports import IngressReport
from earlyexit.wire import Seen
from profiles.records import ExitRecords, differ
from profiles.stream import shape_of
from simulator.call import Input
from simulator.decisions import IntArray
from simulator.ledger import DROPS

if TYPE_CHECKING:
    from simulator.ingress import Ingress

Settled = Callable[[int, bool], None]
"""Is told how many inputs have their outcome, and whether that is an answer."""


def ignore_settled(number: int, answered: bool) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing:
    """Which calls are probes, and what exits say of their inputs."""

    records: ExitRecords
    """What every exit says of every row of the decisions; these must follow from it."""
    share: float
    """Of first calls."""
    rng: random.Random


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A probe, as the book wants to know it."""

    sample_id: str
    arrived_s: float
    deadline_s: float


class Watching:
    """One ingress's; does what `deployments.ingress.core.outcomes.Outcomes` and the dispatcher's part in probes do."""

    def __init__(self, ingress: Ingress, probing: Probing, settled: Settled = ignore_settled) -> None:
        scenario = ingress.service.scenario
        records = probing.records
        self._ingress = ingress
        self._ledger = ingress.service.ledger
        self._events = ingress.service.events
        self._rows_N: IntArray = scenario.rows_N
        self._per_request = scenario.inputs_per_request
        self._records = records
        self._probing = probing
        self._settled = settled
        self._shape = shape_of(records)
        self._answers_NE = records.answers()
        self._book = ProbeBook(self._shape, differ, outlive_s=HANG_S)
        self.counts = IngressCounts(scenario.slo_s)

    def arrive(self, number: int) -> None:
        """Inputs came, those that are refused too."""
        self.counts.arrived += number

    def answer(self, block: int, latency_s: float, *, by_present_plan: bool) -> None:
        """An input has its answer."""
        self.counts.answer(block, latency_s, by_present_plan=by_present_plan)
        self._settled(1, True)

    def drop(self, reason: int, number: int) -> None:
        """Inputs have none, and will not have one; `reason` is a position in DROPS."""
        if number:
            self.counts.drops[DROPS[reason]] += number
            self._settled(number, False)

    def begin_plan(self) -> None:
        """Another plan is in force."""
        self.counts.begin_plan()

    def begin_probes(self, members: Sequence[Input]) -> bool:
        """Whether the inputs of a first call are probes; the live rule, `Dispatcher._is_probe`."""
        probing, itinerary = self._probing, self._ingress.itinerary
        if not probing.share or probing.rng.random() >= probing.share:
            return False
        if not can_look(itinerary.placed.plan.policy, self._shape.score):
            return False
        return self._book.begin([self._begun(each) for each in members], itinerary.ramps, self._events.time_s)

    def answer_probes(self, members: Sequence[Input], block: int) -> None:
        """Probes are answered, wherever they still have to go."""
        active = self._ingress.itinerary.ramps
        for member in members:
            self._book.answered(_sample_id(member), block, active)

    def end_probes(self, members: Sequence[Input], block: int) -> None:
        """Probes are at the model's end; those that were not answered on the way are answered there."""
        self.answer_probes(members, block)
        for member in members:
            self._book.see(self._seen(member))

    def forget_probes(self, members: Sequence[Input]) -> None:
        """Probes do not get to the end."""
        self._book.forget([_sample_id(member) for member in members])

    def report(self) -> IngressReport:
        """For the controller; probes are handed over with it."""
        ingress, counts = self._ingress, self.counts
        return IngressReport(
            name=f"ingress#{ingress.index}",
            epoch=ingress.itinerary.epoch,
            suspended=ingress.suspended,
            oldest_epoch=ingress.oldest_epoch,
            at_s=self._events.time_s,
            unanswered=ingress.num_unanswered,
            waiting=len(ingress.waiting),
            arrived=counts.arrived,
            answered=counts.answered,
            in_slo=counts.in_slo,
            exits=dict(counts.exits),
            drops=dict(counts.drops),
            latencies=dict(counts.latencies),
            probes=self._book.hand_over(),
        )

    def _begun(self, member: Input) -> _Begun:
        arrived_s = self._ledger.arrived_s[member.payload // self._per_request]
        return _Begun(sample_id=_sample_id(member), arrived_s=arrived_s, deadline_s=member.deadline_s)

    def _seen(self, member: Input) -> Iterator[Seen]:
        """What every exit says of an input, the full model last."""
        records, sample_id = self._records, _sample_id(member)
        row = self._rows_N[member.payload % len(self._rows_N)]
        for column, ramp in enumerate(records.ramps):
            score, label = float(records.scores_NR[row, column]), int(self._answers_NE[row, column])
            yield Seen(sample_id=sample_id, block=ramp, score=score, value=label)
        label = int(self._answers_NE[row, -1])
        yield Seen(sample_id=sample_id, block=records.num_blocks - 1, score=float("nan"), value=label)


def _sample_id(member: Input) -> str:
    return str(member.payload)
