"""The messages between ingresses, replicas and the controller, and their encoding as msgpack.

Both sides decode into typed objects, and decoding never runs code from a message.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import pairwise
from operator import attrgetter, iadd
from typing import Any, Final, TypeAlias, cast, get_origin

import msgspec
import numpy as np

import earlyexit.errors
from earlyexit.engine.device import MemoryUse
from earlyexit.engine.engine import Dispatch, TimesRun
from earlyexit.engine.queue import DEFAULT, OrderSpec
from earlyexit.errors import ExecutionError, MethodNotAllowedError, OfframpError, PlanError
from earlyexit.network.boundary import Answer, Split, WirePiece
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage
from profiles.stream import Observations


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a replica accepts calls, and the secret token that callers must send first."""

    host: str
    port: int
    token: str


class Assignment(msgspec.Struct, frozen=True, kw_only=True, tag="host"):
    """The work of a replica under one plan. It precedes the calls under this plan, so no replica can miss a new plan.

    A replica that follows a later plan runs these calls, and keeps its stage.
    """

    epoch: int
    """The epoch of its plan. A replica follows the highest epoch that it has seen."""
    slot: str
    """The name of the stage: its position among the plan's stages on its accelerator type."""
    stage: Stage
    policy: PolicySpec | None
    dispatch: Dispatch
    order: OrderSpec = DEFAULT
    detours: tuple[Split, ...] = ()
    """Networks that the plan does not use. Only probes run their blocks, to observe their answers."""

    @property
    def fills(self) -> bool:
        """Whether calls fill one replica's batch before another replica gets any."""
        return self.dispatch == "filling"

    @property
    def allowed_splits(self) -> tuple[Split, ...]:
        """The splits that calls of this plan may run."""
        return (*self.stage.splits, *self.detours)


def assignments_of(placed: PlacedPlan) -> dict[str, Assignment]:
    """Returns the assignment of every slot of a plan."""
    chains = [chain for chain in placed.plan.chains for _ in chain.stages]
    return {
        slot: Assignment(
            epoch=chain.epoch,
            slot=slot,
            stage=stage,
            policy=chain.policy,
            dispatch=chain.dispatch,
            order=chain.order,
            detours=_detours(chain, stage),
        )
        for chain, (slot, stage) in zip(chains, placed.stage_of.items(), strict=True)
    }


def assignments_on(device: str, plans: Iterable[PlacedPlan]) -> list[Assignment]:
    """Returns the plans' assignments on an accelerator type; of stages with equal splits, only the first."""
    by_splits: dict[tuple[Split, ...], Assignment] = {}
    for placed in plans:
        for assignment in assignments_of(placed).values():
            if assignment.stage.device == device:
                by_splits.setdefault(assignment.stage.splits, assignment)
    return list(by_splits.values())


def _detours(plan: Plan, stage: Stage) -> tuple[Split, ...]:
    """Returns the networks that the plan skips before a stage, each as one split with the batch of the next split."""
    detours, end = [], 0
    for split in plan.splits:
        if split in stage.splits:
            skipped = [bound for bound in plan.networks if end < bound <= split.first]
            for first, bound in pairwise((end, *skipped)):
                detours.append(replace(split, first=first, end=bound, ramps=()))
        end = split.end
    return tuple(detours)


class StageCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="begin"):
    """A batch of inputs, or of survivors, for a stage, under the latest `Assignment` on its connection."""

    serial: int
    """The number of the call in its ingress. Messages about it carry the number."""
    piece: WirePiece
    remaining_s: tuple[float, ...]
    """Seconds until the deadline of each input. These are durations, because machines do not share a clock."""
    reserve_s: float
    """The expected seconds of the stages after this one, plus the slack."""
    probe: bool = False
    """Whether its inputs are probes: they run every ramp and all blocks, even after they were answered."""
    counts_as_full: bool = False
    """Whether its batch may begin beside a running one under the dispatch rule `filling`, whatever its size."""
    traced: tuple[int, ...] = ()
    """Positions of the traced inputs, whose split runs the reply reports."""
    sequences: tuple[int, ...] = ()
    """The sequence number of each input; empty without sequences. Replicas keep their state until `EndSequences`."""


