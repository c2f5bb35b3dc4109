"""The files in examples/ are used as their readers would, with substitutes for the results of long commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from cluster.inventory import read_inventory
from cluster.render import Kubernetes, ray_service, serve_config
from deployments.api.operations import parse_predict
from deployments.replica.host import build_policy
from deployments.settings import ServeSettings
from earlyexit.codecs import find_codec
from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.errors import InputError
from earlyexit.network.boundary import Encoded, entry_piece
from earlyexit.network.model import Cut, from_wire
from earlyexit.network.store import load_model, read_card
from earlyexit.policies.base import ExitOutput
from earlyexit.tasks import find_task
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import exit_outputs
from offramp.commands.jobs import TrainJob
from offramp.commands.train import train
from offramp.spec.file import read_service
from optimizer.plans.plan_file import ModelShape, read_plan
from optimizer.problems.problem import PlanProblem
from optimizer.search.decision import Decision, Strategy
from optimizer.search.planner import solve
from tests.cluster.kuberay_schema import RayService
from tests.deployments.ingress.api.signatures import TEXT
from tests.offramp.cli.runs import Captured, printed, run
from tests.offramp.conftest import rows

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNTS = {
    "laptop": {"cpu": 2},
    "cascade/service": {"cpu": 2},
    "v100_16": {"emulated:V100": 16},
    "e3_mixed": {"emulated:V100": 6, "emulated:P100": 8, "emulated:K80": 15},
}


def quickly(problem: PlanProblem, strategy: Strategy, **_: object) -> Decision:
    """Plans in the smallest search space, because tests of the planner check which plan is best."""
    return solve(problem, "serial")


def printed_by(script: Path, *arguments: object) -> str:
    """Returns the output of a script of the examples, run in the repository."""
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=EXAMPLES.parent,
        env={"PYTHONPATH": str(EXAMPLES.parent)},
    ).stdout


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_every_example_is_read_and_rendered(examples: Path, name: str) -> None:
    service = read_service(examples / f"{name}.yaml", quickly)
    assert service.inventory.counts == COUNTS[name]
    assert service.settings.control is not None
    assert service.settings.control.problem.devices.keys() == COUNTS[name].keys()
    config = serve_config(service.settings.model_dump(), name=name, environment={}, host="0.0.0.0", port=8000)
    kubernetes = Kubernetes(image="offramp", ray_version="2.60.0")
    assert RayService.model_validate(ray_service(name, config, service.inventory, kubernetes))


def test_every_service_file_among_the_examples_is_tested(examples: Path) -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(COUNTS) - {"cascade/service"}
    manifest = RayService.model_validate(yaml.safe_load((EXAMPLES / "kuberay/rayservice.yaml").read_text("utf-8")))
    [application] = yaml.safe_load(manifest.spec.serveConfigV2)["applications"]
    held, now = application["args"], read_service(examples / "e3_mixed.yaml", quickly).settings.model_dump(mode="json")
    assert ServeSettings.model_validate(held).plan.num_blocks == 12
    problem, problem_now = (each["control"]["problem"] for each in (held, now))
    assert {name: each["count"] for name, each in problem["devices"].items()} == COUNTS["e3_mixed"]
    assert [*held, *held["control"], *problem] == [*now, *now["control"], *problem_now], "offramp render writes others"
    groups = manifest.spec.rayClusterConfig.workerGroupSpecs
    assert {each.groupName for each in groups} == {"emulated-v100", "emulated-p100", "emulated-k80"}


@pytest.mark.parametrize("name", ["v100_16", "e3_mixed"])
def test_the_request_that_an_emulated_example_shows_is_accepted(name: str) -> None:
    [body] = re.findall(r"-d '(.*)'", (EXAMPLES / f"{name}.yaml").read_text("utf-8"))
    assert parse_predict(body.encode(), TEXT.codec)[0].ids == ("0", "1")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("clusters/*.yaml")), ids=lambda path: path.stem)
def test_every_cluster_among_the_examples_costs_what_e3s_did(path: Path) -> None:
    inventory = read_inventory(path)
    usd_per_hour = sum(each.count * (each.usd_per_hour or 0.0) for each in inventory.devices.values())
    assert usd_per_hour / 3600 == pytest.approx(0.013, abs=0.0005)


NETWORK, MODALITY = EXAMPLES / "own_network", EXAMPLES / "own_modality"


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets PYTHONPATH as the examples do."""
    for folder in (NETWORK, MODALITY):
        monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path, on_path: None) -> Path:
    """The network, trained for one epoch, with a share of the rows held out."""
    (tmp_path / "data.csv").write_text(rows(20), encoding="utf-8")
    out = tmp_path / "words"
    options = ["--joint", "--epochs", "1", "--learning-rate", "0.003", "--max-length", "32", "--hold-out", "0.3"]
    named = ["--backbone", "word_network:build", "--tokenizer", str(checkpoint)]
    assert run("train", "--data", tmp_path / "data.csv", "--out", out, *named, *options) == 0
    return out


