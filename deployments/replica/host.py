"""The parts of a replica that do not depend on Serve: the device, the current assignment, and the server for calls.

Ingresses that know the replica's token call it directly, without Serve's handles. The last part builds and warms up the
exit policy and the runner. It imports torch only if the model is computed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import structs

from cluster.devices import find_device
from cluster.emulated import PacedRunner, RecordedRunner
from cluster.memory import machine_memory
from deployments.settings import EmulatedSettings, ServeSettings
from deployments.wire.messages import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Address,
    Assignment,
    CallRefused,
    CancelCall,
    Chunk,
    EndSequences,
    Frames,
    ReplicaReport,
    SplitRun,
    StageCall,
    Timing,
    assignments_on,
    decode_from_ingress,
    encode,
    encode_parts,
)
from earlyexit.clock import Clock
from earlyexit.engine.device import (
    WARM_UP_TOKENS,
    Answered,
    Deliver,
    Device,
    DeviceThreads,
    Failed,
    InFlight,
    Observed,
    OnBatch,
    Release,
    Runner,
    Survivors,
    ignore,
)
from earlyexit.engine.engine import Batch, BatchEngine, ObservedTimes
from earlyexit.engine.queue import NO_SEQUENCE, Member
from earlyexit.errors import DataError, PlanError
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Split
from earlyexit.network.store import ModelCard, read_card
from earlyexit.policies import kind_of, make_policy
from optimizer.plans.plan import NO_RAMPS, PlacedPlan, PolicySpec
from profiles.records import ExitRecords
from profiles.table import LatencyTable

if TYPE_CHECKING:
    from earlyexit.network.model import TorchRunner
    from earlyexit.policies.base import ExitPolicy


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call whose inputs are in the engine."""

    unsettled: int
    """Inputs that no part of the reply has settled."""
    reply: Callable[[Chunk], None]
    """Sends a part of the reply."""
    begun: dict[str, list[SplitRun]] = field(default_factory=dict)
    """For each traced input, its batches so far, with the input's times at the batch's start."""


