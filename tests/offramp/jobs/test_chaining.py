"""Chains of models, and their calibrations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.codecs import find_codec
from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.errors import DataError, InputError, ModelFolderError
from earlyexit.network.boundary import Encoded
from earlyexit.network.model import ChainNetwork, EarlyExitModel
from earlyexit.network.store import (
    CARD_FILE,
    WEIGHTS_FILE,
    load_model,
    load_network,
    open_network,
    read_card,
    save_model,
)
from earlyexit.tasks.base import Task
from earlyexit.training.ramps import exit_outputs
from offramp.cli.app import main
from offramp.commands.calibrate import calibrate, parameters_by_block, record_exits, run_pruned
from offramp.commands.doctor import check_target
from offramp.commands.folders import check_members, read_calibration
from offramp.commands.jobs import CalibrateJob, ProfileJob, TrainJob
from offramp.commands.profile import profile_model
from offramp.commands.thresholds import calibrate_records, design_and_test_rows
from offramp.commands.train import chain_models, train
from optimizer.calibration.calibration_file import (
    AMONG,
    CALIBRATION_FILE,
    PRUNED,
    RECORDS_FILE,
    REFERENCE,
    CalibrationCard,
    beside_of,
    read_calibration_file,
    records_of,
)
from profiles.networks import (
    ALONE_FILE,
    alone_of,
    check_weights,
    kept_of,
    measuring_of,
    of_networks,
    prune_of,
    survival_of,
    weights_of,
)
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.earlyexit.network.chains import renamed
from tests.earlyexit.network.models import ABC, small
from tests.exit_records import calibration_card, exit_records
from tests.latency_profile import latency_profile
from tests.model_cards import change_card
from tests.offramp.cli.runs import Captured, run

CALIBRATION = calibration_card({0: 0.5})


def put(folder: Path, name: str, *, task: Task = ABC, blocks: int = 2, seed: int = 1) -> Path:
    """Trains and calibrates a model for texts."""
    save_model(renamed(small(task, num_blocks=blocks, seed=seed), name), folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / CALIBRATION_FILE).write_text(CALIBRATION.model_dump_json(), encoding="utf-8")
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [put(tmp_path / "little", "small"), put(tmp_path / "big", "large", blocks=3, seed=2)]


def test_a_chain_is_a_model_folder_and_a_refused_chain_leaves_no_folder(pair: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "cascades" / "one"
    card = chain_models(pair, out)
    assert read_card(out) == card
    assert (card.name, card.family, card.num_blocks, card.ramps) == ("large", "chain", 5, (0, 1, 2, 3))
    assert card.backbone == {"models": ["../../little", "../../big"], "names": ["small", "large"], "blocks": [2, 3]}
    assert (card.label_names, card.max_length, card.input_kind, card.has_tokens) == (("a", "b", "c"), 32, "text", True)
    assert [len(each) for each in card.boundaries] == [1, 0, 1, 1, 1]
    assert card.network_folders(out) == tuple(folder.resolve() for folder in pair)
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
    assert open_network("torch", network, tmp_path / "both") is network
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
    found, _ = check_target(tmp_path / "both")
    assert "large, a chain of small and large, 5 blocks, 3 labels" in found.found
    assert found.verdict != "failed"
    (pair[1] / "model.safetensors").write_bytes(b"broken")
    assert "big/model.safetensors cannot be read" in check_target(tmp_path / "both")[0].found
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


EASY = CalibrateJob(budget=0.4, confidence=0.8, source="data.csv")


@pytest.fixture(scope="module")
def rows(data: Path) -> LabelledRows:
    return read_labelled(data)


@pytest.fixture(scope="module")
def calibrated(checkpoint: Path, rows: LabelledRows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `small`, of which only block 0 has a ramp, `large`, and `chain` of both, not calibrated."""
    folder = tmp_path_factory.mktemp("models")
    for name, ramps in (("small", (0,)), ("large", None)):
        torch.manual_seed(len(name))
        train(TrainJob(backbone=str(checkpoint), name=name, epochs=2, ramps=ramps), rows, folder / name)
        calibrate(folder / name, rows, EASY)
    small, large = (read_card(folder / name) for name in ("small", "large"))
    chain = large.model_dump(mode="json") | {
        "name": "both",
        "family": "chain",
        "backbone": {"models": ["../small", "../large"], "names": ["small", "large"], "blocks": [3, 3]},
        "boundaries": [each.model_dump(mode="json")["boundaries"] for each in (small, large)],
        "codec": {"name": "chain", "members": [small.codec, large.codec], "models": ["../small", "../large"]},
        "ramps": [0, 2, 3, 4],
        "num_blocks": 6,
    }
    chain["boundaries"] = [block for member in chain["boundaries"] for block in member]
    (folder / "chain").mkdir()
    (folder / "chain" / CARD_FILE).write_text(json.dumps(chain), encoding="utf-8")
    return folder


