"""Where a device's time goes: computing, gathering, or waiting for the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from earlyexit.clock import Clock
from earlyexit.engine import Batch
from earlyexit.member import Member
from earlyexit.network import SegmentRunner
from earlyexit.piece import Piece, Tensors, fuse
from earlyexit.release import Step
from earlyexit.runner import TorchRunner
from earlyexit.split import Segment, Split
from earlyexit.wire import WirePiece

Kind = Literal["compute", "gather"]


class Meter(Protocol):
    """Adds up a device's seconds by what it does in them."""

    def span(self, kind: Kind) -> AbstractContextManager[None]:
        """What is told to the device inside is of this kind."""
        ...

    def seconds(self, kind: Kind) -> float:
        """Of all its spans so far."""
        ...


class CudaMeter:
    """By events on the stream. A span that the host fills slowly holds its pauses too."""

    def __init__(self) -> None:
        self._spans: dict[Kind, list[tuple[Any, Any]]] = {"compute": [], "gather": []}

    @contextmanager
    def span(self, kind: Kind) -> Iterator[None]:
        start, end = _timing_event(), _timing_event()
        start.record()
        yield
        end.record()
        self._spans[kind].append((start, end))

    def seconds(self, kind: Kind) -> float:
        torch.cuda.synchronize()
        return float(sum(start.elapsed_time(end) for start, end in self._spans[kind])) / 1000


class HostMeter:
    """By the clock: on the CPU the host computes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: dict[Kind, float] = {"compute": 0.0, "gather": 0.0}

    @contextmanager
    def span(self, kind: Kind) -> Iterator[None]:
        started_s = self._clock.now_s()
        yield
        self._seconds[kind] += self._clock.now_s() - started_s

    def seconds(self, kind: Kind) -> float:
        return self._seconds[kind]


class MeteredSegments:
    """Segments whose time counts as computing, with all copies to and from a graph's own tensors."""

    def __init__(self, inner: SegmentRunner, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        with self._meter.span("compute"):
            return self._inner.run(segment, piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeteredPiece(Piece):
    """A piece whose selecting counts as gathering."""

    meter: Meter

    def select(self, keep: Sequence[int]) -> Piece:
        with self.meter.span("gather"):
            return Piece.select(self, keep)  # super() does not know a dataclass with slots


class MeteredRunner:
    """A runner whose fusing, and the selecting of survivors, count as gathering."""

    def __init__(self, inner: TorchRunner, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def from_wire(self, wire: WirePiece) -> Piece:
        return self._inner.from_wire(wire)

    def run(self, batch: Batch[Piece]) -> Iterator[Step[Piece]]:
        with self._meter.span("gather"):
            fused = fuse([member.payload for member in batch.members])
        piece = MeteredPiece(
            sample_ids=fused.sample_ids,
            next_block=fused.next_block,
            lengths_B=fused.lengths_B,
            tensors=fused.tensors,
            state_BS=fused.state_BS,
            meter=self._meter,
        )
        return self._inner.run(replace(batch, members=(Member(sample_id="all", payload=piece),)))

    def follow(self, policy: Any) -> None:
        self._inner.follow(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        self._inner.prepare(splits)

    def warm_up_pieces(self, split: Split, size: int) -> Piece:
        return self._inner.warm_up_pieces(split, size)


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships no type for it
