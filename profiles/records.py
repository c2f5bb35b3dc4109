"""Exit records: the score and answer of every ramp, and the full model's answer, for N inputs.

From them follows, for any set of active ramps and thresholds, who would have left where: survival (E3 section 3.1),
agreement with the full model (Apparate section 3.2), mean blocks run.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from pydantic import Field

from earlyexit.errors import DataError
from earlyexit.source_file import Source, StrictDocument

SCHEMA = 1
Score = Literal["entropy", "confidence"]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Header = TypeVar("Header", bound=StrictDocument)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecords:
    """One row per input, at least one, and one column per ramp (R), ascending; refuses what does not fit together."""

    score: Score
    """What `scores_NR` measures: entropy in nats (smaller is surer) or confidence (larger is surer)."""
    num_blocks: int
    ramps: tuple[int, ...]
    sample_ids: tuple[str, ...]
    scores_NR: npt.NDArray[np.float32]
    labels_NR: IntArray
    final_labels_N: IntArray
    """The full model's answers."""
    true_labels_N: IntArray | None = None
    """Where known."""
    times_s_N: FloatArray | None = None
    """When each input arrived, on the recorder's clock; None for records without an order."""
    provenance: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        shape = (len(self.sample_ids), len(self.ramps))
        check_score(self.score)
        if not shape[0]:
            raise DataError("exit records need at least one input: shares of none are not numbers")
        if self.scores_NR.shape != shape or self.labels_NR.shape != shape:
            raise DataError(f"exit records of {shape[0]} inputs and {shape[1]} ramps need arrays of that shape")
        if self.final_labels_N.shape != shape[:1]:
            raise DataError(f"exit records of {shape[0]} inputs need as many final labels")
        if self.true_labels_N is not None and self.true_labels_N.shape != shape[:1]:
            raise DataError(f"exit records of {shape[0]} inputs need as many true labels")
        if self.times_s_N is not None and (self.times_s_N.shape != shape[:1] or not np.isfinite(self.times_s_N).all()):
            raise DataError(f"exit records of {shape[0]} inputs need as many arrival times, all finite")
        check_ramps(self.ramps, self.num_blocks)
        if np.isnan(self.scores_NR).any():
            raise DataError("exit records hold scores that are not numbers")

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def larger_is_surer(self) -> bool:
        return self.score == "confidence"

    @property
    def sureness_NR(self) -> npt.NDArray[np.float32]:
        """Scores with one direction: larger is surer."""
        return self.scores_NR if self.larger_is_surer else -self.scores_NR

    def subset(self, rows: IntArray) -> ExitRecords:
        """The records of some inputs, in the given order."""
        return ExitRecords(
            score=self.score,
            num_blocks=self.num_blocks,
            ramps=self.ramps,
            sample_ids=tuple(self.sample_ids[row] for row in rows),
            scores_NR=self.scores_NR[rows],
            labels_NR=self.labels_NR[rows],
            final_labels_N=self.final_labels_N[rows],
            true_labels_N=None if self.true_labels_N is None else self.true_labels_N[rows],
            times_s_N=None if self.times_s_N is None else self.times_s_N[rows],
            provenance=self.provenance,
        )

    def outcome(self, thresholds: Mapping[int, float]) -> ExitOutcome:
        """What happens when exactly the ramps named in `thresholds` are active, with these thresholds.

        Raises DataError for ramps that were not recorded, and for thresholds that are not numbers.
        """
        return self._outcome(self._sure_NR(thresholds))

    def nested_survival(self, thresholds: Mapping[int, float]) -> tuple[float, ...]:
        """Per block, the share of inputs that no ramp before it lets out, all ramps active.

        What a plan problem's `survival` holds. Raises DataError unless every recorded ramp has a threshold.
        """
        without = sorted(set(self.ramps) - set(thresholds))
        if without:
            raise DataError(f"nested survival has all ramps active; {without} have no threshold")
        return self.outcome(thresholds).survival

    def survivals(self, thresholds: Mapping[int, float], active_MR: npt.NDArray[np.bool_]) -> FloatArray:
        """Survival (M, blocks) under many sets of active ramps (M), each with the thresholds given for its ramps.

        Exact for every set; `nested_survival` read at the last active ramp is exact only where an input that is sure
        at a ramp stays sure. Inputs that are sure at the same ramps are counted once.
        """
        if active_MR.shape[1:] != (len(self.ramps),):
            raise DataError(f"sets of active ramps need {len(self.ramps)} columns, one per recorded ramp")
        active = {self.ramps[column] for column in np.flatnonzero(active_MR.any(0))}
        if not active <= set(thresholds):
            raise DataError(f"ramps {sorted(active - set(thresholds))} are active and have no threshold")
        sure_PR, counts_P = np.unique(self._sure_NR(thresholds), axis=0, return_counts=True)
        survival_MK = np.ones((len(active_MR), self.num_blocks))
        inside_MP = np.ones((len(active_MR), len(sure_PR)), dtype=bool)
        for column, ramp in enumerate(self.ramps):
            inside_MP &= ~(active_MR[:, column, None] & sure_PR[:, column])
            survival_MK[:, ramp + 1 :] = (inside_MP @ counts_P / len(self))[:, None]
        return survival_MK

    def _sure_NR(self, thresholds: Mapping[int, float]) -> npt.NDArray[np.bool_]:
        return sure_NR(self.score, self.ramps, self.scores_NR, thresholds)

    def _outcome(self, sure_NR: npt.NDArray[np.bool_]) -> ExitOutcome:
        leaves_N = sure_NR.any(1)
        column_N = sure_NR.argmax(1) if self.ramps else np.zeros(len(self), dtype=np.int64)
        exits_N = np.where(leaves_N, np.array([*self.ramps, 0])[column_N], self.num_blocks - 1)
        early_N = self.labels_NR[np.arange(len(self)), column_N] if self.ramps else self.final_labels_N
        return ExitOutcome(
            num_blocks=self.num_blocks,
            exits_N=exits_N,
            labels_N=np.where(leaves_N, early_N, self.final_labels_N),
            final_labels_N=self.final_labels_N,
            true_labels_N=self.true_labels_N,
        )

    def save(self, path: Path) -> None:
        """Write one compressed .npz file."""
        header = {
            "schema_version": SCHEMA,
            "score": self.score,
            "num_blocks": self.num_blocks,
            "ramps": list(self.ramps),
            "provenance": dict(self.provenance or {}),
        }
        arrays: dict[str, Any] = {
            "header": np.array(json.dumps(header)),
            "sample_ids": np.array(self.sample_ids),
            "scores": self.scores_NR,
            "labels": self.labels_NR,
            "final_labels": self.final_labels_N,
        }
        if self.true_labels_N is not None:
            arrays["true_labels"] = self.true_labels_N
        if self.times_s_N is not None:
            arrays["times_s"] = self.times_s_N
        with path.open("wb") as file:  # given a path, numpy adds an ending to it
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> ExitRecords:
        """Read what `save` wrote; raises DataError for anything else."""
        header, arrays = read_npz(path, RecordsHeader, KINDS, called="exit records", optional=OPTIONAL)
        return cls(
            score=header.score,
            num_blocks=header.num_blocks,
            ramps=tuple(header.ramps),
            sample_ids=tuple(map(str, np.atleast_1d(arrays["sample_ids"]))),
            scores_NR=arrays["scores"],
            labels_NR=arrays["labels"],
            final_labels_N=arrays["final_labels"],
            true_labels_N=arrays.get("true_labels"),
            times_s_N=arrays.get("times_s"),
            provenance=header.provenance,
        )


