"""A core whose actions are written down; a test says what comes back of its calls. Inputs are letters."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from deployments.ingress.core.calls import Action, Answered, Call, Dropped, HungUp, Retried, SendCall, placements_of
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Inputs, PendingInput, Rules
from deployments.ingress.core.routes import KVPlacement
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
    """Every event is at `now_s`; whatever is due is sent at once. An input is a letter, which may be of a sequence."""

    def __init__(self, placed: PlacedPlan | None = None, **rules: Any) -> None:
        self.now_s = 0.0
        self.log: list[str] = []
        self.calls: list[Call] = []
        self.inputs: dict[str, PendingInput] = {}
        self.outcomes: dict[str, str] = {}
        self.placements: dict[str, KVPlacement] = {}
        """By the name of a sequence."""
        self.room = "r1"
        """The replica of every slot that takes sequences which have none there."""
        given = Rules(**{"calls_per_replica": 2, "max_attempts": 3} | rules)
        self.core = IngressCore("i", placed or plan(), ALL_SLOTS, given, random.Random(0))

    def submit(self, letters: str, *lengths: int, deadline_s: float = 10.0) -> None:
        """A request; `lengths`: its inputs', none where they have none."""
        made = [
            self._pending(letter, deadline_s, tokens)
            for letter, tokens in zip(letters, lengths or (1,) * len(letters), strict=True)
        ]
        self.core.submit(made, self.now_s)
        self.inputs |= dict(zip(letters, made, strict=True))
        self.do(())

    def begin(self, name: str, letter: str, *, tokens: int = 5, again: bool = False) -> None:
        """A sequence with its first input."""
        self.placements[name] = KVPlacement(len(self.placements) + 1, is_again=again)
        self.step(name, letter, tokens=tokens)

    def step(self, name: str, letter: str, *, tokens: int = 1, deadline_s: float = 10.0) -> None:
        """A sequence's next input, which is sent when everything of this moment has come."""
        pending = self._pending(letter, deadline_s, tokens)
        self.core.step(pending, self.placements[name], self.now_s)
        self.inputs[letter] = pending

    def expire(self, letter: str) -> None:
        self.do(self.core.expire(self.inputs[letter], self.now_s))

    def answer(self, call: int, letters: str, *, block: int = 3) -> None:
        said = [f"{letter} is {letter}" for letter in letters]
        self.do(self.core.answer(self.calls[call], self.named(letters), block, self.now_s, said))

    def answer_early(self, call: int, letters: str, *, block: int) -> None:
        said = [f"{letter} is {letter}" for letter in letters]
        self.do(self.core.answer_early(self.calls[call], self.named(letters), block, self.now_s, said))

    def go_on(self, call: int, letters: str, *, block: int = 2) -> None:
        self.do(self.core.go_on(self.calls[call], self.named(letters), block, f"({letters})", self.now_s))

    def lose(self, call: int, letters: str, error: OfframpError | None = None) -> None:
        why = error or ExecutionError("the model failed on it")
        self.do(self.core.lose(self.calls[call], self.named(letters), why, self.now_s))

    def fail(self, call: int) -> None:
        self.do(self.core.fail(self.calls[call], self.calls[call].inside(), self.now_s))

    def give_up(self, letters: str) -> None:
        self.do(self.core.give_up(self.named(letters), "abandoned", self.now_s))

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

    def named(self, letters: str) -> list[PendingInput]:
        return [self.inputs[letter] for letter in letters]

    def _pending(self, letter: str, deadline_s: float, tokens: int) -> PendingInput:
        return PendingInput(0, self.now_s, deadline_s, tokens, key=letter)

    def _write(self, action: Action) -> None:
        match action:
            case SendCall():
                self._write_send(action)
            case Answered(inputs, block, answers, _):
                self._settle(inputs, "answered")
                self._say(f"answer {', '.join(answers)} after block {block}")
            case Dropped(inputs, reason, error):
                self._settle(inputs, reason)
                self._say(f"drop {letters_of(inputs)}: {reason if error is None else error}")
            case HungUp(call):
                self._say(f"hang up {self.calls.index(call)}")
            case Retried(slot, number):
                self._say(f"again {number} of {NAMES[slot]}")

    def _write_send(self, send: SendCall) -> None:
        call, block, payload, network, rows = send
        self.calls.append(call)
        crosses = network is not None and payload is not None
        what = letters_of(call.inputs) if crosses else payload or letters_of(call.inputs)
        into = f" of network {network}" if network else ""
        self._say(f"send {len(self.calls) - 1}: {what} to {NAMES[call.stage.slot]} for block {block}{into}")
        placements = placements_of(call.stage.slot, call.inputs)
        if placements.each:
            self.log[-1] += f" at {placements.replica or 'any'}"
            self.log[-1] += "" if rows is None else f", rows {list(rows)}"
            if placements.replica is None:
                placements.choose(self.room)

    def _settle(self, inputs: Inputs, outcome: str) -> None:
        for each in inputs:
            assert each.key not in self.outcomes, "an input has one outcome"
            self.outcomes[each.key] = outcome

    def _say(self, what: str) -> None:
        self.log.append(f"{self.now_s:g} {what}")


def letters_of(inputs: Inputs) -> str:
    return "".join(each.key for each in inputs)
