"""The model of the simulated replicas. Every block is a multiplication, so an answer shows how it was computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from earlyexit.codecs.base import Codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.engine.device import Runner, Step
from earlyexit.engine.engine import Batch
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Encoded, Lengths, PackedArray, Split, WirePiece
from earlyexit.sequences.kv import KvMemory, KvStore
from earlyexit.sequences.sequence import sequence_of

NUM_BLOCKS = 6
RAMPS = (0, 2, 3)
NETWORKS = (2, 6)
"""Ends of the networks of a chain; a service of one network has all blocks in it."""
STARTS = (0, *NETWORKS[:-1])
MODULUS = 1_000_003
POISON = 1_000_000
"""The number of inputs on which the model fails."""
PAGES, PAGE_TOKENS = 24, 4


def after(number: int, block: int) -> int:
    """Returns the hidden state after a block."""
    return (number * 31 + block + 1) % MODULUS


def value_of(number: int, exit_block: int, networks: Sequence[int] = ()) -> int:
    """Returns the answer of an input that left after a block, computed by this block's network alone."""
    start = max((end for end in networks if end <= exit_block), default=0)
    number = as_encoded(number, start)
    for block in range(start, exit_block + 1):
        number = after(number, block)
    return number


def as_encoded(number: int, start: int) -> int:
    """Returns the encoding of an input for the network that starts with a block; each network has its own encoding."""
    return number + start


def score_of(number: int, ramp: int) -> float:
    """Returns the score of an input at a ramp."""
    return (number * 7919 + ramp * 104_729) % 1000 / 1000


def state_of(tokens: Sequence[int]) -> int:
    """Returns the hidden state of a sequence's last token before block 0, which depends on all tokens."""
    number = 17
    for token in tokens:
        number = (number * 131 + token) % POISON
    return number


def token_of(tokens: Sequence[int], exit_block: int) -> int:
    """Returns the next token of a sequence, if it leaves after a block."""
    return value_of(state_of(tokens), exit_block) % 97 + 1


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Inputs on a device."""

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths
    tokens: tuple[tuple[int, ...], ...]
    runs: tuple[tuple[int, ...], ...]
    """For sequences, the numbers of `run_of`; empty tuples for other inputs."""
    numbers: tuple[tuple[int, int], ...]
    """For each input its number on arrival, and the number after the blocks so far."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def singles(self) -> list[Self]:
        return [self.select([k]) for k in range(len(self))]

    def select(self, keep: Sequence[int]) -> Self:
        return type(self)(
            sample_ids=tuple(self.sample_ids[k] for k in keep),
            next_block=self.next_block,
            lengths_B=self.lengths_B[list(keep)],
            tokens=tuple(self.tokens[k] for k in keep),
            runs=tuple(self.runs[k] for k in keep),
            numbers=tuple(self.numbers[k] for k in keep),
        )

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        tokens_N = np.array([token for each in self.tokens for token in each], dtype=np.int32)
        numbers_B2 = np.array(self.numbers, dtype=np.int64)
        runs_B5, behind_B = np.array(self.runs, dtype=np.int32), np.zeros(len(self), dtype=np.int32)
        return WirePiece(
            sample_ids=self.sample_ids,
            next_block=self.next_block,
            lengths_B=self.lengths_B,
            tensors=(tokens_N, runs_B5, behind_B, numbers_B2) if self.runs[0] else (tokens_N, numbers_B2),
            state_BS=None,
        )


def read(wire: WirePiece) -> Piece:
    """Returns the piece of a received message."""
    tokens_N, *others = wire.tensors
    rows = np.split(tokens_N, np.cumsum(wire.lengths_B)[:-1])
    is_sequence = others[0].shape[1] == 5
    has_numbers = wire.next_block or not is_sequence
    return Piece(
        sample_ids=wire.sample_ids,
        next_block=wire.next_block,
        lengths_B=wire.lengths_B,
        tokens=tuple(tuple(row.tolist()) for row in rows),
        runs=tuple(map(tuple, others[0].tolist())) if is_sequence else ((),) * len(rows),
        numbers=tuple(map(tuple, others[-1].tolist())) if has_numbers else ((0, 0),) * len(rows),
    )


class Tokens(KvMemory):
    """The live accounting of pages; a sequence's contents are its tokens."""

    def __init__(self) -> None:
        super().__init__(KvStore((1, 1, 1), PAGES, page_tokens=PAGE_TOKENS))
        self.shown: dict[int, list[int]] = {}

    def end(self, sequence: int) -> None:
        super().end(sequence)
        self.shown.pop(sequence, None)

    def take_along(self, piece: Any) -> Any:
        """No token waits: in these plans tokens leave early only if one replica has all blocks."""
        return piece


