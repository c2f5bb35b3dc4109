"""Models of every kind of rows, trained and calibrated as the command line does it."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from earlyexit.codecs.tensor import TensorCodec
from earlyexit.data.rows import PAIR, TEXT, LabelledRows, read_labelled
from earlyexit.errors import InputError
from earlyexit.families.own import TensorBackbone
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import TensorSpec
from earlyexit.network.store import read_card
from earlyexit.tasks.checks import to_png
from offramp.client.protocol import Prediction
from offramp.commands.jobs import TrainJob
from offramp.commands.kinds import codec_for
from offramp.commands.predict import MapFiles, Row, is_png, with_files
from offramp.commands.train import train
from profiles.latency import LatencyProfile
from tests.earlyexit.codecs.pictures import file_of
from tests.earlyexit.families.checkpoints import resnet_state
from tests.offramp.cli.runs import run

HERE = __name__


def png(brightness: int, seed: int) -> bytes:
    return file_of(np.random.default_rng(seed).integers(brightness, brightness + 80, (32, 32, 3), dtype=np.uint8))


def write_images(folder: Path) -> Path:
    """Ten folders of two images each, named as the ten classes of the checkpoint might be."""
    for label in range(10):
        (folder / f"class-{label}").mkdir(parents=True)
        for row in range(2):
            (folder / f"class-{label}" / f"{row}.png").write_bytes(png(10 * label, seed=2 * label + row))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "set")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "resnet8.th"
    torch.save(resnet_state(blocks_per_stage=1), path)
    return path


def test_a_resnet_gets_ramps_of_a_folder_of_images_and_thresholds(
    images: Path, resnet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    options = ["--ramp-style", "mlp", "--pooling", "grid", "--imitate", "--epochs", "2", "--hold-out", "0.5"]
    assert run("train", "--data", str(images), "--backbone", str(resnet), "--out", str(out), *options) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"10 of 20 rows held out: {out / 'held_out.zip'}",
        f"10 rows, 10 labels, ramps after blocks [0, 1]: {out}",
        "head of the full model: the checkpoint's",
    ]
    card = read_card(out)
    assert (card.family, card.num_blocks, card.ramp_style, card.pooling) == ("resnet", 3, "mlp", "grid")
    assert card.codec == {"name": "image", "height": 32, "width": 32}
    assert [boundary[0].shape for boundary in card.boundaries] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    few = ["--budget", "0.5", "--confidence", "0.5", "--json"]
    assert run("calibrate", str(out), "--data", str(out / "held_out.zip"), *few) == 0
    assert (out / "calibration.json").is_file()
    assert run("doctor", str(out)) in (0, 1), "1 where this machine could not serve it"
    assert "m, resnet, 3 blocks, 10 labels" in " ".join(capsys.readouterr().out.replace("model,", "m,").split())
    assert run("profile", str(out), "--out", str(tmp_path / "cpu.json"), "--batches", "1,2", "--repeats", "2") == 0
    profile = LatencyProfile.load(tmp_path / "cpu.json")
    assert (profile.lengths, profile.num_blocks, profile.ramps) == ((1,), 3, (0, 1))
    hop = [int(card.bytes_per_input(block, 1, float_bytes=4)) for block in range(3)]
    assert hop == [16 * 32 * 32 * 4, 32 * 16 * 16 * 4, 64 * 8 * 8 * 4]


def test_a_head_of_another_number_of_classes_is_made_anew(images: Path, resnet: Path, tmp_path: Path) -> None:
    data = read_labelled(images)
    two = data.select(row for row, label in enumerate(data.labels) if label in ("class-0", "class-9"))
    model = train(TrainJob(backbone=str(resnet), name="m", epochs=1), two, tmp_path)
    assert ("head" in model.info.provenance, model.task.num_outputs) == (False, 2)


def test_pairs_make_a_model_of_pairs_and_another_input_is_refused_by_its_name(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_text("one\ttwo\tlabel\n" + "pay\train\tbill\nrain\tpay\tweather\n" * 4, encoding="utf-8")
    data = read_labelled(tmp_path / "d.tsv", text_column="one", pair_column="two")
    model = train(TrainJob(backbone=str(checkpoint), name="m", epochs=1), data, tmp_path / "m")
    assert model.info.codec == {"name": "text_pair", "max_length": 16, "token_types": True}
    assert [spec.name for spec in model.boundary(-1)] == ["token_ids", "token_types"]
    assert of_two_inputs("token_type_ids")["token_types"]
    with pytest.raises(InputError, match="theirs:network takes 'mask' beside 'input_ids', which texts do not give"):
        of_two_inputs("mask")


def of_two_inputs(second: str) -> NamedSpec:
    """The codec of a network for pairs that takes another input beside its tokens."""
    ids = TensorSpec(name="input_ids", shape=(), dtype="int32", per_token=True)
    job = TrainJob(backbone="theirs:network", tokenizer="minilm", name="m")
    rows = LabelledRows(
        columns={TEXT: np.array(["a"], dtype=object), PAIR: np.array(["b"], dtype=object)}, labels=("x",)
    )
    return codec_for(job, (ids, replace(ids, name=second)), rows, longest=16)


class Slope(nn.Module):
    def forward(self, spectrum_BL: Tensor) -> Tensor:
        return spectrum_BL[:, None].expand(-1, 2, -1)


def network() -> TensorBackbone:
    spectrum = TensorSpec(name="spectrum", shape=(8,))
    blocks = [nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.ReLU()) for _ in range(2)]
    return TensorBackbone(embed=Slope(), blocks=blocks, inputs=(spectrum,), config={})


def spectra(labels: list[str]) -> LabelledRows:
    values = np.random.default_rng(0).standard_normal((len(labels), 8))
    return LabelledRows(columns={"spectrum": values}, labels=tuple(labels))


def test_arrays_make_a_model_of_tensors_and_a_codec_of_ones_own_is_kept(tmp_path: Path) -> None:
    model = train(TrainJob(backbone=f"{HERE}:network", name="m", epochs=1), spectra(["a", "b"] * 4), tmp_path)
    column = {"name": "spectrum", "datatype": "FP32", "shape": [8]}
    assert model.info.codec == {"name": "tensor", "columns": [column]}
    job = TrainJob(backbone=f"{HERE}:network", name="m", epochs=1, task="regression")
    model = train(job, spectra(["1.5", "2.5", "5.5", "2.5"]), tmp_path)
    assert model.task.spec() == {"name": "regression", "scale": 4.0, "offset": 3.0}
    job = TrainJob(backbone=f"{HERE}:network", name="m", epochs=1, codec=f"{HERE}:Logarithms")
    train(job, spectra(["a", "b"] * 4), tmp_path)
    assert read_card(tmp_path).codec == {"name": f"{HERE}:Logarithms", "max_length": 1}


class Logarithms(TensorCodec):
    """Spectra of any sign, up to a length of its own."""

    def __init__(self, max_length: int = 1) -> None:
        super().__init__([{"name": "spectrum", "datatype": "FP32", "shape": [8]}])
        self.max_length = max_length

    def spec(self) -> dict[str, Any]:
        return {"name": f"{HERE}:Logarithms", "max_length": self.max_length}


class Fractions(nn.Module):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels / 255


def grey_network() -> TensorBackbone:
    grey = TensorSpec(name="grey", shape=(8, 8, 1), dtype="uint8")
    return TensorBackbone(embed=Fractions(), blocks=[nn.Identity(), nn.Identity()], inputs=(grey,), config={})


AB = spectra(["a", "b"])
ROW = LabelledRows(columns={"row": np.zeros((2, 8))}, labels=("a", "b"))


MAP = np.array([[0, 1], [2, 1]], dtype=np.uint8)
CONTENT = base64.b64encode(to_png(MAP, 3)).decode()


def test_a_picture_becomes_a_file_named_after_its_image_and_none_is_written_over(tmp_path: Path) -> None:
    maps = MapFiles(tmp_path / "maps")
    said = maps.put("street/a.jpg", {"class_map": CONTENT, "score": 0.5, "note": "PNG"})
    assert said == {"class_map": str(tmp_path / "maps/a.png"), "score": 0.5, "note": "PNG"}
    assert np.asarray(Image.open(tmp_path / "maps/a.png")).tolist() == MAP.tolist()
    (tmp_path / "a.png").write_bytes(b"a photo")
    maps = MapFiles(tmp_path)
    paths = [maps.put(image, {"class_map": CONTENT})["class_map"] for image in ("1/a.jpg", "2/a.png", "b.jpg")]
    paths.append(MapFiles(tmp_path).put("elsewhere/a.jpg", {"class_map": CONTENT})["class_map"])
    assert [Path(path).name for path in paths] == ["a-2.png", "a-3.png", "b.png", "a-4.png"]
    assert (tmp_path / "a.png").read_bytes() == b"a photo"


def test_rows_of_a_run_name_the_files_and_those_that_failed_have_none(tmp_path: Path) -> None:
    rows: list[Row] = []
    write = with_files(rows.append, MapFiles(tmp_path))
    write(Row(shown={"image": "a.jpg"}, prediction=Prediction(exit=2, request_id="r", class_map=CONTENT, score=0.5)))
    write(Row(shown={"image": "b.jpg"}, error="no image"))
    assert [row.to_json() for row in rows] == [
        {"image": "a.jpg", "class_map": str(tmp_path / "a.png"), "score": 0.5, "exit": 2},
        {"image": "b.jpg", "error": "no image"},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("value", ["", "bill", "iVBORw0K", 3, None, io.BytesIO()])
def test_only_png_files_in_base64_are_taken_for_them(value: object) -> None:
    assert not is_png(value)
    assert is_png(CONTENT)
