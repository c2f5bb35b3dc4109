from __future__ import annotations

from pathlib import Path

import pytest
import torch

from earlyexit.store import load_model, save_model
from earlyexit.train import exit_outputs
from experiments.demo.cascade import first_blocks
from tests.end_to_end.tiny_service import NUM_BLOCKS, make_model, some_texts


@pytest.mark.parametrize(("num_blocks", "ramps"), [(1, True), (2, True), (NUM_BLOCKS, True), (NUM_BLOCKS, False)])
def test_a_models_first_blocks_answer_as_its_exits_do(tmp_path: Path, num_blocks: int, ramps: bool) -> None:
    model, tokenizer = make_model(tmp_path / "whole")
    save_model(first_blocks(model, num_blocks, name="first", ramps=ramps), tmp_path / "first")
    small, encoded = load_model(tmp_path / "first"), tokenizer.encode(some_texts(4))
    assert (small.num_blocks, small.ramp_indices) == (num_blocks, tuple(range(num_blocks - 1)) if ramps else ())
    whole = exit_outputs(model, encoded)
    for block, outputs_NC in exit_outputs(small, encoded).items():
        torch.testing.assert_close(outputs_NC, whole[block])
