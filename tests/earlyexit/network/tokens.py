"""Inputs of token ids, as a text network takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from earlyexit.engine.queue import Attention
from earlyexit.network.boundary import Encoded, WirePiece, entry_piece
from earlyexit.network.piece import Layout


def of_tokens(token_ids: npt.NDArray[np.int32] | Sequence[int]) -> Encoded:
    return Encoded(len(token_ids), (np.array(token_ids, dtype=np.int32),))


def random_inputs(rng: np.random.Generator, lengths: Sequence[int], *, least: int = 0) -> list[Encoded]:
    """Token ids from `least` to 99."""
    return [of_tokens(rng.integers(least, 100, size=length, dtype=np.int32)) for length in lengths]


def wire_of(encoded: Sequence[Encoded], *, prefix: str = "i") -> WirePiece:
    """Inputs i0, i1, ... before block 0."""
    return entry_piece([f"{prefix}{k}" for k in range(len(encoded))], encoded)


def layout_of(*lengths: int, attention: Attention = "auto") -> Layout:
    return Layout(np.array(lengths, dtype=np.int32), attention=attention)
