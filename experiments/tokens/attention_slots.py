"""How inputs of unequal lengths attend: padded to the longest, in slots, each apart, those of one length together.

    python -m experiments.tokens.attention_slots --count
    python -m experiments.tokens.attention_slots [--backend onnx] [--batch 16]

Lengths are those of real texts; weights are random. `--count`: multiply-adds of a block, padded over the others. Else
the whole model, one thread, linear layers as they are served; the sides in turn, medians of rounds. Times are the
processor's for this thread, which neighbours disturb least. Minutes: about 5 on one core.
"""

from __future__ import annotations

import tempfile
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from earlyexit.backends import BackendName, open_segments
from earlyexit.checkpoint import random_model
from earlyexit.layout import Attend, Layout, Masks
from earlyexit.model import EarlyExitModel
from earlyexit.network import SegmentRunner
from earlyexit.piece import Piece, Tensors
from earlyexit.slots import Attention, first_fit_decreasing
from earlyexit.split import Segment
from experiments.kit import show, spread
from experiments.tokens.lengths import LONGEST, batches, text_lengths
from experiments.turns import Figures, in_turns

MINILM = {"hidden_size": 384, "num_heads": 12, "intermediate_size": 1536}
BERT_BASE = {"hidden_size": 768, "num_heads": 12, "intermediate_size": 3072}
VOCABULARY = 1000
SIZES = (8, 16, 32)
"""Inputs of a batch."""
MEASURED = 4
"""Batches of each kind that are run, in one figure."""


class OneLengthTogether(Layout):
    """Inputs of the same length attend in one operation, without padding or mask, wherever they are in the batch."""

    def masks(self, bias_HTT: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Masks:
        """None."""
        return ()

    def attend(self, values_ND: Tensor, masks: Masks, attend: Attend) -> tuple[Tensor, ...]:
        """As every scheme."""
        groups = [attend(values_ND[rows].view(-1, length, values_ND.shape[1]), None) for length, rows in self._groups]
        return tuple(torch.cat([each.flatten(0, 1) for each in kind])[self._back] for kind in zip(*groups, strict=True))

    @cached_property
    def _groups(self) -> list[tuple[int, Tensor]]:
        rows: defaultdict[int, list[int]] = defaultdict(list)
        starts = np.cumsum(self.lengths_B) - self.lengths_B
        for start, length in zip(starts.tolist(), self.lengths_B.tolist(), strict=True):
            rows[length].extend(range(start, start + length))
        return [(length, torch.tensor(each)) for length, each in rows.items()]

    @cached_property
    def _back(self) -> Tensor:
        return torch.argsort(torch.cat([rows for _, rows in self._groups]))


class Nested(Layout):
    """Torch's own jagged tensors."""

    def masks(self, bias_HTT: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Masks:
        """None."""
        return ()

    def attend(self, values_ND: Tensor, masks: Masks, attend: Attend) -> tuple[Tensor, ...]:
        """As every scheme."""
        jagged = torch.nested.nested_tensor_from_jagged(values_ND, self._offsets)
        return tuple(each.values() for each in attend(jagged, None))

    @cached_property
    def _offsets(self) -> Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths_B)]))


class Side:
    """A model by one kind of attention."""

    def __init__(self, segments: SegmentRunner, model: EarlyExitModel, kind: Attention | type[Layout]) -> None:
        self._segments = segments
        self._model = model
        self._kind = kind

    def run(self, pieces: Sequence[Piece]) -> Figures:
        """Milliseconds of the batches, one after the other."""
        began_s = time.thread_time()
        for piece in pieces:
            self.outputs(piece)
        return {"ms": 1e3 * (time.thread_time() - began_s)}

    @torch.inference_mode()
    def outputs(self, piece: Piece) -> tuple[Tensors, Tensor | None]:
        """Of the whole model."""
        whole = Segment(first=0, end=self._model.num_blocks, ramp=None)
        if not isinstance(self._kind, str):
            return self._model.compute(whole, piece.tensors, self._kind(piece.lengths_B))
        self._model.attention = self._kind  # the others' turns are over, or not begun
        return self._segments.run(whole, piece)


