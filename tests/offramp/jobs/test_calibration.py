"""Calibrations of models for labels, tokens and maps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earlyexit.data.rows import IMAGE, LabelledRows, objects, read_labelled
from earlyexit.errors import DataError, ModelFolderError, PlanError
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, read_card, save_model
from earlyexit.policies.base import ExitOutput
from earlyexit.policies.threshold import ForeseenPolicy, SharePolicy
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.token import TokenTask
from earlyexit.training.ramps import exit_outputs
from earlyexit.training.tokens import Generated, GenerationOptions, generate
from offramp.commands.calibrate import calibrate, compute_outputs, join_records, record_exits
from offramp.commands.calibrate_command import calibration_tables, leave_text
from offramp.commands.folders import read_calibration
from offramp.commands.inject import inject
from offramp.commands.jobs import CalibrateJob, TrainJob, default_task
from offramp.commands.thresholds import (
    CalibrationData,
    calibrate_records,
    calibration_warnings,
    constant_accuracy,
    outcome_figures,
    warnings_of,
    work_share,
)
from offramp.commands.train import default_ramps, train, warnings_on
from optimizer.calibration.calibration_file import CalibrationCard
from optimizer.calibration.thresholds import sequences_of
from profiles.networks import decay_of
from profiles.records import ExitRecords
from profiles.scores import SCORES
from profiles.table import FloatArray
from tests.earlyexit.codecs.pictures import file_of
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.earlyexit.families.decoders import hf_decoder
from tests.earlyexit.families.encoder_decoders import PAD, hf_seq2seq
from tests.earlyexit.tasks.maps import STREET, encoded_images, images, model_of_maps
from tests.exit_records import calibration_card, exit_records
from tests.offramp.cli.runs import Captured, cells, run, written
from tests.offramp.jobs.test_injecting import job_of, rows_of

EASY = CalibrateJob(budget=0.5, confidence=0.9)


@pytest.mark.parametrize(
    ("job", "least"),
    [
        (CalibrateJob(), 306),  # 76 lay the path, 230 test it
        (EASY, 5),  # 1 lays the path, 4 test it
        (CalibrateJob(budget=1e-5), 307_010),  # found in no more than a moment
        (CalibrateJob(budget=0.9, confidence=0.1), 3),  # 1 tests it, and the path needs one as well
    ],
)
def test_the_fewest_rows_leave_enough_to_test(job: CalibrateJob, least: int) -> None:
    assert job.min_rows == least


def test_calibration_in_bfloat16_changes_no_weights(model: Path, data: Path) -> None:
    before = load_model(model).state_dict()
    rows = read_labelled(data)
    card, records = calibrate(model, rows, EASY.model_copy(update={"dtype": "bfloat16"}))
    after = load_model(model).state_dict()
    assert card.provenance == {**(records.provenance or {}), "dtype": "bfloat16"}, "both name the model's weights"
    assert all(after[name].equal(before[name]) for name in before if name != "temperatures_E")
    again = record_exits(model, rows, card, "bfloat16")
    np.testing.assert_allclose(again.scores_NR, records.scores_NR, atol=1e-2)
    assert not np.array_equal(again.scores_NR, record_exits(model, rows, card).scores_NR)


def recorded_exits(*agrees: bool, num_blocks: int = 4) -> ExitRecords:
    """A hundred inputs of which every ramp is equally sure; ramp k gives the full model's answer or another."""
    answers_NE = np.array([[0 if each else 1 for each in agrees] + [0]] * 100, dtype=np.int64)
    scores_NR = np.full((100, len(agrees)), 0.1)
    return exit_records(scores_NR, answers_NE=answers_NE, score="entropy", num_blocks=num_blocks)


def recorded(*views: ExitRecords) -> CalibrationData:
    return CalibrationData(job=EASY, views=views, facts={})


