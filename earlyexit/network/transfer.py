"""What crosses between a GPU and the host while a batch runs, so that neither waits for the other without need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Wait = Callable[[], None]
"""Returns when the device has done what it was told before."""


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory: itself on the CPU; of a GPU one copy through pinned memory, waited for."""
    return tensor if tensor.device.type != "cuda" else all_to_host((tensor,))[0]


def all_to_host(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of one device in host memory, as `to_host`: all copies are told, then waited for once."""
    device = tensors[0].device
    if device.type != "cuda":
        return tuple(tensors)
    # Not `.cpu()`: a copy to pageable memory goes over a buffer of the driver's, and waits each time.
    copies = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors)
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each, non_blocking=True)
    wait_for(device)
    return copies


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device: itself where it is there; from the host to a GPU through pinned memory, not waited for.

    Torch keeps pinned memory in slots, and gives one to nobody else before the copy from it is over.
    """
    if device.type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    if torch.cuda.is_current_stream_capturing():  # a graph would read the slot when it is another's
        raise RuntimeError("a copy from host memory cannot be captured")
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Return when a GPU has done what the current stream was told; at once on the CPU, which has."""
    if device.type == "cuda":
        mark_cuda(device)()


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
