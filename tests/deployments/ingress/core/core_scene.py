"""A core whose actions are written down; a test says what comes back of its calls. Inputs are letters."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Action, Answered, Call, Dropped, Flight, HungUp, Retried, Rules, SendCall
from earlyexit.engine.engine import Dispatch
from earlyexit.errors import ExecutionError, OfframpError
from earlyexit.network.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage

ALL_SLOTS = ("split-cpu-0", "split-cpu-1", "split-cpu-2")
NAMES = dict(zip(ALL_SLOTS, ("first", "second", "third"), strict=True))
SLOTS = ALL_SLOTS[:2]
BATCH = 4


def plan(
    *,
    epoch: int = 1,
    replicas: int = 1,
    cut: int = 2,
    slots: tuple[str, ...] = SLOTS,
    dispatch: Dispatch = "work-conserving",
    tokens: int | None = None,
    predicted: Mapping[str, float] | None = None,
) -> PlacedPlan:
    """Four blocks in two stages; `tokens`: a batch's of both."""
    stages = (
        Stage(device="cpu", replicas=replicas, splits=(Split(first=0, end=cut, batch=BATCH, tokens=tokens),)),
        Stage(device="cpu", replicas=1, splits=(Split(first=cut, end=4, batch=BATCH, tokens=tokens),)),
    )
    return PlacedPlan(plan=Plan(stages=stages, epoch=epoch, dispatch=dispatch, predicted=predicted or {}), slots=slots)


class CoreScene:
    """Every event is at `now_s`; whatever is due is sent at once."""

    def __init__(self, placed: PlacedPlan | None = None, **rules: Any) -> None:
        self.now_s = 0.0
        self.log: list[str] = []
        self.calls: list[Call[str, None]] = []
        self.flights: dict[str, Flight[str]] = {}
        self.outcomes: dict[str, str] = {}
        given = Rules(**{"calls_per_replica": 2, "max_attempts": 3} | rules)
        ways = dict.fromkeys(ALL_SLOTS)
        self.core: IngressCore[str, None] = IngressCore("i", placed or plan(), ways, given, random.Random(0))

    def submit(self, letters: str, *lengths: int, deadline_s: float = 10.0) -> None:
        """A request; `lengths`: its inputs', none where they have none."""
        made = self.core.submit(
            letters, tokens=lengths or None, arrived_s=self.now_s, deadline_s=deadline_s, now_s=self.now_s
        )
        self.flights |= {flight.input: flight for flight in made}
        self.do(())

    def answer(self, call: int, letters: str, *, block: int = 3) -> None:
        said = [f"{letter} is {letter}" for letter in letters]
        self.do(self.core.answer(self.calls[call], self._flights(letters), block, self.now_s, said))

    def go_on(self, call: int, letters: str, *, block: int = 2) -> None:
        self.do(self.core.go_on(self.calls[call], self._flights(letters), block, f"({letters})", self.now_s))

    def lose(self, call: int, letters: str, error: OfframpError | None = None) -> None:
        why = error or ExecutionError("the model failed on it")
        self.do(self.core.lose(self.calls[call], self._flights(letters), why, self.now_s))

    def fail(self, call: int) -> None:
        self.do(self.core.fail(self.calls[call], self.calls[call].inside(), self.now_s))

    def give_up(self, letters: str) -> None:
        self.do(self.core.give_up(self._flights(letters), "abandoned", self.now_s))

    def suspend(self) -> None:
        self.do(self.core.suspend("nothing is left", self.now_s))

    def follow(self, placed: PlacedPlan) -> None:
        self.core.follow(placed)
        self.do(())

    def until(self, now_s: float) -> None:
        """Wake it whenever it wants, up to a second."""
        while self.core.wake_s <= now_s:
            self.now_s = max(self.now_s, self.core.wake_s)
            self.do(self.core.wake(self.now_s))
        self.now_s = now_s

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._write(action)
        while self.core.is_due:
            for action in self.core.pump(self.now_s):
                self._write(action)

    def _write(self, action: Action) -> None:
        match action:
            case SendCall(call, block, payload, network):
                self.calls.append(call)
                crosses = network is not None and payload is not None
                what = _letters(call.flights) if crosses else payload or _letters(call.flights)
                into = f" of network {network}" if network else ""
                self._say(f"send {len(self.calls) - 1}: {what} to {NAMES[call.leg.slot]} for block {block}{into}")
            case Answered(flights, block, answers, _):
                self._settle(flights, "answered")
                self._say(f"answer {', '.join(answers)} after block {block}")
            case Dropped(flights, reason, error):
                self._settle(flights, reason)
                self._say(f"drop {_letters(flights)}: {reason if error is None else error}")
            case HungUp(call):
                self._say(f"hang up {self.calls.index(call)}")
            case Retried(slot, number):
                self._say(f"again {number} of {NAMES[slot]}")

    def _settle(self, flights: Sequence[Flight[str]], outcome: str) -> None:
        for flight in flights:
            assert flight.input not in self.outcomes, "an input has one outcome"
            self.outcomes[flight.input] = outcome

    def _say(self, what: str) -> None:
        self.log.append(f"{self.now_s:g} {what}")

    def _flights(self, letters: str) -> list[Flight[str]]:
        return [self.flights[letter] for letter in letters]


def _letters(flights: Sequence[Flight[str]]) -> str:
    return "".join(flight.input for flight in flights)
