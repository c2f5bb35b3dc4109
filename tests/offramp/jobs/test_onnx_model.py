"""Ramps, thresholds, a profile and batches of a model that was injected from an ONNX file."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from earlyexit.backends import open_segments
from earlyexit.data.rows import LabelledRows
from earlyexit.engine.engine import Batch
from earlyexit.engine.queue import Member
from earlyexit.errors import DataError, ModelFolderError
from earlyexit.network.boundary import Split
from earlyexit.network.model import TorchRunner
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.training.ramps import FitOptions, exit_outputs, train_ramps
from offramp.commands.calibrate import calibrate
from offramp.commands.doctor import check_target
from offramp.commands.jobs import CalibrateJob, ProfileJob
from offramp.commands.profile import circumstances
from offramp.spec.application import checked_card
from offramp.spec.documents import ApplicationDocument
from offramp.spec.file import _parameter_bytes
from tests.earlyexit.foreign.onnx_graphs import SIDE, pictures_graph, pictures_taken, random_pictures, saved, with_ramps
from tests.earlyexit.network.tokens import wire_of

ROWS = 240


def rows(answers: tuple[str, ...]) -> LabelledRows:
    pixels = np.concatenate([each.tensors[0] for each in random_pictures(ROWS, seed=1)])
    return LabelledRows(columns={"image": pixels}, labels=answers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose ramps were trained on the graph's own answers."""
    folder = tmp_path_factory.mktemp("onnx")
    model = with_ramps(pictures_taken(saved(pictures_graph(), folder / "from"), folder / "model"))
    encoded = random_pictures(ROWS)
    targets = exit_outputs(model, encoded)[2].argmax(1).numpy()
    train_ramps(model, encoded, targets, FitOptions(epochs=120, batch=64, learning_rate=3e-2))
    save_model(model, folder / "model")
    return folder / "model"


def test_thresholds_are_found_and_the_graph_stays_as_it_was(folder: Path) -> None:
    before = (folder / "graph.onnx").read_bytes(), (folder / "graph.onnx.data").read_bytes()
    outputs = exit_outputs(load_model(folder), random_pictures(ROWS, seed=1))[2]
    answers = tuple("abc"[k] for k in outputs.argmax(1).tolist())
    card, records = calibrate(folder, rows(answers), CalibrateJob(budget=0.2, confidence=0.8))
    assert len(records) == ROWS
    assert card.tested["agreement"] >= 0.8
    assert card.tested["mean_blocks"] < 3
    assert before == ((folder / "graph.onnx").read_bytes(), (folder / "graph.onnx.data").read_bytes())


def test_a_runner_answers_its_batches_as_the_model_does(folder: Path) -> None:
    model = load_model(folder)
    encoded = random_pictures(6, seed=2)
    expected = exit_outputs(model, encoded)[2].argmax(1).tolist()
    runner = TorchRunner(model, ConfidencePolicy(2.0), open_segments("torch", model, folder))
    split = Split(first=0, end=3, batch=6, ramps=(0,))
    runner.prepare([split])
    pieces = runner.from_wire(wire_of(encoded)).singles()
    members = tuple(Member(sample_id=piece.sample_ids[0], payload=piece) for piece in pieces)
    for probe in (False, True):
        steps = list(runner.run(Batch(split=split, members=members, tokens=len(members), started_s=0.0, probe=probe)))
        assert [answer.value for answer in steps[-1].answers] == expected
        assert {seen.exit for step in steps for seen in step.seen} == ({0, 1, 2} if probe else set())
    stays = replace(split, after_answer="stay")
    steps = list(runner.run(Batch(split=stays, members=members, tokens=len(members), started_s=0.0)))
    assert [answer.value for answer in steps[-1].answers] == expected
    assert {seen.exit for step in steps for seen in step.seen} == {0, 2}
    warm = runner.warm_up_pieces(split, 2)
    assert warm.tensors[0].shape == (2, SIDE, SIDE, 3)


def test_the_files_of_a_network_must_exist_and_count_as_memory(folder: Path, tmp_path: Path) -> None:
    card = read_card(folder)
    sizes = [(folder / name).stat().st_size for name in ("model.safetensors", "graph.onnx", "graph.onnx.data")]
    assert _parameter_bytes(folder, card, "float32") == circumstances(folder, ProfileJob())["size"] == sum(sizes)
    assert check_target(folder)[0].verdict != "failed"
    for name in ("model.json", "model.safetensors", "graph.onnx"):
        shutil.copy(folder / name, tmp_path)
    assert check_target(tmp_path)[0].found == f"{tmp_path} has no graph.onnx.data, which its network needs"
    with pytest.raises(DataError, match=r"has no graph.onnx.data"):
        _parameter_bytes(tmp_path, card, "float32")


def test_another_float_type_is_refused_before_a_replica_starts(folder: Path) -> None:
    document = ApplicationDocument.model_validate({"model": {"folder": str(folder), "dtype": "bfloat16"}})
    with pytest.raises(ModelFolderError, match="theirs: onnx models run in float32, not bfloat16"):
        checked_card(folder, document.model)
