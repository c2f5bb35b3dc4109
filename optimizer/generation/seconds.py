"""What one batch of a decoder takes: steps, prompts beside them, tokens that are filled in, contexts, the head.

The simulator asks it of every batch. Of a batch whose block runs r tokens that are no prompt's, and p of prompts:

- r alone take what was measured of as many steps, p alone what was measured of prompts;
- steps beside a prompt add what as many more steps add to a batch: both share the reading of the weights;
- every token that a step's sequence has come to, beyond the context that was measured, costs the same once more;
- the vocabulary head, and ramps, look at one token of every input.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from profiles.table import FloatArray, LatencyTable


class DecoderSeconds:
    """Of one kind of accelerator; seconds of blocks are (N,)."""

    def __init__(self, steps: LatencyTable, prefill: LatencyTable | None = None, slowness: float = 1.0) -> None:
        """`steps`: by inputs of one token; `prefill`: prompts, by the tokens of a batch; None: as so many steps."""
        body, head_s_B = without_head(steps)
        prompts = body if prefill is None else without_head(prefill)[0]
        self.largest = steps.batches[-1]
        """Steps at once that were measured."""
        self._most_prompt = prompts.batches[-1] * (prompts.length or 1)
        self._context = steps.context
        self._context_s = steps.context_s * slowness
        sizes_X = np.arange(1, self.largest + 1, dtype=np.float64)
        self._steps_s_XN = _from_none(body.blocks_at(sizes_X)) * slowness
        self._head_s_X = _from_none(np.interp(sizes_X, steps.batches, head_s_B)[None]) * slowness
        self._ramp_s_XE = _from_none(steps.ramps_at(sizes_X)) * slowness
        tokens_X = np.arange(1, self._most_prompt + 1, dtype=np.float64)
        self._prompts_s_XN = _from_none(prompts.blocks_at(tokens_X / (prompts.length or 1))) * slowness
        self._blocks = np.arange(len(body.block_s_NB))

    def blocks(self, rows_N: FloatArray, prompt: int = 0, *, steps: int = 0, context: int = 0) -> FloatArray:
        """Of every block, without head and ramps.

        `rows_N`: tokens there that are no prompt's, filled-in ones among them; `prompt`: tokens of prompts; `context`:
        tokens that the sequences of its `steps` steps have come to, all together.
        """
        alone_s_N = self._steps_s(rows_N)
        if prompt:
            above_N = np.minimum(prompt, np.maximum(self.largest - rows_N, 0.0))
            beside_s_N = self._steps_s(rows_N + above_N) - self._steps_s(above_N)
            alone_s_N = np.maximum(alone_s_N, self._prompt_s(prompt) + beside_s_N)
        if self._context is None or not steps:
            return alone_s_N
        least_s_N: FloatArray = np.maximum(alone_s_N + self._context_s * (context - steps * self._context), 0.0)
        return least_s_N

    def head(self, inputs: int) -> float:
        """Of the vocabulary head, asked once for so many tokens."""
        return float(_beyond(self._head_s_X, inputs)[0])

    def ramp(self, position: int, inputs: int) -> float:
        """Of the ramp that has this position among the model's."""
        return float(_beyond(self._ramp_s_XE, inputs)[position])

    def _steps_s(self, rows_N: FloatArray) -> FloatArray:
        """Linear between whole numbers; beyond what was measured, as many times that."""
        measured_N = np.minimum(rows_N, self.largest)
        below_N = measured_N.astype(np.int64)
        above_N = np.minimum(below_N + 1, self.largest)
        low_s_N, high_s_N = self._steps_s_XN[below_N, self._blocks], self._steps_s_XN[above_N, self._blocks]
        seconds_s_N: FloatArray = low_s_N + (measured_N - below_N) * (high_s_N - low_s_N)
        return seconds_s_N * np.maximum(rows_N / self.largest, 1.0)

    def _prompt_s(self, tokens: int) -> FloatArray:
        return _beyond(self._prompts_s_XN, tokens)


def at_context(table: LatencyTable, context: float) -> LatencyTable:
    """A table of steps whose sequences have come to so many tokens; as it is where it does not say its own context."""
    if table.context is None:
        return table
    longer_s_B = table.context_s * (context - table.context) * np.array(table.batches)
    return replace(table, block_s_NB=np.maximum(table.block_s_NB + longer_s_B, 0.0))


def without_head(table: LatencyTable) -> tuple[LatencyTable, FloatArray]:
    """A table whose last block takes no longer than the one before it, and what it takes longer."""
    if len(table.block_s_NB) == 1:
        return table, np.zeros(len(table.batches))
    block_s_NB = table.block_s_NB.copy()
    block_s_NB[-1] = np.minimum(block_s_NB[-1], block_s_NB[-2])
    return replace(table, block_s_NB=block_s_NB), table.block_s_NB[-1] - block_s_NB[-1]


def _from_none(seconds_NX: FloatArray) -> FloatArray:
    """By whole numbers from 0, of which nothing takes any time."""
    return np.vstack([np.zeros(len(seconds_NX)), seconds_NX.T])


def _beyond(seconds_XN: FloatArray, number: int) -> FloatArray:
    """At a whole number; beyond the last, as many times that."""
    last = len(seconds_XN) - 1
    found: FloatArray = seconds_XN[min(number, last)] * max(1.0, number / last)
    return found
