"""`offramp chain`: what makes a chain, and the one line that says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from earlyexit.errors import InputError
from earlyexit.network.chain_network import ChainNetwork, load_network, open_network
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.tasks.base import Task
from offramp.cli.app import main
from offramp.commands.chain import chain_models
from offramp.commands.jobs import ProfileJob
from offramp.commands.profile import profile_model
from offramp.doctor.look import look_at_target
from optimizer.calibration_file import CALIBRATION_FILE, CalibrationCard
from tests.earlyexit.families.decoders import byte_tokenizer
from tests.earlyexit.network.chains import renamed
from tests.earlyexit.network.models import ABC, small

CALIBRATION = CalibrationCard(
    policy="entropy", thresholds={0: 0.5}, budget=0.01, confidence=0.9, tested={}, provenance={}
)


def put(folder: Path, name: str, *, task: Task = ABC, blocks: int = 2, seed: int = 1) -> Path:
    """A calibrated model of texts."""
    save_model(renamed(small(task, num_blocks=blocks, seed=seed), name), folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / CALIBRATION_FILE).write_text(CALIBRATION.model_dump_json(), encoding="utf-8")
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [put(tmp_path / "little", "small"), put(tmp_path / "big", "large", blocks=3, seed=2)]


def changed(folder: Path, **changes: Any) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_a_chain_is_a_model_folder_like_others_and_a_refused_one_leaves_none(pair: list[Path], tmp_path: Path) -> None:
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
    with pytest.raises(InputError):
        chain_models(pair[:1], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_its_network_and_its_profile_are_those_of_its_models(pair: list[Path], tmp_path: Path) -> None:
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
    model = load_network(pair[0], attention="apart")
    assert (model.chain, getattr(model, "attention")) == (read_card(pair[0]).chain, "apart")  # noqa: B009
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


def test_the_doctor_looks_at_every_model(pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain_models(pair, tmp_path / "both")
    found, _ = look_at_target(tmp_path / "both")
    assert "large, a chain of small and large, 5 blocks, 3 labels" in found.found
    assert found.verdict != "failed"
    (pair[1] / "model.safetensors").write_bytes(b"broken")
    assert "big/model.safetensors cannot be read" in look_at_target(tmp_path / "both")[0].found
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
