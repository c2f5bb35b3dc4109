"""Writes model folders without training, and service files that tests may change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from deployments.settings import ControlSettings
from earlyexit.errors import InputError
from earlyexit.network.store import CARD_FILE, CHAIN, WEIGHTS_FILE, read_card
from offramp.commands.doctor import check_target
from offramp.spec.file import Service, read_service
from optimizer.calibration.calibration_file import AMONG, CALIBRATION_FILE, PRUNED, RECORDS_FILE
from optimizer.plans.plan import PolicySpec
from optimizer.plans.plan_file import parse_plan, write_plan
from optimizer.problems.problem import PlanProblem
from profiles.networks import MEASURING, PRUNE, TOKENS_KEPT, WORDS_CUT
from profiles.records import ExitRecords
from tests.exit_records import calibration_card, exit_records
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
    write_calibration(folder, dict.fromkeys(ramps, 0.5) if thresholds is None else thresholds)
    write_records(folder / RECORDS_FILE, num_blocks=num_blocks)
    return folder


def write_calibration(folder: Path, thresholds: dict[int, float]) -> None:
    (folder / CALIBRATION_FILE).write_text(calibration_card(thresholds).model_dump_json(), encoding="utf-8")


def write_chain(folder: Path, *members: Path) -> Path:
    """Writes a calibrated chain of such models next to their folders, with thresholds of 0.5."""
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
    """Writes a further calibration of a chain, or without a name replaces it, with other thresholds."""
    folder = chain / name
    folder.mkdir(exist_ok=True)
    calibration = json.loads((chain / CALIBRATION_FILE).read_text(encoding="utf-8"))
    calibration |= {"thresholds": thresholds, "provenance": {AMONG: 2}}
    (folder / CALIBRATION_FILE).write_text(json.dumps(calibration), encoding="utf-8")


def write_records(path: Path, *, num_blocks: int = 3) -> Path:
    """Returns the exit records of such a model."""
    ramps = tuple(range(num_blocks - 1))
    scores_NR = np.full((8, len(ramps)), 0.9, dtype=np.float32)
    for ramp, first_sure in zip(ramps, (4, 2, 1), strict=False):
        scores_NR[first_sure:, ramp] = 0.1
    exit_records(scores_NR, answers_NE=np.zeros((8, num_blocks), dtype=np.int64), score="entropy").save(path)
    return path


def write_shares(folder: Path, *, calibrated: float, recorded: float) -> None:
    """Calibrates and records the model by shares of values above these confidences."""
    calibration = json.loads((folder / CALIBRATION_FILE).read_text(encoding="utf-8"))
    calibration |= {"policy": "share", "confidences": dict.fromkeys(calibration["thresholds"], calibrated)}
    (folder / CALIBRATION_FILE).write_text(json.dumps(calibration), encoding="utf-8")
    records = ExitRecords.load(write_records(folder / RECORDS_FILE))
    confidences = dict.fromkeys(records.ramps, recorded)
    replace(records, score="share", confidences=confidences).save(folder / RECORDS_FILE)


TABLE = {"batch": [1, 2], "block_s": [[0.01, 0.02]] * 3, "ramp_s": [[0.001, 0.002], [0.003, 0.004]]}
CHAIN_TABLE = {"batch": [1, 2], "block_s": [[0.01, 0.02]] * 2 + [[0.1, 0.2]] * 3, "ramp_s": [[0.001, 0.002]] * 4}
"""Latencies of a chain of a small network with two blocks and the model."""


class Files:
    """A service file and its model folder. Given fields replace those of the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model")
        self.path = folder / "service.yaml"

    def write(self, **parts: Any) -> Path:
        document: dict[str, Any] = {
            "schema_version": 1,
            "name": "demo",
            "model": {"folder": "model", "latency": {"cpu": TABLE}},
            "slo": {"latency_s": 1.0, "slack": 0.2},
            "cluster": {"devices": {"cpu": {"count": 4}}, "link": {"bandwidth_bytes_per_s": 1e6, "delay_s": 0.001}},
        }
        self.path.write_text(yaml.safe_dump(document | parts, sort_keys=False), encoding="utf-8")
        return self.path

    def read(self, **parts: Any) -> Service:
        return read_service(self.write(**parts))

    def write_plan(self, *, policy: dict[str, Any] | None = None, ramps: Sequence[int] = (), **stage: Any) -> None:
        """Writes a plan with one split for all blocks to plan.yaml."""
        split = {"first": 0, "end": 3, "batch": 2, "ramps": list(ramps)}
        write_plan(parse_plan({"stages": [{"splits": [split]} | stage], "policy": policy}), self.folder / "plan.yaml")

    def write_chain(self) -> Path:
        """Writes a chain of a small network and the model to the folder `cascade`."""
        small = write_model(self.folder / "small", num_blocks=2, name="s")
        return write_chain(self.folder / "cascade", small, self.model)

    def refused(self, **parts: Any) -> tuple[int, str]:
        """Returns the line and the message of a refusal, which the doctor reports too, except that there is no plan."""
        with pytest.raises(InputError) as refusal:
            self.read(**parts)
        assert check_target(self.path)[0].found == str(refusal.value) or "no plan" in str(refusal.value)
        where, _, words = str(refusal.value).partition(": ")
        name, _, line = where.rpartition(":")
        assert name == str(self.path)
        return int(line), words

    def line_of(self, text: str) -> int:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return next(number for number, line in enumerate(lines, start=1) if text in line)


def control_of(service: Service) -> ControlSettings:
    assert service.settings.control is not None
    return service.settings.control


def problem_of(service: Service) -> PlanProblem:
    return control_of(service).problem


def policy_of(service: Service) -> PolicySpec:
    assert service.settings.plan.policy is not None
    return service.settings.plan.policy


def emulated(scale: float = 1.0, count: int = 4, **model: Any) -> dict[str, Any]:
    """Returns the parts of a service on emulated accelerators."""
    return {
        "model": {"folder": "model", "latency": {"emulated:V100": TABLE}} | model,
        "cluster": {
            "devices": {"emulated:V100": {"count": count}},
            "link": {"bandwidth_bytes_per_s": 1e6, "delay_s": 0.001},
            "time_scale": scale,
        },
    }
