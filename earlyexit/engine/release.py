"""What a device releases: answers as soon as they are known, survivors and lost inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from earlyexit.engine.queue import Member
from earlyexit.errors import OfframpError
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Lengths, Seen, WirePiece


class Payload(Protocol):
    """What a device must know of the inputs it runs: `earlyexit.network.piece.Piece`, or an emulated device's."""

    @property
    def sample_ids(self) -> tuple[str, ...]: ...
    @property
    def next_block(self) -> int: ...
    @property
    def lengths_B(self) -> Lengths: ...
    def singles(self) -> list[Self]:
        """Returns one payload per input."""
        ...

    def select(self, keep: Sequence[int]) -> Self:
        """Returns the inputs at the given positions, in the given order."""
        ...

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        """Returns the payload for another process; hidden states in `hop_dtype`."""
        ...


PayloadT = TypeVar("PayloadT", bound=Payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[PayloadT]):
    """What the next exit of a running batch gave: answers, and the inputs still inside."""

    answers: tuple[Answer, ...]
    survivors: PayloadT | None
    """None when no input is left. Inputs that stay are among them until the model's end, answered or not."""
    seen: tuple[Seen, ...] = ()
    """What the exit said of inputs that stay; all have the same block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Generic[PayloadT]):
    """An answered input; its member says where its time went."""

    member: Member[PayloadT]
    answer: Answer
    stays: bool = False
    """Whether it still goes on to the model's end; if it is answered again, the first answer counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Generic[PayloadT]):
    """What an exit said of an input that stays."""

    member: Member[PayloadT]
    seen: Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors(Generic[PayloadT]):
    """Members whose next block is not hosted here."""

    members: tuple[Member[PayloadT], ...]
    piece: PayloadT


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Generic[PayloadT]):
    """An input that gets no answer here, unless it stayed after one, and why."""

    member: Member[PayloadT]
    error: OfframpError


Release = Answered[PayloadT] | Observed[PayloadT] | Survivors[PayloadT] | Failed[PayloadT]
"""Every member is released for good exactly once: answered without staying, going on, or lost."""


@dataclass(slots=True)
class Inside(Generic[PayloadT]):
    """Members of a running batch that are not released for good, by sample id."""

    members: dict[str, Member[PayloadT]]
    # What has been released of inputs that stay: a batch that failed runs again and must release nothing twice. Early
    # answers are kept with the seconds of this run that their compute time contains.
    answered_s: dict[str, float] = field(default_factory=dict)
    looked: set[int] = field(default_factory=set)

    def releases(self, step: Step[PayloadT], elapsed_s: float, *, stay: bool) -> list[Release[PayloadT]]:
        """Returns what a step releases, `elapsed_s` after the batch started; `stay`: whether answered inputs stay."""
        if not stay:
            return [self._leave(answer, elapsed_s) for answer in step.answers]
        staying = frozenset[str]() if step.survivors is None else frozenset(step.survivors.sample_ids)
        releases: list[Release[PayloadT]] = []
        if step.seen and step.seen[0].block not in self.looked:
            members = self.members
            self.looked.add(step.seen[0].block)
            releases += [Observed(member=members[seen.sample_id], seen=seen) for seen in step.seen]
        for answer in step.answers:
            if answer.sample_id not in staying:
                releases.append(self._leave(answer, elapsed_s))
            elif not self.members[answer.sample_id].answered:  # here or, at an earlier ramp, in another split's batch
                releases.append(self._answer_early(answer, elapsed_s))
        return releases

    def charge(self, total_s: float) -> None:
        """Add a run's seconds to the compute time of members still inside."""
        for sample_id, member in self.members.items():
            member.compute_s += total_s - self.answered_s.get(sample_id, 0.0)

    def apart(self) -> list[Inside[PayloadT]]:
        """Returns every member alone, for another run."""
        return [Inside({name: member}, looked=set(self.looked)) for name, member in self.members.items()]

    def _leave(self, answer: Answer, elapsed_s: float) -> Answered[PayloadT]:
        member = self.members.pop(answer.sample_id)
        member.compute_s += elapsed_s - self.answered_s.get(answer.sample_id, 0.0)
        return Answered(member=member, answer=answer)

    def _answer_early(self, answer: Answer, elapsed_s: float) -> Answered[PayloadT]:
        member = self.members[answer.sample_id]
        member.compute_s += elapsed_s
        member.answered = True
        self.answered_s[answer.sample_id] = elapsed_s
        return Answered(member=member, answer=answer, stays=True)