def chunks_by_call(releases: Iterable[Release[Any]], hop_dtype: HopDtype = "same") -> list[tuple[OpenCall, Chunk]]:
    """Returns the parts of replies: for each call one part without survivors, then the parts with survivors.

    Survivors come last, because a call ends with the part that settles its last input. `hop_dtype`: the data type of
    their hidden states.
    """
    parts: defaultdict[OpenCall, defaultdict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    survivors: list[tuple[OpenCall, Chunk]] = []
    for release in releases:
        if isinstance(release, Survivors):
            survivors.extend(_survivor_chunks(release, hop_dtype))
            continue
        part = parts[_call_of(release.member)]
        if isinstance(release, Answered):
            part["early" if release.stays else "answers"].append((release.answer, _timing(release.member)))
        elif isinstance(release, Observed):
            part["seen"].append(release.seen)
        else:
            part["lost"].append((release.member.sample_id, release.error))
    chunks = [
        (opened, Chunk(**{name: cast(Any, tuple(values)) for name, values in part.items()}))
        for opened, part in parts.items()
    ]
    return chunks + survivors


def _survivor_chunks(release: Survivors[Any], hop_dtype: HopDtype) -> Iterator[tuple[OpenCall, Chunk]]:
    positions: dict[OpenCall, list[int]] = {}
    for position, member in enumerate(release.members):
        positions.setdefault(_call_of(member), []).append(position)
    for opened, call_positions in positions.items():
        piece = release.piece if len(positions) == 1 else release.piece.select(call_positions)
        members = [release.members[position] for position in call_positions]
        yield opened, Chunk(survivors=piece.to_wire(hop_dtype), survivor_timings=tuple(map(_timing, members)))


def split_runs(begun: Sequence[SplitRun], compute_s: float) -> tuple[SplitRun, ...]:
    """Returns an input's batches with their own times. `begun`: totals at each start; `compute_s`: the final total."""
    runs, waited_s = list[SplitRun](), 0.0
    for each, following in zip_longest(begun, begun[1:]):
        until_s = compute_s if following is None else following.compute_s
        runs.append(structs.replace(each, queue_s=each.queue_s - waited_s, compute_s=until_s - each.compute_s))
        waited_s = each.queue_s
    return tuple(runs)


def _call_of(member: Member[Any]) -> OpenCall:
    assert isinstance(member.origin, OpenCall)
    return member.origin


def _timing(member: Member[Any]) -> Timing:
    begun = _call_of(member).begun.get(member.sample_id)
    runs = split_runs(begun, member.compute_s) if begun else ()
    return Timing(queue_s=member.queue_s, compute_s=member.compute_s, runs=runs)


class TracedDevice(Device[Any]):
    """A device that records the batches of traced inputs."""

    def _run(self, batch: Batch[Any], inside: InFlight[Any]) -> Any:
        """Records and runs a batch. After a failure, it is called again for every member alone."""
        for member in batch.members:
            opened = member.origin
            if isinstance(opened, OpenCall) and member.sample_id in opened.begun:
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


NO_EPOCH = -1
"""The epoch of a replica that does not follow a plan yet."""
SPLIT_COUNTS = ("batches", "inputs", "tokens", "fill", "token_fill", "busy_s", "dropped")
"""The counts of a split in a report."""
BROKEN_AFTER = 20
"""The number of consecutive single-input failures after which the replica is unhealthy (a lost GPU, for example)."""
HUNG_S = 300.0
"""Seconds after the last deadline of its inputs at which a running batch counts as hung. Compilations are shorter."""


class CheckedPolicy(NamedTuple):
    """The exit policy of a replica, which is kept if only other fields of the plan change."""

    spec: PolicySpec | None
    policy: Any
    """What the runner follows; see `policy_for`."""
    ramps: frozenset[int] = frozenset()
    """The ramps that the policy is known to accept."""


class StageHost:
    """Follows the newest assignment that it has received, and also runs the remaining calls of older plans."""

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
        """`starts`: the first blocks of the networks of a cascade."""
        self.epoch = NO_EPOCH
        self.slot = ""
        """The slot of the hosted stage; empty before the replica follows a plan."""
        self._settings = settings
        self._device_name = device
        self._runner = runner
        self._clock = clock
        self._starts = starts
        engine: BatchEngine[Any] = BatchEngine((), ObservedTimes(), starts=starts)
        make = Device if settings.tracing is None else TracedDevice
        self.device: Device[Any] = make(engine, runner, clock, deliver, on_batch)
        self.threads = DeviceThreads(self.device, name=f"device-{device}", on_death=on_death)
        self._preparing = threading.Lock()
        """Held while the runner prepares splits. The controller asks again if that takes long."""
        self._policy = CheckedPolicy(None, policy_for(settings, device, None))

    async def prepare_first(self, plans: Sequence[PlacedPlan]) -> None:
        """Prepares a new replica for the plans that it may serve: a planned one, if any, and the current one last.

        Raises PlanError if the current plan cannot run. If the planned one cannot run, the replica still serves the
        current one, and the controller gets the error when it prepares the change.
        """
        try:
            await self.prepare(plans)
        except PlanError as error:
            if len(plans) == 1:
                raise
            logger.warning("plan %d cannot be prepared: %s", plans[0].epoch, error)
            await self.prepare(plans[1:])

    async def prepare(self, plans: Sequence[PlacedPlan]) -> None:
        """Compiles, loads and warms up all stages of one or two plans on this accelerator type, while it serves.

        The replica may have to host any of them. The warm-up uses the first plan's policy, which may lack other ramps.
        """
        assignments = assignments_on(self._device_name, plans)
        if not assignments:
            return
        self._policy = await asyncio.to_thread(self._make_ready, assignments)
        if self.epoch == NO_EPOCH:
            self._runner.follow(self._policy.policy)  # for the warm-up
            splits = [each.stage.splits for each in assignments]
            times = await asyncio.to_thread(warm_up, self._runner, splits, clock=self._clock, starts=self._starts)
            if self.epoch == NO_EPOCH:  # otherwise a call came earlier, and the engine has measured its batches
                self.device.engine.times = times

    def follow(self, assignment: Assignment) -> None:
        """Follows an assignment from the next batch on. Assignments of older plans are ignored."""
        if assignment.epoch < self.epoch or (assignment.epoch, assignment.slot) == (self.epoch, self.slot):
            return
        spec = assignment.policy
        if spec != self._policy.spec:
            self._policy = CheckedPolicy(spec, policy_for(self._settings, self._device_name, spec))
        if isinstance(self._runner, PacedRunner):
            self._runner.dispatch = assignment.dispatch
        self.device.follow(assignment.stage.splits, assignment.dispatch, self._policy.policy, assignment.order)
        self.epoch, self.slot = assignment.epoch, assignment.slot

    def submit(self, call: StageCall, assignment: Assignment, opened: OpenCall) -> None:
        """Queues a call's inputs. `assignment`: the stage's assignment under the sender's plan.

        Raises PlanError if neither the current plan nor the sender's has a split for them.
        """
        self.follow(assignment)
        members = self.device.admit(call.piece, self._members(call, opened))
        if members:
            self.device.submit(call.piece.next_block, members, fallback=assignment.allowed_splits)

    def check(self) -> None:
        """Raises RuntimeError if the replica must be replaced."""
        if not self.threads.is_alive():
            raise RuntimeError("the device thread has ended")
        if self.device.failures_in_a_row >= BROKEN_AFTER:
            raise RuntimeError(f"the model failed on {self.device.failures_in_a_row} inputs in a row")
        overdue_s = self._clock.now_s() - HUNG_S
        if any(max(each.deadline_s for each in batch.members) < overdue_s for batch in self.device.engine.running):
            raise RuntimeError(f"a batch still runs {HUNG_S:.0f} s after the last deadline of its inputs")

    def report(self, *, replica: str, node: str) -> ReplicaReport:
        """Returns the report for the controller. Its times leave out probes, which do more work than other inputs."""
        engine, counts = self.device.engine, self.device.engine.counts
        return ReplicaReport(
            slot=self.slot,
            replica=replica,
            node=node,
            pid=os.getpid(),
            device=self._device_name,
            epoch=self.epoch,
            waiting=engine.num_waiting,
            times=engine.times.runs(),
            splits=tuple(
                {"first": split.first, "end": split.end, "batch": split.batch}
                | {name: getattr(counts[split.first], name) for name in SPLIT_COUNTS}
                for split in engine.splits
            ),
            memory=self.device.memory_use,
        )

    def _make_ready(self, assignments: Sequence[Assignment]) -> CheckedPolicy:
        # Splits of probes need no preparation: the network itself runs them, whatever backend runs the others.
        with self._preparing:
            self._runner.prepare([split for each in assignments for split in each.stage.splits])
        spec, known = assignments[0].policy, self._policy
        splits = [split for each in assignments if each.policy == spec for split in each.stage.splits]
        ramps = frozenset(ramp for split in splits for ramp in split.ramps)
        if spec == known.spec and ramps <= known.ramps:
            return known
        return CheckedPolicy(spec, policy_for(self._settings, self._device_name, spec, sorted(ramps)), ramps)

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
                counts_as_full=call.counts_as_full,
                sequence=sequence,
            )
            for single, tokens, remaining_s, sequence in zip(
                singles, call.piece.lengths_B.tolist(), call.remaining_s, sequences, strict=True
            )
        ]


