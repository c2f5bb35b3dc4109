"""Batching schemes of TCB's figures 11 to 14, really computed on this CPU by one encoder, with what tokens bound.

    python -m experiments.token_schemes throughput [--model bert]
    python -m experiments.token_schemes slots

`throughput`: batches of 64 inputs in order of arrival, lengths 3 to 100 around 20 with a variance of 20 and of 100;
every scheme answers the same inputs. Beside what was measured stands the bound: tokens computed, padding included,
over tokens. `slots`: rows of 400 tokens filled with such inputs, attention by slots of a row.

Random weights, one thread, linear layers as they are served; the sides in turns, medians of rounds within which ratios
are taken. Times are the processor's for this thread. Minutes: about 5 each on one core.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from earlyexit.checkpoint import random_model
from earlyexit.layout import Layout
from earlyexit.model import EarlyExitModel
from earlyexit.reordered import torch_segments
from experiments.kit import show, spread
from experiments.rows import Rows, concatenated_rows, outputs_of, padded_rows
from experiments.tcb.cost import Cost, Work, fit
from experiments.tcb.schemes import grouped
from experiments.text_lengths import batches
from experiments.turns import Figures, in_turns
from simulator.lengths import truncated_normal

MODELS = {
    "minilm": {"hidden_size": 384, "num_blocks": 6, "num_heads": 12, "intermediate_size": 1536, "max_length": 400},
    "bert": {"hidden_size": 768, "num_blocks": 3, "num_heads": 12, "intermediate_size": 3072, "max_length": 400},
}
"""MiniLM, and a quarter of BERT-base: all blocks are alike."""
VOCABULARY = 1000
LOW, HIGH, MEAN, VARIANCES = 3, 100, 20, (20, 100)
"""Tokens (section 6.2.1)."""
BATCH = 64
ROW, SLOTS, ROWS = 400, (1, 2, 4, 5, 8, 10), (10, 32)
"""Tokens of a row, slots of it, and rows of a batch (section 6.2.3). At 10 slots the longest input just fits."""
UNIFORM = ((1, 16), (8, 16), (64, 16), (4, 32), (32, 32), (64, 32), (1, 100), (16, 100))
"""Inputs and tokens each of the padded batches that the dynamic program's costs are fitted to."""

Runs = Sequence[tuple[Sequence[int], Layout]]
"""What runs one after the other for a batch: inputs by position, and how they are laid out."""


class Timed:
    """A model with random weights, and inputs by their lengths."""

    def __init__(self, sizes: dict[str, int]) -> None:
        model = random_model(sizes | {"vocab_size": VOCABULARY}).requires_grad_(False)
        self._model: EarlyExitModel = torch_segments(model)

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
        "packed, attention apart": packed,
        "packed, attention padded": partial(packed, attention="padded"),
        "packed, attention in slots": partial(packed, attention="slotted"),
        "padded (TNB)": padded,
        "grouped (TTB)": partial(grouped_rows, cost),
        "rows of 100 (TCB, pure)": partial(concatenated, HIGH, 1),
    }


def throughput(timed: Timed, name: str, num_batches: int, rounds: int) -> None:
    """Print inputs per second by scheme, what packed gains over it, and what tokens bound that by."""
    cost = timed.cost(rounds)
    rows: list[tuple[object, ...]] = []
    for variance in VARIANCES:
        drawn = truncated_normal(num_batches * BATCH, mean=MEAN, variance=variance, low=LOW, high=HIGH, seed=0)
        parts = batches(drawn, BATCH)
        schemes = schemes_of(cost)
        _check(timed, parts[0], schemes.values())
        sides = {each: partial(timed.run, [(part, scheme) for part in parts]) for each, scheme in schemes.items()}
        found = in_turns(sides, rounds)
        ours = found["packed, attention apart"]["ms"]
        for each, scheme in schemes.items():
            took = found[each]["ms"]
            ratio = spread(other / one for other, one in zip(took, ours, strict=True))
            bound = sum(tokens_computed(scheme(part)) for part in parts) / drawn.sum()
            per_s = 1e3 * len(drawn) / median(took)
            rows.append((variance, each, per_s, "-" if ratio is None else ratio.told(), float(bound)))
    columns = ("variance", "scheme", "inputs/s", "packed over it", "bound: tokens computed over tokens")
    show(f"{name}, batches of {BATCH} in order of arrival, {rounds} rounds", columns, rows)


def slots(timed: Timed, name: str, sizes: Sequence[int], rounds: int) -> None:
    """Print how many times faster a batch of rows is in slots."""
    rows: list[tuple[object, ...]] = []
    for num_rows in sizes:
        drawn = truncated_normal(num_rows * ROW // MEAN, mean=MEAN, variance=20, low=LOW, high=ROW // SLOTS[-1], seed=0)
        lengths = drawn.tolist()
        schemes = {f"{each} slots": partial(concatenated, ROW, each) for each in SLOTS} | {"packed": packed}
        _check(timed, lengths, schemes.values())
        found = in_turns({each: partial(timed.run, [(lengths, of)]) for each, of in schemes.items()}, rounds)
        base = found["1 slots"]["ms"]
        for each, figures in found.items():
            ratio = spread(one / other for one, other in zip(base, figures["ms"], strict=True))
            rows.append((num_rows, each, median(figures["ms"]), "-" if ratio is None else ratio.told()))
    show(
        f"{name}, rows of {ROW} tokens with inputs of {MEAN} (variance 20), {rounds} rounds",
        ("rows", "attention", "ms", "times as fast as one slot"),
        rows,
    )


def _check(timed: Timed, lengths: Sequence[int], schemes: Iterable[Callable[[Sequence[int]], Runs]]) -> None:
    expected, *others = (timed.outputs(lengths, scheme) for scheme in schemes)
    for found in others:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.token_schemes", description=__doc__)
    parser.add_argument("what", choices=("throughput", "slots"))
    parser.add_argument("--model", choices=tuple(MODELS), default="minilm")
    parser.add_argument("--batches", type=int, default=4, help="of throughput")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of slots")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    timed = Timed(MODELS[options.model])
    if options.what == "throughput":
        throughput(timed, options.model, options.batches, options.rounds)
    else:
        slots(timed, options.model, options.rows, options.rounds)


if __name__ == "__main__":
    main()
