"""Inputs of sequences: they go where their sequence's keys and values are, and are never simply sent again. Pure.

A sequence may be a *probe*, with all its tokens: they run to the model's end, every ramp looks, and its caller gets
what the full model says. The ramp at which a token would have left is noted, but answers no caller: the next token
would run beside the one that still runs.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, Generic

from deployments.ingress.core.chains import Chain, Chains
from deployments.ingress.core.inputs import (
    DUE,
    Actions,
    Agenda,
    Call,
    Flight,
    Flights,
    HungUp,
    I,
    Pause,
    Retried,
    Rules,
    SendCall,
    Watch,
)
from deployments.ingress.core.outcomes import Outcomes
from deployments.ingress.core.probes import ExitObservations
from deployments.ingress.core.routes import ChainRoute, Crossing, KVPlacement, StageRoute, W, lost
from earlyexit.engine.filling import MOST_BATCHES
from earlyexit.errors import StageUnavailableError


class Calls(Generic[I, W]):
    """The calls of one ingress. A call goes by the routes of the moment in which it begins."""

    def __init__(self, chains: Chains[Flight[I], W], make: type[Call[I, W]], rules: Rules) -> None:
        """`make`: the class of calls."""
        self._chains = chains
        self._make = make
        self._slack, self._slo_s = rules.slack, rules.slo_s
        self._open: Counter[int] = Counter()
        """By the epoch by which they were sent."""

    @property
    def oldest_epoch(self) -> int:
        """Of the plans by which they were sent; the present one where there are none."""
        return min(self._open, default=self._chains.route.epoch)

    def come(self, chain: Chain[Flight[I], W], number: int, now_s: float, deadline_s: float) -> None:
        """So many inputs of a request have begun to wait at a chain's entrance."""
        departures, route, first = chain.departures, chain.route, chain.route.first
        departures.come(number, now_s)
        alone = chain.line.length == number
        if not alone or deadline_s == math.inf or not (share := departures.share(now_s)):
            return
        took_s = first.expected_s
        left_s = deadline_s - now_s - took_s - route.reserve_s(first) - self._kept_s(deadline_s - now_s)
        # An input that waits on a guess of no time would wait for ever, so such a guess leaves no time to wait.
        wait_s = share * max(0.0, min(left_s, MOST_BATCHES * took_s))
        if wait_s > departures.gap_s:
            departures.hold_until(now_s + wait_s)

    def _kept_s(self, has_s: float) -> float:
        """The seconds that a stage which waits for a full batch leaves for the unexpected: the way back, for example.

        A share of the SLO or, without an SLO, of the time `has_s` that an input has.
        """
        if self._slo_s is not None:
            return self._slack * self._slo_s
        return 0.0 if has_s == math.inf else self._slack * has_s

    def begin(
        self,
        route: ChainRoute[W],
        leg: StageRoute[W],
        flights: Sequence[Flight[I]],
        mine: Sequence[Flight[I]],
        now_s: float,
        epoch: int,
        watch: Watch | None,
        is_first: bool,
    ) -> Call[I, W]:
        """A call; `mine`: of the flights, those that it really has, where others only travel along."""
        has_s = (
            0.0 if self._slo_s is not None else max([each.deadline_s - each.arrived_s for each in mine], default=0.0)
        )
        reserve_s = route.reserve_s(leg) + self._kept_s(has_s)
        if reserve_s == math.inf:
            reserve_s = max(0.0, *[flight.deadline_s - now_s for flight in mine])
        call = self._make(leg, flights, now_s, epoch, reserve_s, watch, is_first)
        for flight in mine:
            flight.holder = call
        call.num_inside = len(mine)
        self._open[leg.epoch] += 1
        if is_first:
            self._chains.count(leg.slot, +1)
        return call

    def part(self, call: Call[I, W], number: int, now_s: float, took_time: bool = True) -> None:
        """A part of a call's reply came back, with so many inputs in it."""
        if took_time:
            call.leg.learn(now_s - call.started_s)
        call.num_inside -= number
        if not call.num_inside:
            epoch = call.leg.epoch
            self._open[epoch] -= 1
            if not self._open[epoch]:
                del self._open[epoch]
        if not call.heard:  # the first part tells that its batch has run: another may be sent
            call.heard = True
            if call.is_first:
                self._chains.count(call.leg.slot, -1)

    def take_away(self, call: Call[I, W], flights: Sequence[Flight[I]], now_s: float) -> list[Flight[I]]:
        """What a call will not bring to an end; gives those of the inputs that it had."""
        mine = list(compress(flights, call.release(flights)))
        if mine:
            self.part(call, len(mine), now_s, took_time=False)
        return mine

    def cross(
        self,
        call: Call[I, W],
        mine: Sequence[Flight[I]],
        awaited: Sequence[Flight[I]],
        crossing: Crossing,
        payload: Any,
        now_s: float,
    ) -> SendCall:
        """Have inputs enter the next network; of `mine`, which have left a call, those that are awaited."""
        for flight in mine:
            flight.holder = None
        route = mine[0].chain.present.route
        entering = self.begin(route, route.at(crossing.block), awaited, awaited, now_s, call.epoch, call.watch, False)
        return SendCall(entering, crossing.block, payload, crossing.network)

    def enter_last(self, flights: Sequence[Flight[I]], now_s: float, epoch: int, watch: Watch) -> SendCall:
        """Have inputs enter the last network of a chain, with nothing from those before."""
        route = flights[0].chain.present.route
        networks = route.plan.networks
        first = networks[-2]
        call = self.begin(route, route.at(first), flights, flights, now_s, epoch, watch, False)
        return SendCall(call, first, None, len(networks) - 1)