# The server for calls


class DirectFrames(Frames):
    """Frames that any thread sends directly to the socket. The event loop sends the rest if the buffer is full.

    Passing every part of a reply to the event loop would cost the device thread more than sending it, because both
    threads would compete for the GIL.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._num_left = 0
        """The number of frames that the event loop is still to write."""
        self._is_direct = True
        """Whether nothing is left to write, so that the next frame may go directly to the socket."""
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        with self._lock:
            self._socket.close()
        super().connection_lost(exc)

    def send(self, frame: bytes) -> None:
        with self._lock:
            if not self._is_open:
                return
            parts = len(frame).to_bytes(LENGTH_BYTES, "big"), frame
            sent = self._send_now(parts) if self._is_direct else 0
            if sent < LENGTH_BYTES + len(frame):
                self._is_direct = False
                self._num_left += 1
                self._loop.call_soon_threadsafe(self._write, b"".join(parts)[sent:])

    def _send_now(self, parts: Sequence[bytes]) -> int:
        """Sends what fits into the socket's buffer without blocking; returns the number of bytes."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError:  # the connection is broken; the event loop notices it too, and ends the calls
            return sum(map(len, parts))

    def _write(self, rest: bytes) -> None:
        if self._is_open and self._transport is not None:
            self._transport.write(rest)
            with self._lock:
                self._num_left -= 1
                self._is_direct = not self._num_left and not self._transport.get_write_buffer_size()


