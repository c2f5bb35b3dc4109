"""How much memory a replica reserves for sequences, by its settings or by what is free."""

from __future__ import annotations

import logging

from earlyexit.engine.device import Memory
from earlyexit.named import Fill
from earlyexit.network.chain_network import AnyNetwork, ChainNetwork
from earlyexit.network.piece import Piece
from earlyexit.sequences.memory import PAGE_TOKENS

logger = logging.getLogger(__name__)

CPU_SHARE, GPU_SHARE = 0.25, 0.8
"""Share of the memory free after loading the weights that a replica takes by default. The rest of a GPU's memory is for
batches (vLLM leaves a tenth of all); the replicas of a machine share its memory."""
MOST_BYTES = 4 << 30
"""Most bytes of a machine's own memory that a replica takes by default: a hundred thousand tokens of a model of 135
million parameters, more than a few cores can serve."""
MOST_SEQUENCES = 256
"""Most sequences of the longest length for which memory is taken by default: small models need no more."""


def keeps_sequences(network: AnyNetwork) -> bool:
    """Whether a network keeps anything of sequences between their inputs."""
    return not isinstance(network, ChainNetwork) and network.kept_bytes > 0


def open_memory(network: AnyNetwork, tokens: int | None, fill: Fill, free_bytes: int) -> Memory[Piece] | None:
    """Returns memory for `tokens` tokens of sequences, None: by what is free. None for networks that keep nothing."""
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
    """Returns how many tokens a replica keeps by default: what fits into free memory, and no more than is needed."""
    most_bytes = free_bytes * GPU_SHARE if on_gpu else min(free_bytes * CPU_SHARE, MOST_BYTES)
    return max(PAGE_TOKENS, min(int(most_bytes) // token_bytes, MOST_SEQUENCES * max_length))
