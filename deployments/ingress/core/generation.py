"""The decisions of generation: which sequences are admitted, where their steps go, and what follows a loss. Pure.

A driver asks for the steps: the live service, or the simulator, whose sequences are mere lengths. A step goes where its
sequence's keys and values are, and is never simply sent again.

A sequence may be a *probe*, with all its tokens: they run to the model's end, every ramp looks, and its caller gets
what the full model says. The ramp at which a token would have left is noted, but answers no caller: the next token
would run beside the one that still runs.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.calls import (
    LONGEST_RETRY_S,
    RETRY_PAUSE_S,
    Actions,
    Call,
    Calls,
    Outcomes,
    SendCall,
    bucket_of,
)
from deployments.ingress.core.inputs import DUE, Chains, Inputs, PendingInput
from deployments.ingress.core.probes import ExitObservations, Watch
from deployments.ingress.core.routes import ChainRoute, KVPlacement, lost, sequence_numbers
from earlyexit.errors import AdmissionError, StageUnavailableError
from optimizer.plan import Plan

G = TypeVar("G", covariant=True)
"""A step as the decoder gets it: encoded tokens or, in the simulator, their number."""
SOONEST_RETRY_S = 1.0


class Stepping(Protocol[G]):
    """A sequence that is being generated."""

    num_prompt: int

    @property
    def says(self) -> bool:
        """Whether the answer to the next step is a token."""
        ...

    def begin(self, number: int) -> None: ...

    def step(self) -> G: ...


@dataclass(slots=True, eq=False)
class GenerationState(Generic[G]):
    """One sequence from its arrival to its end, whichever replicas run it."""

    sequence: Stepping[G]
    placement: KVPlacement
    arrived_s: float
    ahead_tokens: int
    """The prompt tokens of sequences that had no token yet when it arrived."""
    attempts: int = 0
    """How often it was lost since its last token."""
    first_s: float = math.nan
    """When its first token came; NaN before."""
    last_s: float = math.nan
    num_said: int = 0
    is_over: bool = False

    def step(self) -> G:
        """Returns what the decoder must see next, and notes in `placement` whether its answer is a token."""
        self.placement.says = self.sequence.says
        return self.sequence.step()

    @property
    def awaited_from_s(self) -> float:
        """When the wait for the next token began: at the arrival, or at the last token."""
        return self.last_s if self.num_said else self.arrived_s

    @property
    def ttft_s(self) -> float:
        """Time to first token; NaN before it."""
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; NaN before there is a second token."""
        return (self.last_s - self.first_s) / (self.num_said - 1) if self.num_said > 1 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRules:
    """The limits of one ingress."""

    max_attempts: int
    """How often a sequence may be lost between two of its tokens before it fails."""
    ttft_slo_s: float | None = None
    """Time until the first token."""
    tpot_slo_s: float | None = None
    """Mean time per token after the first, over a sequence."""
    num_ingresses: int = 1


@dataclass(slots=True)
class GenerationCounts:
    """Counts since the ingress began; they only grow."""

    begun: int = 0
    """Admitted sequences."""
    refused: int = 0
    """Sequences that were refused because their SLOs could not be kept."""
    ended: Counter[str] = field(default_factory=Counter)
    """Admitted sequences by why they ended: stop, length, or the kind of an error."""
    in_slo: int = 0
    """Completed sequences that kept both SLOs; all of them where there is none."""
    lost: int = 0
    """How often a sequence began anew, mostly on another replica."""
    prompt_tokens: int = 0
    """The prompt tokens of admitted sequences."""
    probes: int = 0
    """Sequences that ended and were probes."""
    exits: Counter[int] = field(default_factory=Counter)
    """Tokens, by the block that they left after."""
    ttft: Counter[int] = field(default_factory=Counter)
    """Sequences by time to first token, in the buckets of latencies."""
    tpot: Counter[int] = field(default_factory=Counter)
    """Ended sequences of at least two tokens, by time per output token."""


