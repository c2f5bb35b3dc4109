"""Model folders that a service file can name, written without training anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from earlyexit.network.store import CARD_FILE, CHAIN, WEIGHTS_FILE, read_card
from optimizer.calibration_file import AMONG, CALIBRATION_FILE, PRUNED, RECORDS_FILE, CalibrationCard
from profiles.networks import MEASURING, PRUNE, TOKENS_KEPT, WORDS_CUT
from profiles.records import ExitRecords
from tests.exit_records import exit_records
from tests.model_cards import a_card

WEIGHTS_BYTES = 4000


def write_model(
    folder: Path, *, num_blocks: int = 3, thresholds: dict[int, float] | None = None, name: str = "m"
) -> Path:
    """A calibrated model with a ramp after every block but the last.

    Of its eight recorded inputs, half are sure (0.1 nats) at the first ramp, half of the others at the second, and so
    on until one is left; the others score 0.9. All thresholds are 0.5.
    """
    folder.mkdir(parents=True)
    ramps = tuple(range(num_blocks - 1))
    card = a_card(("bill", "weather"), name=name, num_blocks=num_blocks, codec={"name": "text", "max_length": 16})
    (folder / CARD_FILE).write_text(card.model_dump_json(), encoding="utf-8")
    (folder / WEIGHTS_FILE).write_bytes(bytes(WEIGHTS_BYTES))
    calibration = CalibrationCard(
        policy="entropy",
        thresholds=dict.fromkeys(ramps, 0.5) if thresholds is None else thresholds,
        budget=0.01,
        confidence=0.9,
        tested={},
        provenance={},
    )
    (folder / CALIBRATION_FILE).write_text(calibration.model_dump_json(), encoding="utf-8")
    write_records(folder / RECORDS_FILE, num_blocks=num_blocks)
    return folder


def write_chain(folder: Path, *members: Path) -> Path:
    """A calibrated chain of such models, in the folder beside theirs; all its thresholds are 0.5."""
    blocks = [read_card(member).num_blocks for member in members]
    num_blocks, ramps = sum(blocks), tuple(range(sum(blocks) - 1))
    write_model(folder, num_blocks=num_blocks)
    (folder / WEIGHTS_FILE).unlink()
    models = [f"../{member.name}" for member in members]
    codec = {"name": "text", "max_length": 16}
    card = a_card(
        ("bill", "weather"),
        name="cascade",
        family=CHAIN,
        backbone={"models": models, "names": [read_card(member).name for member in members], "blocks": blocks},
        codec={"name": "chain", "models": models, "members": [codec] * len(members), "max_length": 16},
        num_blocks=num_blocks,
        ramps=ramps,
    )
    (folder / CARD_FILE).write_text(card.model_dump_json(), encoding="utf-8")
    return folder


def write_pruned(chain: Path, *, end: int, kept: float, measuring: float) -> None:
    """Beside the calibration of a chain of two models one of pruned texts, by thresholds of 0.4.

    `kept`: share of the tokens; `measuring`: what the first model takes for telling whose attention went where.
    """
    folder = chain / PRUNED
    folder.mkdir()
    whole = ExitRecords.load(chain / RECORDS_FILE)
    facts = {PRUNE: {end: 0.6}, WORDS_CUT: 0.1, TOKENS_KEPT: [1.0, kept], MEASURING: [measuring]}
    ends_N = np.eye(len(whole))[0]  # the one that no ramp is sure of
    replace(whole, end_losses_N=ends_N, provenance=facts).save(folder / RECORDS_FILE)
    calibration = json.loads((chain / CALIBRATION_FILE).read_text(encoding="utf-8"))
    calibration |= {"thresholds": dict.fromkeys(whole.ramps, 0.4), "prune": {end: 0.6}, "provenance": facts}
    (folder / CALIBRATION_FILE).write_text(json.dumps(calibration), encoding="utf-8")


def write_beside(chain: Path, name: str, thresholds: dict[int, float]) -> None:
    """Beside the calibration of a chain, or without a name in its place, one of other thresholds, by its records."""
    folder = chain / name
    folder.mkdir(exist_ok=True)
    calibration = json.loads((chain / CALIBRATION_FILE).read_text(encoding="utf-8"))
    calibration |= {"thresholds": thresholds, "provenance": {AMONG: 2}}
    (folder / CALIBRATION_FILE).write_text(json.dumps(calibration), encoding="utf-8")


def write_records(path: Path, *, num_blocks: int = 3) -> Path:
    """The exit records of such a model."""
    ramps = tuple(range(num_blocks - 1))
    scores_NR = np.full((8, len(ramps)), 0.9, dtype=np.float32)
    for ramp, first_sure in zip(ramps, (4, 2, 1), strict=False):
        scores_NR[first_sure:, ramp] = 0.1
    exit_records(scores_NR, answers_NE=np.zeros((8, num_blocks), dtype=np.int64), score="entropy").save(path)
    return path


def write_shares(folder: Path, *, calibrated: float, recorded: float) -> None:
    """Calibrate and record the model by shares of values above these confidences."""
    calibration = json.loads((folder / CALIBRATION_FILE).read_text(encoding="utf-8"))
    calibration |= {"policy": "share", "confidences": dict.fromkeys(calibration["thresholds"], calibrated)}
    (folder / CALIBRATION_FILE).write_text(json.dumps(calibration), encoding="utf-8")
    records = ExitRecords.load(write_records(folder / RECORDS_FILE))
    confidences = dict.fromkeys(records.ramps, recorded)
    replace(records, score="share", confidences=confidences).save(folder / RECORDS_FILE)


def with_card(folder: Path, **fields: object) -> None:
    """Change what a model's card says."""
    path = folder / CARD_FILE
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")
