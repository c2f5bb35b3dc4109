"""Faults that the simulation must find, each put into the live code by a patch of one function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from deployments.controller.act import ControlLoop
from deployments.ingress.core import calls
from deployments.ingress.core.calls import PAUSE, AbortCall, Call, Timers
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Chain, Chains
from deployments.ingress.dispatcher import ReplicaLink, ReplicaLinks
from deployments.replica.host import NO_EPOCH, StageHost, _Connection
from earlyexit.engine.device import Device
from optimizer.live.tuning.base import NewThresholds

Fault = Callable[[], AbstractContextManager[Any]]


def settle_twice() -> AbstractContextManager[Any]:
    """An input gets a second outcome."""
    return patch.object(calls, "_settled_now", lambda inputs: [True] * len(inputs))


def lose_on_call_timeout() -> AbstractContextManager[Any]:
    """A call that times out is cancelled, but its inputs are not retried."""
    return patch.object(
        IngressCore, "_abort_call", lambda self, pending, now_s: [AbortCall(pending.holder)] if pending.holder else []
    )


def apply_an_old_plan() -> AbstractContextManager[Any]:
    """An ingress follows a late plan although it already follows a newer one."""
    follow = IngressCore.follow

    def always(self: Any, placed: Any) -> None:
        if placed.epoch < self.placed.epoch:
            self.chains.follow(placed)
        follow(self, placed)

    return patch.object(IngressCore, "follow", always)


def obey_an_old_call() -> AbstractContextManager[Any]:
    """A replica follows the plan of the last call even if it is an older plan."""
    follow = StageHost.follow

    def always(self: Any, assignment: Any) -> None:
        if assignment.epoch < self.epoch:
            self.epoch = NO_EPOCH
        follow(self, assignment)

    return patch.object(StageHost, "follow", always)


def take_an_old_reply() -> AbstractContextManager[Any]:
    """A reply settles inputs that its call no longer holds."""
    return patch.object(Call, "release", lambda self, inputs: [True] * len(inputs))


def leak_a_page() -> AbstractContextManager[Any]:
    """A sequence that ends during a batch keeps its pages."""

    def end(device: Device[Any], sequences: Collection[int]) -> None:
        running = device.engine.running_sequences
        before(device, [each for each in sequences if each not in running])

    before = Device.end
    return patch.object(Device, "end", end)


def leak_of_an_ingress() -> AbstractContextManager[Any]:
    """A replica keeps the sequences of an ingress that has died."""
    end = _Connection._on_disconnect

    def without(self: Any) -> None:
        self._sequences.clear()
        end(self)

    return patch.object(_Connection, "_on_disconnect", without)


def forget_a_deadline() -> AbstractContextManager[Any]:
    """Inputs have no deadlines."""
    submit = IngressCore.submit

    def without(self: Any, inputs: Any, now_s: float) -> None:
        for each in inputs:
            each.deadline_s = math.inf
        submit(self, inputs, now_s)

    return patch.object(IngressCore, "submit", without)


def loosen_a_threshold() -> AbstractContextManager[Any]:
    """New thresholds are a little lower than requested."""
    apply = ControlLoop._apply_thresholds

    async def loosened(self: Any, said: NewThresholds) -> None:
        await apply(self, replace(said, thresholds={ramp: each - 0.05 for ramp, each in said.thresholds.items()}))

    return patch.object(ControlLoop, "_apply_thresholds", loosened)


def drop_a_retry() -> AbstractContextManager[Any]:
    """The first input of a failed call is not retried."""
    add = Timers.add

    def without(self: Timers, at_s: float, kind: int, inputs: Any, slot: str = "") -> None:
        add(self, at_s, kind, inputs[1:] if kind == PAUSE else inputs, slot)

    return patch.object(Timers, "add", without)


def try_for_ever() -> AbstractContextManager[Any]:
    """Attempts are not counted."""
    init = IngressCore.__init__

    def without(self: Any, name: str, placed: Any, rules: Any, *others: Any) -> None:
        init(self, name, placed, replace(rules, max_attempts=10 * rules.max_attempts), *others)

    return patch.object(IngressCore, "__init__", without)


def miss_a_break() -> AbstractContextManager[Any]:
    """A broken connection does not end its calls."""

    def quietly(self: Any) -> None:
        self._frames = None
        self._disconnected.set()
        self._on_change()

    return patch.object(ReplicaLink, "_on_disconnect", quietly)


def wait_for_a_slot() -> AbstractContextManager[Any]:
    """Calls wait for a replica of a slot that the plan no longer uses."""
    send = ReplicaLinks.send

    def always(self: Any, call: Any, message: Any) -> None:
        present, self._assignments = self._assignments, {**self._assignments, call.stage.slot: call.stage.assignment}
        send(self, call, message)
        self._assignments = present

    return patch.object(ReplicaLinks, "send", always)


def lose_in_a_change() -> AbstractContextManager[Any]:
    """Queued inputs of a chain that the next plan does not have are forgotten."""
    merge_into = Chain.merge_into

    def without(self: Any, successor: Any) -> None:
        self.queue.clear()
        merge_into(self, successor)

    return patch.object(Chain, "merge_into", without)


def wait_in_a_chain() -> AbstractContextManager[Any]:
    """Chains get inputs although they have no replicas."""
    set_available = Chains.set_available
    return patch.object(Chains, "set_available", lambda self, up: set_available(self, {}))


def keep_a_place() -> AbstractContextManager[Any]:
    """A failed call makes no room for another one."""

    def without(self: Any, call: Any, inputs: Any, now_s: float) -> Any:
        held = [each for each in inputs if each.holder is call]
        call.release(held)
        return held

    return patch.object(IngressCore, "_remove", without)


FAULTS: tuple[Fault, ...] = (
    *(settle_twice, lose_on_call_timeout, apply_an_old_plan, obey_an_old_call, take_an_old_reply),
    *(leak_a_page, leak_of_an_ingress, forget_a_deadline, loosen_a_threshold, drop_a_retry),
    *(try_for_ever, miss_a_break, wait_for_a_slot, lose_in_a_change, wait_in_a_chain, keep_a_place),
)
