"""A network of one's own: an embedding and four convolutions over words, plain PyTorch, cut and left after any of them.

What it takes: a function that makes it, `PaddedBackbone` around an embedding and a list of blocks, and blocks that
keep the padding out of what they compute. Training refuses a network that does not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from earlyexit.families.own import PaddedBackbone


class WordEmbedding(nn.Module):
    """Token ids (B, T) to vectors (B, T, D)."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)

    def forward(self, token_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        vectors_BTD: Tensor = self.words(token_ids_BT)
        return vectors_BTD


class ConvolutionBlock(nn.Module):
    """Every word looks at the two beside it; (B, T, D) to (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.convolution = nn.Conv1d(width, width, kernel_size=3, padding=1)

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        # The word at an input's end looks at the padding behind it: what is there must be what is there when the
        # input is alone, and that is nothing.
        words_BTD = self.norm(hidden_BTD) * mask_BT[:, :, None]
        mixed_BTD = self.convolution(words_BTD.transpose(1, 2)).transpose(1, 2)
        result: Tensor = hidden_BTD + torch.relu(mixed_BTD)
        return result


def build(vocab_size: int = 30522, width: int = 48, depth: int = 4, max_length: int = 64) -> PaddedBackbone:
    """Named on the command line as word_network:build; called without arguments to train, with `config` to load."""
    return PaddedBackbone(
        embed=WordEmbedding(vocab_size, width),
        blocks=[ConvolutionBlock(width) for _ in range(depth)],
        max_length=max_length,
        vocab_size=vocab_size,
        config={"vocab_size": vocab_size, "width": width, "depth": depth, "max_length": max_length},
    )
