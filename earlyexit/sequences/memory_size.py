"""How much a replica keeps of sequences, where somebody says it, and where nobody does."""

from __future__ import annotations

import logging

from earlyexit.named import Fill
from earlyexit.network.chain_network import AnyNetwork, ChainNetwork
from earlyexit.network.piece import Piece
from earlyexit.sequences.memory import PAGE_TOKENS, Memory

logger = logging.getLogger(__name__)

CPU_SHARE, GPU_SHARE = 0.25, 0.8
"""Of the memory that is free once the weights are loaded, what a replica takes where nobody says how much: of a GPU's
the rest is left to what batches need for a moment (vLLM leaves a tenth of all); a machine's replicas share its own."""
MOST_BYTES = 4 << 30
"""That a replica takes of a machine's own memory, where nobody says how much: a hundred thousand tokens of a model of
135 million parameters, more than a few cores can serve."""
MOST_SEQUENCES = 256
"""Of the longest length, for which memory is taken at most where nobody says how much: small models need no more."""


def keeps_sequences(network: AnyNetwork) -> bool:
    """Whether a network keeps anything of sequences from one of their inputs to the next."""
    return not isinstance(network, ChainNetwork) and network.kept_bytes > 0


def open_memory(network: AnyNetwork, tokens: int | None, fill: Fill, free_bytes: int) -> Memory[Piece] | None:
    """Room for so many tokens of sequences, or by what is free; None where a network keeps nothing of any."""
    if isinstance(network, ChainNetwork) or not network.kept_bytes:
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
    """How many tokens a replica keeps where nobody says: by what is free, and by what is ever needed."""
    most_bytes = free_bytes * GPU_SHARE if on_gpu else min(free_bytes * CPU_SHARE, MOST_BYTES)
    return max(PAGE_TOKENS, min(int(most_bytes) // token_bytes, MOST_SEQUENCES * max_length))
