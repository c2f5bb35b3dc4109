"""Checkpoints of `transformers` without preparation: served as they are, and ramped by one command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earlyexit.codecs import find_codec
from earlyexit.errors import ModelFolderError
from earlyexit.network.store import WEIGHTS_FILE, load_model, read_card
from earlyexit.training.ramps import exit_outputs
from offramp.commands import serve
from offramp.commands.calibrated import read_calibration
from offramp.commands.checkpoint import CLASSIFIERS, KEPT, model_folder_of
from offramp.commands.jobs import RampJob
from offramp.commands.ramp import read_log
from offramp.doctor.look import look_at_target
from offramp.spec.jobs import ServeJob
from tests.earlyexit.families.checkpoints import hf_inputs, hf_model
from tests.offramp.cli.runs import Captured, printed, run

LABELS = {0: "weather", 1: "bill", 2: "card"}
"""Not in the order of the alphabet."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(folder: Path, checkpoint: Path, family: str = "bert", **config: Any) -> Any:
    """A classifier of random weights, with the tokenizer of another checkpoint."""
    theirs = hf_model(family, noise=0.3, id2label=LABELS, label2id={name: k for k, name in LABELS.items()}, **config)
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    return theirs


def texts(number: int) -> list[str]:
    rng, words = np.random.default_rng(0), ("pay", "my", "bill", "rain", "in", "town", "again")
    return [" ".join(rng.choice(words, rng.integers(2, 9))) for _ in range(number)]


@pytest.mark.parametrize("family", CLASSIFIERS)
@torch.inference_mode()
def test_a_served_checkpoint_answers_as_transformers_does(family: str, checkpoint: Path, tmp_path: Path) -> None:
    theirs = saved(tmp_path / "tuned", checkpoint, family)
    folder = model_folder_of(tmp_path / "tuned")
    ours = load_model(folder)
    assert ours.task.spec()["label_names"] == list(LABELS.values())
    encoded = find_codec(ours.info.codec, folder).encode(texts(9))
    expected = theirs(**hf_inputs(encoded)).logits
    torch.testing.assert_close(exit_outputs(ours, encoded)[2], expected, atol=1e-5, rtol=1e-4)
    assert model_folder_of(tmp_path / "tuned") == folder, "made once"
    (tmp_path / "tuned" / "tokenizer.json").touch()
    assert model_folder_of(tmp_path / "tuned") != folder, "the checkpoint's files changed"


def test_the_cache_holds_a_few_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    saved(tmp_path / "tuned", checkpoint)
    saved(tmp_path / "served", checkpoint)
    often = model_folder_of(tmp_path / "served")
    (often.parents[1] / "not-a-folder").touch()
    made = []
    for _ in range(KEPT + 1):
        (tmp_path / "tuned" / "tokenizer.json").touch()
        made.append(model_folder_of(tmp_path / "tuned"))
        assert model_folder_of(tmp_path / "served") == often, "used since"
    assert [folder.is_dir() for folder in made] == [False] * 2 + [True] * (KEPT - 1)


@pytest.mark.parametrize(
    ("labels", "warning"),
    [
        (("bill", "rain"), ""),
        (("bill", ""), "labels are not looked at: 1 of 2 rows have none"),
        (("bill", "pay"), "labels are not looked at: 'pay' is none of the checkpoint's"),
        (("", ""), ""),
    ],
    ids=["all", "some", "others", "none"],
)
def test_labels_count_where_all_fit(labels: tuple[str, str], warning: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log.csv").write_text("text,label\n" + "".join(f"a text,{label}\n" for label in labels))
    rows = read_log(RampJob(folder=tmp_path, data=tmp_path / "log.csv"), ("bill", "rain"))
    assert rows.labels == (labels if not warning else ("", ""))
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (None, "no fast tokenizer can be loaded from '{folder}': it has no vocabulary"),
        ("{", "{folder}/tokenizer.json holds no fast tokenizer that can be read: EOF while parsing"),
    ],
    ids=["missing", "broken"],
)
def test_the_doctor_refuses_a_tokenizer_in_the_words_of_serve(
    tokenizer: str | None, words: str, checkpoint: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "tuned")
    file = folder / "tokenizer.json"
    file.unlink() if tokenizer is None else file.write_text(tokenizer)
    assert run("serve", folder) == 2
    refused = capsys.readouterr().err
    assert words.format(folder=folder) in refused
    assert look_at_target(folder)[0].found.removeprefix(f"{folder}: ") in refused


def test_a_checkpoint_is_served_stock(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "_serve_until_stopped", lambda settings, *_, **__: started.append(settings))
    serve.run(ServeJob(model=checkpoint))
    [settings] = started
    assert [(split.first, split.end, split.ramps) for split in settings.plan.splits] == [(0, 3, ())]
    assert read_card(Path(settings.model)).label_names == ("weather", "bill")
    assert f"for exits: offramp ramp {checkpoint} --data LOG" in capsys.readouterr().out


def test_one_command_makes_calibrates_and_reports_ramps(checkpoint: Path, tmp_path: Path, capsys: Captured) -> None:
    saved(tmp_path / "tuned", checkpoint)
    out, log, rows = tmp_path / "ramped", tmp_path / "log.csv", texts(700)
    for labelled in (False, True):  # of one size and shape: measured once
        log.write_text(
            "text,label\n" + "".join(f"{text},bill\n" for text in rows) if labelled else "\n".join(["text", *rows])
        )
        report = printed(capsys, "ramp", tmp_path / "tuned", "--data", log, "--out", out)
        thresholds = {str(key): value for key, value in read_calibration(out).thresholds.items()}
        assert (report["rows"], report["thresholds"]) == (700, thresholds)
        assert report["tested"]["worst_agreement"] >= 0.99, "what is promised"
        assert (report["tested"]["full_accuracy"] == 1) == (not labelled), "else the checkpoint is right"
        model, as_it_is = load_model(out), load_model(model_folder_of(tmp_path / "tuned"))
        assert model.temperatures_E[-1] == 1, "scores are the checkpoint's"
        encoded = find_codec(model.info.codec, out).encode(texts(5))
        assert exit_outputs(model, encoded)[2].equal(exit_outputs(as_it_is, encoded)[2])
        assert json.loads((out / "profile.json").read_text())["provenance"]["asked"]["ramps"] == [0, 1]
        assert run("ramp", tmp_path / "tuned", "--data", log, "--out", out) == 0
        said = capsys.readouterr().out
        assert "of the model's processor time; at least 99 % of the answers stay the same, with 90 % confidence" in said
        assert "of 700 rows: " in said
        assert ("as labelled" in said) == labelled
    with (out / WEIGHTS_FILE).open("ab") as weights:
        weights.write(b" ")
    with pytest.raises(ModelFolderError, match=r"calibration.json: ramped .* is not what it was then.*calibrate again"):
        read_calibration(out)


def test_weights_without_the_head_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path / "tuned", checkpoint)
    path = tmp_path / "tuned" / WEIGHTS_FILE
    save_file(
        {name: each for name, each in load_file(path).items() if "classifier" not in name}, path, {"format": "pt"}
    )
    with pytest.raises(ModelFolderError, match=r"the weights of .*tuned' lack classifier.bias"):
        model_folder_of(tmp_path / "tuned")
