"""What a device lets go of: answers as they are known, who goes on, who is lost.

Whose turn a device is where sequences are probes, which run in batches of their own. Pure.

A probe waits for nobody, and its sequence's next step is back a moment after its batch: two of them would have a device
to themselves, one running while the other is on its way. So after a batch of probes others go first, if any wait; after
a batch of others probes do, as they always do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from earlyexit.engine.queue import NO_SEQUENCE, Member, Queue
from earlyexit.errors import OfframpError
from earlyexit.named import HopDtype
from earlyexit.network.wire import Answer, Lengths, Seen, WirePiece


class Turns:
    """Of one engine; where there are no sequences it is always anybody's turn."""

    __slots__ = ("is_others",)

    def __init__(self) -> None:
        self.is_others = False
        """Whether the latest batch was of probes, whose next steps nobody waits for either."""

    def took(self, members: Sequence[Member[Any]]) -> None:
        """These are the next batch."""
        self.is_others = members[0].probe and members[0].sequence != NO_SEQUENCE

    def first(self, waiting: Sequence[Queue[Any]]) -> Sequence[Queue[Any]]:
        """Whose batch goes first, should one begin now: of the queues in which somebody waits."""
        return [queue for queue in waiting if not queue.probe] if self.is_others else ()


SHARE = 0.05
"""Of what a batch took, how long the next waits at most for sequences whose steps it answered: two ms of a step of 40
for the way to the ingress and back."""


class Returning:
    """Whose next steps are worth waiting for.

    Those of others that came while a batch ran would make the next one without them at once, and so on by turns: two
    groups, each of which reads all weights.
    """

    __slots__ = ("_over", "_sequences", "until_s")

    def __init__(self) -> None:
        self._sequences: set[int] = set()
        self._over: set[int] = set()
        """Since a batch last answered steps: one that runs meanwhile may answer others of theirs at its end."""
        self.until_s = -math.inf
        """When nobody is waited for any longer."""

    def __bool__(self) -> bool:
        """Whether anybody may be."""
        return bool(self._sequences)

    def answered(self, sequences: Iterable[int], *, took_s: float, now_s: float) -> None:
        """A batch that took so long has answered steps of these."""
        self._sequences = set(sequences) - self._over
        self._over.clear()
        self.until_s = now_s + SHARE * took_s

    def take_out(self, sequences: Collection[int]) -> None:
        """They are over; who left early may be before its batch is."""
        self._sequences.difference_update(sequences)
        self._over.update(sequences)

    def are_awaited(self, waiting: Sequence[Queue[Any]], now_s: float) -> bool:
        """Whether some are not among those that wait, and may still come in time."""
        self._sequences.difference_update(member.sequence for queue in waiting for member in queue.members)
        if now_s >= self.until_s:
            self._sequences.clear()
        return bool(self._sequences)


class Payload(Protocol):
    """What a device must know of the inputs it runs: `earlyexit.network.piece.Piece`, or an emulated device's."""

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


PayloadT = TypeVar("PayloadT", bound=Payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[PayloadT]):
    """What the next exit of a running batch gave: answers, and who is still inside."""

    answers: tuple[Answer, ...]
    survivors: PayloadT | None
    """None when nobody is left. Who stays is among them until the model's end, answered or not."""
    seen: tuple[Seen, ...] = ()
    """What the exit said of inputs that stay; one exit, so all have the same block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(Generic[PayloadT]):
    """An answered input, and where its time went until then."""

    member: Member[PayloadT]
    answer: Answer
    stays: bool = False
    """Whether it goes on to the model's end all the same; should it be answered again, the first answer counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Generic[PayloadT]):
    """What an exit said of an input that stays, which is released besides."""

    member: Member[PayloadT]
    seen: Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors(Generic[PayloadT]):
    """Members whose next block is not hosted here."""

    members: tuple[Member[PayloadT], ...]
    piece: PayloadT


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Generic[PayloadT]):
    """An input that gets no answer here, unless it stayed after one, and why."""

    member: Member[PayloadT]
    error: OfframpError


Release = Told[PayloadT] | Observed[PayloadT] | Survivors[PayloadT] | Lost[PayloadT]
"""Every member is released for good exactly once: answered without staying, going on, or lost."""


@dataclass(slots=True)
class Inside(Generic[PayloadT]):
    """Members of a running batch that are not released for good, by sample id."""

    members: dict[str, Member[PayloadT]]
    # Of those that stay, what has been released already: a batch that failed runs again, and says nothing twice. Those
    # answered early come with the seconds of this run that their compute time holds since; exits look at all at once.
    answered_s: dict[str, float] = field(default_factory=dict)
    looked: set[int] = field(default_factory=set)

    def releases(self, step: Step[PayloadT], elapsed_s: float, *, stay: bool) -> list[Release[PayloadT]]:
        """What a step releases, `elapsed_s` after the batch started; `stay`: whether inputs do that are answered."""
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
        """Put a run's seconds on the account of those who are still inside."""
        for sample_id, member in self.members.items():
            member.compute_s += total_s - self.answered_s.get(sample_id, 0.0)

    def apart(self) -> list[Inside[PayloadT]]:
        """Everyone alone, for another run."""
        return [
            Inside(
                {sample_id: member},
                {sample_id: 0.0} if sample_id in self.answered_s else {},
                set(self.looked),
            )
            for sample_id, member in self.members.items()
        ]

    def _leave(self, answer: Answer, elapsed_s: float) -> Told[PayloadT]:
        member = self.members.pop(answer.sample_id)
        member.compute_s += elapsed_s - self.answered_s.get(answer.sample_id, 0.0)
        return Told(member=member, answer=answer)

    def _answer_early(self, answer: Answer, elapsed_s: float) -> Told[PayloadT]:
        member = self.members[answer.sample_id]
        member.compute_s += elapsed_s
        member.answered = True
        self.answered_s[answer.sample_id] = elapsed_s
        return Told(member=member, answer=answer, stays=True)
