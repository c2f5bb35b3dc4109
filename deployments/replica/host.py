"""A replica apart from Serve: a device, the assignment that it follows, and the port on which it takes calls.

Ingresses that know the replica's secret call it there, beside Serve.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

from cluster.emulated import PacedRunner
from deployments.replica.build import policy_for, warm_up
from deployments.settings import ServeSettings
from deployments.wire.messages import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Address,
    Assignment,
    BeginCall,
    CallRefused,
    CancelCall,
    Chunk,
    EndSequences,
    Frames,
    HostStage,
    MalformedError,
    ReplicaReport,
    SplitRun,
    StageCall,
    Timing,
    WireSurvivors,
    assignments_on,
    decode_from_ingress,
    encode,
    encode_parts,
)
from earlyexit.clock import Clock
from earlyexit.engine.device import (
    Answered,
    Deliver,
    Device,
    DeviceThreads,
    InFlight,
    Observed,
    OnBatch,
    Release,
    Runner,
    Survivors,
    ignore,
)
from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.engine.queue import NO_SEQUENCE, Member
from earlyexit.engine.times import ObservedTimes
from earlyexit.errors import PlanError
from earlyexit.named import HopDtype
from optimizer.placement import PlacedPlan
from optimizer.plan import PolicySpec


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call whose inputs are in the engine."""

    unsettled: int
    """Inputs that no part of the reply has settled."""
    take: Callable[[Chunk], None]
    """Is called with every part of the reply."""
    begun: dict[str, list[SplitRun]] | None = None
    """The batches so far of each traced input, with the input's times when the batch began; None if none is traced."""