@pytest.fixture
def models(calibrated: Path, tmp_path: Path) -> Path:
    return shutil.copytree(calibrated, tmp_path / "models")


def test_records_of_a_chain_join_the_answers_of_each_model(models: Path, rows: LabelledRows) -> None:
    before = {name: (models / name / WEIGHTS_FILE).read_bytes() for name in ("small", "large")}
    card, records = calibrate(models / "chain", rows, EASY.model_copy(update={"ramps": "all"}))
    assert (records.num_blocks, records.ramps) == (6, (0, 2, 3, 4))
    assert set(card.thresholds) == {0, 2, 3, 4}
    small, large = (load_model(models / name) for name in ("small", "large"))
    encoded = rows.encode(find_codec(small.info.codec, models / "small"))
    outputs = [exit_outputs(model, encoded) for model in (small, large)]
    of_block = {0: outputs[0][0], 2: outputs[0][2], 3: outputs[1][0], 4: outputs[1][1], 5: outputs[1][2]}
    answers = np.stack([large.task.answer(each).numpy() for each in of_block.values()], axis=1)
    assert records.answers().tolist() == answers.tolist()
    assert records.losses_NR.tolist() == (answers[:, :-1] != answers[:, -1:]).tolist()
    assert records.tokens_N is not None
    assert records.tokens_N.tolist() == [each.length for each in encoded]
    again = record_exits(models / "chain", rows, card)
    np.testing.assert_array_equal(again.scores_NR, records.scores_NR)
    assert before == {name: (models / name / WEIGHTS_FILE).read_bytes() for name in before}, "models stay as they are"
    assert beside_of(models / "chain") == (), "whose ramps are named has one calibration"
    assert AMONG not in card.provenance


def test_a_chain_is_calibrated_with_few_ramps_and_for_its_last_network(models: Path, rows: LabelledRows) -> None:
    chain = models / "chain"
    card, records = calibrate(chain, rows, EASY)
    assert {2} <= set(card.thresholds) <= {0, 2, 3, 4}
    [beside] = beside_of(chain)
    assert beside == chain / REFERENCE
    alone = read_calibration(chain, beside)
    assert set(alone.thresholds) <= {3, 4}
    assert alone.thresholds
    assert records_of(beside) == records_of(chain) == chain / RECORDS_FILE
    assert (card.tested["num_blocks"], alone.tested["num_blocks"]) == (6, 3), "the large model has 3 of 6 blocks"
    assert 1 <= alone.tested["mean_blocks"] <= 3
    assert alone.tested["work_share"] == pytest.approx(alone.tested["mean_blocks"] / 3), "all blocks cost alike"
    assert card.tested["work_share"] == pytest.approx(card.tested["mean_blocks"] / 3)
    # Both are tested by the same rows, and plans pick one: together they may fail in one of five.
    assert card.provenance[AMONG] == alone.provenance[AMONG] == 2
    stricter = EASY.model_copy(update={"budget": 0.4, "confidence": 0.9, "ramps": tuple(alone.thresholds)})
    again, _ = calibrate(chain, rows, stricter)
    assert again.thresholds == alone.thresholds
    assert (alone.confidence, again.confidence) == (0.8, 0.9)
    assert records.ramps == (0, 2, 3, 4), "records know all ramps"
    assert beside_of(chain) == (), "what was beside goes with the calibration before"


