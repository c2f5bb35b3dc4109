"""What a device lets go of: answers as they are known, who goes on, who is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from earlyexit.boundary import HopDtype
from earlyexit.errors import OfframpError
from earlyexit.member import Member
from earlyexit.wire import Answer, Lengths, Seen, WirePiece


class Payload(Protocol):
    """What a device must know of the inputs it runs: `earlyexit.piece.Piece`, or an emulated device's."""

    @property
    def sample_ids(self) -> tuple[str, ...]: ...
    @property
    def next_block(self) -> int: ...
    @property
    def lengths_B(self) -> Lengths: ...
    def singles(self) -> list[Self]:
        """One per input."""
        ...

    def select(self, keep: Sequence[int]) -> Self:
        """The inputs at the given positions, in the given order."""
        ...

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        """For another process; hidden states in `hop_dtype`."""
        ...


P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[P]):
    """What the next exit of a running batch gave: answers, and who is still inside."""

    answers: tuple[Answer, ...]
    survivors: P | None
    """None when nobody is left. Who stays is among them until the model's end, answered or not."""
    seen: tuple[Seen, ...] = ()
    """What the exit said of inputs that stay; one exit, so all have the same block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(Generic[P]):
    """An answered input, and where its time went until then."""

    member: Member[P]
    answer: Answer
    stays: bool = False
    """Whether it goes on to the model's end all the same; should it be answered again, the first answer counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked(Generic[P]):
    """What an exit said of an input that stays, which is released besides."""

    member: Member[P]
    seen: Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class GoesOn(Generic[P]):
    """Members whose next block is not hosted here."""

    members: tuple[Member[P], ...]
    piece: P


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Generic[P]):
    """An input that gets no answer here, unless it stayed after one, and why."""

    member: Member[P]
    error: OfframpError


Release = Told[P] | Looked[P] | GoesOn[P] | Lost[P]
"""Every member is released for good exactly once: answered without staying, going on, or lost."""


@dataclass(slots=True)
class Inside(Generic[P]):
    """Members of a running batch that are not released for good, by sample id."""

    members: dict[str, Member[P]]
    # Of those that stay, what has been released already: a batch that failed runs again, and says nothing twice. Those
    # answered early come with the seconds of this run that their compute time holds since; exits look at all at once.
    answered_s: dict[str, float] = field(default_factory=dict)
    looked: set[int] = field(default_factory=set)

    def releases(self, step: Step[P], elapsed_s: float, *, stay: bool) -> list[Release[P]]:
        """What a step releases, `elapsed_s` after the batch started; `stay`: whether inputs do that are answered."""
        if not stay:
            return [self._leave(answer, elapsed_s) for answer in step.answers]
        staying = frozenset[str]() if step.survivors is None else frozenset(step.survivors.sample_ids)
        releases: list[Release[P]] = []
        if step.seen and step.seen[0].block not in self.looked:
            members = self.members
            self.looked.add(step.seen[0].block)
            releases += [Looked(member=members[seen.sample_id], seen=seen) for seen in step.seen]
        for answer in step.answers:
            if answer.sample_id not in staying:
                releases.append(self._leave(answer, elapsed_s))
            elif not self.members[answer.sample_id].answered:  # here or, at an earlier ramp, in another split's batch
                releases.append(self._answer_early(answer, elapsed_s))
        return releases

    def charge(self, total_s: float) -> None:
        """Put a run's seconds on the account of those who are still inside."""
        for sample_id, member in self.members.items():
            member.compute_s += total_s - self.answered_s.get(sample_id, 0.0)

    def apart(self) -> list[Inside[P]]:
        """Everyone alone, for another run."""
        return [
            Inside(
                {sample_id: member},
                {sample_id: 0.0} if sample_id in self.answered_s else {},
                set(self.looked),
            )
            for sample_id, member in self.members.items()
        ]

    def _leave(self, answer: Answer, elapsed_s: float) -> Told[P]:
        member = self.members.pop(answer.sample_id)
        member.compute_s += elapsed_s - self.answered_s.get(answer.sample_id, 0.0)
        return Told(member=member, answer=answer)

    def _answer_early(self, answer: Answer, elapsed_s: float) -> Told[P]:
        member = self.members[answer.sample_id]
        member.compute_s += elapsed_s
        member.answered = True
        self.answered_s[answer.sample_id] = elapsed_s
        return Told(member=member, answer=answer, stays=True)