class GenerationLoop:
    """The generation of one ingress. Seconds are the caller's, and never go back."""

    def __init__(self, rules: GenerationRules, plan: Plan, rng: random.Random) -> None:
        self.counts = GenerationCounts()
        self.num_running = 0
        self._rules = rules
        self._numbers = sequence_numbers(rng)
        self._silent_tokens = 0
        """The prompt tokens of sequences that have no token yet."""
        # No plan predicts what a prompt takes: its limit begins where the first late sequence finds it.
        self._ttft = self._admission(rules.ttft_slo_s, replace(plan, predicted={}))
        self._tpot = self._admission(rules.tpot_slo_s, plan)

    def follow(self, plan: Plan) -> None:
        """Follow another plan from now on."""
        if self._ttft is not None:
            self._ttft.follow(replace(plan, predicted={}), 1.0)
        if self._tpot is not None:
            self._tpot.follow(plan, 1.0)

    def admit(self, num_prompt: int, now_s: float) -> None:
        """Refuse a sequence whose tokens would come too late, or make others' late: raises AdmissionError.

        By Little's law, as for inputs: a sequence waits for the prompts' tokens that it arrives behind, and running
        sequences each get a token in turn.
        """
        late_s, why = 0.0, ""
        ttft_s, tpot_s = self._rules.ttft_slo_s, self._rules.tpot_slo_s
        if self._ttft is not None and ttft_s is not None:
            late_s = self._ttft.late_s(num_prompt, ttft_s, unanswered=self._silent_tokens, now_s=now_s)
            why = f"no first token is to be had within {ttft_s:.3g} s now"
        if not late_s and self._tpot is not None and tpot_s is not None:
            late_s = self._tpot.late_s(1, tpot_s, unanswered=self.num_running, now_s=now_s)
            why = f"{self.num_running} sequences run, and with another a token would take more than {tpot_s:.3g} s"
        if late_s:
            self.counts.refused += 1
            raise AdmissionError(why, retry_after_s=min(max(late_s, SOONEST_RETRY_S), LONGEST_RETRY_S))

    def begin(self, sequence: Stepping[G], now_s: float) -> GenerationState[G]:
        """Take a sequence that was admitted; its first step is next."""
        state = GenerationState(sequence, KVPlacement(next(self._numbers)), now_s, self._silent_tokens)
        sequence.begin(state.placement.number)
        self.counts.begun += 1
        self.counts.prompt_tokens += sequence.num_prompt
        self.num_running += 1
        self._silent_tokens += sequence.num_prompt
        return state

    def said(self, state: GenerationState[G], exit_block: int, now_s: float) -> None:
        """Note that a token came, after this exit."""
        state.attempts = 0
        state.num_said += 1
        state.last_s = now_s
        self.counts.exits[exit_block] += 1
        if state.num_said == 1:
            state.first_s = now_s
            self._silent_tokens -= state.sequence.num_prompt
            self.counts.ttft[bucket_of(state.ttft_s)] += 1
            if self._ttft is not None:
                self._ttft.answered(state.ttft_s, state.ahead_tokens, state.sequence.num_prompt, now_s)
        elif self._tpot is not None:
            self._tpot.answered(state.tpot_s, self.num_running - 1, 1, now_s)

    def again(self, state: GenerationState[G]) -> float:
        """Begin a lost sequence anew, with a new placement; returns in how many seconds its first step is next.

        The first time that is at once, because other replicas have what it needs. Raises StageUnavailableError, which
        ends the sequence, when it was lost too often without a token.
        """
        if state.attempts + 1 >= self._rules.max_attempts:
            message = f"the sequence was lost {self._rules.max_attempts} times without a token"
            raise StageUnavailableError(message, retry_after_s=SOONEST_RETRY_S)
        pause_s = RETRY_PAUSE_S * ((1 << state.attempts) - 1)
        state.attempts += 1
        state.placement = KVPlacement(next(self._numbers), is_again=True, is_probe=state.placement.is_probe)
        state.sequence.begin(state.placement.number)
        self.counts.lost += 1
        return pause_s

    def elsewhere(self, state: GenerationState[G]) -> bool:
        """Have a new sequence, for which a replica has no room, try another; returns whether there is one to try.

        A sequence that a replica took before is not moved so: it waits, and begins anew.
        """
        placement = state.placement
        full = next(reversed(placement.replicas.values()), None)  # the replica that was chosen last
        if (
            placement.is_again
            or full is None
            or full in placement.avoids
            or len(placement.avoids) + 1 >= self._rules.max_attempts
        ):
            return False
        state.placement = KVPlacement(
            next(self._numbers), avoids=placement.avoids | {full}, is_probe=placement.is_probe
        )
        state.sequence.begin(state.placement.number)
        return True

    def end(self, state: GenerationState[G], reason: str) -> None:
        """Note that a sequence has ended: it stopped, reached its length, or failed."""
        assert not state.is_over, "a sequence ends once"
        state.is_over = True
        self.num_running -= 1
        self.counts.ended[reason] += 1
        self.counts.probes += bool(state.placement.is_probe)
        if not state.num_said:
            self._silent_tokens -= state.sequence.num_prompt
            return
        if state.num_said > 1:
            self.counts.tpot[bucket_of(state.tpot_s)] += 1
        if reason in ("stop", "length"):
            self.counts.in_slo += self.keeps(state)

    def keeps(self, state: GenerationState[G]) -> bool:
        """Whether the tokens so far came within both SLOs; a single token has no time per token."""
        ttft_s, tpot_s = self._rules.ttft_slo_s, self._rules.tpot_slo_s
        first_in_time = ttft_s is None or state.ttft_s <= ttft_s
        return first_in_time and (tpot_s is None or state.num_said < 2 or state.tpot_s <= tpot_s)

    def _admission(self, slo_s: float | None, plan: Plan) -> Admission | None:
        if slo_s is None:
            return None
        return Admission(plan, slo_s=slo_s, num_ingresses=self._rules.num_ingresses)


