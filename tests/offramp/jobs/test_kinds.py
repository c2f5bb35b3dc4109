"""Models for all kinds of rows, trained and calibrated by commands, and `offramp ramp`."""

from __future__ import annotations

import base64
import io
import json
import shutil
import sys
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.processors import RobertaProcessing
from torch import nn
from transformers import AutoTokenizer

from earlyexit.backends import onnx
from earlyexit.codecs import find_codec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.data.rows import PAIR, TEXT, LabelledRows, read_labelled
from earlyexit.errors import InputError, ModelFolderError
from earlyexit.families.own import TensorBackbone
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import TensorSpec, bytes_per_input
from earlyexit.network.store import WEIGHTS_FILE, load_model, read_card
from earlyexit.tasks.checks import to_png
from earlyexit.training.ramps import exit_outputs
from offramp.commands import folders, profile, serve
from offramp.commands.doctor import Finding, check_target
from offramp.commands.folders import CLASSIFIERS, KEPT, model_folder_for, read_calibration
from offramp.commands.jobs import RampJob, TrainJob
from offramp.commands.options import PredictJob
from offramp.commands.predict import IMAGES, is_png, map_folder, with_pictures
from offramp.commands.ramp import read_log
from offramp.commands.train import codec_for, train
from offramp.spec.documents import ServeJob
from profiles.latency import LatencyProfile
from tests.earlyexit.codecs.pictures import file_of
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.earlyexit.families.checkpoints import hf_inputs, hf_model, resnet_state
from tests.earlyexit.foreign.modules import Applied
from tests.offramp.cli.runs import Captured, printed, run

HERE = __name__


def png(brightness: int, seed: int) -> bytes:
    return file_of(np.random.default_rng(seed).integers(brightness, brightness + 80, (32, 32, 3), dtype=np.uint8))


def write_images(folder: Path) -> Path:
    """Ten folders of two images each, named like the checkpoint's ten classes."""
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
    options = ["--ramp-style", "mlp", "--pooling", "grid", "--epochs", "2", "--hold-out", "0.5"]
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
    hop = [int(bytes_per_input(each, 1)) for each in card.boundaries]
    assert hop == [16 * 32 * 32 * 4, 32 * 16 * 16 * 4, 64 * 8 * 8 * 4]


def test_a_head_with_another_number_of_classes_is_replaced(images: Path, resnet: Path, tmp_path: Path) -> None:
    data = read_labelled(images)
    two = data.select(row for row, label in enumerate(data.labels) if label in ("class-0", "class-9"))
    model = train(TrainJob(backbone=str(resnet), name="m", epochs=1), two, tmp_path)
    assert ("head" in model.info.provenance, model.task.num_outputs) == (False, 2)


def test_pairs_of_texts_make_a_model_of_pairs(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_text("one\ttwo\tlabel\n" + "pay\train\tbill\nrain\tpay\tweather\n" * 4, encoding="utf-8")
    data = read_labelled(tmp_path / "d.tsv", text_column="one", pair_column="two")
    model = train(TrainJob(backbone=str(checkpoint), name="m", epochs=1), data, tmp_path / "m")
    assert model.info.codec == {"name": "text_pair", "max_length": 16, "token_types": True}
    assert [spec.name for spec in model.takes(0)] == ["token_ids", "token_types"]
    assert of_two_inputs("token_type_ids")["token_types"]
    with pytest.raises(InputError, match="network takes 'mask' besides 'input_ids', which is not derived"):
        of_two_inputs("mask")


def of_two_inputs(second: str) -> NamedSpec:
    """Returns the codec of a network for pairs that takes a second input besides tokens."""
    ids = TensorSpec(name="input_ids", shape=(), dtype="int32", per_token=True)
    job = TrainJob(backbone="theirs:network", tokenizer="minilm", name="m")
    rows = LabelledRows(
        columns={TEXT: np.array(["a"], dtype=object), PAIR: np.array(["b"], dtype=object)}, labels=("x",)
    )
    return codec_for(job, (ids, replace(ids, name=second)), rows, longest=16)


def network() -> TensorBackbone:
    spectrum = TensorSpec(name="spectrum", shape=(8,))
    blocks = [nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.ReLU()) for _ in range(2)]
    as_two_channels = Applied(lambda spectrum_BL: spectrum_BL[:, None].expand(-1, 2, -1))
    return TensorBackbone(embed=as_two_channels, blocks=blocks, inputs=(spectrum,), config={})


