"""Steps of sequences, as replicas have them: what a batch of them takes, and what their early tokens leave behind."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import numpy as np

from cluster.pace import Pace
from deployments.ingress.core.flights import Flight
from earlyexit.counts import SplitCounts
from earlyexit.engine import Batch
from earlyexit.member import Member
from earlyexit.split import Split
from optimizer.generation.seconds import DecoderSeconds
from optimizer.plan import PolicySpec
from simulator.decisions import NOWHERE
from simulator.trip import Input
from simulator.work import Work

LATE: Final = ("foreseen", "similar")
"""Policies that decide before the head that all exits share is asked (`earlyexit/shared_head.py`): so who leaves by
them is answered at the batch's end."""


@dataclass(slots=True, kw_only=True)
class Step(Member[Flight[int]]):
    """An input of a sequence; its tokens are those of a chunk of its prompt, or the newest alone."""

    context: int
    """Tokens that its sequence had come to before."""
    behind: Counter[int]
    """Of its sequence: tokens that left after a block, and that no later token has come by for yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """How large a batch of steps is."""

    inputs: int = 0
    steps: int = 0
    """Inputs of one token."""
    prompt: int = 0
    """Tokens of all others."""
    context: int = 0
    """Tokens that the sequences of `steps` had come to."""
    behind: Counter[int] = field(default_factory=Counter)
    """Tokens to be filled in, by the block that they left after."""

    def __sub__(self, other: StepSize) -> StepSize:
        return StepSize(
            inputs=self.inputs - other.inputs,
            steps=self.steps - other.steps,
            prompt=self.prompt - other.prompt,
            context=self.context - other.context,
            behind=self.behind - other.behind,
        )


def size_of(members: Sequence[Input]) -> StepSize:
    """Of all together."""
    steps, prompt, context = 0, 0, 0
    behind: Counter[int] = Counter()
    for member in members:
        assert isinstance(member, Step)
        if member.tokens == 1:
            steps += 1
            context += member.context
        else:
            prompt += member.tokens
        if member.behind:
            behind += member.behind
    return StepSize(inputs=len(members), steps=steps, prompt=prompt, context=context, behind=behind)


class StepWork(Work):
    """Of one split."""

    __slots__ = ("_fill", "_num_blocks", "_positions", "_seconds")

    def __init__(
        self,
        split: Split,
        leaves: array[int],
        pace: Pace,
        counts: SplitCounts,
        took_s: array[float] | None = None,
        *,
        seconds: DecoderSeconds,
        ramps: Sequence[int],
        num_blocks: int,
        fill: float,
        policy: PolicySpec | None,
    ) -> None:
        """`ramps`: of the model; `fill`: of a token's time in a block, what filling it in there takes."""
        super().__init__(split, leaves, pace, counts, took_s)
        self.size_of = size_of
        self.is_late = policy is not None and policy.name in LATE
        self._seconds = seconds
        self._positions = {ramp: position for position, ramp in enumerate(ramps)}
        self._num_blocks = num_blocks
        self._fill = fill

    def until_s(self, size: StepSize) -> list[float]:
        """Without the vocabulary head behind the last block: see `end_s`."""
        return self._until_s_of(size, self.split.ramps)

    def seconds(self, block: int, size: StepSize, ramps: Collection[int]) -> float:
        """With the vocabulary head, behind the last block."""
        until_s = self._until_s_of(size, ramps)[block + 1 - self.split.first]
        return until_s + self.end_s(size, 0) if block + 1 == self.split.end else until_s

    def _until_s_of(self, size: StepSize, ramps: Collection[int]) -> list[float]:
        split, seconds = self.split, self._seconds
        filled_N = np.zeros(self._num_blocks)
        for ramp, tokens in size.behind.items():
            filled_N[ramp + 1 :] += tokens * self._fill
        block_s_N = seconds.blocks(size.steps + filled_N, size.prompt, steps=size.steps, context=size.context)
        for ramp in ramps:
            block_s_N[ramp] += seconds.ramp(self._positions[ramp], size.inputs)
        return [0.0, *accumulate(block_s_N[split.first : split.end].tolist())]

    def end_s(self, size: StepSize | None, num_waiting: int) -> float:
        inputs = num_waiting
        if size is not None and self.split.end == self._num_blocks:
            inputs += size.inputs
        return self._seconds.head(inputs)

    def count(self, batch: Batch[Flight[int]], seconds: float) -> None:
        """A batch was run: whatever its members passed is filled in, and who left early is behind, but no probe."""
        super().count(batch, seconds)
        leaves, cycle, at_end = self._leaves, len(self._leaves), self.split.end == self._num_blocks
        for member in batch.members:
            assert isinstance(member, Step)
            ramp = leaves[member.payload.input % cycle] if self.split.ramps and not batch.stays else NOWHERE
            if ramp != NOWHERE:
                leave(member.behind, ramp, member.tokens)
            elif at_end:
                member.behind.clear()


def leave(behind: Counter[int], ramp: int, tokens: int) -> None:
    """A sequence's newest tokens leave after a block, up to which all that left before them are filled in now."""
    passed = [block for block in behind if block < ramp]
    behind[ramp] += tokens + sum(behind.pop(block) for block in passed)
