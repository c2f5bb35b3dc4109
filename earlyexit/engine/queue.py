"""Inputs of the batch engine, the order in which they form batches, and the queues in which they wait. Pure.

Engines and ingresses use the same orders, those of TCB (ICPP'22, section 6.2.4): first come first served, earliest
deadline first, shortest first, and TCB's own DAS. TCB maximises the *utility* of what runs before its deadline, 1 /
length for each input (section 5.1). Where all waiting inputs can run in time, the orders are worth the same.

Short inputs that keep coming would make a long one wait for ever. So an input that has waited for `overdue_s` is
*overdue*, and a quarter of every batch, at least one input, is for overdue inputs. Of those without deadlines the
oldest go first, so that no input waits much longer than `overdue_s` and four times its wait under first come, first
served. An input with a deadline waits no longer than that. Of those the latest deadlines go first, since a long queue
can still meet only these.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Generic, Literal, Protocol, TypeVar, get_args

from earlyexit.errors import PlanError

if TYPE_CHECKING:  # numpy, which names and choices of orders do without
    from earlyexit.network.boundary import Budget, Split

SAME: Final = 1e-9
"""Relative difference below which numbers count as equal, because of rounding."""


def das(
    lengths: Sequence[int], waiting: Sequence[int], budget: Budget, *, eta: float, q: float, lead: Sequence[int] = ()
) -> list[int]:
    """Returns the inputs of a batch of one row by algorithm 1 of TCB.

    `lengths`: of all inputs. `waiting`: positions of the inputs to choose from, by deadline, N_t. `budget`: the paper's
    has L tokens and any number of inputs. Without a budget of tokens an input has its utility and takes the room of one
    input. `lead`: inputs that are in the batch, whatever their utility.

    Where the paper leaves something open:

    - p = eta x s is rounded up, so that the share of the batch that its theorem counts on is never less than eta;
    - equal utilities go by deadline, equal deadlines by their place in `waiting`;
    - "greedily" skips an input that does not fit, and goes on;
    - an input longer than a row (the paper has none) is alone in one, once no shorter input waits.
    """
    room = Room(budget)
    for position in lead:
        room.take(position, lengths[position])
    if lead:
        waiting = [position for position in waiting if position not in lead]
    by_utility = sorted(waiting, key=lengths.__getitem__)
    saturating = number_that_fits(by_utility, lengths, room)
    if saturating == len(waiting):  # line 4: all fit
        return [*room.row, *waiting]
    if not saturating:
        return room.row or [min(waiting)]
    chosen = math.ceil(eta * saturating - SAME)
    dominant = by_utility[:chosen]
    room.take_fitting(dominant, lengths)
    mean = math.fsum(1 / lengths[position] for position in dominant) / chosen
    longest = (1 + SAME) / (q * mean)  # an input with at least q times the mean utility may go for its deadline
    end = bisect_right(by_utility, longest, lo=chosen, key=lengths.__getitem__)
    room.take_fitting(sorted(by_utility[chosen:end]), lengths)
    room.take_fitting(by_utility[end:], lengths)
    return room.row


class Room:
    """The rest of a budget, and the inputs that took their share of it."""

    def __init__(self, budget: Budget) -> None:
        self.inputs = budget.inputs
        self.tokens: float = math.inf if budget.tokens is None else budget.tokens
        self.row: list[int] = []
        """Positions of the inputs that took room."""

    def take(self, position: int, length: int) -> None:
        self.row.append(position)
        self.inputs -= 1
        self.tokens -= length

    def take_fitting(self, positions: Sequence[int], lengths: Sequence[int]) -> None:
        for position in positions:
            if not self.inputs:
                return
            if lengths[position] <= self.tokens:
                self.take(position, lengths[position])


def number_that_fits(order: Sequence[int], lengths: Sequence[int], room: Room) -> int:
    """Returns how many inputs from the front fit, s of algorithm 1."""
    inputs, tokens = room.inputs, room.tokens
    if tokens == math.inf:
        return min(inputs, len(order))
    number = 0
    for position in order:
        tokens -= lengths[position]
        if tokens < 0 or number == inputs:
            break
        number += 1
    return number


OrderName = Literal["arrival", "deadline", "shortest", "das"]
"""First come first served, earliest deadline first, shortest first, and TCB's DAS (section 5.2, algorithm 1) on batches
of one row whose length is the token budget."""

OVERDUE_S: Final = 1.0
"""Seconds until inputs are overdue, unless a plan says otherwise: longer than the deadlines of most services, which
bound waits there, and short enough for services without deadlines."""

OVERDUE_SHARE: Final = 0.25
"""Share of a batch for overdue inputs. It bounds their cost to the others and, inversely, their own wait."""

_deadline_of = attrgetter("deadline_s")
_since_of = attrgetter("since_s")
_tokens_of = attrgetter("tokens")


class Waiting(Protocol):
    """An input that waits."""

    @property
    def tokens(self) -> int:
        """Its length; an input without tokens counts as 1."""
        ...

    @property
    def deadline_s(self) -> float:
        """When its answer is due; infinite without a deadline."""
        ...

    @property
    def since_s(self) -> float:
        """When it began to wait here or, at an ingress, arrived."""
        ...


X = TypeVar("X", bound=Waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSpec:
    """An order and its numbers; raises PlanError for numbers that the order does not take.

    It has no state: the same waiting inputs make the same batch.
    """

    name: OrderName = "deadline"
    eta: float | None = None
    """Of `das`: the share of a batch chosen by utility alone. None: 1 - `q`, or a half."""
    q: float | None = None
    """Of `das`: an input may go for its deadline if its utility is at least this share of the mean of those chosen by
    utility; always 1 - eta (section 5.2), which is also the meaning of None."""
    overdue_s: float | None = None
    """Seconds of waiting after which an input is overdue, in all orders but `arrival`; None: `OVERDUE_S`."""

    def __post_init__(self) -> None:
        if self.name not in get_args(OrderName):
            raise PlanError(f"there is no order {self.name!r}; orders are {', '.join(get_args(OrderName))}")
        for called, share in (("eta", self.eta), ("q", self.q)):
            if share is None:
                continue
            if self.name != "das":
                raise PlanError(f"the order {self.name!r} takes no {called}; only 'das' does")
            if not 0 < share < 1:
                raise PlanError(f"{called} must be between 0 and 1, not {share}")
        if self.eta is not None and self.q is not None and not math.isclose(self.eta + self.q, 1, rel_tol=SAME):
            raise PlanError(f"eta and q must sum to 1, not to {self.eta + self.q:g} as {self.eta} and {self.q} do")
        if self.overdue_s is not None:
            if self.name == "arrival":
                raise PlanError("the order 'arrival' takes no overdue_s: the oldest goes first in any case")
            if not self.overdue_s >= 0:
                raise PlanError(f"overdue_s must be a number of seconds, at least 0, not {self.overdue_s}")

    @property
    def shares(self) -> tuple[float, float]:
        """Eta and q of `das`."""
        eta = 0.5 if self.q is None else 1 - self.q
        eta = eta if self.eta is None else self.eta
        return eta, 1 - eta if self.q is None else self.q

    @property
    def waits_s(self) -> float:
        """Seconds after which an input is overdue."""
        return OVERDUE_S if self.overdue_s is None else self.overdue_s

    def pick(self, waiting: Sequence[Waiting], budget: Budget, now_s: float) -> list[int]:
        """Returns positions of the next batch in `waiting`, which is sorted by deadline.

        It has at least one input if any waits, and is within the budget, unless a single input is larger. Equally long
        inputs are picked by deadline, equal deadlines by arrival.
        """
        lengths = _lengths(waiting)
        if self.name == "arrival":
            since_s = list(map(_since_of, waiting))
            return _first_ones(sorted(range(len(waiting)), key=since_s.__getitem__), lengths, budget)
        if self.name == "deadline":
            if not waiting or self.takes_front(waiting, now_s):
                return _first_ones(range(len(waiting)), lengths, budget)
            without = range(_oldest_without(waiting), len(waiting))
            lead = _overdue_among(waiting, without, now_s - self.waits_s, lengths, budget)
            return _first_ones(_led_by(lead, range(len(waiting))), lengths, budget)
        live = _in_time(waiting, now_s)
        lead = _overdue_among(waiting, live, now_s - self.waits_s, lengths, budget)
        if self.name == "shortest":
            return _first_ones(_led_by(lead, sorted(live, key=lengths.__getitem__)), lengths, budget)
        eta, q = self.shares
        return das(lengths, live, budget, eta=eta, q=q, lead=lead)

    def takes_front(self, waiting: Sequence[Waiting], now_s: float) -> bool:
        """Whether the next batch is the first `number_in_front` inputs; at least one input must wait.

        By deadline it nearly always is. Inputs with a deadline wait no longer than that, but an input without one can
        be overdue: new inputs with deadlines would otherwise go before it for ever.
        """
        if self.name != "deadline":
            return False
        # No input can be overdue where all have a deadline; without any deadline the oldest stand in front.
        if waiting[-1].deadline_s < math.inf or waiting[0].deadline_s == math.inf:
            return True
        return waiting[_oldest_without(waiting)].since_s > now_s - self.waits_s

    @classmethod
    def parse(cls, text: str) -> OrderSpec:
        """Returns the order that a word names, such as `das:0.3` for `das` with another eta; raises PlanError."""
        name, colon, number = text.partition(":")
        try:
            eta = float(number) if colon else None
        except ValueError:
            raise PlanError(f"an order is a name, or das:eta with a number, not {text!r}") from None
        return cls(name=name, eta=eta)  # type: ignore[arg-type] # it looks at the name itself


DEFAULT: Final = OrderSpec()


def number_in_front(waiting: Sequence[Waiting], budget: Budget) -> int:
    """Returns how many inputs from the front make a batch: as many as fit, and at least one if any waits."""
    if budget.tokens is None:
        return min(len(waiting), budget.inputs)
    num_tokens = 0
    for num_inputs, each in enumerate(waiting):
        if not budget.room_for(num_inputs, num_tokens, each.tokens):
            return num_inputs
        num_tokens += each.tokens
    return len(waiting)


def take_from(waiting: list[X], order: OrderSpec, budget: Budget, now_s: float) -> list[X]:
    """Removes and returns the next batch of a list that is sorted by deadline."""
    if order.takes_front(waiting, now_s):
        number = number_in_front(waiting, budget)
        batch = waiting[:number]
        del waiting[:number]
        return batch
    picked = order.pick(waiting, budget, now_s)
    batch = [waiting[position] for position in picked]
    for position in sorted(picked, reverse=True):
        del waiting[position]
    return batch


def _oldest_without(waiting: Sequence[Waiting]) -> int:
    """Returns the position of the oldest input without a deadline; these stand last, in the order of arrival."""
    return bisect_left(waiting, math.inf, key=_deadline_of)


def _first_ones(order: Sequence[int], lengths: Sequence[int], budget: Budget) -> list[int]:
    """Returns the first inputs of an order that fit, and at least one if there is one."""
    return list(order[: max(number_that_fits(order, lengths, Room(budget)), 1)])


def _lengths(waiting: Sequence[Waiting]) -> list[int]:
    lengths = list(map(_tokens_of, waiting))
    if lengths and min(lengths) < 1:  # an input without tokens has a utility like any other
        return [max(1, length) for length in lengths]
    return lengths


def _in_time(waiting: Sequence[Waiting], now_s: float) -> range:
    """Returns the inputs that are not past their deadline: others are not in N_t (section 5.2).

    If no input is in time it returns all of them. The caller drops late inputs; until then they form batches too.
    """
    late = bisect_left(waiting, now_s, key=_deadline_of)
    return range(late if late < len(waiting) else 0, len(waiting))


def _overdue_among(
    waiting: Sequence[Waiting], among: range, since_s: float, lengths: Sequence[int], budget: Budget
) -> list[int]:
    """Returns the inputs that have waited since `since_s` or longer, within their share of a batch, and at least one.

    The latest deadlines go first; of equal deadlines, and of inputs without one, the oldest.
    """
    since = list(map(_since_of, waiting[among.start :]))
    if not since or min(since) > since_s:
        return []
    overdue = [position for position in among if since[position - among.start] <= since_s]
    share = replace(
        budget,
        inputs=max(1, int(OVERDUE_SHARE * budget.inputs)),
        tokens=None if budget.tokens is None else max(1, int(OVERDUE_SHARE * budget.tokens)),
    )
    lead: list[int] = []
    while overdue and len(lead) < share.inputs:
        latest_s = waiting[overdue[-1]].deadline_s
        first = bisect_left(overdue, latest_s, key=lambda position: waiting[position].deadline_s)
        lead += overdue[first : first + share.inputs]
        del overdue[first:]
    return _first_ones(lead, lengths, share)


def _led_by(lead: Sequence[int], order: Sequence[int]) -> Sequence[int]:
    return [*lead, *[position for position in order if position not in lead]] if lead else order


Attention = Literal["auto", "padded", "slotted", "apart"]
"""How inputs of unequal lengths attend, each to its own tokens.

