"""What generation asks of a plan: sequences, each a prompt and so many steps, and where keys and values are kept.

A step is an input like any other, whose answer is a token; the first token of an answer comes of the prompt. A token
that leaves early has no keys and values in the blocks behind its ramp, and later tokens of its sequence attend to them.
`earlyexit.sequences.kv_memory` fills them in when the next token of the sequence comes by. So with u the share of
steps that reach a block:

- *compute* runs all that were skipped there as well, with the next that survives. Of a sequence of n steps only those
  are never run that no survivor follows, (1-u)(1-(1-u)^n)/u of them where every step leaves by itself: an exit saves
  time, hardly any work;
- *copy* (Schuster et al. 2022, CALM: state propagation) makes keys and values alone of them, `copy_share` of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from earlyexit.errors import PlanError
from earlyexit.named import Fill
from earlyexit.sequences.sequence import PAGE_TOKENS
from profiles.lengths import Lengths, Pairs
from profiles.table import LatencyTable

FILLS: tuple[Fill, ...] = get_args(Fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """What keys and values take, and where they may be."""

    bytes_per_token: float
    """Of all blocks."""
    memory_bytes: Mapping[str, float]
    """Of one accelerator, by type: for weights and for keys and values."""
    weights_bytes: float = 0.0
    """Of the whole model; a stage has those of its blocks."""
    page_tokens: int = PAGE_TOKENS
    reserved_tokens: float | None = None
    """For a sequence, on average: its prompt and all that it may produce. None: what it comes to."""

    def __post_init__(self) -> None:
        check_number("kv bytes_per_token", self.bytes_per_token, above_zero=True)
        check_number("kv weights_bytes", self.weights_bytes)
        for device, num_bytes in self.memory_bytes.items():
            check_number(f"kv memory_bytes of {device}", num_bytes, above_zero=True)
        if self.page_tokens < 1:
            raise PlanError(f"kv page_tokens must be at least 1, not {self.page_tokens}")
        if self.reserved_tokens is not None:
            check_number("kv reserved_tokens", self.reserved_tokens, above_zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Sequences of a service; refuses what is none."""

    prompt: Lengths
    """Tokens of prompts."""
    output: Lengths
    """Tokens of answers."""
    ttft_s: float | None = None
    """Within which the first token is promised, of a prompt of mean length; None: nothing is."""
    fill: str = "compute"
    copy_share: float = 1.0
    """Of a block's time for a token, what its keys and values alone take."""
    chunk: int | None = None
    """The most tokens of a prompt in one batch; None: as many as the largest batch that was measured."""
    prefill: Mapping[str, LatencyTable] | None = None
    """What prompts take, by accelerator type; None: what batches of as many steps take."""
    regroup_s: float = 0.0
    """What each batch costs that begins behind the first block: states are gathered and put together anew."""
    late_head: bool = False
    """Whether tokens that leave are answered at the end of the batch, by one call of the vocabulary head for all.
    Policies that need no head to decide do so. Else every ramp has a call of its own, which its seconds contain."""
    most_running: int | None = None
    """Sequences at a time; None: as many as there is memory for."""
    kv: KvMemory | None = None
    """None: there is memory enough."""
    batch_limit: float = math.inf
    """The largest batch that a plan may have; larger ones that were measured hold the skipped tokens too."""
    recorded: Pairs | None = None
    """What sequences came to, in turn, where that is known: what is simulated. Plans go by `prompt` and `output`."""

    def __post_init__(self) -> None:
        if self.output.mean <= 1:
            raise PlanError("output_tokens must be above 1: where a prompt's answer is one token, there are no steps")
        if self.fill not in FILLS:
            raise PlanError(f"fill must be one of {', '.join(FILLS)}, not {self.fill!r}")
        if not 0 <= self.copy_share <= 1:
            raise PlanError(f"copy_share is a share, from 0 to 1, not {self.copy_share}")
        if self.ttft_s is not None:
            check_number("ttft_s", self.ttft_s, above_zero=True)
        if self.chunk is not None and self.chunk < 1:
            raise PlanError(f"chunk must be at least 1 token, not {self.chunk}")
        if self.most_running is not None and self.most_running < 1:
            raise PlanError(f"most_running must be at least 1 sequence, not {self.most_running}")
        check_number("regroup_s", self.regroup_s)

    @property
    def num_steps(self) -> float:
        """Of a sequence, on average."""
        return self.output.mean - 1

    @property
    def mean_context(self) -> float:
        """Tokens that a step's sequence has come to before it: a long answer has more steps, and longer contexts."""
        lengths = self.output.shares or ((self.output.mean, 1.0),)
        before = sum(share * (length - 1) * max(0.0, length - 2) / 2 for length, share in lengths)
        return self.prompt.mean + before / self.num_steps

    def rows(self, share: float) -> float:
        """Tokens per step of the service that are run at a block which `share` of the steps reach.

        Those that are filled in by `copy` count as the part of a token that they take.
        """
        filled = self.reached_in_time(share) - share
        return share + max(0.0, filled) * (1.0 if self.fill == "compute" else self.copy_share)

    def reached_in_time(self, share: float) -> float:
        """Of the steps, those that survive where `share` does, or that a survivor of their sequence follows."""
        if self.output.shares is None:
            return 1 - _never(share, self.num_steps) / self.num_steps
        never = sum(part * _never(share, length - 1) for length, part in self.output.shares)
        return 1 - never / self.num_steps

    @property
    def held_tokens(self) -> float:
        """The mean number of tokens that a running sequence has room for: half of its last page is unused."""
        if self.kv is None or self.kv.reserved_tokens is None:
            tokens = self.prompt.mean + self.output.mean
        else:
            tokens = self.kv.reserved_tokens
        return tokens + (0.0 if self.kv is None else (self.kv.page_tokens - 1) / 2)


def _never(share: float, num_steps: float) -> float:
    """Of a sequence's steps, how many no survivor follows, themselves among them."""
    if share <= 0:
        return num_steps
    left: float = 1 - share
    skipped: float = left * (1 - left**num_steps) / share
    return skipped


def check_number(name: str, value: float, *, above_zero: bool = False) -> None:
    """Raise PlanError for what is no amount."""
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise PlanError(f"{name} must be a finite number {'above' if above_zero else 'not below'} 0, not {value}")
