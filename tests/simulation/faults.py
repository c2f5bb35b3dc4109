"""Faults of the kind that the simulation is there to find, each put into the live code by a patch of one function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from deployments.controller.act import ControlLoop
from deployments.ingress.core import calls
from deployments.ingress.core.calls import Call, Calls, HungUp, Pause
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Chain
from deployments.ingress.core.routes import lay_out
from deployments.ingress.link import ReplicaLink, ReplicaLinks
from deployments.replica.host import NOTHING, StageHost, _Connection
from earlyexit.engine.device import Device

Fault = Callable[[], AbstractContextManager[Any]]


def settle_twice() -> AbstractContextManager[Any]:
    """An input that has its outcome gets another one."""
    return patch.object(calls, "_settled_now", lambda inputs: [True] * len(inputs))


def lose_on_hang_up() -> AbstractContextManager[Any]:
    """A call that hangs is ended, and nothing becomes of what it had."""
    return patch.object(
        IngressCore, "_hang_up", lambda self, pending, now_s: [HungUp(pending.holder)] if pending.holder else []
    )


def apply_an_old_plan() -> AbstractContextManager[Any]:
    """An ingress follows a plan that comes late, although it follows a newer one."""
    follow = IngressCore.follow

    def always(self: Any, placed: Any) -> None:
        if placed.epoch < self.route.epoch:
            self._chains.follow(lay_out(placed, self.route), None)
        follow(self, placed)

    return patch.object(IngressCore, "follow", always)


def obey_an_old_call() -> AbstractContextManager[Any]:
    """A replica does as the last call says, be it of an older plan."""
    follow = StageHost.follow

    def always(self: Any, assignment: Any) -> None:
        if assignment.epoch < self.epoch:
            self.epoch = NOTHING
        follow(self, assignment)

    return patch.object(StageHost, "follow", always)


def take_an_old_reply() -> AbstractContextManager[Any]:
    """A reply is taken for inputs that its call has no more."""
    return patch.object(Call, "release", lambda self, inputs: [True] * len(inputs))


def leak_a_page() -> AbstractContextManager[Any]:
    """A sequence that ends while a batch has it keeps its pages."""

    def end(device: Device[Any], sequences: Collection[int]) -> None:
        running = device.engine.running_sequences
        before(device, [each for each in sequences if each not in running])

    before = Device.end
    return patch.object(Device, "end", end)


def leak_of_an_ingress() -> AbstractContextManager[Any]:
    """A replica keeps the sequences of an ingress that has died."""
    end = _Connection._end

    def without(self: Any) -> None:
        self._sequences.clear()
        end(self)

    return patch.object(_Connection, "_end", without)


def forget_a_deadline() -> AbstractContextManager[Any]:
    """Nothing ends an input at its deadline."""
    submit = IngressCore.submit

    def without(self: Any, inputs: Any, now_s: float) -> None:
        for each in inputs:
            each.deadline_s = math.inf
        submit(self, inputs, now_s)

    return patch.object(IngressCore, "submit", without)


def loosen_a_threshold() -> AbstractContextManager[Any]:
    """New thresholds are a little lower than what was asked for."""
    decide = ControlLoop._decide_by
    return patch.object(
        ControlLoop,
        "_decide_by",
        lambda self, thresholds: decide(self, {ramp: each - 0.05 for ramp, each in thresholds.items()}),
    )


def drop_a_retry() -> AbstractContextManager[Any]:
    """Of the inputs of a call that failed the first one does not start again."""
    end = Pause.end
    return patch.object(Pause, "end", lambda self: end(self)[1:])


def try_for_ever() -> AbstractContextManager[Any]:
    """Attempts are not counted."""
    init = IngressCore.__init__

    def without(self: Any, name: str, placed: Any, rules: Any, *others: Any) -> None:
        init(self, name, placed, replace(rules, max_attempts=10 * rules.max_attempts), *others)

    return patch.object(IngressCore, "__init__", without)


def miss_a_break() -> AbstractContextManager[Any]:
    """A connection that breaks does not end its calls."""

    def quietly(self: Any) -> None:
        self._frames = None
        self._ended.set()
        self._on_change()

    return patch.object(ReplicaLink, "_end", quietly)


def wait_for_a_slot() -> AbstractContextManager[Any]:
    """Calls wait for a replica of a slot that the plan no longer uses."""
    return patch.object(ReplicaLinks, "is_planned", lambda self, slot: True)


def lose_in_a_change() -> AbstractContextManager[Any]:
    """Inputs that wait at a chain which the next plan does not have are forgotten."""
    end = Chain.end

    def without(self: Any, successor: Any) -> None:
        self.queue.clear()
        end(self, successor)

    return patch.object(Chain, "end", without)


def keep_a_place() -> AbstractContextManager[Any]:
    """A call that fails makes no room for another one."""

    def without(self: Any, call: Any, inputs: Any, now_s: float) -> Any:
        mine = [each for each in inputs if each.holder is call]
        call.release(mine)
        return mine

    return patch.object(Calls, "take_away", without)


FAULTS: tuple[Fault, ...] = (
    *(settle_twice, lose_on_hang_up, apply_an_old_plan, obey_an_old_call, take_an_old_reply),
    *(leak_a_page, leak_of_an_ingress, forget_a_deadline, loosen_a_threshold, drop_a_retry),
    *(try_for_ever, miss_a_break, wait_for_a_slot, lose_in_a_change, keep_a_place),
)