KINDS = {"sample_ids": "U", "scores": "f", "labels": "iu", "final_labels": "iu", "true_labels": "iu", "times_s": "f"}
"""The arrays of a file and what numpy calls their kinds: text, fractions, whole numbers."""
OPTIONAL = ("true_labels", "times_s")


class RecordsHeader(StrictDocument):
    """What a file holds of exit records but their arrays."""

    schema_version: Literal[1]
    score: Score
    num_blocks: int = Field(ge=1)
    ramps: list[int]
    provenance: dict[str, Any]


def read_npz(
    path: Path, shape: type[Header], kinds: Mapping[str, str], *, called: str, optional: Collection[str] = ()
) -> tuple[Header, dict[str, npt.NDArray[Any]]]:
    """The header of an .npz file, checked, and its other arrays.

    `kinds`: for every array, the letters of `numpy.dtype.kind` that it may have. Raises DataError, naming the file, for
    whatever else is in it, and for arrays that are missing unless they are `optional`.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            document = json.loads(str(file["header"]))
            arrays = {name: file[name] for name in file.files if name != "header"}
    # Zip, zlib, numpy's reader of array headers and JSON each fail in ways of their own, not all of them documented.
    except Exception as error:
        raise DataError(f"{path} does not hold {called}: {error}") from error
    if isinstance(document, dict) and document.get("schema_version") != SCHEMA:
        raise DataError(f"{path} has schema {document.get('schema_version')}, this version reads {SCHEMA}")
    source = Source(document=document, where=f"{path} does not hold {called}: header", raises=DataError)
    header = source.parse(shape, called="all of it")
    missing = sorted(set(kinds) - set(optional) - set(arrays))
    if missing:
        raise DataError(f"{path} does not hold {called}: no array {missing[0]!r}")
    for name, array in arrays.items():
        if array.dtype.kind not in kinds.get(name, ""):
            raise DataError(f"{path} does not hold {called}: no array {name!r} of {array.dtype} belongs there")
    return header, arrays


def check_score(score: str) -> None:
    """Raise DataError for a score that is none of ours: it would be read as an entropy."""
    if score not in get_args(Score):
        raise DataError(f"a score is one of {', '.join(get_args(Score))}, not {score!r}")


def check_ramps(ramps: tuple[int, ...], num_blocks: int) -> None:
    """Raise DataError unless ramps ascend and sit below the last block."""
    if list(ramps) != sorted(set(ramps)) or any(not 0 <= ramp < num_blocks - 1 for ramp in ramps):
        raise DataError(f"ramps must ascend and sit below block {num_blocks - 1}, not {list(ramps)}")


def sure_NR(
    score: Score, ramps: tuple[int, ...], scores_NR: npt.NDArray[np.float32], thresholds: Mapping[int, float]
) -> npt.NDArray[np.bool_]:
    """Which scores let an input out, of ramps without a threshold none.

    Raises DataError for thresholds of other ramps, and for those that are not numbers.
    """
    unknown = sorted(set(thresholds) - set(ramps))
    if unknown:
        raise DataError(f"no records of ramps {unknown}; recorded are {list(ramps)}")
    unset = sorted(ramp for ramp, threshold in thresholds.items() if np.isnan(threshold))
    if unset:
        raise DataError(f"the thresholds of ramps {unset} are not numbers: they would never let an input out")
    asked_R = np.array([ramp in thresholds for ramp in ramps], dtype=bool)
    limits_R = np.array([thresholds.get(ramp, 0.0) for ramp in ramps], dtype=np.float32)
    # By the mask alone a ramp is off: no threshold is out of reach of a score that is infinite.
    return np.asarray((scores_NR >= limits_R if score == "confidence" else scores_NR <= limits_R) & asked_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitOutcome:
    """Where every recorded input leaves under some thresholds, and with what."""

    num_blocks: int
    exits_N: IntArray
    """The block that each input leaves after."""
    labels_N: IntArray
    final_labels_N: IntArray
    true_labels_N: IntArray | None

    @property
    def agreement(self) -> float:
        """Share of inputs answered as the full model would."""
        return float((self.labels_N == self.final_labels_N).mean())

    @property
    def disagreements(self) -> int:
        """Number of inputs answered otherwise."""
        return int((self.labels_N != self.final_labels_N).sum())

    @property
    def accuracy(self) -> float | None:
        """Share of inputs answered right, where that is known."""
        return None if self.true_labels_N is None else float((self.labels_N == self.true_labels_N).mean())

    @property
    def full_accuracy(self) -> float | None:
        """The full model's share."""
        return None if self.true_labels_N is None else float((self.final_labels_N == self.true_labels_N).mean())

    @property
    def mean_blocks(self) -> float:
        """Blocks run per input."""
        return float(self.exits_N.mean()) + 1

    @property
    def survival(self) -> tuple[float, ...]:
        """Per block, the share of inputs that reach it."""
        return tuple(float((self.exits_N >= block).mean()) for block in range(self.num_blocks))

    @property
    def exit_counts(self) -> dict[int, int]:
        """Inputs per exit, only exits that were taken."""
        blocks, counts = np.unique(self.exits_N, return_counts=True)
        return dict(zip(blocks.tolist(), counts.tolist(), strict=True))
