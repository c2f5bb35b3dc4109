"""Where a device's time goes: computing, gathering, or waiting for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

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


class Meter:
    """Adds up a device's seconds by what it does in them. A span that the host fills slowly holds its pauses too."""

    def __init__(self, mark: Callable[[], Any], between_s: Callable[[Any, Any], float]) -> None:
        self._mark = mark
        self._between_s = between_s
        self._spans: dict[Kind, list[tuple[Any, Any]]] = {"compute": [], "gather": []}

    @contextmanager
    def span(self, kind: Kind) -> Iterator[None]:
        """What is told to the device inside is of this kind."""
        start = self._mark()
        yield
        self._spans[kind].append((start, self._mark()))

    def seconds(self, kind: Kind) -> float:
        """Of all its spans so far."""
        return sum(self._between_s(start, end) for start, end in self._spans[kind])


def meter_of(device: torch.device, clock: Clock) -> Meter:
    """By events on the stream of a GPU; on the CPU, where the host computes, by the clock."""
    if device.type != "cuda":
        return Meter(clock.now_s, lambda start_s, end_s: end_s - start_s)

    def recorded() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships no type for it
        event.record()
        return event

    def between_s(start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return Meter(recorded, between_s)


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
        self.memory = inner.memory

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
