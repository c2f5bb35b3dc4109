"""Adding ramps to foreign models, as `offramp inject` does it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from earlyexit.codecs import find_codec
from earlyexit.data.rows import IMAGE, LabelledRows, objects, read_labelled
from earlyexit.errors import DataError, GraphError, InputError, OfframpError
from earlyexit.foreign.torch_backbone import GRAPH_FILE
from earlyexit.foreign.torch_module import TorchModel
from earlyexit.network.boundary import Encoded
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import CARD_FILE, WEIGHTS_FILE, load_model, read_card
from earlyexit.training.ramps import exit_outputs
from offramp.commands.calibrate import calibrate
from offramp.commands.folders import read_calibration
from offramp.commands.inject import (
    InjectionResult,
    Times,
    answer_names,
    crossing_sites,
    inject,
    ramps_worth_their_time,
    read_model,
    time_exits,
)
from offramp.commands.jobs import CalibrateJob, InjectJob
from optimizer.calibration.calibration_file import CALIBRATION_FILE, RECORDS_FILE
from profiles.table import FloatArray
from tests.earlyexit.codecs.pictures import file_of
from tests.earlyexit.foreign.modules import SIDE, masked, pictures
from tests.offramp.cli.runs import Captured

HERE = "tests.earlyexit.foreign.modules"
ROWS, HELD = 240, 320
LOOSE = CalibrateJob(budget=0.2, confidence=0.9)


def png(seed: int) -> bytes:
    """An image with its own colour, so that networks with random weights give different answers."""
    rng = np.random.default_rng(seed)
    return file_of((rng.integers(0, 200, 3) + rng.integers(0, 56, (SIDE, SIDE, 3))).astype(np.uint8))


def rows_of(count: int = ROWS, *, labels: tuple[str, ...] = ("",)) -> LabelledRows:
    images = objects(map(png, range(count)))
    return LabelledRows(columns={IMAGE: images}, labels=tuple(labels[k % len(labels)] for k in range(count)))


def job_of(backbone: str = f"{HERE}:pictures", **options: Any) -> InjectJob:
    facts: dict[str, Any] = {"backbone": backbone, "name": "m", "epochs": 2, "source": "d.zip"}
    return InjectJob(**facts | options)


def uncut_answers(network: nn.Module, encoded: Sequence[Encoded]) -> torch.Tensor:
    """Returns the outputs of a module for encoded images."""
    with torch.no_grad():
        answers: torch.Tensor = network(torch.from_numpy(np.concatenate([each.tensors[0] for each in encoded])))
    return answers


def full_outputs(folder: Path, rows: LabelledRows) -> tuple[list[Encoded], torch.Tensor]:
    """Returns encoded rows, and the full model's outputs for them."""
    model = load_model(folder)
    encoded = rows.encode(find_codec(model.info.codec, folder))
    return encoded, exit_outputs(model, encoded)[model.num_blocks - 1]


def quick_ramps(model: EarlyExitModel, folder: Path) -> tuple[FloatArray, FloatArray]:
    """Times in which ramps are faster than blocks, which they are not in models as small as these."""
    return np.ones(model.num_blocks), np.full(len(model.ramp_indices), 0.1)