def test_thresholds_hold_for_all_views_and_for_no_ramp_before_the_entry() -> None:
    right, wrong = recorded_exits(True), recorded_exits(False)
    assert set(recorded(right).card().thresholds) == {0}
    assert recorded(right, wrong).card().thresholds == {}
    rows = recorded_exits(True, False, True)
    assert set(recorded(rows).card(()).thresholds) == {0}
    assert recorded(rows, recorded_exits(False, True, True)).card(()).thresholds == {}, "chosen by the first view"
    assert set(recorded(rows).card((), entry=2).thresholds) == {2}


LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = LabelledRows.of_texts([LETTERS[k : k + 3] for k in range(24)], [""] * 24)
ANSWER = 8
JOB = CalibrateJob(budget=0.4, confidence=0.8, answers=ANSWER)


@pytest.fixture(scope="module", params=["llama", "t5", "marian"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def start(kind: str) -> tuple[int, ...]:
    """Returns the token that starts the answers of an encoder-decoder."""
    return (PAD[kind],) if kind in PAD else ()


@pytest.fixture(scope="module")
def untrained(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (hf_seq2seq(kind) if kind in PAD else hf_decoder()).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def taught(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated model whose ramps were trained on eight tokens per prompt."""
    out = tmp_path_factory.mktemp("model")
    job = TrainJob(
        backbone=str(untrained), name="tiny", task="token", answers=ANSWER, epochs=30, batch=32, max_length=128
    )
    train(job, PROMPTS, out)
    calibrate(out, PROMPTS, JOB)
    return out


def test_the_default_task_of_a_generating_checkpoint_is_token(untrained: Path, tmp_path: Path) -> None:
    assert default_task(str(untrained)) == "token"
    assert default_task("somewhere/model.gguf") == "token"
    assert default_task("somewhere/on-a-hub") == "label"
    written(tmp_path / "config.json", '{"model_type": "bert"}')
    assert default_task(str(tmp_path)) == "label"


def test_ramps_and_records_are_made_from_prompts_and_generations(taught: Path, start: tuple[int, ...]) -> None:
    card = read_card(taught)
    assert (card.codec, card.task["name"], card.ramp_style) == (
        {"name": "prompt", "max_length": 128},
        "token",
        "adapted",
    )
    assert card.ramps == default_ramps(5) == (0, 1, 2, 3)
    assert (card.provenance["answers"], card.provenance["head"]) == (ANSWER, "checkpoint")
    task = load_model(taught).task
    assert isinstance(task, TokenTask)
    assert task.start == (start[0] if start else None)
    records = ExitRecords.load(taught / "exit_records.npz")
    assert (records.score, records.ramps, len(sequences_of(records))) == ("foreseen", (0, 1, 2, 3), 24)
    assert records.tokens_N is not None
    assert records.tokens_N[:ANSWER].tolist() == [3 + len(start), *[1] * (ANSWER - 1)]
    agreed = 1 - records.losses_NR.mean(0)
    assert agreed[-1] > agreed[0]  # deeper is better; and they learned something
    assert agreed[-1] > 0.5


def test_the_backbone_stays_and_decay_is_for_generations(taught: Path, untrained: Path, tmp_path: Path) -> None:
    job = TrainJob(backbone=str(untrained), name="again", task="token", answers=2, epochs=1)
    again = train(job, PROMPTS, taught.parent / "again")
    ours, theirs = load_model(taught), again
    assert ours.backbone.sha256() == theirs.backbone.sha256()
    records = ExitRecords.load(taught / "exit_records.npz")
    with pytest.raises(DataError, match="--decay is not for exit records"):
        calibrate_records(records, JOB.model_copy(update={"decay": 2.0}))
    (tmp_path / "bert.json").write_text('{"family": "bert", "hidden_size": 8, "num_heads": 2, "num_blocks": 2}')
    with pytest.raises(ModelFolderError, match="is not a decoder"):
        train(TrainJob(backbone=str(tmp_path / "bert.json"), name="x", task="token"), PROMPTS, tmp_path / "out")


def generated(model: EarlyExitModel, start: tuple[int, ...], **given: Any) -> list[Generated]:
    """Returns a model's answers to all prompts, with a policy if given."""
    prompts = [(*byte_tokenizer().encode(text).ids, *start) for text in PROMPTS.texts]
    assert isinstance(model.task, TokenTask)
    return generate(model, prompts, GenerationOptions(max_tokens=ANSWER, ends=frozenset(model.task.ends), **given))


def test_an_early_generation_equals_the_full_models_until_a_ramp_is_wrong(taught: Path, start: tuple[int, ...]) -> None:
    """Line 5: every token that left early passed its threshold; and the bound by records holds of real generations."""
    model, records = load_model(taught), ExitRecords.load(taught / "exit_records.npz")
    thresholds = {ramp: float(np.quantile(records.scores_NR[:, ramp], 0.7)) for ramp in (1, 3)}
    full = generated(model, start)
    assert np.concatenate([each.answer for each in full]).tolist() == records.answers()[:, -1].tolist()
    early = generated(model, start, policy=ForeseenPolicy(thresholds), ramps=(1, 3))
    wrong_N = records.worst_losses_N(thresholds) > 0
    for rows, one, other in zip(sequences_of(records), early, full, strict=True):
        same = int(wrong_N[rows].argmax()) if wrong_N[rows].any() else len(rows)
        assert one.answer[:same] == other.answer[:same]
    left = [(exit_block, score) for each in early for exit_block, score in zip(each.exits, each.scores, strict=True)]
    assert all(np.float32(score) >= np.float32(thresholds[exit_block]) for exit_block, score in left if exit_block != 4)
    assert {exit_block for exit_block, _ in left} == {1, 3, 4}


def test_decaying_thresholds_are_found_stored_and_applied(taught: Path, start: tuple[int, ...], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(taught, tmp_path / "model"))
    card, records = calibrate(folder, PROMPTS, JOB.model_copy(update={"decay": 2.0}))
    assert card.decay == card.policy_spec().decay == decay_of(records) == 2.0
    assert read_calibration(folder).policy_spec() == card.policy_spec()
    raw, rows = ExitRecords.load(taught / "exit_records.npz"), sequences_of(records)
    place_N = np.concatenate([np.arange(len(each)) for each in rows])
    calms_N = np.minimum((raw.scores_NR[:, 1] - 0.1 * np.exp(-place_N / 2)) / 0.9, 1.0)
    assert records.scores_NR[:, 1] == pytest.approx(calms_N, abs=1e-6)
    _, coarse = calibrate(folder, PROMPTS, JOB.model_copy(update={"dtype": "bfloat16"}))
    assert 0 < np.abs(coarse.scores_NR[0] - raw.scores_NR[0]).max() < 0.05, "the model ran in bfloat16"

    # What records say of thresholds is what the policy does, up to the first token that is another.
    thresholds = {1: float(np.quantile(records.scores_NR[:, 1], 0.6))}
    early = generated(load_model(folder), start, policy=ForeseenPolicy(thresholds, decay=2.0), ramps=(1,))
    exits_N = records.outcome(thresholds).exits_N
    wrong_N = records.worst_losses_N(thresholds) > 0
    for part, one in zip(rows, early, strict=True):
        same = int(wrong_N[part].argmax()) + 1 if wrong_N[part].any() else len(part)
        assert one.exits[:same] == exits_N[part][:same].tolist()
    assert 0 < (exits_N == 1).mean() < 1


NUMBER = 150
SURE = CalibrateJob(budget=0.25, confidence=0.8)


@pytest.fixture(scope="module")
def seen() -> LabelledRows:
    """Noise, labelled with the full model's answers except for a column of pixels."""
    outputs = exit_outputs(model_of_maps(), encoded_images(NUMBER))
    right = STREET.answer(outputs[2]).numpy()
    right[:, :, 0] = 0
    files = [file_of(image) for image in images(NUMBER)]
    masks: Any = tuple(file_of(mask) for mask in right)
    return LabelledRows(columns={IMAGE: objects(files)}, labels=masks)


@pytest.fixture
def mapper(tmp_path: Path) -> Path:
    save_model(model_of_maps(), tmp_path)
    return tmp_path


def test_records_hold_the_policys_scores_and_figures_of_the_task(mapper: Path, seen: LabelledRows) -> None:
    card, records = calibrate(mapper, seen, SURE)
    assert (card.policy, records.score, records.answers_NE) == ("share", "share", None)
    assert card.confidences is not None
    assert records.confidences == card.confidences
    assert set(card.thresholds) == set(card.confidences) == {0, 1}
    policy = SharePolicy(card.thresholds, card.confidences)
    outputs = exit_outputs(model_of_maps(), encoded_images(NUMBER))
    answers = [STREET.answer(outputs[block]).numpy() for block in (0, 1, 2)]
    for column, ramp in enumerate(records.ramps):
        of_exit = ExitOutput(STREET, outputs[ramp])
        assert records.scores_NR[:, column].tolist() == policy.score(ramp, of_exit).tolist()
        np.testing.assert_allclose(records.losses_NR[:, column], STREET.loss(answers[ramp], answers[2]))
    outcome = records.outcome(card.thresholds)
    assert {0, 1} & set(outcome.exit_counts), "some leave early"
    assert card.tested["agreement"] >= 0.75
    figures = outcome_figures(records.outcome({}), STREET)
    assert figures["pixel_accuracy"] == figures["full_pixel_accuracy"]
    assert figures["mean_iou"] == figures["full_mean_iou"]
    right = STREET.targets(seen.labels)
    chosen = np.stack([answers[block][row] for row, block in enumerate(outcome.exits_N)])
    expected = STREET.figures(STREET.tallies(chosen, right).sum(0))
    found = outcome_figures(outcome, STREET)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    tables = calibration_tables("share", {"thresholds": card.thresholds, "tested": card.tested})
    assert "mean IoU" in list(tables[1].columns[0].cells)
    again = record_exits(mapper, seen, card)
    np.testing.assert_array_equal(again.scores_NR, records.scores_NR)
    with pytest.raises(PlanError, match="the score share needs confidences"):
        record_exits(mapper, seen, card.model_copy(update={"confidences": None}))


def test_large_outputs_are_processed_batch_by_batch(mapper: Path, seen: LabelledRows) -> None:
    parts = list(compute_outputs(mapper, read_card(mapper), seen, "float32", lambda *_: None)[0])
    assert [len(some) for some, _ in parts] == [64, 64, 22]
    whole = exit_outputs(model_of_maps(), encoded_images(NUMBER))
    right = STREET.targets(seen.labels)
    joined = join_records(reversed(parts), "confidence", STREET, right)
    alone = join_records([(range(len(right)), whole)], "confidence", STREET, right)
    assert joined.sample_ids == alone.sample_ids
    np.testing.assert_allclose(joined.scores_NR, alone.scores_NR, rtol=1e-6)
    np.testing.assert_array_equal(joined.losses_NR, alone.losses_NR)


def test_no_input_leaves_if_no_threshold_keeps_the_budget(mapper: Path, seen: LabelledRows) -> None:
    card, records = calibrate(mapper, seen, CalibrateJob(budget=0.02, confidence=0.8))
    assert card.thresholds == {}
    assert set(records.outcome(card.thresholds).exit_counts) == {2}
    [warning] = calibration_warnings(card, {}, load_model(mapper).info.provenance, None)
    assert warning.startswith("no threshold keeps a budget of 0.02 with confidence 0.8, so no input would leave early")
    card, _ = calibrate(mapper, seen, SURE.model_copy(update={"policy": "confidence"}))
    assert (card.policy, card.confidences) == ("confidence", None)
    assert "confidences" not in json.loads((mapper / "calibration.json").read_text()), "as the files of other tasks"
    with pytest.raises(PlanError, match="'entropy' is for labels; for task 'segmentation' use 'confidence'"):
        calibrate(mapper, seen, SURE.model_copy(update={"policy": "entropy"}))


def test_thresholds_are_shown_as_always_never_or_with_enough_digits() -> None:
    entropy, confidence = SCORES["entropy"], SCORES["confidence"]
    assert [leave_text("share", at) for at in (-0.01, 0.0, 0.5, SCORES["share"].never, None)] == [
        *("always", "always", "0.5000", "never", "-")
    ]
    assert [leave_text("entropy", at) for at in (np.inf, entropy.score_at(-np.inf), 1.0, 1.5e-5, entropy.never)] == [
        *("always", "always", "1.000", "1.500e-05", "never")
    ]
    shown = [leave_text("confidence", at) for at in (confidence.score_at(-20.0), 0.9876, 0.99987, 0.99996, 1 - 2e-7)]
    assert shown == ["always", "0.9876", "0.9999", "1 - 4e-05", "1 - 2e-07"]


FROZEN, JOINT, INJECTED = {"joint": False}, {"joint": True}, {"cuts": [["a"]]}


@pytest.mark.parametrize("options", [(), ("--hold-out", 0.5)], ids=["on the rows", "on the rows held out"])
def test_a_frozen_model_no_better_than_a_constant_answer_is_warned_of(
    checkpoint: Path, tmp_path: Path, capsys: Captured, options: tuple[object, ...]
) -> None:
    """Labels do not depend on the texts; two thirds are `x`."""
    dull = written(tmp_path / "dull.csv", "text,label\n" + "pay my bill,x\npay my bill,y\npay my bill,x\n" * 60)
    arguments = ("train", "--data", dull, "--backbone", checkpoint, "--out", tmp_path / "m", "--epochs", 3)
    assert run(*arguments, *options) == 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warning == (
        "warning: the full model answers 66.7% of the rows right, but a constant answer would be right for "
        "66.7%: train the backbone with its ramps (offramp train --joint)"
    )
    assert run("calibrate", tmp_path / "m", "--data", dull, "--budget", 0.1, "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    said, also_learned = report["warnings"]
    assert also_learned == f"ramps were trained on {dull}, so they may break the budget: calibrate with other rows"
    assert {f"warning: {each}" for each in report["warnings"]} <= set(captured.err.splitlines())
    assert said.endswith("train the backbone with its ramps (offramp train --joint)")
    assert report["tested"]["constant_accuracy"] == report["tested"]["full_accuracy"] < 0.7


def test_a_calibration_holds_the_saved_work_and_the_constant_accuracy(model: Path, data: Path) -> None:
    card, _ = calibrate(model, read_labelled(data), CalibrateJob(budget=0.5, confidence=0.9))
    assert card.tested["work_share"] == pytest.approx(card.tested["mean_blocks"] / 3)
    assert card.tested["constant_accuracy"] == 0.5
    better = card.model_copy(update={"tested": card.tested | {"full_accuracy": 0.9}})
    assert calibration_warnings(better, {}, FROZEN, None) == []
    survival, costs = (1.0, 1.0, 0.5, 0.25), (1.0, 1.0, 4.0, 4.0)
    assert work_share(survival, None) == pytest.approx(2.75 / 4)
    assert work_share(survival, costs) == pytest.approx(5 / 10)
    assert work_share(survival, costs, first=2) == pytest.approx(5 / 8), "a chain beside its last model"
    assert work_share(survival, costs, first=2, entry=2) == pytest.approx(3 / 8), "that model alone"


def test_an_injected_model_with_little_saving_is_warned_of(tmp_path: Path) -> None:
    def late_ramps(model: EarlyExitModel, _: Path) -> tuple[FloatArray, FloatArray]:
        """Times of which less than 3 % come after the first ramp."""
        num_later = model.num_blocks - 1
        return np.array([0.97, *[0.03 / num_later] * num_later]), np.zeros(len(model.ramp_indices))

    [warning] = inject(job_of(), rows_of(), tmp_path, times=late_ramps).warnings
    assert warning.startswith("exits save ")
    assert warning.endswith("% of the model's work: serve it without exits (offramp serve FOLDER --plan stock)")


@pytest.mark.parametrize(
    ("task", "truth", "accuracy"),
    [
        (LabelTask(("a", "b")), [0, 1, 1], 2 / 3),
        (RegressionTask(scale=10.0), [0.0, 1.0, 5.0], 1 - (0.1 + 0.4) / 3),
        (PoseTask(("knee",), image_side=64, heatmap_side=16, tolerance=1.0, mirror_pairs=()), [0], None),
    ],
    ids=["the most frequent label", "the median", "no one answer"],
)
def test_the_accuracy_of_the_best_constant(task: Task, truth: list[float], accuracy: float | None) -> None:
    assert constant_accuracy(task, np.array(truth)) == (None if accuracy is None else pytest.approx(accuracy))


@pytest.mark.parametrize(
    ("worth", "model", "words"),
    [
        ((0.667, 0.684, 0.5), FROZEN, ["train the backbone with its ramps (offramp train --joint)"]),
        ((0.667, 0.684, 0.5), JOINT, ["more rows, more epochs or another backbone may help"]),
        ((0.667, 0.684, 0.5), INJECTED, ["check the order of --labels, and --mean, --std and --bgr"]),
        ((0.9, 0.6, 0.03), FROZEN, ["train its backbone too (offramp train --joint), or serve it without exits"]),
        ((0.9, 0.6, 0.03), INJECTED, ["3.0% of the model's work: serve it without exits"]),
        ((0.9, 0.6, -0.01), None, ["exits save 0.0% of the model's work: do not use exits"]),
        ((0.9, 0.6, 0.06), FROZEN, []),
        ((None, None, None), FROZEN, []),
    ],
)
def test_the_advice_fits_the_model(worth: tuple[Any, Any, Any], model: dict[str, Any] | None, words: list[str]) -> None:
    accuracy, constant, saved = worth
    said = warnings_of(accuracy, constant, saved, model)
    assert len(said) == len(words)
    assert all(part in each for part, each in zip(words, said, strict=True))


def card_of_chain(work: float, blocks: float, ramp: int = 3) -> CalibrationCard:
    tested = {"work_share": work, "mean_blocks": blocks, "num_blocks": 9, "full_accuracy": 0.9, "worst_agreement": 1.0}
    return calibration_card({ramp: 0.1}, tested=tested)


def test_calibration_warns_of_a_costly_chain_and_of_diverged_training() -> None:
    chain, alone = card_of_chain(0.9, 5.78), card_of_chain(0.69, 4.11)
    [warning] = calibration_warnings(chain, {"reference": alone}, {}, "mpnet")
    assert warning == (
        "the chain takes 90% of the work of mpnet, after 5.78 blocks; mpnet alone takes 69%, after 4.11 blocks: serve "
        "mpnet without the chain"
    )
    assert calibration_warnings(card_of_chain(0.5, 5.78), {"reference": alone}, {}, "mpnet") == []
    assert "mpnet alone takes 100%: serve" in calibration_warnings(card_of_chain(1.2, 8.0), {}, {}, "mpnet")[0]
    for num_rows, words in ((3, ["training diverged: train again with a lower --learning-rate"]), (0, [])):
        outputs = {block: torch.full((num_rows, 2), float("nan")) for block in range(2)}
        truth_N = np.zeros(num_rows, dtype=np.int64)
        said = warnings_on(outputs, LabelTask(("a", "b")), truth_N, {}, block_costs=None)
        assert [part in each for part, each in zip(words, said, strict=True)] == [True] * len(words)


def test_alternative_calibrations_are_shown_with_their_ramps(capsys: Captured) -> None:
    from offramp.commands.output import show

    tested: dict[str, Any] = card_of_chain(0.7, 4.1).tested | {"num_blocks": 6}
    report = {"thresholds": {3: 0.1}, "tested": tested}
    own = report | {"tested": tested | {"inputs": 1, "agreement": 1, "accuracy": 1, "survival": []}}
    show(*calibration_tables("entropy", own | {"beside": {"[reference]": report}}))
    said = cells(capsys.readouterr().out)
    assert "[reference] 3 4.10 of 6 1.0000" in said
    assert any("ramps after blocks" in line for line in said)