LOST = "sequence_lost"
"""The kind of a SequenceLostError."""


class Steps(Generic[I, W]):
    """Of one ingress: those that are sent next, and what becomes of those that went.

    A step waits for no batch here: its replica has the sequence's other steps behind it, never beside it, and fuses
    those of all ingresses. So a call has every step that came of one part of a reply.
    """

    def __init__(
        self,
        chains: Chains[Flight[I], W],
        calls: Calls[I, W],
        outcomes: Outcomes[I, W],
        book: ExitObservations | None,
        rules: Rules,
        rng: random.Random,
    ) -> None:
        self._chains = chains
        self._calls = calls
        self._outcomes = outcomes
        self._book = book
        self._probe_share = rules.probe_share
        self._rng = rng
        self.due: list[Flight[I]] = []
        """Those that are sent next."""

    def check(self, home: KVPlacement) -> None:
        """Raises SequenceLostError if the plan has other slots by now and the sequence has begun at the old ones."""
        if home.layout is not None and self._chains.of_layout(home.layout) is None:
            raise lost("the plan has its blocks elsewhere now")

    def join(self, flights: Flights[I]) -> None:
        """They are sent next."""
        for flight in flights:
            flight.holder = DUE
        self.due += flights

    def settle_in(self, route: ChainRoute[W], flights: Flights[I], now_s: float) -> Actions:
        """These, their homes' first, are sent into a chain of the present plan, probes in a call of their own.

        Whether a sequence is a probe is drawn here, once: one that begins anew is what it was.
        """
        looks = self._looks
        for flight in flights:
            home = flight.home
            assert home is not None, "a service has sequences, or inputs of none"
            home.layout = route.layout
            if home.is_probe is None:
                home.is_probe = looks and self._probe_share > 0 and self._rng.random() < self._probe_share
        parts = [[each for each in flights if self._is_probe(each) is wanted] for wanted in (False, True)]
        return [self._enter(route, part, now_s, is_first=True) for part in parts if part]

    def send(self, now_s: float) -> Actions:
        """All that are due, in a call for every replica that has some of their sequences."""
        due, self.due = self.due, []
        by_replica, homeless = self._by_replica(due, None, DUE)
        actions = self._lose(homeless, now_s)
        for route, rows in by_replica:
            actions.append(self._enter(route, [due[row] for row in rows], now_s, is_first=False))
        return actions

    def go_on(self, call: Call[I, W], flights: Flights[I], block: int, payload: Any, now_s: float) -> Actions:
        """Of a call's inputs those that are waited for go on to a block, each to its sequence's replica there."""
        by_replica, homeless = self._by_replica(flights, block, call)
        actions = self._lose(homeless, now_s)
        for route, rows in by_replica:
            going = [flights[row] for row in rows]
            onward = self._calls.begin(route, route.at(block), going, going, now_s, call.epoch, call.watch, False)
            part = None if len(rows) == len(flights) else tuple(rows)
            actions.append(SendCall(onward, block, payload, None, part))
        return actions

    def fail(self, flights: Flights[I], slot: str, now_s: float) -> Actions:
        """Nothing more comes of inputs that no call has any more: their sequences are lost."""
        waited_for = [flight for flight in flights if not flight.settled]
        actions = self._outcomes.fail(waited_for, lost(f"a replica of {slot} failed under it"), now_s)
        if waited_for:
            actions.append(Retried(slot, len(waited_for)))
        return actions

    def clear(self) -> list[Flight[I]]:
        """Those that were due, which are not sent."""
        due, self.due = self.due, []
        for flight in due:
            flight.holder = None
        return due

    def _by_replica(
        self, flights: Flights[I], block: int | None, holder: object
    ) -> tuple[Iterable[tuple[ChainRoute[W], Sequence[int]]], list[Flight[I]]]:
        """Positions of the flights that a holder has and that are awaited, by chain and replica of a block.

        None is the block at which inputs enter. The second result are those whose blocks are elsewhere by now. No
        holder has any of them then. Probes are apart from others.
        """
        by_replica: dict[tuple[bool, str, str | frozenset[str]], tuple[ChainRoute[W], list[int]]] = {}
        homeless = []
        for row, flight in enumerate(flights):
            if flight.holder is not holder:
                continue
            flight.holder, home = None, flight.home
            if flight.settled or home is None:
                continue
            chain = self._chains.of_layout(home.layout)
            if chain is None:
                homeless.append(flight)
                continue
            slot = (chain.route.first if block is None else chain.route.at(block)).slot
            where = self._is_probe(flight), slot, home.replicas.get(slot, home.avoids)
            by_replica.setdefault(where, (chain.route, []))[1].append(row)
        return by_replica.values(), homeless

    @property
    def _looks(self) -> bool:
        """Whether replicas see anything of probes under the present plan."""
        return self._book is not None and self._book.can_look(self._chains.route.placed.plan.policy)

    def _is_probe(self, flight: Flight[I]) -> bool:
        return flight.home is not None and bool(flight.home.is_probe) and self._looks

    def _enter(self, route: ChainRoute[W], flights: Flights[I], now_s: float, *, is_first: bool) -> SendCall:
        """Probes, or others, in one call to a chain's first block; of a prompt's parts only the last makes a row.

        Where too many are open already probes are run as such all the same: their callers get the full model's answers.
        """
        watch: Watch | None = "probe" if self._is_probe(flights[0]) else None
        if watch is not None and self._book is not None:
            says = [each for each in flights if each.home is not None and each.home.says]
            self._book.begin(says, route.plan, "probe", now_s)
        leg = route.first
        call = self._calls.begin(route, leg, flights, flights, now_s, leg.epoch, watch, is_first)
        return SendCall(call, *route.entrance(probe=call.probe))

    def _lose(self, flights: Flights[I], now_s: float) -> Actions:
        if self._book is not None:
            self._book.forget(flights)
        return self._outcomes.fail(flights, lost("the plan has its blocks elsewhere now"), now_s)


