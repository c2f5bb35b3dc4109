"""The calibration file: thresholds and their guarantee."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from earlyexit.data.source_file import StrictDocument, read_source
from earlyexit.errors import DataError
from optimizer.calibration.thresholds import Metric
from optimizer.plans.plan import PolicySpec, RampKey, policy_of_score
from profiles.networks import check_decay_of, check_weights, decay_of, weights_of
from profiles.records import ExitRecords
from profiles.scores import Score

CALIBRATION_FILE = "calibration.json"
RECORDS_FILE = "exit_records.npz"
REFERENCE, PRUNED = "reference", "pruned"
BESIDE = (REFERENCE, PRUNED)
"""Subfolders with alternative calibrations of a chain: for ramps of the last network alone, and for texts whose words
are pruned at crossings. Plans are made for each calibration, and the best plan is used."""
AMONG = "among"
"""Key in the provenance of alternative calibrations: how many of them were tested on the same inputs."""
MEMBERS = "members"
"""Key in the provenance of a chain's calibration and records: the chain's models."""


class CalibrationCard(StrictDocument):
    """The contents of `calibration.json`."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    policy: Score
    thresholds: dict[RampKey, float]
    confidences: dict[RampKey, float] | None = None
    """For the score `share`, by ramp: confidence above which a principal value counts."""
    weights: dict[RampKey, float] | None = None
    """Weights of an ensemble, by the end of a network. None if the ensemble is not used."""
    decay: float | None = None
    """For tokens: `PolicySpec.decay`. None: thresholds do not depend on the position in the answer."""
    metric: Metric = "agreement"
    """The loss that the budget bounds."""
    prune: dict[RampKey, float] | None = None
    """For a chain, by end ramp: the alpha with which words are pruned. None: no pruning."""
    budget: float
    confidence: float
    tested: dict[str, Any]
    """Results of the thresholds on the tested inputs."""
    provenance: dict[str, Any]

    def policy_spec(self) -> PolicySpec:
        """Returns the exit policy with these thresholds."""
        return policy_of_score(self.policy, self.thresholds, self.confidences, self.weights, self.decay)

    def to_json(self) -> str:
        """Returns the file's text, without empty optional fields and without the default metric."""
        left_out = {name for name in ("confidences", "weights", "prune", "decay") if getattr(self, name) is None}
        left_out |= {"metric"} if self.metric == "agreement" else set()
        return self.model_dump_json(indent=2, exclude=left_out) + "\n"


def members_in(provenance: Mapping[str, Any] | None, path: Path) -> list[dict[str, str]]:
    """Returns `name` and `sha256` of the chain's models from the provenance in a file; raises DataError."""
    try:
        return [{name: each[name] for name in ("name", "sha256")} for each in (provenance or {}).get(MEMBERS, ())]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: provenance.members must have name and sha256; calibrate again") from error


def beside_of(model: Path) -> tuple[Path, ...]:
    """Returns the folders of a model's alternative calibrations."""
    return tuple(model / name for name in BESIDE if (model / name / CALIBRATION_FILE).is_file())


def records_of(folder: Path) -> Path:
    """Returns the path of a calibration's exit records: in its folder, or else those of the model above it."""
    own = folder / RECORDS_FILE
    return own if folder.name not in BESIDE or own.is_file() else folder.parent / RECORDS_FILE


def read_calibration_file(path: Path) -> CalibrationCard:
    """Reads a calibration; raises DataError with the file, the line, the error and the allowed values."""
    return read_source(path, DataError).parse(CalibrationCard, called="the calibration")


def policy_of_records(records: ExitRecords, thresholds: Mapping[int, float]) -> PolicySpec:
    """Returns the policy with which the scores were recorded, and these thresholds."""
    return policy_of_score(records.score, thresholds, records.confidences, weights_of(records), decay_of(records))


def check_policy(policy: PolicySpec, whose: str, records: ExitRecords, name: str, ramps: Iterable[int]) -> None:
    """Raises DataError unless the records `name` hold the scores that the policy of `whose` compares at these ramps."""
    if policy.name == "recorded":
        return
    if policy.name != records.score:
        raise DataError(f"{whose} leaves by {policy.name}, {name} holds scores of {records.score}")
    for ramp in ramps:
        levels = (policy.confidences, records.confidences)
        required, recorded = (each.get(ramp) if isinstance(each, Mapping) else each for each in levels)
        if required != recorded:
            raise DataError(
                f"{whose} counts values above {required} at ramp {ramp}, but {name} counts values above {recorded}"
            )
    check_weights(records, policy.weights, name)
    check_decay_of(records, policy.decay, name)