logger = logging.getLogger(f"ray.serve.{__name__}")

TOKEN_BYTES = 32
TOKEN_TIMEOUT_S = 5.0
"""The time that a new connection has for sending the replica's token."""
MOST_UNKNOWN = 256
"""The largest number of connections without a token so far. Each occupies a file descriptor, so more are closed."""


class CallServer:
    """A replica's server for the connections of ingresses, on the replica's event loop."""

    def __init__(self, hop_dtype: HopDtype = "same", record: Deliver[Any] = ignore) -> None:
        """`record`: called on the device thread with the releases that were sent."""
        self._hop_dtype = hop_dtype
        self._record = record
        self.token = secrets.token_hex(TOKEN_BYTES)
        """The secret that ingresses must send first."""
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()
        self.disconnected = asyncio.Event()
        """Set when a connection has ended."""

    async def listen(self, host: StageHost, ip: str) -> Address:
        """Accepts calls on a free port of this IP address until `close`; returns the address for ingresses."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self, host).frames, ip, 0)
        return Address(host=ip, port=self._server.sockets[0].getsockname()[1], token=self.token)

    def deliver(self, releases: list[Release[Any]]) -> None:
        """Sends the releases of the device to the callers. Called on the device thread."""
        for opened, chunk in chunks_by_call(releases, self._hop_dtype):
            opened.reply(chunk)
        self._record(releases)

    async def close(self) -> None:
        """Stops accepting connections, and waits until ingresses disconnect: without open calls, or at their end."""
        if self._server is not None:
            self._server.close()
        while self.connections:
            self.disconnected.clear()
            await self.disconnected.wait()


class _Connection:
    """The connection of one ingress. Calls begin on the event loop, and end there or on the device thread."""

    def __init__(self, server: CallServer, host: StageHost) -> None:
        self.frames = DirectFrames(self._on_frame, self._on_disconnect, self._on_connect, longest=2 * TOKEN_BYTES)
        self._calls: dict[int, OpenCall] = {}
        self._sequences: set[int] = set()
        """The sequences of this connection that have not ended."""
        self._server = server
        self._host = host
        self.is_known = False
        """Whether it has sent the token."""
        self._assignment: Assignment | None = None
        """The assignment of the calls that come next."""

    def _on_connect(self) -> None:
        self._server.connections.add(self)
        self._deadline = asyncio.get_running_loop().call_later(TOKEN_TIMEOUT_S, self.frames.abort)
        if sum(not each.is_known for each in self._server.connections) > MOST_UNKNOWN:
            logger.warning("a connection was closed: %d others have not sent this replica's token", MOST_UNKNOWN)
            self.frames.abort()

    def _on_frame(self, frame: memoryview) -> None:
        if self.is_known:
            self._on_message(frame)
        elif hmac.compare_digest(frame, self._server.token.encode()):
            self.is_known, self.frames.longest = True, MAX_FRAME_BYTES
            self._deadline.cancel()
        else:
            logger.warning("a connection without this replica's token was refused")
            self.frames.abort()

    def _on_message(self, frame: memoryview) -> None:
        match message := decode_from_ingress(frame):
            case StageCall():
                self._begin(message)
            case CancelCall():
                self._cancel(message.serial)
            case EndSequences():
                self._end_sequences(self._sequences.intersection(message.sequences))
            case Assignment():
                self._assignment = message
                try:
                    self._host.follow(message)
                except Exception:  # the calls of that plan will be refused with the reason
                    logger.exception("plan %d cannot be followed", message.epoch)

    def _begin(self, call: StageCall) -> None:
        begun: dict[str, list[SplitRun]] = {call.piece.sample_ids[position]: [] for position in call.traced}
        opened = self._calls[call.serial] = OpenCall(len(call.remaining_s), partial(self._reply, call.serial), begun)
        self._sequences.update(call.sequences)
        try:
            assert self._assignment is not None, "an assignment precedes the first call"
            self._host.submit(call, self._assignment, opened)
        except Exception as error:  # the caller gets the reason, whatever it is
            logger.exception("a call was refused")
            self._calls.pop(call.serial, None)
            self.frames.send(encode(CallRefused(call.serial, repr(error))))

    def _reply(self, serial: int, chunk: Chunk) -> None:
        opened = self._calls.get(serial)
        if opened is None:  # cancelled while the device ran it
            return
        for frame in encode_parts(serial, chunk):
            self.frames.send(frame)
        opened.unsettled -= len(chunk.settled)
        if not opened.unsettled:
            self._calls.pop(serial, None)  # it may be cancelled in the meantime

    def _cancel(self, serial: int) -> None:
        opened = self._calls.pop(serial, None)
        if opened is not None:  # otherwise its last part has just been sent
            self._host.device.forget(opened)

    def _end_sequences(self, sequences: set[int]) -> None:
        if sequences:
            self._sequences -= sequences
            self._host.device.end(sequences)

    def _on_disconnect(self) -> None:
        self._deadline.cancel()
        for serial in tuple(self._calls):
            self._cancel(serial)
        self._end_sequences(set(self._sequences))
        self._server.connections.discard(self)
        self._server.disconnected.set()


def build_runner(
    settings: ServeSettings, device: str, *, clock: Clock, sleep: Callable[[float], None] = time.sleep
) -> Runner[Any]:
    """Returns the runner of a device: the model or, on an emulated device, records or the model at a profile's pace.

    Raises PlanError if the settings contradict the device, and ModelFolderError if the model cannot be read.
    """
    if not find_device(device).emulated:
        return _torch_runner(settings, device)
    card = read_card(Path(settings.model))
    emulated, table = _emulation_of(settings, device, card)
    return PacedRunner(
        _recorded_runner(settings, device, card) if is_recorded(settings, device) else _torch_runner(settings, device),
        table,
        card.ramps,
        time_scale=emulated.time_scale,
        length=emulated.length,
        clock=clock,
        sleep=sleep,
    )


def check_emulated(settings: ServeSettings, device: str, card: ModelCard) -> None:
    """Raises PlanError if a replica on an emulated device could not start."""
    if find_device(device).emulated:
        _emulation_of(settings, device, card)
        if is_recorded(settings, device):
            _recorded_runner(settings, device, card)


def is_recorded(settings: ServeSettings, device: str) -> bool:
    """Whether the exits of a device follow exit records, without torch."""
    emulated = settings.emulated.get(device)
    return emulated is not None and emulated.decisions == "recorded" and find_device(device).emulated


def policy_for(settings: ServeSettings, device: str, spec: PolicySpec | None, ramps: Sequence[int] = ()) -> Any:
    """Returns the policy of a device's runner: an ExitPolicy or, if decisions are recorded, the thresholds.

    Raises PlanError for an `own` policy that cannot be imported, for a policy that cannot decide at these ramps, and
    for recorded decisions with any policy but `recorded`.
    """
    if not is_recorded(settings, device):
        policy = build_policy(spec)
        policy.check_ramps(ramps)
        return policy
    if spec is None:
        return None
    if _records_of(device, spec) != _records_of(device, settings.starting_policy):
        raise PlanError(f"a running replica cannot change its exit records (to {spec.records})")
    return spec.thresholds


def build_policy(spec: PolicySpec | None) -> ExitPolicy:
    """Returns the policy of a plan. Raises PlanError for an `own` policy that cannot be imported."""
    spec = spec or NO_RAMPS
    if spec.records is None:
        return make_policy(spec.name, **spec.settings)
    records = ExitRecords.load(Path(spec.records))
    # Recorded scores are shares already, so no confidences are needed to compute them.
    takes_confidences = "confidences" in kind_of(records.score).takes
    extra: dict[str, Any] = {"confidences": 0.0} if takes_confidences else {}
    judge = make_policy(records.score, thresholds=spec.thresholds, **extra)
    from earlyexit.policies.ensemble import RecordedAnswers

    answers = RecordedAnswers(
        row_of={sample_id: row for row, sample_id in enumerate(records.sample_ids)},
        ramps=records.ramps,
        scores_NR=records.scores_NR,
        answers_NE=records.answers(),
    )
    return make_policy(spec.name, answers=answers, judge=judge)


def warm_up(
    runner: Runner[Any], stages: Sequence[Sequence[Split]], *, clock: Clock, starts: Collection[int] = ()
) -> ObservedTimes:
    """Runs every split of some stages with one input and with a full batch, so that the first request is not slow.

    `starts`: the first blocks of the networks of a cascade; survivors of one network are not run by the next. Returns
    the measured times of batches or, for an emulated device, those of its profile.
    """
    computing = runner.inner if isinstance(runner, PacedRunner) else runner
    times = ObservedTimes()
    times.is_warm_up = True
    for splits in stages:
        _run_splits(computing, splits, ObservedTimes(), clock, starts)  # the times of this cold run are discarded
        if isinstance(runner, PacedRunner):
            for split, size, pieces in _warm_up_batches(runner, splits):
                tokens = int(pieces.lengths_B.sum())
                times.observe(split, size, tokens, *runner.pace.split_s(split, runner.pace.size_of(size, tokens)))
        else:
            _run_splits(computing, splits, times, clock, starts)
    times.is_warm_up = False
    return times


def raise_failures(releases: list[Release[Any]]) -> None:
    """Raises the error of a batch that failed in the warm-up; ignores all other releases."""
    for release in releases:
        if isinstance(release, Failed):
            raise release.error


def _run_splits(
    runner: Runner[Any], splits: Sequence[Split], times: ObservedTimes, clock: Clock, starts: Collection[int]
) -> None:
    device = Device(BatchEngine(splits, times, starts=starts), runner, clock, raise_failures)
    for split, _, pieces in _warm_up_batches(runner, splits):
        members = [
            Member(sample_id=single.sample_ids[0], payload=single, tokens=int(single.lengths_B[0]))
            for single in pieces.singles()
        ]
        device.engine.submit(split.first, members, clock.now_s())
        device.run_until_idle()


def _warm_up_batches(runner: Runner[Any], splits: Sequence[Split]) -> Iterator[tuple[Split, int, Any]]:
    """Yields a batch of one input and a full batch for each split, with their sizes. Token budgets get short texts."""
    for split in splits:
        full = split.batch if split.tokens is None else max(1, min(split.batch, split.tokens // WARM_UP_TOKENS))
        for size in sorted({1, full}):
            yield split, size, runner.warm_up_pieces(split, size)


def _torch_runner(settings: ServeSettings, device: str) -> TorchRunner:
    import torch

    from earlyexit.network.model import TorchRunner
    from earlyexit.network.store import load_network, open_memory, open_network

    torch.set_num_threads(settings.threads_per_replica)
    folder = Path(settings.model)
    torch_device = find_device(device).torch_device
    dtype = getattr(torch, settings.dtype)
    network = load_network(folder, device=torch_device, dtype=dtype, attention=settings.attention)
    segments = open_network(settings.backend, network, folder)
    free_bytes = torch.cuda.mem_get_info()[0] if torch_device == "cuda" else machine_memory()[1]
    memory = open_memory(network, settings.kv_tokens, settings.kv_fill, free_bytes)
    return TorchRunner(network, build_policy(settings.starting_policy), segments, memory)


def _recorded_runner(settings: ServeSettings, device: str, card: ModelCard) -> RecordedRunner:
    path = _records_of(device, settings.starting_policy)
    try:
        return RecordedRunner(ExitRecords.load(Path(path)), card.num_blocks, has_tokens=card.has_tokens)
    except DataError as error:
        raise PlanError(f"{device} answers from {path}: {error}; decisions: computed runs the model") from error


def _records_of(device: str, spec: PolicySpec | None) -> str:
    if spec is None or spec.records is None:
        name = "none" if spec is None else repr(spec.name)
        raise PlanError(f"{device} decides by exit records, so its exit policy must be 'recorded', not {name}")
    return spec.records


def _emulation_of(settings: ServeSettings, device: str, card: ModelCard) -> tuple[EmulatedSettings, LatencyTable]:
    """Returns the settings of an emulated device and its profile; raises PlanError if they do not fit the model."""
    emulated = settings.emulated.get(device)
    if emulated is None:
        raise PlanError(f"{device} has no latency profile; the settings have profiles of {sorted(settings.emulated)}")
    try:
        table = LatencyTable.of_rows(emulated.batch, emulated.block_s, emulated.ramp_s)
        table.check_rows(card.num_blocks, len(card.ramps))
    except (DataError, ValueError) as error:  # rows of different lengths cannot be an array
        raise PlanError(f"the profile of {device}: {error}") from error
    return emulated, table
