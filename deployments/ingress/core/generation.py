"""The decisions of generation: which sequences are admitted, under which number, and what follows a loss. Pure.

A driver sends the steps: the live service, or the simulator, whose sequences are mere lengths.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from deployments.ingress.core.admission import Admission
from deployments.ingress.core.calls import LONGEST_RETRY_S, bucket_of
from deployments.ingress.core.ingress_core import RETRY_PAUSE_S
from deployments.ingress.core.routes import KVPlacement, SequenceNumbers
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
        self._numbers = SequenceNumbers(rng)
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
        state = GenerationState(sequence, KVPlacement(self._numbers.new()), now_s, self._silent_tokens)
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
        state.placement = KVPlacement(self._numbers.new(), is_again=True, is_probe=state.placement.is_probe)
        state.sequence.begin(state.placement.number)
        self.counts.lost += 1
        return pause_s

    def elsewhere(self, state: GenerationState[G]) -> bool:
        """Have a new sequence, for which a replica has no room, try another; returns whether there is one to try.

        A sequence that a replica took before is not moved so: it waits, and begins anew.
        """
        placement, full = state.placement, state.placement.newest
        if (
            placement.is_again
            or full is None
            or full in placement.avoids
            or len(placement.avoids) + 1 >= self._rules.max_attempts
        ):
            return False
        state.placement = KVPlacement(
            self._numbers.new(), avoids=placement.avoids | {full}, is_probe=placement.is_probe
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
