"""Model folders that experiments need and nobody trains."""

from __future__ import annotations

from pathlib import Path

from earlyexit.checkpoint import copy_tokenizer, random_model
from earlyexit.store import save_model
from offramp.jobs.training import resolve_backbone

VOCABULARY = 30522
"""Of the packaged tokenizer."""


def costless_model(folder: Path) -> Path:
    """One tiny block with random weights: what is left is the price of everything around a model."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_blocks": 1,
        "num_heads": 1,
        "intermediate_size": 16,
        "max_length": 128,
    }
    save_model(random_model(sizes, name="costless"), folder)
    copy_tokenizer(resolve_backbone("minilm"), folder)
    return folder
