"""TCB's batching schemes really computed on this CPU: one encoder with random weights, one thread, by processor time.

What weights are does not change how long a batch takes; linear layers are as they are served. Every scheme answers the
same inputs, which is checked before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from earlyexit.checkpoint import random_model
from earlyexit.layout import Layout
from earlyexit.reordered import torch_segments
from experiments.kit import Spread, spread
from experiments.tcb.cost import Cost, Work, fit
from experiments.tcb.rows import Rows, concatenated_rows, outputs_of, padded_rows
from experiments.tcb.schemes import grouped
from experiments.turns import Figures, in_turns
from simulator.lengths import truncated_normal

MODELS = {
    "minilm": {"hidden_size": 384, "num_blocks": 6, "num_heads": 12, "intermediate_size": 1536, "max_length": 400},
    "bert": {"hidden_size": 768, "num_blocks": 3, "num_heads": 12, "intermediate_size": 3072, "max_length": 400},
}
"""MiniLM, and a quarter of BERT-base: all blocks are alike."""
TINY = MODELS["minilm"] | {"hidden_size": 48, "num_blocks": 2, "intermediate_size": 96}
VOCABULARY = 1000
"""Ids are drawn from so many; how many more there are costs nothing."""
LONGEST, MEAN = 100, 20
"""Tokens (section 6.2.1)."""
ROW, SLOTS = 400, (1, 2, 4, 5, 8, 10)
"""Tokens of a row, and slots of it (section 6.2.3). At 10 slots the longest input just fits."""
UNIFORM = ((1, 16), (8, 16), (64, 16), (4, 32), (32, 32), (64, 32), (1, 100), (16, 100))
"""Inputs and tokens each of the padded batches that the dynamic program's costs are fitted to."""
OURS = "packed, attention apart"

Runs = Sequence[tuple[Sequence[int], Layout]]
"""What runs one after the other for a batch: inputs by position, and how they are laid out."""


class Timed:
    """A model with random weights, and inputs by their lengths."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._model = random_model(sizes | {"vocab_size": VOCABULARY}).requires_grad_(False)
        torch_segments(self._model)

    def run(self, parts: Sequence[tuple[Sequence[int], Callable[[Sequence[int]], Runs]]]) -> Figures:
        """Milliseconds of batches by their schemes, one after the other; laying out is part of it."""
        began_s = time.thread_time()
        for lengths, scheme in parts:
            self.outputs(lengths, scheme)
        return {"ms": 1e3 * (time.thread_time() - began_s)}

    def outputs(self, lengths: Sequence[int], scheme: Callable[[Sequence[int]], Runs]) -> Tensor:
        """In the order of the inputs."""
        tokens = torch.split(_tokens(sum(lengths)), list(lengths))
        runs = scheme(lengths)
        found = [
            outputs_of(self._model, torch.cat([tokens[index] for index in positions]), layout)
            for positions, layout in runs
        ]
        order = np.argsort(np.concatenate([positions for positions, _ in runs]))
        return torch.cat(found)[torch.from_numpy(order)]

    def cost(self, rounds: int) -> Cost:
        """Of padded batches, as the dynamic program takes it."""
        sides = {f"{size} x {length}": partial(self.run, [([length] * size, padded)] * 3) for size, length in UNIFORM}
        found = in_turns(sides, rounds)
        works = (Work(size * length, size * length**2) for size, length in UNIFORM)
        return fit({work: median(found[name]["ms"]) / 3e3 for work, name in zip(works, sides, strict=True)})


def _tokens(num: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(num).integers(0, VOCABULARY, size=num, dtype=np.int32))


def packed(lengths: Sequence[int], attention: str = "auto") -> Runs:
    """Ours."""
    layout = Layout(np.array(lengths, dtype=np.int32), attention=attention)  # type: ignore[arg-type] # of four names
    return [(range(len(lengths)), layout)]


def padded(lengths: Sequence[int]) -> Runs:
    """TNB."""
    return [(range(len(lengths)), padded_rows(lengths))]


def grouped_rows(cost: Cost, lengths: Sequence[int]) -> Runs:
    """TTB: TurboTransformers' dynamic program, each group padded to its own longest."""
    groups = [run.positions for run in grouped(lengths, cost)]
    return [(group, padded_rows([lengths[index] for index in group])) for group in groups]


def concatenated(row: int, slots: int, lengths: Sequence[int]) -> Runs:
    """TCB, pure where a row is one slot."""
    return [(range(len(lengths)), concatenated_rows(lengths, row, slots))]


def tokens_computed(runs: Runs) -> int:
    """By linear layers, padding included."""
    return sum(
        len(layout.slots) * layout.longest if isinstance(layout, Rows) else layout.num_tokens for _, layout in runs
    )


def schemes_of(cost: Cost) -> Mapping[str, Callable[[Sequence[int]], Runs]]:
    """By what they are called."""
    return {
        OURS: packed,
        "packed, attention padded": partial(packed, attention="padded"),
        "packed, attention in slots": partial(packed, attention="slotted"),
        "padded (TNB)": padded,
        "grouped (TTB)": partial(grouped_rows, cost),
        "rows of 100 (TCB, pure)": partial(concatenated, LONGEST, 1),
    }


def compared(
    timed: Timed, parts: Sequence[Sequence[int]], schemes: Mapping[str, Callable[[Sequence[int]], Runs]], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of batches by every scheme, a round after the other, the sides in turns."""
    _check(timed, parts[0], schemes.values())
    sides = {name: partial(timed.run, [(part, scheme) for part in parts]) for name, scheme in schemes.items()}
    return {name: figures["ms"] for name, figures in in_turns(sides, rounds).items()}


def times_of(took_ms: Mapping[str, Sequence[float]], base: str) -> dict[str, Spread]:
    """How many times longer than `base` every side took: ratios within rounds."""
    ratios = {
        name: spread(other / one for other, one in zip(took, took_ms[base], strict=True))
        for name, took in took_ms.items()
    }
    return {name: each for name, each in ratios.items() if each is not None}


def slotted_ms(timed: Timed, num_rows: int, rounds: int) -> dict[str, list[float]]:
    """Of rows of 400 tokens with inputs of 20 (variance 20), by slots of a row, "1" and so on, and of `OURS`."""
    drawn = truncated_normal(num_rows * ROW // MEAN, mean=MEAN, variance=20, low=3, high=ROW // SLOTS[-1], seed=0)
    schemes = {f"{slots}": partial(concatenated, ROW, slots) for slots in SLOTS} | {OURS: packed}
    return compared(timed, [drawn.tolist()], schemes, rounds)


def _check(timed: Timed, lengths: Sequence[int], schemes: Iterable[Callable[[Sequence[int]], Runs]]) -> None:
    expected, *others = (timed.outputs(lengths, scheme) for scheme in schemes)
    for found in others:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
