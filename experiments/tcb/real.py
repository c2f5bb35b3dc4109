"""The same batches really computed on this CPU: a model alone, the schemes in turns, one thread, by processor time.

A padded row costs what an input of its length costs, so `padded` and `grouped` run as batches of equally long inputs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Literal

import numpy as np
import torch

from earlyexit.checkpoint import random_model
from earlyexit.model import EarlyExitModel
from earlyexit.signature import Encoded
from earlyexit.train import pack
from experiments.kit import Spread, spread
from experiments.tcb.cost import Cost, Work, fit
from experiments.tcb.schemes import grouped
from experiments.turns import Figures, Side, in_turns
from simulator.decisions import IntArray

Computed = Literal["padded", "grouped", "packed"]
MINILM = {"hidden_size": 384, "num_blocks": 6, "num_heads": 12, "intermediate_size": 1536, "max_length": 128}
TINY = MINILM | {"hidden_size": 48, "num_blocks": 2, "intermediate_size": 96}
VOCABULARY = 1000
"""Ids are drawn from so many; how many more there are costs nothing."""
UNIFORM = ((1, 16), (8, 16), (64, 16), (4, 32), (32, 32), (64, 32), (1, 100), (16, 100))
"""Inputs and tokens each of the batches that this CPU's cost is fitted to."""


def model(sizes: dict[str, int]) -> EarlyExitModel:
    """With random weights: what they are does not change how long a batch takes."""
    return random_model(sizes | {"vocab_size": VOCABULARY}, name="timed")


@torch.inference_mode()
def run_s(of: EarlyExitModel, lengths: Sequence[int]) -> float:
    """Processor seconds of the whole model on one batch, without its head; the model runs on this thread alone."""
    encoded = [Encoded(length, (np.arange(length, dtype=np.int32) % VOCABULARY,)) for length in lengths]
    values, layout = pack(encoded, of.device)
    began_s = time.thread_time()  # what else the machine does does not count
    of.run_blocks(0, of.num_blocks, values, layout)
    return time.thread_time() - began_s


def timed(of: EarlyExitModel, runs: Sequence[Sequence[int]]) -> Figures:
    """Batches one after the other."""
    return {"s": sum(run_s(of, run) for run in runs)}


def cpu_cost(of: EarlyExitModel, rounds: int) -> Cost:
    """Fitted to batches of equally long inputs; medians of rounds in turns."""
    sides = {f"{size} x {length}": partial(timed, of, [[length] * size]) for size, length in UNIFORM}
    found = in_turns(sides, rounds)
    works = [Work(size * length, size * length * length) for size, length in UNIFORM]
    return fit({work: median(found[name]["s"]) for work, name in zip(works, sides, strict=True)})


def runs_of(scheme: Computed, lengths: Sequence[int], cost: Cost) -> list[list[int]]:
    """A batch as the lengths of what is really run, one after the other."""
    if scheme == "packed":
        return [list(lengths)]
    if scheme == "padded":
        return [[max(lengths)] * len(lengths)]
    runs = [[lengths[position] for position in run.positions] for run in grouped(lengths, cost)]
    return [[max(run)] * len(run) for run in runs]


def packed_over(
    of: EarlyExitModel, drawn: IntArray, cost: Cost, *, batch: int, batches: int, rounds: int
) -> dict[str, Spread]:
    """How many times longer padded and grouped take than packed: batches in order of arrival, ratios within rounds."""
    parts = [drawn[at * batch : (at + 1) * batch].tolist() for at in range(batches)]
    schemes: tuple[Computed, ...] = ("packed", "padded", "grouped")
    sides: dict[str, Side] = {
        scheme: partial(timed, of, [run for part in parts for run in runs_of(scheme, part, cost)]) for scheme in schemes
    }
    found = {scheme: figures["s"] for scheme, figures in in_turns(sides, rounds).items()}
    ratios = {
        scheme: spread(other / ours for other, ours in zip(found[scheme], found["packed"], strict=True))
        for scheme in schemes[1:]
    }
    return {scheme: each for scheme, each in ratios.items() if each is not None}
