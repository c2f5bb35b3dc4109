"""The live driver of an ingress: sends calls over connections to replicas, and passes outcomes to callers.

`ReplicaLinks` holds the connections, and knows which replicas host a stage.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec import structs

from deployments.ingress.core.calls import AbortCall, Call, ReturnAnswers, ReturnErrors, SendCall, placements_of
from deployments.ingress.core.ingress_core import Driver, IngressCore
from deployments.ingress.core.inputs import Inputs, PendingInput, Settle, sample_id_of
from deployments.ingress.core.routes import KVPlacement, StageReplicas
from deployments.ingress.entry import NetworkEntry
from deployments.wire.directory import ReplicaDirectory
from deployments.wire.messages import (
    Address,
    Assignment,
    CallRefused,
    CancelCall,
    Chunk,
    EndSequences,
    Frames,
    FromIngress,
    StageCall,
    Timing,
    decode_from_replica,
    encode,
)
from earlyexit.clock import Clock
from earlyexit.codecs.base import Codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.errors import ExecutionError, OfframpError, PlanError
from earlyexit.network.boundary import Answer, Encoded, WirePiece, entry_piece
from optimizer.plans.plan import PlacedPlan

# A child of the logger that Serve writes as JSON, with the request id if there is one.
logger = logging.getLogger(f"ray.serve.{__name__}")

CONNECT_S = 5.0
"""The timeout of an attempt to connect."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""The pause between attempts to connect, which doubles each time."""


class CallTracer(Protocol):
    """Records traces; see `deployments.ops.tracing.Tracer`."""

    def record_inputs(self, inputs: Sequence[PendingInput]) -> None: ...
    def on_call(self, replica: str, call: Call, message: StageCall) -> StageCall: ...
    def on_reply(self, call: Call, chunk: Chunk) -> None: ...
    def on_end(self, call: Call, error: BaseException | None) -> None: ...


