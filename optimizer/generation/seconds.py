"""Seconds of one batch of a decoder: steps, prompts beside them, tokens filled in, contexts, and the vocabulary head.

The simulator computes them for every batch. A block runs r tokens that are not from prompts, and p prompt tokens:

- r alone take the measured time of as many steps, and p alone take the measured time of a prompt;
- steps beside a prompt add the time that as many further steps add to a batch: both share the reading of the weights;
- each token of a step's context beyond the measured context adds a measured constant;
- the vocabulary head and the ramps run on one token of every input.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from profiles.table import FloatArray, LatencyTable


class DecoderSeconds:
    """Seconds of batches on one accelerator type. Seconds of blocks have the shape (N,)."""

    def __init__(self, steps: LatencyTable, prefill: LatencyTable | None = None, slowness: float = 1.0) -> None:
        """`steps` is a table of inputs of one token, `prefill` one of prompts; None: prompts take as long as steps."""
        body, head_s_B = without_head(steps)
        prompts = body if prefill is None else without_head(prefill)[0]
        self.largest = steps.batches[-1]
        """Largest measured batch of steps."""
        self._context = steps.context
        self._context_s = steps.context_s * slowness
        sizes_X = np.arange(1, self.largest + 1, dtype=np.float64)
        self._steps_s_XN = _with_zero(body.blocks_at(sizes_X)) * slowness
        self._head_s_X = _with_zero(np.interp(sizes_X, steps.batches, head_s_B)[None]) * slowness
        self._ramp_s_XE = _with_zero(steps.ramps_at(sizes_X)) * slowness
        length = prompts.length or 1
        tokens_X = np.arange(1, prompts.batches[-1] * length + 1, dtype=np.float64)
        self._prompts_s_XN = _with_zero(prompts.blocks_at(tokens_X / length)) * slowness

    def blocks(
        self, rows_N: FloatArray, prompt_N: FloatArray | float = 0.0, *, steps: int = 0, context: int = 0
    ) -> FloatArray:
        """Returns the seconds of every block, without the head and ramps.

        `rows_N` are the tokens that are not from prompts, and `prompt_N` those that are. Both include tokens filled in.
        `context` is the total context of the batch's `steps` steps, in tokens.
        """
        seconds_N = _at_size(self._steps_s_XN, rows_N)
        if np.any(prompt_N):
            further_N = np.minimum(prompt_N, np.maximum(self.largest - rows_N, 0.0))
            added_s_N = _at_size(self._steps_s_XN, rows_N + further_N) - _at_size(self._steps_s_XN, further_N)
            seconds_N = np.maximum(seconds_N, _at_size(self._prompts_s_XN, prompt_N) + added_s_N)
        if self._context is None or not steps:
            return seconds_N
        return np.asarray(np.maximum(seconds_N + self._context_s * (context - steps * self._context), 0.0))

    def head(self, inputs: int) -> float:
        """Returns the seconds of one call of the vocabulary head."""
        return float(_at_size(self._head_s_X, inputs)[0])

    def ramp(self, position: int, inputs: int) -> float:
        """Returns the seconds of a ramp, given by its position among the model's ramps."""
        return float(_at_size(self._ramp_s_XE, inputs)[position])


def at_context(table: LatencyTable, context: float) -> LatencyTable:
    """Returns a table of steps at another context length. A table without a context length is returned unchanged."""
    if table.context is None:
        return table
    longer_s_B = table.context_s * (context - table.context) * np.array(table.batches)
    return replace(table, block_s_NB=np.maximum(table.block_s_NB + longer_s_B, 0.0))


def without_head(table: LatencyTable) -> tuple[LatencyTable, FloatArray]:
    """Returns a table whose last block takes no longer than the one before it, and the excess seconds: the head's."""
    if len(table.block_s_NB) == 1:
        return table, np.zeros(len(table.batches))
    block_s_NB = table.block_s_NB.copy()
    block_s_NB[-1] = np.minimum(block_s_NB[-1], block_s_NB[-2])
    return replace(table, block_s_NB=block_s_NB), table.block_s_NB[-1] - block_s_NB[-1]


def _with_zero(seconds_NX: FloatArray) -> FloatArray:
    """Returns a table by whole numbers from 0 on, where 0 takes no time."""
    return np.vstack([np.zeros(len(seconds_NX)), seconds_NX.T])


def _at_size(seconds_XN: FloatArray, number_N: FloatArray | float) -> FloatArray:
    """Interpolates each column between whole numbers. Beyond the end of the table, seconds grow in proportion."""
    last, columns = len(seconds_XN) - 1, np.arange(seconds_XN.shape[1])
    measured_N = np.minimum(number_N, last)
    below_N = np.asarray(measured_N, dtype=np.int64)
    low_s_N, high_s_N = seconds_XN[below_N, columns], seconds_XN[np.minimum(below_N + 1, last), columns]
    measured_s_N = low_s_N + (measured_N - below_N) * (high_s_N - low_s_N)
    return np.asarray(measured_s_N * np.maximum(number_N / last, 1.0))
