from __future__ import annotations

from pathlib import Path

import pytest
import torch

from earlyexit.data.rows import LabelledRows
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.training.ramps import exit_outputs
from examples.cascade.models import first_blocks, make_cascade
from offramp.commands.folders import read_calibration
from offramp.commands.jobs import CalibrateJob
from tests.end_to_end.tiny_service import LABELS, NUM_BLOCKS, make_model, some_texts


@pytest.mark.parametrize(("num_blocks", "ramps"), [(1, True), (2, True), (NUM_BLOCKS, True), (NUM_BLOCKS, False)])
def test_a_models_first_blocks_answer_as_its_exits_do(tmp_path: Path, num_blocks: int, ramps: bool) -> None:
    model, tokenizer = make_model(tmp_path / "whole")
    save_model(first_blocks(model, num_blocks, name="first", ramps=ramps), tmp_path / "first")
    small, encoded = load_model(tmp_path / "first"), tokenizer.encode(some_texts(4))
    assert (small.num_blocks, small.ramp_indices) == (num_blocks, tuple(range(num_blocks - 1)) if ramps else ())
    whole = exit_outputs(model, encoded)
    for block, outputs_NC in exit_outputs(small, encoded).items():
        torch.testing.assert_close(outputs_NC, whole[block])


def test_the_demos_chain_is_half_of_its_model_before_the_whole_model_without_ramps(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    texts = some_texts(60)
    rows = LabelledRows.of_texts(texts=texts, labels=(LABELS[at % len(LABELS)] for at in range(len(texts))))
    folder = make_cascade(tmp_path, rows, CalibrateJob(budget=0.3, confidence=0.5))
    card, half = read_card(folder), NUM_BLOCKS // 2
    assert folder == tmp_path / "cascade"
    assert card.name == read_card(tmp_path / "large").name, "it is loaded as a version of the large model"
    assert card.chain.networks == (half, half + NUM_BLOCKS)
    assert card.network_folders(folder) == (tmp_path / "small", tmp_path / "large")
    assert card.ramps == tuple(range(half)), "those of the small model, its end among them"
    assert set(read_calibration(folder).thresholds) <= set(card.ramps)
