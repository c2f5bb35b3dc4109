"""`offramp chain`: what makes a chain, and the one line that says what is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from earlyexit.errors import InputError, ModelFolderError, OfframpError
from earlyexit.network.chain_network import ChainNetwork, load_network, open_network
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from offramp.cli.app import main
from offramp.commands.chain import chain_models
from offramp.commands.jobs import ProfileJob
from offramp.commands.profile import profile_model
from offramp.doctor.look import look_at_target
from optimizer.calibration_file import CALIBRATION_FILE, CalibrationCard
from tests.earlyexit.network.chains import renamed
from tests.earlyexit.network.models import ABC, small

CALIBRATION = CalibrationCard(
    policy="entropy", thresholds={0: 0.5}, budget=0.01, confidence=0.9, tested={}, provenance={}
)


def put(folder: Path, name: str, checkpoint: Path, *, task: Task = ABC, blocks: int = 2, seed: int = 1) -> Path:
    """A calibrated model of texts."""
    save_model(renamed(small(task, num_blocks=blocks, seed=seed), name), folder)
    shutil.copyfile(checkpoint / "tokenizer.json", folder / "tokenizer.json")
    (folder / CALIBRATION_FILE).write_text(CALIBRATION.model_dump_json(), encoding="utf-8")
    return folder


@pytest.fixture
def pair(tmp_path: Path, checkpoint: Path) -> list[Path]:
    return [put(tmp_path / "little", "small", checkpoint), put(tmp_path / "big", "large", checkpoint, blocks=3, seed=2)]


def changed(folder: Path, **changes: Any) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_a_chain_is_a_model_folder_like_any_other(pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "cascades" / "one"
    card = chain_models(pair, out)
    assert read_card(out) == card
    assert (card.name, card.family, card.num_blocks, card.ramps) == ("large", "chain", 5, (0, 1, 2, 3))
    assert card.backbone == {"models": ["../../little", "../../big"], "names": ["small", "large"], "blocks": [2, 3]}
    assert (card.label_names, card.max_length, card.input_kind, card.has_tokens) == (("a", "b", "c"), 32, "text", True)
    assert [len(each) for each in card.boundaries] == [1, 0, 1, 1, 1]
    assert card.members(out) == tuple(folder.resolve() for folder in pair)
    assert card.chain.networks == (2, 5)
    assert [each["name"] for each in card.provenance["members"]] == ["small", "large"]
    assert chain_models(pair, out, name="both").name == "both"


def test_its_network_is_that_of_its_models(pair: list[Path], tmp_path: Path) -> None:
    chain_models(pair, tmp_path / "both")
    network = load_network(tmp_path / "both", attention="padded")
    assert isinstance(network, ChainNetwork)
    assert network.chain == read_card(tmp_path / "both").chain
    assert [member.attention for member in network.members] == ["padded", "padded"]
    for member, folder in zip(network.members, pair, strict=True):
        alone = load_model(folder).state_dict()
        assert all(torch.equal(value, alone[name]) for name, value in member.state_dict().items())
    assert load_network(tmp_path / "both", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert open_network("torch", network, tmp_path / "both", 1) is network
    with pytest.raises(ModelFolderError, match="both is a chain of small, large; a single model is needed here"):
        load_model(tmp_path / "both")


def test_of_one_model_it_is_the_model(pair: list[Path]) -> None:
    model = load_network(pair[0], attention="apart")
    assert (model.chain, getattr(model, "attention")) == (read_card(pair[0]).chain, "apart")  # noqa: B009


def test_a_profile_has_the_rows_of_its_models_one_after_the_other(pair: list[Path], tmp_path: Path) -> None:
    chain_models(pair, tmp_path / "both")
    job = ProfileJob(batches=(1, 2), lengths=(4,), repeats=1)
    profile, points = profile_model(tmp_path / "both", job)
    assert (profile.model, profile.num_blocks, profile.ramps) == ("large", 5, (0, 1, 2, 3))
    assert profile.at(4).block_s_NB.shape == (5, 2)
    assert {(each.timed.split.first, each.timed.split.end) for each in points if not each.timed.split.ramps} == {
        *((block, block + 1) for block in range(5)),
        (0, 2),
        (2, 5),
    }


def test_doctor_looks_at_every_model(pair: list[Path], tmp_path: Path) -> None:
    chain_models(pair, tmp_path / "both")
    found = look_at_target(tmp_path / "both")
    assert (found.problem, found.words) == (None, "large, a chain of small and large, 5 blocks, 3 labels")
    (pair[1] / "model.safetensors").write_bytes(b"broken")
    assert "big/model.safetensors cannot be read" in str(look_at_target(tmp_path / "both").problem)


def other_labels(task: Task) -> Callable[[list[Path], Path], list[Path]]:
    return lambda pair, checkpoint: [pair[0], put(pair[1].parent / "other", "other", checkpoint, task=task)]


def spoilt(what: Callable[[list[Path]], object]) -> Callable[[list[Path], Path], list[Path]]:
    def change(pair: list[Path], _: Path) -> list[Path]:
        what(pair)
        return pair

    return change


def without(name: str) -> Callable[[list[Path], Path], list[Path]]:
    return spoilt(lambda pair: (pair[0] / name).unlink())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(
            other_labels(LabelTask(("a", "c", "b"))),
            "have the same labels in another order: label 1 is 'b' in the one, 'c' in the other",
            id="order",
        ),
        pytest.param(
            other_labels(LabelTask(("a", "b", "d", "e"))),
            "other labels, 3 and 4: .*other has no 'c'; .*little has no 'd', 'e'",
            id="labels",
        ),
        pytest.param(
            other_labels(RegressionTask(offset=0.0, scale=1.0)), "other answers by task 'regression'", id="task"
        ),
        pytest.param(lambda pair, _: [pair[0], pair[0]], "little is named twice", id="the same folder"),
        pytest.param(spoilt(lambda pair: changed(pair[0], name="large")), "are both called 'large'", id="same name"),
        pytest.param(without(CALIBRATION_FILE), "little is not calibrated; run: offramp calibrate", id="calibration"),
        pytest.param(without("tokenizer.json"), "tokenizer", id="tokenizer"),
        pytest.param(without("model.safetensors"), r"little/model\.safetensors cannot be read", id="weights"),
        pytest.param(without("model.json"), "is not a model folder", id="card"),
        pytest.param(
            spoilt(lambda pair: changed(pair[0], codec={"name": "text_pair", "max_length": 8})),
            "little takes 'text_pair' inputs, .*big takes 'text' inputs: the models",
            id="inputs",
        ),
        pytest.param(lambda pair, _: pair[:1], "a chain has two models at least", id="one"),
    ],
)
def test_what_makes_no_chain_is_refused_in_one_line(
    spoil: Callable[[list[Path], Path], list[Path]], said: str, pair: list[Path], tmp_path: Path, checkpoint: Path
) -> None:
    folders = spoil(pair, checkpoint)
    with pytest.raises(OfframpError, match=said) as refused:
        chain_models(folders, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_chain_takes_no_other_models_folder_and_no_chain(pair: list[Path], tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(InputError, match="big is one of the chain's models"):
        chain_models(pair, pair[1])
    other = put(tmp_path / "other", "other", checkpoint)
    with pytest.raises(InputError, match="other holds a single model"):
        chain_models(pair, other)
    chain_models(pair, tmp_path / "both", name="both")
    with pytest.raises(InputError, match="both is a chain itself"):
        chain_models([other, tmp_path / "both"], tmp_path / "more")


def test_models_that_moved_or_changed_are_said_in_one_line(pair: list[Path], tmp_path: Path, checkpoint: Path) -> None:
    out = tmp_path / "both"
    chain_models(pair, out)
    card = read_card(out)
    pair[0].rename(tmp_path / "elsewhere")
    with pytest.raises(ModelFolderError, match=r"'small' is not at \.\./little, .*offramp chain. makes the chain anew"):
        card.members(out)
    put(pair[0], "small", checkpoint, blocks=4)
    with pytest.raises(ModelFolderError, match="little held 'small' of 2 blocks, and now holds 'small' of 4"):
        load_network(out)


def test_models_that_were_trained_on_other_labels_since_are_no_longer_the_chain(
    pair: list[Path], tmp_path: Path, checkpoint: Path
) -> None:
    chain_models(pair, tmp_path / "both")
    turned = LabelTask(("c", "b", "a"))
    for folder, name, blocks in zip(pair, ("small", "large"), (2, 3), strict=True):
        put(folder, name, checkpoint, task=turned, blocks=blocks)
    with pytest.raises(ModelFolderError, match=r"both/model\.json: its models have other labels, or in another"):
        load_network(tmp_path / "both")


@pytest.mark.parametrize(
    ("backbone", "said"),
    [
        pytest.param({"models": ["a", "b"], "names": ["a", "b"]}, "backbone: blocks: Field required", id="blocks"),
        pytest.param({"models": ["a"], "names": ["a"], "blocks": [5]}, "backbone: models: ", id="one"),
        pytest.param(
            {"models": ["a", "b"], "names": ["a", "b"], "blocks": [2, 2]}, "4 together, num_blocks is 5", id="sum"
        ),
        pytest.param({"models": ["a", "b"], "names": ["a", "b"], "blocks": [0, 5]}, "has blocks", id="empty"),
        pytest.param(
            {"models": ["a", "b", "c"], "names": ["a", "b"], "blocks": [2, 3]},
            "3 models, with the names of 2",
            id="names",
        ),
    ],
)
def test_a_card_that_is_no_chains_is_refused(
    backbone: dict[str, Any], said: str, pair: list[Path], tmp_path: Path
) -> None:
    chain_models(pair, tmp_path / "both")
    changed(tmp_path / "both", backbone=backbone)
    with pytest.raises(ModelFolderError, match=said) as refused:
        read_card(tmp_path / "both")
    assert "\n" not in str(refused.value)


def test_the_command_says_which_blocks_are_whose(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["chain", *map(str, pair), "--out", str(tmp_path / "both")]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["networks"] == [
        {"name": "small", "first": 0, "end": 2},
        {"name": "large", "first": 2, "end": 5},
    ]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["small: blocks 0 to 1, its end is ramp 1", "large: blocks 2 to 4, the reference"]
