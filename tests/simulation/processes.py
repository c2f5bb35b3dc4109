"""The processes of the simulated service on virtual time: live replicas, ingresses and their callers."""

from __future__ import annotations

import contextvars
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from deployments.api.generation import GenerateRequest, GenerateService
from deployments.api.operations import InferRequest
from deployments.api.service import InferService
from deployments.ingress.core.calls import SendCall
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import IngressOptions, Inputs, PendingInput, Settle, sample_id_of
from deployments.ingress.core.routes import KVPlacement
from deployments.ingress.dispatcher import Dispatcher, ReplicaLink, ReplicaLinks
from deployments.replica.host import CallServer, StageHost
from deployments.settings import ServeSettings
from deployments.wire.directory import ReplicaDirectory
from deployments.wire.messages import Address, IngressReport
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.engine.device import Device
from earlyexit.engine.engine import Batch
from earlyexit.errors import OfframpError
from earlyexit.network.boundary import Answer
from earlyexit.tasks.label import label_loss
from earlyexit.tasks.token import TokenTask
from optimizer.plans.plan import PlacedPlan
from profiles.stream import Observations, StreamShape
from simulator.events import ENDS, Events
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.simulation.model import (
    NUM_BLOCKS,
    RAMPS,
    STARTS,
    Arithmetic,
    NumberCodec,
    NumbersOfNetworks,
    score_of,
    state_of,
    token_of,
    value_of,
)
from tests.simulation.network import HOST, Network

CALIBRATED = dict.fromkeys(RAMPS, 0.6)
"""The calibrated thresholds; no input may leave with a lower score."""
MAX_ATTEMPTS = 3
CODEC = PromptCodec(64)
CODEC.tokenizer = byte_tokenizer()
TASK = TokenTask(CODEC.tokenizer.get_vocab_size())
SHAPE = StreamShape(score="confidence", num_blocks=NUM_BLOCKS, ramps=RAMPS)


class VirtualDriver:
    """Drives a device in virtual time. A batch takes the replica's time, and is computed at its end."""

    replica: Replica
    """The replica under construction."""

    def __init__(self, device: Device[Any], **_: Any) -> None:
        self._device = device
        self._replica = VirtualDriver.replica
        self._started = self._stopping = False
        device.wake = self._ring

    def start(self) -> None:
        self._started = True
        self._ring()

    def stop(self) -> None:
        self._stopping = True

    def is_alive(self) -> bool:
        return self._replica.is_alive

    def _ring(self) -> None:
        if self._started:
            self._replica.events.at(self._replica.events.time_s, ENDS, self._go_on)

    def _go_on(self, _: object) -> None:
        replica = self._replica
        while replica.is_alive and not self._stopping:
            found = self._device.start_next()
            if not isinstance(found, Batch):
                if found is not None:
                    replica.events.at(max(found, replica.events.time_s), ENDS, self._go_on)
                return
            calls = [call for each in replica.server.connections for call in each._calls.values()]
            awaited = found.split.first or all(member.origin in calls for member in found.members)
            replica.watch.expect(bool(awaited), "the model begins with no input of a call that was given up")
            replica.events.at(replica.events.time_s + replica.batch_s(), ENDS, self._end, found)
            if not self._device.engine.may_begin:
                return

    def _end(self, batch: Batch[Any]) -> None:
        if self._replica.stuck_until_s > self._replica.events.time_s:
            self._replica.events.at(self._replica.stuck_until_s, ENDS, self._end, batch)
        elif self._replica.is_alive:
            self._device.run(batch)
            self._go_on(None)


class Replica:
    """A replica of an accelerator type: the live host and call server."""

    def __init__(self, name: str, device: str, loop: Any, settings: ServeSettings, watch: Watcher) -> None:
        self.name, self.device, self.watch = name, device, watch
        self.events: Events = loop.events
        self.is_alive = True
        self.slowness = 1.0
        self.stuck_until_s = 0.0
        self._rng = random.Random(f"{watch.seed} {name}")
        self.runner = Arithmetic(sequences=watch.sequences)
        self.server = CallServer()
        VirtualDriver.replica = self
        starts = STARTS if watch.networks else ()
        self.host = StageHost(settings, device, self.runner, self.events, self._deliver, starts=starts)

    async def start(self, plans: Sequence[PlacedPlan]) -> Address:
        await self.host.prepare_first(plans)
        self.host.threads.start()
        return await self.server.listen(self.host, self.name)

    def batch_s(self) -> float:
        return self._rng.uniform(0.002, 0.03) * self.slowness

    def _deliver(self, releases: list[Any]) -> None:
        self.server.deliver(releases)

    @property
    def num_kept(self) -> int:
        """Pages and sequences that are still held."""
        use = self.host.device.memory_use
        return 0 if use is None else use.pages + use.sequences + len(self.runner.memory.shown)


