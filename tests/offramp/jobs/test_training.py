from __future__ import annotations

from pathlib import Path

import pytest
import torch

from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.errors import ModelFolderError
from earlyexit.network.store import load_model, read_card
from offramp.commands.jobs import TrainJob
from offramp.commands.train import head_in_words, train


def job_of(checkpoint: Path, *, joint: bool = False) -> TrainJob:
    return TrainJob(backbone=str(checkpoint), name="m", epochs=1, joint=joint, source="d.csv")


def test_a_checkpoint_with_the_labels_keeps_its_head_and_the_default_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, model: Path
) -> None:
    (tmp_path / "config.json").write_text("{broken", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert TrainJob(name="m").task == "label"
    from safetensors.torch import load_file

    card = read_card(model)
    assert (card.label_names, card.provenance["head"]) == (("weather", "bill"), "checkpoint")
    theirs: torch.Tensor = load_file(checkpoint / "model.safetensors")["classifier.weight"]
    assert load_model(model).head.state_dict()["classifier.weight"].equal(theirs)


def test_a_calibration_outlives_a_training_that_never_began_alone(checkpoint: Path, data: Path, model: Path) -> None:
    for name in ("calibration.json", "exit_records.npz"):
        (model / name).write_text("of the model before", encoding="utf-8")
    train(job_of(checkpoint), read_labelled(data), model)
    assert sorted(path.name for path in model.iterdir()) == ["model.json", "model.safetensors", "tokenizer.json"]
    (model / "calibration.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFolderError):
        train(job_of(model / "nowhere"), read_labelled(data), model)
    assert (model / "calibration.json").is_file()


def test_ramps_learn_from_bfloat16_and_weights_stay(checkpoint: Path, data: Path, model: Path, tmp_path: Path) -> None:
    rows, job = read_labelled(data), job_of(checkpoint).model_copy(update={"epochs": 3, "dtype": "bfloat16"})
    quick = train(job, rows, tmp_path / "quick").state_dict()
    card, whole = (
        read_card(tmp_path / "quick"),
        train(job.model_copy(update={"dtype": "float32"}), rows, model).state_dict(),
    )
    assert card.provenance["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in quick.values()} == {torch.float32}
    frozen = [name for name in whole if not name.startswith("ramps")]
    assert all(quick[name].equal(whole[name]) for name in frozen)
    assert not quick["ramps.0.classifier.weight"].equal(whole["ramps.0.classifier.weight"])


@pytest.mark.parametrize(
    ("joint", "label", "words"),
    [
        (False, "weather", "the checkpoint's"),
        (True, "weather", "the checkpoint's, trained further"),
        (False, "rain", "trained on these rows, its backbone as it came (--joint trains that too)"),
        (True, "rain", "trained on these rows, with its backbone"),
    ],
)
def test_where_the_head_is_from_is_said(checkpoint: Path, tmp_path: Path, joint: bool, label: str, words: str) -> None:
    data = LabelledRows.of_texts(texts=("pay my bill", "rain in town") * 4, labels=("bill", label) * 4)
    assert head_in_words(train(job_of(checkpoint, joint=joint), data, tmp_path / "new")) == words