def test_the_example_network_is_loaded_by_name_with_a_policy_of_its_own(folder: Path) -> None:
    card = read_card(folder)
    assert (card.family, card.num_blocks, card.ramps, card.max_length) == ("word_network:build", 4, (0, 1, 2), 32)
    assert load_model(folder).takes(1)[0].shape == (card.backbone["width"],)
    assert len(read_labelled(folder / "held_out.csv")) == 6, "three of ten rows of both labels"
    model = load_model(folder)
    plan = read_plan(NETWORK / "plan.yaml", ModelShape(num_blocks=4, ramps=(0, 1, 2)))
    policy = build_policy(plan.policy)
    [stage] = plan.stages
    wire = entry_piece(["x"], [Encoded(3, (np.array([2, 3, 4], dtype=np.int32),))])
    piece, answers = from_wire(model, wire, policy), 0
    for split in stage.splits:
        for step in Cut(model, split.first, split.end, split.ramps, policy).run(piece):
            answers += len(step.answers)
            survivors = step.survivors
        if survivors is None:
            break
        piece = survivors
    assert answers == 1


def test_the_examples_policies_look_at_margins_or_at_two_ramps(on_path: None, tmp_path: Path) -> None:
    from word_exits import margin, twice_sure  # type: ignore[import-not-found] # of a folder that is on no path

    sure, unsure = [9.0, 0.0, 0.0], [1.0, 0.5, 0.0]
    none_BS = torch.zeros(2, 1)
    said = ExitOutput(LabelTask(("a", "b", "c")), torch.tensor([sure, unsure]))
    assert margin.decide(0, said, torch.zeros(2, 0), ("a", "b")).leave_B.tolist() == [True, False]
    first = twice_sure.decide(0, said, none_BS, ("a", "b"))
    assert (first.leave_B.tolist(), first.state_BS.tolist()) == ([False, False], [[1.0], [0.0]])
    assert twice_sure.decide(1, said, first.state_BS, ("a", "b")).leave_B.tolist() == [True, False]
    texts = LabelledRows.of_texts(("a", "b"), ("x", "y"))
    with pytest.raises(InputError, match="word_network:build has no tokenizer: choose one with --tokenizer"):
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


GRADES = ("1 unripe", "2 early", "3 ripe", "4 late", "5 spoiled")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fruit") / "fruit.npz"
    assert printed_by(MODALITY / "fruit.py", path, 600) == f"600 spectra of 5 grades: {path}\n"
    return path


def test_the_whole_example_is_short_and_grades_cost_by_their_distance(on_path: None) -> None:
    lines = [line for path in MODALITY.iterdir() if path.is_file() for line in path.read_text().splitlines()]
    assert len(lines) < 150
    task = find_task({"name": "fruit:grades"})
    assert task.loss(np.array([0, 1, 4]), np.array([0, 0, 0])).tolist() == [0.0, 0.25, 1.0]
    assert not task.zero_one


def test_spectra_are_learned_within_the_budget(data: Path, tmp_path: Path, on_path: None, capsys: Captured) -> None:
    out = tmp_path / "fruit"
    own = ["--backbone", "fruit:build", "--task", "fruit:grades", "--pooling", "grid"]
    learning = ["--joint", "--epochs", "8", "--learning-rate", "0.003", "--hold-out", "0.5"]
    assert run("train", "--data", str(data), "--out", str(out), *own, *learning) == 0
    card = read_card(out)
    assert card.codec == {"name": "tensor", "columns": [{"name": "spectrum", "datatype": "FP32", "shape": [128]}]}
    assert card.task == {"name": "fruit:grades", "label_names": list(GRADES)}
    assert [boundary[0].shape for boundary in card.boundaries] == [(24, 64), (32, 32), (40, 16), (48, 8)]
    capsys.readouterr()
    loose = ("--policy", "confidence", "--budget", "0.05")
    tested = printed(capsys, "calibrate", out, "--data", out / "held_out.npz", *loose)["tested"]
    assert tested["agreement"] >= 0.95, "the mean loss is within the budget"
    assert tested["mean_blocks"] < 4
    model, rows = load_model(out), read_labelled(out / "held_out.npz")
    outputs = exit_outputs(model, rows.encode(find_codec(card.codec, out)))[3]
    loss = model.task.loss(model.task.answer(outputs).numpy(), model.task.targets(rows.labels))
    assert loss.mean() < 0.1, "grades are off by less than half a grade"