def multiply_adds(lengths: Sequence[int], places: int, width: int) -> int:
    """Of a block whose attention sees so many places: linear layers once a token, four times as wide inside."""
    return 12 * width**2 * sum(lengths) + 2 * width * places


def places(scheme: Attention, lengths: Sequence[int]) -> int:
    """That attention sees, of one head."""
    if scheme == "apart":
        return sum(length**2 for length in lengths)
    rows = len(lengths) if scheme == "padded" else len(first_fit_decreasing(lengths, max(lengths)))
    return rows * max(lengths) ** 2


def count() -> None:
    """Print how many times fewer operations a block has than padded."""
    rows = []
    for mix, lengths in text_lengths().items():
        for size in SIZES:
            parts = batches(lengths, size)
            for name, sizes in (("MiniLM", MINILM), ("BERT-base", BERT_BASE)):
                padded, slotted, apart = (
                    sum(multiply_adds(part, places(scheme, part), sizes["hidden_size"]) for part in parts)
                    for scheme in ("padded", "slotted", "apart")
                )
                rows.append((mix, name, size, padded / slotted, padded / apart))
    show("Operations of a block, padded over", ("texts", "model", "batch", "slotted", "apart"), rows)


def measure(backend: BackendName, sizes: dict[str, int], size: int, rounds: int, kinds: Sequence[str]) -> None:
    """Print milliseconds per batch and how many times faster than padded."""
    model = random_model(sizes | {"vocab_size": VOCABULARY, "num_blocks": 6, "max_length": LONGEST})
    model.requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        sides = _sides(model, backend, Path(folder), kinds)
        rows = []
        for mix, lengths in text_lengths().items():
            pieces = [_piece(part) for part in batches(lengths, size)[:MEASURED]]
            _check(sides, pieces[0])
            found = in_turns({name: partial(side.run, pieces) for name, side in sides.items()}, rounds)
            base = found["padded"]["ms"]
            for name, figures in found.items():
                ratio = spread(one / other for one, other in zip(base, figures["ms"], strict=True))
                rows.append((mix, name, median(figures["ms"]) / len(pieces), "-" if ratio is None else ratio.told()))
    title = f"{sizes['hidden_size']} wide, 6 blocks, {backend}, batch {size}, {rounds} rounds"
    show(title, ("texts", "attention", "ms per batch", "padded over it"), rows)


def _sides(model: EarlyExitModel, backend: BackendName, folder: Path, kinds: Sequence[str]) -> dict[str, Side]:
    if backend == "onnx":
        made: dict[str, Side] = {}
        for kind in ("padded", "slotted"):
            model.attention = kind
            made[kind] = Side(open_segments(backend, model, folder, 1), model, kind)
        return made
    segments = open_segments(backend, model, folder, 1)
    named: dict[str, Attention | type[Layout]] = {
        "padded": "padded",
        "slotted": "slotted",
        "apart": "apart",
        "of one length together": OneLengthTogether,
        "nested": Nested,
    }
    return {name: Side(segments, model, kind) for name, kind in named.items() if name in kinds}


def _check(sides: dict[str, Side], piece: Piece) -> None:
    (_, expected), *others = (side.outputs(piece) for side in sides.values())
    for _, found in others:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def _piece(lengths: Sequence[int]) -> Piece:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, size=sum(lengths), dtype=np.int32)
    return Piece(
        sample_ids=tuple(map(str, range(len(lengths)))),
        next_block=0,
        lengths_B=np.array(lengths, dtype=np.int32),
        tensors=(torch.from_numpy(tokens),),
        state_BS=torch.empty(len(lengths), 0),
    )


def main() -> None:
    """Count or measure, and print."""
    parser = ArgumentParser(prog="python -m experiments.tokens.attention_slots", description=__doc__)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--backend", choices=("torch", "onnx"), default="torch")
    parser.add_argument("--bert", action="store_true", help="as wide as BERT-base, in the place of MiniLM")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", default="padded,slotted,apart,of one length together")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.count:
        count()
        return
    sizes = BERT_BASE if options.bert else MINILM
    measure(options.backend, sizes, options.batch, options.rounds, options.kinds.split(","))


if __name__ == "__main__":
    main()
