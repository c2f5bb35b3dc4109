"""The inputs of the batch engine, the queues in which they wait, and the order in which they form batches.

Engines and ingresses use the orders of TCB (ICPP'22, section 6.2.4): first come first served, earliest deadline first,
shortest first, and TCB's own DAS. TCB maximises the total *utility* of the inputs that run before their deadlines,
where an input has utility 1 / length (section 5.1). If all waiting inputs can run in time, all orders are equally good.

A steady stream of short inputs would starve a long one. Therefore an input is *overdue* after waiting for `overdue_s`,
and a quarter of every batch, at least one input, is reserved for overdue inputs. Among overdue inputs without deadlines
the oldest go first. None of them waits much longer than `overdue_s` plus four times its wait under first come first
served. Overdue inputs with deadlines go in the order of their deadlines, the latest first, because in a long queue only
the latest deadlines can still be met.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Generic, Literal, Protocol, TypeVar, get_args

from earlyexit.data.strict import FromFile
from earlyexit.errors import PlanError

if TYPE_CHECKING:  # the module imports numpy, which the orders do not need
    from earlyexit.network.boundary import Budget, Split

SAME: Final = 1e-9
"""Relative difference below which numbers count as equal, because of rounding."""


def das(
    lengths: Sequence[int], waiting: Sequence[int], budget: Budget, *, eta: float, lead: Sequence[int] = ()
) -> list[int]:
    """Returns the positions of the inputs that form the next batch of one row: algorithm 1 of TCB.

    `lengths`: the lengths of all inputs. `waiting`: the positions to choose from, sorted by deadline: N_t in the paper.
    `budget`: in the paper it has L tokens and any number of inputs; without a token budget each input takes the room of
    one input. `eta`: the share of the batch that is chosen by utility alone; q of the paper is 1 - eta. `lead`: inputs
    that are in the batch in any case.

    The paper leaves some details open. Here:

    - p = eta x s is rounded up, because the theorem needs a share of at least eta;
    - equal utilities are ordered by deadline, and equal deadlines by their place in `waiting`;
    - "greedily" skips an input that does not fit, and continues with the next one;
    - an input longer than a row, which the paper does not have, runs alone once no shorter input waits.
    """
    room = Room(budget)
    for position in lead:
        room.take(position, lengths[position])
    if lead:
        waiting = [position for position in waiting if position not in lead]
    by_utility = sorted(waiting, key=lengths.__getitem__)
    saturating = room.number_that_fit(by_utility, lengths)
    if saturating == len(waiting):  # line 4: all fit
        return [*room.row, *waiting]
    if not saturating:
        return room.row or [min(waiting)]
    num_dominant = math.ceil(eta * saturating - SAME)
    dominant = by_utility[:num_dominant]
    room.take_fitting(dominant, lengths)
    mean = math.fsum(1 / lengths[position] for position in dominant) / num_dominant
    longest = (1 + SAME) / ((1 - eta) * mean)  # inputs with at least q times the mean utility are taken by deadline
    end = bisect_right(by_utility, longest, lo=num_dominant, key=lengths.__getitem__)
    room.take_fitting(sorted(by_utility[num_dominant:end]), lengths)
    room.take_fitting(by_utility[end:], lengths)
    return room.row


class Room:
    """The remaining budget of a batch, and the inputs that are in it."""

    def __init__(self, budget: Budget) -> None:
        self.inputs = budget.inputs
        self.tokens: float = math.inf if budget.tokens is None else budget.tokens
        self.row: list[int] = []
        """The positions of the inputs in the batch."""

    def take(self, position: int, length: int) -> None:
        """Adds an input."""
        self.row.append(position)
        self.inputs -= 1
        self.tokens -= length

    def number_that_fit(self, positions: Sequence[int], lengths: Sequence[int]) -> int:
        """Returns how many inputs from the front of `positions` fit: s of algorithm 1."""
        totals = accumulate([lengths[position] for position in positions[: self.inputs]])
        return bisect_right(list(totals), self.tokens)

    def take_fitting(self, positions: Sequence[int], lengths: Sequence[int]) -> None:
        """Adds the inputs that fit, in this order, and skips the others."""
        for position in positions:
            if not self.inputs:
                return
            if lengths[position] <= self.tokens:
                self.take(position, lengths[position])


OrderName = Literal["arrival", "deadline", "shortest", "das"]
"""First come first served, earliest deadline first, shortest first, and TCB's DAS (section 5.2, algorithm 1). For DAS a
batch is one row, whose length is the token budget."""

OVERDUE_S: Final = 1.0
"""Default of `OrderSpec.overdue_s`, in seconds. It is longer than most services' deadlines, which bound the wait there,
and short enough for services without deadlines."""

OVERDUE_SHARE: Final = 0.25
"""The share of a batch for overdue inputs. A larger share delays the other inputs more and overdue inputs less."""

deadline_of = attrgetter("deadline_s")


class Waiting(Protocol):
    """A queued input."""

    @property
    def tokens(self) -> int:
        """Its length. An input without tokens counts as 1."""

    @property
    def deadline_s(self) -> float:
        """When its answer is due. Infinity: it has no deadline."""

    @property
    def since_s(self) -> float:
        """When it was queued here. At an ingress: when it arrived."""


WaitingT = TypeVar("WaitingT", bound=Waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSpec(FromFile):
    """An order of inputs and its parameters. It has no state: the same queue always gives the same batch.

    Raises PlanError for parameters that the order does not have.
    """

    name: OrderName = "deadline"
    eta: float | None = None
    """For `das`: the share of a batch that is chosen by utility alone. None: 0.5."""
    overdue_s: float | None = None
    """Seconds of waiting after which an input is overdue, for all orders but `arrival`. None: `OVERDUE_S`."""

    def __post_init__(self) -> None:
        if self.name not in get_args(OrderName):
            raise PlanError(f"there is no order {self.name!r}; orders are {', '.join(get_args(OrderName))}")
        if self.eta is not None:
            if self.name != "das":
                raise PlanError(f"the order {self.name!r} takes no eta; only 'das' does")
            if not 0 < self.eta < 1:
                raise PlanError(f"eta must be between 0 and 1, not {self.eta}")
        if self.overdue_s is not None:
            if self.name == "arrival":
                raise PlanError("the order 'arrival' takes no overdue_s: the oldest goes first in any case")
            if not self.overdue_s >= 0:
                raise PlanError(f"overdue_s must be a number of seconds, at least 0, not {self.overdue_s}")

    @property
    def waits_s(self) -> float:
        """Seconds after which an input is overdue."""
        return OVERDUE_S if self.overdue_s is None else self.overdue_s

    def pick(self, waiting: Sequence[Waiting], budget: Budget, now_s: float) -> list[int]:
        """Returns the positions in `waiting` of the inputs that form the next batch; `waiting` is sorted by deadline.

        The batch has at least one input if any waits. It is within the budget, unless it is a single larger input.
        Equally long inputs are picked by deadline, and equal deadlines by arrival.
        """
        order = range(len(waiting))
        lengths = [max(1, each.tokens) for each in waiting]  # the utility of an empty input would be infinite
        if self.name == "arrival":
            return _fill(sorted(order, key=lambda position: waiting[position].since_s), lengths, budget)
        by_deadline = self.name == "deadline"
        may_lead = order[_first_without_deadline(waiting) :] if by_deadline else _in_time(waiting, now_s)
        lead = _overdue_among(waiting, may_lead, now_s - self.waits_s, lengths, budget)
        if self.name == "das":
            return das(lengths, may_lead, budget, eta=0.5 if self.eta is None else self.eta, lead=lead)
        others = order if by_deadline else sorted(may_lead, key=lengths.__getitem__)
        return _fill([*lead, *(position for position in others if position not in lead)], lengths, budget)

    def takes_front(self, waiting: Sequence[Waiting], now_s: float) -> bool:
        """Whether the next batch is simply the first inputs that fit. At least one input must wait.

        In the order by deadline it nearly always is. The exception is an overdue input without a deadline, which would
        otherwise always wait for newer inputs with deadlines.
        """
        if self.name != "deadline":
            return False
        # If all inputs have deadlines, none can be overdue. If none has a deadline, the oldest are in front already.
        if waiting[-1].deadline_s < math.inf or waiting[0].deadline_s == math.inf:
            return True
        return waiting[_first_without_deadline(waiting)].since_s > now_s - self.waits_s

    @classmethod
    def parse(cls, text: str) -> OrderSpec:
        """Returns the order for a text such as `shortest`, or `das:0.3` for `das` with that eta. Raises PlanError."""
        name, colon, number = text.partition(":")
        try:
            eta = float(number) if colon else None
        except ValueError:
            raise PlanError(f"an order is a name, or das:eta with a number, not {text!r}") from None
        return cls(name=name, eta=eta)  # type: ignore[arg-type] # the constructor checks the name


DEFAULT: Final = OrderSpec()


def take_from(waiting: list[WaitingT], order: OrderSpec, budget: Budget, now_s: float) -> list[WaitingT]:
    """Removes the next batch from a list that is sorted by deadline, and returns it."""
    if order.takes_front(waiting, now_s):
        batch = waiting[: budget.inputs]
        if budget.tokens is not None:
            fitting = Room(budget).number_that_fit(range(len(batch)), [each.tokens for each in batch])
            del batch[max(1, fitting) :]
        del waiting[: len(batch)]
        return batch
    picked = order.pick(waiting, budget, now_s)
    batch = [waiting[position] for position in picked]
    for position in sorted(picked, reverse=True):
        del waiting[position]
    return batch


def _first_without_deadline(waiting: Sequence[Waiting]) -> int:
    """Returns the position of the oldest input without a deadline. Such inputs are last, in the order of arrival."""
    return bisect_left(waiting, math.inf, key=deadline_of)


def _fill(order: Sequence[int], lengths: Sequence[int], budget: Budget) -> list[int]:
    """Returns a batch of the first inputs of `order` that fit, but at least one if there is any."""
    return list(order[: max(Room(budget).number_that_fit(order, lengths), 1)])


def _in_time(waiting: Sequence[Waiting], now_s: float) -> range:
    """Returns the inputs that are not past their deadline: N_t of section 5.2.

    If all inputs are late, it returns all of them: they form batches until the caller drops them.
    """
    late = bisect_left(waiting, now_s, key=deadline_of)
    return range(late if late < len(waiting) else 0, len(waiting))


def _overdue_among(
    waiting: Sequence[Waiting], among: range, since_s: float, lengths: Sequence[int], budget: Budget
) -> list[int]:
    """Returns the overdue inputs for the next batch: inputs of `among` that have waited since `since_s` or longer.

    They take at most their share of the batch, but at least one input. The latest deadlines go first. Among equal
    deadlines, and without deadlines, the oldest go first.
    """
    since = [each.since_s for each in waiting[among.start :]]
    if not since or min(since) > since_s:
        return []
    overdue = [position for position in among if since[position - among.start] <= since_s]
    share = replace(
        budget,
        inputs=max(1, int(OVERDUE_SHARE * budget.inputs)),
        tokens=None if budget.tokens is None else max(1, int(OVERDUE_SHARE * budget.tokens)),
    )
    return _fill(sorted(overdue, key=lambda position: -waiting[position].deadline_s), lengths, share)


Attention = Literal["auto", "padded", "slotted", "apart"]
"""How attention is computed for inputs of unequal lengths. Every input attends only to its own tokens.

