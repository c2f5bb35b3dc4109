"""SHA-256 of weights, by which a network is recognised."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn


def weights_sha256(module: nn.Module) -> str:
    """Returns the digest of a module's state: names, types, shapes and numbers."""
    digest = hashlib.sha256()
    for part in weight_bytes(module):
        digest.update(part)
    return digest.hexdigest()


def weight_bytes(module: nn.Module) -> Iterator[bytes | memoryview]:
    """Yields a module's state for a digest."""
    for name, tensor in module.state_dict().items():
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.cpu().reshape(-1).view(torch.uint8).numpy().data  # numpy has not every type of torch's
