"""Ramps of decoders, and of encoder-decoders, learn of their own answers: from a checkpoint to records of sequences."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.data.rows import LabelledRows
from earlyexit.errors import DataError, ModelFolderError
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, read_card
from earlyexit.policies.foresight import ForeseenPolicy
from earlyexit.sequences.offline import Asked, Generated, generate
from earlyexit.tasks.token import TokenTask
from offramp.commands.calibrate import calibrate
from offramp.commands.calibrated import read_calibration
from offramp.commands.jobs import CalibrateJob, TrainJob, default_task
from offramp.commands.thresholds import calibrate_records
from offramp.commands.train import spread, train
from optimizer.sequences import differing, sequences_of
from profiles.networks import decay_of
from profiles.records import ExitRecords
from tests.earlyexit.families.decoders import byte_tokenizer, hf_decoder
from tests.earlyexit.families.encoder_decoders import PAD, hf_seq2seq

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = LabelledRows.of_texts([LETTERS[k : k + 3] for k in range(24)], [""] * 24)
ANSWER = 8
JOB = CalibrateJob(budget=0.4, confidence=0.8, answers=ANSWER, design_share=0.5)


@pytest.fixture(scope="module", params=["llama", "t5", "marian"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def start(kind: str) -> tuple[int, ...]:
    """What answers start with, of an encoder-decoder."""
    return (PAD[kind],) if kind in PAD else ()


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    (hf_seq2seq(kind) if kind in PAD else hf_decoder()).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After ramps learned of eight tokens per prompt, and are calibrated."""
    out = tmp_path_factory.mktemp("model")
    job = TrainJob(
        backbone=str(checkpoint), name="tiny", task="token", answers=ANSWER, epochs=30, batch=32, max_length=128
    )
    train(job, PROMPTS, out)
    calibrate(out, PROMPTS, JOB)
    return out


def test_a_checkpoint_that_generates_says_tokens_if_nothing_else_is_asked(checkpoint: Path, tmp_path: Path) -> None:
    assert default_task(str(checkpoint)) == "token"
    assert default_task("somewhere/model.gguf") == "token"
    assert default_task("somewhere/on-a-hub") == "label"
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "bert"}', encoding="utf-8")
    assert default_task(str(tmp_path)) == "label"


def test_ramps_and_records_come_of_prompts_and_generations(trained: Path, start: tuple[int, ...]) -> None:
    card = read_card(trained)
    assert (card.codec, card.task["name"], card.ramp_style) == (
        {"name": "prompt", "max_length": 128},
        "token",
        "adapted",
    )
    assert card.ramps == spread(5) == (0, 1, 2, 3)
    assert (card.provenance["answers"], card.provenance["head"]) == (ANSWER, "checkpoint")
    task = load_model(trained).task
    assert isinstance(task, TokenTask)
    assert task.start == (start[0] if start else None)
    records = ExitRecords.load(trained / "exit_records.npz")
    assert (records.score, records.ramps, len(sequences_of(records))) == ("foreseen", (0, 1, 2, 3), 24)
    assert records.tokens_N is not None
    assert records.tokens_N[:ANSWER].tolist() == [3 + len(start), *[1] * (ANSWER - 1)]
    agreed = 1 - records.losses_NR.mean(0)
    assert agreed[-1] > agreed[0]  # deeper is better; and they learned something
    assert agreed[-1] > 0.5


def test_the_backbone_stays_as_it_came_and_a_decay_is_of_generations_alone(
    trained: Path, checkpoint: Path, tmp_path: Path
) -> None:
    job = TrainJob(backbone=str(checkpoint), name="again", task="token", answers=2, epochs=1)
    again = train(job, PROMPTS, trained.parent / "again")
    ours, theirs = load_model(trained), again
    assert ours.backbone.sha256() == theirs.backbone.sha256()
    records = ExitRecords.load(trained / "exit_records.npz")
    with pytest.raises(DataError, match="a decay is in the scores already"):
        calibrate_records(records, JOB.model_copy(update={"decay": 2.0}))
    (tmp_path / "bert.json").write_text('{"family": "bert", "hidden_size": 8, "num_heads": 2, "num_blocks": 2}')
    with pytest.raises(ModelFolderError, match="is no decoder"):
        train(TrainJob(backbone=str(tmp_path / "bert.json"), name="x", task="token"), PROMPTS, tmp_path / "out")


def generated(model: EarlyExitModel, start: tuple[int, ...], **given: Any) -> list[Generated]:
    """What a model says of every prompt, by a policy if one is given."""
    prompts = [(*byte_tokenizer().encode(text).ids, *start) for text in PROMPTS.texts]
    assert isinstance(model.task, TokenTask)
    return generate(model, prompts, Asked(max_tokens=ANSWER, ends=frozenset(model.task.ends), **given))


def test_until_a_ramp_is_wrong_an_early_generation_is_the_full_models(trained: Path, start: tuple[int, ...]) -> None:
    """Line 5: every token that left early passed its threshold; and the bound by records holds of real generations."""
    model, records = load_model(trained), ExitRecords.load(trained / "exit_records.npz")
    thresholds = {ramp: float(np.quantile(records.scores_NR[:, ramp], 0.7)) for ramp in (1, 3)}
    full = generated(model, start)
    assert np.concatenate([each.answer for each in full]).tolist() == records.answers()[:, -1].tolist()
    early = generated(model, start, policy=ForeseenPolicy(thresholds), ramps=(1, 3))
    wrong_N = records.worst_losses_N(thresholds) > 0
    for rows, one, other in zip(sequences_of(records), early, full, strict=True):
        same = int(wrong_N[rows].argmax()) if wrong_N[rows].any() else len(rows)
        assert one.answer[:same] == other.answer[:same]
        assert differing(one.answer, other.answer) <= 1 - same / len(rows)
    left = [(exit_block, score) for each in early for exit_block, score in zip(each.exits, each.scores, strict=True)]
    assert all(np.float32(score) >= np.float32(thresholds[exit_block]) for exit_block, score in left if exit_block != 4)
    assert {exit_block for exit_block, _ in left} == {1, 3, 4}


def test_thresholds_that_fall_are_found_kept_and_obeyed(trained: Path, start: tuple[int, ...], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "model"))
    card, records = calibrate(folder, PROMPTS, JOB.model_copy(update={"decay": 2.0}))
    assert card.decay == card.policy_spec().decay == decay_of(records) == 2.0
    assert read_calibration(folder).policy_spec() == card.policy_spec()
    raw, rows = ExitRecords.load(trained / "exit_records.npz"), sequences_of(records)
    place_N = np.concatenate([np.arange(len(each)) for each in rows])
    calms_N = np.minimum((raw.scores_NR[:, 1] - 0.1 * np.exp(-place_N / 2)) / 0.9, 1.0)
    assert records.scores_NR[:, 1] == pytest.approx(calms_N, abs=1e-6)

    # What records say of thresholds is what the policy does, up to the first token that is another.
    thresholds = {1: float(np.quantile(records.scores_NR[:, 1], 0.6))}
    early = generated(load_model(folder), start, policy=ForeseenPolicy(thresholds, decay=2.0), ramps=(1,))
    exits_N = records.outcome(thresholds).exits_N
    wrong_N = records.worst_losses_N(thresholds) > 0
    for part, one in zip(rows, early, strict=True):
        same = int(wrong_N[part].argmax()) + 1 if wrong_N[part].any() else len(part)
        assert one.exits[:same] == exits_N[part][:same].tolist()
    assert 0 < (exits_N == 1).mean() < 1
