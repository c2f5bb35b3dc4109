"""How much memory a replica reserves for sequences, how much they have, and the error of a sequence that is lost.

This needs no torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from earlyexit.errors import SequenceLostError
from earlyexit.named import Fill

if TYPE_CHECKING:
    from earlyexit.engine.device import Memory
    from earlyexit.network.chain_network import AnyNetwork
    from earlyexit.network.piece import Piece

logger = logging.getLogger(__name__)

PAGE_TOKENS = 16
"""The page size of vLLM: on average half a page of each sequence is reserved and never used."""
RETRY_S = 0.05
"""When a lost sequence may begin anew: at once, elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How much of a replica's memory sequences have."""

    sequences: int = 0
    pages: int = 0
    """Reserved now."""
    peak_pages: int = 0
    """Reserved at most, since the start."""
    num_pages: int = 0
    page_tokens: int = 0
    """Tokens of a page."""


def lost(sequence: int, why: str) -> SequenceLostError:
    """Returns the error of a sequence that cannot go on here."""
    return SequenceLostError(f"sequence {sequence} cannot go on here: {why}", retry_after_s=RETRY_S)


CPU_SHARE, GPU_SHARE = 0.25, 0.8
"""Share of the memory free after loading the weights that a replica takes by default. The rest of a GPU's memory is for
batches (vLLM leaves a tenth of all); the replicas of a machine share its memory."""
MOST_BYTES = 4 << 30
"""Most bytes of a machine's own memory that a replica takes by default: a hundred thousand tokens of a model of 135
million parameters, more than a few cores can serve."""
MOST_SEQUENCES = 256
"""Most sequences of the longest length for which memory is taken by default: small models need no more."""


def open_memory(network: AnyNetwork, tokens: int | None, fill: Fill, free_bytes: int) -> Memory[Piece] | None:
    """Returns memory for `tokens` tokens of sequences, None: by what is free. None for networks that keep nothing."""
    from earlyexit.network.model import EarlyExitModel

    if not isinstance(network, EarlyExitModel) or not network.kept_bytes:
        return None
    if tokens is None:
        on_gpu = network.device.type == "cuda"
        tokens = tokens_that_fit(free_bytes, network.kept_bytes, network.max_length, on_gpu=on_gpu)
    memory = network.open_memory(tokens, fill)
    use = memory.use()
    held = use.num_pages * use.page_tokens
    logger.info("keys and values of %d tokens, %.0f MB", held, held * network.kept_bytes / 1e6)
    return memory


def tokens_that_fit(free_bytes: int, token_bytes: int, max_length: int, *, on_gpu: bool) -> int:
    """Returns how many tokens a replica keeps by default: what fits into free memory, and no more than is needed."""
    most_bytes = free_bytes * GPU_SHARE if on_gpu else min(free_bytes * CPU_SHARE, MOST_BYTES)
    return max(PAGE_TOKENS, min(int(most_bytes) // token_bytes, MOST_SEQUENCES * max_length))
