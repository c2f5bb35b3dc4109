from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.network.boundary import Budget, Segment, Split
from earlyexit.network.checkpoint import random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece, Tensors
from earlyexit.sequences.memory import PAGE_TOKENS
from earlyexit.sequences.sequence import RUN, sequence_of
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.token import TokenTask
from profiles.measure import LiveSplits, TimedSplit, profile_splits, room_for

LENGTH = 8
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_blocks": 3,
    "num_heads": 2,
    "intermediate_size": 16,
    "max_length": 16,
}
CONTEXT = 40


def split(first: int, end: int, batch: int = 1, ramps: tuple[int, ...] = ()) -> Split:
    return Split(first=first, end=end, batch=batch, ramps=ramps)


class LoggedSegments:
    """What was computed, on how many inputs and tokens."""

    def __init__(self, model: EarlyExitModel) -> None:
        self._model = model
        self.log: list[tuple[int, int, int | None, int, int]] = []
        self.values: list[Tensors] = []
        self.prepared: dict[Segment, Budget] = {}

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        self.log.append((segment.first, segment.end, segment.ramp, len(piece), int(piece.lengths_B.sum())))
        self.values.append(piece.tensors)
        return self._model.run(segment, piece)

    def is_ready(self, segment: Segment) -> bool:
        return True

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        self.prepared = dict(segments)


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    """Three blocks, ramps after 0 and 1, random weights."""
    return random_model(SIZES, task=LabelTask(("a", "b")))


def run_live(model: EarlyExitModel, *splits: Split, seed: int = 0) -> LoggedSegments:
    logged = LoggedSegments(model)
    live = LiveSplits(model, np.random.default_rng(seed), logged)
    for each in splits:
        live.prepare(TimedSplit(split=each, length=LENGTH))()
    return logged


def test_a_probe_runs_its_segments_on_its_whole_batch_and_nobody_leaves(model: EarlyExitModel) -> None:
    logged = run_live(model, split(0, 3, 4, ramps=(0, 1)), split(1, 2, 2))
    assert logged.log == [(0, 1, 0, 4, 32), (1, 2, 1, 4, 32), (2, 3, None, 4, 32), (1, 2, None, 2, 16)]


def test_what_is_to_be_timed_is_made_ready_for_its_largest_batch(model: EarlyExitModel) -> None:
    logged = LoggedSegments(model)
    splits = profile_splits(3, (0,), (2, 4), (4, 8))
    LiveSplits(model, np.random.default_rng(0), logged).make_ready(splits)
    assert set(logged.prepared.values()) == {Budget(inputs=4)}
    assert {(each.first, each.end, each.ramp) for each in logged.prepared} == {
        (0, 1, None), (1, 2, None), (2, 3, None), (0, 1, 0), (0, 3, None),
    }  # fmt: skip


def test_the_first_block_gets_random_tokens_and_later_ones_a_hidden_state(model: EarlyExitModel) -> None:
    (first,), (later,) = run_live(model, split(0, 1, 4), split(2, 3, 4)).values
    assert (first.dtype, first.shape) == (torch.int32, (32,))
    assert 0 <= int(first.min()) < int(first.max()) < 50
    assert later.shape == (32, 16)
    assert torch.equal(first, run_live(model, split(0, 1, 4)).values[0][0])
    assert not torch.equal(first, run_live(model, split(0, 1, 4), seed=1).values[0][0])


@pytest.fixture(scope="module")
def decoder() -> EarlyExitModel:
    sizes = SIZES | {"num_kv_heads": 1, "head_size": 8, "max_length": 256}
    return random_model(sizes, family="llama", task=TokenTask(50)).requires_grad_(False)


def test_steps_come_after_a_context_and_a_prompt_is_one_input(decoder: EarlyExitModel) -> None:
    splits = profile_splits(3, (0,), (1, 4), (1, 8))
    memory = decoder.open_memory(room_for(splits, CONTEXT))
    logged = LoggedSegments(decoder)
    live = LiveSplits(decoder, np.random.default_rng(0), logged, CONTEXT)
    for timed in (TimedSplit(split=split(1, 2, 4), length=1), TimedSplit(split=split(0, 3, 4), length=8)):
        live.prepare(timed)()
    assert logged.log == [(1, 2, None, 4, 4), (0, 3, None, 1, 32)]
    steps, prompts = (
        next(values for spec, values in zip(decoder.takes(first), tensors, strict=True) if spec.name == RUN).tolist()
        for first, tensors in zip((1, 0), logged.values, strict=True)
    )
    assert [(sequence_of(*run[:2]), *run[2:4]) for run in steps] == [(k, CONTEXT, CONTEXT + 1) for k in range(1, 5)]
    assert [run[2:4] for run in prompts] == [[0, 32]]
    assert memory.use().sequences == 5


def test_there_is_room_for_all_that_is_timed_and_for_no_more(decoder: EarlyExitModel) -> None:
    splits = profile_splits(3, (0, 1), (1, 2, 4), (1, 8), further=60)
    memory = decoder.open_memory(room_for(splits, CONTEXT))
    live = LiveSplits(decoder, np.random.default_rng(0), context=CONTEXT)
    for _ in range(2):
        for timed in splits:
            live.prepare(timed)()
    use = memory.use()
    assert use.pages == use.num_pages == 4 * (_pages(CONTEXT + 1) + _pages(CONTEXT + 61)) + 1 + 1 + 2


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
