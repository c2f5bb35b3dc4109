"""Model folders of experiments: random weights behind the packaged tokenizer."""

from __future__ import annotations

from pathlib import Path

from earlyexit.network.checkpoint import copy_tokenizer, random_model
from earlyexit.network.store import save_model
from earlyexit.tasks.label import LabelTask
from offramp.commands.packaged import resolve_backbone

VOCABULARY = 30522
"""Of the packaged tokenizer."""
LABELS = ("negative", "positive")


def tiny_model(folder: Path, *, name: str, num_blocks: int, hidden_size: int, max_length: int = 128) -> Path:
    """One head, a ramp after every block but the last, two labels."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "num_blocks": num_blocks,
        "num_heads": 1,
        "intermediate_size": hidden_size,
        "max_length": max_length,
    }
    save_model(random_model(sizes, name=name, task=LabelTask(LABELS)), folder)
    copy_tokenizer(resolve_backbone("minilm"), folder)
    return folder


def costless_model(folder: Path) -> Path:
    """One tiny block: what is left is the price of everything around a model."""
    return tiny_model(folder, name="costless", num_blocks=1, hidden_size=16)