- padded: every input is a row as long as the longest;
- slotted: short inputs share such a row, so that there are fewer rows, and a mask keeps them apart;
- apart: one input after the other, without padding; a few short inputs run side by side, kept apart by a mask;
- auto: `apart` on a CPU; `slotted` in graphs with rows (ONNX Runtime); else `padded`.
"""


def first_fit_decreasing(lengths: Sequence[int], slot_length: int) -> list[list[int]]:
    """Returns the inputs of every slot: the longest first, each in the first slot that still has room for it.

    Their number is at most 11/9 of the fewest possible, plus 6/9 (Dósa, 2007). Raises ValueError for an input longer
    than a slot.
    """
    slots: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > slot_length:
            raise ValueError(f"input {index} has {length} tokens, more than a slot of {slot_length}")
        found = next((slot for slot, left in enumerate(room) if left >= length), len(slots))
        if found == len(slots):
            slots.append([])
            room.append(slot_length)
        slots[found].append(index)
        room[found] -= length
    return slots


def any_two_fit(lengths: Sequence[int], slot_length: int) -> bool:
    """Whether any two of the inputs could share a slot."""
    return len(lengths) > 1 and sum(sorted(lengths)[:2]) <= slot_length


P = TypeVar("P")
NO_SEQUENCE = 0
"""The sequence number of inputs without a sequence: those of networks that keep nothing, warm-ups, profiles."""


@dataclass(slots=True, kw_only=True)
class Member(Generic[P]):
    """One input, in one replica."""

    sample_id: str
    payload: P
    """Its hidden state; the engine passes it on untouched."""
    tokens: int = 1
    """Its length, which is its cost; 1 where inputs have no tokens."""
    deadline_s: float = math.inf
    """When its answer must be out, on the engine's clock."""
    reserve_s: float = 0.0
    """Time before the deadline that is reserved for what comes after this engine."""
    origin: object = None
    """The call by which it came."""
    probe: bool = False
    """Whether every ramp looks at it; probes and other inputs are never in one batch."""
    sequence: int = NO_SEQUENCE
    """The number of its sequence, for which the network keeps memory until the sequence is ended."""
    answered: bool = False
    """Whether its answer was released already: it then stays, and no later ramp answers it again."""
    since_s: float = 0.0
    """When it began to wait for its split."""
    queued_serial: int = 0
    """The number of its submission to the engine; equal for members of one submission."""
    queue_s: float = 0.0
    """Time spent waiting here so far."""
    compute_s: float = 0.0
    """Time spent running here so far."""