def chunks_by_call(releases: Iterable[Release[Any]], hop_dtype: HopDtype = "same") -> list[tuple[OpenCall, Chunk]]:
    """Returns the parts of the calls' replies: one with answers per call, then those with survivors.

    Hidden states are in `hop_dtype`. Survivors come last, because a call ends with the part that settles its last
    input.
    """
    parts: defaultdict[OpenCall, defaultdict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    survivors: list[tuple[OpenCall, Chunk]] = []
    for release in releases:
        if isinstance(release, Survivors):
            survivors.extend(_survivor_chunks(release, hop_dtype))
            continue
        opened = _call_of(release.member)
        part = parts[opened]
        match release:
            case Answered():
                part["early" if release.stays else "answers"].append((release.answer, _timing(release.member)))
                if opened.begun is not None:
                    part["runs"] += _runs(opened.begun, (release.member,))
            case Observed():
                part["seen"].append(release.seen)
            case _:
                part["lost"].append((release.member.sample_id, release.error))
    chunks: list[tuple[OpenCall, Chunk]] = []
    for opened, part in parts.items():
        given: dict[str, Any] = {name: tuple(each) for name, each in part.items()}
        chunks.append((opened, Chunk(**given)))
    return chunks + survivors


def _survivor_chunks(release: Survivors[Any], hop_dtype: HopDtype) -> Iterator[tuple[OpenCall, Chunk]]:
    positions: dict[OpenCall, list[int]] = {}
    for position, member in enumerate(release.members):
        positions.setdefault(_call_of(member), []).append(position)
    for opened, mine in positions.items():
        piece = release.piece if len(positions) == 1 else release.piece.select(mine)
        members = [release.members[position] for position in mine]
        going_on = WireSurvivors(piece=piece.to_wire(hop_dtype), timings=tuple(map(_timing, members)))
        yield opened, Chunk(going_on=going_on, runs=() if opened.begun is None else _runs(opened.begun, members))


def _runs(
    begun: Mapping[str, Sequence[SplitRun]], members: Iterable[Member[Any]]
) -> tuple[tuple[str, tuple[SplitRun, ...]], ...]:
    """Returns the runs of the traced members."""
    return tuple(
        (member.sample_id, split_runs(begun[member.sample_id], member.compute_s))
        for member in members
        if member.sample_id in begun
    )


def split_runs(begun: Sequence[SplitRun], compute_s: float) -> tuple[SplitRun, ...]:
    """Returns every batch's own share of an input's times; `compute_s`: its total when the last batch released it."""
    if not begun:
        return ()
    waited_s = [0.0, *(each.queue_s for each in begun[:-1])]
    until_s = [*(each.compute_s for each in begun[1:]), compute_s]
    return tuple(
        replace(each, queue_s=each.queue_s - before_s, compute_s=after_s - each.compute_s)
        for each, before_s, after_s in zip(begun, waited_s, until_s, strict=True)
    )


def _call_of(member: Member[Any]) -> OpenCall:
    assert isinstance(member.origin, OpenCall)
    return member.origin


def _timing(member: Member[Any]) -> Timing:
    return Timing(queue_s=member.queue_s, compute_s=member.compute_s)


class TracedDevice(Device[Any]):
    """Notes the batches of traced inputs; only where tracing is on."""

    def _run(self, batch: Batch[Any], inside: InFlight[Any]) -> Any:
        """Called again for every member of a batch that failed, which then runs alone."""
        for member in batch.members:
            opened = member.origin
            if isinstance(opened, OpenCall) and opened.begun is not None and member.sample_id in opened.begun:
                begun = SplitRun(
                    first=batch.split.first,
                    end=batch.split.end,
                    batch=len(batch.members),
                    tokens=batch.tokens,
                    target=batch.split.batch,
                    queue_s=member.queue_s,
                    compute_s=member.compute_s,
                )
                opened.begun[member.sample_id].append(begun)
        return super()._run(batch, inside)


NOTHING = -1
"""The epoch of a replica that follows no plan yet."""
OF_SPLITS = ("batches", "inputs", "tokens", "fill", "token_fill", "busy_s", "dropped")
"""What is counted of every split."""
BROKEN_AFTER = 20
"""Inputs in a row that the model fails on, each alone, before the replica counts as broken (a lost GPU, say)."""


class StageHost:
    """Runs the newest assignment that it has seen, and what calls of older plans still need."""

    def __init__(
        self,
        settings: ServeSettings,
        device: str,
        runner: Runner[Any],
        clock: Clock,
        deliver: Deliver[Any],
        *,
        on_batch: OnBatch[Any] = ignore,
        on_death: Callable[[], None] = ignore,
        starts: Collection[int] = (),
    ) -> None:
        """`starts`: the blocks that networks of a chain begin with."""
        self.epoch = NOTHING
        self.slot = ""
        """The stage that it hosts; empty before it follows a plan."""
        self._settings = settings
        self._device_name = device
        self._runner = runner
        self._clock = clock
        self._starts = starts
        engine: BatchEngine[Any] = BatchEngine((), ObservedTimes(), starts=starts)
        make = Device if settings.tracing is None else TracedDevice
        self.device: Device[Any] = make(engine, runner, clock, deliver, on_batch)
        self.threads = DeviceThreads(self.device, name=f"device-{device}", on_death=on_death)
        self._policy: tuple[PolicySpec | None, Any] = None, policy_for(settings, device, None)

    async def prepare_first(self, plans: Sequence[PlacedPlan]) -> None:
        """Prepare, when the replica starts, for all plans that it may serve, the followed one last; raises PlanError.

        A replica that cannot run the coming plan still serves the followed one. What the controller prepares before it
        changes to the coming plan then fails, and says why.
        """
        if mine := assignments_on(self._device_name, plans):
            try:
                await self.prepare(mine)
            except PlanError as error:
                if len(plans) == 1:
                    raise
                logger.warning("plan %d, which is to come, cannot be prepared: %s", plans[0].epoch, error)
                await self.prepare_first(plans[1:])

    async def prepare(self, assignments: Sequence[Assignment]) -> None:
        """Do what is slow the first time for all stages on this accelerator type of one or two plans, beside serving.

        It may host any of them under their plan, and another one when replicas come or go. The first plan's policy
        decides in the warm-up; it need not know the ramps of the other plan.
        """
        splits = [each.stage.splits for each in assignments]
        policy = await asyncio.to_thread(self._make_ready, assignments)
        self._policy = assignments[0].policy, policy
        if self.epoch == NOTHING:
            self.device.follow((), assignments[0].dispatch, policy, assignments[0].order)
            times = await asyncio.to_thread(warm_up, self._runner, splits, clock=self._clock, starts=self._starts)
            if self.epoch == NOTHING:  # else a call was faster, and its batches have taught the times since
                self.device.engine.times = times

    def follow(self, assignment: Assignment) -> None:
        """Follow an assignment from the next batch on, unless it is of an older plan than the present one."""
        if assignment.epoch < self.epoch or (assignment.epoch, assignment.slot) == (self.epoch, self.slot):
            return
        if assignment.policy != self._policy[0]:
            self._policy = assignment.policy, policy_for(self._settings, self._device_name, assignment.policy)
        if isinstance(self._runner, PacedRunner):
            self._runner.dispatch = assignment.dispatch
        self.device.follow(assignment.stage.splits, assignment.dispatch, self._policy[1], assignment.order)
        self.epoch, self.slot = assignment.epoch, assignment.slot

    def submit(self, call: StageCall, opened: OpenCall) -> None:
        """Queue a call's inputs; raises PlanError if no split of the present plan or of the call's holds the block."""
        self.follow(call.assignment)
        members = self.device.admit(call.piece, self._members(call, opened))
        if members:
            self.device.submit(call.piece.next_block, members, fallback=call.assignment.allowed_splits)

    def check(self) -> None:
        """Raise RuntimeError if the replica must be replaced."""
        if not self.threads.is_alive():
            raise RuntimeError("the device thread has ended")
        if self.device.failures_in_a_row >= BROKEN_AFTER:
            raise RuntimeError(f"the model failed on {self.device.failures_in_a_row} inputs in a row")

    def report(self, *, replica: str, node: str) -> ReplicaReport:
        """Returns what it has done since its start, without probes, which do more work than other inputs."""
        engine = self.device.engine
        return ReplicaReport(
            slot=self.slot,
            replica=replica,
            node=node,
            pid=os.getpid(),
            device=self._device_name,
            epoch=self.epoch,
            waiting=engine.num_waiting,
            times=engine.times_run,
            memory=self.device.memory_use,
        )

    def stats(self) -> dict[str, Any]:
        """Returns what the present splits have done so far."""
        engine, memory = self.device.engine, self.device.memory_use
        counts = engine.counts
        return {
            "pid": os.getpid(),
            "device": self._device_name,
            "slot": self.slot,
            "epoch": self.epoch,
            "splits": [
                {"first": split.first, "end": split.end, "batch": split.batch}
                | {name: getattr(counts[split.first], name) for name in OF_SPLITS}
                for split in engine.splits
            ],
            **({} if memory is None else {"memory": asdict(memory)}),
        }

    def _make_ready(self, assignments: Sequence[Assignment]) -> Any:
        # Not for the detours: there every ramp looks, which is the network's own work, whatever runs the rest.
        self._runner.prepare(list(chain.from_iterable(each.stage.splits for each in assignments)))
        policy = assignments[0].policy
        mine = chain.from_iterable(each.stage.splits for each in assignments if each.policy == policy)
        return policy_for(self._settings, self._device_name, policy, list(mine))

    def _members(self, call: StageCall, opened: OpenCall) -> list[Member[Any]]:
        now_s = self._clock.now_s()
        singles = self._runner.from_wire(call.piece).singles()
        sequences = call.sequences or (NO_SEQUENCE,) * len(singles)
        return [
            Member(
                sample_id=single.sample_ids[0],
                payload=single,
                tokens=tokens,
                deadline_s=now_s + remaining_s,
                reserve_s=call.reserve_s,
                origin=opened,
                probe=call.probe,
                sequence=sequence,
            )
            for single, tokens, remaining_s, sequence in zip(
                singles, call.piece.lengths_B.tolist(), call.remaining_s, sequences, strict=True
            )
        ]


# The port


class Sender:
    """Sends frames at once, also from the device's thread; the event loop sends what the socket does not take then.

    Handing every part of a reply to the event loop would cost the device's thread more than sending it, because both
    then want the interpreter's lock.
    """

    def __init__(self, transport: asyncio.BaseTransport, loop: asyncio.AbstractEventLoop) -> None:
        """`transport`: of an open connection, to which nothing else is written."""
        self._transport = cast(asyncio.Transport, transport)
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._loop = loop
        self._lock = threading.Lock()
        self._num_left = 0
        """Frames whose rest the event loop is to write."""
        self._is_direct = True
        """Whether nothing is left to write, so that the next frame goes to the socket at once."""
        self._is_closed = False

    def send(self, frame: bytes) -> None:
        """Send a frame; does nothing once the connection has ended."""
        with self._lock:
            if self._is_closed:
                return
            parts = len(frame).to_bytes(LENGTH_BYTES, "big"), frame
            sent = self._sent_of(parts) if self._is_direct else 0
            if sent < LENGTH_BYTES + len(frame):
                self._is_direct = False
                self._num_left += 1
                self._loop.call_soon_threadsafe(self._write, b"".join(parts)[sent:])

    def close(self) -> None:
        """Note that the connection has ended; on the event loop."""
        with self._lock:
            self._is_closed = True
            self._socket.close()

    def _sent_of(self, parts: Sequence[bytes]) -> int:
        """Sends what the socket takes now; returns the number of bytes."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError:  # the connection is gone, which the event loop is told too: it ends the calls
            return sum(map(len, parts))

    def _write(self, rest: bytes) -> None:
        if not self._is_closed:
            self._transport.write(rest)
            with self._lock:
                self._num_left -= 1
                self._is_direct = not self._num_left and not self._transport.get_write_buffer_size()


logger = logging.getLogger(f"ray.serve.{__name__}")

WORD_BYTES = 32
WORD_WITHIN_S = 5.0
"""A connection that has not sent the replica's word by then is closed."""
MOST_UNKNOWN = 256
"""The most connections that have not sent the word yet; more are closed at once, as each holds a descriptor."""


class CallServer:
    """A replica's side of its connections to ingresses; on the replica's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hop_dtype: HopDtype = "same") -> None:
        self._loop = loop
        self._hop_dtype = hop_dtype
        self.word = secrets.token_hex(WORD_BYTES)
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()
        self.unknown: set[_Connection] = set()
        """Connections that have not sent the word yet."""
        self._lock = threading.Lock()
        self._open = 0
        self._idle: asyncio.Event | None = None
        """Set when no call is open, once `close` waits for that."""

    async def listen(self, host: StageHost, ip: str) -> Address:
        """Take calls at a free port of this address until `close`; returns what an ingress must know."""
        server = await self._loop.create_server(lambda: _Connection(self, host).frames, ip, 0)
        self._server = server
        return Address(host=ip, port=server.sockets[0].getsockname()[1], token=self.word)

    def deliver(self, releases: list[Release[Any]]) -> None:
        """Send what the device released to the callers; called by the device's thread."""
        for opened, chunk in chunks_by_call(releases, self._hop_dtype):
            opened.take(chunk)

    async def close(self) -> None:
        """Take no new connections, and return when every call has its reply."""
        if self._server is not None:
            self._server.close()
        self._idle = asyncio.Event()
        self.count(0)
        await self._idle.wait()
        for connection in tuple(self.connections):
            connection.frames.close()  # once everything is sent

    def count(self, calls: int) -> None:
        """Note that so many more (or fewer) calls are open; from any thread."""
        with self._lock:
            self._open += calls
            if not self._open and self._idle is not None:
                self._loop.call_soon_threadsafe(self._idle.set)


class _Connection:
    """The connection of one ingress. Calls begin on the event loop, and end there or in the device's thread."""

    def __init__(self, server: CallServer, host: StageHost) -> None:
        self.frames = Frames(self._hear_word, self._end, self._open, longest=2 * WORD_BYTES)
        self._calls: dict[int, OpenCall] = {}
        self._sequences: set[int] = set()
        """Sequences that came over it and were not ended."""
        self._server = server
        self._host = host
        self._is_known = False

    def _open(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        self._sender = Sender(transport, loop)
        self._server.connections.add(self)
        self._server.unknown.add(self)
        self._deadline = loop.call_later(WORD_WITHIN_S, self.frames.abort)
        if len(self._server.unknown) > MOST_UNKNOWN:
            logger.warning("a connection was closed: %d others have not sent this replica's word", MOST_UNKNOWN)
            self.frames.abort()

    def _hear_word(self, frame: memoryview) -> None:
        if self._is_known:
            self._hear(frame)
        elif hmac.compare_digest(frame, self._server.word.encode()):
            self._is_known, self.frames.longest = True, MAX_FRAME_BYTES
            self._deadline.cancel()
            self._server.unknown.discard(self)
        else:
            logger.warning("a connection without this replica's word was refused")
            self.frames.abort()

    def _hear(self, frame: memoryview) -> None:
        try:
            message = decode_from_ingress(frame)
        except MalformedError as error:  # of another version, say: nothing that follows can be trusted
            logger.warning("a connection said what no ingress says: %s", error)
            self.frames.abort()
            return
        match message:
            case BeginCall():
                self._begin(message.serial, message.call)
            case CancelCall():
                self._forget(message.serial)
            case EndSequences():
                self._end_sequences(self._sequences.intersection(message.sequences))
            case HostStage(assignment=assignment):
                try:
                    self._host.follow(assignment)
                except Exception:  # each call of that plan is refused with the reason
                    logger.exception("plan %d cannot be followed", assignment.epoch)

    def _begin(self, serial: int, call: StageCall) -> None:
        opened = self._calls[serial] = OpenCall(len(call.remaining_s), partial(self._reply, serial))
        if call.traced:
            opened.begun = {call.piece.sample_ids[position]: [] for position in call.traced}
        self._sequences.update(call.sequences)
        self._server.count(+1)
        try:
            self._host.submit(call, opened)
        except Exception as error:  # whatever it is, the caller must learn of it
            logger.exception("a call was refused")
            self._close(serial)
            self._sender.send(encode(CallRefused(serial, repr(error))))

    def _reply(self, serial: int, chunk: Chunk) -> None:
        opened = self._calls.get(serial)
        if opened is None:  # forgotten, while the device ran it
            return
        for frame in encode_parts(serial, chunk):
            self._sender.send(frame)
        opened.unsettled -= chunk.num_inputs
        if not opened.unsettled:
            self._close(serial)

    def _forget(self, serial: int) -> None:
        opened = self._close(serial)
        if opened is not None:  # else its last part was on its way
            self._host.device.forget(opened)

    def _end_sequences(self, sequences: set[int]) -> None:
        if sequences:
            self._sequences -= sequences
            self._host.device.end(sequences)

    def _close(self, serial: int) -> OpenCall | None:
        opened = self._calls.pop(serial, None)
        if opened is not None:
            self._server.count(-1)
        return opened

    def _end(self) -> None:
        self._deadline.cancel()
        for serial in tuple(self._calls):  # the rest is no longer awaited
            self._forget(serial)
        self._end_sequences(set(self._sequences))
        self._sender.close()
        self._server.unknown.discard(self)
        self._server.connections.discard(self)