def spectra(labels: list[str]) -> LabelledRows:
    values = np.random.default_rng(0).standard_normal((len(labels), 8))
    return LabelledRows(columns={"spectrum": values}, labels=tuple(labels))


def test_arrays_make_a_model_of_tensors_or_of_a_codec_of_ones_own(tmp_path: Path) -> None:
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
    """A codec of spectra with a maximum length."""

    def __init__(self, max_length: int = 1) -> None:
        super().__init__([{"name": "spectrum", "datatype": "FP32", "shape": [8]}])
        self.max_length = max_length

    def spec(self) -> dict[str, Any]:
        return {"name": f"{HERE}:Logarithms", "max_length": self.max_length}


def grey_network() -> TensorBackbone:
    grey = TensorSpec(name="grey", shape=(8, 8, 1), dtype="uint8")
    fractions = Applied(lambda pixels: pixels / 255)
    return TensorBackbone(embed=fractions, blocks=[nn.Identity(), nn.Identity()], inputs=(grey,), config={})


AB = spectra(["a", "b"])
ROW = LabelledRows(columns={"row": np.zeros((2, 8))}, labels=("a", "b"))


MAP = np.array([[0, 1], [2, 1]], dtype=np.uint8)
CONTENT = base64.b64encode(to_png(MAP, 3)).decode()


def put(folder: Path, image: str, **said: Any) -> dict[str, Any]:
    return with_pictures({"image": image, **said, "exit": 2}, folder)