@dataclass(slots=True, eq=False)
class Steps:
    """The inputs of sequences that are sent next, and what becomes of those that were sent.

    A step waits for no batch here: its replica has the sequence's other steps behind it, never beside it, and fuses
    those of all ingresses. So a call has every step that came of one part of a reply.
    """

    chains: Chains
    calls: Calls
    outcomes: Outcomes
    observations: ExitObservations | None
    probe_share: float
    rng: random.Random
    due: list[PendingInput] = field(default_factory=list, init=False)
    """The inputs that are sent next."""

    def check(self, placement: KVPlacement) -> None:
        """Raises SequenceLostError if the plan has other stages by now and the sequence has begun at the old ones."""
        if placement.layout is not None and self.chains.of_layout(placement.layout) is None:
            raise lost("the plan has its blocks elsewhere now")

    def join(self, inputs: Inputs) -> None:
        """Have inputs sent next."""
        for each in inputs:
            each.holder = DUE
        self.due += inputs

    def begin(self, route: ChainRoute, inputs: Inputs, now_s: float) -> Actions:
        """Send the first inputs of sequences into a chain of the present plan, probes in a call of their own.

        Whether a sequence is a probe is drawn here, once: a sequence that begins anew is what it was.
        """
        looks = self._looks
        for each in inputs:
            placement = each.placement
            assert placement is not None, "a service has sequences, or inputs of none"
            placement.layout = route.layout
            if placement.is_probe is None:
                placement.is_probe = looks and self.probe_share > 0 and self.rng.random() < self.probe_share
        parts = [[each for each in inputs if self._is_probe(each) is wanted] for wanted in (False, True)]
        return [self._enter(route, part, now_s, is_first=True) for part in parts if part]

    def send(self, now_s: float) -> Actions:
        """Send all that are due, in a call for every replica that has some of their sequences."""
        due, self.due = self.due, []
        by_replica, homeless = self._by_replica(due, None, DUE)
        actions = self._lose(homeless, now_s)
        for route, rows in by_replica:
            actions.append(self._enter(route, [due[row] for row in rows], now_s, is_first=False))
        return actions

    def go_on(self, call: Call, inputs: Inputs, block: int, payload: Any, now_s: float) -> Actions:
        """Send those of a call's inputs that are waited for on to a block, each to its sequence's replica there."""
        by_replica, homeless = self._by_replica(inputs, block, call)
        actions = self._lose(homeless, now_s)
        for route, rows in by_replica:
            going = [inputs[row] for row in rows]
            onward = self.calls.begin(route, route.at(block), going, now_s, call.epoch, call.watch)
            part = None if len(rows) == len(inputs) else tuple(rows)
            actions.append(SendCall(onward, block, payload, None, part))
        return actions

    def fail(self, inputs: Inputs, slot: str, now_s: float) -> Actions:
        """Lose the sequences of inputs that will not come back from a slot."""
        waited_for = [each for each in inputs if not each.settled]
        if waited_for:
            self.outcomes.counts.retries[slot] += len(waited_for)
        return self.outcomes.drop(waited_for, lost(f"a replica of {slot} failed under it"), now_s)

    def clear(self) -> list[PendingInput]:
        """Removes and returns the inputs that were due."""
        due, self.due = self.due, []
        for each in due:
            each.holder = None
        return due

    def _by_replica(
        self, inputs: Inputs, block: int | None, holder: object
    ) -> tuple[Iterable[tuple[ChainRoute, Sequence[int]]], list[PendingInput]]:
        """Rows of the inputs that a holder has and that are awaited, by chain and replica of a block.

        None is the block at which inputs enter. The second result are the inputs whose blocks are elsewhere by now.
        The holder has none of them afterwards. Probes are apart from others.
        """
        by_replica: dict[tuple[bool, str, str | frozenset[str]], tuple[ChainRoute, list[int]]] = {}
        homeless = []
        for row, each in enumerate(inputs):
            if each.holder is not holder:
                continue
            each.holder, placement = None, each.placement
            if each.settled or placement is None:
                continue
            chain = self.chains.of_layout(placement.layout)
            if chain is None:
                homeless.append(each)
                continue
            slot = (chain.route.first if block is None else chain.route.at(block)).slot
            where = self._is_probe(each), slot, placement.replicas.get(slot, placement.avoids)
            by_replica.setdefault(where, (chain.route, []))[1].append(row)
        return by_replica.values(), homeless

    @property
    def _looks(self) -> bool:
        """Whether replicas observe probes under the present plan."""
        return self.observations is not None and self.observations.can_look(self.chains.route.placed.plan.policy)

    def _is_probe(self, pending: PendingInput) -> bool:
        return pending.placement is not None and bool(pending.placement.is_probe) and self._looks

    def _enter(self, route: ChainRoute, inputs: Inputs, now_s: float, *, is_first: bool) -> SendCall:
        """Send probes, or others, in one call to a chain's first block; of a prompt's parts only the last makes a row.

        Where too many are open already probes run as such all the same: their callers get the full model's answers.
        """
        watch: Watch | None = "probe" if self._is_probe(inputs[0]) else None
        if watch is not None and self.observations is not None:
            says = [each for each in inputs if each.placement is not None and each.placement.says]
            self.observations.begin(says, route.plan, "probe", now_s)
        stage = route.first
        call = self.calls.begin(route, stage, inputs, now_s, stage.epoch, watch, is_first=is_first)
        return SendCall(call, *route.entrance(probe=call.probe))

    def _lose(self, inputs: Inputs, now_s: float) -> Actions:
        if self.observations is not None:
            self.observations.forget(inputs)
        return self.outcomes.drop(inputs, lost("the plan has its blocks elsewhere now"), now_s)