def test_several_calibrations_need_more_rows_and_calibrated_models(models: Path, rows: LabelledRows) -> None:
    strict = EASY.model_copy(update={"budget": 0.1, "confidence": 0.95})
    assert len(rows) >= strict.min_rows
    with pytest.raises(DataError, match=r"for 2 calibrations .*36 rows test them"):
        calibrate(models / "chain", rows, strict)
    (models / "small" / CALIBRATION_FILE).unlink()
    with pytest.raises(ModelFolderError, match="small is not calibrated; run: offramp calibrate"):
        calibrate(models / "chain", rows, EASY)
    change_card(models / "chain", ramps=[0, 1, 2, 3, 4])
    held = r"small held 'small' of 3 blocks with ramps \[0, 1\], and now holds 'small' of 3 blocks with ramps \[0\]"
    with pytest.raises(ModelFolderError, match=held):
        calibrate(models / "chain", rows, EASY)


@pytest.mark.parametrize("name", ["small", "chain"])
def test_a_full_disk_leaves_the_earlier_calibration(models: Path, rows: LabelledRows, name: str) -> None:
    calibrate(models / name, rows, EASY)
    before = {path: path.read_bytes() for path in (models / name).rglob("*") if path.is_file()}
    setrlimit(RLIMIT_FSIZE, (100, getrlimit(RLIMIT_FSIZE)[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            calibrate(models / name, rows, EASY.model_copy(update={"seed": 5}))
    finally:
        setrlimit(RLIMIT_FSIZE, (RLIM_INFINITY, getrlimit(RLIMIT_FSIZE)[1]))
    assert {path: path.read_bytes() for path in (models / name).rglob("*") if path.is_file()} == before


def test_only_ramps_have_temperatures(models: Path, rows: LabelledRows) -> None:
    for name, ramps in (("small", (0,)), ("large", (0, 1))):
        model = load_model(models / name)
        fitted = model.temperatures_E.clone()
        assert any(float(fitted[block]) != 1.0 for block in ramps), name
        assert float(fitted[2]) == 1.0
        model.temperatures_E.fill_(1.0)
        outputs = exit_outputs(model, rows.encode(find_codec(model.info.codec, models / name)))
        for block in ramps:
            raw, right = outputs[block], outputs[2].argmax(1)  # the checkpoint's answers, whatever the labels are
            losses = [torch.nn.functional.cross_entropy(raw / t, right) for t in (1.0, float(fitted[block]))]
            assert losses[1] <= losses[0] + 1e-3, (name, block)


def test_exits_are_valued_by_parameters_or_seconds(models: Path, rows: LabelledRows, tmp_path: Path) -> None:
    card = read_card(models / "chain")
    sizes = parameters_by_block(models / "chain", card)
    block = load_model(models / "small").backbone.get_submodule("blocks.0")
    assert sizes == [float(sum(each.numel() for each in block.parameters()))] * 6
    tables = {
        length: LatencyTable(batches=(1, 2), block_s_NB=np.array([[9.0, seconds]] * 6), ramp_s_EB=np.full((4, 2), 1e-4))
        for length, seconds in ((3, 1.0), (16, 2.0))
    }
    profile = latency_profile(num_blocks=6, ramps=(0, 2, 3, 4), model="both", device="cpu", tables=tables)
    profile.save(tmp_path / "latency.json")
    every = EASY.model_copy(update={"ramps": "all"})
    plain, _ = calibrate(models / "chain", rows, every)
    measured, _ = calibrate(models / "chain", rows, every.model_copy(update={"latency": tmp_path / "latency.json"}))
    assert measured.thresholds == plain.thresholds, "all blocks alike, by either"
    assert measured.provenance["latency"] == str(tmp_path / "latency.json")
    with pytest.raises(DataError, match=r"latency.json has 6 blocks, the model 3"):
        calibrate(models / "small", rows, EASY.model_copy(update={"latency": tmp_path / "latency.json"}))


def test_tested_rows_do_not_decide_how_exits_are_valued(tmp_path: Path) -> None:
    block_s = {1: np.array([[1.0], [1.0], [1.0]]), 9: np.array([[1.0], [9.0], [9.0]])}
    tables = {k: LatencyTable(batches=(1,), block_s_NB=each, ramp_s_EB=np.ones((2, 1))) for k, each in block_s.items()}
    latency_profile(tables=tables).save(tmp_path / "latency.json")
    job, tokens_N = EASY.model_copy(update={"latency": tmp_path / "latency.json"}), np.ones(100, dtype=np.int64)
    tokens_N[design_and_test_rows(tokens_N, job)[1]] = 9
    card = calibrate_records(exit_records(np.full((100, 2), 0.9), tokens_N=tokens_N), job)
    assert card.tested["work_share"] == pytest.approx(1 / 3), "1 of 19 by the tested rows' length"


def test_thresholds_of_the_ends_are_one_calibration(models: Path, rows: LabelledRows) -> None:
    card, records = calibrate(models / "chain", rows, EASY.model_copy(update={"ramps": "ends"}))
    assert set(card.thresholds) == {2}
    assert records.ramps == (0, 2, 3, 4), "records know all ramps"
    assert card.tested["worst_agreement"] == card.tested["agreement"]
    bold = EASY.model_copy(update={"budget": 0.9, "confidence": 0.5, "ramps": (0, 3)})
    some, _ = calibrate(models / "chain", rows, bold)
    assert set(some.thresholds) == {0, 3}
    one = EASY.model_copy(update={"ramps": (1,)})
    with pytest.raises(DataError, match=r"the model has no ramps \[1\], but \[0, 2, 3, 4\]"):
        calibrate(models / "chain", rows, one, progress=lambda *step: pytest.fail(str(step)))
    with pytest.raises(DataError, match="--ramps ends is only for chains, and this is a single model"):
        calibrate(models / "small", rows, EASY.model_copy(update={"ramps": "ends"}))


def _recalibrated(models: Path, rows: LabelledRows) -> None:
    calibrate(models / "large", rows, EASY.model_copy(update={"seed": 5}))


def _replaced(models: Path, rows: LabelledRows) -> None:
    weights = models / "small" / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")


@pytest.mark.parametrize(
    ("change", "name"), [(_recalibrated, "large"), (_replaced, "small")], ids=["calibrated since", "other weights"]
)
def test_a_calibration_of_other_models_is_refused(
    models: Path, rows: LabelledRows, change: Callable[[Path, LabelledRows], None], name: str
) -> None:
    chain = models / "chain"
    card, _ = calibrate(chain, rows, EASY)
    assert [each["name"] for each in card.provenance["members"]] == ["small", "large"]
    assert read_calibration(chain).thresholds == card.thresholds
    check_members(ExitRecords.load(chain / RECORDS_FILE).provenance, chain, chain / RECORDS_FILE)
    change(models, rows)
    with pytest.raises(ModelFolderError) as refused:
        read_calibration(chain)
    assert str(refused.value) == (
        f"{chain / CALIBRATION_FILE}: {name} in {chain} was trained or calibrated since: calibrate again"
    )


def test_a_calibration_of_pruned_texts_is_deleted_with_its_chain(models: Path, rows: LabelledRows) -> None:
    chain = models / "chain"
    (chain / PRUNED).mkdir()
    before = [chain / PRUNED / name for name in (CALIBRATION_FILE, RECORDS_FILE)]
    for path in before:
        path.write_text("of the models as they were")
    calibrate(chain, rows, EASY)
    assert read_calibration(chain)
    assert not any(path.exists() for path in before)
    _, records = calibrate(models / "chain", rows, EASY)
    with pytest.raises(ModelFolderError, match=r"made with small and large, .*large has large: calibrate again"):
        check_members(records.provenance, models / "large", Path("r.npz"))


def test_the_report_is_about_the_calibration_without_pruning(
    models: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def wrong(*given: Any, **options: Any) -> Any:
        [outputs, whole], facts = run_pruned(*given, **options)
        return [{block: -outputs_NC for block, outputs_NC in outputs.items()}, whole], facts

    monkeypatch.setattr("offramp.commands.calibrate.run_pruned", wrong)
    promise = ("--budget", EASY.budget, "--confidence", EASY.confidence, "--prune", 0.3, "--json")
    assert run("calibrate", models / "chain", "--data", data, *promise) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tested"]["agreement"], report["beside"][PRUNED]["tested"]["agreement"]) == (1.0, 0.0)


def test_word_pruning_adds_a_calibration(models: Path, rows: LabelledRows) -> None:
    whole_card, whole = calibrate(models / "chain", rows, EASY)
    card, records = calibrate(models / "chain", rows, EASY.model_copy(update={"prune": 0.3}))
    kept_card = read_calibration(models / "chain")
    assert [each.provenance[AMONG] for each in (whole_card, kept_card, card)] == [2, 3, 3]
    assert {2} <= set(card.thresholds)
    assert [each.name for each in beside_of(models / "chain")] == [REFERENCE, PRUNED]
    found = read_calibration_file(models / "chain" / "pruned" / CALIBRATION_FILE)
    assert (found.thresholds, found.prune) == (card.thresholds, card.prune)
    assert found.prune is not None
    assert whole_card.prune is None
    assert set(found.prune) == {2}
    assert 0.1 < found.provenance["words_cut"] < 0.5
    small = [column for column, ramp in enumerate(records.ramps) if ramp <= 2]
    np.testing.assert_array_equal(records.scores_NR[:, small], whole.scores_NR[:, small])
    assert records.answers()[:, -1].tolist() == whole.answers()[:, -1].tolist(), "the reference reads whole texts"
    assert (records.scores_NR[:, len(small) :] != whole.scores_NR[:, len(small) :]).any()
    assert records.end_losses_N is not None
    assert set(records.end_losses_N.tolist()) <= {0.0, 1.0}
    saved = ExitRecords.load(models / "chain" / "pruned" / RECORDS_FILE)
    assert saved.end_losses_N is not None
    assert saved.end_losses_N.tolist() == records.end_losses_N.tolist()
    assert prune_of(saved) == found.prune
    kept = kept_of(saved)
    assert kept[0] == 1.0
    assert 0.5 < kept[1] < 1.0
    [times] = measuring_of(saved)
    assert times >= 1.0
    reference = {ramp: value for ramp, value in found.thresholds.items() if ramp > 2}
    for view in (whole, of_networks(whole, (1,), read_card(models / "chain").chain)):
        thresholds = {ramp: value for ramp, value in found.thresholds.items() if ramp in view.ramps}
        assert view.worst_losses_N(thresholds).mean() < EASY.guarantee.budget, "whole texts, with any networks"
    alone = alone_of(models / "chain" / "pruned" / RECORDS_FILE, saved)
    assert alone is not None
    assert alone.outcome(reference).survival == whole.outcome(reference).survival
    outcome = saved.outcome({})
    assert outcome.agreement == 1 - records.end_losses_N.mean()
    assert saved.end_true_losses_N is not None
    assert outcome.accuracy == 1 - saved.end_true_losses_N.mean(), "of what is answered, not of the reference"
    (models / "chain" / RECORDS_FILE).unlink()
    with pytest.raises(
        DataError, match=r"has records of pruned texts, which need .*chain/exit_records.npz: calibrate again"
    ):
        alone_of(models / "chain" / "pruned" / RECORDS_FILE, saved)


def test_thresholds_hold_for_the_pruned_texts_of_plans_that_skip_a_network(
    models: Path, rows: LabelledRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third network errs unless its texts are whole or were pruned by both others."""
    shutil.copytree(models / "large", models / "third")
    change_card(models / "third", name="third")
    calibrate(models / "third", rows, EASY)
    chain_models([models / name for name in ("small", "large", "third")], models / "three")
    runs = list[dict[int, Tensor]]()

    def outputs_of_exits(model: EarlyExitModel, encoded: Sequence[Encoded], **options: Any) -> dict[int, Tensor]:
        outputs = exit_outputs(model, encoded, **options)
        runs.extend([outputs] if model.info.name == "third" else [])
        return {block: -each for block, each in runs[0].items()} if len(runs) > 2 else runs[0] if runs else outputs

    monkeypatch.setattr("offramp.commands.calibrate.exit_outputs", outputs_of_exits)
    monkeypatch.setattr("offramp.commands.calibrate.choose_confidences", lambda *of: [len(runs)] * of[1].shape[1])
    card, _ = calibrate(models / "three", rows, EASY.model_copy(update={"prune": 0.3, "policy": "share"}))
    assert card.confidences == read_calibration(models / "three").confidences, "whole texts leave alike"
    assert (card.thresholds, card.tested["worst_agreement"], len(runs)) == ({}, 0.0, 4)


__all__ = ["calibrated", "models", "rows"]
"""The fixtures: a chain of two networks of three blocks, whose first ends after block 2."""

JOB = CalibrateJob(budget=0.05, confidence=0.8, ensemble=True, source="data.csv")
SKILLS = {0: 0.5, 2: 1.5, 3: 0.5, 4: 1.5, 5: 1.6}
"""By exit, the amount that is added to the output of the true label."""


def rows_of(folder: Path, count: int = 4000) -> LabelledRows:
    names = read_card(folder).task["label_names"]
    return LabelledRows.of_texts(texts=map(str, range(count)), labels=(names[k % len(names)] for k in range(count)))


def outputs_of(folder: Path, rows: LabelledRows, skills: Mapping[int, float]) -> dict[int, Tensor]:
    """Outputs of exits that prefer the true label and make independent errors."""
    names = read_card(folder).task["label_names"]
    generator = torch.Generator().manual_seed(0)
    right_NC = torch.eye(len(names))[torch.tensor([names.index(label) for label in rows.labels])]
    return {
        block: torch.randn(len(rows), len(names), generator=generator) + skill * right_NC
        for block, skill in skills.items()
    }


Calibrates = Callable[[Path, LabelledRows, CalibrateJob, Mapping[int, float]], tuple[CalibrationCard, ExitRecords]]


@pytest.fixture
def calibrated_by(monkeypatch: pytest.MonkeyPatch) -> Calibrates:
    """Calibrates as if the model gave `outputs_of` these skills."""

    def calibrate_given(folder: Path, given: LabelledRows, job: CalibrateJob, skills: Mapping[int, float]) -> Any:
        outputs = [(range(len(given)), outputs_of(folder, given, skills))], None
        monkeypatch.setattr("offramp.commands.calibrate.compute_outputs", lambda *_, **__: outputs)
        return calibrate(folder, given, job)

    return calibrate_given


def test_an_ensemble_of_networks_with_different_errors_keeps_the_budget(
    models: Path, calibrated_by: Calibrates
) -> None:
    folder = models / "chain"
    given = rows_of(folder)
    outputs = outputs_of(folder, given, SKILLS)
    card, records = calibrated_by(folder, given, JOB, SKILLS)
    assert card.weights is not None, card.tested["ensemble"]
    assert set(card.weights) == {2}
    assert 0.05 < card.weights[2] < 0.5
    assert read_calibration(folder).weights == card.weights
    assert card.policy_spec().weights == card.weights
    assert card.tested["ensemble"]["on"]
    assert card.tested["ensemble"]["gain"]["low"] > 0
    assert weights_of(ExitRecords.load(folder / RECORDS_FILE)) == weights_of(records) == card.weights
    alone = ExitRecords.load(folder / ALONE_FILE)
    reference_N = outputs[5].argmax(1).numpy()
    assert records.answers()[:, -1].tolist() == alone.answers()[:, -1].tolist() == reference_N.tolist()
    assert records.end_losses_N is not None
    weight = card.weights[2]
    together_NC = weight * outputs[2].softmax(1) + (1 - weight) * outputs[5].softmax(1)
    assert (records.end_losses_N != (together_NC.argmax(1).numpy() != reference_N)).mean() < 0.01
    truth_N = read_card(folder).task["label_names"].index
    right_N = together_NC.argmax(1).numpy() == [truth_N(label) for label in given.labels]
    assert records.outcome({}).accuracy == pytest.approx(right_N.mean(), abs=0.01), "the mixture's, not the reference's"
    assert np.array_equal(records.scores_NR[:, :2], alone.scores_NR[:, :2])
    assert not np.array_equal(records.scores_NR[:, 2], alone.scores_NR[:, 2])
    chain = read_card(folder).chain
    worst = 1 - card.tested["worst_agreement"]
    assert 0 < worst <= JOB.guarantee.budget
    assert records.outcome(card.thresholds).losses_N.mean() < JOB.guarantee.budget
    large = {ramp: value for ramp, value in card.thresholds.items() if ramp > 2}
    assert of_networks(alone, (1,), chain).outcome(large).losses_N.mean() < JOB.guarantee.budget
    with pytest.raises(DataError, match=r"exits after blocks \[2\] are mixed into later ones"):
        of_networks(records, (1,), chain)
    survival = survival_of(records, card.thresholds, chain, alone)
    assert survival[0, 1] == records.outcome(card.thresholds).survival
    assert survival[1,] == alone.of_ramps((3, 4)).outcome(large).survival
    check_weights(records, card.weights, "records")
    assert calibrate_records(records, JOB.model_copy(update={"ensemble": False})).weights == card.weights
    with pytest.raises(DataError, match=r"exit_records.npz has the ensemble weights .*, not none"):
        check_weights(records, None, "exit_records.npz")


def test_an_ensemble_without_a_gain_is_not_used(models: Path, calibrated_by: Calibrates) -> None:
    folder = models / "chain"
    given = rows_of(folder)
    skills = SKILLS | {2: 0.0, 5: 9.0}
    card, records = calibrated_by(folder, given, JOB, skills)
    plain, alone = calibrated_by(folder, given, JOB.model_copy(update={"ensemble": False}), skills)
    assert card.weights is None
    assert not card.tested["ensemble"]["on"]
    assert "weights" not in json.loads(card.to_json())
    assert not (folder / ALONE_FILE).exists()
    assert card.thresholds == plain.thresholds
    assert weights_of(records) is None
    np.testing.assert_array_equal(records.scores_NR, alone.scores_NR)
    calibrated_by(folder, given, JOB, SKILLS)
    assert (folder / ALONE_FILE).exists()
    calibrated_by(folder, given, JOB.model_copy(update={"ensemble": False}), SKILLS)
    assert not (folder / ALONE_FILE).exists()


def test_an_ensemble_of_one_network_or_with_shares_is_refused(models: Path, calibrated_by: Calibrates) -> None:
    given = rows_of(models / "small")
    with pytest.raises(DataError, match="small is a single network: --prune and --ensemble are for chains"):
        calibrate(models / "small", given, JOB)
    with pytest.raises(DataError, match="ensembles need the policy entropy or confidence, not share"):
        calibrated_by(models / "chain", given, JOB.model_copy(update={"policy": "share"}), SKILLS)