class SplitRun(msgspec.Struct, frozen=True, kw_only=True):
    """One split that an input ran in a stage: the wait in the queue, then the batch."""

    first: int
    end: int
    batch: int
    """Number of inputs in the batch."""
    tokens: int
    """Total tokens of these inputs."""
    target: int
    """The split's planned batch size."""
    queue_s: float
    compute_s: float


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an input's time in a stage was spent."""

    queue_s: float
    compute_s: float
    runs: tuple[SplitRun, ...] = ()
    """The splits that a traced input ran, whose times add up to these; empty for other inputs."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of a stage's streamed reply.

    Every input of the call is in exactly one part: answered, a survivor, or lost. Parts may also hold early answers and
    observations of inputs that continue after their answer.
    """

    answers: tuple[tuple[Answer, Timing], ...] = ()
    early: tuple[tuple[Answer, Timing], ...] = ()
    """Answers of inputs that continue to run after their answer."""
    seen: tuple[Answer, ...] = ()
    """Ramp scores and full-model answers of inputs that continue after their answer."""
    survivors: WirePiece | None = None
    """The survivors of a batch, for the next stage."""
    survivor_timings: tuple[Timing, ...] = ()
    lost: tuple[tuple[str, OfframpError], ...] = ()

    @property
    def settled(self) -> tuple[str, ...]:
        """Sample ids of the inputs that this part settles."""
        survivors = () if self.survivors is None else self.survivors.sample_ids
        answered = tuple(answer.sample_id for answer, _ in self.answers)
        return (*answered, *survivors, *(sample_id for sample_id, _ in self.lost))

    @property
    def separated(self) -> list[Chunk]:
        """The same content divided into one part per input, and one part for all survivors."""
        names = "seen", "early", "answers", "lost"
        parts: list[dict[str, Any]] = [{name: (each,)} for name in names for each in getattr(self, name)]
        if self.survivors is not None:
            parts.append({"survivors": self.survivors, "survivor_timings": self.survivor_timings})
        return [Chunk(**part) for part in parts]


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of the outcomes of inputs, at one or several ingresses."""

    arrived: int = 0
    """Inputs of well-formed requests, including refused inputs."""
    assigned: dict[int, int] = field(default_factory=Counter)
    """Admitted inputs that were answered or dropped, by the number of their last chain in the plan of that time."""
    answered: int = 0
    answered_tokens: int = 0
    """Tokens of answered inputs; inputs without tokens count as 1."""
    in_slo: int = 0
    """Answers within the SLO; all answers if there is no SLO."""
    exits: dict[int, int] = field(default_factory=Counter)
    """Answers by the block after which the input left."""
    drops: dict[str, int] = field(default_factory=Counter)
    """Inputs without an answer, by reason."""
    latencies: dict[int, int] = field(default_factory=Counter)
    """Answers by latency: bucket k holds those from `BUCKET ** k` to `BUCKET ** (k + 1)` seconds."""
    crossings: dict[int, int] = field(default_factory=Counter)
    """Inputs that were passed to another network of the cascade, by its first block (as the next three fields are)."""
    crossing_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Total seconds that these inputs waited at the ingress, including encoding."""
    words: dict[int, int] = field(default_factory=Counter)
    """Words of texts that could be pruned."""
    pruned_words: dict[int, int] = field(default_factory=Counter)
    """Words that were pruned."""


@dataclass(slots=True, kw_only=True)
class Interval(Counts):
    """The counts of all ingresses from `since_s` to `at_s` (wall clock)."""

    since_s: float
    at_s: float

    @property
    def seconds(self) -> float:
        return self.at_s - self.since_s

    @property
    def settled(self) -> int:
        """Inputs that were answered, refused or dropped."""
        return self.answered + sum(self.drops.values())


