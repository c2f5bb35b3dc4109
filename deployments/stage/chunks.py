"""From what a device releases to the parts of the replies it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.messages import Chunk, GoingOn, Timing
from earlyexit.device import Answered, GoesOn, Looked, Payload, Release
from earlyexit.engine import Member
from earlyexit.errors import OfframpError
from earlyexit.wire import Answer, Seen


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call whose inputs are in the engine."""

    unsettled: int
    """Inputs that no part of its reply has settled."""
    take: Callable[[Chunk], None]
    """What becomes of the parts."""


@dataclass(slots=True)
class _Part:
    answers: list[tuple[Answer, Timing]] = field(default_factory=list)
    early: list[tuple[Answer, Timing]] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    lost: list[tuple[str, OfframpError]] = field(default_factory=list)

    def chunk(self) -> Chunk:
        return Chunk(answers=tuple(self.answers), early=tuple(self.early), seen=tuple(self.seen), lost=tuple(self.lost))


def chunks_by_call(releases: Iterable[Release[Any]]) -> list[tuple[OpenCall, Chunk]]:
    """One part for each call of what was said of its inputs, then one of its survivors.

    In this order, because a call ends with the part that settles the last of its inputs.
    """
    parts: dict[OpenCall, _Part] = {}
    survivors: list[tuple[OpenCall, Chunk]] = []
    for release in releases:
        if isinstance(release, GoesOn):
            survivors.extend(_survivor_chunks(release))
            continue
        part = parts.setdefault(_call_of(release.member), _Part())
        match release:
            case Answered():
                said = part.early if release.stays else part.answers
                said.append((release.answer, _timing(release.member)))
            case Looked():
                part.seen.append(release.seen)
            case _:
                part.lost.append((release.member.sample_id, release.error))
    return [*((opened, part.chunk()) for opened, part in parts.items()), *survivors]


def _survivor_chunks(release: GoesOn[Any]) -> list[tuple[OpenCall, Chunk]]:
    positions: dict[OpenCall, list[int]] = {}
    for position, member in enumerate(release.members):
        positions.setdefault(_call_of(member), []).append(position)
    if len(positions) == 1:
        return [(opened, _going_on(release.piece, release.members)) for opened in positions]
    return [
        (opened, _going_on(release.piece.select(mine), [release.members[k] for k in mine]))
        for opened, mine in positions.items()
    ]


def _going_on(piece: Payload, members: Sequence[Member[Any]]) -> Chunk:
    going_on = GoingOn(
        piece=piece.to_wire(),
        timings=tuple(_timing(member) for member in members),
    )
    return Chunk(going_on=going_on)


def _call_of(member: Member[Any]) -> OpenCall:
    assert isinstance(member.origin, OpenCall)
    return member.origin


def _timing(member: Member[Any]) -> Timing:
    return Timing(queue_s=member.queue_s, compute_s=member.compute_s)
