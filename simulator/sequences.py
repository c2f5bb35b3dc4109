"""Sequences, simulated: lengths, whose steps are inputs that leave as the decisions say; the live loop decides."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence

from deployments.ingress.core.attempts import LOST
from deployments.ingress.core.generation import GenerationState, Loop, LoopRules
from deployments.ingress.core.inputs import Answered, Flight
from deployments.ingress.core.routes import homes_of
from earlyexit.errors import OfframpError, StageUnavailableError
from earlyexit.sequences.sequence import Shown
from optimizer.placement import PlacedPlan
from simulator.events import COMES, WAKES
from simulator.ingress import SimulatedIngress, Surroundings
from simulator.replica import Step, Trip


class SimulatedSequence:
    """So many tokens, of which a decoder is shown what it has not seen."""

    __slots__ = ("behind", "index", "num_prompt", "shown")

    def __init__(self, index: int, num_prompt: int, num_tokens: int, chunk: int) -> None:
        self.index = index
        """Among all that arrive."""
        self.num_prompt = num_prompt
        self.shown = Shown(num_prompt, num_prompt + num_tokens, chunk)
        self.behind: Counter[int] = Counter()
        """See `Step`."""

    @property
    def says(self) -> bool:
        return self.shown.says

    def begin(self, number: int) -> None:
        self.shown.begin()
        self.behind = Counter()

    def step(self) -> int:
        return self.shown.until - self.shown.seen


class SequenceLedger:
    """By a sequence's index: what became of it."""

    __slots__ = ("ended_s", "said", "tpot_s", "ttft_s")

    def __init__(self, number: int) -> None:
        self.ended_s = 0.0
        """When the last of those that are over was."""
        self.said = array("i", [0]) * number
        """Tokens."""
        self.ttft_s = array("d", [math.nan]) * number
        """NaN without a token."""
        self.tpot_s = array("d", [math.nan]) * number
        """NaN without a second one."""


class GeneratingIngress(SimulatedIngress):
    """One whose requests are sequences."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        scenario, index = around.scenario, around.index
        assert scenario.sequences is not None
        self._lengths = scenario.sequences
        rules = LoopRules(
            max_attempts=scenario.max_attempts,
            ttft_slo_s=scenario.sequences.ttft_slo_s,
            tpot_slo_s=scenario.sequences.tpot_slo_s,
            num_ingresses=scenario.num_ingresses,
        )
        self.loop = Loop(rules, around.placed.plan, random.Random(index))
        self.sequences = SequenceLedger(len(scenario.arrivals_s))
        self._courses: dict[int, tuple[GenerationState[int], SimulatedSequence]] = {}
        """By the number of the step that is under way."""
        self._due: list[tuple[GenerationState[int], SimulatedSequence]] = []
        """Whose next step is sent when this moment is over."""
        self._step_number, self._stride = index, scenario.num_ingresses

    def arrive(self, first: int) -> None:
        prompt, tokens = self._lengths.of(first)
        sequence = SimulatedSequence(first, prompt, tokens, self._lengths.chunk)
        try:
            self.loop.admit(prompt, self._events.time_s)
        except OfframpError:
            return
        self._step(self.loop.begin(sequence, self._events.time_s), sequence)
        self._do(())

    def follow(self, placed: PlacedPlan) -> None:
        self.loop.follow(placed.plan)
        super().follow(placed)

    def go(self, trip: Trip, block: int, delay_s: float) -> bool:
        """Where their keys and values are; a sequence that has lost them starts again."""
        homes, slot = homes_of(trip.leg.slot, trip.flights), trip.leg.transport
        if homes.replica is not None and not slot.has(homes.replica):
            self.restart(trip)
            return True
        replica = slot.home_of(self.index, homes, trip.leg.budgets[0].inputs)
        if replica is None:
            return False
        trip.weight = 0  # sequences are what counts, from their beginning to their end
        self._set_off(trip, replica, block, delay_s)
        return True

    def _step(self, course: GenerationState[int], sequence: SimulatedSequence) -> None:
        number, now_s = self._step_number, self._events.time_s
        try:
            self.core.step(
                number,
                course.home,
                tokens=course.step(),
                arrived_s=now_s,
                deadline_s=course.awaited_from_s + self._lengths.timeout_s,
                now_s=now_s,
            )
        except OfframpError as error:
            self._failed(course, sequence, error.kind)
            return
        self._step_number += self._stride
        self._courses[number] = course, sequence

    def _members(self, trip: Trip) -> list[Step]:
        return [self._member(flight, trip.probe) for flight in trip.flights]

    def _member(self, flight: Flight[int], probe: bool) -> Step:
        course, sequence = self._courses[flight.input]
        return Step(
            sample_id="",
            payload=flight,
            tokens=flight.tokens,
            deadline_s=flight.deadline_s,
            probe=probe,
            sequence=course.home.number,
            context=sequence.shown.seen,
            behind=sequence.behind,
        )

    def _answered(self, answered: Answered) -> None:
        for flight in answered.flights:
            course, sequence = self._courses.pop(flight.input)
            if sequence.shown.answered():
                self.loop.said(course, answered.block, self._events.time_s)
            if sequence.shown.is_whole:
                self._over(course, sequence, "length")
            else:
                self._step_soon(course, sequence)

    def _step_soon(self, course: GenerationState[int], sequence: SimulatedSequence) -> None:
        """When all answers of this moment have been taken: their next steps are sent together, as live ones are."""
        self._due.append((course, sequence))
        if len(self._due) == 1:
            self._events.at(self._events.time_s, WAKES, self._step_all, None)

    def _step_all(self, _: None) -> None:
        due, self._due = self._due, []
        for course, sequence in due:
            self._step(course, sequence)
        self._do(())

    def _drop(self, numbers: Sequence[int], reason: str) -> None:
        for number in numbers:
            self._failed(*self._courses.pop(number), reason)

    def _failed(self, course: GenerationState[int], sequence: SimulatedSequence, reason: str) -> None:
        if reason != LOST:
            self._over(course, sequence, reason)
            return
        self._leave(course)
        try:
            pause_s = self.loop.again(course)
        except StageUnavailableError as error:
            self._over(course, sequence, error.kind)
            return
        self._events.at(self._events.time_s + pause_s, WAKES, self._again, (course, sequence))

    def _again(self, lost: tuple[GenerationState[int], SimulatedSequence]) -> None:
        self._step(*lost)
        self._do(())

    def _over(self, course: GenerationState[int], sequence: SimulatedSequence, reason: str) -> None:
        self.loop.end(course, reason)
        self._leave(course)
        ledger, index = self.sequences, sequence.index
        ledger.ended_s = self._events.time_s
        ledger.said[index] = course.num_said
        ledger.ttft_s[index], ledger.tpot_s[index] = course.ttft_s, course.tpot_s

    def _leave(self, course: GenerationState[int]) -> None:
        for slot in course.home.replicas:
            replica = self._slots[slot].leave(self.index, course.home.number)
            if replica is not None and self._entry_s:
                self._events.at(self._events.time_s + self._entry_s, COMES, replica.end, course.home.number)
            elif replica is not None:
                replica.end(course.home.number)
