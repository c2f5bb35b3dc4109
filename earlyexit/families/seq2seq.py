"""Encoder-decoders: a decoder whose sequences begin with a source, which an encoder has read.

A sequence is its source, the token that an answer starts with, and the answer. Its first input brings the source whole:
`embed` runs the encoder, and what it makes of the source's tokens are their rows, which blocks pass on as they are and
keep keys and values of, in the sequence's pages like any token's. So nothing above the network knows what a source is:
rows wait, hop and are filled in as those of any decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from earlyexit.errors import InputError
from earlyexit.families.base import FinalHead, Pretrained
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.families.decoder_rows import Block
from earlyexit.families.distances import before, by_distance
from earlyexit.families.seq2seq_blocks import AnswerBlock, Seq2SeqConfig, SidedPlaces, SourceBlock, new_norm
from earlyexit.kv import TRIAL
from earlyexit.kv_places import Run
from earlyexit.layout import Layout
from earlyexit.memory import PAGE_TOKENS
from earlyexit.piece import Tensors

Rows = npt.NDArray[np.int64]
WAVE_LENGTH = 10_000.0
"""Of the slowest sinusoid, over 2 pi."""


class Seq2SeqBackbone(DecoderBackbone):
    """The decoder's blocks are the chain; the encoder is a part of `embed`."""

    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        heads, buckets = config.num_heads, config.distance_buckets
        self.encoder = nn.ModuleList(SourceBlock(config) for _ in range(config.num_encoder_blocks))
        self.encoder_norm = self.new_norm()
        self.encoder_distances = nn.Embedding(buckets, heads) if buckets else None
        self.distances = nn.Embedding(buckets, heads) if buckets else None

    def new_block(self) -> Block:
        return AnswerBlock(self.config)

    def new_norm(self) -> nn.Module:
        return new_norm(self.config) if self.config.norm_first else nn.Identity()

    def run_of(self, sequence: int, start: int, length: int, limit: int, prompt: int) -> Run:
        """All that was given but the token that an answer starts with is the source.

        What is of no sequence is a first input, or, if it is one row, a step behind a page of a source.
        """
        if sequence != TRIAL:
            return Run(sequence=sequence, start=start, length=length, limit=limit, source=max(prompt - 1, 0))
        if length > 1:
            return Run(sequence=TRIAL, start=0, length=length, source=length - 1)
        return Run(sequence=TRIAL, start=PAGE_TOKENS, length=1, source=PAGE_TOKENS)

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        """Raises InputError where a source comes in parts."""
        token_ids_N, run_B5 = inputs
        runs = self.runs(run_B5, [0] * len(run_B5), layout)
        sides = _Sides.of(runs)
        if any(run.start or run.end < run.source for run in sides.reading):
            raise InputError("a source comes whole, in its sequence's first input")
        if not all(run.source for run in runs):
            raise InputError("an answer needs a source of one token at least")
        hidden_ND = self.word(token_ids_N) * self.config.embedding_scale
        if self.distances is None:
            hidden_ND = hidden_ND + self._sinusoids(self._index(np.concatenate([_positions(run) for run in runs])))
        if sides.reading:
            source = self._index(sides.source)
            hidden_ND = hidden_ND.index_copy(0, source, self._read(hidden_ND[source], sides.reading))
        return hidden_ND, run_B5, run_B5.new_zeros(len(run_B5))

    def where(self, runs: Sequence[Run]) -> SidedPlaces:
        sides = _Sides.of(runs)
        own = self.kv.places(sides.answering, bias_DH=self._bias(sides.answering)) if sides.answering else None
        crossing = self.kv.places(sides.answering, source=True) if sides.answering else None
        if not sides.reading:
            return SidedPlaces(own, crossing, None, None, None)
        places = np.concatenate([self.kv.place_of(run, run.start) for run in sides.reading])
        return SidedPlaces(own, crossing, self._index(sides.own), self._index(sides.source), self._index(places))

    def _read(self, hidden_ND: Tensor, sources: Sequence[Run]) -> Tensor:
        """What the encoder makes of embedded sources, packed."""
        # Each source alone, since what is read of it may not depend on which others happen to come with it.
        layout = Layout(np.array([run.length for run in sources], dtype=np.int32), hidden_ND.device, together=0)
        table = self.encoder_distances
        masks = layout.masks(None if table is None else by_distance(table, layout.longest, self.config.max_distance))
        for block in self.encoder:
            hidden_ND = block(hidden_ND, layout, masks)
        normed_ND: Tensor = self.encoder_norm(hidden_ND)
        return normed_ND

    def _bias(self, runs: Sequence[Run]) -> Tensor | None:
        if self.distances is None:
            return None
        return before(self.distances, max(run.end - run.source for run in runs), self.config.max_distance)

    def _sinusoids(self, position_N: Tensor) -> Tensor:
        """Vaswani et al. 2017, section 3.5; as Marian has them, sines before cosines."""
        size = self.config.hidden_size
        exponent = torch.arange(0, size, 2, dtype=torch.float64, device=position_N.device) / size
        angle_Nh = position_N[:, None] * WAVE_LENGTH**-exponent
        return torch.cat([angle_Nh.sin(), angle_Nh.cos()], dim=-1).to(self.word.weight.dtype)

    def _index(self, rows: Rows) -> Tensor:
        return torch.from_numpy(rows).to(self.word.weight.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Sides:
    """Of packed runs, the parts that are sources and those that are answers, and which rows these are."""

    reading: list[Run]
    answering: list[Run]
    source: Rows
    own: Rows

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Sides:
        reading = [replace(run, length=min(run.end, run.source) - run.start) for run in runs if run.start < run.source]
        begun = [max(run.start, run.source) for run in runs]
        answering = [
            run if first == run.start else replace(run, start=first, length=run.end - first)
            for run, first in zip(runs, begun, strict=True)
            if first < run.end
        ]
        if not reading:
            return cls(reading, answering, np.empty(0, np.int64), np.empty(0, np.int64))
        is_source = np.concatenate([np.arange(run.start, run.end) < run.source for run in runs])
        return cls(reading, answering, np.flatnonzero(is_source), np.flatnonzero(~is_source))


def _positions(run: Run) -> Rows:
    """Of a run's tokens, within the source or the answer."""
    tokens = np.arange(run.start, run.end)
    return np.where(tokens < run.source, tokens, tokens - run.source)


def copied(weights: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """A checkpoint's weights by our names, each put together of those that `names` says."""
    return {ours: torch.cat([weights[each] for each in theirs]) for ours, theirs in names.items()}


def pretrained(
    backbone: Seq2SeqBackbone, state: Mapping[str, Tensor], head_VD: Tensor, bias_V: Tensor | None = None
) -> Pretrained:
    """The backbone filled with weights by their names, and its head."""
    backbone.load_state_dict(dict(state))
    head = {"classifier.weight": head_VD} | ({} if bias_V is None else {"bias_V": bias_V})
    style = "vocabulary" if bias_V is None else "vocabulary-bias"
    final = FinalHead(style=style, pooling="last", num_outputs=len(head_VD), weights=head)
    return Pretrained(backbone=backbone, head=final, label_names=None)
