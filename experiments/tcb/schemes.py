"""How the inputs of a batch are laid out for the accelerator: TCB's baselines, its own two schemes, and ours.

- `padded` (TNB): a row per input, as long as the longest.
- `grouped` (TTB): inputs sorted by length and cut into runs of their own, each padded, by TurboTransformers' dynamic
  program (its section on the batch scheduler): the cut that takes least in all.
- `rows` (TCB's pure ConcatBatching): rows of a fixed number of tokens, each with several inputs; attention sees a whole
  row, and masks what is not an input's own.
- `slotted rows` (TCB's slotted ConcatBatching): the same, attention by slots of a row, as long as the longest input.
- `packed` (ours): linear layers see tokens and no padding, attention a padded form.
- `slots` (ours): the same, attention over slots as long as the longest input, filled first-fit-decreasing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from earlyexit.errors import DataError
from earlyexit.slots import first_fit_decreasing
from experiments.tcb.cost import Cost, Work

Scheme = Literal["padded", "grouped", "rows", "slotted rows", "packed", "slots"]


class Run(NamedTuple):
    """Inputs of a batch that run together, by position, and what the model is given."""

    positions: tuple[int, ...]
    work: Work


def layout(scheme: Scheme, lengths: Sequence[int], cost: Cost, *, row: int = 0) -> list[Run]:
    """The runs of a batch, one after the other; only `grouped` has more than one.

    `row`: tokens of a row, for the schemes that have rows. Raises DataError for an input longer than its row.
    """
    if scheme == "grouped":
        return grouped(lengths, cost)
    everybody, total, longest = tuple(range(len(lengths))), sum(lengths), max(lengths)
    if scheme in ("rows", "slotted rows"):
        return [Run(everybody, _rows(lengths, row, per_row=max(1, row // longest) if scheme == "slotted rows" else 1))]
    if scheme == "padded":
        return [Run(everybody, Work(len(lengths) * longest, len(lengths) * longest**2))]
    slots = len(lengths) if scheme == "packed" else len(first_fit_decreasing(lengths, longest))
    return [Run(everybody, Work(total, slots * longest**2))]


def _rows(lengths: Sequence[int], row: int, per_row: int) -> Work:
    """Rows with so many slots each; one slot is the whole row."""
    if max(lengths) > row:
        raise DataError(f"an input of {max(lengths)} tokens fits into no row of {row}")
    width = row // per_row
    rows = -(-len(first_fit_decreasing(lengths, width)) // per_row)
    return Work(rows * row, rows * per_row * width**2)


def grouped(lengths: Sequence[int], cost: Cost) -> list[Run]:
    """Runs of similar length: the cut of the sorted inputs that takes least in all.

    TurboTransformers (PPoPP'21, algorithm 3): best[i] = min over j of best[j] + the padded run of j to i - 1.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best_s, begins = np.zeros(len(order) + 1), [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        sizes, longest = np.arange(end, 0, -1), lengths[order[end - 1]]
        run_s = cost.fixed_s + sizes * longest * (cost.token_s + cost.cell_s * longest)
        total_s = best_s[:end] + run_s
        at = int(total_s.argmin())
        best_s[end], begins[end] = total_s[at], at
    runs: list[Run] = []
    end = len(order)
    while end:
        first, longest = begins[end], lengths[order[end - 1]]
        size = end - first
        runs.append(Run(tuple(order[first:end]), Work(size * longest, size * longest**2)))
        end = first
    return runs[::-1]
