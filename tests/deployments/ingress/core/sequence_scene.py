"""A core whose inputs are of sequences: a test says which replica takes those that have none yet."""

from __future__ import annotations

from typing import Any

from deployments.ingress.core.inputs import Action, SendCall
from deployments.ingress.core.routes import KVPlacement, homes_of
from optimizer.placement import PlacedPlan
from tests.deployments.ingress.core.core_scene import CoreScene


class SequenceScene(CoreScene):
    """An input is a letter, and its sequence has a name of its own."""

    def __init__(self, placed: PlacedPlan | None = None, **rules: Any) -> None:
        super().__init__(placed, **rules)
        self.homes: dict[str, KVPlacement] = {}
        self.room = "r1"
        """The replica of every slot that takes sequences which have none there."""

    def begin(self, name: str, letter: str, *, tokens: int = 5, again: bool = False) -> None:
        """A sequence with its first input."""
        self.homes[name] = KVPlacement(len(self.homes) + 1, is_again=again)
        self.step(name, letter, tokens=tokens)

    def step(self, name: str, letter: str, *, tokens: int = 1, deadline_s: float = 10.0) -> None:
        """Its next input, which is sent when everything of this moment has come."""
        self.flights[letter] = self.core.step(
            letter,
            self.homes[name],
            tokens=tokens,
            arrived_s=self.now_s,
            deadline_s=deadline_s,
            now_s=self.now_s,
        )

    def expire(self, letter: str) -> None:
        self.do(self.core.expire(self.flights[letter], self.now_s))

    def _write(self, action: Action) -> None:
        super()._write(action)
        if isinstance(action, SendCall):
            homes = homes_of(action.call.leg.slot, action.call.flights)
            self.log[-1] += f" at {homes.replica or 'any'}"
            self.log[-1] += "" if action.rows is None else f", rows {list(action.rows)}"
            if homes.replica is None:
                homes.choose(self.room)
