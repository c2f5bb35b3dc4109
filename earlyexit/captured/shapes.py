"""Shapes that segments are captured for: how many inputs and tokens one holds, and which holds a set of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from earlyexit.split import Budget
from earlyexit.wire import Lengths

MOST_TOKENS = 8192
"""Larger sets are not captured: computing a block of them takes a GPU longer than telling it what to do takes the host,
and a captured shape keeps memory."""
SHORTEST = 16
"""Tokens of the shortest row of attention; more lengths than its doublings would cost graphs and save next to nothing,
for attention is a few percent of a block of short rows."""
STEPS_OF_TOKENS = 4
STEPS_OF_INPUTS = 8
"""Per octave: a shape has at most a quarter, or an eighth, more than it is asked to hold."""
TOKENS_AT_ONCE = 8
"""Numbers of tokens of mixed lengths are multiples of it, as tensor cores take them."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """What is captured: room for inputs of one length, or for inputs of any lengths with so many tokens together."""

    num_tokens: int
    num_rows: int
    """Of attention. Of mixed lengths one more than there is room for inputs: the tokens that nobody needs go there, so
    that they meet no input's."""
    longest: int
    """Tokens of a row."""
    mixed: bool
    """Whether lengths differ, or are shorter than a row."""


def shape_of(lengths_B: Lengths, max_length: int) -> Shape:
    """The smallest shape that holds inputs of these lengths, of a network that takes up to `max_length` tokens.

    Of inputs that all have `max_length`, images (1) among them, packed and padded are the same: no masks, no gaps.
    """
    num_inputs, num_tokens = len(lengths_B), int(lengths_B.sum())
    if num_tokens == num_inputs * max_length:
        return _uniform(num_inputs, max_length)
    return _mixed(num_inputs, num_tokens, int(lengths_B.max()), max_length)


def shapes_within(budget: Budget, max_length: int) -> set[Shape]:
    """All that `shape_of` gives for batches within a budget, and for what is left of them; none above MOST_TOKENS."""
    most = MOST_TOKENS if budget.tokens is None else max(budget.tokens, max_length)  # one larger input runs alone
    shapes = {_uniform(size, max_length) for size in range(1, budget.inputs + 1) if size * max_length <= most}
    if max_length > 1:
        shapes.update(_all_mixed(budget.inputs, most, max_length))
    return {shape for shape in shapes if shape.num_tokens <= MOST_TOKENS}


def _uniform(num_inputs: int, length: int) -> Shape:
    rows = _up(num_inputs, STEPS_OF_INPUTS)
    return Shape(num_tokens=rows * length, num_rows=rows, longest=length, mixed=False)


def _mixed(num_inputs: int, num_tokens: int, longest: int, max_length: int) -> Shape:
    return Shape(
        num_tokens=TOKENS_AT_ONCE * _up(-(-num_tokens // TOKENS_AT_ONCE), STEPS_OF_TOKENS),
        num_rows=_power(num_inputs) + 1,
        longest=min(max_length, max(SHORTEST, _power(longest))),
        mixed=True,
    )


def _all_mixed(most_inputs: int, most_tokens: int, max_length: int) -> Iterator[Shape]:
    sizes = [0, *(1 << k for k in range(_power(most_inputs).bit_length()))]
    for shorter, longest in pairwise([0, *_lengths(max_length)]):
        for fewer, inputs in pairwise(sizes):
            num_tokens = shorter + 1 + fewer  # of the fewest inputs one is as long as it must be, the others are one
            while num_tokens <= min(most_tokens, min(inputs, most_inputs) * longest):
                shape = _mixed(inputs, num_tokens, longest, max_length)
                yield shape
                num_tokens = shape.num_tokens + 1


def _lengths(max_length: int) -> list[int]:
    """Of all rows, ascending."""
    lengths = [min(SHORTEST, max_length)]
    while lengths[-1] < max_length:
        lengths.append(min(2 * lengths[-1], max_length))
    return lengths


def _up(number: int, steps: int) -> int:
    """The next number that has so many steps per octave."""
    step = max(1, _power(number + 1) // 2 // steps)
    return -(-number // step) * step


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
