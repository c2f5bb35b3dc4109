"""Exit records: the score and answer of every ramp, and the full model's answer, for N inputs.

From them follows, for any set of active ramps and thresholds, who would have left where: survival (E3 section 3.1),
agreement with the full model (Apparate section 3.2), mean blocks run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError

SCHEMA = 1
Score = Literal["entropy", "confidence"]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecords:
    """One row per input, one column per ramp (R), ascending; refuses arrays that do not fit together."""

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
    provenance: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        shape = (len(self.sample_ids), len(self.ramps))
        if self.scores_NR.shape != shape or self.labels_NR.shape != shape:
            raise DataError(f"exit records of {shape[0]} inputs and {shape[1]} ramps need arrays of that shape")
        if self.final_labels_N.shape != shape[:1]:
            raise DataError(f"exit records of {shape[0]} inputs need as many final labels")
        if self.true_labels_N is not None and self.true_labels_N.shape != shape[:1]:
            raise DataError(f"exit records of {shape[0]} inputs need as many true labels")
        if list(self.ramps) != sorted(set(self.ramps)) or any(
            not 0 <= ramp < self.num_blocks - 1 for ramp in self.ramps
        ):
            raise DataError(f"ramps must ascend and sit below block {self.num_blocks - 1}, not {list(self.ramps)}")
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
            provenance=self.provenance,
        )

    def outcome(self, thresholds: Mapping[int, float]) -> ExitOutcome:
        """What happens when exactly the ramps named in `thresholds` are active, with these thresholds."""
        unknown = sorted(set(thresholds) - set(self.ramps))
        if unknown:
            raise DataError(f"no records of ramps {unknown}; recorded are {list(self.ramps)}")
        never = np.inf if self.larger_is_surer else -np.inf
        limits_R = np.array([thresholds.get(ramp, never) for ramp in self.ramps], dtype=np.float32)
        sure_NR = self.scores_NR >= limits_R if self.larger_is_surer else self.scores_NR <= limits_R
        return self._outcome(sure_NR)

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
        with path.open("wb") as file:  # given a path, numpy adds an ending to it
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> ExitRecords:
        """Read what `save` wrote; raises DataError for anything else."""
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                header = json.loads(str(file["header"]))
                arrays = {name: file[name] for name in file.files if name != "header"}
            if header.get("schema_version") != SCHEMA:
                raise DataError(f"{path} has schema {header.get('schema_version')}, this version reads {SCHEMA}")
            return cls(
                score=header["score"],
                num_blocks=header["num_blocks"],
                ramps=tuple(header["ramps"]),
                sample_ids=tuple(map(str, arrays["sample_ids"])),
                scores_NR=arrays["scores"],
                labels_NR=arrays["labels"],
                final_labels_N=arrays["final_labels"],
                true_labels_N=arrays.get("true_labels"),
                provenance=header["provenance"],
            )
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, BadZipFile) as error:
            raise DataError(f"{path} does not hold exit records: {error}") from error


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
