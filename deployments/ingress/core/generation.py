"""The decisions of generation: admission of sequences, and restarts of lost sequences. Pure.

The steps come from a driver: the live service, or the simulator, whose sequences only have lengths. A step goes to the
replica that has the keys and values of its sequence. A lost step is not sent again; its sequence restarts. The tokens
of a *probe* sequence run to the model's end and are observed by every ramp. The caller gets the full model's answers,
and the ramp at which a token would have left is only recorded.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.calls import LONGEST_RETRY_S, RETRY_PAUSE_S, bucket_of
from deployments.ingress.core.inputs import IngressOptions
from deployments.ingress.core.routes import SOONEST_RETRY_S, KVPlacement, sequence_numbers
from earlyexit.errors import AdmissionError, OfframpError, OverloadedError, SequenceLostError, StageUnavailableError
from earlyexit.sequences.sequence import SequenceProgress
from optimizer.plans.plan import Plan

S = TypeVar("S", bound=SequenceProgress)
"""The class of sequences. In the simulator, they have only lengths."""


@dataclass(slots=True, eq=False)
class GenerationState(Generic[S]):
    """The state of one sequence from its arrival to its end."""

    sequence: S
    placement: KVPlacement
    arrived_s: float
    last_s: float
    """When the last token came; before the first one, when the sequence arrived."""
    ahead_tokens: int
    """The prompt tokens of sequences without a first token when this one arrived."""
    attempts: int = 0
    """The number of losses and refusals since the last token."""
    first_s: float = math.nan
    """When the first token came; NaN before that."""
    num_tokens: int = 0
    """Generated tokens so far."""

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
        of_prompts, number = replace(plan, predicted={}), options.num_ingresses
        self._ttft = Admission(of_prompts, slo_s=options.ttft_slo_s, num_ingresses=number)
        self._tpot = Admission(plan, slo_s=options.tpot_slo_s, num_ingresses=number)

    def follow(self, plan: Plan) -> None:
        """Switches to another plan."""
        self._ttft.follow(replace(plan, predicted={}), 1.0)
        self._tpot.follow(plan, 1.0)

    def admit(self, num_prompt: int, now_s: float) -> None:
        """Raises AdmissionError for a sequence that would miss an SLO, or would make others miss theirs.

        Little's law applies as for inputs: a sequence waits for earlier prompts, and running ones get tokens in turn.
        """
        ttft_s, tpot_s = self._options.ttft_slo_s, self._options.tpot_slo_s
        late_s = self._ttft.late_s(num_prompt, ttft_s, unanswered=self._waiting_prompt_tokens, now_s=now_s)
        why = f"a first token within {ttft_s:.3g} s is not possible now"
        if not late_s:
            late_s = self._tpot.late_s(1, tpot_s, unanswered=self.num_running, now_s=now_s)
            why = f"{self.num_running} sequences run; with another one a token would take more than {tpot_s:.3g} s"
        if late_s:
            self.counts.refused += 1
            raise AdmissionError(why, retry_after_s=min(max(late_s, SOONEST_RETRY_S), LONGEST_RETRY_S))

    def begin(self, sequence: S, now_s: float) -> GenerationState[S]:
        """Starts an admitted sequence; returns its state. The caller sends its first step."""
        state = GenerationState(sequence, KVPlacement(next(self._numbers)), now_s, now_s, self._waiting_prompt_tokens)
        sequence.begin(state.placement.number)
        self.counts.prompt_tokens += sequence.num_prompt
        self.num_running += 1
        self._waiting_prompt_tokens += sequence.num_prompt
        return state

    def on_token(self, state: GenerationState[S], exit_block: int, now_s: float) -> None:
        """Records that a token came from an exit."""
        waited_s, state.last_s = now_s - state.last_s, now_s
        state.attempts = 0
        state.num_tokens += 1
        self.counts.exits[exit_block] += 1
        if state.num_tokens == 1:
            state.first_s = now_s
            self._waiting_prompt_tokens -= state.sequence.num_prompt
            self.counts.ttft[bucket_of(state.ttft_s)] += 1
            self._ttft.answered(state.ttft_s, state.ahead_tokens, state.sequence.num_prompt, now_s)
        elif self._tpot.is_on:  # otherwise every token would take time for nothing
            # After one pause, the mean exceeds the SLO for many tokens, although each of them comes in time.
            self._tpot.answered(min(waited_s, state.tpot_s), self.num_running - 1, 1, now_s)

    def retry(self, state: GenerationState[S], error: OfframpError, *, waits: bool = False) -> float:
        """Prepares a sequence whose step got an error for another attempt; returns the pause before it, in seconds.

        A lost sequence restarts, at first without a pause, because other replicas are probably available. One that a
        full replica refuses tries another one. If all are full, a sequence that was accepted before, whose tokens left
        before a full later stage, or that `waits`, waits until its time limit. Raises the error that ends the sequence.
        """
        placement, is_full = state.placement, isinstance(error, OverloadedError)
        if is_full:
            # The last chosen replica refused the sequence.
            full = next((keeper.replica.name for keeper in reversed(placement.keepers.values())), None)
            is_last = len(placement.excluded) + 1 >= self._options.max_attempts
            if not is_last and full is not None and full not in placement.excluded:
                self._place_again(state, excluded=placement.excluded | {full}, is_retry=placement.is_retry)
                return 0.0
            if not (state.num_tokens or placement.is_retry or waits):
                raise error
        elif not isinstance(error, SequenceLostError):
            raise error
        elif state.attempts + 1 >= self._options.max_attempts:
            message = f"the sequence was lost {self._options.max_attempts} times without a token"
            raise StageUnavailableError(message, retry_after_s=SOONEST_RETRY_S)
        pause_s = RETRY_PAUSE_S * ((1 << state.attempts) - 1)
        state.attempts = min(state.attempts + 1, self._options.max_attempts - 1 - is_full)  # waiting ends no sequence
        self.counts.lost += not is_full
        self._place_again(state, is_retry=True)
        return pause_s

    def _place_again(self, state: GenerationState[S], **options: Any) -> None:
        """Frees the keys and values of a sequence, which starts again with a new placement."""
        state.placement.end()
        state.placement = KVPlacement(next(self._numbers), is_probe=state.placement.is_probe, **options)
        state.sequence.begin(state.placement.number)

    def end(self, state: GenerationState[S], reason: str) -> None:
        """Ends a sequence, and frees its keys and values. `reason`: stop, length, or the kind of an error."""
        assert not state.placement.has_ended, "a sequence ends once"
        state.placement.end()
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
            # The TPOT SLO does not apply to a single token.
            self.counts.in_slo += state.ttft_s <= ttft_s and (state.num_tokens < 2 or state.tpot_s <= tpot_s)
