"""A fake device that takes the time of each split from a table and logs the decisions of its engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from earlyexit.engine.engine import Batch, BatchEngine, Dispatch, ObservedTimes
from earlyexit.engine.queue import DEFAULT, Member, OrderSpec
from earlyexit.network.boundary import Split
from tests.clock import ManualClock

Engine = BatchEngine[None]


class TableTimes(ObservedTimes):
    """The time of a split is that of the table for every batch size; inputs have one token."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        super().__init__()
        self._seconds = seconds
        self.observed: list[tuple[int, int, float, float]] = []

    def batch_s(self, split: Split, tokens: float) -> float:
        return self._seconds[split.first]

    def mean_tokens(self, split: Split) -> float:
        return 1.0

    def first_s(self, split: Split, tokens: float) -> float:
        return self._seconds[split.first]

    def observe(
        self,
        split: Split,
        size: int,
        tokens: int,
        first_s: float,
        total_s: float,
        *,
        shared_s: float = 0.0,
        weight: float = 0.0,
    ) -> None:
        super().observe(split, size, tokens, first_s, total_s, shared_s=shared_s, weight=weight)
        self.observed.append((split.first, size, first_s, total_s))


@dataclass(frozen=True)
class Arrival:
    """Members that are submitted together."""

    at_s: float
    names: str
    """One letter per member; capital letters are probes."""
    block: int = 0
    deadline_s: float = math.inf
    reserve_s: float = 0.0
    fallback: tuple[Split, ...] = ()
    tokens: tuple[int, ...] = ()
    """The tokens of each member; by default 1."""


def arrivals(text: str) -> list[Arrival]:
    """Reads `0.5 ab @2 <9 -1 4,4; ...`: at 0.5 s, a and b of 4 tokens each for block 2, deadline and reserve."""
    found = []
    for each in text.split("; "):
        at_s, names, *others = each.split()
        given: dict[str, Any] = {}
        for other in others:
            match other[0]:
                case "@":
                    given["block"] = int(other[1:])
                case "<":
                    given["deadline_s"] = float(other[1:])
                case "-":
                    given["reserve_s"] = float(other[1:])
                case _:
                    given["tokens"] = tuple(map(int, other.split(",")))
        found.append(Arrival(float(at_s), names, **given))
    return found


@dataclass(frozen=True)
class Switch:
    """The arrival of another plan."""

    at_s: float
    splits: tuple[Split, ...]
    dispatch: Dispatch = "work-conserving"
    order: OrderSpec = DEFAULT


Event = Arrival | Switch


@dataclass
class Driver:
    """A fake device that takes the time of each split from a table and logs its events."""

    engine: Engine
    seconds: Mapping[int, float]
    leave: Mapping[int, str] = field(default_factory=dict)
    """The members that leave at the end of a split, by its first block. All leave at a block that is not hosted."""
    clock: ManualClock = field(default_factory=ManualClock)
    log: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def play(self, *events: Event | str) -> str:
        """Returns the log in one line; `arrivals` parses the texts."""
        read = [one for each in events for one in (arrivals(each) if isinstance(each, str) else [each])]
        self.events = sorted(read, key=lambda event: event.at_s)
        while self._turn():
            pass
        return "; ".join(self.log)

    def _turn(self) -> bool:
        self._let_time_pass(self.clock.now_s())
        choice = self.engine.begin(self.clock.now_s())
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
        self.engine.end(batch, first_s=seconds, total_s=seconds, now_s=self.clock.now_s())
        self.engine.leave(batch, self.clock.now_s())
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
        self.log.append(f"{self.clock.now_s():g} {what}")


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
    """Returns the batch of a device that is free at this time; there must be one."""
    batch = engine.choose(now_s).batch
    assert batch is not None
    return batch


def ran(
    engine: Engine, batch: Batch[None], total_s: float, now_s: float = 0.0, answered: Sequence[int] | None = None
) -> None:
    """Notes that a batch has run; its first answers came at the end."""
    engine.end(batch, first_s=None, total_s=total_s, now_s=now_s, answered=answered)
    engine.leave(batch, now_s)


def begun(engine: Engine, now_s: float = 0.0) -> Batch[None]:
    """Returns the batch that a device begins at this time; there must be one."""
    batch = engine.begin(now_s).batch
    assert batch is not None
    return batch


def names(members: Sequence[Member[None]]) -> str:
    return " ".join(member.sample_id for member in members)


def member(name: str, *, tokens: int = 1, deadline_s: float = math.inf, origin: object = None) -> Member[None]:
    return Member(
        sample_id=name, payload=None, tokens=tokens, deadline_s=deadline_s, origin=origin, probe=name.isupper()
    )


def splits_of(*bounds: int, batch: int = 2, tokens: int | None = None) -> tuple[Split, ...]:
    return tuple(Split(first=first, end=end, batch=batch, tokens=tokens) for first, end in pairwise(bounds))


def driver_of(
    *splits: Split,
    dispatch: Dispatch = "work-conserving",
    leave: Mapping[int, str] | None = None,
    times: TableTimes | None = None,
    order: OrderSpec = DEFAULT,
    starts: tuple[int, ...] = (),
) -> Driver:
    """Every split takes a second, also the rest of a split."""
    seconds = dict.fromkeys(range(8), 1.0)
    engine = Engine(splits, times or TableTimes(seconds), starts=starts)
    engine.follow(splits, dispatch, order)
    return Driver(engine, seconds, leave or {})
