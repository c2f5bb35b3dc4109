"""Messages as bytes, and the frames of a connection."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from msgspec import structs

import earlyexit.errors
from deployments.wire.messages import (
    BUFFER_BYTES,
    LENGTH_BYTES,
    MALFORMED,
    Assignment,
    CallRefused,
    CancelCall,
    Chunk,
    EndSequences,
    Frames,
    ReplyPart,
    SplitRun,
    StageCall,
    Timing,
    decode_from_ingress,
    decode_from_replica,
    encode,
    encode_parts,
)
from earlyexit.engine.queue import OrderSpec
from earlyexit.errors import DeadlineError, ExecutionError, MethodNotAllowedError, OfframpError, StageUnavailableError
from earlyexit.network.boundary import Answer, PackedArray, Split, WirePiece
from optimizer.plans.plan import PolicySpec, Stage

TIMING = Timing(queue_s=0.1, compute_s=1e-9)
TOKENS = WirePiece(
    sample_ids=("a#i.1.0", "b#i.2.0"),
    next_block=0,
    lengths_B=np.array([2, 3], dtype=np.int32),
    tensors=(np.array([101, 7, 101, 8, 2**31 - 1], dtype=np.int32),),
    state_BS=None,
)
FLOAT32 = WirePiece(
    sample_ids=("a", "b"),
    next_block=2,
    lengths_B=np.array([1, 2], dtype=np.int32),
    tensors=(np.array([[0.1, -0.0], [math.inf, math.nan], [1e-45, 3e38]], dtype=np.float32),),
    state_BS=np.array([[1.5], [2.5]], dtype=np.float32),
)
BFLOAT16 = replace(
    FLOAT32,
    tensors=(np.array([[0, 1], [0x7F80, 0xFFFF], [3, 4]], dtype=np.uint16), np.zeros((2, 3, 1), np.uint8)),
    state_BS=np.array([[1, -2], [3, 4]], dtype=np.int64),
)
FLOAT16 = replace(FLOAT32, tensors=(np.array([[0.1, -0.0], [math.inf, math.nan], [6e-8, 65504.0]], dtype=np.float16),))
ASSIGNMENT = Assignment(
    epoch=3,
    slot="split-emulated-V100-1",
    stage=Stage(
        device="emulated:V100",
        replicas=4,
        splits=(
            Split(first=0, end=2, batch=4, ramps=(0, 1), after_answer="stay"),
            Split(first=2, end=4, batch=8, after_answer="stay"),
        ),
    ),
    policy=None,
    dispatch="work-conserving",
)
RUN = SplitRun(first=0, end=2, batch=3, tokens=3, target=4, queue_s=0.25, compute_s=0.5)
TRACED = Timing(queue_s=0.25, compute_s=0.5, runs=(RUN,))
CALL = StageCall(serial=7, piece=TOKENS, remaining_s=(0.25, 1.0), reserve_s=0.125)
CHUNK = Chunk(
    answers=((Answer(sample_id="a", value=3, score=0.1, exit=1), TRACED),),
    early=((Answer(sample_id="é", value=0, score=1.0, exit=0), TIMING),),
    seen=(
        Answer(sample_id="b", exit=1, score=0.75, value=2),
        Answer(sample_id="b", exit=5, score=math.nan, value=1),
    ),
    survivors=FLOAT32,
    survivor_timings=(TIMING, Timing(queue_s=0.0, compute_s=math.inf)),
    lost=(("c", DeadlineError("too late")), ("d", StageUnavailableError("gone", retry_after_s=0.5))),
)


def plain(value: Any) -> Any:
    """Returns a message as tuples, lists and numbers, including types, shapes and bits, for comparisons."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, OfframpError):
        return type(value), str(value), vars(value)
    if isinstance(value, msgspec.Struct):
        return type(value), [plain(getattr(value, name)) for name in value.__struct_fields__]
    if dataclasses.is_dataclass(value):
        return type(value), [plain(getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    return type(value), "nan" if isinstance(value, float) and math.isnan(value) else value


CALLS = {
    "tokens": CALL,
    "float32": structs.replace(CALL, piece=FLOAT32),
    "bfloat16": structs.replace(CALL, piece=BFLOAT16),
    "float16": structs.replace(CALL, piece=FLOAT16),
    "recorded": structs.replace(CALL, piece=replace(TOKENS, tensors=())),
    "no rows": structs.replace(CALL, piece=replace(FLOAT32, tensors=(np.zeros((0, 5), np.float32),))),
    "transposed": structs.replace(CALL, piece=replace(FLOAT32, tensors=(FLOAT32.tensors[0].T,))),
    "every second": structs.replace(CALL, piece=replace(TOKENS, tensors=(TOKENS.tensors[0][::2],))),
    "no deadline": structs.replace(CALL, remaining_s=(math.inf, -1.0), reserve_s=math.inf),
    "probe": structs.replace(CALL, probe=True, counts_as_full=True),
    "traced": structs.replace(CALL, traced=(1,)),
    "sequences": structs.replace(CALL, sequences=(7, 2**62 - 1)),
}
POLICIES = {
    "one threshold": PolicySpec(thresholds=0.4),
    "a threshold per ramp": PolicySpec(name="confidence", thresholds={0: 0.25, 11: 1.0}),
    "records": PolicySpec(name="recorded", thresholds={0: 0.25}, records="/there/records.npz"),
    "an ensemble": PolicySpec(name="entropy", thresholds={5: 0.25}, weights={5: 0.3}),
    "tabi": PolicySpec(name="tabi", c=0.9, k=10.0, weights={5: 0.3}),
    "patience": PolicySpec(name="patience", patience=2),
    "voting": PolicySpec(name="voting", votes=3),
    "own": PolicySpec(name="own", own="here.there:rule"),
}
ASSIGNMENTS = {
    "stays": ASSIGNMENT,
    "deferred": structs.replace(ASSIGNMENT, dispatch="deferred"),
    "another order": structs.replace(ASSIGNMENT, order=OrderSpec(name="das", eta=0.25)),
    **{name: structs.replace(ASSIGNMENT, policy=policy) for name, policy in POLICIES.items()},
}
ENDS = {"cancelled": CancelCall(7), "ended sequences": EndSequences((7, 2**62 - 1))}
REPLIES = {
    "everything": ReplyPart(2**40, CHUNK),
    "nothing": ReplyPart(2**40, Chunk()),
    "float16": ReplyPart(1, Chunk(survivors=FLOAT16, survivor_timings=(TIMING, TIMING))),
    "bfloat16": ReplyPart(1, Chunk(survivors=BFLOAT16, survivor_timings=(TIMING, TIMING))),
    "refused": CallRefused(7, "PlanError('no split')"),
}


@pytest.mark.parametrize(
    "message", [*CALLS.values(), *ASSIGNMENTS.values(), *ENDS.values()], ids=[*CALLS, *ASSIGNMENTS, *ENDS]
)
def test_messages_of_an_ingress_arrive_as_sent(message: StageCall | Assignment | CancelCall | EndSequences) -> None:
    assert plain(decode_from_ingress(encode(message))) == plain(message)


@pytest.mark.parametrize("message", REPLIES.values(), ids=REPLIES)
def test_messages_of_a_replica_arrive_as_sent(message: ReplyPart | CallRefused) -> None:
    assert plain(decode_from_replica(encode(message))) == plain(message)


def error_of(kind: type[Any]) -> OfframpError:
    """Returns an error with a message, and with `retry_after_s` if it has one."""
    try:
        error: OfframpError = kind("why: ü\n")
    except TypeError:
        error = kind("why: ü\n", retry_after_s=1.5)
    return error


def test_every_error_of_a_replica_arrives_as_sent() -> None:
    found = [each for name, each in vars(earlyexit.errors).items() if isinstance(each, type) and name[0] != "_"]
    for kind in found:
        if not issubclass(kind, OfframpError) or kind is MethodNotAllowedError:  # only HTTP has the latter
            continue
        message = ReplyPart(1, Chunk(lost=(("a", error_of(kind)),)))
        assert plain(decode_from_replica(encode(message))) == plain(message)


def test_decoded_arrays_are_read_only_views_of_the_frame() -> None:
    frame = encode(structs.replace(CALL, piece=FLOAT32))
    message = decode_from_ingress(frame)
    assert isinstance(message, StageCall)
    piece = message.piece
    assert piece.state_BS is not None
    arrays = (piece.lengths_B, *piece.tensors, piece.state_BS)
    assert [np.shares_memory(array, np.frombuffer(frame, dtype=np.uint8)) for array in arrays] == [True] * 3
    assert [array.flags.writeable for array in arrays] == [False] * 3


def changed(message: StageCall | Assignment | ReplyPart, *path: str | int, to: Any) -> bytes:
    """Returns the bytes of a message with one value replaced."""
    document = msgspec.msgpack.decode(encode(message))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return msgspec.msgpack.encode(document)


FROM_NO_INGRESS = {
    "nothing": b"",
    "noise": b"\xc1noise",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "cut short": encode(CALL)[:-1],
    "too long": encode(CALL) + b"\0",
    "a list": msgspec.msgpack.encode(["begin"]),
    "unknown kind": msgspec.msgpack.encode({"type": "close", "serial": 1}),
    "field missing": msgspec.msgpack.encode({"type": "forget"}),
    "field of another type": msgspec.msgpack.encode({"type": "forget", "serial": "1"}),
    "a replica's message": encode(ReplyPart(1, CHUNK)),
    "no deadlines": changed(CALL, "remaining_s", to=None),
    "unknown dispatch": changed(ASSIGNMENT, "dispatch", to="lazy"),
    "unknown answer": changed(ASSIGNMENT, "stage", "splits", 0, "after_answer", to="go"),
    "tensor too short": changed(CALL, "piece", "tensors", to=["<i4", [5], b"123"]),
    "tensor of another shape": changed(CALL, "piece", "tensors", to=["<i4", [6], b"1234"]),
    "tensor of objects": changed(CALL, "piece", "tensors", to=["O", [1], b"12345678"]),
    "tensor without a dtype": changed(CALL, "piece", "tensors", to=["spam", [1], b"1234"]),
    "an unknown extension": changed(CALL, "piece", "tensors", to=msgspec.msgpack.Ext(5, b"1234")),
    "no tensor": changed(CALL, "piece", "tensors", to=5),
    # Where a PlanError of __post_init__ would come out instead.
    "no split": changed(ASSIGNMENT, "stage", "splits", 0, "end", to=0),
}
FROM_NO_REPLICA = {
    "nothing": b"",
    "no UTF-8": encode(CallRefused(1, "why")).replace(b"refused", b"refus\xe9d"),
    "noise": b"\xc1noise",
    "an ingress's message": encode(CALL),
    "cut short": encode(ReplyPart(1, CHUNK))[:-1],
    "value of another type": changed(ReplyPart(1, CHUNK), "chunk", "answers", 0, 0, "value", to="yes"),
    "no error": changed(ReplyPart(1, CHUNK), "chunk", "lost", 0, 1, to="late"),
    "half an error": changed(ReplyPart(1, CHUNK), "chunk", "lost", 0, 1, to=["DeadlineError"]),
}


@pytest.mark.parametrize("frame", FROM_NO_INGRESS.values(), ids=FROM_NO_INGRESS)
def test_messages_that_no_ingress_sends_are_refused(frame: bytes) -> None:
    with pytest.raises(MALFORMED):
        decode_from_ingress(frame)


@pytest.mark.parametrize("frame", FROM_NO_REPLICA.values(), ids=FROM_NO_REPLICA)
def test_messages_that_no_replica_sends_are_refused(frame: bytes) -> None:
    with pytest.raises(MALFORMED):
        decode_from_replica(frame)


def test_an_array_answer_is_a_view_of_its_frame() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    answer = Answer(sample_id="a", value=PackedArray.of(array), score=0.5, exit=1)
    frame = encode(ReplyPart(1, Chunk(answers=((answer, TIMING),))))
    part = decode_from_replica(memoryview(frame))
    assert isinstance(part, ReplyPart)
    [(read, _)] = part.chunk.answers
    assert read == answer
    assert isinstance(read.value, PackedArray)
    assert read.value.raw.obj is frame
    assert pickle.loads(pickle.dumps(read)) == answer


class ForeignError(DeadlineError):
    """A subclass of a model's own code."""


@pytest.mark.parametrize("name", ["__delattr__", "annotations", "Exception", "ForeignError"])
def test_an_unknown_error_arrives_as_an_execution_error(name: str) -> None:
    frame = encode(ReplyPart(1, Chunk(lost=(("a", DeadlineError("late")),)))).replace(
        b"\xad" + b"DeadlineError", bytes([0xA0 + len(name)]) + name.encode()
    )
    [(sample_id, error)] = decode_from_replica(frame).chunk.lost  # type: ignore[union-attr] # a part
    assert (sample_id, type(error), str(error)) == ("a", ExecutionError, "late")


def test_an_error_of_a_foreign_subclass_arrives_as_its_base_class() -> None:
    frame = encode(ReplyPart(1, Chunk(lost=(("a", ForeignError("late \udc80")),))))
    [(_, error)] = decode_from_replica(frame).chunk.lost  # type: ignore[union-attr] # a part
    assert (type(error), str(error)) == (DeadlineError, "late ?")


UNSENDABLE = {
    "complex": 1j,
    "integer": 2**70,
    "surrogate": "\udc80",
    "objects": np.array([object()]),
    "object": object(),
}


@pytest.mark.parametrize("value", UNSENDABLE.values(), ids=UNSENDABLE)
def test_only_the_answer_that_cannot_be_sent_is_lost(value: Any) -> None:
    good = Answer(sample_id="good", value=3, score=0.5, exit=2)
    bad = Answer(sample_id="bad", value=value, score=0.5, exit=2)
    whole, rest = map(decode_from_replica, encode_parts(7, Chunk(answers=((good, TIMING), (bad, TIMING)))))
    assert whole == ReplyPart(7, Chunk(answers=((good, TIMING),)))
    assert isinstance(rest, ReplyPart)
    [(sample_id, error)] = rest.chunk.lost
    assert (sample_id, type(error)) == ("bad", ExecutionError)
    assert str(error).startswith("the model's answer cannot be sent: ")


def test_numpy_scalars_are_sent_as_python_numbers() -> None:
    answer = Answer(sample_id="a", value=cast(Any, np.int64(3)), score=float(np.float32(0.5)), exit=2)
    [part] = map(decode_from_replica, encode_parts(7, Chunk(answers=((answer, TIMING),))))
    assert isinstance(part, ReplyPart)
    assert part.chunk.answers == ((replace(answer, value=3), TIMING),)


def test_survivors_that_are_too_large_for_a_frame_are_lost_but_answers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.wire.messages.MAX_FRAME_BYTES", 700)
    answer = Answer(sample_id="good", value=3, score=0.5, exit=2)
    wide = replace(FLOAT32, tensors=(np.zeros((2, 600), dtype=np.float32),))
    chunk = Chunk(answers=((answer, TIMING),), survivors=wide, survivor_timings=(TIMING, TIMING))
    whole, rest = map(decode_from_replica, encode_parts(7, chunk))
    assert whole == ReplyPart(7, Chunk(answers=((answer, TIMING),)))
    assert isinstance(rest, ReplyPart)
    assert [sample_id for sample_id, _ in rest.chunk.lost] == ["a", "b"]


SAID = [b"", b"a", b"", b"bcd", b"0123456789"]


class Stream(asyncio.Transport):
    """A transport that keeps written frames."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = ""

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.written += b"".join(list_of_data)

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


class FedEnd:
    """One end of a connection, whose bytes the test feeds; `on_frame` is called as well."""

    def __init__(self, on_frame: Callable[[bytes], None] = lambda _: None, *, longest: int = 1000) -> None:
        self.kept: list[memoryview] = []
        self.stream = Stream()
        self._on_frame = on_frame
        self.frames = Frames(self._hear, lambda: None, longest=longest)
        self.frames.connection_made(self.stream)

    @property
    def heard(self) -> list[bytes]:
        return [bytes(frame) for frame in self.kept]

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            left = piece
            while left:
                room = self.frames.get_buffer(-1)
                assert room, "asyncio ends a connection whose buffer is full"
                part = left[: len(room)]
                room[: len(part)] = part
                self.frames.buffer_updated(len(part))
                left = left[len(part) :]

    def _hear(self, frame: memoryview) -> None:
        assert len(self.kept) < 10, "frames without end"
        self.kept.append(frame)
        self._on_frame(bytes(frame))


def stream_of(frames: Iterable[bytes]) -> bytes:
    """Returns the bytes of frames."""
    end = FedEnd()
    for frame in frames:
        end.frames.send(frame)
    return end.stream.written


def test_frames_are_the_same_wherever_the_stream_is_cut() -> None:
    stream = stream_of(SAID)
    for first, second in combinations(range(len(stream) + 1), 2):
        end = FedEnd()
        end.feed(*(piece for piece in (stream[:first], stream[first:second], stream[second:]) if piece))
        assert end.heard == SAID, (first, second)


@pytest.mark.parametrize("beyond", [-LENGTH_BYTES - 1, -LENGTH_BYTES, 1 - LENGTH_BYTES, 0, 1])
@pytest.mark.parametrize("first", [1, LENGTH_BYTES, 5, LENGTH_BYTES + len("before"), BUFFER_BYTES, BUFFER_BYTES + 9])
def test_frames_of_about_the_buffer_size_are_received(beyond: int, first: int) -> None:
    said = [b"before", (bytes(range(256)) * (BUFFER_BYTES // 256) + b"x")[: BUFFER_BYTES + beyond], b"", b"after"]
    stream, end = stream_of(said), FedEnd(longest=2 * BUFFER_BYTES)
    end.feed(stream[:first], stream[first:])
    assert end.heard == said


def test_a_kept_frame_is_not_overwritten() -> None:
    long = b"x" * (2 * BUFFER_BYTES)
    stream, end = stream_of([b"first", b"second", b"third", long]), FedEnd(longest=len(long))
    end.feed(stream[:7], stream[7:12], stream[12:])
    end.feed(stream_of([b"more", b"y" * len(long)]))
    assert end.heard == [b"first", b"second", b"third", long, b"more", b"y" * len(long)]
    assert all(frame.readonly for frame in end.kept)


@pytest.mark.parametrize("after", [b"", b"abcd"], ids=["its length alone", "content with it"])
@pytest.mark.parametrize("length", [4, 1 << 31, (1 << 32) - 1], ids=["one more", "half", "most"])
def test_a_claimed_length_above_the_limit_ends_the_connection_at_once(length: int, after: bytes) -> None:
    end = FedEnd(longest=3)
    end.feed(b"\0\0\0\3abc")  # of the longest length
    assert (end.heard, end.stream.ended) == ([b"abc"], "")
    end.feed(length.to_bytes(LENGTH_BYTES, "big") + after)
    assert (end.heard, end.stream.ended) == ([b"abc"], "aborted")


def test_the_limit_may_change_after_any_frame() -> None:
    def allow_more(frame: bytes) -> None:
        end.frames.longest = 5

    end = FedEnd(allow_more, longest=1)
    end.feed(stream_of([b"a", b"bcdef"]))
    assert (end.heard, end.stream.ended) == ([b"a", b"bcdef"], "")


@pytest.mark.parametrize("how", ["close", "abort"])
def test_nothing_is_received_or_sent_after_the_end(how: str) -> None:
    def end_at(frame: bytes) -> None:
        if frame == b"last":
            getattr(end.frames, how)()

    end = FedEnd(end_at)
    end.feed(stream_of([b"a", b"last", b"b"]), stream_of([b"c"]))
    end.frames.send(b"d")
    assert (end.heard, end.stream.written) == ([b"a", b"last"], b"")


def test_nothing_is_sent_before_the_connection_is_open() -> None:
    told: list[str] = []
    frames = Frames(lambda _: told.append("frame"), lambda: told.append("end"))
    frames.send(b"a")
    frames.close()
    frames.abort()
    assert told == []
