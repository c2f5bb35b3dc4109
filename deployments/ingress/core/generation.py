"""The decisions of generation: admission of sequences, routing of their steps, and restarts of lost sequences. Pure.

The steps come from a driver: the live service, or the simulator, whose sequences only have lengths. A step goes to the
replica that has the keys and values of its sequence. A lost step is not sent again; its sequence restarts. The tokens
of a *probe* sequence run to the model's end and are observed by every ramp. The caller gets the full model's answers,
and the ramp at which a token would have left is only recorded.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from deployments.ingress.core.calls import (
    LONGEST_RETRY_S,
    RETRY_PAUSE_S,
    Actions,
    Call,
    SendCall,
    Unanswered,
    bucket_of,
)
from deployments.ingress.core.inputs import STEP_QUEUE, IngressOptions, Inputs, PendingInput
from deployments.ingress.core.probes import Watch
from deployments.ingress.core.routes import ChainRoute, KVPlacement, lost, sequence_numbers
from earlyexit.errors import AdmissionError, StageUnavailableError
from earlyexit.sequences.sequence import SequenceProgress
from optimizer.plans.plan import Plan

S = TypeVar("S", bound=SequenceProgress)
"""The class of sequences. In the simulator, they have only lengths."""
SOONEST_RETRY_S = 1.0
OTHER_SLOTS = "the current plan runs its blocks on other slots"


@dataclass(slots=True, eq=False)
class GenerationState(Generic[S]):
    """The state of one sequence from its arrival to its end."""

    sequence: S
    placement: KVPlacement
    arrived_s: float
    ahead_tokens: int
    """The prompt tokens of sequences without a first token when this one arrived."""
    attempts: int = 0
    """The number of losses since the last token."""
    first_s: float = math.nan
    """When the first token came; NaN before that."""
    last_s: float = math.nan
    """When the last token came; NaN before the first one."""
    num_tokens: int = 0
    """Generated tokens so far."""
    has_ended: bool = False

    def begin_step(self) -> None:
        """Records in `placement` whether the answer to the next step is a token."""
        self.placement.yields_token = self.sequence.says

    @property
    def waiting_since_s(self) -> float:
        """When the wait for the next token began: at the last token, or at the arrival."""
        return self.last_s if self.num_tokens else self.arrived_s

    @property
    def ttft_s(self) -> float:
        """Time to first token (TTFT); NaN before it."""
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first (TPOT); NaN before the second token."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else math.nan


@dataclass(slots=True)
class GenerationCounts:
    """Counts since the start of the ingress. They never decrease."""

    begun: int = 0
    """Admitted sequences."""
    refused: int = 0
    """Sequences that were refused because their SLOs could not be kept."""
    ended: Counter[str] = field(default_factory=Counter)
    """Ended sequences by reason: stop, length, or the kind of an error."""
    in_slo: int = 0
    """Completed sequences that kept both SLOs. A missing SLO counts as kept."""
    lost: int = 0
    """Restarts of lost sequences."""
    prompt_tokens: int = 0
    """The prompt tokens of admitted sequences."""
    probes: int = 0
    """Ended sequences that were probes."""
    exits: Counter[int] = field(default_factory=Counter)
    """Tokens, by the block after which they left."""
    ttft: Counter[int] = field(default_factory=Counter)
    """Sequences with a first token, by latency bucket of the TTFT."""
    tpot: Counter[int] = field(default_factory=Counter)
    """Ended sequences with at least two tokens, by latency bucket of the TPOT."""


class GenerationLoop:
    """The sequences of one ingress. All times are from the caller's clock, which must never go back."""

    def __init__(self, options: IngressOptions, plan: Plan, rng: random.Random) -> None:
        self.counts = GenerationCounts()
        self.num_running = 0
        self._options = options
        self._numbers = sequence_numbers(rng)
        self._waiting_prompt_tokens = 0
        """The prompt tokens of sequences without a first token."""
        # Plans do not predict the time of prompts, so this limit is unknown until the first late sequence.
        self._ttft = options.admission(replace(plan, predicted={}), options.ttft_slo_s)
        self._tpot = options.admission(plan, options.tpot_slo_s)

    def follow(self, plan: Plan) -> None:
        """Switches to another plan."""
        if self._ttft is not None:
            self._ttft.follow(replace(plan, predicted={}), 1.0)
        if self._tpot is not None:
            self._tpot.follow(plan, 1.0)

    def admit(self, num_prompt: int, now_s: float) -> None:
        """Raises AdmissionError for a sequence that would miss an SLO, or would make others miss theirs.

        Little's law applies as for inputs: a sequence waits for the prompt tokens ahead of it, and running sequences
        each get a token in turn.
        """
        late_s, why = 0.0, ""
        ttft_s, tpot_s = self._options.ttft_slo_s, self._options.tpot_slo_s
        if self._ttft is not None and ttft_s is not None:
            late_s = self._ttft.late_s(num_prompt, ttft_s, unanswered=self._waiting_prompt_tokens, now_s=now_s)
            why = f"a first token within {ttft_s:.3g} s is not possible now"
        if not late_s and self._tpot is not None and tpot_s is not None:
            late_s = self._tpot.late_s(1, tpot_s, unanswered=self.num_running, now_s=now_s)
            why = f"{self.num_running} sequences run; with another one a token would take more than {tpot_s:.3g} s"
        if late_s:
            self.counts.refused += 1
            raise AdmissionError(why, retry_after_s=min(max(late_s, SOONEST_RETRY_S), LONGEST_RETRY_S))

    def begin(self, sequence: S, now_s: float) -> GenerationState[S]:
        """Starts an admitted sequence; returns its state. The caller sends its first step."""
        state = GenerationState(sequence, KVPlacement(next(self._numbers)), now_s, self._waiting_prompt_tokens)
        sequence.begin(state.placement.number)
        self.counts.begun += 1
        self.counts.prompt_tokens += sequence.num_prompt
        self.num_running += 1
        self._waiting_prompt_tokens += sequence.num_prompt
        return state

    def on_token(self, state: GenerationState[S], exit_block: int, now_s: float) -> None:
        """Records that a token came from an exit."""
        state.attempts = 0
        state.num_tokens += 1
        state.last_s = now_s
        self.counts.exits[exit_block] += 1
        if state.num_tokens == 1:
            state.first_s = now_s
            self._waiting_prompt_tokens -= state.sequence.num_prompt
            self.counts.ttft[bucket_of(state.ttft_s)] += 1
            if self._ttft is not None:
                self._ttft.answered(state.ttft_s, state.ahead_tokens, state.sequence.num_prompt, now_s)
        elif self._tpot is not None:
            self._tpot.answered(state.tpot_s, self.num_running - 1, 1, now_s)

    def restart(self, state: GenerationState[S]) -> float:
        """Restarts a lost sequence with a new placement; returns the pause before its first step, in seconds.

        The first restart has no pause, because other replicas are probably available. Raises StageUnavailableError,
        which ends the sequence, after too many losses without a token.
        """
        if state.attempts + 1 >= self._options.max_attempts:
            message = f"the sequence was lost {self._options.max_attempts} times without a token"
            raise StageUnavailableError(message, retry_after_s=SOONEST_RETRY_S)
        pause_s = RETRY_PAUSE_S * ((1 << state.attempts) - 1)
        state.attempts += 1
        state.placement = KVPlacement(next(self._numbers), is_retry=True, is_probe=state.placement.is_probe)
        state.sequence.begin(state.placement.number)
        self.counts.lost += 1
        return pause_s

    def try_another_replica(self, state: GenerationState[S]) -> bool:
        """Excludes a full replica from the placement of a new sequence; returns False if no further try is allowed.

        A sequence that a replica has already accepted is not moved in this way. It waits, and restarts.
        """
        placement = state.placement
        full = next(reversed(placement.replicas.values()), None)  # the last chosen replica, which refused the sequence
        is_last = len(placement.excluded) + 1 >= self._options.max_attempts
        if is_last or placement.is_retry or full is None or full in placement.excluded:
            return False
        state.placement = KVPlacement(
            next(self._numbers), excluded=placement.excluded | {full}, is_probe=placement.is_probe
        )
        state.sequence.begin(state.placement.number)
        return True

    def end(self, state: GenerationState[S], reason: str) -> None:
        """Records the end of a sequence. `reason`: stop, length, or the kind of an error."""
        assert not state.has_ended, "a sequence ends once"
        state.has_ended = True
        self.num_running -= 1
        self.counts.ended[reason] += 1
        self.counts.probes += bool(state.placement.is_probe)
        if not state.num_tokens:
            self._waiting_prompt_tokens -= state.sequence.num_prompt
            return
        if state.num_tokens > 1:
            self.counts.tpot[bucket_of(state.tpot_s)] += 1
        if reason in ("stop", "length"):
            ttft_s, tpot_s = self._options.ttft_slo_s, self._options.tpot_slo_s
            keeps_ttft = ttft_s is None or state.ttft_s <= ttft_s
            # The TPOT SLO does not apply to a single token.
            self.counts.in_slo += keeps_ttft and (tpot_s is None or state.num_tokens < 2 or state.tpot_s <= tpot_s)


