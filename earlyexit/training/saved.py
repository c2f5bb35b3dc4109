"""How far a training run is, in a file, so that an interrupted one goes on where it was."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyexit.signature import Encoded
from earlyexit.tasks.base import Task, ValueArray
from earlyexit.training.options import JointOptions

log = logging.getLogger(__name__)
NOT_OF_THE_RUN = ("progress", "saved")
"""Options on which no weight hangs."""


def fingerprint(
    weights: Mapping[str, Tensor], task: Task, encoded: Iterable[Encoded], targets: ValueArray, options: JointOptions
) -> str:
    """What two runs share that go the same way: the weights to begin with, task, rows, right answers, options."""
    digest = hashlib.sha256()
    chosen = {each.name: getattr(options, each.name) for each in fields(options) if each.name not in NOT_OF_THE_RUN}
    digest.update(repr(sorted(chosen.items())).encode())
    digest.update(repr(task.spec()).encode())
    for name, tensor in weights.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    for each in encoded:
        for values in each.tensors:
            digest.update(np.ascontiguousarray(values).data)
    digest.update(np.ascontiguousarray(targets).data)
    return digest.hexdigest()


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """In one step: who is interrupted meanwhile finds the state before."""
    half = path.with_suffix(".part")
    torch.save(dict(state), half)
    half.replace(path)


def saved_state(path: Path, run: str, device: torch.device) -> dict[str, Any] | None:
    """What `save_state` wrote of the run with this fingerprint; None where there is nothing, or of another run."""
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch's reader and pickle's fail in ways of their own
        log.warning("%s cannot be read, training begins anew: %s", path, error)
        return None
    if not isinstance(state, dict) or state.get("run") != run:
        log.warning("%s is of another training run, this one begins anew", path)
        return None
    return state
