"""What a calibration leaves behind: thresholds, and what is promised of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from earlyexit.errors import DataError
from optimizer.plan import PolicySpec, policy_of_score
from optimizer.risk import Metric
from profiles.networks import check_decay_of, check_weights
from profiles.records import ExitRecords
from profiles.scores import Score

CALIBRATION_FILE = "calibration.json"
RECORDS_FILE = "exit_records.npz"
REFERENCE, PRUNED = "reference", "pruned"
BESIDE = (REFERENCE, PRUNED)
"""Folders in a chain's, each with a calibration beside its own: of ramps of the last network alone, and of texts that
lose words at crossings. A plan follows the one by which it is worth most."""
AMONG = "among"
"""In the provenance of calibrations of which plans pick one: how many the same inputs tested."""
MEMBERS = "members"
"""In the provenance of a chain's calibration and records: the models that they are of."""


class CalibrationCard(BaseModel):
    """What `calibration.json` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    policy: Score
    thresholds: dict[int, float]
    confidences: dict[int, float] | None = None
    """Of shares, per ramp: above which a principal value counts."""
    weights: dict[int, float] | None = None
    """Of an ensemble that pays, by the end of a network."""
    decay: float | None = None
    """Of tokens, as a plan's policy has it; None: thresholds hold at every place of an answer."""
    metric: Metric = "agreement"
    """What the budget is of."""
    prune: dict[int, float] | None = None
    """Of a chain, by end ramp: the alpha by which words are pruned where the thresholds hold; None: by none."""
    budget: float
    confidence: float
    tested: dict[str, Any]
    """What the thresholds did on the inputs they were tested on."""
    provenance: dict[str, Any]

    def policy_spec(self) -> PolicySpec:
        """As a plan names it."""
        return policy_of_score(self.policy, self.thresholds, self.confidences, self.weights, self.decay)

    def with_ensemble(self, weights: Mapping[int, float] | None, found: dict[str, Any]) -> CalibrationCard:
        """The same, of an ensemble with these weights, None where it is off, and what was found of it."""
        tested = {**self.tested, "ensemble": found}
        return self.model_copy(update={"weights": None if weights is None else dict(weights), "tested": tested})

    def to_json(self) -> str:
        """The file's text, without what there is none of, such as confidences, and of agreement no metric."""
        left_out = {name for name in ("confidences", "weights", "prune", "decay") if getattr(self, name) is None}
        left_out |= {"metric"} if self.metric == "agreement" else set()
        return self.model_dump_json(indent=2, exclude=left_out) + "\n"


def members_in(provenance: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """The models of a chain, `name` and `sha256`, that a calibration or records are of; none where they do not say."""
    return list((provenance or {}).get(MEMBERS, ()))


def beside_of(model: Path) -> tuple[Path, ...]:
    """The folders of the calibrations that a model has beside its own."""
    return tuple(each for name in BESIDE if ((each := model / name) / CALIBRATION_FILE).is_file())


def records_of(model: Path, beside: Path | None = None) -> Path:
    """The exit records of a model's own calibration, or of the one in the folder `beside` it, where that has others."""
    own = None if beside is None else beside / RECORDS_FILE
    return own if own is not None and own.is_file() else model / RECORDS_FILE


def read_calibration_file(path: Path) -> CalibrationCard:
    """Raises DataError, naming the file and the field, for anything else."""
    try:
        return CalibrationCard.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{path}: {where}: {first['msg']}; calibrate again") from error


def check_policy(policy: PolicySpec, whose: str, records: ExitRecords, name: str, ramps: Iterable[int]) -> None:
    """Raises DataError for records without the scores that a policy compares at these ramps."""
    if policy.name == "recorded":
        return
    if policy.name != records.score:
        raise DataError(f"{whose} leaves by {policy.name}, {name} holds scores of {records.score}")
    for ramp in ramps:
        both = (policy.confidences, records.confidences)
        wanted, held = (each.get(ramp) if isinstance(each, Mapping) else each for each in both)
        if wanted != held:
            raise DataError(
                f"{whose}'s shares at ramp {ramp} are of values above {wanted}, those of {name} of values above {held}"
            )
    check_weights(records, policy.weights, name)
    check_decay_of(records, policy.decay, name)