def total(intervals: Sequence[Interval]) -> Interval | None:
    """Returns the sum of intervals, from the first start to the last end; None without intervals."""
    if not intervals:
        return None
    since_s, at_s = min(each.since_s for each in intervals), max(each.at_s for each in intervals)
    return Interval(since_s=since_s, at_s=at_s, **summed(intervals))


def summed(parts: Sequence[Counts], less: Sequence[Counts] = ()) -> dict[str, Any]:
    """Returns the sum of counts, less the sum of others, by the name of the field."""
    sums: dict[str, Any] = {}
    for name in [each.name for each in fields(Counts)]:
        added, removed = ([getattr(each, name) for each in counts] for counts in (parts, less))
        if isinstance(added[0], int):
            sums[name] = sum(added) - sum(removed)
        else:
            more, fewer = (reduce(iadd, counts, Counter[Any]()) for counts in (added, removed))
            sums[name] = dict(more - fewer)
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLoad:
    """The unanswered inputs of one chain of the current plan, at one ingress."""

    unanswered: int
    cost: float
    """The cost of these inputs, in admission control's unit: inputs or tokens."""
    limit: float
    """The largest cost that admission control allows now; infinite without a limit."""


@dataclass(slots=True, kw_only=True)
class IngressReport(Counts):
    """Counts since the ingress started, and observations since the last report.

    Counts only grow, so the next report makes up for a lost one. Each observation is reported once.
    """

    name: str
    """Unique per ingress process. After a restart the name is new, and counts start at zero."""
    epoch: int
    """The epoch of the plan that it follows."""
    suspended: bool = False
    """Whether it has no plan, and therefore refuses all requests."""
    oldest_epoch: int
    """The epoch of its oldest call in flight; equal to `epoch` if there is no call."""
    unanswered: int
    """Inputs that wait at the ingress or are in flight."""
    waiting: int
    """Unanswered inputs that were not sent to any stage yet."""
    chains: tuple[ChainLoad, ...] = ()
    """The load of each chain of the plan that it follows."""
    probes: Observations | None = None
    """Records of probes, and of inputs that continued after their answer, with wall-clock times; None without any."""


BUCKET = 1.05
"""Ratio of the upper to the lower bound of a latency bucket: a quantile from buckets is at most 5 % off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's state, and its counts since it started, which only grow."""

    slot: str
    """The stage that it hosts; empty until it follows a plan."""
    replica: str
    """Serve's unique id of the replica."""
    node: str
    """Ray's id of its node."""
    pid: int
    device: str
    epoch: int
    waiting: int
    """Inputs queued in its engine now."""
    times: tuple[TimesRun, ...]
    """The batches that ran. Probes are excluded, because they do more work than other inputs."""
    splits: tuple[Mapping[str, Any], ...] = ()
    """The counts of each current split."""
    memory: MemoryUse | None = None
    """Memory that sequences use; None if the network keeps no state of sequences."""


# Differences between successive reports, whose counts only grow


def latency_s(latencies: Mapping[int, int], share: float) -> float | None:
    """Returns a quantile of the latency, as the upper end of its bucket; None without answers."""
    reached, needed = 0, share * sum(latencies.values())
    for bucket in sorted(latencies):
        reached += latencies[bucket]
        if reached >= needed:
            return float(BUCKET ** (bucket + 1))
    return None


def counts_between(
    before: Mapping[str, IngressReport], now: Sequence[IngressReport], since_s: float, at_s: float
) -> Interval | None:
    """Returns the counts of all ingresses since their earlier reports, by name; None without reports or time.

    An ingress without an earlier report started at zero.
    """
    if not before or not now or at_s <= since_s:
        return None
    earlier = [before[report.name] for report in now if report.name in before]
    return Interval(since_s=since_s, at_s=at_s, **summed(now, earlier))


_key_of = attrgetter("first", "end", "ramps", "after_answer", "size", "shared")
"""Returns what identifies a `TimesRun` of a replica."""