class Arithmetic(Runner[Any]):
    """Computes batches at once; the world determines their time."""

    def __init__(self, *, sequences: bool) -> None:
        self.memory: Any = Tokens() if sequences else None
        self.thresholds: dict[int, float] = {}

    def from_wire(self, wire: WirePiece) -> Piece:
        return read(wire)

    def follow(self, policy: Any) -> None:
        self.thresholds = dict(getattr(policy, "thresholds", None) or {})

    def prepare(self, splits: Sequence[Split]) -> None:
        """Does nothing, because no first run is slow."""

    def warm_up_pieces(self, split: Split, size: int) -> Piece:
        return Piece(
            sample_ids=tuple(f"#.{k}.0" for k in range(size)),
            next_block=split.first,
            lengths_B=np.ones(size, dtype=np.int32),
            tokens=((1,),) * size,
            runs=((),) * size,
            numbers=((1, 1),) * size,
        )

    def run(self, batch: Batch[Any]) -> Iterator[Step[Any]]:
        split, inside = batch.split, _joined([member.payload for member in batch.members])
        if split.first == 0:
            inside = replace(inside, numbers=tuple(map(self._begun, inside.tokens, inside.runs, inside.numbers)))
        if any(number == POISON for number, _ in inside.numbers):
            raise ValueError("the model fails on this input")
        for block in range(split.first, split.end):
            numbers = tuple((number, after(state, block)) for number, state in inside.numbers)
            inside = replace(inside, numbers=numbers, next_block=block + 1)
            is_last = block == NUM_BLOCKS - 1
            leaving = [k for k, (number, _) in enumerate(numbers) if is_last or self._leaves(number, block, split)]
            answers = tuple(_answer(inside, k, block) for k in leaving)
            looks = is_last or block in (RAMPS if batch.probe else split.ramps)
            seen = _seen(inside, block) if batch.stays and looks else ()
            if is_last:
                yield Step(answers=answers, survivors=None, seen=seen)
                return
            if leaving and not batch.stays:
                inside = inside.select([k for k in range(len(inside)) if k not in leaving])
            survivors = inside if len(inside) else None
            if answers or seen or block + 1 == split.end:
                yield Step(answers=answers, survivors=survivors, seen=seen)
            if survivors is None:
                return

    def _leaves(self, number: int, block: int, split: Split) -> bool:
        return block in split.ramps and score_of(number, block) >= self.thresholds[block]

    def _begun(self, tokens: Sequence[int], run: Sequence[int], numbers: tuple[int, int]) -> tuple[int, int]:
        if not run:
            return numbers
        sequence, start = sequence_of(run[0], run[1]), run[2]
        shown = self.memory.shown.setdefault(sequence, [])
        assert len(shown) >= start, "a step came before the one that it goes on from"
        shown[start:] = tokens
        assert len(shown) <= self.memory.kv.room_of(sequence), "a sequence has pages for all of its tokens"
        number = state_of(shown)
        return number, number


def _joined(pieces: Sequence[Piece]) -> Piece:
    assert len({piece.next_block for piece in pieces}) == 1, "a batch begins at one block"
    return Piece(
        sample_ids=tuple(each for piece in pieces for each in piece.sample_ids),
        next_block=pieces[0].next_block,
        lengths_B=np.concatenate([piece.lengths_B for piece in pieces]),
        tokens=tuple(each for piece in pieces for each in piece.tokens),
        runs=tuple(each for piece in pieces for each in piece.runs),
        numbers=tuple(each for piece in pieces for each in piece.numbers),
    )


def _answer(inside: Piece, k: int, block: int) -> Answer:
    number, state = inside.numbers[k]
    score = 1.0 if block == NUM_BLOCKS - 1 else score_of(number, block)
    value: int | PackedArray = state
    if inside.runs[k]:
        value = PackedArray.of(np.array([[state % 97 + 1, 0], [-0.25, -2.0]], dtype=np.float32))
    return Answer(sample_id=inside.sample_ids[k], value=value, score=score, exit=block)


def _seen(inside: Piece, block: int) -> tuple[Answer, ...]:
    is_last = block == NUM_BLOCKS - 1
    return tuple(
        Answer(
            sample_id=inside.sample_ids[k],
            exit=block,
            score=math.nan if is_last else score_of(number, block),
            value=_answer(inside, k, block).value,
        )
        for k, (number, _) in enumerate(inside.numbers)
    )


class NumberCodec(Codec[int]):
    """Rows are numbers; an input's number determines its number of tokens."""

    name: ClassVar[str] = "number"
    inputs: Any = None
    spec: Any = None
    from_columns: Any = None
    from_json: Any = None
    json_schema: Any = None
    """Never used here."""

    def __init__(self, start: int = 0) -> None:
        """`start`: the first block of the network for which it encodes."""
        self._start = start

    def encode(self, rows: Sequence[int], *, truncate: bool = False) -> list[Encoded]:
        given = [as_encoded(number, self._start) for number in rows]
        return [
            Encoded(length := each % 5 + 1, (np.ones(length, dtype=np.int32), np.array([[number, each]])))
            for number, each in zip(rows, given, strict=True)
        ]

    def surely_accepts(self, row: int) -> bool:
        return True


class NumbersOfNetworks(ChainCodec):
    """The codecs of a chain's networks, each of which gets another number."""

    def __init__(self) -> None:
        names = [f"m{end}" for end in NETWORKS]
        super().__init__([{"name": "text", "max_length": 8}] * len(names), names)
        self.members = tuple(map(NumberCodec, STARTS))
