"""SHA-256 of weights: what tells that a network is still the one it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn


def weights_sha256(module: nn.Module) -> str:
    """Of all that a module's state holds: names, types, shapes and numbers."""
    digest = hashlib.sha256()
    for part in weight_bytes(module):
        digest.update(part)
    return digest.hexdigest()


def weight_bytes(module: nn.Module) -> Iterator[bytes | memoryview]:
    """What a module's state holds, for a digest."""
    for name, tensor in module.state_dict().items():
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.cpu().reshape(-1).view(torch.uint8).numpy().data  # numpy has not every type of torch's