RETRY_PAUSE_S = 0.05
"""A replica's death is noticed by all at once; a short pause lets the router learn of it before the next try."""
HANG_S = 1.0
"""How long a call outlives the last deadline of its inputs."""


class Attempts(Generic[I, W]):
    """Of the inputs of one ingress."""

    def __init__(
        self,
        chains: Chains[Flight[I], W],
        calls: Calls[I, W],
        outcomes: Outcomes[I, W],
        probes: ExitObservations | None,
        steps: Steps[I, W],
        agenda: Agenda[I],
        *,
        most: int,
    ) -> None:
        """`most`: times an input is sent from the start."""
        self._chains = chains
        self._calls = calls
        self._outcomes = outcomes
        self._probes = probes
        self._steps = steps
        self._agenda = agenda
        self._most = most

    def without(self, call: Call[I, W], flights: Flights[I], now_s: float) -> list[Flight[I]]:
        """Take away from a call what it will not bring to an end; what of the inputs it had."""
        mine = self._calls.take_away(call, flights, now_s)
        if call.watch is not None and self._probes is not None:
            self._probes.forget(mine)
        return mine

    def fail(self, call: Call[I, W], flights: Flights[I], now_s: float) -> Actions:
        """Nothing more comes of these inputs of a call: after a pause they start again, if they may.

        Those of sequences cannot: what they would go on from is gone. Their owners get SequenceLostError.
        """
        mine = self.without(call, flights, now_s)
        if mine and mine[0].home is not None:
            return self._steps.fail(mine, call.leg.slot, now_s)
        actions: Actions = []
        exhausted = [flight for flight in mine if flight.attempt + 1 >= self._most]
        if exhausted:
            message = f"{call.leg.slot} failed {self._most} times under this input"
            actions += self._outcomes.fail(exhausted, StageUnavailableError(message, retry_after_s=1.0), now_s)
        again = [flight for flight in mine if not flight.settled]
        if again:
            self._agenda.pauses.add(now_s + RETRY_PAUSE_S, Pause(call.leg.slot, again))
        return actions

    def go_whole(self, call: Call[I, W], now_s: float) -> Actions:
        """Sends the whole texts of this call's probes, which are about to lose words, to the last network.

        That network is the reference. No request waits for the answers to these copies. If a copy is lost, the
        observations of its probe are lost too.
        """
        book = self._probes
        alone = [] if book is None else [flight for flight in call.flights if book.goes_alone(flight)]
        if book is None or not alone:
            return []
        wholes = [book.go_beside(flight, flight.whole()) for flight in alone]
        send = self._calls.enter_last(wholes, now_s, call.epoch, "whole")
        for whole in wholes:
            if whole.deadline_s < math.inf:
                self._agenda.hanging.add(whole.deadline_s + HANG_S, whole)
        return [send]

    def hang_up(self, now_s: float) -> Actions:
        """Calls that have an input past its deadline, unless they have others that are not past theirs for so long."""
        actions: Actions = []
        for flight in self._agenda.hanging.pop(now_s):
            call = flight.holder
            if not isinstance(call, Call):
                continue
            inside = call.inside()
            until_s = max(each.deadline_s for each in inside) + HANG_S
            if until_s <= now_s:
                actions += [HungUp(call), *self.fail(call, inside, now_s)]
            elif until_s < math.inf:  # the others may leave before, and this one not
                self._agenda.hanging.add(until_s, flight)
        return actions

    def begin(self, now_s: float) -> Actions:
        """Those whose pause is over by now wait at the entrance of their chain again."""
        actions: Actions = []
        for pause in self._agenda.pauses.pop(now_s):
            again = pause.end()
            for chain, mine in self._chains.apart(again):
                chain.line.rejoin(mine)
            actions.append(Retried(pause.slot, len(again)))
        return actions
