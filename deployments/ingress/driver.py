"""Drives a core: carries out its actions, and calls it when calls are due or a timer expires."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from deployments.ingress.core.calls import Action, Answered, Dropped, HungUp, Retried, SendCall
from deployments.ingress.core.ingress_core import IngressCore
from earlyexit.clock import Clock
from optimizer.placement import PlacedPlan


class Driver(ABC):
    """The loop around a core. What carries its calls, live or simulated, is a subclass."""

    def __init__(self, core: IngressCore, clock: Clock) -> None:
        self.core = core
        self.clock = clock
        self._todo: deque[Action] = deque()
        self._is_busy = False
        self._timer_s = math.inf
        """When the timer that is set expires."""
        self._handlers: dict[type[Action], Callable[[Any], None]] = {
            SendCall: self.send,
            Answered: self.answered,
            Dropped: self.dropped,
            HungUp: self.hung_up,
            Retried: self.retried,
        }

    def follow(self, placed: PlacedPlan) -> None:
        """Follow this plan from now on; one older than the present is ignored. Raises PlanError for foreign slots."""
        self.core.follow(placed)
        self.do(())

    def suspend(self, reason: str) -> None:
        """Serve by no plan: what waits, and what arrives until the next one, gets StageUnavailableError."""
        self.do(self.core.suspend(reason, self.clock.now_s()))

    def do(self, actions: Iterable[Action]) -> None:
        """Carry out actions and whatever follows from them; a nested call leaves its actions to the outer one."""
        todo = self._todo
        todo.extend(actions)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while todo or self.pump():
                self.carry_out(todo.popleft())
        finally:
            self._is_busy = False
            if self.core.wake_s < self._timer_s:
                self._timer_s = self.core.wake_s
                self.set_timer(self._timer_s)

    def pump(self) -> bool:
        """Have the core send what is due, if anything; returns whether there are actions to carry out."""
        if self.core.is_due:
            self._todo.extend(self.core.pump(self.clock.now_s()))
        return bool(self._todo)

    def carry_out(self, action: Action) -> None:
        self._handlers[type(action)](action)

    def wake(self) -> bool:
        """The timer has expired; returns whether there was anything to do."""
        now_s = max(self._timer_s, self.clock.now_s())  # a loop's timer may come a moment before its time
        self._timer_s = math.inf
        actions: list[Action] = []
        try:
            actions = self.core.wake(now_s)
        finally:
            self.do(actions)
        return bool(actions)

    @abstractmethod
    def set_timer(self, at_s: float) -> None:
        """Call `wake` then, instead of when it was to be called before."""

    @abstractmethod
    def send(self, send: SendCall) -> None:
        """Send a call to its stage."""

    @abstractmethod
    def answered(self, answered: Answered) -> None:
        """Give callers their answers."""

    @abstractmethod
    def dropped(self, dropped: Dropped) -> None:
        """Tell callers that their inputs get no answer."""

    @abstractmethod
    def hung_up(self, hung_up: HungUp) -> None:
        """Stop a call."""

    @abstractmethod
    def retried(self, retried: Retried) -> None:
        """Note that inputs wait to be sent again."""