def injected_into(out: Path, data: LabelledRows, **options: Any) -> InjectionResult:
    return inject(job_of(**options), data, out, times=quick_ramps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is injected with rows without labels, half of which are held out."""
    out = tmp_path_factory.mktemp("injected")
    injected_into(out, rows_of(2 * HELD), hold_out=0.5)
    return out


def test_an_injected_model_answers_as_its_module_and_can_be_calibrated(folder: Path) -> None:
    (network, _), model, card = pictures(), load_model(folder), read_card(folder)
    encoded, outputs = full_outputs(folder, rows_of(20))
    assert outputs.equal(uncut_answers(network, encoded))
    assert card.provenance["backbone_sha256"] == model.backbone.sha256()
    assert (card.family, card.head_style, card.label_names) == ("exported", "given", ("0", "1", "2"))
    held = read_labelled(folder / "held_out.zip")
    assert len(held) == HELD
    calibrated, records = calibrate(folder, held, LOOSE)
    assert records.outcome({}).full_accuracy == 1.0, "the rows that are kept are labelled with the model's answers"
    assert set(calibrated.thresholds) <= set(model.ramp_indices)


@pytest.mark.parametrize("labelled", [False, True])
def test_calibration_does_not_change_the_modules_scores(folder: Path, tmp_path: Path, labelled: bool) -> None:
    out = tmp_path / "model"
    if labelled:
        injected_into(out, rows_of(2 * HELD, labels=("0", "1", "2")), hold_out=0.5, from_answers=True)
    else:
        shutil.copytree(folder, out)
    calibrate(out, read_labelled(out / "held_out.zip"), LOOSE)
    assert read_calibration(out).policy == "entropy"
    encoded, outputs = full_outputs(out, rows_of(20))
    theirs = uncut_answers(pictures()[0], encoded).softmax(1)
    assert torch.allclose(outputs.softmax(1), theirs, atol=1e-4, rtol=0)


def test_calibration_does_not_change_an_onnx_files_scores(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from tests.earlyexit.foreign.onnx_graphs import PIXELS, picture_feeds, pictures_graph, saved, uncut

    path = saved(pictures_graph(seed=5), tmp_path / "theirs")
    injected_into(tmp_path / "m", rows_of(2 * HELD), backbone=str(path), **PIXELS, hold_out=0.5)
    calibrate(tmp_path / "m", read_labelled(tmp_path / "m" / "held_out.zip"), LOOSE)
    answer, (encoded, outputs) = uncut(path), full_outputs(tmp_path / "m", rows_of(20))
    theirs = torch.from_numpy(np.concatenate([answer(picture_feeds(each)) for each in encoded])).softmax(1)
    assert torch.allclose(outputs.softmax(1), theirs, atol=1e-4, rtol=0)


def test_a_file_that_rounds_its_inputs_is_checked_with_the_users_rows(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    from tests.earlyexit.foreign.onnx_graphs import LETTERS, rounding_graph, saved

    path = saved(rounding_graph(seed=8), tmp_path / "theirs")  # of these weights two answers are given
    rng = np.random.default_rng(1)
    few = [
        rng.choice(rng.choice(np.arange(2, LETTERS, dtype=np.int32), 3, replace=False), 128) for _ in range(2 * HELD)
    ]
    letters = np.stack(few)
    rows = LabelledRows(columns={"bytes": letters}, labels=("",) * len(letters))
    injected_into(tmp_path / "m", rows, backbone=str(path))
    calibrate(tmp_path / "m", rows, LOOSE)
    with pytest.raises(DataError, match=r"rows without labels; --metric harm needs labels"):
        calibrate(tmp_path / "m", rows, CalibrateJob(budget=0.2, metric="harm"))
    _, outputs = full_outputs(tmp_path / "m", rows.select(range(50)))
    [wanted] = runtime.InferenceSession(path).run(None, {"bytes": letters[:50]})
    assert torch.allclose(outputs.softmax(1), torch.from_numpy(wanted).softmax(1), atol=1e-4, rtol=0)


def test_impossible_cuts_are_reported_unless_no_other_is_left(tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("onnxruntime")
    from tests.earlyexit.foreign.onnx_graphs import PIXELS, across_graph, saved

    path = saved(across_graph(seed=3), tmp_path / "theirs")
    done = inject(job_of(str(path), **PIXELS), rows_of(), tmp_path / "model", times=quick_ramps)
    said = capsys.readouterr().out
    assert said.startswith("no cut at 'across': the graph's tensor 'across', [8, 2] for 2 inputs, has a row neither")
    assert done.model.info.provenance["cuts"] == [["r0"], ["c1"], ["back"]]

    class Nowhere(TorchModel):
        def refused(self, cuts: Sequence[Sequence[str]]) -> dict[tuple[str, ...], str]:
            return {tuple(cut): "it is crooked" for cut in cuts}

    found = read_model(job_of(), rows_of())
    with pytest.raises(GraphError, match=r"pictures: cannot be cut at any site; not at '.*': it is crooked$"):
        crossing_sites(job_of(), Nowhere(**vars(found)))


def test_sets_of_tensors_cut_a_module_with_a_mask_without_changing_its_answers(tmp_path: Path) -> None:
    network, _ = masked()
    model = injected_into(tmp_path, rows_of(), backbone=f"{HERE}:masked", sets=True).model
    assert [len(cut) for cut in model.info.provenance["cuts"]] == [2, 2, 2, 1]
    encoded, outputs = full_outputs(tmp_path, rows_of(20))
    assert outputs.equal(uncut_answers(network, encoded))


@pytest.mark.parametrize(
    ("labels", "answers", "names"),
    [
        (("b", "a", "b", "c"), (0, 1, 0, 2), ("b", "a", "c")),
        (("a", "b", "c", "a"), (0, 1, 2, 1), ("a", "b", "c")),
        (("2", "0", "2"), (0, 1, 0), ("0", "1", "2")),
        (("", "", ""), (0, 1, 0), ("0", "1", "2")),
    ],
    ids=["as most answers say", "the alphabet's where that is right", "numbers are outputs", "no labels"],
)
def test_names_are_in_output_order(labels: tuple[str, ...], answers: tuple[int, ...], names: tuple[str, ...]) -> None:
    data = LabelledRows.of_texts(["x"] * len(labels), labels)
    assert answer_names(job_of(), data, torch.tensor(answers), ("0", "1", "2")) == names


def test_with_from_answers_labels_only_name_the_answers(folder: Path, tmp_path: Path) -> None:
    named = rows_of(2 * HELD, labels=("b", "c", "a"))
    done = injected_into(tmp_path / "model", named, hold_out=0.5, from_answers=True)
    assert sorted(done.model.task.spec()["label_names"]) == ["a", "b", "c"]
    assert done.right is not None
    assert done.held_out is not None
    held = read_labelled(done.held_out)
    assert held.label_names == ("a", "b", "c"), "as they were labelled"
    calibrate(tmp_path / "model", held, LOOSE)


@pytest.mark.parametrize("names", [None, ("x", "y", "z")])
def test_labels_that_are_no_answers_are_ignored(
    tmp_path: Path, names: tuple[str, ...] | None, capsys: Captured
) -> None:
    job = job_of(from_answers=True, hold_out=0.5, names=names)
    done = inject(job, rows_of(2 * HELD, labels=("cat",)), tmp_path, times=quick_ramps)
    assert capsys.readouterr().out.splitlines()[-1] == "labels are ignored: 'cat' is none of the model's 3 answers"
    assert done.right is None
    assert done.held_out is not None
    assert set(read_labelled(done.held_out).label_names) <= set(names or ("0", "1", "2"))
    calibrate(tmp_path, read_labelled(done.held_out), LOOSE)


def test_slow_ramps_are_left_out_by_measured_times(folder: Path, capsys: Captured) -> None:
    block_s, ramp_s = np.array([1.0, 2.0, 0.003]), np.array([0.1, 0.004])
    assert ramps_worth_their_time(job_of(), (0, 1), block_s, ramp_s) == (0,)
    assert capsys.readouterr().out == (
        "no ramps after blocks 1: the ramp after block 1 takes 4 ms, the blocks up to the next exit 3 ms\n"
    )
    with pytest.raises(InputError, match=r"the ramp after block 1 takes 4 ms, .* 3 ms; leave it out of --ramps"):
        ramps_worth_their_time(job_of(ramps=(0, 1)), (0, 1), block_s, ramp_s)
    for style, advice in (("light", "ramps$"), ("mlp", "ramps, or choose a lighter --ramp-style")):
        with pytest.raises(InputError, match=f"serve the model without {advice}"):
            ramps_worth_their_time(job_of(ramp_style=style), (0,), np.ones(2), np.full(1, 9.0))
    model = load_model(folder)
    block_s, ramp_s = time_exits(model, folder)
    assert (len(block_s), len(ramp_s)) == (model.num_blocks, len(model.ramp_indices))
    assert (block_s > 0).all()


@pytest.mark.parametrize(
    ("options", "times", "words"),
    [
        ({"backbone": f"{HERE}:broken"}, quick_ramps, r"^d\.zip: row \d+ makes NaN or infinite numbers at block \d+"),
        ({"backbone": f"{HERE}:undefined"}, quick_ramps, "returns NaN for its example inputs"),
        ({"backbone": f"{HERE}:stubborn"}, quick_ramps, "all rows the same answer"),
        ({"names": ("a", "b")}, quick_ramps, "--labels: 2"),
        ({}, lambda model, _: (np.ones(model.num_blocks), np.full(len(model.ramp_indices), 9.0)), "lower --blocks"),
    ],
    ids=["not a number", "never a number", "one answer", "too few names", "slow ramps"],
)
def test_a_refused_injection_keeps_the_model(tmp_path: Path, options: dict[str, Any], times: Times, words: str) -> None:
    for name in (CARD_FILE, CALIBRATION_FILE, RECORDS_FILE, "graph.onnx"):
        (tmp_path / name).write_text("of before")
    with pytest.raises(OfframpError, match=words):
        inject(job_of(**options), rows_of(), tmp_path, times=times)
    assert {path.name for path in tmp_path.iterdir()} == {CARD_FILE, CALIBRATION_FILE, RECORDS_FILE, "graph.onnx"}
    assert {path.read_text() for path in tmp_path.iterdir()} == {"of before"}


def test_an_injected_model_replaces_another_if_its_labels_fit(tmp_path: Path) -> None:
    for name in (CALIBRATION_FILE, RECORDS_FILE):
        (tmp_path / name).write_text("of before")
    done = injected_into(tmp_path, rows_of(), name="other")
    assert {path.name for path in tmp_path.iterdir()} == {CARD_FILE, GRAPH_FILE, WEIGHTS_FILE}
    assert (read_card(tmp_path).name, done.model.info.name) == ("other", "other")
    said: list[str] = []
    with pytest.raises(DataError, match="2 different labels, and the model has 3 answers"):
        inject(job_of(), rows_of(labels=("a", "b")), tmp_path, times=quick_ramps, progress=lambda *n: said.append(n[0]))
    assert not said
