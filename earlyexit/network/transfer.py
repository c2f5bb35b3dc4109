"""Copies between a GPU and the host while a batch runs, so that neither waits for the other without need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Wait = Callable[[], None]
"""Returns when the device has done its earlier work."""


def to_host(tensor: Tensor) -> Tensor:
    """Returns the tensor in host memory: itself on the CPU; from a GPU a copy through pinned memory, after waiting."""
    return tensor if tensor.device.type != "cuda" else all_to_host((tensor,))[0]


def all_to_host(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns tensors of one device in host memory, as `to_host`; all copies are started before a single wait."""
    device = tensors[0].device
    if device.type != "cuda":
        return tuple(tensors)
    # Not `.cpu()`: a copy to pageable memory goes through a buffer of the driver's and waits each time.
    copies = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors)
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each, non_blocking=True)
    wait_for(device)
    return copies


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device: itself if it is there; else a copy, to a GPU through pinned memory without a wait.

    Torch keeps pinned memory in slots, and does not reuse a slot before the copy from it is over.
    """
    if device.type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    if torch.cuda.is_current_stream_capturing():  # a graph would read the slot after its reuse
        raise RuntimeError("a copy from host memory cannot be captured")
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done the work of the current stream; returns at once on the CPU."""
    if device.type == "cuda":
        mark_cuda(device)()


def mark_cuda(device: torch.device) -> Wait:
    """Mark the end of the current stream's work so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch ships no type for it
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def when_computed(items: Iterable[T], mark: Callable[[], Wait]) -> Iterator[T]:
    """Yields each item when the device has computed it; by then the next item's work has been started too.

    Taking an item from `items` starts its work on the device, without waiting.
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