class WatchedDispatcher(Dispatcher):
    """The live dispatcher. It records its inputs, and checks every outcome against the record."""

    def __init__(self, watch: Watcher, core: Any, ways: Any, clock: Any, codec: Any) -> None:
        super().__init__(core, ways, clock, codec=codec)
        self._watch = watch
        self.open: set[PendingInput] = set()
        """Admitted inputs without an outcome."""
        self.sent: Counter[PendingInput] = Counter()
        """How often each input was sent to the first stage."""
        self.placements: dict[int, KVPlacement] = {}

    def submit(
        self, inputs: Any, deadline_s: float, settle: Settle, placement: Any = None, **others: Any
    ) -> list[PendingInput]:
        if placement is not None:
            own = self.placements.setdefault(placement.number, placement)
            self._watch.expect(own is placement, "every placement of a sequence has a number of its own")
        taken = super().submit(inputs, deadline_s, self._checked(settle), placement=placement, **others)
        self.open.update(taken)
        return taken

    def give_up(self, inputs: Inputs, reason: str) -> None:
        super().give_up(inputs, reason)
        self.open.difference_update(inputs)

    def send(self, send: SendCall) -> None:
        inputs, budget = send.call.inputs, send.call.stage.budget(send.block)
        if send.call.is_pending:
            full = len(inputs) <= budget.inputs and sum(each.tokens for each in inputs) <= (budget.tokens or math.inf)
            self._watch.expect(full or len(inputs) == 1, "a call of new inputs is one batch at most")
            self.sent.update(inputs)
            is_tried = max(map(self.sent.__getitem__, inputs)) <= MAX_ATTEMPTS
            self._watch.expect(is_tried, "an input is sent from the start at most so many times")
        super().send(send)

    def _checked(self, settle: Settle) -> Settle:
        def checked(pending: PendingInput, outcome: Answer | OfframpError) -> None:
            watch = self._watch
            watch.expect(pending in self.open, "an input has one outcome")
            self.open.discard(pending)
            watch.expect(pending.attempt < MAX_ATTEMPTS, "an input is sent from the start at most so many times")
            if isinstance(outcome, Answer):
                watch.expect(
                    outcome.sample_id == sample_id_of(self.core.name, pending),
                    "an answer is of the input's last attempt, never of an earlier one",
                )
            settle(pending, outcome)

        return checked


class Ingress:
    """The live core, dispatcher, links and services of an ingress."""

    def __init__(
        self,
        name: str,
        placed: PlacedPlan,
        boards: dict[str, ReplicaDirectory],
        loop: Any,
        network: Network,
        settings: ServeSettings,
        watch: Watcher,
    ) -> None:
        self.name, self.watch = name, watch
        self.is_alive = True
        self.newest_epoch = 0
        self.num_observed = self.num_of_the_end = 0
        self.rng = random.Random(f"{watch.seed} {name}")
        self._network = network
        self._context = contextvars.copy_context()
        self._context.run(HOST.set, name)
        self.links = ReplicaLinks(boards, phase=self.rng.random(), link=self._link)
        for device, board in boards.items():  # as in `ReplicaLinks.connect`, without the running loop
            board.follow(partial(loop.call_soon, self.links.set_addresses, device))
        rules = IngressOptions(
            max_queued=settings.max_queued,
            max_attempts=MAX_ATTEMPTS,
            slo_s=settings.slo_s or math.inf,
            slack=settings.slack,
            admits=not watch.sequences,
            shape=SHAPE,
            loss=TASK.loss if watch.sequences else label_loss,
            probe_share=settings.probe_share,
        )
        self.core = IngressCore(name, placed, rules, self.rng)
        self.checked: PlacedPlan | None = None
        self.needed: dict[str, Mapping[str, int]] = {}
        """Replicas by slot and accelerator type, of the plan that was checked last."""
        codec: Any = NumbersOfNetworks() if watch.networks else NumberCodec()
        self.dispatcher = WatchedDispatcher(watch, self.core, self.links, loop.events, codec)
        self.service = InferService(codec, self.dispatcher, settings, loop.events)
        self.generation = GenerateService(CODEC, TASK, self.dispatcher, settings, loop.events, rng=self.rng)

    def _link(self, *given: Any) -> ReplicaLink:
        return self._context.copy().run(ReplicaLink, *given)

    def follow(self, placed: PlacedPlan) -> None:
        """Follows a plan, as the deployment's `follow`."""
        self.dispatcher.follow(placed)
        self.generation.loop.follow(self.core.placed.plan)

    def check(self) -> None:
        """Checks the invariants of an ingress; called after every event."""
        core, expect = self.core, self.watch.expect
        counts, unanswered = core.counts, core.num_unanswered
        expect(unanswered == len(self.dispatcher.open), "the core knows every admitted input, and no other")
        expect(
            counts.arrived == counts.answered + sum(counts.drops.values()) + unanswered,
            "every input that arrived is answered, dropped or open",
        )
        if core.placed is not self.checked:
            self.checked = core.placed
            self.needed = {device: core.placed.needed(device) for device in core.placed.occupied}
        for device, needed in self.needed.items():
            if not all(self.links._stages[slot].num_up for slot in needed):
                up = sum(link.is_up for link in self.links._links[device].values())
                expect(up < len(needed), "no stage is left without a replica that its type has")
        can_run = {each: all(self.links._stages[s.slot].num_up for s in each.stages) for each in core.chains.active}
        if any(can_run.values()):
            is_stuck = self.links._waiting or any(each.queue.inputs and not can for each, can in can_run.items())
            expect(not is_stuck, "no input waits for a replica if a chain of the plan can run")
        epoch = core.placed.epoch
        expect(epoch >= self.newest_epoch, "an ingress never goes back to an older plan")
        if epoch > self.newest_epoch:
            self.newest_epoch = epoch
            self.watch.expect_calibrated(core.placed.plan.policy)

    def take_completed(self, now_s: float) -> IngressReport:
        """Returns the observations for the controller, and checks them against the model."""
        report = self.core.report(now_s, now_s)
        tokens = sum(each.cost for each in self.dispatcher.open)
        known = sum(each.unanswered_tokens for each in self.core.chains.active)
        self.watch.expect(known == tokens, "the core knows the tokens of every open input")
        if report.probes is not None:
            self._check_observed(report.probes)
        return report

    def _check_observed(self, seen: Observations) -> None:
        expect, end = self.watch.expect, NUM_BLOCKS - 1
        self.num_observed += len(seen)
        self.num_of_the_end += int((seen.exits_N == end).sum())
        expect(self.num_observed <= self.core.counts.arrived, "no input is observed twice")
        for column, ramp in enumerate(RAMPS):
            left_N = seen.exits_N == ramp
            expect(bool(seen.active_NR[left_N, column].all()), "an input left at a ramp that was active")
            sure = seen.scores_NR[left_N, column] >= np.float32(CALIBRATED[ramp])
            expect(bool(sure.all()), "an input that was observed left with the score of its ramp")
        if not self.watch.sequences:  # each block changes the answer, so an answer agrees only with the same block
            agreement, share = self.core.observations.agreement, self.num_of_the_end / self.num_observed
            expect(
                agreement is not None and abs(agreement - share) < 1e-9, "the agreement is that of what was observed"
            )