class ReplicaLink:
    """The connection to one replica, on one event loop. It reconnects until it is closed."""

    def __init__(self, name: str, address: Address, on_change: Callable[[], None], owner: Dispatcher) -> None:
        """`on_change`: called when the connection comes up or goes down."""
        self.name = name
        self._address = address
        self._on_change = on_change
        self._owner = owner
        self._pause: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._frames: Frames | None = None
        self._disconnected = asyncio.Event()
        self._assignment: Assignment | None = None
        """The assignment that the calls on this connection follow."""
        self._calls: dict[int, Call] = {}
        """The open calls, by serial number."""
        self._is_closing = False
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())

    @property
    def is_up(self) -> bool:
        """Whether calls can be made."""
        return self._frames is not None

    def begin(self, call: Call, message: StageCall) -> None:
        """Sends a call. It fails with ConnectionError if there is no connection, or if the connection breaks.

        It fails with RuntimeError if the replica refuses it.
        """
        if self._frames is None:
            self._owner.ended(call, ConnectionError(f"no connection to {self.name}"))
            return
        if call.stage.assignment is not self._assignment:
            self.host(call.stage.assignment)
        self._frames.send(encode(message))
        self._calls[call.serial] = call

    def cancel(self, call: Call) -> None:
        """Ends an open call, whose inputs the replica need not run any more."""
        if call.serial in self._calls:
            self._send(CancelCall(call.serial))
            self._end_call(call.serial, asyncio.CancelledError())

    def end(self, sequence: int) -> None:
        """Makes the replica free a sequence. If the connection is broken, it has already freed it."""
        self._send(EndSequences((sequence,)))

    def host(self, assignment: Assignment) -> None:
        """Makes the replica host a stage, until another assignment of the same or a later plan arrives."""
        self._assignment = assignment
        self._send(assignment)

    def close_when_idle(self) -> None:
        """Closes the connection as soon as all open calls are done."""
        self._is_closing = True
        self._close_if_idle()

    def _end_call(self, serial: int, error: BaseException | None) -> None:
        self._owner.ended(self._calls.pop(serial), error)
        self._close_if_idle()

    def _send(self, message: FromIngress) -> None:
        if self._frames is not None:
            self._frames.send(encode(message))

    def _close_if_idle(self) -> None:
        if self._is_closing and not self._calls:
            self._task.cancel()
            if self._frames is not None:
                self._frames.close()

    async def _keep_connected(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._connect()
            except Exception as error:  # the next attempt may succeed, whatever the error is
                logger.warning("no connection to %s: %r", self.name, error)
            else:
                pause_s = FIRST_PAUSE_S
                await self._disconnected.wait()
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        frames = Frames(self._on_frame, self._on_disconnect)
        self._disconnected.clear()
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().create_connection(lambda: frames, self._address.host, self._address.port)
        if self._disconnected.is_set():
            raise ConnectionError("the replica closed the new connection")
        frames.send(self._address.token.encode())
        self._frames, self._assignment = frames, None
        self._on_change()

    def _on_disconnect(self) -> None:
        self._frames = None
        self._disconnected.set()
        self._on_change()  # before the calls fail, so that none of their inputs is sent here again
        for serial in tuple(self._calls):
            self._end_call(serial, ConnectionError(f"{self.name} closed the connection"))

    def _on_frame(self, frame: memoryview) -> None:
        message = decode_from_replica(frame)
        call = self._calls.get(message.serial)
        if call is None:  # cancelled in the meantime
            return
        if isinstance(message, CallRefused):
            self._end_call(message.serial, RuntimeError(message.reason))
            return
        try:
            self._owner.replied(call, message.chunk)
        except Exception as error:
            logger.exception("a part of a reply from %s could not be processed", self.name)
            self._send(CancelCall(message.serial))
            self._end_call(message.serial, error)
            return
        if not call.num_remaining:
            self._end_call(message.serial, None)


class ReplicaLinks:
    """The connections of an ingress to all replicas, and the assignment of the plan's stages to these replicas.

    A stage's calls go to the replicas that host it, fill-first among those that are up. If a replica joins or dies, or
    the plan changes, replicas may be assigned other stages (`PlacedPlan.roles`). If an accelerator type has fewer
    replicas than stages, some stages have none. Their calls fail if another chain can run. Otherwise they wait for a
    replica until the deadlines of their inputs.
    """

    owner: Dispatcher
    """Receives the replies to all calls. It sets this field, and then calls `follow`."""

    def __init__(self, devices: Iterable[str], *, phase: float, link: Callable[..., ReplicaLink] = ReplicaLink) -> None:
        """`devices`: accelerator types with replicas. `phase`: see `StageReplicas`. `link`: connects to a replica."""
        self._phase = phase
        self._link = link
        self._links: dict[str, dict[str, ReplicaLink]] = {device: {} for device in devices}
        """The connections by accelerator type and replica."""
        self._addresses: dict[str, Mapping[str, Address]] = {device: {} for device in self._links}
        self._stages: dict[str, StageReplicas[ReplicaLink]] = {}
        """By slot, including slots of earlier plans."""
        self._waiting: dict[Call, tuple[StageCall, float]] = {}
        """The calls that wait for a replica, and since when."""
        self._can_run = asyncio.Event()
        """Set while every stage of a chain has a replica."""

    def check_plan(self, placed: PlacedPlan) -> None:
        """Raises PlanError for a plan on accelerator types that have no replicas."""
        missing = sorted({stage.device for stage in placed.plan.stages} - self._links.keys())
        if missing:
            raise PlanError(f"the plan needs replicas on {missing}; the service has replicas on {sorted(self._links)}")

    def follow(self) -> None:
        """Assigns the stages of the core's plan to replicas. Calls that wait for a removed stage fail."""
        for slot in self.owner.core.chains.assignments:
            self._stages.setdefault(slot, StageReplicas(self._phase))
        for device in self._links:
            self._update_links(device)
        self._update()

    def send(self, call: Call, message: StageCall) -> None:
        """Sends a call to a replica of its stage. If the stage has none and no chain can run, the call waits for one.

        The call fails with SequenceLostError if the replica of its sequences is gone or hosts another stage, and with
        the errors of the connection and of its encoding. Inputs that are not settled after an error may be sent again.
        """
        slot, tracer = call.stage.slot, self.owner.tracer
        try:
            link = call.choose_replica(self._stages[slot], message.piece.next_block)
            if link is not None:
                link.begin(call, message if tracer is None else tracer.on_call(link.name, call, message))
            elif slot in self.owner.core.chains.assignments and not self._can_run.is_set():
                self._waiting[call] = message, asyncio.get_running_loop().time()
            else:  # other stages of the plan can answer its inputs
                raise ConnectionError("the stage has no replicas")
        except Exception as error:  # also if the replica of its sequences is gone, or the call cannot be encoded
            self.owner.ended(call, error)

    def cancel(self, call: Call) -> None:
        """Ends a call, whether it waits or runs."""
        if self._waiting.pop(call, None) is not None:
            self.owner.ended(call, asyncio.CancelledError())
        elif call.replica_load is not None:
            call.replica_load.replica.cancel(call)

    async def ready(self) -> None:
        """Returns once every stage of a chain has a replica."""
        await self._can_run.wait()

    def connect(self, device: str, directory: ReplicaDirectory) -> None:
        """Keeps connections to the directory's replicas. Must be called on the event loop of the calls."""
        loop = asyncio.get_running_loop()
        directory.follow(lambda addresses: loop.call_soon_threadsafe(self.set_addresses, device, addresses))

    def set_addresses(self, device: str, addresses: Mapping[str, Address]) -> None:
        """Connects to these replicas of an accelerator type, and closes the connections to all others.

        If there are none but the plan needs some, the last ones are used until they end, for accepted requests.
        """
        self._addresses[device] = addresses
        self._update_links(device)
        self._update()

    def _update(self) -> None:
        """Assigns stages to the replicas, and sends the calls that wait for a replica."""
        chains = self.owner.core.chains
        placed, assignments = chains.placed, chains.assignments
        up = {device: {name for name, link in links.items() if link.is_up} for device, links in self._links.items()}
        if_up = placed.roles(up)
        for device, hosts in placed.roles(self._links).items():
            links, needed = self._links[device], placed.needed(device)
            if {*if_up[device].values()} - {slot for name, slot in hosts.items() if name in up[device]}:
                hosts = if_up[device]  # otherwise a stage would have only replicas that are down
            for name, slot in hosts.items():
                if name in up[device]:  # a replica ignores an assignment that it already follows
                    links[name].host(assignments[slot])
            for slot, stage in self._stages.items():
                if slot in needed or slot not in assignments:  # a slot of an earlier plan gets no replicas
                    stage.set_replicas([links[name] for name, hosted in hosts.items() if hosted == slot])
        if self.owner.set_available({slot: self._stages[slot].num_up for slot in assignments}):
            self._can_run.set()
        else:
            self._can_run.clear()
        waiting, self._waiting = self._waiting, {}
        for call, (message, since_s) in waiting.items():
            waited_s = asyncio.get_running_loop().time() - since_s
            remaining_s = tuple([left_s - waited_s for left_s in message.remaining_s])
            self.send(call, structs.replace(message, remaining_s=remaining_s))

    def _update_links(self, device: str) -> None:
        addresses = self._addresses[device]
        links, keeps_last = self._links[device], not addresses and bool(self.owner.core.chains.placed.needed(device))
        for name in sorted(links.keys() - addresses.keys()):
            if not (keeps_last and links[name].is_up):
                links.pop(name).close_when_idle()
        for name in sorted(addresses.keys() - links.keys()):
            links[name] = self._link(name, addresses[name], self._update, self.owner)


MISFIT = "the encoded inputs do not fit together"


class Dispatcher(Driver):
    """The driver of one ingress, on its event loop."""

    def __init__(
        self,
        core: IngressCore,
        links: ReplicaLinks,
        clock: Clock,
        *,
        codec: Codec[Any] | None = None,
        tracer: CallTracer | None = None,
    ) -> None:
        """`codec`: the model's codec. A `ChainCodec` encodes inputs for every network that they enter."""
        super().__init__(core, clock)
        self._links = links
        links.owner, self.tracer = self, tracer
        self._codec = codec if isinstance(codec, ChainCodec) else None
        self.hops_s: defaultdict[str, list[float]] = defaultdict(list)
        """By slot, the seconds that parts of replies spent outside the stage. The export of metrics empties it."""
        self._serial = 0
        self._is_pump_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._sent: dict[Call, dict[str, PendingInput]] = {}
        """The inputs of each open call, by their ids on the wire."""
        links.follow()

    def follow(self, placed: PlacedPlan) -> None:
        self._links.check_plan(placed)
        super().follow(placed)
        self._links.follow()

    # Receive

    def submit(
        self,
        inputs: Sequence[tuple[str, Encoded]],
        deadline_s: float,
        settle: Settle,
        *,
        arrived_s: float | None = None,
        request_id: str = "",
        placement: KVPlacement | None = None,
    ) -> list[PendingInput]:
        """Submits a request's inputs, each with its id. `settle` is called once for each unless it is given up.

        `arrived_s`: when the request arrived; None: now. `placement`: the placement of the inputs' sequence. Raises
        what `IngressCore.submit` raises.
        """
        now_s = self.clock.now_s()
        since_s = now_s if arrived_s is None else arrived_s
        make = partial(PendingInput, settle=settle, request_id=request_id, placement=placement)
        pending = [
            make(serial, since_s, deadline_s, each.length, each, key=key)
            for serial, (key, each) in enumerate(inputs, self._serial + 1)
        ]
        self.core.submit(pending, now_s)
        self._serial += len(inputs)
        if self.tracer is not None:
            self.tracer.record_inputs(pending)
        self.do()
        return pending

    def give_up(self, inputs: Inputs, reason: str) -> None:
        """Drops inputs whose caller no longer waits. Those without an outcome are counted under `reason`."""
        self.do(self.core.give_up(inputs, reason, self.clock.now_s()))

    # Drive

    def pump(self) -> bool:
        if not self._is_pump_scheduled and self.core.is_due:
            self._schedule_pump()
        return False

    def _schedule_pump(self) -> None:
        """Pumps the core later, so that requests of the same event loop iteration are sent in one call."""
        if not self._is_pump_scheduled:
            self._is_pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_scheduled = False
        if self.core.is_due:
            self.do(self.core.pump(self.clock.now_s()))

    def set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - self.clock.now_s()), self.wake)

    def return_answers(self, action: ReturnAnswers) -> None:
        settle_all(zip(action.inputs, action.answers, strict=True))

    def return_errors(self, action: ReturnErrors) -> None:
        if action.error is not None:
            settle_all((pending, action.error) for pending in action.inputs)

    def abort_call(self, abort_call: AbortCall) -> None:
        call = abort_call.call
        requests = requests_of(call.inputs)
        logger.warning("%s did not reply in time for %d inputs of %s", call.stage.slot, len(call.inputs), requests)
        self._links.cancel(call)

    def _lose(self, call: Call, inputs: Inputs, error: Exception, why: str) -> None:
        """Drops inputs that cannot be encoded or joined into a batch."""
        logger.warning("%d inputs of %s are lost, %s: %r", len(inputs), requests_of(inputs), why, error)
        reported = ExecutionError(f"{why}: {type(error).__name__}: {error}")
        self.do(self.core.lose(call, inputs, reported, self.clock.now_s()))

    # Send

    def send(self, send: SendCall) -> None:
        try:
            self._encode_and_send(send)
        except Exception as error:  # the call counts as failed
            logger.exception("the ingress could not send a call")
            self.ended(send.call, error)

    def _encode_and_send(self, send: SendCall) -> None:
        call, _, payload, network, rows = send
        if network is None:
            self._send_piece(call, payload if rows is None else payload.select(rows))
        elif self._codec is None:  # inputs of a single network were encoded when they arrived
            try:
                ids = [sample_id_of(self.core.name, each) for each in call.inputs]
                piece = entry_piece(ids, [each.encoded for each in call.inputs])
            except Exception as error:
                self._lose(call, call.inputs, error, MISFIT)
            else:
                self._send_piece(call, piece)
        else:
            entry = NetworkEntry(self.core.name, self._codec, send, network, self.core.placed.plan)
            if entry.is_slow():
                prepared = asyncio.get_running_loop().run_in_executor(None, entry.prepare)
                prepared.add_done_callback(lambda _: self._enter(call, entry))
            else:
                self._enter(call, entry)

    def _enter(self, call: Call, entry: NetworkEntry) -> None:
        """Sends inputs to a network's first block."""
        if not call.num_remaining:  # it was aborted while a thread encoded its inputs
            return
        try:
            piece = entry.enter(self.core.placed.plan)
        except Exception as error:
            self._lose(call, call.inputs, error, MISFIT)
            return
        for pending, refusal in entry.refused:
            self._lose(call, (pending,), refusal, "the next network's codec cannot encode it")
        if entry.crosses:
            waited_s = [self.clock.now_s() - call.started_s] * len(entry.inputs)
            words, pruned_words = entry.words()
            self.core.counts.record_crossings(piece.next_block, waited_s, words=words, pruned_words=pruned_words)
        call.inputs = entry.inputs
        if call.inputs:
            self._send_piece(call, piece)

    def _send_piece(self, call: Call, piece: WirePiece) -> None:
        now_s, inputs, is_awaited = self.clock.now_s(), call.inputs, self.core.is_awaited
        message = StageCall(
            serial=call.serial,
            piece=piece,
            # A negative time makes the stage drop an input that is no longer awaited.
            remaining_s=tuple([each.deadline_s - now_s if is_awaited(call, each) else -1.0 for each in inputs]),
            reserve_s=call.reserve_s,
            probe=call.probe,
            counts_as_full=call.counts_as_full,
            sequences=tuple([placement.number for placement in placements_of(inputs)]),
        )
        self._sent[call] = dict(zip(piece.sample_ids, inputs, strict=True))
        self._links.send(call, message)

    def ended(self, call: Call, error: BaseException | None) -> None:
        """Handles the end of a call, once. Inputs that are unsettled, because of an error, are retried."""
        if self.tracer is not None:
            self.tracer.on_end(call, error)
        self._sent.pop(call, None)
        call.leave_replica()
        for placement in placements_of(call.inputs):
            if placement.has_ended:  # the replica may have begun the sequence in the meantime
                placement.end()
        if left := call.remaining():
            logger.warning("%s failed for %d inputs of %s: %r", call.stage.slot, len(left), requests_of(left), error)
            self.do(self.core.fail(call, left, self.clock.now_s()))

    # Settle

    def replied(self, call: Call, chunk: Chunk) -> None:
        """Passes a part of a call's reply to the core. If it raises an error, the call fails."""
        if self.tracer is not None:
            self.tracer.on_reply(call, chunk)
        core, now_s, inputs = self.core, self.clock.now_s(), self._sent[call]
        if chunk.seen:
            core.observe(call, [(inputs[seen.sample_id], seen) for seen in chunk.seen])
        for timed_answers, settle in ((chunk.answers, core.answer), (chunk.early, core.answer_early)):
            for block, answered, answers in by_block(inputs, timed_answers):
                self.do(settle(call, answered, block, now_s, answers))
        for sample_id, error in chunk.lost:
            self.do(core.lose(call, [inputs[sample_id]], error, now_s))
        if chunk.survivors is not None:
            piece = chunk.survivors
            survivors = [inputs[sample_id] for sample_id in piece.sample_ids]
            self.do(core.go_on(call, survivors, piece.next_block, piece, now_s))
        # Scheduled even if nothing is due yet: sequences submit their next steps before `_pump` runs.
        self._schedule_pump()
        if timings := chunk.survivor_timings or [timing for _, timing in chunk.answers]:
            inside_s = max([timing.queue_s + timing.compute_s for timing in timings])
            self.hops_s[call.stage.slot].append(max(0.0, now_s - call.started_s - inside_s))


def by_block(
    inputs: Mapping[str, PendingInput], answers: Sequence[tuple[Answer, Timing]]
) -> Iterable[tuple[int, list[PendingInput], list[Answer]]]:
    """Yields, for each exit block, the inputs that left after it and their answers."""
    groups: defaultdict[int, list[Answer]] = defaultdict(list)
    for answer, _ in answers:
        groups[answer.exit].append(answer)
    for block, group in groups.items():
        yield block, [inputs[answer.sample_id] for answer in group], group


def settle_all(outcomes: Iterable[tuple[PendingInput, Answer | OfframpError]]) -> None:
    """Settles every input. An error in one callback does not keep the others from theirs."""
    for pending, outcome in outcomes:
        try:
            pending.settle(pending, outcome)
        except Exception:
            logger.exception("the callback for an input of %s failed", pending.request_id)


def requests_of(inputs: Inputs) -> str:
    """Returns the ids of the inputs' first few requests, for the log."""
    ids = sorted({each.request_id for each in inputs})
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
