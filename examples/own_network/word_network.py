"""An example of a custom network in plain PyTorch: an embedding and four convolutions over words.

Offramp needs a function that returns a `PaddedBackbone` with an embedding and a list of blocks. A ramp may follow every
block. No block may let padding change an input's values; training refuses a network that does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from earlyexit.families.own import PaddedBackbone


class WordEmbedding(nn.Module):
    """Maps token ids (B, T) to vectors (B, T, D)."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)

    def forward(self, token_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        vectors_BTD: Tensor = self.words(token_ids_BT)
        return vectors_BTD


class ConvolutionBlock(nn.Module):
    """Combines every word with its two neighbours: (B, T, D) to (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.convolution = nn.Conv1d(width, width, kernel_size=3, padding=1)

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        # The last word's neighbour is padding. It must count as zeros, as it does when the input runs alone.
        words_BTD = self.norm(hidden_BTD) * mask_BT[:, :, None]
        mixed_BTD = self.convolution(words_BTD.transpose(1, 2)).transpose(1, 2)
        result: Tensor = hidden_BTD + torch.relu(mixed_BTD)
        return result


def build(vocab_size: int = 30522, width: int = 48, depth: int = 4, max_length: int = 64) -> PaddedBackbone:
    """Returns the network (`word_network:build`). Training calls it without arguments, loading with `config`."""
    return PaddedBackbone(
        embed=WordEmbedding(vocab_size, width),
        blocks=[ConvolutionBlock(width) for _ in range(depth)],
        max_length=max_length,
        vocab_size=vocab_size,
        config={"vocab_size": vocab_size, "width": width, "depth": depth, "max_length": max_length},
    )