@dataclass(slots=True, eq=False)
class Watcher:
    """Collects violations and events."""

    seed: int
    sequences: bool
    networks: tuple[int, ...]
    """Ends of the networks, if the service has a chain of them."""
    clock: Events
    wrong: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def expect(self, holds: bool, law: str) -> None:
        if not holds and law not in self.wrong:
            self.wrong.append(law)

    def say(self, words: str) -> None:
        self.log.append(f"{self.clock.time_s:.6f} {words}")

    def expect_calibrated(self, policy: Any) -> None:
        thresholds = {} if policy is None else policy.thresholds
        looser = [ramp for ramp, least in CALIBRATED.items() if thresholds.get(ramp, 1.0) < least]
        self.expect(not looser, "no threshold is looser than its calibration")


def is_sure_enough(number: int, exit_block: int) -> bool:
    """Returns whether an input may leave after a block, by the calibrated thresholds."""
    return exit_block == NUM_BLOCKS - 1 or score_of(number, exit_block) >= CALIBRATED[exit_block]


async def ask(ingress: Ingress, numbers: Sequence[int], timeout_s: float | None) -> str:
    """Sends a request of several inputs; returns its outcome as a word."""
    watch = ingress.watch
    request = InferRequest(rows=tuple(numbers), ids=("",) * len(numbers), truncate=False, timeout_s=timeout_s)
    arrived_s = watch.clock.time_s
    try:
        answers = await ingress.service.infer(request)
    except OfframpError as error:
        return error.kind
    finally:
        late_s = watch.clock.time_s - arrived_s - (timeout_s or 1e9)
        watch.expect(not ingress.is_alive or late_s < 0.1, "a caller hears something by its deadline")
    for number, answer in zip(numbers, answers, strict=True):
        value = value_of(number, answer.exit, watch.networks)
        watch.expect(answer.value == value, "an answer is of all blocks of its network up to its exit")
        is_sure = is_sure_enough(number, answer.exit)
        watch.expect(is_sure, "no threshold is looser than its calibration")
    return "answered"


async def generate(
    ingress: Ingress, prompt: Sequence[int], max_tokens: int, timeout_s: float | None, leaves_after: int | None
) -> str:
    """Sends a sequence; returns its outcome as a word. The caller disconnects after `leaves_after` tokens."""
    watch, tokens = ingress.watch, list(prompt)
    request = GenerateRequest(prompt=tuple(prompt), max_tokens=max_tokens, ignores_ends=True, timeout_s=timeout_s)
    try:
        stream = ingress.generation.start(request)
    except OfframpError as error:
        return error.kind
    try:
        async for said in stream:
            watch.expect(said.token == token_of(tokens, said.exit), "a token goes on from those before it")
            is_sure = is_sure_enough(state_of(tokens), said.exit)
            watch.expect(is_sure, "no threshold is looser than its calibration")
            tokens.append(said.token)
            if leaves_after is not None and len(tokens) - len(prompt) >= leaves_after:
                return "left"
    except OfframpError as error:
        return error.kind
    finally:
        stream.abort()
    watch.expect(len(tokens) - len(prompt) == max_tokens, "a sequence has all of its tokens")
    return "answered"
