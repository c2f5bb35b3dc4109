"""What is measured, on which model and device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from earlyexit.errors import InputError
from experiments.gpu.exits import Decisions, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """An encoder with random weights."""

    name: str
    config: Mapping[str, int]
    """What differs from BERT-base."""
    length: int
    """Tokens of every input."""

    @property
    def num_blocks(self) -> int:
        return self.config["num_blocks"]


MODELS = (
    ModelSize(name="bert-base", config={"num_blocks": 12}, length=128),
    ModelSize(
        name="bert-large",
        config={"num_blocks": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096},
        length=128,
    ),
)
TINY = {"hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "vocab_size": 100}
DRY_MODELS = tuple(
    ModelSize(name=f"{model.name}-dry", config={**TINY, "num_blocks": model.num_blocks}, length=8) for model in MODELS
)
"""As deep as the real ones, and next to no work: only that everything runs is tried with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One run of the bench."""

    models: tuple[ModelSize, ...]
    batches: tuple[int, ...]
    """Batch limits, ascending."""
    rounds: int
    """In each, every side runs once."""
    seconds: float
    """Of work in a side's run, about."""
    records: Source
    decisions: Decisions
    device: str
    """What torch calls it."""
    graphs: bool
    """Whether segments are captured, as CUDA graphs on a GPU; else torch launches every kernel."""
    seed: int
    out: Path
    """Folder of the results."""

    def __post_init__(self) -> None:
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise InputError(f"batch limits must ascend from at least 1, not {list(self.batches)}")
        if self.rounds < 1 or self.seconds <= 0:
            raise InputError(f"a bench takes at least one round of some seconds, not {self.rounds} of {self.seconds}")
