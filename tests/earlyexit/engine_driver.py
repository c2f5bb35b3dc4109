"""A device that spends every split's time from a table and writes down what its engine does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from earlyexit.clock import ManualClock
from earlyexit.engine.engine import Batch, BatchEngine, Dispatch
from earlyexit.engine.order import DEFAULT, OrderSpec
from earlyexit.engine.queue import Member
from earlyexit.engine.times import ObservedTimes
from earlyexit.network.split import Split

Engine = BatchEngine[None]


class TableTimes(ObservedTimes):
    """A split takes what the table says, whatever the size of its batch; inputs have one token."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        super().__init__()
        self._seconds = seconds
        self.observed: list[tuple[int, int, float, float]] = []

    def batch_s(self, split: Split, tokens: float) -> float:
        return self._seconds[split.first]

    def mean_tokens(self, split: Split) -> float:
        return 1.0

    def soonest_s(self, split: Split) -> float:
        return self._seconds[split.first]

    def observe(self, split: Split, size: int, tokens: int, first_s: float, total_s: float) -> None:
        self.observed.append((split.first, size, first_s, total_s))


@dataclass(frozen=True)
class Arrival:
    """Members that reach the engine together."""

    at_s: float
    names: str
    """One letter per member; capital letters are probes."""
    block: int = 0
    deadline_s: float = math.inf
    reserve_s: float = 0.0
    fallback: tuple[Split, ...] = ()
    tokens: tuple[int, ...] = ()
    """Of each; left out: 1."""


@dataclass(frozen=True)
class Switch:
    """Another plan."""

    at_s: float
    splits: tuple[Split, ...]
    dispatch: Dispatch = "work-conserving"
    order: OrderSpec = DEFAULT


Event = Arrival | Switch


@dataclass
class Driver:
    """A device that spends every split's time from a table and writes down what happens."""

    engine: Engine
    seconds: Mapping[int, float]
    leave: Mapping[int, str] = field(default_factory=dict)
    """By the first block of a split, the members that leave at its end; all leave at a block that is not hosted."""
    clock: ManualClock = field(default_factory=ManualClock)
    log: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def play(self, events: Sequence[Event]) -> list[str]:
        self.events = sorted(events, key=lambda event: event.at_s)
        while self._turn():
            pass
        return self.log

    def _turn(self) -> bool:
        self._let_time_pass(self.clock.now_s())
        choice = self.engine.choose(self.clock.now_s())
        if choice.dropped:
            self._write(f"drop [{names(choice.dropped)}]")
        if choice.batch is not None:
            self._run(choice.batch)
            return True
        nexts = [at for at in (choice.wake_s, self.events[0].at_s if self.events else None) if at is not None]
        if nexts:
            self._let_time_pass(min(nexts))
        return bool(nexts)

    def _run(self, batch: Batch[None]) -> None:
        first, seconds = batch.split.first, self.seconds[batch.split.first]
        blocks = f"{first}" if batch.split in self.engine.splits else f"{first} to {batch.split.end}"
        self._write(f"start {blocks}:[{names(batch.members)}]")
        self._let_time_pass(self.clock.now_s() + seconds)
        self.engine.finished(batch, first_s=seconds, total_s=seconds)
        if self.engine.hosts(batch.split.end):
            stay = [member for member in batch.members if member.sample_id not in self.leave.get(first, "")]
            self.engine.submit(batch.split.end, stay, self.clock.now_s())

    def _let_time_pass(self, until_s: float) -> None:
        while self.events and self.events[0].at_s <= until_s:
            event = self.events.pop(0)
            self.clock.advance(event.at_s - self.clock.now_s())
            if isinstance(event, Switch):
                self.engine.follow(event.splits, event.dispatch, event.order)
            else:
                self.engine.submit(event.block, _members(event), event.at_s, event.fallback)
        self.clock.advance(until_s - self.clock.now_s())

    def _write(self, what: str) -> None:
        self.log.append(f"{self.clock.now_s():.3f} {what}")


def _members(arrival: Arrival) -> list[Member[None]]:
    return [
        Member(
            sample_id=name,
            payload=None,
            tokens=tokens,
            deadline_s=arrival.deadline_s,
            reserve_s=arrival.reserve_s,
            probe=name.isupper(),
        )
        for name, tokens in zip(arrival.names, arrival.tokens or (1,) * len(arrival.names), strict=True)
    ]


def chosen(engine: Engine, now_s: float = 0.0) -> Batch[None]:
    """The batch of a device that is free then; there must be one."""
    batch = engine.choose(now_s).batch
    assert batch is not None
    return batch


def names(members: Sequence[Member[None]]) -> str:
    return " ".join(member.sample_id for member in members)


def member(name: str, *, tokens: int = 1, deadline_s: float = math.inf, origin: object = None) -> Member[None]:
    return Member(
        sample_id=name, payload=None, tokens=tokens, deadline_s=deadline_s, origin=origin, probe=name.isupper()
    )


def two_splits(
    *, dispatch: Dispatch = "work-conserving", leave: Mapping[int, str] | None = None, starts: tuple[int, ...] = ()
) -> Driver:
    """Blocks 0-1 and 2-3, batches of 2, one second each."""
    seconds = {0: 1.0, 2: 1.0}
    splits = [Split(first=0, end=2, batch=2), Split(first=2, end=4, batch=2)]
    return Driver(Engine(splits, TableTimes(seconds), dispatch=dispatch, starts=starts), seconds, leave or {})


def one_split(batch: int, *, dispatch: Dispatch = "work-conserving") -> Driver:
    """Blocks 0-3, one second."""
    seconds = {0: 1.0}
    splits = [Split(first=0, end=4, batch=batch)]
    return Driver(Engine(splits, TableTimes(seconds), dispatch=dispatch), seconds)
