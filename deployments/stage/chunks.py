"""From what a device releases to the parts of the replies it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.messages import Chunk, GoingOn, SplitRun, Timing
from earlyexit.boundary import HopDtype
from earlyexit.errors import OfframpError
from earlyexit.member import Member
from earlyexit.release import GoesOn, Looked, Release, Told
from earlyexit.wire import Answer, Seen, WirePiece


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call whose inputs are in the engine."""

    unsettled: int
    """Inputs that no part of its reply has settled."""
    take: Callable[[Chunk], None]
    """What becomes of the parts."""
    begun: dict[str, list[SplitRun]] | None = None
    """Of traced inputs the batches so far, each with the input's times as it began; None where the call has none."""


@dataclass(slots=True)
class _Part:
    answers: list[tuple[Answer, Timing]] = field(default_factory=list)
    early: list[tuple[Answer, Timing]] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    lost: list[tuple[str, OfframpError]] = field(default_factory=list)
    runs: tuple[tuple[str, tuple[SplitRun, ...]], ...] = ()

    def chunk(self, busy: float) -> Chunk:
        return Chunk(
            answers=tuple(self.answers),
            early=tuple(self.early),
            seen=tuple(self.seen),
            lost=tuple(self.lost),
            runs=self.runs,
            busy=busy,
        )


def chunks_by_call(
    releases: Iterable[Release[Any]], hop_dtype: HopDtype = "same", busy: float = 0.0
) -> list[tuple[OpenCall, Chunk]]:
    """One part for each call of what was said of its inputs, then one of its survivors, hidden states in `hop_dtype`.

    In this order, because a call ends with the part that settles the last of its inputs.
    """
    parts: dict[OpenCall, _Part] = {}
    survivors: list[tuple[OpenCall, Chunk]] = []
    for release in releases:
        if isinstance(release, GoesOn):
            survivors.extend(_survivor_chunks(release, hop_dtype, busy))
            continue
        opened = _call_of(release.member)
        part = parts.setdefault(opened, _Part())
        match release:
            case Told():
                said = part.early if release.stays else part.answers
                said.append((release.answer, _timing(release.member)))
                if opened.begun is not None:
                    part.runs += _runs(opened.begun, (release.member,))
            case Looked():
                part.seen.append(release.seen)
            case _:
                part.lost.append((release.member.sample_id, release.error))
    return [*((opened, part.chunk(busy)) for opened, part in parts.items()), *survivors]


def _survivor_chunks(release: GoesOn[Any], hop_dtype: HopDtype, busy: float) -> list[tuple[OpenCall, Chunk]]:
    positions: dict[OpenCall, list[int]] = {}
    for position, member in enumerate(release.members):
        positions.setdefault(_call_of(member), []).append(position)
    if len(positions) == 1:
        return [
            (opened, _going_on(opened, release.piece.to_wire(hop_dtype), release.members, busy)) for opened in positions
        ]
    return [
        (
            opened,
            _going_on(opened, release.piece.select(mine).to_wire(hop_dtype), [release.members[k] for k in mine], busy),
        )
        for opened, mine in positions.items()
    ]


def _going_on(opened: OpenCall, piece: WirePiece, members: Sequence[Member[Any]], busy: float) -> Chunk:
    going_on = GoingOn(
        piece=piece,
        timings=tuple(_timing(member) for member in members),
    )
    return Chunk(going_on=going_on, runs=() if opened.begun is None else _runs(opened.begun, members), busy=busy)


def _runs(
    begun: Mapping[str, Sequence[SplitRun]], members: Iterable[Member[Any]]
) -> tuple[tuple[str, tuple[SplitRun, ...]], ...]:
    """Of those members that are traced."""
    return tuple(
        (member.sample_id, split_runs(begun[member.sample_id], member.compute_s))
        for member in members
        if member.sample_id in begun
    )


def split_runs(begun: Sequence[SplitRun], compute_s: float) -> tuple[SplitRun, ...]:
    """Every batch's own share of an input's times; `compute_s`: in all, as the last batch let it go."""
    if not begun:
        return ()
    waited_s = [0.0, *(each.queue_s for each in begun[:-1])]
    until_s = [*(each.compute_s for each in begun[1:]), compute_s]
    return tuple(
        replace(each, queue_s=each.queue_s - before_s, compute_s=after_s - each.compute_s)
        for each, before_s, after_s in zip(begun, waited_s, until_s, strict=True)
    )


def _call_of(member: Member[Any]) -> OpenCall:
    assert isinstance(member.origin, OpenCall)
    return member.origin


def _timing(member: Member[Any]) -> Timing:
    return Timing(queue_s=member.queue_s, compute_s=member.compute_s)