def ran_since(before: ReplicaReport | None, now: ReplicaReport) -> tuple[TimesRun, ...]:
    """Returns the batches of a replica between two reports. A replica without an earlier report started at zero."""
    known = {} if before is None else {_key_of(each): each for each in before.times}
    ran = []
    for each in now.times:
        last = known.get(_key_of(each), replace(each, batches=0, tokens=0, seconds=0.0))
        batches, tokens = each.batches - last.batches, each.tokens - last.tokens
        if batches > 0:
            ran.append(replace(each, batches=batches, tokens=tokens, seconds=each.seconds - last.seconds))
    return tuple(ran)


# Frames

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 30
"""Largest frame. A connection that announces a larger one is aborted."""
BUFFER_BYTES = 1 << 15
"""Size of the buffer for short frames. A longer frame is received directly into memory of its own, because hidden
states of images are a hundred times as large, and an `asyncio.Protocol` would copy them three times."""

SILENT_S = 20
"""The time after which a connection breaks whose other machine is silent, because a lost machine does not close it."""
SILENCE_OPTIONS = {
    (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): SILENT_S // 2,
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): SILENT_S // 4,
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): 1000 * SILENT_S,  # while data is not acknowledged, in milliseconds
}
"""Options of sockets for this, by level and name. Not every system has all of them."""


class Frames(asyncio.BufferedProtocol):
    """Either end of a connection, which sends and receives frames. A frame is its length, then that many bytes."""

    def __init__(
        self,
        on_frame: Callable[[memoryview], None],
        on_end: Callable[[], None],
        on_open: Callable[[], None] = lambda: None,
        *,
        longest: int = MAX_FRAME_BYTES,
    ) -> None:
        """All callbacks run on the event loop. `on_end` is called once.

        `on_frame` may keep its frame. The connection is aborted if it raises an error in `MALFORMED`.
        """
        self.longest = longest
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_open = on_open
        self._short = memoryview(bytearray(BUFFER_BYTES))
        self._memory = self._short
        """The receive buffer: the short one, or memory for one long frame and its length."""
        self._received = 0
        """Bytes received into this buffer so far."""
        self._transport: asyncio.Transport | None = None

    def send(self, frame: bytes) -> None:
        """Sends a frame; does nothing once the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((len(frame).to_bytes(LENGTH_BYTES, "big"), frame))

    def close(self) -> None:
        """Closes the connection once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the methods, but not the class
        connection = transport.get_extra_info("socket")
        for (level, name), value in SILENCE_OPTIONS.items():
            if connection is not None and hasattr(socket, name):
                connection.setsockopt(level, getattr(socket, name), value)
        self._on_open()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        left = self._memory[: self._received]
        while (size := self._size_with_length(left)) <= len(left) and self._is_open:
            frame = left[LENGTH_BYTES:size]
            if self._memory is self._short:  # the next frames overwrite this buffer
                frame = memoryview(bytes(frame))
            try:
                self._on_frame(frame.toreadonly())
            except MALFORMED as error:  # from another version, for example: later frames cannot be trusted either
                peer = self._transport and self._transport.get_extra_info("peername")
                logger.warning("%s sent a malformed message: %s", peer, error)
                self.abort()
            left = left[size:]
        if not self._is_open:
            left = left[:0]
        elif size <= len(self._memory) and len(left) == self._received:
            return  # the rest of the frame fits into this buffer
        self._memory = memoryview(bytearray(size)) if self._is_open and size > BUFFER_BYTES else self._short
        self._received = len(left)
        self._memory[: self._received] = left

    def _size_with_length(self, received: memoryview) -> int:
        """Returns the bytes of the next frame with its length, as far as known; aborts if the frame is too long."""
        if len(received) < LENGTH_BYTES:
            return LENGTH_BYTES
        length = int.from_bytes(received[:LENGTH_BYTES], "big")
        if length > self.longest and self._is_open:
            self.abort()
        return LENGTH_BYTES + length

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()


logger = logging.getLogger(f"ray.serve.{__name__}")

RAW = 0
"""The msgpack extension code of an array's bytes."""

ERRORS: Final[Mapping[str, type[OfframpError]]] = {
    each.__name__: each
    for each in vars(earlyexit.errors).values()
    if isinstance(each, type) and issubclass(each, OfframpError) and each is not MethodNotAllowedError
}
"""Errors that are built from a message, and from a `retry_after_s` if the class has one, by class name.

MethodNotAllowedError needs more than a message; only the API raises it."""


