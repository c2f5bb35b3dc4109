"""The messages between ingresses, replicas and the controller, and their encoding as msgpack.

They are typed on both sides, and nothing in them can run code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Final, cast, get_origin

import msgspec
import numpy as np

import earlyexit.errors
from earlyexit.engine.device import MemoryUse
from earlyexit.engine.engine import Dispatch
from earlyexit.engine.queue import DEFAULT, OrderSpec
from earlyexit.engine.times import TimesRun
from earlyexit.errors import ExecutionError, MethodNotAllowedError, OfframpError, PlanError
from earlyexit.network.boundary import Answer, ExitResult, Split, WirePiece
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, PolicySpec, Stage
from profiles.stream import Observations


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a replica takes calls, and the secret that callers must send."""

    host: str
    port: int
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a replica does under one plan. It travels with every call, so that no replica can miss it."""

    epoch: int
    """The plan it belongs to; a replica follows the highest it has seen."""
    slot: str
    """The name of the stage: its place among the plan's stages on its accelerator type."""
    stage: Stage
    policy: PolicySpec | None
    dispatch: Dispatch
    order: OrderSpec = DEFAULT
    detours: tuple[Split, ...] = ()
    """Networks that the plan does not use. Only probes run their blocks, to observe what they would answer."""

    @property
    def fills(self) -> bool:
        """Whether inputs fill one replica's batch before another replica gets any."""
        return self.dispatch == "filling"

    @property
    def known(self) -> tuple[Split, ...]:
        """The splits that calls of this plan may ask for."""
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
    """Returns the assignments of some plans on an accelerator type; stages with equal splits appear once."""
    found: dict[tuple[Split, ...], Assignment] = {}
    for assignment in [each for placed in plans for each in assignments_of(placed).values()]:
        if assignment.stage.device == device:
            found.setdefault(assignment.stage.splits, assignment)
    return list(found.values())


