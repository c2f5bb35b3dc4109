"""What becomes of the inputs of one ingress: each has its outcome once, and teaches what it can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.itinerary import Itinerary
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan
from simulator.call import Call, Input
from simulator.ledger import DEADLINE, NO_EXIT

if TYPE_CHECKING:
    from simulator.ingress import Ingress
    from simulator.service import Service


class Endings:
    """Does what `deployments.ingress.core.outcomes.Outcomes` does."""

    def __init__(self, ingress: Ingress, service: Service, placed: PlacedPlan) -> None:
        scenario = service.scenario
        self._ingress = ingress
        self.num_unanswered = 0
        self.admission: Admission | None = None
        if scenario.admission and not math.isinf(scenario.slo_s):
            self.admission = Admission(placed.plan, slo_s=scenario.slo_s, num_ingresses=scenario.num_ingresses)
        self._ahead: dict[int, int] = {}
        """Inputs that had no answer when one arrived; kept where admission learns from it."""
        self._ledger = service.ledger
        self._events = service.events
        self._slo_s = scenario.slo_s
        self._per_request = scenario.inputs_per_request

    def begin_plan(self, plan: Plan) -> None:
        """Another plan is in force."""
        if self.admission is not None:
            self.admission.follow(plan)
        if self._ingress.watching is not None:
            self._ingress.watching.begin_plan()

    def arrive(self, first: int, number: int) -> None:
        """So many inputs were taken, numbered from `first` on."""
        if self.admission is not None:
            for each in range(number):
                self._ahead[first + each] = self.num_unanswered + each
        self.num_unanswered += number

    def settle(self, call: Call, members: Sequence[Input], block: int, itinerary: Itinerary[Any]) -> None:
        """Inputs are answered, those that were not already, as probes may be."""
        ledger, now_s, per_request = self._ledger, self._events.time_s, self._per_request
        latencies_s, exits, arrived_s = ledger.latency_s, ledger.exit, ledger.arrived_s
        numbers = []
        for member in members:
            number = member.payload
            if exits[number] < 0:
                latencies_s[number] = now_s - arrived_s[number // per_request]
                exits[number] = block
                numbers.append(number)
        self.num_unanswered -= len(numbers)
        if self.admission is not None:
            for number in numbers:
                self._teach(number, latencies_s[number], now_s, deep=block >= itinerary.last_split)
        if self._ingress.watching is not None:
            by_present_plan = call.epoch == itinerary.epoch
            for number in numbers:
                self._ingress.watching.answer(block, latencies_s[number], by_present_plan=by_present_plan)

    def late(self, numbers: Sequence[int]) -> None:
        """Drop inputs whose deadline is not kept."""
        now_s = self._events.time_s
        if self.admission is not None:
            for number in numbers:
                took_s = max(now_s - self._ledger.arrived_s[number // self._per_request], self._slo_s)
                self.admission.given_up(took_s, self._ahead.get(number, 0), now_s)
        self.drop(numbers, DEADLINE)

    def drop(self, numbers: Sequence[int], reason: int) -> None:
        """Inputs that were taken get no answer; `reason` is a position in DROPS."""
        self.num_unanswered -= len(numbers)
        self.refuse(numbers, reason)

    def refuse(self, numbers: Sequence[int], reason: int) -> None:
        """Inputs are not taken."""
        drop = self._ledger.drop
        for number in numbers:
            drop[number] = reason
            self._ahead.pop(number, None)
        if self._ingress.watching is not None:
            self._ingress.watching.drop(reason, len(numbers))

    def forget_probes(self, members: Sequence[Input]) -> list[Input]:
        """Probes will not get to the end; gives those that have no answer."""
        if self._ingress.watching is not None:
            self._ingress.watching.forget_probes(members)
        return [member for member in members if self._ledger.exit[member.payload] == NO_EXIT]

    def _teach(self, number: int, latency_s: float, now_s: float, *, deep: bool) -> None:
        assert self.admission is not None
        ahead = self._ahead.pop(number)
        if latency_s > self._slo_s:  # its owner went at the deadline, and this was learnt then
            self.admission.given_up(self._slo_s, ahead, now_s)
        elif deep:
            self.admission.answered(latency_s, ahead, now_s)
