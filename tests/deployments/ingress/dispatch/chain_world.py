"""A service of a chain on a manual clock: the live core, entrance, engines and devices; what is computed is arithmetic.

An input's hidden state is a number that every block of a network changes in its own way, from the token ids that the
network's own codec gives. So an answer tells by which network and which blocks it was made, and of which encoding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

from deployments.ingress.core.calls import Action, Answered, Dropped, HungUp, Retried, SendCall, weigh
from deployments.ingress.core.ingress_core import Driver, IngressCore
from deployments.ingress.core.inputs import Inputs, PendingInput, Rules
from deployments.ingress.dispatcher import CrossingEncoder, NetworkEntry
from deployments.replica.host import OpenCall, chunks_by_call
from deployments.wire.messages import Assignment, Chunk
from earlyexit.clock import ManualClock
from earlyexit.codecs.chain import ChainCodec
from earlyexit.engine.device import Device, Release
from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.engine.queue import Member
from earlyexit.engine.times import ObservedTimes
from earlyexit.network.boundary import Answer, WirePiece
from earlyexit.network.chain import Chain
from optimizer.placement import PlacedPlan, slot_name
from optimizer.plan import Plan
from profiles.stream import StreamShape
from tests.deployments.ingress.dispatch.chain_arithmetic import Arithmetic, Piece


class Replica:
    """One device of a slot."""

    def __init__(self, world: World, chain: Chain) -> None:
        self.alive = True
        self.calls: dict[OpenCall, tuple[SendCall, Mapping[str, PendingInput]]] = {}
        self._world = world
        self._runner = Arithmetic(chain)
        engine: BatchEngine[Piece] = BatchEngine((), ObservedTimes(), starts=chain.starts)
        self._device = Device(engine, self._runner, world.clock, self._deliver)
        self._epoch = -1
        self._busy = False

    def submit(self, send: SendCall, piece: WirePiece, flights: Mapping[str, PendingInput]) -> None:
        """As `StageHost.submit`."""
        call, assignment = send.call, send.call.stage.assignment
        self.follow(assignment)
        opened = OpenCall(unsettled=len(piece.sample_ids), take=lambda _: None)
        self.calls[opened] = send, flights
        members = [
            Member(
                sample_id=single.sample_ids[0],
                payload=single,
                tokens=int(single.lengths_B[0]),
                reserve_s=call.reserve_s,
                origin=opened,
                probe=call.probe,
            )
            for single in self._runner.from_wire(piece).singles()
        ]
        now_s = self._world.clock.now_s()
        self._device.engine.submit(piece.next_block, members, now_s, assignment.known)
        self._start()

    def follow(self, assignment: Assignment) -> None:
        if assignment.epoch > self._epoch:
            self._epoch = assignment.epoch
            self._device.engine.follow(assignment.stage.splits, assignment.dispatch, assignment.order)

    def die(self) -> None:
        """Its calls fail; of what was computed nothing comes any more."""
        self.alive = False
        for send, _ in self.calls.values():
            self._world.fail(send)
        self.calls.clear()

    def _start(self) -> None:
        if self._busy or not self.alive:
            return
        batch = self._device.start_next()
        if isinstance(batch, Batch):
            self._busy = True
            self._world.later(self._world.rng.random(), lambda: self._end(batch))

    def _end(self, batch: Batch[Piece]) -> None:
        if self.alive:
            self._device.requeue(self._device.run(batch))
            self._busy = False
            self._start()

    def _deliver(self, releases: list[Release[Piece]]) -> None:
        for opened, chunk in chunks_by_call(releases):
            send, flights = self.calls[opened]
            opened.unsettled -= chunk.num_inputs
            if not opened.unsettled:
                del self.calls[opened]
            self._world.later(self._world.rng.random() / 10, partial(self._world.take, send, flights, chunk))


class World(Driver):
    """Slots, their replicas, and an ingress whose every action is carried out."""

    def __init__(self, chain: Chain, codec: ChainCodec, plan: Plan, seed: int, *, num_slots: int = 3) -> None:
        self.rng = random.Random(seed)
        names = [slot_name("cpu", index) for index in range(num_slots)]
        shape = StreamShape(score="confidence", num_blocks=chain.num_blocks, ramps=chain.ramps)
        rules = Rules(calls_per_replica=2, max_attempts=1000, shape=shape, probe_share=0.2)
        placed = PlacedPlan(plan=plan, slots=tuple(names[: len(plan.stages)]))
        self.time = ManualClock()
        super().__init__(IngressCore("i", placed, names, rules, self.rng), self.time)
        self.chain, self.codec = chain, codec
        self.outcomes: dict[str, Answer | str] = {}
        self.crossed: list[tuple[str, int, int]] = []
        """The inputs that were sent to a network, with its first block and the epoch of the plan."""
        self.replicas = {name: [Replica(self, chain) for _ in range(2)] for name in names}
        self._encoder = CrossingEncoder("i", codec)
        self._events: list[tuple[float, int, Any]] = []
        self._serial = 0

    @property
    def is_idle(self) -> bool:
        return not self._events and math.isinf(self.core.wake_s)

    def submit(self, texts: Sequence[str], names: Sequence[str]) -> list[PendingInput]:
        now_s = self.clock.now_s()
        inputs = []
        for name, each in zip(names, self.codec.encode_for(texts, self.core.route.used), strict=True):
            self._serial += 1
            inputs.append(PendingInput(self._serial, now_s, math.inf, each.length, each, key=name))
        self.core.submit(inputs, now_s)
        self.do(())
        return inputs

    def follow_plan(self, plan: Plan) -> None:
        slots = self.rng.sample(sorted(self.replicas), len(plan.stages))
        self.core.follow(PlacedPlan(plan=plan, slots=tuple(slots)))
        for slot, stage in zip(slots, plan.stages, strict=True):
            for replica in self.replicas[slot]:
                if self.rng.random() < 0.5:  # the others learn it with their next call
                    replica.follow(Assignment.of(plan, stage))
        self.do(())

    def give_up(self, inputs: Inputs) -> None:
        self.do(self.core.give_up(inputs, "abandoned", self.clock.now_s()))

    def kill(self) -> None:
        """A replica, in whose place another one comes at once."""
        slot = self.rng.choice(sorted(self.replicas))
        replicas = self.replicas[slot]
        dead = replicas.pop(self.rng.randrange(len(replicas)))
        replicas.append(Replica(self, self.chain))
        dead.die()

    def later(self, seconds: float, what: Any) -> None:
        self._serial += 1
        heappush(self._events, (self.clock.now_s() + seconds, self._serial, what))

    def run(self, seconds: float = math.inf) -> None:
        """Let time pass, or until nothing happens any more."""
        until_s = self.clock.now_s() + seconds
        while True:
            at_s = self._events[0][0] if self._events else math.inf
            wake_s = self.core.wake_s
            next_s = min(at_s, wake_s)
            if next_s > until_s or math.isinf(next_s):
                break
            self.time.advance(max(0.0, next_s - self.clock.now_s()))
            if wake_s < at_s:
                self.wake()
            else:
                heappop(self._events)[2]()
        if not math.isinf(seconds):
            self.time.advance(until_s - self.clock.now_s())

    def fail(self, send: SendCall) -> None:
        self.later(0.0, lambda: self.do(self.core.fail(send.call, send.call.inside(), self.clock.now_s())))

    def take(self, send: SendCall, inputs: Mapping[str, PendingInput], chunk: Chunk) -> None:
        """As `Dispatcher._take`."""
        core, call, now_s = self.core, send.call, self.clock.now_s()
        if chunk.seen:
            core.see(call, [(inputs[seen.sample_id], seen) for seen in chunk.seen])
        actions: list[Action] = []
        for answer, _ in chunk.answers:
            actions += core.answer(call, [inputs[answer.sample_id]], answer.exit, now_s, [answer])
        for answer, _ in chunk.early:
            actions += core.answer_early(call, [inputs[answer.sample_id]], answer.exit, now_s, [answer])
        assert not chunk.lost, chunk.lost
        if chunk.going_on is not None:
            piece = chunk.going_on.piece
            mine = [inputs[sample_id] for sample_id in piece.sample_ids]
            actions += core.go_on(call, mine, piece.next_block, piece, now_s)
        self.do(actions)

    def set_timer(self, at_s: float) -> None:
        """`run` looks when the core wants to be called."""

    def send(self, send: SendCall) -> None:
        call, inputs, piece = send.call, list(send.call.inputs), send.payload
        if send.enters is not None:
            entry = NetworkEntry(inputs=inputs, block=send.block, network=send.enters, going_on=send.payload)
            entered = self._encoder.enter(entry)
            assert not entered.refused
            piece, inputs = entered.piece, list(entered.inputs)
            for each in inputs:
                self.crossed.append((each.key, send.block, call.stage.epoch))
        by_id = dict(zip(piece.sample_ids, inputs, strict=True))
        replica = self.rng.choice(self.replicas[call.stage.slot])
        weight, batch = weigh(call.stage, piece.next_block, inputs)
        assert weight > 0 < batch

        def arrive() -> None:
            if replica.alive:
                replica.submit(send, piece, by_id)
            else:
                self.do(self.core.fail(call, call.inside(), self.clock.now_s()))

        self.later(self.rng.random() / 10, arrive)

    def answered(self, answered: Answered) -> None:
        for each, answer in zip(answered.inputs, answered.answers, strict=True):
            self._settle(each, answer)

    def dropped(self, dropped: Dropped) -> None:
        for each in dropped.inputs:
            self._settle(each, dropped.reason)

    def hung_up(self, hung_up: HungUp) -> None:
        raise AssertionError("without deadlines nothing hangs")

    def retried(self, retried: Retried) -> None:
        """Nothing counts attempts here."""

    def _settle(self, pending: PendingInput, outcome: Answer | str) -> None:
        assert pending.key not in self.outcomes, "an input has one outcome"
        self.outcomes[pending.key] = outcome
