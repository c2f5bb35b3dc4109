"""What is computed where only the way of inputs matters: every block of a chain changes a number in its own way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from earlyexit.engine.device import Runner, Step
from earlyexit.engine.engine import Batch
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Lengths, Seen, Split, WirePiece
from earlyexit.network.chain import Chain

MODULUS = 1_000_003
SHARE = 3
"""One in so many inputs is sure at a ramp."""


def begun(token_ids: Sequence[int]) -> int:
    """The hidden state of an input before a network's first block."""
    number = 17
    for each in token_ids:
        number = (number * 131 + each) % MODULUS
    return number


def after(number: int, block: int) -> int:
    """What a block makes of it."""
    return (number * 31 + block + 1) % MODULUS


def is_sure(name: str, ramp: int) -> bool:
    """Whether a ramp lets an input out, whatever was computed."""
    return hash_of(name, ramp) % SHARE == 0


def hash_of(name: str, ramp: int) -> int:
    return sum((place + 7) * ord(letter) for place, letter in enumerate(name)) * 7919 + ramp * 104729


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Inputs on a device: a number each, or, where they enter a network, still their token ids."""

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths
    numbers: tuple[int, ...]
    states: tuple[int, ...]
    """How many blocks they have seen; the exit policy's state."""

    def singles(self) -> list[Self]:
        return [self.select([k]) for k in range(len(self.sample_ids))]

    def select(self, keep: Sequence[int]) -> Self:
        return replace(
            self,
            sample_ids=tuple(self.sample_ids[k] for k in keep),
            lengths_B=self.lengths_B[list(keep)],
            numbers=tuple(self.numbers[k] for k in keep),
            states=tuple(self.states[k] for k in keep),
        )

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        del hop_dtype
        return WirePiece(
            sample_ids=self.sample_ids,
            next_block=self.next_block,
            lengths_B=self.lengths_B,
            tensors=(np.array(self.numbers, dtype=np.int64),),
            state_BS=np.array(self.states, dtype=np.int64)[:, None],
        )


class Arithmetic(Runner[Piece]):
    """Every block is a multiplication; nobody crosses in a split."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def from_wire(self, wire: WirePiece) -> Piece:
        [values] = wire.tensors
        if wire.next_block in self._chain.starts:
            assert values.dtype == np.int32, "before a network stand token ids"
            bounds = np.cumsum(wire.lengths_B)[:-1]
            numbers = [begun([int(each) for each in row]) for row in np.split(values, bounds)]
        else:
            assert values.dtype == np.int64, "inside of it stand hidden states"
            numbers = [int(each) for each in values]
        state_BS = wire.state_BS
        states = [0] * len(numbers) if state_BS is None else [int(each) for each in state_BS[:, 0]]
        return Piece(
            sample_ids=wire.sample_ids,
            next_block=wire.next_block,
            lengths_B=wire.lengths_B,
            numbers=tuple(numbers),
            states=tuple(states),
        )

    def follow(self, policy: Any) -> None:
        """There is one policy."""

    def prepare(self, splits: Sequence[Split]) -> None:
        """Nothing is slow."""

    def warm_up_pieces(self, split: Split, size: int) -> Piece:
        raise NotImplementedError

    def run(self, batch: Batch[Piece]) -> Iterator[Step[Piece]]:
        split, last = batch.split, self._chain.num_blocks - 1
        inside = _fused([member.payload for member in batch.members])
        for block in range(split.first, split.end):
            numbers = tuple(after(number, block) for number in inside.numbers)
            states = tuple(state + 1 for state in inside.states)
            inside = replace(inside, numbers=numbers, states=states, next_block=block + 1)
            looks = block == last or (block in self._chain.ramps if batch.probe else block in split.ramps)
            sure = [k for k in range(len(numbers)) if block == last or self._leaves(inside, k, block, split)]
            answers = tuple(self._answer(inside, k, block) for k in sure)
            if block == last:
                seen = self._seen(inside, block) if batch.stays else ()
                yield Step(answers=answers, survivors=None, seen=seen)
                return
            seen = self._seen(inside, block) if batch.stays and looks else ()
            if not batch.stays:
                inside = inside.select([k for k in range(len(numbers)) if k not in sure])
            survivors = inside if inside.sample_ids else None
            if answers or seen or block + 1 == split.end:
                yield Step(answers=answers, survivors=survivors, seen=seen)
            if survivors is None:
                return

    def _leaves(self, inside: Piece, k: int, block: int, split: Split) -> bool:
        return block in split.ramps and is_sure(name_of(inside.sample_ids[k]), block)

    def _answer(self, inside: Piece, k: int, block: int) -> Answer:
        return Answer(
            sample_id=inside.sample_ids[k], value=inside.numbers[k], score=float(inside.states[k]), exit=block
        )

    def _seen(self, inside: Piece, block: int) -> tuple[Seen, ...]:
        score = math.nan if block == self._chain.num_blocks - 1 else 0.5
        return tuple(
            Seen(sample_id=sample_id, block=block, score=score, value=number)
            for sample_id, number in zip(inside.sample_ids, inside.numbers, strict=True)
        )


def _fused(pieces: Sequence[Piece]) -> Piece:
    assert len({piece.next_block for piece in pieces}) == 1
    return Piece(
        sample_ids=tuple(each for piece in pieces for each in piece.sample_ids),
        next_block=pieces[0].next_block,
        lengths_B=np.concatenate([piece.lengths_B for piece in pieces]),
        numbers=tuple(each for piece in pieces for each in piece.numbers),
        states=tuple(each for piece in pieces for each in piece.states),
    )


def name_of(sample_id: str) -> str:
    """The caller's id."""
    return sample_id.rpartition("#")[0]
