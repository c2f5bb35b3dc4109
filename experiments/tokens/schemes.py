"""Batching schemes of TCB's figures 11 to 14, really computed on this CPU by one encoder, with what tokens bound.

    python -m experiments.tokens.schemes throughput [--model bert]
    python -m experiments.tokens.schemes slots

`throughput`: batches of 64 inputs in order of arrival, lengths 3 to 100 around 20 with a variance of 20 and of 100;
every scheme answers the same inputs. Beside what was measured stands the bound: tokens computed, padding included,
over tokens. `slots`: rows of 400 tokens filled with such inputs, attention by slots of a row.

Random weights, one thread, linear layers as they are served; the sides in turns, medians of rounds within which ratios
are taken. Times are the processor's for this thread. Minutes: about 5 each on one core.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from statistics import median

import torch

from experiments.kit import show
from experiments.tcb.real import (
    LONGEST,
    MEAN,
    MODELS,
    OURS,
    ROW,
    Timed,
    compared,
    schemes_of,
    slotted_ms,
    times_of,
    tokens_computed,
)
from experiments.tokens.lengths import batches
from simulator.lengths import truncated_normal

LOW, VARIANCES = 3, (20, 100)
BATCH, ROWS = 64, (10, 32)


def throughput(timed: Timed, name: str, num_batches: int, rounds: int) -> None:
    """Print inputs per second by scheme, what packed gains over it, and what tokens bound that by."""
    schemes = schemes_of(timed.cost(rounds))
    rows: list[tuple[object, ...]] = []
    for variance in VARIANCES:
        drawn = truncated_normal(num_batches * BATCH, mean=MEAN, variance=variance, low=LOW, high=LONGEST, seed=0)
        parts = batches(drawn, BATCH)
        took_ms = compared(timed, parts, schemes, rounds)
        over = times_of(took_ms, OURS)
        for each, scheme in schemes.items():
            bound = sum(tokens_computed(scheme(part)) for part in parts) / drawn.sum()
            per_s = 1e3 * len(drawn) / median(took_ms[each])
            rows.append((variance, each, per_s, over[each].told() if each in over else "-", float(bound)))
    columns = ("variance", "scheme", "inputs/s", "packed over it", "bound: tokens computed over tokens")
    show(f"{name}, batches of {BATCH} in order of arrival, {rounds} rounds", columns, rows)


def slots(timed: Timed, name: str, sizes: Sequence[int], rounds: int) -> None:
    """Print how many times longer a batch of rows takes in one slot than in several."""
    rows: list[tuple[object, ...]] = []
    for num_rows in sizes:
        took_ms = slotted_ms(timed, num_rows, rounds)
        for each, took in took_ms.items():
            faster = times_of(took_ms, each).get("1")
            rows.append((num_rows, each, median(took), "-" if faster is None else faster.told()))
    show(
        f"{name}, rows of {ROW} tokens with inputs of {MEAN} (variance 20), {rounds} rounds",
        ("rows", "slots", "ms", "times as fast as one slot"),
        rows,
    )


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.tokens.schemes", description=__doc__)
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