class CancelCall(msgspec.Struct, frozen=True, tag="forget"):
    """Cancels a call."""

    serial: int


class EndSequences(msgspec.Struct, frozen=True, tag="end"):
    """Ends sequences: the replica frees their state."""

    sequences: tuple[int, ...]


class ReplyPart(msgspec.Struct, frozen=True, tag="part"):
    """A part of a call's reply. The call ends when its last input is settled."""

    serial: int
    chunk: Chunk


class CallRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Reports that the replica could not start a call."""

    serial: int
    reason: str


def _encode_other(value: object) -> object:
    if isinstance(value, np.ndarray):
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return value.dtype.str, value.shape, msgspec.msgpack.Ext(RAW, raw)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, OfframpError):
        name = next(each.__name__ for each in type(value).__mro__ if ERRORS.get(each.__name__) is each)
        return name, _encodable(str(value)), getattr(value, "retry_after_s", None)
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _encodable(text: str) -> str:
    """Returns the text with lone surrogates, which UTF-8 cannot encode, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _decode_raw(_: int, raw: memoryview) -> memoryview:
    """Returns the array's bytes without a copy."""
    return raw


def _decode_other(type_: type, value: Any) -> object:
    if (get_origin(type_) or type_) is np.ndarray:
        dtype, shape, raw = value
        return np.frombuffer(raw, dtype=dtype).reshape(shape)
    name, message, retry_after_s = value
    error = ERRORS.get(name)
    if error is None:
        return ExecutionError(message)
    options = {} if retry_after_s is None else {"retry_after_s": retry_after_s}
    return error(message, **options)


MALFORMED = msgspec.MsgspecError, UnicodeDecodeError  # the errors of a frame that is not a message
FromIngress: TypeAlias = StageCall | CancelCall | EndSequences | Assignment
FromReplica: TypeAlias = ReplyPart | CallRefused
encode: Callable[[FromIngress | FromReplica], bytes] = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode
"""Returns the bytes of a message, with copies of its arrays."""
decode_from_replica: Callable[[bytes | memoryview], FromReplica] = msgspec.msgpack.Decoder(
    FromReplica, dec_hook=_decode_other, ext_hook=_decode_raw
).decode
"""Decodes a replica's message; its arrays are read-only. Raises `MALFORMED`."""
_INGRESS_DECODER: msgspec.msgpack.Decoder[FromIngress] = msgspec.msgpack.Decoder(
    FromIngress, dec_hook=_decode_other, ext_hook=_decode_raw
)


def encode_parts(serial: int, chunk: Chunk) -> list[bytes]:
    """Encodes a part of a reply as one message, or as several if it cannot be sent as one.

    Inputs whose answers or hidden states cannot be sent are lost with an ExecutionError: a user's task, codec or model
    may return values that have no encoding, or that are too large for a frame.
    """
    try:
        frame = encode(ReplyPart(serial, chunk))
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"the reply has {len(frame)} bytes; a frame holds at most {MAX_FRAME_BYTES}")
        return [frame]
    except Exception as error:  # values come from users' code, which may raise anything
        logger.warning("a part of a reply cannot be sent: %s", _encodable(repr(error)))
        parts = chunk.separated
        if len(parts) > 1:
            return [frame for part in parts for frame in encode_parts(serial, part)]
        lost = ExecutionError(f"the model's answer cannot be sent: {_encodable(str(error))}")
        return [encode(ReplyPart(serial, Chunk(lost=tuple((sample_id, lost) for sample_id in chunk.settled))))]


def decode_from_ingress(frame: bytes | memoryview) -> FromIngress:
    """Decodes an ingress's message; its arrays are read-only. Raises `MALFORMED`."""
    try:
        return _INGRESS_DECODER.decode(frame)
    except PlanError as error:  # a stage or a split contradicts itself
        raise msgspec.ValidationError(str(error)) from error
