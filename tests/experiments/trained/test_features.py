from __future__ import annotations

from pathlib import Path

import pytest
import torch

from earlyexit.codecs import find_codec
from earlyexit.data.rows import LabelledRows
from earlyexit.training.ramps import exit_outputs
from experiments.trained.mpnet import features_of, outputs_of
from tests.end_to_end.tiny_service import make_model, some_texts

ROWS = LabelledRows.of_texts(texts=some_texts(6), labels=("a",) * 6)


def test_what_heads_make_of_kept_features_is_what_the_model_answers(tmp_path: Path) -> None:
    model, tokenizer = make_model(tmp_path)
    model.temperatures_E.fill_(0.5)
    codec = find_codec(model.info.codec, tmp_path)
    features = features_of(model, ROWS, codec, tmp_path / "features.pt", "float32")
    rows, outputs = outputs_of(model, features)
    expected = exit_outputs(model, tokenizer.encode(ROWS.texts))
    assert list(rows) == [0, 1, 2, 3, 4, 5]
    assert outputs.keys() == expected.keys()
    for block, outputs_NC in expected.items():
        torch.testing.assert_close(outputs[block], outputs_NC, rtol=0, atol=1e-2)  # features are kept in half precision


@pytest.mark.parametrize(
    ("rows", "dtype", "again"),
    [
        pytest.param(ROWS, "float32", False, id="the same"),
        pytest.param(ROWS.select([0, 1]), "float32", True, id="other texts"),
        pytest.param(ROWS, "bfloat16", True, id="another float type"),
    ],
)
def test_features_are_computed_once_for_the_same_texts(
    tmp_path: Path, rows: LabelledRows, dtype: str, again: bool
) -> None:
    model, _ = make_model(tmp_path)
    codec, path = find_codec(model.info.codec, tmp_path), tmp_path / "features.pt"
    features_of(model, ROWS, codec, path, "float32")
    kept = torch.load(path, weights_only=True)
    torch.save({**kept, "features": {0: torch.zeros(6, 2, dtype=torch.half)}}, path)
    found = features_of(model, rows, codec, path, "bfloat16" if dtype == "bfloat16" else "float32")
    assert (len(found) > 1) is again