def _detours(plan: Plan, stage: Stage) -> tuple[Split, ...]:
    """Returns the networks left out before a stage's, each as one split with the batches of the next network."""
    found, end = [], 0
    for split in plan.splits:
        if split in stage.splits:
            skipped = [bound for bound in plan.networks if end < bound <= split.first]
            for first, bound in pairwise((end, *skipped)):
                found.append(replace(split, first=first, end=bound, ramps=()))
        end = split.end
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCall:
    """A batch of inputs, or of survivors, for a stage."""

    piece: WirePiece
    remaining_s: tuple[float, ...]
    """Per input, the seconds left until its deadline; durations, because machines do not share a clock."""
    reserve_s: float
    """The seconds that the stages after this one are expected to take, and the slack."""
    assignment: Assignment
    """What the stage does under the sender's plan."""
    probe: bool = False
    """Whether its inputs are probes: every ramp looks at them, and they run to the model's end even when answered."""
    traced: tuple[int, ...] = ()
    """Positions of the inputs whose runs are to be reported."""
    sequences: tuple[int, ...] = ()
    """Per input, the number of its sequence, which the replica keeps until the sequence is ended; empty for inputs that
    belong to no sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How an input's time in a stage was spent."""

    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRun:
    """One split that an input ran in a stage: its wait, then its batch."""

    first: int
    end: int
    batch: int
    """Inputs of the batch."""
    tokens: int
    """The tokens of these inputs together."""
    target: int
    """The split's batch size."""
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingOn:
    """Survivors for the next stage."""

    piece: WirePiece
    timings: tuple[Timing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One part of a stage's streamed reply.

    Every input of the call is in exactly one part: answered, going on, or lost. Early answers and observations of
    inputs that stay come in addition.
    """

    answers: tuple[tuple[Answer, Timing], ...] = ()
    early: tuple[tuple[Answer, Timing], ...] = ()
    """Answers of inputs that stay inside the model."""
    seen: tuple[ExitResult, ...] = ()
    """What ramps and the full model say of inputs that stay."""
    going_on: GoingOn | None = None
    lost: tuple[tuple[str, OfframpError], ...] = ()
    runs: tuple[tuple[str, tuple[SplitRun, ...]], ...] = ()
    """The splits that traced inputs ran, which add up to their `Timing`."""

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The timings of the inputs that it settles, without lost ones."""
        return tuple(timing for _, timing in self.answers) if self.going_on is None else self.going_on.timings

    @property
    def settled(self) -> tuple[str, ...]:
        """Sample ids of the inputs that this part settles."""
        survivors = () if self.going_on is None else self.going_on.piece.sample_ids
        answered = tuple(answer.sample_id for answer, _ in self.answers)
        return (*answered, *survivors, *(sample_id for sample_id, _ in self.lost))

    @property
    def apart(self) -> list[Chunk]:
        """The same as several parts: one per input, but one for all survivors."""
        names = "seen", "early", "answers", "lost"
        alone: list[dict[str, Any]] = [{name: (each,)} for name in names for each in getattr(self, name)]
        alone += [] if self.going_on is None else [{"going_on": self.going_on}]
        return [Chunk(**part, runs=self.runs) for part in alone]

    @property
    def num_inputs(self) -> int:
        """Number of inputs that this part settles."""
        survivors = 0 if self.going_on is None else len(self.going_on.timings)
        return len(self.answers) + survivors + len(self.lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of inputs at one or several ingresses."""

    arrived: int = 0
    """Inputs of well-formed requests, including refused ones."""
    answered: int = 0
    answered_tokens: int = 0
    """The tokens of answered inputs; 1 each where inputs have no tokens."""
    in_slo: int = 0
    """Answers within the SLO; all of them where there is none."""
    exits: Mapping[int, int] = field(default_factory=dict)
    """Answers by the block they left after, under the present epoch."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Inputs without an answer, by reason."""
    latencies: Mapping[int, int] = field(default_factory=dict)
    """Answers by latency: bucket k holds those from `BUCKET ** k` to `BUCKET ** (k + 1)` seconds."""
    crossings: Mapping[int, int] = field(default_factory=dict)
    """Inputs that went on to another network of the chain, by its first block; the next three are by that block too."""
    crossing_s: Mapping[int, float] = field(default_factory=dict)
    """The total seconds that they waited at the ingress for it, including encoding."""
    words: Mapping[int, int] = field(default_factory=dict)
    """The words of texts that could be pruned."""
    pruned_words: Mapping[int, int] = field(default_factory=dict)
    """The pruned words among them."""


COUNTED = tuple(each.name for each in fields(Counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressReport(Counts):
    """Counts since the ingress started, and what was observed since the last report.

    Counts only grow, so a lost report costs nothing but time. Observations are handed over once.
    """

    name: str
    """Unique per ingress process: another name means that the counts begin at zero."""
    epoch: int
    """The plan it follows."""
    suspended: bool = False
    """Whether it has no plan, and refuses everything."""
    oldest_epoch: int
    """The epoch by which its oldest call under way was sent; its own where there is none."""
    at_s: float
    """Wall clock."""
    unanswered: int
    """Inputs that wait here or are under way now."""
    unanswered_tokens: int = 0
    """The tokens of these inputs."""
    waiting: int
    """The inputs among them that were not sent to a stage yet."""
    oldest_s: dict[int, float] = field(default_factory=dict)
    """The longest wait so far, by length class: the most tokens of its inputs."""
    probes: Observations | None = None
    """Records of probes, and of inputs that stayed, at wall-clock times; None where there were none."""


BUCKET = 1.05
"""Ratio of a latency bucket's ends: a quantile read from buckets is at most 5 % off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica has done since its start; counts only grow."""

    slot: str
    """The stage that it hosts; empty before it follows a plan."""
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
    """The batches that ran, without probes, which do more work than other inputs."""
    memory: MemoryUse | None = None
    """The memory that sequences use; None where the network keeps nothing of sequences."""


# Frames, and what they hold


LENGTH_BYTES = 4
LONGEST = 1 << 30
"""The most bytes of a frame; a connection that announces more is ended."""
SHORT_BYTES = 1 << 15
"""Received at a time. What a frame has beyond them is received into memory of its own: hidden states of a batch of
images are a hundred times that, and an `asyncio.Protocol` would have them copied three times."""


class Frames(asyncio.BufferedProtocol):
    """Either end of a connection: sends and receives frames of bytes, each behind its length."""

    def __init__(
        self,
        on_frame: Callable[[memoryview], None],
        on_end: Callable[[], None],
        on_open: Callable[[asyncio.Transport], None] = lambda _: None,
        *,
        longest: int = LONGEST,
    ) -> None:
        """`on_frame` may keep its frame; it and `on_end`, which is called once, are called on the event loop."""
        self.longest = longest
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_open = on_open
        self._short = memoryview(bytearray(SHORT_BYTES))
        self._memory = self._short
        """What is received into: the short memory, or memory for one long frame and its length."""
        self._received = 0
        """Bytes in this memory so far."""
        self._transport: asyncio.Transport | None = None

    def send(self, frame: bytes) -> None:
        """Send a frame; does nothing once the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((len(frame).to_bytes(LENGTH_BYTES, "big"), frame))

    def close(self) -> None:
        """End the connection after what was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, but not the class
        self._on_open(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        left = self._memory[: self._received]
        while (whole := self._whole(left)) <= len(left) and self._is_open:
            frame = left[LENGTH_BYTES:whole]
            if self._memory is self._short:  # which the next frames overwrite
                frame = memoryview(bytes(frame))
            self._on_frame(frame.toreadonly())
            left = left[whole:]
        if not self._is_open:
            left = left[:0]
        elif whole <= len(self._memory) and len(left) == self._received:
            return  # the rest of a frame is still to come
        self._memory = memoryview(bytearray(whole)) if self._is_open and whole > SHORT_BYTES else self._short
        self._received = len(left)
        self._memory[: self._received] = left

    def _whole(self, begun: memoryview) -> int:
        """Returns the bytes of a frame and its length, or of the length alone; aborts if the frame is too long."""
        if len(begun) < LENGTH_BYTES:
            return LENGTH_BYTES
        length = int.from_bytes(begun[:LENGTH_BYTES], "big")
        if length > self.longest and self._is_open:
            self.abort()
        return LENGTH_BYTES + length

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()


logger = logging.getLogger(f"ray.serve.{__name__}")

RAW = 0
"""The extension code of an array's memory."""


ERRORS: Final[Mapping[str, type[OfframpError]]] = {
    each.__name__: each
    for each in vars(earlyexit.errors).values()
    if isinstance(each, type) and issubclass(each, OfframpError) and each is not MethodNotAllowedError
}
"""The project's errors that are built from a message, and a `retry_after_s` where the class has one.

MethodNotAllowedError takes more than a message; only the API raises it."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A call begins."""

    serial: int
    """Names the call on its connection."""
    call: StageCall


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """A call was given up."""

    serial: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """Sequences are over: whatever the replica keeps of them is free."""

    sequences: tuple[int, ...]


class Host(msgspec.Struct, frozen=True, tag="host"):
    """The replica has another stage, or another plan, from now on. Calls say so too, but a replica may get none."""

    assignment: Assignment


class Part(msgspec.Struct, frozen=True, tag="part"):
    """A part of a call's reply; the one that settles the last of its inputs ends it."""

    serial: int
    chunk: Chunk


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A call that the replica could not begin."""

    serial: int
    reason: str


def _encode_other(value: object) -> object:
    if isinstance(value, np.ndarray):
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return value.dtype.str, value.shape, msgspec.msgpack.Ext(RAW, raw)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, OfframpError):
        known = next((each.__name__ for each in type(value).__mro__ if ERRORS.get(each.__name__) is each), None)
        return known or ExecutionError.__name__, _encodable(str(value)), getattr(value, "retry_after_s", None)
    raise NotImplementedError(f"a {type(value).__name__} does not travel")


def _encodable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot hold, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _decode_raw(code: int, raw: memoryview) -> memoryview:
    """In the frame, where bytes would be copied out of it."""
    if code != RAW:
        raise ValueError(f"there is no extension {code}")
    return raw


def _decode_other(type_: type, value: Any) -> object:
    if (get_origin(type_) or type_) is np.ndarray:
        dtype, shape, raw = value
        return np.frombuffer(raw, dtype=dtype).reshape(shape)
    name, message, retry_after_s = value
    error = ERRORS.get(name)
    if error is None:
        return ExecutionError(message)
    return error(message) if retry_after_s is None else error(message, retry_after_s=retry_after_s)  # type: ignore[call-arg] # those that have one take one


MalformedError = msgspec.MsgspecError
encode: Callable[[Begin | Forget | End | Host | Part | Refused], bytes] = msgspec.msgpack.Encoder(
    enc_hook=_encode_other
).encode
"""Returns a message's bytes; arrays are copied into them."""
from_replica: Callable[[bytes | memoryview], Part | Refused] = msgspec.msgpack.Decoder(
    Part | Refused, dec_hook=_decode_other, ext_hook=_decode_raw
).decode
"""Decodes a replica's message; its arrays are read-only. Raises MalformedError."""
_FROM_INGRESS = msgspec.msgpack.Decoder(Begin | Forget | End | Host, dec_hook=_decode_other, ext_hook=_decode_raw)


def encode_parts(serial: int, chunk: Chunk) -> list[bytes]:
    """The bytes of a part, as one message, or as several where it cannot be sent whole.

    Inputs whose answers or hidden states cannot be sent are lost, each with an ExecutionError: an own task, codec or
    model may return values that have no encoding, or more than a frame holds.
    """
    try:
        frame = encode(Part(serial, chunk))
        if len(frame) > LONGEST:
            raise ValueError(f"a reply of {len(frame)} bytes; a frame holds at most {LONGEST}")
        return [frame]
    except Exception as error:  # the values come from code that is not ours: any of it may raise
        logger.warning("a part of a reply cannot be sent: %s", _encodable(repr(error)))
        if len(parts := chunk.apart) > 1:
            return [frame for part in parts for frame in encode_parts(serial, part)]
        lost = ExecutionError(f"the model's answer cannot be sent: {_encodable(str(error))}")
        return [encode(Part(serial, Chunk(lost=tuple((sample_id, lost) for sample_id in chunk.settled))))]


def from_ingress(frame: bytes | memoryview) -> Begin | Forget | End | Host:
    """Decodes an ingress's message; its arrays are read-only. Raises MalformedError."""
    try:
        message: Begin | Forget | End | Host = _FROM_INGRESS.decode(frame)
    except PlanError as error:  # what a stage or a split says of itself
        raise MalformedError(str(error)) from error
    return message
