from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from earlyexit.onnx_sessions import load_runtime, open_session
from earlyexit.train import exit_outputs
from experiments.networks import onnx_pieces
from experiments.networks.onnx_pieces import CPU, Packaged, halfway, noise, taken, tell_costs, tell_differences
from tests.earlyexit.onnx_graphs import TEXT, saved, words_graph


def test_models_whose_packages_are_not_there_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["onnx_pieces", str(tmp_path)])
    onnx_pieces.main()
    assert capsys.readouterr().out.count("left out, there is no") == len(onnx_pieces.MODELS)


def test_differences_and_costs_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(words_graph(), tmp_path / "from")
    codec = TEXT | {"max_length": 32}
    model = taken(path, tmp_path, Packaged(name="words", file="", codec=codec), 3)
    assert model.num_blocks == 3
    encoded = noise(model, 12)
    whole = open_session(load_runtime(CPU), path, providers=CPU, num_threads=1)
    tell_differences("words", model, whole, encoded)
    worst = capsys.readouterr().out.splitlines()[-1].split()
    assert (worst[0], worst[3:]) == ("worst", ["100.00%", "100.00%"])
    assert float(worst[1]) < 1e-4
    tell_costs("words", model, whole, encoded[:2], rounds=1)
    assert "3 sessions" in capsys.readouterr().out


def test_half_of_the_inputs_leave_at_each_ramp(tmp_path: Path) -> None:
    path = saved(words_graph(), tmp_path / "from")
    model = taken(path, tmp_path, Packaged(name="words", file="", codec=TEXT | {"max_length": 32}), 2)
    encoded = noise(model, 16)
    policy = halfway(model, encoded)
    score_N = model.task.score(exit_outputs(model, encoded)[0])
    assert 4 <= int(policy.is_sure(0, score_N).sum()) <= 12
