"""The network and the exit logic in examples/own_network, run as a reader runs them, on few rows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.replica.build import build_policy
from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.errors import InputError
from earlyexit.network.boundary import Encoded, entering
from earlyexit.network.cut import cut_out
from earlyexit.network.model import from_wire
from earlyexit.network.store import load_model, read_card
from earlyexit.policies.base import Opinion
from earlyexit.tasks.label import LabelTask
from offramp.commands.jobs import TrainJob
from offramp.commands.train import train
from offramp.spec.file import read_service
from optimizer.plan_file import ModelShape, read_plan
from tests.offramp.cli.runs import run
from tests.offramp.conftest import rows
from tests.offramp.test_examples import printed_by, quickly

EXAMPLES = Path(__file__).parents[2] / "examples"
NETWORK = EXAMPLES / "own_network"


@pytest.fixture
def network_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH as the example has it."""
    monkeypatch.syspath_prepend(str(NETWORK))


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path, network_path: None) -> Path:
    """The network, trained for one epoch, with a share of the rows held out."""
    (tmp_path / "data.csv").write_text(rows(20), encoding="utf-8")
    out = tmp_path / "words"
    options = ["--joint", "--epochs", "1", "--learning-rate", "0.003", "--max-length", "32", "--hold-out", "0.3"]
    named = ["--backbone", "word_network:build", "--tokenizer", str(checkpoint)]
    assert run("train", "--data", tmp_path / "data.csv", "--out", out, *named, *options) == 0
    return out


def test_the_network_is_loaded_by_name_and_its_own_rule_lets_inputs_out(folder: Path) -> None:
    card = read_card(folder)
    assert (card.family, card.num_blocks, card.ramps, card.max_length) == ("word_network:build", 4, (0, 1, 2), 32)
    assert load_model(folder).boundary(0)[0].shape == (card.backbone["width"],)
    assert len(read_labelled(folder / "held_out.csv")) == 6, "three of ten rows of both labels"
    model = load_model(folder)
    plan = read_plan(NETWORK / "plan.yaml", ModelShape(num_blocks=4, ramps=(0, 1, 2)))
    policy = build_policy(plan.policy)
    [stage] = plan.stages
    wire = entering(["x"], [Encoded(3, (np.array([2, 3, 4], dtype=np.int32),))])
    piece, answers = from_wire(model, wire, policy), 0
    for split in stage.splits:
        for step in cut_out(model, split.first, split.end, split.ramps, policy).run(piece):
            answers += len(step.answers)
            survivors = step.survivors
        if survivors is None:
            break
        piece = survivors
    assert answers == 1


def test_rules_look_at_margins_and_at_two_ramps_and_texts_need_a_tokenizer(network_path: None, tmp_path: Path) -> None:
    from word_exits import margin, twice_sure  # type: ignore[import-not-found] # of a folder that is on no path

    sure, unsure = [9.0, 0.0, 0.0], [1.0, 0.5, 0.0]
    none_BS = torch.zeros(2, 1)
    said = Opinion(LabelTask(("a", "b", "c")), torch.tensor([sure, unsure]))
    assert margin.decide(0, said, torch.zeros(2, 0), ("a", "b")).leave_B.tolist() == [True, False]
    first = twice_sure.decide(0, said, none_BS, ("a", "b"))
    assert (first.leave_B.tolist(), first.state_BS.tolist()) == ([False, False], [[1.0], [0.0]])
    assert twice_sure.decide(1, said, first.state_BS, ("a", "b")).leave_B.tolist() == [True, False]
    texts = LabelledRows.of_texts(("a", "b"), ("x", "y"))
    with pytest.raises(InputError, match="word_network:build brings no tokenizer: --tokenizer names one, minilm"):
        train(TrainJob(backbone="word_network:build", name="words"), texts, tmp_path / "words")


def test_the_made_up_csv_has_rows_of_twelve_labels(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "mine.csv"
    assert printed_by(EXAMPLES / "own_csv/make_csv.py", path, 5) == f"60 rows, 12 labels: {path}\n"
    assert len(read_labelled(path).label_names) == 12


def test_the_documents_service_file_and_ones_own_accelerator_are_accepted(examples: Path) -> None:
    service = read_service(examples / "own_accelerator" / "service.yaml", quickly)
    assert service.inventory.counts == {"emulated:edge-box": 3}
    assert service.inventory.devices["emulated:edge-box"].usd_per_hour == 0.12
    assert service.settings.emulated["emulated:edge-box"].decisions == "computed"
    assert {stage.device for stage in service.settings.plan.stages} == {"emulated:edge-box"}
    document = (EXAMPLES.parent / "docs" / "quickstart.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^```yaml\n(.*?)^```", document, flags=re.DOTALL | re.MULTILINE)
    (examples.parent / "mine.yaml").write_text(text, encoding="utf-8")
    (examples.parent / "runs/mine/edge-box.json").rename(examples.parent / "runs/mine/cpu.json")
    assert read_service(examples.parent / "mine.yaml", quickly).inventory.counts == {"cpu": 2}
