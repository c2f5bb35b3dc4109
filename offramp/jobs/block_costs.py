"""What the blocks of a model cost: measured, or by how large they are."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

from earlyexit.errors import DataError
from earlyexit.store import WEIGHTS_FILE, ModelCard
from profiles.latency import LatencyProfile
from profiles.records import ExitRecords

OF_BLOCK = re.compile(r"backbone\.blocks\.(\d+)\.")
"""Weights of a block, in a model's file."""


def measured_costs(latency: Path | None, records: ExitRecords) -> list[float] | None:
    """Seconds of every block at its largest batch, at the measured length that is nearest to the inputs' mean.

    None where no profile is given. Raises DataError for one of another model.
    """
    if latency is None:
        return None
    profile = LatencyProfile.load(latency)
    if profile.num_blocks != records.num_blocks:
        raise DataError(f"{latency} has {profile.num_blocks} blocks, the model {records.num_blocks}")
    mean = 1.0 if records.tokens_N is None else float(records.tokens_N.mean())
    nearest = min(profile.lengths, key=lambda length: abs(length - mean))
    costs: list[float] = profile.tables[nearest].block_s_NB[:, -1].tolist()
    return costs


def parameters_by_block(folder: Path, card: ModelCard) -> list[float] | None:
    """How large every block is, which is what it costs where nobody measured; None where a network does not tell."""
    sizes = [block_sizes(member) for member in card.members(folder)]
    told = all(len(each) == length for each, length in zip(sizes, card.chain.lengths, strict=True))
    return [of_block for each in sizes for of_block in each.values()] if told else None


def block_sizes(folder: Path) -> dict[int, float]:
    """By block, ascending, how many numbers a model's weights hold that are called so; those are its parameters."""
    from safetensors import safe_open

    sizes: dict[int, float] = {}
    with safe_open(folder / WEIGHTS_FILE, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            if found := OF_BLOCK.match(name):
                sizes[int(found[1])] = sizes.get(int(found[1]), 0.0) + prod(file.get_slice(name).get_shape())
    return dict(sorted(sizes.items()))
