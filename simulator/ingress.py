"""An ingress: the live admission, itinerary and rules of when and whom to call, without HTTP and without asyncio."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from deployments.ingress.core.calls import HANG_S
from deployments.ingress.core.dispatcher import RETRY_PAUSE_S
from deployments.ingress.core.itinerary import Itinerary, Leg, lay_out
from deployments.ingress.core.routing import least_to_call
from earlyexit.engine import Member
from optimizer.placement import PlacedPlan
from simulator.call import Call, Input
from simulator.endings import Endings
from simulator.events import COMES
from simulator.ledger import ADMISSION, NOT_DROPPED, OVERLOADED, STAGE_UNAVAILABLE
from simulator.slot import Slot

if TYPE_CHECKING:
    from simulator.control.watching import Watching
    from simulator.service import Service

WAITS_S = 30.0
"""For an answer, where there is no SLO: `ServeSettings.default_timeout_s`."""


class Ingress:
    """Does what `deployments.ingress.core.dispatcher.Dispatcher` and `calls.Calls` do; one of several."""

    def __init__(self, index: int, service: Service, placed: PlacedPlan) -> None:
        scenario = service.scenario
        self.index = index
        self.service = service
        self.itinerary: Itinerary[Slot] = lay_out(placed, service.slots)
        self._first, self._last = self.itinerary.first, self.itinerary.legs[-1]
        self.waiting: deque[int] = deque()
        """Inputs that have not been sent, by their number."""
        self.suspended = False
        self.watching: Watching | None = None
        """Where a controller wants to know what happens here."""
        self._endings = Endings(self, service, placed)
        self._admission = self._endings.admission
        self._unheard: Counter[str] = Counter()
        self._least: float = 1
        """Inputs that must wait for a call to be made."""
        self._is_pumping = False
        self._ledger = service.ledger
        self._events = service.events
        self._slo_s = scenario.slo_s
        self._kept_s = 0.0 if math.isinf(scenario.slo_s) else scenario.problem.slo.slack * scenario.slo_s
        self._max_queued = math.inf if scenario.max_queued is None else scenario.max_queued
        self._calls_per_replica = scenario.calls_per_replica
        self._per_request = scenario.inputs_per_request
        self._entry_s, self._answer_s = scenario.entry_s, scenario.answer_s
        self._is_choosy = self._admission is not None or scenario.max_queued is not None

    @property
    def num_unanswered(self) -> int:
        return self._endings.num_unanswered

    @property
    def oldest_epoch(self) -> int:
        """Of the plans by which the calls under way were sent; the present one where there are none."""
        hanging = (call for slot in self.service.slots.values() for call, _, _ in slot.pending)
        inside = (call for replica in self.service.replicas() for call in replica.calls)
        calls = (call.leg.epoch for call in (*inside, *hanging) if call.ingress is self)
        return min(calls, default=self.itinerary.epoch)

    def follow(self, placed: PlacedPlan) -> None:
        """Go by this plan from now on."""
        before, self.itinerary = self.itinerary, lay_out(placed, self.service.slots, self.itinerary)
        self._first, self._last = self.itinerary.first, self.itinerary.legs[-1]
        if placed.epoch > before.epoch:
            self._endings.begin_plan(placed.plan)
        self._count_unheard(self._first, 0)
        self.suspended = False
        self._is_choosy = self._admission is not None or not math.isinf(self._max_queued)
        self._pump()

    def suspend(self) -> None:
        """There is no plan: what waits, and what arrives until the next one, is refused."""
        self.suspended = self._is_choosy = True
        self._endings.drop(self.waiting, STAGE_UNAVAILABLE)
        self.waiting.clear()

    def arrive(self, first: int) -> None:
        """A request, whose inputs are numbered from `first` on."""
        now_s, number = self._events.time_s, self._per_request
        if self.watching is not None:
            self.watching.arrive(number)
        if self._is_choosy:
            self._give_up_late()
            refusal = self._refusal(number, now_s)
            if refusal != NOT_DROPPED:
                self._endings.refuse(range(first, first + number), refusal)
                return
        self._endings.arrive(first, number)
        self.waiting.extend(range(first, first + number))
        if len(self.waiting) >= self._least:
            self._pump()

    def arrive_together(self, firsts: Iterable[int]) -> None:
        """Requests of one moment, which leave together, as live ones of the same turn of an event loop do."""
        self._is_pumping = True
        for first in firsts:
            self.arrive(first)
        self._is_pumping = False
        self._pump()

    def answer(self, call: Call, members: Sequence[Input], block: int) -> None:
        """Inputs of a call leave the model."""
        for member in members:
            member.origin = None
        if self._answer_s:
            self._events.at(self._events.time_s + self._answer_s, COMES, self._take_answers, (call, members, block))
            return
        if call.probe and self.watching is not None:
            self.watching.end_probes(members, block)
        self._endings.settle(call, members, block, self.itinerary)
        self._part_of(call, len(members), took_time=True)

    def answer_probes(self, call: Call, members: Sequence[Input], block: int) -> None:
        """Probes are answered, and stay inside. `answer_s` is left out: they are few."""
        if self.watching is not None:
            self.watching.answer_probes(members, block)
        self._endings.settle(call, members, block, self.itinerary)
        self._hear(call)

    def lose(self, call: Call, members: Sequence[Input]) -> None:
        """A stage drops inputs that are too late."""
        for member in members:
            member.origin = None
        lost = self._endings.forget_probes(members) if call.probe else members
        self._endings.late([member.payload for member in lost])
        self._part_of(call, len(members), took_time=False)

    def go_on(self, call: Call, members: Sequence[Input], block: int) -> None:
        """Survivors of a call, on their way to the next stage."""
        self._part_of(call, len(members), took_time=True)
        self._send(self.itinerary.at(block), members, block, 0.0, epoch=call.epoch, probe=call.probe)

    def again(self, call: Call) -> None:
        """Its replica is dead: what was inside starts again, after the pause in which the routers learn of it."""
        members = call.lost()
        for member in members:
            member.origin = None
        if call.probe:
            members = self._endings.forget_probes(members)
        self._events.at(self._events.time_s + RETRY_PAUSE_S, COMES, self._return, members)
        self._hear(call)  # others need not wait for the pause

    def go(self, call: Call, block: int, delay_s: float) -> bool:
        """Have a call take its way; False where its slot has no replica."""
        leg, weight = call.leg, len(call.members)
        replica = leg.transport.choose(self.index, weight, leg.batch_at(block))
        if replica is None:
            return False
        call.replica = replica
        replica.calls.add(call)
        if delay_s:
            self._events.at(self._events.time_s + delay_s, COMES, _arrives, (call, block))
        else:
            replica.submit(call, block)
        return True

    def _refusal(self, number: int, now_s: float) -> int:
        if self.suspended:
            return STAGE_UNAVAILABLE
        if self._admission is not None:
            late_s = self._admission.late_s(number, self._slo_s, unanswered=self.num_unanswered, now_s=now_s)
            if late_s > 0:
                return ADMISSION
        return OVERLOADED if self.num_unanswered + number > self._max_queued else NOT_DROPPED

    def _pump(self) -> None:
        if self._is_pumping:  # a call that was dropped at once; whoever pumps goes on
            return
        self._is_pumping = True
        self._give_up_late()
        leg = self._first
        while len(self.waiting) >= self._least:
            members = self._depart(leg.batches[0])
            self._count_unheard(leg, 1)
            probe = self.watching is not None and self.watching.begin_probes(members)
            self._send(leg, members, 0, self._entry_s, epoch=leg.epoch, probe=probe)
        self._is_pumping = False

    def _count_unheard(self, leg: Leg[Slot], change: int) -> None:
        """Calls to a first stage that nothing has come back from are more, or fewer."""
        self._unheard[leg.slot] += change
        first = self._first
        self._least = least_to_call(
            first.batches[0],
            unheard=self._unheard[first.slot],
            replicas=first.stage.replicas,
            calls_per_replica=self._calls_per_replica,
        )

    def _give_up_late(self) -> None:
        """Forget those that wait here and whose owner has gone, at the deadline."""
        waiting, arrived_s, per_request = self.waiting, self._ledger.arrived_s, self._per_request
        late: list[int] = []
        while waiting and arrived_s[waiting[0] // per_request] + self._slo_s <= self._events.time_s:
            late.append(waiting.popleft())
        if late:
            self._endings.late(late)

    def _depart(self, batch: int) -> list[Input]:
        """The next inputs, in the order of their arrival."""
        waiting, slo_s, arrived_s, per_request = self.waiting, self._slo_s, self._ledger.arrived_s, self._per_request
        numbers = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
        return [
            Member(sample_id="", payload=number, deadline_s=arrived_s[number // per_request] + slo_s)
            for number in numbers
        ]

    def _send(
        self, leg: Leg[Slot], members: Sequence[Input], block: int, delay_s: float, *, epoch: int, probe: bool
    ) -> None:
        call = Call(self, leg, members, self._events.time_s, epoch=epoch, first=block == 0, probe=probe)
        reserve_s = self._reserve_s(leg, members)
        for member in members:
            member.origin = call
            member.reserve_s = reserve_s
            member.probe = probe
        if not self.go(call, block, delay_s):
            self._hang(call, block, delay_s)

    def _reserve_s(self, leg: Leg[Slot], members: Sequence[Input]) -> float:
        if leg is self._last:
            return self._kept_s
        later_s = self.itinerary.reserve_s(leg)
        if math.isinf(later_s):
            return max(0.0, *(member.deadline_s - self._events.time_s for member in members))
        return later_s + self._kept_s

    def _take_answers(self, answers: tuple[Call, Sequence[Input], int]) -> None:
        call, members, block = answers
        if call.probe and self.watching is not None:
            self.watching.end_probes(members, block)
        self._endings.settle(call, members, block, self.itinerary)
        self._part_of(call, len(members), took_time=True)

    def _part_of(self, call: Call, number: int, *, took_time: bool) -> None:
        """A part of a call's reply came back, with so many inputs in it."""
        if took_time:  # what is dropped took none
            call.leg.learn(self._events.time_s - call.started_s)
        call.num_inside -= number
        if not call.num_inside:
            call.replica.calls.discard(call)
            call.leg.transport.done(self.index, call.replica, len(call.members))
        if not call.heard:
            self._hear(call)

    def _hear(self, call: Call) -> None:
        """The first part tells that a call's batch has run: another may be sent."""
        if not call.heard:
            call.heard = True
            if call.first:
                self._count_unheard(call.leg, -1)
                if len(self.waiting) >= self._least:
                    self._pump()

    def _hang(self, call: Call, block: int, delay_s: float) -> None:
        """Have a call wait for a replica, as long as anybody waits for its inputs; then they start again."""
        hanging = (call, block, delay_s)
        call.leg.transport.pending.append(hanging)
        now_s = self._events.time_s
        waits_s = min(WAITS_S, max(0.0, *(member.deadline_s - now_s for member in call.members)))
        self._events.at(now_s + waits_s + HANG_S, COMES, self._hang_up, hanging)

    def _hang_up(self, hanging: tuple[Call, int, float]) -> None:
        call = hanging[0]
        if hanging in call.leg.transport.pending:
            call.leg.transport.pending.remove(hanging)
            self.again(call)

    def _return(self, members: list[Input]) -> None:
        numbers = [member.payload for member in members]
        if self.suspended:
            self._endings.drop(numbers, STAGE_UNAVAILABLE)
            return
        self.waiting.extendleft(reversed(numbers))
        self._pump()


def _arrives(arriving: tuple[Call, int]) -> None:
    call, block = arriving
    call.replica.submit(call, block)