- padded: each input is a row that is padded to the longest input;
- slotted: short inputs share a row, and a mask keeps them apart. There are fewer rows;
- apart: one call per input without padding. A few short inputs share a call, and a mask keeps them apart;
- auto: `apart` on a CPU, `slotted` in ONNX Runtime, else `padded`.
"""


def first_fit_decreasing(lengths: Sequence[int], slot_length: int) -> list[list[int]]:
    """Returns the inputs of every slot. The longest inputs are placed first, each in the first slot with enough room.

    The number of slots is at most 11/9 of the minimum, plus 6/9 (Dósa, 2007). Raises ValueError for an input longer
    than a slot.
    """
    slots: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > slot_length:
            raise ValueError(f"input {index} has {length} tokens, more than a slot of {slot_length}")
        slot = next((slot for slot, free in enumerate(room) if free >= length), len(slots))
        if slot == len(slots):
            slots.append([])
            room.append(slot_length)
        slots[slot].append(index)
        room[slot] -= length
    return slots


def any_two_fit(lengths: Sequence[int], slot_length: int) -> bool:
    """Whether any two of the inputs could share a slot."""
    return len(lengths) > 1 and sum(sorted(lengths)[:2]) <= slot_length


PayloadT = TypeVar("PayloadT")
NO_SEQUENCE = 0
"""The sequence number of inputs that belong to no sequence, and of warm-ups and profiles."""


@dataclass(slots=True, kw_only=True)
class Member(Generic[PayloadT]):
    """One input in one replica."""

    sample_id: str
    payload: PayloadT
    """Its hidden state. The engine does not read it."""
    tokens: int = 1
    """Its length, which the engine takes as its cost; 1 if inputs have no tokens."""
    deadline_s: float = math.inf
    """When its answer is due, on the engine's clock."""
    reserve_s: float = 0.0
    """Seconds before the deadline that are reserved for the work after this engine."""
    origin: object = None
    """The call that contained it."""
    counts_as_full: bool = False
    """Whether its batch may begin beside a running one under the dispatch rule `filling`, whatever its size."""
    probe: bool = False
    """Whether all ramps are evaluated on it. Probes and other inputs never share a batch."""
    sequence: int = NO_SEQUENCE
    """The number of its sequence. The network keeps memory for the sequence until its end."""
    answered: bool = False
    """Whether its answer was already sent. It stays in the batch, and later ramps do not answer it again."""
    since_s: float = 0.0
    """When it was queued for its split."""
    queued_serial: int = 0
    """The serial number of its submission to the engine."""
    queue_s: float = 0.0
    """Seconds that it has waited here so far."""
    compute_s: float = 0.0
    """Seconds that it has run here so far."""


