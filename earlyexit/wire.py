"""What travels between processes: pieces and answers, without torch, so that an ingress need not load it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int32]
"""Tokens per input, (B,)."""
Value = int | float | npt.NDArray[Any]
"""An answer, as its task has it: a label's index, a number, an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an input left with."""

    sample_id: str
    label: int
    score: float
    """Probability of the label, after the exit's temperature; with recorded exits, the recorded score."""
    exit: int
    """The block it left after; the last block's index for inputs that ran the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What an exit said of a probe."""

    sample_id: str
    block: int
    """The exit sits after it; the model's last block stands for the full model."""
    score: float
    """In the policy's unit; of the full model NaN."""
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePiece:
    """A piece as it travels between processes: numpy only, so that neither end needs torch to carry it."""

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths
    values: npt.NDArray[np.generic]
    """Before block 0 token ids, int32 (N,); then the hidden state (N, D), float32 or bfloat16's bits (uint16)."""
    state_BS: npt.NDArray[np.generic] | None
    """The exit policy's state; None before block 0, where the policy's initial state stands for it."""
