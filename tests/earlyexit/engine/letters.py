"""A fake device without tensors: inputs are letters, and splits take predefined seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from earlyexit.clock import Clock
from earlyexit.engine.device import Answered, Device, Failed, Memory, Observed, Release, Step, Survivors
from earlyexit.engine.engine import Batch, BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Lengths, Split, WirePiece
from tests.clock import ManualClock

ALL_OF_THEM = "*"
NUM_BLOCKS = 4
"""The last block of the fake model: every input that reaches its end leaves."""


@dataclass(frozen=True, kw_only=True)
class Letters:
    """A payload without tensors: one letter per input."""

    sample_ids: tuple[str, ...]
    next_block: int

    @property
    def lengths_B(self) -> Lengths:
        return np.ones(len(self.sample_ids), dtype=np.int32)

    def singles(self) -> list[Letters]:
        return [replace(self, sample_ids=(name,)) for name in self.sample_ids]

    def select(self, keep: Sequence[int]) -> Letters:
        return replace(self, sample_ids=tuple(self.sample_ids[k] for k in keep))

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        raise NotImplementedError


LetterMember = Member[Letters]


@dataclass(frozen=True)
class Part:
    """One step of a fake split: how long it takes, where it ends, and which inputs leave there."""

    seconds: float
    end: int
    leave: str = ""


@dataclass
class FakeRunner:
    """Spends the seconds of each step; fails at the end of a split's first step if the batch has a poisonous input."""

    parts: Mapping[int, list[Part]]
    """Steps by the first block of their split."""
    clock: Clock
    poison: str = ""
    runs: list[str] = field(default_factory=list)
    """The first block and the inputs of every run."""
    policies: list[str] = field(default_factory=list)
    memory: Memory[Letters] | None = None

    def run(self, batch: Batch[Letters]) -> Iterator[Step[Letters]]:
        names = tuple(member.sample_id for member in batch.members)
        assert all(member.payload.next_block == batch.split.first for member in batch.members)
        self.runs.append(f"{batch.split.first}:{''.join(names)}")
        inside: Letters | None = Letters(sample_ids=names, next_block=batch.split.first)
        for part in self.parts[batch.split.first]:
            if inside is None:
                return
            if isinstance(self.clock, ManualClock):
                self.clock.advance(part.seconds)
            if set(names) & set(self.poison):
                raise ValueError("poison")
            step = _step(part, inside, batch)
            inside = step.survivors
            yield step

    def from_wire(self, wire: WirePiece) -> Letters:
        return Letters(sample_ids=wire.sample_ids, next_block=wire.next_block)

    def follow(self, policy: Any) -> None:
        self.policies.append(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        raise NotImplementedError

    def warm_up_pieces(self, split: Split, size: int) -> Letters:
        raise NotImplementedError


def _step(part: Part, inside: Letters, batch: Batch[Letters]) -> Step[Letters]:
    leave = [part.leave == ALL_OF_THEM or name in part.leave for name in inside.sample_ids]
    answers = tuple(
        Answer(sample_id=name, value=0, score=1.0, exit=part.end - 1)
        for name, leaves in zip(inside.sample_ids, leave, strict=True)
        if leaves
    )
    stay = [k for k, leaves in enumerate(leave) if not leaves or (batch.stays and part.end < NUM_BLOCKS)]
    survivors = replace(inside.select(stay), next_block=part.end) if stay else None
    seen = tuple(Answer(sample_id=name, exit=part.end - 1, score=0.5, value=0) for name in inside.sample_ids)
    looks = batch.probe or (batch.stays and (part.end - 1 in batch.split.ramps or part.end == NUM_BLOCKS))
    return Step(answers=answers, survivors=survivors, seen=seen if looks else ())


def member(
    name: str, *, block: int = 0, deadline_s: float = float("inf"), origin: object = None, probe: bool = False
) -> LetterMember:
    piece = Letters(sample_ids=(name,), next_block=block)
    return Member(sample_id=name, payload=piece, deadline_s=deadline_s, origin=origin, probe=probe)


def members(names: str, *, probe: bool = False) -> list[LetterMember]:
    return [member(name, probe=probe) for name in names]


@dataclass
class Bench:
    """A device on a manual clock that logs its releases and their times."""

    splits: list[Split]
    parts: Mapping[int, list[Part]]
    poison: str = ""
    make_runner: Callable[[Mapping[int, list[Part]], Clock, str], FakeRunner] = FakeRunner
    clock: ManualClock = field(default_factory=ManualClock)
    log: list[str] = field(default_factory=list)
    runner: FakeRunner = field(init=False)
    engine: BatchEngine[Letters] = field(init=False)
    device: Device[Letters] = field(init=False)

    def __post_init__(self) -> None:
        self.runner = self.make_runner(self.parts, self.clock, self.poison)
        self.engine = BatchEngine(self.splits, ObservedTimes())
        self.device = Device(self.engine, self.runner, self.clock, self._write)

    def run(self, queued: Sequence[LetterMember]) -> list[str]:
        """Returns all releases until the device is idle."""
        self.engine.submit(queued[0].payload.next_block, queued, self.clock.now_s())
        self.device.run_until_idle()
        return self.log

    def _write(self, releases: list[Release[Letters]]) -> None:
        self.log.append(f"{self.clock.now_s():.3f} " + ", ".join(map(_described, releases)))


def _described(release: Release[Letters]) -> str:
    match release:
        case Answered(answer=answer, stays=stays):
            return f"answer {answer.sample_id} after {answer.exit}" + (", stays" if stays else "")
        case Observed(seen=seen):
            return f"look {seen.sample_id} at {seen.exit}"
        case Survivors(members=going, piece=piece):
            assert tuple(each.sample_id for each in going) == piece.sample_ids
            return f"goes on {piece.next_block}:[{' '.join(piece.sample_ids)}]"
        case Failed(member=lost, error=error):
            return f"lost {lost.sample_id} {error.kind}: {error}"


def one_split(parts: list[Part], *, batch: int = 4, poison: str = "") -> Bench:
    return Bench([Split(first=0, end=parts[-1].end, batch=batch)], {0: parts}, poison)


def start(bench: Bench) -> Batch[Letters]:
    batch = bench.device.start_next()
    assert isinstance(batch, Batch)
    return batch


@dataclass
class FailsLater(FakeRunner):
    """Fails at its second step, after the first answers, unless the batch is one input that is not poisonous."""

    def run(self, batch: Batch[Letters]) -> Iterator[Step[Letters]]:
        poison, self.poison = self.poison, ""
        for index, step in enumerate(super().run(batch)):
            if index == 1 and (len(batch.members) > 1 or batch.members[0].sample_id in poison):
                self.poison = poison
                raise ValueError("too much")
            yield step
        self.poison = poison