@dataclass(slots=True, eq=False)
class SequenceSteps:
    """Sends the inputs (steps) of sequences, each to the replica that has the keys and values of its sequence.

    Steps do not wait for a batch in the ingress, because the replica fuses the steps of all ingresses.
    """

    inputs: Unanswered
    probe_share: float
    rng: random.Random
    due: list[PendingInput] = field(default_factory=list, init=False)
    """The inputs that are to be sent."""

    def check(self, placement: KVPlacement) -> None:
        """Raises SequenceLostError if the sequence has begun and the current plan has another layout."""
        if placement.layout is not None and self.inputs.chains.with_layout(placement.layout) is None:
            raise lost(OTHER_SLOTS)

    def push(self, inputs: Inputs) -> None:
        """Adds inputs that are to be sent."""
        for each in inputs:
            each.holder = STEP_QUEUE
        self.due += inputs

    def begin(self, route: ChainRoute, inputs: Inputs, now_s: float) -> Actions:
        """Sends the first inputs of sequences into a chain of the current plan. Probes get a call of their own.

        Whether a sequence is a probe is drawn here. A restarted sequence keeps its earlier draw.
        """
        can_probe = self._can_observe
        for each in inputs:
            placement = each.placement
            assert placement is not None, "a generating service has no inputs without a sequence"
            placement.layout = route.layout
            if placement.is_probe is None:
                placement.is_probe = can_probe and self.probe_share > 0 and self.rng.random() < self.probe_share
        probes = [each for each in inputs if self._is_probe(each)]
        others = [each for each in inputs if not self._is_probe(each)]
        return [self._enter(route, group, now_s, is_first=True) for group in (others, probes) if group]

    def send(self, now_s: float) -> Actions:
        """Sends all queued inputs, in one call per replica that keeps some of their sequences."""
        due, self.due = self.due, []
        by_replica, actions = self._by_replica(due, None, STEP_QUEUE, now_s)
        for route, rows in by_replica:
            actions.append(self._enter(route, [due[row] for row in rows], now_s, is_first=False))
        return actions

    def go_on(self, call: Call, inputs: Inputs, block: int, payload: Any, now_s: float) -> Actions:
        """Sends the awaited inputs of a call on to a block, each to the replica of its sequence."""
        by_replica, actions = self._by_replica(inputs, block, call, now_s)
        for route, rows in by_replica:
            chosen = [inputs[row] for row in rows]
            onward = self.inputs.begin(route, route.at(block), chosen, now_s, call.epoch, call.watch)
            payload_rows = None if len(rows) == len(inputs) else tuple(rows)
            actions.append(SendCall(onward, block, payload, None, payload_rows))
        return actions

    def fail(self, inputs: Inputs, slot: str, now_s: float) -> Actions:
        """Drops inputs that will not come back from a failed replica, with SequenceLostError."""
        awaited = [each for each in inputs if not each.settled]
        if awaited:
            self.inputs.counts.retries[slot] += len(awaited)
        return self.inputs.drop(awaited, lost(f"a replica of {slot} failed"), now_s)

    def clear(self) -> list[PendingInput]:
        """Removes and returns the queued inputs."""
        due, self.due = self.due, []
        for each in due:
            each.holder = None
        return due

    def _by_replica(
        self, inputs: Inputs, block: int | None, holder: object, now_s: float
    ) -> tuple[Iterable[tuple[ChainRoute, Sequence[int]]], Actions]:
        """Groups the awaited inputs of a holder by replica, and releases all inputs from the holder.

        Returns for each replica the chain's route and the rows of its inputs. Probes and other inputs are separate
        groups. Also returns the actions for inputs whose layout the current plan does not have: they are lost. `block`:
        the block that the inputs wait for; None: the chain's first.
        """
        by_replica: dict[tuple[bool, str, str | frozenset[str]], tuple[ChainRoute, list[int]]] = {}
        displaced = []
        for row, each in enumerate(inputs):
            if each.holder is not holder:
                continue
            each.holder, placement = None, each.placement
            if each.settled or placement is None:
                continue
            chain = self.inputs.chains.with_layout(placement.layout)
            if chain is None:
                displaced.append(each)
                continue
            slot = (chain.route.first if block is None else chain.route.at(block)).slot
            key = self._is_probe(each), slot, placement.replicas.get(slot, placement.excluded)
            _, rows = by_replica.setdefault(key, (chain.route, []))
            rows.append(row)
        if displaced and self.inputs.observations is not None:
            self.inputs.observations.forget(displaced)
        return by_replica.values(), self.inputs.drop(displaced, lost(OTHER_SLOTS), now_s)

    @property
    def _can_observe(self) -> bool:
        """Whether replicas observe probes under the current plan."""
        return self.inputs.observations is not None and self.inputs.observations.can_observe(
            self.inputs.chains.placed.plan.policy
        )

    def _is_probe(self, pending: PendingInput) -> bool:
        return pending.placement is not None and bool(pending.placement.is_probe) and self._can_observe

    def _enter(self, route: ChainRoute, inputs: Inputs, now_s: float, *, is_first: bool) -> SendCall:
        """Returns the action that sends inputs, all or none of them probes, to a chain's first block.

        Of a prompt's chunks, only the last one is observed. If too many observations are open, probes still run as
        probes, because their callers must get the full model's answers.
        """
        watch: Watch | None = "probe" if self._is_probe(inputs[0]) else None
        if watch is not None and self.inputs.observations is not None:
            observed = [each for each in inputs if each.placement is not None and each.placement.yields_token]
            self.inputs.observations.begin(observed, route.plan, "probe", now_s)
        stage = route.first
        call = self.inputs.begin(route, stage, inputs, now_s, stage.epoch, watch, is_first=is_first)
        return SendCall(call, *route.entrance(probe=call.probe))