def test_a_class_map_is_written_under_an_unused_name_of_its_image(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    with map_folder(PredictJob(maps=maps), IMAGES):
        said = put(maps, "street/a.jpg", class_map=CONTENT, score=0.5, note="PNG")
    path = str(tmp_path / "maps/a.png")
    assert said == {"image": "street/a.jpg", "class_map": path, "score": 0.5, "note": "PNG", "exit": 2}
    assert np.asarray(Image.open(tmp_path / "maps/a.png")).tolist() == MAP.tolist()
    failed = {"image": "b.jpg", "error": "no image"}
    assert with_pictures({**failed}, maps) == failed
    assert [each.name for each in maps.iterdir()] == ["a.png"]
    (tmp_path / "a.png").write_bytes(b"a photo")
    images = ("1/a.jpg", "2/a.png", "b.jpg", "elsewhere/a.jpg")
    paths = [put(tmp_path, image, class_map=CONTENT)["class_map"] for image in images]
    assert [Path(path).name for path in paths] == ["a-2.png", "a-3.png", "b.png", "a-4.png"]
    assert (tmp_path / "a.png").read_bytes() == b"a photo"


@pytest.mark.parametrize("value", ["", "bill", "iVBORw0K", "iVBORw0KGgoAA", "iVBORw0KGgo.AAA=", 3, None, io.BytesIO()])
def test_only_png_files_in_base64_are_recognised_as_pictures(value: object) -> None:
    assert not is_png(value)
    assert is_png(CONTENT)


LABELS = {0: "weather", 1: "bill", 2: 24}
"""Labels that are not in alphabetical order, one of which is a number."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(folder: Path, checkpoint: Path, family: str = "bert", **config: Any) -> Any:
    """A classifier with random weights and the tokenizer of another checkpoint."""
    theirs = hf_model(family, noise=0.3, id2label=LABELS, **config)
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    return theirs


def texts(number: int) -> list[str]:
    rng, words = np.random.default_rng(0), ("pay", "my", "bill", "rain", "in", "town", "again")
    return [" ".join(rng.choice(words, rng.integers(2, 9))) for _ in range(number)]


@pytest.mark.parametrize("family", CLASSIFIERS)
@torch.inference_mode()
def test_a_served_checkpoint_answers_as_transformers_does(
    family: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = saved(tmp_path / "tuned", checkpoint, family)
    options = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "truncation_side": "left"}
    (tmp_path / "tuned/tokenizer_config.json").write_text(json.dumps(options))
    written = json.loads((tmp_path / "tuned/tokenizer.json").read_text())
    (tmp_path / "tuned/tokenizer.json").write_text(json.dumps(written | {"post_processor": None}))
    folder = model_folder_for(tmp_path / "tuned")
    ours = load_model(folder)
    assert ours.task.spec()["label_names"] == list(map(str, LABELS.values()))
    codec = find_codec(ours.info.codec, folder)
    [cut, end] = codec.encode(["rain in town " + "pay my bill " * 9999, "pay my bill " * 11], truncate=True)
    assert cut.tensors[0].tolist() == end.tensors[0].tolist()
    one, other, *encoded = codec.encode(["pay", "Pay", *texts(9)])
    assert one.tensors[0].tolist() == other.tensors[0].tolist(), "not as tokenizer.json says"
    assert one.tensors[0].tolist() == AutoTokenizer.from_pretrained(tmp_path / "tuned")("pay").input_ids
    expected = theirs(**hf_inputs(encoded)).logits
    torch.testing.assert_close(exit_outputs(ours, encoded)[2], expected, atol=1e-5, rtol=1e-4)
    assert model_folder_for(tmp_path / "tuned") == folder, "made once"
    (tmp_path / "tuned" / "tokenizer.json").touch()
    changed = model_folder_for(tmp_path / "tuned")
    assert changed != folder, "the checkpoint's files changed"
    monkeypatch.setattr(folders, "installed_version", lambda name: f"{name} 9.9")
    assert model_folder_for(tmp_path / "tuned") != changed, "other versions may read the files in another way"


def test_a_served_roberta_puts_a_space_first_if_its_configuration_says_so(checkpoint: Path, tmp_path: Path) -> None:
    saved(tmp_path, checkpoint, "roberta", vocab_size=300)
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = RobertaProcessing(("B", 33), ("A", 32))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer", "add_prefix_space": true}')
    folder = model_folder_for(tmp_path)
    one, other = find_codec(read_card(folder).codec, folder).encode(["a b", " a b"])
    assert one.tensors[0].tolist() == other.tensors[0].tolist()


def test_the_cache_holds_a_few_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    saved(tmp_path / "tuned", checkpoint)
    saved(tmp_path / "served", checkpoint)
    often = model_folder_for(tmp_path / "served")
    (often.parents[1] / "not-a-folder").touch()
    made = []
    for _ in range(KEPT + 1):
        (tmp_path / "tuned" / "tokenizer.json").touch()
        made.append(model_folder_for(tmp_path / "tuned"))
        assert model_folder_for(tmp_path / "served") == often, "used since"
    assert [folder.is_dir() for folder in made] == [False] * 2 + [True] * (KEPT - 1)


@pytest.mark.parametrize(
    ("labels", "warning"),
    [
        (("bill", "rain"), ""),
        (("bill", ""), "labels are ignored: 1 of 2 rows have none"),
        (("bill", "pay"), "labels are ignored: 'pay' is none of the checkpoint's"),
        (("", ""), ""),
    ],
    ids=["all", "some", "others", "none"],
)
def test_only_known_labels_are_used(labels: tuple[str, str], warning: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log.csv").write_text("text,label\n" + "".join(f"a text,{label}\n" for label in labels))
    rows = read_log(RampJob(folder=tmp_path, data=tmp_path / "log.csv"), ("bill", "rain"))
    assert rows.labels == (labels if not warning else ("", ""))
    assert warning in capsys.readouterr().err


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, measures and exports in this process, because another one would import for seconds."""
    for module in (profile, serve):
        monkeypatch.setattr(module, "run_in_subprocess", lambda work, *given: work(*given))
    monkeypatch.setattr(onnx, "export_elsewhere", onnx.export)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "no fast tokenizer can be loaded from '{folder}': it has no vocabulary"),
        ("tokenizer.json", "{", "{folder}/tokenizer.json cannot be read as a fast tokenizer: EOF while parsing"),
        ("model.safetensors", None, "the weights of '{folder}' cannot be loaded: OSError: Error no file named model"),
        ("model.safetensors", POINTER, "{folder}/model.safetensors is only a pointer to the weights; run in its"),
        ("pytorch_model.bin", "<html>", "{folder}/pytorch_model.bin cannot be read as weights by torch.load: Unpickl"),
    ],
    ids=["no tokenizer", "half a tokenizer", "no weights", "not fetched", "a page"],
)
def test_the_doctor_and_serve_refuse_a_checkpoint_with_the_same_message(
    name: str, content: str | None, words: str, checkpoint: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "tuned")
    (folder / "tokenizer_config.json").unlink()
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    assert run("serve", folder) == 2
    refused = capsys.readouterr().err
    assert words.format(folder=folder) in refused
    assert check_target(folder)[0].found.removeprefix(f"{folder}: ") in refused


