"""A model that runs in pieces, its batches shuffled and fused anew at every cut, beside the uncut model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from earlyexit.network.boundary import Answer, Encoded, Segment, entering
from earlyexit.network.chain_network import AnyNetwork
from earlyexit.network.cut import Cut
from earlyexit.network.model import SegmentRunner, from_wire
from earlyexit.network.piece import Piece, Tensors, fuse
from earlyexit.policies.base import ExitPolicy

BATCH = 32
Exits = dict[str, Answer]


class LoggedSegments:
    """Keeps the logits of every exit that was evaluated, by sample and block."""

    def __init__(self, inner: SegmentRunner) -> None:
        self._inner = inner
        self.logits: dict[tuple[str, int], torch.Tensor] = {}

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, torch.Tensor | None]:
        """As the inner runner."""
        hidden, logits_BC = self._inner.run(segment, piece)
        if logits_BC is not None:
            for sample_id, row in zip(piece.sample_ids, logits_BC, strict=True):
                self.logits[sample_id, segment.end - 1] = row
        return hidden, logits_BC


class CutRun:
    """Runs all inputs through a chain of cuts, with survivors shuffled and fused anew at each."""

    def __init__(self, model: AnyNetwork, policy: ExitPolicy, ramps: tuple[int, ...], inner: SegmentRunner) -> None:
        self._model = model
        self._policy = policy
        self._ramps = ramps
        self._inner = inner

    def run(
        self,
        encoded: Sequence[Encoded],
        cuts: Sequence[int],
        seed: int,
        *,
        others: Sequence[Sequence[Encoded]] = (),
    ) -> tuple[Exits, LoggedSegments]:
        """Answers by sample id, and the logits on the way; `others`: as the other networks of a chain take inputs."""
        rng = np.random.default_rng(seed)
        logged = LoggedSegments(self._inner)
        chain = self._model.chain
        pieces = [self._enter(str(index), each, 0) for index, each in enumerate(encoded)]
        answers: Exits = {}
        bounds = sorted({0, *cuts, *chain.bounds})
        for first, end in pairwise(bounds):
            if first in chain.starts[1:]:
                rows = others[chain.network_of(first) - 1]
                pieces = [
                    self._enter(each.sample_ids[0], rows[int(each.sample_ids[0])], first, each) for each in pieces
                ]
            ramps = tuple(ramp for ramp in self._ramps if first <= ramp < end)
            cut = Cut(self._model, first, end, ramps, self._policy, logged)
            survivors: list[Piece] = []
            for batch in _batches(pieces, rng, shuffle=bool(cuts)):
                survivors.extend(_run(cut, fuse(batch), answers))
            pieces = survivors
        return answers, logged

    def _enter(self, sample_id: str, encoded: Encoded, first: int, before: Piece | None = None) -> Piece:
        """What one input is before a network's first block; of one that crossed with the state that it brought."""
        piece = from_wire(self._model, replace(entering([sample_id], [encoded]), next_block=first), self._policy)
        return piece if before is None else replace(piece, state_BS=before.state_BS)


def _batches(pieces: list[Piece], rng: np.random.Generator, *, shuffle: bool) -> Iterator[list[Piece]]:
    order = rng.permutation(len(pieces)) if shuffle else np.arange(len(pieces))
    start = 0
    while start < len(order):
        size = int(rng.integers(1, 2 * BATCH)) if shuffle else BATCH
        yield [pieces[k] for k in order[start : start + size]]
        start += size


def _run(cut: Cut, piece: Piece, answers: Exits) -> list[Piece]:
    last = None
    for step in cut.run(piece):
        answers.update({answer.sample_id: answer for answer in step.answers})
        last = step.survivors
    return last.singles() if last is not None else []


def compare(reference: tuple[Exits, LoggedSegments], other: tuple[Exits, LoggedSegments]) -> tuple[float, float, float]:
    """Share of equal labels, share of equal labels and exits, largest difference of logits at exits both evaluated."""
    ours, theirs = reference[0], other[0]
    assert ours.keys() == theirs.keys(), "every input has one answer"
    labels = np.mean([ours[key].value == theirs[key].value for key in ours])
    both = np.mean([(ours[k].value, ours[k].exit) == (theirs[k].value, theirs[k].exit) for k in ours])
    shared = reference[1].logits.keys() & other[1].logits.keys()
    apart = max(float((reference[1].logits[key] - other[1].logits[key]).abs().max()) for key in shared)
    return float(labels), float(both), apart
