"""Simulated sequences, which have only lengths. The live `GenerationLoop` makes the decisions about them."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from typing import Any

from deployments.ingress.core.calls import ReturnAnswers, ReturnErrors
from deployments.ingress.core.generation import GenerationLoop, GenerationState
from deployments.ingress.core.inputs import PendingInput
from earlyexit.errors import OfframpError
from earlyexit.sequences.sequence import SequenceProgress
from optimizer.plans.plan import PlacedPlan
from simulator.events import WAKES
from simulator.processes import SimulatedCall, SimulatedIngress
from simulator.scenario import Scenario
from simulator.work import Behind, StepMember


class SimulatedSequence(SequenceProgress):
    """A sequence of a known length. Each step shows the decoder the tokens that it has not seen."""

    def __init__(self, index: int, num_prompt: int, num_tokens: int, chunk: int) -> None:
        super().__init__(num_prompt, num_prompt + num_tokens, chunk)
        self.index = index
        """The position of the sequence in the order of arrival."""
        self.behind: Behind = Counter()
        """See `StepMember.behind`."""

    def begin(self, number: int = 0) -> None:
        super().begin(number)
        self.behind = Counter()

    def step(self) -> int:
        return self.until - self.seen


class GeneratingIngress(SimulatedIngress):
    """An ingress whose requests are sequences."""

    def __init__(self, index: int, scenario: Scenario, *others: Any) -> None:
        super().__init__(index, scenario, *others)
        assert scenario.sequences is not None
        self._lengths = scenario.sequences
        self.loop = GenerationLoop(self.core.options, scenario.plan, random.Random(index))
        self.ended_s = 0.0
        """When the last sequence ended."""
        number = len(scenario.arrivals_s)
        self.num_tokens = array("i", [0]) * number
        """The generated tokens of each sequence, by its index."""
        self.ttft_s, self.tpot_s = array("d", [math.nan]) * number, array("d", [math.nan]) * number
        """By sequence index; NaN without a first or second token."""
        self._states: dict[int, GenerationState[SimulatedSequence]] = {}
        """The running sequences, by the serial number of their current step."""
        self._due: list[GenerationState[SimulatedSequence]] = []
        """The sequences whose next step is sent at the end of this moment."""
        self._step_number, self._stride = index, scenario.num_ingresses

    def arrive(self, first: int) -> None:
        prompt, tokens = self._lengths.of(first)
        sequence = SimulatedSequence(first, prompt, tokens, self._lengths.chunk)
        try:
            self.loop.admit(prompt, self._events.time_s)
        except OfframpError:
            return
        self._step(self.loop.begin(sequence, self._events.time_s))
        self.do()

    def follow(self, placed: PlacedPlan) -> None:
        self.loop.follow(placed.plan)
        super().follow(placed)

    def _step(self, state: GenerationState[SimulatedSequence]) -> None:
        number, now_s = self._step_number, self._events.time_s
        try:
            deadline_s = state.last_s + self._lengths.timeout_s
            state.placement.yields_token = state.sequence.yields_token
            step = PendingInput(number, now_s, deadline_s, state.sequence.step(), placement=state.placement)
            self.core.submit((step,), now_s)
        except OfframpError as error:
            self._failed(state, error)
            return
        self._step_number += self._stride
        self._states[number] = state

    def _members(self, call: SimulatedCall) -> list[StepMember]:
        return [self._member(each, call.probe) for each in call.inputs]

    def _member(self, pending: PendingInput, probe: bool) -> StepMember:
        state = self._states[pending.serial]
        return StepMember(
            sample_id="",
            payload=pending,
            tokens=pending.tokens,
            deadline_s=pending.deadline_s,
            probe=probe,
            sequence=state.placement.number,
            context=state.sequence.seen,
            behind=state.sequence.behind,
        )

    def return_answers(self, action: ReturnAnswers) -> None:
        for each in action.inputs:
            state = self._states.pop(each.serial)
            if state.sequence.advance():
                self.loop.on_token(state, action.block, self._events.time_s)
            if state.sequence.is_whole:
                self._end_sequence(state, "length")
            else:
                # Its next step is sent at the end of this moment, so that steps are sent together, as live ones are.
                self._due.append(state)
                if len(self._due) == 1:
                    self._events.at(self._events.time_s, WAKES, self._step_all, self._due)

    def _step_all(self, states: list[GenerationState[SimulatedSequence]]) -> None:
        if states is self._due:
            self._due = []
        for state in states:
            self._step(state)
        self.do()

    def return_errors(self, action: ReturnErrors) -> None:
        assert action.error is not None, "no simulated caller gives up"
        for each in action.inputs:
            self._failed(self._states.pop(each.serial), action.error)

    def _failed(self, state: GenerationState[SimulatedSequence], error: OfframpError) -> None:
        try:
            pause_s = self.loop.retry(state, error)
        except OfframpError as final_error:
            self._end_sequence(state, final_error.kind)
            return
        self._events.at(self._events.time_s + pause_s, WAKES, self._step_all, [state])

    def _end_sequence(self, state: GenerationState[SimulatedSequence], reason: str) -> None:
        self.loop.end(state, reason)
        self.ended_s = self._events.time_s
        index = state.sequence.index
        self.num_tokens[index], self.ttft_s[index], self.tpot_s[index] = state.num_tokens, state.ttft_s, state.tpot_s
