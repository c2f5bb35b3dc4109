"""Service files of chains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from earlyexit.errors import ModelFolderError
from offramp.service.application import resolve_plan
from tests.offramp.service.service_files import Files
from tests.offramp.service.service_folders import WEIGHTS_BYTES, write_chain, write_model

TABLE = {"batch": [1, 2], "block_s": [[0.01, 0.02]] * 2 + [[0.1, 0.2]] * 3, "ramp_s": [[0.001, 0.002]] * 4}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    write_chain(tmp_path / "cascade", write_model(tmp_path / "small", num_blocks=2, name="s"), files.model)
    return files


def model(**changes: Any) -> dict[str, Any]:
    return {"folder": "cascade", "latency": {"cpu": TABLE}, "memory_bytes": 1} | changes


@pytest.mark.parametrize("models", [{}, {"models": ["small", "model"]}], ids=["unsaid", "said"])
def test_a_chain_is_served_as_any_model_is(files: Files, models: dict[str, Any]) -> None:
    plan = files.read(model=model(**models)).settings.plan
    assert plan.networks == (2, 5)
    assert [split.end for split in plan.splits if split.end in plan.networks] == [2, 5]


@pytest.mark.parametrize(
    ("models", "words"),
    [
        pytest.param(["model", "small"], "cascade is a chain of .*small and .*model, not of .*model and", id="order"),
        pytest.param(["small", "other"], "not of .*small and .*other; `offramp chain` makes that", id="another"),
    ],
)
def test_a_chain_of_other_models_than_the_file_says_is_refused(files: Files, models: list[str], words: str) -> None:
    line, said = files.refused(model=model(models=models))
    assert line == files.line_of("models:") + 1  # its first item
    assert re.search(words, said)


def test_one_model_is_no_chain(files: Files) -> None:
    line, said = files.refused(model=model(folder="model", models=["small", "model"]))
    assert line == files.line_of("models:") + 1  # its first item
    assert "model is one model and no chain" in said


def test_built_in_plans_of_a_chain_end_splits_where_its_networks_end(files: Files) -> None:
    folder = files.folder / "cascade"
    assert [(split.first, split.end) for split in resolve_plan("stock", folder).splits] == [(2, 5)]
    assert [(split.first, split.end) for split in resolve_plan("early-exit", folder).splits] == [(0, 2), (2, 5)]
    assert [split.end for split in resolve_plan("serial", folder).splits] == [1, 2, 3, 4, 5]


def test_a_replica_must_have_room_for_all_models_of_a_chain(files: Files) -> None:
    def cluster(memory_bytes: int) -> dict[str, Any]:
        return {"devices": {"cpu": {"count": 1, "memory_bytes": memory_bytes}}}

    needed, fits = 2 * WEIGHTS_BYTES, {"folder": "cascade", "latency": {"cpu": TABLE}}
    assert files.read(model=fits, cluster=cluster(needed)).name == "demo"
    said = files.refused(model=fits, cluster=cluster(needed - 1))[1]
    assert said.startswith(f"a replica needs {needed / 1e9:.3g} GB, its parameters in float32, of s and m; cpu has ")


def test_every_model_of_a_chain_must_run_in_the_float_type(files: Files) -> None:
    card = files.folder / "small" / "model.json"
    card.write_text(json.dumps(json.loads(card.read_text(encoding="utf-8")) | {"family": "onnx"}), encoding="utf-8")
    with pytest.raises(ModelFolderError, match="s: onnx models run in float32, not bfloat16"):
        files.read(model=model(dtype="bfloat16"))
