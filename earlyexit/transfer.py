"""What crosses between a GPU and the host while a batch runs, so that neither waits for the other without need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Wait = Callable[[], None]
"""Returns when the device has done what it was told before."""


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory: itself on the CPU; of a GPU one copy through pinned memory, waited for."""
    if tensor.device.type != "cuda":
        return tensor
    # Not `.cpu()`: a copy to pageable memory goes over a buffer of the driver's.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    mark_cuda(tensor.device)()
    return copy


def mark_cuda(device: torch.device) -> Wait:
    """Mark the end of what the current stream was told so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch ships no type for it
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def when_computed(items: Iterable[T], mark: Callable[[], Wait]) -> Iterator[T]:
    """Give each item when the device has computed it; by then it has been told the next one's work too.

    Taking an item from `items` tells the device what it needs, without waiting.
    """
    waiting: tuple[T, Wait] | None = None
    for item in items:
        told = item, mark()
        if waiting is not None:
            yield _computed(*waiting)
        waiting = told
    if waiting is not None:
        yield _computed(*waiting)


def _computed(item: T, wait: Wait) -> T:
    wait()
    return item