@pytest.mark.usefixtures("in_this_process")
def test_a_checkpoint_is_served_stock(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # its exports are those of the next test
    words = f"{checkpoint}: a classifier of transformers, 2 labels, served as it is; no input leaves early"
    assert check_target(checkpoint)[0] == Finding("given", "warning", words, f"offramp ramp {checkpoint} --data LOG")
    started: list[Any] = []
    monkeypatch.setattr(serve, "_serve_until_stopped", lambda settings, *_, **__: started.append(settings))
    serve.run(ServeJob(model=checkpoint))
    serve.run(ServeJob(model=checkpoint, plan="serial"))
    settings, serial = started
    assert serial.plan.ramps == ()
    assert [(split.first, split.end, split.ramps) for split in settings.plan.splits] == [(0, 3, ())]
    assert read_card(Path(settings.model)).label_names == ("weather", "bill")
    assert f"for exits: offramp ramp {checkpoint} --data LOG" in capsys.readouterr().out


@pytest.mark.usefixtures("in_this_process")
def test_one_command_makes_calibrates_and_reports_ramps(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    saved(tmp_path / "tuned", checkpoint)
    learned = {*np.random.default_rng(0).permutation(700)[:350].tolist()}
    rows = [text if k in learned else f"{text} again again" for k, text in enumerate(texts(700))]
    out = tmp_path / "ramped"
    unlabelled, found = "".join(json.dumps({"text": text, "label": None}) + "\n" for text in rows), list[Any]()
    for labelled in (False, True):  # of one size and shape: measured once
        log = tmp_path / ("log.csv" if labelled else "log.jsonl")
        log.write_text("text,label\n" + "".join(f"{text},bill\n" for text in rows) if labelled else unlabelled)
        report = printed(capsys, "ramp", tmp_path / "tuned", "--data", log, "--out", out)
        thresholds = {str(key): value for key, value in read_calibration(out).thresholds.items()}
        assert (report["rows"], report["thresholds"]) == (700, thresholds)
        found.append(thresholds)
        assert report["tested"]["worst_agreement"] >= 0.99, "what is promised"
        assert (report["tested"]["full_accuracy"] is None) == (not labelled), "unknown without labels"
        model, as_it_is = load_model(out), load_model(model_folder_for(tmp_path / "tuned"))
        assert model.temperatures_E[-1] == 1, "scores are the checkpoint's"
        encoded = find_codec(model.info.codec, out).encode(texts(5))
        assert exit_outputs(model, encoded)[2].equal(exit_outputs(as_it_is, encoded)[2])
        profile = LatencyProfile.load(out / "profile.json")
        assert profile.provenance["asked"]["ramps"] == [0, 1]
        assert profile.lengths == (7,), "not the two tokens more of the tested rows"
        monkeypatch.setattr("offramp.commands.ramp.saved_share", lambda *_: -0.004)
        with redirect_stderr(sys.stdout):
            assert run("ramp", tmp_path / "tuned", "--data", log, "--out", out) == 0
        said = capsys.readouterr().out
        assert ("but a constant answer would be right for 100.0%" in said) == labelled
        assert said.splitlines()[-1].startswith("next: offramp serve "), "after all warnings"
        assert "no less processor time than the model; at least 99 % of the answers stay the same, with 90 %" in said
        assert "of 700 rows: " in said
        assert ("equal the label" in said) == labelled
    assert found[0] == found[1], "labels change no exit"
    with (out / WEIGHTS_FILE).open("ab") as weights:
        weights.write(b" ")
    with pytest.raises(ModelFolderError, match=r"ramped in .* was trained or calibrated since: calibrate again"):
        read_calibration(out)