by_deadline = attrgetter("deadline_s")
_by_order = attrgetter("deadline_s", "queued_serial")


@dataclass(slots=True)
class SplitCounts:
    """What a hosted split has done since it was first hosted, its probes included."""

    budget: Budget
    """What its batches are fused to."""
    batches: int = 0
    inputs: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    """Seconds of the device; those in which two batches ran count half for each."""
    dropped: int = 0

    @property
    def capacity(self) -> int:
        """Inputs that full batches would have held."""
        return self.batches * self.budget.inputs

    @property
    def fill(self) -> float | None:
        """Mean share of the target batch that was filled; None before the first batch."""
        return self.inputs / self.capacity if self.batches else None

    @property
    def token_fill(self) -> float | None:
        """Mean share of the token budget that was filled; None without one, and before the first batch.

        Above 1 where many inputs are larger than the budget.
        """
        budget = self.budget.tokens
        return self.tokens / (self.batches * budget) if self.batches and budget is not None else None


@dataclass(slots=True, eq=False)
class Queue(Generic[P]):
    """Members of one kind, probes or plain ones."""

    split: Split
    probe: bool = False
    counts: SplitCounts = field(init=False)
    # Earliest deadline first; members with equal deadlines in the order of their arrival. Nearly all arrive in this
    # order, so that a sorted list is faster than a heap.
    members: list[Member[P]] = field(default_factory=list)
    budget: Budget = field(init=False)
    """Of a batch."""
    full_at: int = field(init=False)
    """The number of inputs with which a batch starts at once."""
    probes: Queue[P] | None = None
    """For a queue of plain members: the queue of the same split's probes, once there was a probe."""

    def __post_init__(self) -> None:
        self.budget = budget = self.split.budget
        # Probes never wait for others: near full load some plain queue is always full, and none would be run.
        self.full_at = 1 if self.probe else budget.inputs
        self.counts = SplitCounts(budget)

    @property
    def is_full(self) -> bool:
        """Whether a batch starts at once: the inputs, or their tokens, fill it."""
        most_tokens = self.budget.tokens
        return len(self.members) >= self.full_at or (most_tokens is not None and _sum_of(self.members) >= most_tokens)

    @property
    def is_drained(self) -> bool:
        """Whether no member waits, probes included."""
        return not self.members and (self.probes is None or not self.probes.members)

    def tokens_when_full(self, mean_tokens: float) -> float:
        """Expected tokens of its next batch, if it fills: waiting members' own tokens, and `mean_tokens` for others."""
        return self.budget.tokens_when_full(mean_tokens, len(self.members), _sum_of(self.members))

    def take(self, order: OrderSpec, now_s: float) -> tuple[tuple[Member[P], ...], int]:
        """Returns the next batch and its tokens, and counts it as run; at least one member must wait."""
        counts = self.counts
        members = tuple(take_from(self.members, order, self.budget, now_s))
        num_tokens = _sum_of(members)
        counts.batches += 1
        counts.inputs += len(members)
        counts.tokens += num_tokens
        return members, num_tokens

    def drop_before(self, earliest_s: float) -> list[Member[P]]:
        """Remove, count and return the members whose deadline is before the earliest end."""
        num_late = bisect_left(self.members, earliest_s, key=by_deadline)
        late = self.members[:num_late]
        del self.members[:num_late]
        self.counts.dropped += num_late
        return late

    def forget(self, origin: object) -> int:
        """Remove the members of an origin; returns their number."""
        before = len(self.members)
        self.members = [member for member in self.members if member.origin is not origin]
        return before - len(self.members)

    def remove_sequences(self, sequences: Collection[int]) -> list[Member[P]]:
        """Remove and return the members of some sequences."""
        found = [member for member in self.members if member.sequence in sequences]
        if found:
            self.members = [member for member in self.members if member.sequence not in sequences]
        return found

    def move_to(self, other: Queue[P]) -> None:
        """Move all members to another queue."""
        other.members = sorted(other.members + self.members, key=_by_order)
        self.members = []


def _sum_of(members: Sequence[Member[P]]) -> int:
    """Their tokens together."""
    return sum([member.tokens for member in members])  # faster than `map` with an attrgetter