_by_order = attrgetter("deadline_s", "queued_serial")


@dataclass(slots=True)
class SplitCounts:
    """Counters of a split since it was first hosted, including its probes."""

    budget: Budget
    """The size of a full batch."""
    batches: int = 0
    inputs: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    """Device seconds. While two batches run at once, each is charged half."""
    dropped: int = 0

    @property
    def fill(self) -> float | None:
        """The mean fill of batches, as a share of a full batch; None before the first batch."""
        return self.inputs / (self.batches * self.budget.inputs) if self.batches else None

    @property
    def token_fill(self) -> float | None:
        """The mean share of the token budget that was used; None without a budget, and before the first batch.

        It is above 1 if many inputs are larger than the budget.
        """
        budget = self.budget.tokens
        return self.tokens / (self.batches * budget) if self.batches and budget is not None else None


@dataclass(slots=True, eq=False)
class Queue(Generic[PayloadT]):
    """The queued members of one split: either its probes or its other members."""

    split: Split
    probe: bool = False
    counts: SplitCounts = field(init=False)
    members: list[Member[PayloadT]] = field(default_factory=list)
    """Sorted by deadline, then by arrival. Most arrive in this order, so a sorted list is faster than a heap."""

    def __post_init__(self) -> None:
        self.counts = SplitCounts(self.split.budget)

    @property
    def is_full(self) -> bool:
        """Whether the inputs or their tokens fill a batch, so that it starts at once."""
        members, budget = self.members, self.counts.budget
        # A probe counts as full: near full load some other queue is always full, so that probes would never run.
        if len(members) >= (1 if self.probe else budget.inputs):
            return True
        return budget.tokens is not None and _sum_of(members) >= budget.tokens

    def tokens_when_full(self, mean_tokens: float) -> float:
        """Returns the expected tokens of its next batch if that is full; future members have `mean_tokens` each."""
        return self.counts.budget.tokens_when_full(mean_tokens, len(self.members), _sum_of(self.members))

    def take(self, order: OrderSpec, now_s: float) -> tuple[tuple[Member[PayloadT], ...], int]:
        """Removes the next batch and counts it. Returns its members and tokens. At least one member must wait."""
        counts = self.counts
        members = tuple(take_from(self.members, order, counts.budget, now_s))
        num_tokens = _sum_of(members)
        counts.batches += 1
        counts.inputs += len(members)
        counts.tokens += num_tokens
        return members, num_tokens

    def drop_before(self, earliest_s: float) -> list[Member[PayloadT]]:
        """Removes the members with a deadline before `earliest_s`, counts them as dropped, and returns them."""
        num_late = bisect_left(self.members, earliest_s, key=deadline_of)
        late = self.members[:num_late]
        del self.members[:num_late]
        self.counts.dropped += num_late
        return late

    def remove(self, is_removed: Callable[[Member[PayloadT]], bool]) -> list[Member[PayloadT]]:
        """Removes and returns the members for which `is_removed` holds."""
        removed = list(filter(is_removed, self.members))
        if removed:
            self.members = [member for member in self.members if not is_removed(member)]
        return removed

    def move_to(self, other: Queue[PayloadT]) -> None:
        """Moves all members to another queue."""
        other.members = sorted(other.members + self.members, key=_by_order)
        self.members = []


def _sum_of(members: Sequence[Member[PayloadT]]) -> int:
    """Returns the members' total number of tokens."""
    return sum([member.tokens for member in members])  # faster than `map` with an attrgetter
