from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from earlyexit.training.ramps import exit_outputs
from experiments.peers.stock import Kernel, ServerOptions, StockModel
from tests.end_to_end.tiny_service import LABELS, NUM_BLOCKS, make_model, some_texts

TEXTS = some_texts(20)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def unsplit_answers(folder: Path) -> tuple[list[str], list[float]]:
    """Labels and scores of the full model, its inputs one by one, so that nothing is padded or packed."""
    model, tokenizer = make_model(folder)
    logits = [exit_outputs(model, tokenizer.encode([text]))[NUM_BLOCKS - 1] for text in TEXTS]
    score_N, label_N = torch.cat(logits).softmax(-1).max(-1)
    return [LABELS[label] for label in label_N.tolist()], score_N.tolist()


@pytest.mark.parametrize("kernel", ["packed", pytest.param("onnx", marks=pytest.mark.slow)])  # whose export takes long
def test_all_kernels_answer_a_batch_as_the_unsplit_model_its_inputs_one_by_one(tmp_path: Path, kernel: Kernel) -> None:
    labels, scores = unsplit_answers(tmp_path)
    stock = StockModel.load(ServerOptions(model=tmp_path, kernel=kernel))
    predictions = stock.predict(TEXTS)
    assert [each.label for each in predictions] == labels
    assert [each.score for each in predictions] == pytest.approx(scores, abs=1e-5)


def test_the_compute_needs_neither_ray_nor_offramp_nor_transformers() -> None:
    code = "import sys; import experiments.peers.stock; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"ray", "offramp", "deployments", "transformers"} & set(loaded)
