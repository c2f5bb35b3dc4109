"""Slots: rows of attention that several short inputs share (TCB, section 4.2). Pure; needs neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Attention = Literal["auto", "padded", "slotted", "apart"]
"""How inputs of unequal lengths attend, each to its own tokens.

- padded: every input is a row as long as the longest;
- slotted: short inputs share such a row, so that there are fewer rows, and a mask keeps them apart;
- apart: one input after the other, without padding; of short ones a few side by side, kept apart by a mask;
- auto: `apart` on a CPU; where a graph has rows (ONNX Runtime) `slotted`; else `padded`.
"""
ATTENTIONS: tuple[Attention, ...] = ("auto", "padded", "slotted", "apart")


def first_fit_decreasing(lengths: Sequence[int], slot_length: int) -> list[list[int]]:
    """The inputs of every slot: the longest first, each into the first slot that still has room for it.

    Never more than 11/9 of the fewest slots that do, plus 6/9 (Dósa, 2007). Raises ValueError for an input longer than
    a slot.
    """
    slots: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > slot_length:
            raise ValueError(f"input {index} has {length} tokens, more than a slot of {slot_length}")
        found = next((slot for slot, left in enumerate(room) if left >= length), len(slots))
        if found == len(slots):
            slots.append([])
            room.append(slot_length)
        slots[found].append(index)
        room[found] -= length
    return slots


def any_two_fit(lengths: Sequence[int], slot_length: int) -> bool:
    """Whether any two of the inputs could share a slot."""
    return len(lengths) > 1 and sum(sorted(lengths)[:2]) <= slot_length
