from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.errors import InputError, ModelFolderError
from earlyexit.network.boundary import TensorSpec
from earlyexit.network.store import load_model, read_card
from earlyexit.tasks.pose import PoseTask
from earlyexit.training.augmentation import Augmentation, Moves
from offramp.commands.jobs import TrainJob
from offramp.commands.train import describe_head, task_for, train
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.earlyexit.data.dense_data import CLASSES, JOINTS, write_poses, write_scenes
from tests.earlyexit.families.decoders import hf_decoder
from tests.offramp.cli.runs import run


def job_of(checkpoint: Path, *, joint: bool = False) -> TrainJob:
    return TrainJob(backbone=str(checkpoint), name="m", epochs=1, joint=joint, source="d.csv")


def test_a_checkpoint_with_the_same_labels_keeps_its_head(
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


def test_a_calibration_remains_only_if_training_has_not_started(checkpoint: Path, data: Path, model: Path) -> None:
    for name in ("calibration.json", "exit_records.npz"):
        (model / name).write_text("of the model before", encoding="utf-8")
    train(job_of(checkpoint), read_labelled(data), model)
    written = {"model.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in model.iterdir()} == written
    (model / "calibration.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFolderError):
        train(job_of(model / "nowhere"), read_labelled(data), model)
    assert (model / "calibration.json").is_file()


def test_ramps_learn_from_bfloat16_and_weights_stay(checkpoint: Path, data: Path, model: Path, tmp_path: Path) -> None:
    rows, job = read_labelled(data), job_of(checkpoint).model_copy(update={"epochs": 3, "dtype": "bfloat16"})
    quick = train(job, rows, tmp_path / "quick").state_dict()
    assert read_card(tmp_path / "quick").provenance["dtype"] == "bfloat16"
    whole = train(job.model_copy(update={"dtype": "float32"}), rows, model).state_dict()
    assert {tensor.dtype for tensor in quick.values()} == {torch.float32}
    frozen = [name for name in whole if not name.startswith("ramps")]
    assert all(quick[name].equal(whole[name]) for name in frozen)
    assert not quick["ramps.0.classifier.weight"].equal(whole["ramps.0.classifier.weight"])


@pytest.mark.parametrize(
    ("joint", "label", "words"),
    [
        (False, "weather", "the checkpoint's"),
        (True, "weather", "the checkpoint's, trained further"),
        (False, "rain", "trained on these rows, its backbone unchanged (--joint trains it too)"),
        (True, "rain", "trained on these rows, with its backbone"),
    ],
)
def test_the_heads_origin_is_printed(checkpoint: Path, tmp_path: Path, joint: bool, label: str, words: str) -> None:
    data = LabelledRows.of_texts(texts=("pay my bill", "rain in town") * 4, labels=("bill", label) * 4)
    assert describe_head(train(job_of(checkpoint, joint=joint), data, tmp_path / "new")) == words


def test_a_head_style_is_for_new_heads(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint).model_copy(update={"head_style": "mlp"})
    with pytest.raises(InputError, match=r"--head-style mlp: .* has a head for these labels; leave it out"):
        train(job, read_labelled(data), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    others = LabelledRows.of_texts(texts=("pay my bill", "rain in town") * 4, labels=("bill", "rain") * 4)
    assert train(job, others, tmp_path / "new").info.head_style == "mlp"


FEW = ["--budget", "0.5", "--confidence", "0.5"]


def network(folder: Path, height: int, width: int) -> Path:
    path = folder / "network.json"
    sizes = {"blocks": [1, 1], "widths": [8, 8], "height": height, "width": width}
    path.write_text(json.dumps({"family": "resnet", **sizes}), encoding="utf-8")
    return path


def arguments(folder: Path, backbone: Path, task: str, *tables: str) -> list[str]:
    data = ["--data", str(folder / "set"), "--part", "train", "--task", task, *tables]
    others = ["--backbone", str(backbone), "--out", str(folder / "m"), "--ramp-style", "bridge", "--joint"]
    return ["train", *data, *others]


def test_a_pose_network_is_trained_and_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_poses(tmp_path / "set", count=12)
    command = arguments(tmp_path, network(tmp_path, 32, 32), "pose", "--joints", str(table))
    assert run(*command, "--augment", "--patience", "1", "--epochs", "2", "--batch", "4") == 0
    card = read_card(tmp_path / "m")
    assert card.task["joint_names"] == list(JOINTS)
    assert card.task["mirror_pairs"] == [["left knee", "right knee"]]
    assert (card.task["heatmap_side"], card.task["tolerance"]) == (8, 3.2)
    said = ["--data", str(tmp_path / "set"), "--joints", str(table), *FEW]
    assert run("calibrate", str(tmp_path / "m"), *said) == 0
    assert (tmp_path / "m/calibration.json").is_file()
    command[command.index("--joint")] = "--hold-out=0.5"
    assert run(*command) != 0
    assert "--hold-out is not for images with joints or maps" in capsys.readouterr().err


def test_a_network_of_class_maps_is_trained_and_calibrated(tmp_path: Path) -> None:
    table = write_scenes(tmp_path / "set", count=12)
    command = arguments(tmp_path, network(tmp_path, 24, 32), "segmentation", "--classes", str(table))
    assert run(*command, "--augment", "--epochs", "2", "--batch", "4") == 0
    card = read_card(tmp_path / "m")
    assert card.task["class_names"] == list(CLASSES)
    assert card.task["ignored"] == ["Unlabelled"]
    said = ["--data", str(tmp_path / "set"), "--part", "train", "--classes", str(table), *FEW]
    assert run("calibrate", str(tmp_path / "m"), *said) == 0


def test_a_training_set_without_a_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_scenes(tmp_path / "set", ids=(0, 0))
    command = arguments(tmp_path, network(tmp_path, 24, 32), "segmentation", "--classes", str(table))
    assert run(*command) != 0
    assert "no row has a pixel of 'road'" in capsys.readouterr().err
    assert not (tmp_path / "m/model.json").exists()


def test_a_decoder_of_one_block_gets_no_ramps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = hf_decoder(num_hidden_layers=1)
    decoder.generation_config.repetition_penalty = 1.2
    decoder.save_pretrained(tmp_path / "one")
    byte_tokenizer().save(str(tmp_path / "one" / "tokenizer.json"))
    (tmp_path / "texts.txt").write_text("ab\nba\n", encoding="utf-8")
    assert run("train", "--backbone", tmp_path / "one", "--data", tmp_path / "texts.txt", "--out", tmp_path / "m") == 0
    assert (read_card(tmp_path / "m").num_blocks, read_card(tmp_path / "m").ramps) == (1, ())
    assert "answers do not follow repetition_penalty of its generation_config.json" in capsys.readouterr().err


IMAGE = (TensorSpec(name="image", shape=(24, 32, 3), dtype="uint8"),)
TOKENS = (TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True),)
MIRRORED = Moves(
    mirrored_B=torch.tensor([True, False]), shift_B2=torch.zeros(2, 2), turn_B=torch.zeros(2), zoom_B=torch.ones(2)
)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("left ankle", "right ankle"),
        ("Left ankle", "Right ankle"),
        ("ankle_left", "ankle_right"),
        ("LEFT_ANKLE", "RIGHT_ANKLE"),
        ("l_ankle", "r_ankle"),
        ("LAnkle", "RAnkle"),
        ("ankleLeft", "ankleRight"),
        ("ankle.L", "ankle.R"),
        ("leftankle", "rightankle"),
    ],
)
def test_left_and_right_joints_are_recognised_in_all_spellings(left: str, right: str) -> None:
    assert pairs_of(right, "heel", "elbow", left, "r2") == ((left, right),)


def pairs_of(*names: str, augmentation: Augmentation | None = None) -> tuple[tuple[str, str], ...]:
    count = len(names)
    rows = LabelledRows(
        columns={}, labels=(np.zeros((count, 2), np.float32),), part_names=names, sides=((32, 32),), files=("a",)
    )
    square = (TensorSpec(name="image", shape=(32, 32, 3), dtype="uint8"),)
    job = TrainJob(backbone="b", name="m", task="pose", joint=True, augment=augmentation or False)
    task = task_for(job, rows, square)
    assert isinstance(task, PoseTask)
    return task.mirror_pairs


def test_joints_without_sides_are_not_mirrored() -> None:
    assert pairs_of("0", "1", augmentation=Augmentation(mirror=False)) == ()
    assert pairs_of("nose", augmentation=Augmentation()) == (), "it is where it is"


def test_mirroring_swaps_left_and_right_joints() -> None:
    task = PoseTask(JOINTS, heatmap_side=8, image_side=32, tolerance=3, mirror_pairs=[JOINTS[:2]])
    places = torch.tensor([[[1.0, 5], [20, 6], [torch.nan, torch.nan]]] * 2)
    moved = task.moved(places, MIRRORED)
    assert moved[0, :2].tolist() == [[11, 6], [30, 5]]
    assert moved[1, :2].tolist() == places[1, :2].tolist()
    assert moved[:, 2].isnan().all()
