"""Inputs of sequences: they go where their sequence's keys and values are, and are never simply sent again. Pure.

A sequence may be a *probe*, with all its tokens: they run to the model's end, every ramp looks, and its caller gets
what the full model says. The ramp at which a token would have left is noted, but answers no caller: the next token
would run beside the one that still runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.ingress.core.calls import Actions, Call, Calls, Outcomes, SendCall
from deployments.ingress.core.inputs import DUE, Chains, Inputs, PendingInput
from deployments.ingress.core.probes import ExitObservations, Watch
from deployments.ingress.core.routes import ChainRoute, KVPlacement, lost


@dataclass(slots=True, eq=False)
class Steps:
    """The inputs of sequences that are sent next, and what becomes of those that were sent.

    A step waits for no batch here: its replica has the sequence's other steps behind it, never beside it, and fuses
    those of all ingresses. So a call has every step that came of one part of a reply.
    """

    chains: Chains
    calls: Calls
    outcomes: Outcomes
    observations: ExitObservations | None
    probe_share: float
    rng: random.Random
    due: list[PendingInput] = field(default_factory=list, init=False)
    """The inputs that are sent next."""

    def check(self, placement: KVPlacement) -> None:
        """Raises SequenceLostError if the plan has other stages by now and the sequence has begun at the old ones."""
        if placement.layout is not None and self.chains.of_layout(placement.layout) is None:
            raise lost("the plan has its blocks elsewhere now")

    def join(self, inputs: Inputs) -> None:
        """Have inputs sent next."""
        for each in inputs:
            each.holder = DUE
        self.due += inputs

    def begin(self, route: ChainRoute, inputs: Inputs, now_s: float) -> Actions:
        """Send the first inputs of sequences into a chain of the present plan, probes in a call of their own.

        Whether a sequence is a probe is drawn here, once: a sequence that begins anew is what it was.
        """
        looks = self._looks
        for each in inputs:
            placement = each.placement
            assert placement is not None, "a service has sequences, or inputs of none"
            placement.layout = route.layout
            if placement.is_probe is None:
                placement.is_probe = looks and self.probe_share > 0 and self.rng.random() < self.probe_share
        parts = [[each for each in inputs if self._is_probe(each) is wanted] for wanted in (False, True)]
        return [self._enter(route, part, now_s, is_first=True) for part in parts if part]

    def send(self, now_s: float) -> Actions:
        """Send all that are due, in a call for every replica that has some of their sequences."""
        due, self.due = self.due, []
        by_replica, homeless = self._by_replica(due, None, DUE)
        actions = self._lose(homeless, now_s)
        for route, rows in by_replica:
            actions.append(self._enter(route, [due[row] for row in rows], now_s, is_first=False))
        return actions

    def go_on(self, call: Call, inputs: Inputs, block: int, payload: Any, now_s: float) -> Actions:
        """Send those of a call's inputs that are waited for on to a block, each to its sequence's replica there."""
        by_replica, homeless = self._by_replica(inputs, block, call)
        actions = self._lose(homeless, now_s)
        for route, rows in by_replica:
            going = [inputs[row] for row in rows]
            onward = self.calls.begin(route, route.at(block), going, now_s, call.epoch, call.watch)
            part = None if len(rows) == len(inputs) else tuple(rows)
            actions.append(SendCall(onward, block, payload, None, part))
        return actions

    def fail(self, inputs: Inputs, slot: str, now_s: float) -> Actions:
        """Lose the sequences of inputs that will not come back from a slot."""
        waited_for = [each for each in inputs if not each.settled]
        if waited_for:
            self.outcomes.counts.retries[slot] += len(waited_for)
        return self.outcomes.drop(waited_for, lost(f"a replica of {slot} failed under it"), now_s)

    def clear(self) -> list[PendingInput]:
        """Removes and returns the inputs that were due."""
        due, self.due = self.due, []
        for each in due:
            each.holder = None
        return due

    def _by_replica(
        self, inputs: Inputs, block: int | None, holder: object
    ) -> tuple[Iterable[tuple[ChainRoute, Sequence[int]]], list[PendingInput]]:
        """Rows of the inputs that a holder has and that are awaited, by chain and replica of a block.

        None is the block at which inputs enter. The second result are the inputs whose blocks are elsewhere by now.
        The holder has none of them afterwards. Probes are apart from others.
        """
        by_replica: dict[tuple[bool, str, str | frozenset[str]], tuple[ChainRoute, list[int]]] = {}
        homeless = []
        for row, each in enumerate(inputs):
            if each.holder is not holder:
                continue
            each.holder, placement = None, each.placement
            if each.settled or placement is None:
                continue
            chain = self.chains.of_layout(placement.layout)
            if chain is None:
                homeless.append(each)
                continue
            slot = (chain.route.first if block is None else chain.route.at(block)).slot
            where = self._is_probe(each), slot, placement.replicas.get(slot, placement.avoids)
            by_replica.setdefault(where, (chain.route, []))[1].append(row)
        return by_replica.values(), homeless

    @property
    def _looks(self) -> bool:
        """Whether replicas observe probes under the present plan."""
        return self.observations is not None and self.observations.can_look(self.chains.route.placed.plan.policy)

    def _is_probe(self, pending: PendingInput) -> bool:
        return pending.placement is not None and bool(pending.placement.is_probe) and self._looks

    def _enter(self, route: ChainRoute, inputs: Inputs, now_s: float, *, is_first: bool) -> SendCall:
        """Send probes, or others, in one call to a chain's first block; of a prompt's parts only the last makes a row.

        Where too many are open already probes run as such all the same: their callers get the full model's answers.
        """
        watch: Watch | None = "probe" if self._is_probe(inputs[0]) else None
        if watch is not None and self.observations is not None:
            says = [each for each in inputs if each.placement is not None and each.placement.says]
            self.observations.begin(says, route.plan, "probe", now_s)
        stage = route.first
        call = self.calls.begin(route, stage, inputs, now_s, stage.epoch, watch, is_first=is_first)
        return SendCall(call, *route.entrance(probe=call.probe))

    def _lose(self, inputs: Inputs, now_s: float) -> Actions:
        if self.observations is not None:
            self.observations.forget(inputs)
        return self.outcomes.drop(inputs, lost("the plan has its blocks elsewhere now"), now_s)
