from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import combinations

import pytest

from deployments.wire.messages import LENGTH_BYTES, SHORT_BYTES, Frames

SAID = [b"", b"a", b"", b"bcd", b"0123456789"]


class Stream(asyncio.Transport):
    """What frames are written to; ends when it is told."""

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


class End:
    """One end of a connection, fed by hand; `on_frame` is told of every frame besides."""

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
    """As they are written."""
    end = End()
    for frame in frames:
        end.frames.send(frame)
    return end.stream.written


def test_frames_are_the_same_wherever_the_stream_is_cut() -> None:
    stream = stream_of(SAID)
    for first, second in combinations(range(len(stream) + 1), 2):
        end = End()
        end.feed(*(piece for piece in (stream[:first], stream[first:second], stream[second:]) if piece))
        assert end.heard == SAID, (first, second)


@pytest.mark.parametrize("beyond", [-LENGTH_BYTES - 1, -LENGTH_BYTES, 1 - LENGTH_BYTES, 0, 1])
@pytest.mark.parametrize("first", [1, LENGTH_BYTES, 5, LENGTH_BYTES + len("before"), SHORT_BYTES, SHORT_BYTES + 9])
def test_frames_about_as_long_as_what_is_received_at_a_time_are_heard_among_others(beyond: int, first: int) -> None:
    said = [b"before", (bytes(range(256)) * (SHORT_BYTES // 256) + b"x")[: SHORT_BYTES + beyond], b"", b"after"]
    stream, end = stream_of(said), End(longest=2 * SHORT_BYTES)
    end.feed(stream[:first], stream[first:])
    assert end.heard == said


def test_what_is_kept_of_a_frame_stays_as_it_was() -> None:
    long = b"x" * (2 * SHORT_BYTES)
    stream, end = stream_of([b"first", b"second", b"third", long]), End(longest=len(long))
    end.feed(stream[:7], stream[7:12], stream[12:])
    end.feed(stream_of([b"more", b"y" * len(long)]))
    assert end.heard == [b"first", b"second", b"third", long, b"more", b"y" * len(long)]
    assert all(frame.readonly for frame in end.kept)


@pytest.mark.parametrize("after", [b"", b"abcd"], ids=["its length alone", "content with it"])
@pytest.mark.parametrize("length", [4, 1 << 31, (1 << 32) - 1], ids=["one more", "half", "most"])
def test_a_claimed_length_above_the_limit_ends_the_connection_at_once(length: int, after: bytes) -> None:
    end = End(longest=3)
    end.feed(b"\0\0\0\3abc")  # of the longest length
    assert (end.heard, end.stream.ended) == ([b"abc"], "")
    end.feed(length.to_bytes(LENGTH_BYTES, "big") + after)
    assert (end.heard, end.stream.ended) == ([b"abc"], "aborted")


def test_the_limit_may_be_another_after_any_frame() -> None:
    def allow_more(frame: bytes) -> None:
        end.frames.longest = 5

    end = End(allow_more, longest=1)
    end.feed(stream_of([b"a", b"bcdef"]))
    assert (end.heard, end.stream.ended) == ([b"a", b"bcdef"], "")


@pytest.mark.parametrize("how", ["close", "abort"])
def test_nothing_is_heard_or_said_after_the_end(how: str) -> None:
    def end_at(frame: bytes) -> None:
        if frame == b"last":
            getattr(end.frames, how)()

    end = End(end_at)
    end.feed(stream_of([b"a", b"last", b"b"]), stream_of([b"c"]))
    end.frames.send(b"d")
    assert (end.heard, end.stream.written) == ([b"a", b"last"], b"")


def test_nothing_happens_before_the_connection_is_there() -> None:
    told: list[str] = []
    frames = Frames(lambda _: told.append("frame"), lambda: told.append("end"))
    frames.send(b"a")
    frames.close()
    frames.abort()
    assert told == []
