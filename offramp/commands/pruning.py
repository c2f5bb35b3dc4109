"""What a chain's later networks answer to texts that have lost words, and by which alphas these are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.codecs import find_codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.network.boundary import FloatName
from earlyexit.network.store import ModelCard
from earlyexit.words import alpha_for, num_words, standing_of
from profiles.networks import MEASURING, PRUNE, TOKENS_KEPT, WORDS_CUT

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.data.rows import LabelledRows
    from earlyexit.network.wire import Encoded
    from earlyexit.tasks.base import Task, ValueArray
    from earlyexit.training.ramps import Progress
    from profiles.records import IntArray
    from profiles.scores import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedRun:
    """All exits' outputs, those of later networks on texts without some of their words."""

    outputs: Mapping[int, Tensor]
    """By the chain's block, the last network's end included."""
    prune: Mapping[int, float]
    """Alpha by end ramp."""
    words_cut: float
    """Share of all words that the last network does not see."""
    tokens_kept: Sequence[float]
    """Of every network, the share of an input's tokens that is left there."""
    measuring: Sequence[float]
    """Of every network but the last, how many times as long it takes to tell what attention its tokens receive."""

    def facts(self) -> dict[str, Any]:
        """For the provenance of what is found with it."""
        return {
            PRUNE: dict(self.prune),
            WORDS_CUT: self.words_cut,
            TOKENS_KEPT: list(self.tokens_kept),
            MEASURING: list(self.measuring),
        }

    def records_of(self, whole: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What exit records are made of: the reference's answers are those to whole texts."""
        last = max(whole)
        return {**self.outputs, last: whole[last]}

    def end_losses_N(self, task: Task, whole: Mapping[int, Tensor]) -> FloatArray:
        """What the last network's answers to pruned texts cost against those to whole ones."""
        last = max(whole)
        early, full = (task.answer(each[last]).numpy() for each in (self.outputs, whole))
        return task.loss(early, full)

    def end_true_losses_N(self, task: Task, truth_N: ValueArray) -> FloatArray:
        """The same against the truth."""
        return task.loss(task.answer(self.outputs[max(self.outputs)]).numpy(), truth_N)


def run_pruned(
    folder: Path,
    card: ModelCard,
    data: LabelledRows,
    whole: Mapping[int, Tensor],
    *,
    share: float,
    parts: tuple[IntArray, IntArray],
    dtype: FloatName,
    progress: Progress,
) -> PrunedRun:
    """Cut this share of the words at every crossing, by alphas of the first part's rows, and run the networks after.

    `whole`: every exit's outputs on whole texts, of which those of the first network are used; its words can
    be pruned (`check_prunable`). Raises DataError for a share that no alpha cuts.
    """
    import torch

    from earlyexit.network.store import load_model
    from earlyexit.training.importance import importance_of, times_measured
    from earlyexit.training.ramps import exit_outputs

    chain = card.chain
    codec = find_codec(card.codec, folder)
    assert isinstance(codec, ChainCodec)
    rows = given = data.rows(codec)
    kept, measuring = [1.0], list[float]()
    outputs = {block: each for block, each in whole.items() if block < chain.bounds[0]}
    prune: dict[int, float] = {}
    for network, member in enumerate(card.members(folder)):
        model = load_model(member, dtype=getattr(torch, dtype))
        encoded = codec.of(network).encode(rows, truncate=True)
        if network:
            whole_encoded = codec.of(network).encode(given, truncate=True)
            kept.append(_tokens(encoded) / _tokens(whole_encoded))
            first = chain.starts[network]
            found = exit_outputs(model, encoded, progress=progress)
            outputs |= {first + block: each for block, each in found.items()}
        if network < len(chain.lengths) - 1:
            importance = importance_of(model, encoded, progress=progress)
            measuring.append(times_measured(model, encoded))
            alpha = _alpha(codec, network, [(rows[row], importance[row]) for row in parts[0].tolist()], share)
            prune[chain.ends[network]] = alpha
            rows = [
                codec.pruned_for(network + 1, network, row, own, alpha).row
                for row, own in zip(rows, importance, strict=True)
            ]
    words_cut = 1 - _words(rows) / _words(given)
    return PrunedRun(outputs=outputs, prune=prune, words_cut=words_cut, tokens_kept=kept, measuring=measuring)


def _alpha(codec: ChainCodec, network: int, design: Sequence[tuple[Any, Any]], share: float) -> float:
    standings = [standing_of(codec.of(network).words(row), importance_N) for row, importance_N in design]
    return alpha_for(share, np.concatenate(standings))


def _tokens(encoded: Sequence[Encoded]) -> int:
    return sum(each.length for each in encoded)


def _words(rows: Sequence[Any]) -> int:
    return sum(map(num_words, rows))
