"""The network, the task and the data of examples/own_modality, used as a reader uses them, on few rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from earlyexit.codecs import find_codec
from earlyexit.data.rows import read_labelled
from earlyexit.network.store import load_model, read_card
from earlyexit.tasks import find_task
from earlyexit.training.ramps import exit_outputs
from tests.offramp.cli.runs import Captured, printed, run
from tests.offramp.test_examples import printed_by

MODALITY = Path(__file__).parents[2] / "examples" / "own_modality"
GRADES = ("1 unripe", "2 early", "3 ripe", "4 late", "5 spoiled")


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH as the example has it."""
    monkeypatch.syspath_prepend(str(MODALITY))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fruit") / "fruit.npz"
    assert printed_by(MODALITY / "fruit.py", path, 600) == f"600 spectra of 5 grades: {path}\n"
    return path


def test_the_whole_example_is_short_and_grades_cost_by_their_distance(on_path: None) -> None:
    lines = [line for path in MODALITY.iterdir() if path.is_file() for line in path.read_text().splitlines()]
    assert len(lines) < 150
    task = find_task({"name": "fruit:grades"})
    assert task.loss(np.array([0, 1, 4]), np.array([0, 0, 0])).tolist() == [0.0, 0.25, 1.0]
    assert not task.zero_one


def test_spectra_are_learned_within_the_budget(data: Path, tmp_path: Path, on_path: None, capsys: Captured) -> None:
    out = tmp_path / "fruit"
    own = ["--backbone", "fruit:build", "--task", "fruit:grades", "--pooling", "grid"]
    learning = ["--joint", "--epochs", "8", "--learning-rate", "0.003", "--hold-out", "0.5"]
    assert run("train", "--data", str(data), "--out", str(out), *own, *learning) == 0
    card = read_card(out)
    assert card.codec == {"name": "tensor", "columns": [{"name": "spectrum", "datatype": "FP32", "shape": [128]}]}
    assert card.task == {"name": "fruit:grades", "label_names": list(GRADES)}
    assert [boundary[0].shape for boundary in card.boundaries] == [(24, 64), (32, 32), (40, 16), (48, 8)]
    capsys.readouterr()
    loose = ("--policy", "confidence", "--budget", "0.05")
    tested = printed(capsys, "calibrate", out, "--data", out / "held_out.npz", *loose)["tested"]
    assert tested["agreement"] >= 0.95, "the mean loss is within the budget"
    assert tested["mean_blocks"] < 4
    model, rows = load_model(out), read_labelled(out / "held_out.npz")
    outputs = exit_outputs(model, rows.encode(find_codec(card.codec, out)))[3]
    loss = model.task.loss(model.task.answer(outputs).numpy(), model.task.targets(rows.labels))
    assert loss.mean() < 0.1, "grades are off by less than half a grade"
