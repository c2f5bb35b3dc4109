"""Which ramps of a model are worth their time, measured where it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from earlyexit.backends.backends import open_segments
from earlyexit.clock import MonotonicClock
from earlyexit.errors import InputError
from optimizer.injection import worth_their_time
from profiles.measure import LiveSplits, latency_tables, profile_splits, time_splits

if TYPE_CHECKING:
    from earlyexit.network.model import EarlyExitModel
    from profiles.table import FloatArray

LENGTH = 16
"""Tokens of the inputs that are timed: a short text, where a ramp weighs most."""
REPEATS = 15


def ramps_worth_their_time(
    ramps: Sequence[int], block_s: FloatArray, ramp_s: FloatArray, *, asked: bool, say: Callable[[str], None]
) -> tuple[int, ...]:
    """The ramps without those that take longer than the blocks up to the next exit.

    `asked`: the caller named them; then one that takes longer is refused. Raises InputError for that, and where none is
    left.
    """
    kept = worth_their_time(ramp_s.tolist(), block_s.tolist(), ramps)
    slow = [ramp for ramp in ramps if ramp not in kept]
    if not slow:
        return kept
    first = slow[0]
    following = next(ramp for ramp in (*kept, len(block_s) - 1) if ramp > first)
    why = (
        f"the ramp after block {first} takes {ramp_s[ramps.index(first)] * 1e3:.3g} ms, the blocks up to the next exit "
        f"{block_s[first + 1 : following + 1].sum() * 1e3:.3g} ms"
    )
    if asked or not kept:
        raise InputError(f"{why}; {'--ramps without it' if kept else '--blocks fewer'}, or a lighter --ramp-style")
    say(f"no ramps after blocks {', '.join(map(str, slow))}: {why}")
    return kept


def time_exits(model: EarlyExitModel, folder: Path) -> tuple[FloatArray, FloatArray]:
    """Seconds of every block and of every ramp, for one input on one thread."""
    length = min(LENGTH, model.max_length)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rng = np.random.default_rng(0)
        runner = LiveSplits(model, rng, open_segments("torch", model, folder, 1))
        splits = profile_splits(model.num_blocks, model.ramp_indices, (1,), (length,))
        points = time_splits(splits, runner, clock=MonotonicClock(), rng=rng, repeats=REPEATS)
    finally:
        torch.set_num_threads(threads)
    # The quickest round of each: what else the machine does only ever adds, and much to calls as short as a ramp.
    quickest = [replace(point, seconds=(min(point.seconds),)) for point in points]
    table = latency_tables(quickest, model.num_blocks, model.ramp_indices)[length]
    return table.block_s_NB[:, 0], table.ramp_s_EB[:, 0]
