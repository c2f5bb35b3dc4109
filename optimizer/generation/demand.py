"""The demand of text generation: sequences, each a prompt and a number of steps, and memory for keys and values.

A step is an input like any other, and its answer is a token. The first token of an answer comes from the prompt. A
token that leaves early has no keys and values in the blocks behind its ramp, but later tokens of its sequence attend to
them. So `earlyexit.sequences.kv` fills them in with a later token. Let u be the share of steps that reach a block:

- *compute* runs all skipped tokens there, together with the next token that survives. In a sequence of n steps, only
  those without a later survivor are never run: (1-u)(1-(1-u)^n)/u of them if steps leave independently. So an exit
  saves time, but hardly any work.
- *copy* (state propagation: CALM, Schuster et al. 2022) computes only their keys and values, which takes `copy_share`
  of a block's time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from earlyexit.data.strict import FromFile
from earlyexit.errors import PlanError
from earlyexit.named import Fill
from earlyexit.sequences.sequence import PAGE_TOKENS
from profiles.lengths import MOST_TOKENS, Lengths, Pairs
from profiles.table import LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec(FromFile):
    """The memory of accelerators, and how much of it keys and values take."""

    bytes_per_token: Annotated[float, Field(ge=1e-3, le=1e18)]
    """Keys and values of one token in all blocks: 2 x blocks x key/value heads x head size x bytes per number."""
    memory_bytes: Annotated[Mapping[str, Annotated[float, Field(gt=0, le=1e18)]], Field(min_length=1)]
    """By accelerator type: memory of one accelerator for weights, keys and values."""
    weights_bytes: Annotated[float, Field(ge=0, le=1e18)] = 0.0
    """Weights of the whole model. A stage needs those of its blocks."""
    page_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = PAGE_TOKENS
    reserved_tokens: Annotated[float | None, Field(gt=0, le=MOST_TOKENS)] = None
    """Mean tokens reserved for a sequence: its prompt and all that it may produce. None: its actual mean length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The sequences of a service."""

    prompt: Lengths
    """Lengths of prompts in tokens."""
    output: Lengths
    """Lengths of answers in tokens."""
    ttft_s: float | None = None
    """Promised time to the first token of a prompt of mean length. None: no promise."""
    fill: Fill = "compute"
    copy_share: float = 1.0
    """Share of a block's time for a token that its keys and values alone take."""
    chunk: int | None = None
    """Largest number of a prompt's tokens in one batch. None: as many as the largest measured batch."""
    prefill: Mapping[str, LatencyTable] | None = None
    """Latency of prompts by accelerator type. None: a prompt takes as long as a batch of as many steps."""
    regroup_s: float = 0.0
    """Time to gather the states of a batch that begins behind the first block."""
    late_head: bool = False
    """Whether one call of the vocabulary head, at the end of the batch, answers all tokens that leave. The exit policy
    must decide without the head. Otherwise every ramp calls the head, and its seconds include that call."""
    most_running: int | None = None
    """Largest number of concurrent sequences. None: as many as fit into memory."""
    kv: KvSpec | None = None
    """The memory for keys and values. None: it is not limited."""
    batch_limit: float = math.inf
    """Largest batch of a plan. Larger measured batches are still used, because skipped tokens enlarge a batch."""
    recorded: Pairs | None = None
    """Recorded lengths of sequences in order, for the simulator. Plans use `prompt` and `output`."""

    def __post_init__(self) -> None:
        if self.output.mean <= 1:
            raise PlanError("output_tokens must be above 1: an answer of one token has no steps")

    @property
    def num_steps(self) -> float:
        """The mean number of steps of a sequence."""
        return self.output.mean - 1

    @property
    def mean_context(self) -> float:
        """The mean number of tokens before a step. Long answers have more steps, so they count more."""
        lengths = self.output.shares or ((self.output.mean, 1.0),)
        before = sum(share * (length - 1) * max(0.0, length - 2) / 2 for length, share in lengths)
        return self.prompt.mean + before / self.num_steps

    def tokens_per_step(self, share: float) -> float:
        """Returns the tokens that a block runs per step of the service, if `share` of the steps reach it.

        With `copy`, a token that is filled in counts as `copy_share` of a token.
        """
        filled_in = self.eventually_run(share) - share
        return share + max(0.0, filled_in) * (1.0 if self.fill == "compute" else self.copy_share)

    def eventually_run(self, share: float) -> float:
        """Returns the share of steps that survive (`share` of them do) or that precede a survivor of their sequence."""
        lengths = self.output.shares or ((self.output.mean, 1.0),)
        never_run = sum(part * _never_run(share, length - 1) for length, part in lengths)
        return 1 - never_run / self.num_steps

    @property
    def held_tokens(self) -> float:
        """The mean number of tokens for which a sequence holds memory, including the unused half of its last page."""
        tokens = self.prompt.mean + self.output.mean
        if self.kv is None:
            return tokens
        return (self.kv.reserved_tokens or tokens) + (self.kv.page_tokens - 1) / 2


def _never_run(share: float, num_steps: float) -> float:
    """Returns the mean number of a sequence's steps that are no survivors and precede none."""
    if share <= 0:
        return num_steps
    left: float = 1 - share
    skipped: float = left * (1 - left**num_steps) / share
    return skipped
