"""Exit records: for N inputs, the score of every ramp, and the loss of its answer.

From exit records follows where inputs leave for any set of active ramps and thresholds, and thus survival (E3 section
3.1), agreement with the full model (Apparate section 3.2), and mean blocks. Losses make them independent of the task: a
loss is the distance of an answer from the full model's, 0 if they agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from earlyexit.data.source_file import Source, StrictDocument
from earlyexit.errors import DataError
from earlyexit.tasks.label import label_loss
from profiles.scores import BoolArray, FloatArray, Score, check_recorded, check_score, sure_NR
from profiles.scores import IntArray as IntArray
from profiles.table import check_ramps


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitOutcome:
    """Exits and losses of all recorded inputs (N) under some thresholds."""

    num_blocks: int
    exits_N: IntArray
    """The block after which each input leaves."""
    losses_N: FloatArray
    """Loss against the full model's answer, in [0, 1]."""
    answers_N: npt.NDArray[Any] | None
    """The answers; None if they were not recorded."""
    true_losses_N: FloatArray | None
    """Loss against the right answer; None if it is unknown."""
    full_true_losses_N: FloatArray | None
    """Loss of the full model against the right answer; None if it is unknown."""
    tallies_N: IntArray | None = None
    """(N, K): `Task.tallies` of the answers; None if the task has none."""
    full_tallies_N: IntArray | None = None

    @property
    def agreement(self) -> float:
        """1 - mean loss; for labels, the share of inputs with the full model's label."""
        return 1 - float(self.losses_N.mean())

    @property
    def accuracy(self) -> float | None:
        """1 - mean loss against the right answers; for labels, the share of right labels. None if unknown."""
        return None if self.true_losses_N is None else 1 - float(self.true_losses_N.mean())

    @property
    def full_accuracy(self) -> float | None:
        """The accuracy of the full model; None if unknown."""
        return None if self.full_true_losses_N is None else 1 - float(self.full_true_losses_N.mean())

    @property
    def harm(self) -> float | None:
        """The mean by which losses against the right answers exceed the full model's; None if unknown.

        For labels, it is the share of inputs with a wrong label for which the full model's label is right.
        """
        if self.true_losses_N is None or self.full_true_losses_N is None:
            return None
        return float(np.clip(self.true_losses_N - self.full_true_losses_N, 0.0, 1.0).mean())

    @property
    def mean_blocks(self) -> float:
        """Mean number of blocks that an input runs."""
        return float(self.exits_N.mean()) + 1

    @property
    def survival(self) -> tuple[float, ...]:
        """The share of inputs that reach each block."""
        return tuple(float((self.exits_N >= block).mean()) for block in range(self.num_blocks))

    def survival_by(self, weights_N: IntArray) -> tuple[float, ...]:
        """Returns the share of weights, such as tokens, of the inputs that reach each block."""
        total = float(weights_N.sum())
        return tuple(float(weights_N[self.exits_N >= block].sum()) / total for block in range(self.num_blocks))

    @property
    def exit_counts(self) -> dict[int, int]:
        """The number of inputs by exit, without exits at which no input left."""
        blocks, counts = np.unique(self.exits_N, return_counts=True)
        return dict(zip(blocks.tolist(), counts.tolist(), strict=True))


SCHEMA = 2
ARRAYS = {
    "sample_ids": ("sample_ids", "U"),
    "scores": ("scores_NR", "f"),
    "losses": ("losses_NR", "f"),
    "answers": ("answers_NE", "iufbU"),
    "true_losses": ("true_losses_NE", "f"),
    "tallies": ("tallies_NE", "iu"),
    "times_s": ("times_s_N", "f"),
    "tokens": ("tokens_N", "iu"),
    "sequences": ("sequences_N", "iu"),
    "end_losses": ("end_losses_N", "f"),
    "end_true_losses": ("end_true_losses_N", "f"),
}
"""Array in a file -> field of `ExitRecords`, and allowed values of numpy's `dtype.kind`."""
REQUIRED = ("sample_ids", "scores", "losses")


class RecordsHeader(StrictDocument):
    """The header of a file of exit records, next to the arrays."""

    schema_version: Literal[2]
    score: Score
    zero_one: bool = True
    num_blocks: int = Field(ge=1)
    ramps: tuple[int, ...] = Field(strict=False)
    confidences: dict[Annotated[int, Field(strict=False)], float] | None = None
    provenance: dict[str, Any]


def _read(path: Path) -> tuple[RecordsHeader, dict[str, npt.NDArray[Any]]]:
    """Returns the validated header and the arrays of a file; raises DataError with the path."""
    problem = f"{path} does not have exit records"
    try:
        with path.open("rb") as opened, np.lib.npyio.NpzFile(opened) as file:  # loads no pickles
            document = json.loads(str(file["header"]))
            arrays = {name: file[name] for name in file.files if name != "header"}
    except Exception as error:  # zip, zlib, numpy and JSON raise many kinds of errors for broken files
        raise DataError(f"{problem}: {getattr(error, 'strerror', None) or error}") from error
    schema: Any = document.get("schema_version") if isinstance(document, dict) else SCHEMA
    if schema != SCHEMA:
        raise DataError(f"{path} has schema {schema}, this version reads {SCHEMA}")
    source = Source(document=document, where=f"{problem}: header", raises=DataError)
    header = source.parse(RecordsHeader, called="the header")
    if missing := [name for name in REQUIRED if name not in arrays]:
        raise DataError(f"{problem}: no array {missing[0]!r}")
    for name, array in arrays.items():
        if name not in ARRAYS or array.dtype.kind not in ARRAYS[name][1]:
            raise DataError(f"{problem}: an array {name!r} of {array.dtype} is not allowed")
    return header, arrays


ValueArray = npt.NDArray[Any]
Loss = Callable[[ValueArray, ValueArray], FloatArray]
"""(early, full) -> the cost of answering `early` if `full` is right, per input, in [0, 1], such as `Task.loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecords:
    """Scores and losses with one row per input (N) and one column per ramp (R), ascending. At least one input.

    Arrays of exits (E = R + 1) have the full model as the last column. Raises DataError for contradictory values.
    """

    score: Score
    """The kind of `scores_NR`, which fixes unit and direction."""
    num_blocks: int
    ramps: tuple[int, ...]
    sample_ids: tuple[str, ...]
    scores_NR: npt.NDArray[np.float32]
    losses_NR: FloatArray
    """Loss of each ramp's answer against the full model's, in [0, 1]."""
    zero_one: bool = True
    """Whether every loss is 0 or 1, as for labels. Guarantees are then tested exactly."""
    answers_NE: ValueArray | None = None
    """(N, E, ...): the answers; None if only losses were recorded."""
    true_losses_NE: FloatArray | None = None
    """Loss against the right answer; None if it is unknown."""
    times_s_N: FloatArray | None = None
    """Arrival time of each input on the recorder's clock; None for records without an order."""
    tokens_N: IntArray | None = None
    """Length of each input; None if unknown, or if inputs have no tokens."""
    sequences_N: IntArray | None = None
    """If inputs are tokens, the number of each token's sequence. The tokens of a sequence are adjacent and in order."""
    confidences: Mapping[int, float] | None = None
    """For the score `share`: the confidence of each ramp above which principal values are counted."""
    tallies_NE: ValueArray | None = None
    """(N, E, K): `Task.tallies` against the right answer."""
    end_losses_N: FloatArray | None = None
    """Loss of the last exit's answer, if pruned words or mixing make it differ from the full model's; None: 0."""
    end_true_losses_N: FloatArray | None = None
    """Loss of the last exit's answer against the right answer; None: the same as the full model's."""
    provenance: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        num_inputs, num_ramps = len(self.sample_ids), len(self.ramps)
        check_score(self.score)
        if not num_inputs:
            raise DataError("exit records need at least one input")
        check_shapes({name: getattr(self, name) for name in PER_INPUT}, num_inputs, num_ramps)
        if self.times_s_N is not None and not np.isfinite(self.times_s_N).all():
            raise DataError("exit records have arrival times that are not finite")
        if self.tokens_N is not None and (self.tokens_N < 1).any():
            raise DataError("exit records have an input of fewer than 1 token")
        check_ramps(self.ramps, self.num_blocks)
        if self.confidences is not None and set(self.confidences) != set(self.ramps):
            raise DataError(f"exit records with confidences need one for each of the ramps {list(self.ramps)}")
        if np.isnan(self.scores_NR).any():
            raise DataError("exit records have scores that are not numbers")
        for losses in (self.losses_NR, self.true_losses_NE, self.end_losses_N, self.end_true_losses_N):
            if losses is not None:
                check_losses(losses, zero_one=self.zero_one)

    @classmethod
    def of_answers(
        cls,
        answers_NE: ValueArray,
        *,
        ramps: tuple[int, ...],
        sample_ids: tuple[str, ...],
        truth_N: ValueArray | None = None,
        loss: Loss = label_loss,
        keep_answers: bool = True,
        **facts: Any,
    ) -> ExitRecords:
        """Returns records of the answers of all exits, the full model last. The default `loss` is for labels.

        `truth_N`: the right answers; None if unknown. `facts`: other fields of the records.
        """
        if answers_NE.shape[:2] != (len(sample_ids), len(ramps) + 1):
            raise DataError(f"an answer is needed for each of {len(sample_ids)} inputs and {len(ramps) + 1} exits")
        if truth_N is not None and len(truth_N) != len(sample_ids):
            raise DataError(f"a right answer is needed for each of {len(sample_ids)} inputs")
        return cls(
            ramps=ramps,
            sample_ids=sample_ids,
            losses_NR=_against(answers_NE[:, -1], answers_NE[:, :-1], loss),
            answers_NE=answers_NE if keep_answers else None,
            true_losses_NE=None if truth_N is None else _against(truth_N, answers_NE, loss),
            **facts,
        )

    @classmethod
    def join(cls, parts: Sequence[ExitRecords]) -> ExitRecords:
        """Returns the concatenation of records of one model with one kind of score.

        Raises DataError for different confidences.
        """
        first = parts[0]
        other = next((part for part in parts if part.confidences != first.confidences), None)
        if other is not None:
            raise DataError(
                f"exit records with confidences {first.confidences} and {other.confidences} cannot be joined"
            )
        per_input: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in PER_INPUT
            if getattr(first, name) is not None
        }
        return replace(first, sample_ids=tuple(chain.from_iterable(part.sample_ids for part in parts)), **per_input)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def answers(self) -> ValueArray:
        """Returns the answers, (N, E, ...), the full model's last. Raises DataError if only losses were recorded."""
        if self.answers_NE is None:
            raise DataError("these exit records have losses but no answers")
        return self.answers_NE

    def subset(self, rows: IntArray) -> ExitRecords:
        """Returns the records of some inputs, in the given order."""
        taken = {name: array[rows] for name in PER_INPUT if (array := getattr(self, name)) is not None}
        return replace(self, sample_ids=tuple(self.sample_ids[row] for row in rows), **taken)

    def of_ramps(self, ramps: Collection[int]) -> ExitRecords:
        """Returns the records of some ramps; raises DataError for ramps that were not recorded."""
        check_recorded(self.ramps, ramps)
        kept = [column for column, ramp in enumerate(self.ramps) if ramp in ramps]
        of_ramps = {name: getattr(self, name)[:, kept] for name in ("scores_NR", "losses_NR")}
        per_exit = {name: getattr(self, name) for name in PER_INPUT if name.endswith("_NE")}
        of_exits = {name: array[:, [*kept, -1]] for name, array in per_exit.items() if array is not None}
        kept_ramps = tuple(self.ramps[column] for column in kept)
        confidences = self.confidences and {ramp: self.confidences[ramp] for ramp in kept_ramps}
        return replace(self, ramps=kept_ramps, confidences=confidences, **of_ramps, **of_exits)

    def of_harm(self) -> ExitRecords:
        """Returns records whose losses are harm: by how much a loss against the right answer exceeds the full model's.

        For labels, harm is 1 if the label is wrong and the full model's is right. Guarantees that are derived from the
        result bound harm. If of the last exit only the loss against the full model's answer is known, its harm is at
        most this loss, and at most what the full model's loss leaves. Raises DataError if right answers are unknown.
        """
        if self.true_losses_NE is None:
            raise DataError("harm needs right answers, which these exit records do not have: provide labels")
        full_N, end_N = self.true_losses_NE[:, -1], self.end_losses_N
        if self.end_true_losses_N is not None:
            end_N = np.clip(self.end_true_losses_N - full_N, 0.0, 1.0)
        elif end_N is not None:
            end_N = np.minimum(end_N, 1 - full_N)
        losses_NR = np.clip(self.true_losses_NE[:, :-1] - full_N[:, None], 0.0, 1.0)
        return replace(self, losses_NR=losses_NR, end_losses_N=end_N)

    def outcome(self, thresholds: Mapping[int, float]) -> ExitOutcome:
        """Returns exits and losses if exactly the ramps in `thresholds` are active, with these thresholds.

        Raises DataError for ramps that were not recorded, and for thresholds that are not numbers.
        """
        sure_NE = np.column_stack([self.sure_NR(thresholds), np.ones(len(self), dtype=bool)])
        rows, column_N = np.arange(len(self)), sure_NE.argmax(1)
        losses_NE = np.column_stack([self.losses_NR, self._end_losses_N])
        truth_NE = served_NE = self.true_losses_NE
        if truth_NE is not None and self.end_true_losses_N is not None:
            served_NE = np.column_stack([truth_NE[:, :-1], self.end_true_losses_N])
        return ExitOutcome(
            num_blocks=self.num_blocks,
            exits_N=np.array([*self.ramps, self.num_blocks - 1])[column_N],
            losses_N=losses_NE[rows, column_N],
            answers_N=None if self.answers_NE is None else self.answers_NE[rows, column_N],
            true_losses_N=None if served_NE is None else served_NE[rows, column_N],
            full_true_losses_N=None if truth_NE is None else truth_NE[:, -1],
            tallies_N=None if self.tallies_NE is None else self.tallies_NE[rows, column_N],
            full_tallies_N=None if self.tallies_NE is None else self.tallies_NE[:, -1],
        )

    def worst_losses_N(self, thresholds: Mapping[int, float]) -> FloatArray:
        """Returns the largest loss of each input over all subsets of these ramps.

        Under a subset, an input leaves at its first ramp that is sure, or at the end. Thus the worst case is the
        largest loss of ramps that are sure and of the end. Raises DataError as `outcome` does.
        """
        worst_N = np.where(self.sure_NR(thresholds), self.losses_NR, 0.0).max(1, initial=0.0)
        return np.asarray(np.maximum(worst_N, self._end_losses_N))

    @property
    def _end_losses_N(self) -> FloatArray:
        return np.zeros(len(self)) if self.end_losses_N is None else self.end_losses_N

    def sure_NR(self, thresholds: Mapping[int, float]) -> BoolArray:
        """Returns which scores pass their ramp's threshold. Raises DataError as `outcome` does."""
        return sure_NR(self.score, self.ramps, self.scores_NR, thresholds)

    def save(self, path: Path) -> None:
        """Writes the records to a compressed .npz file."""
        header = {
            "schema_version": SCHEMA,
            "score": self.score,
            "zero_one": self.zero_one,
            "num_blocks": self.num_blocks,
            "ramps": list(self.ramps),
            **({} if self.confidences is None else {"confidences": dict(self.confidences)}),
            "provenance": dict(self.provenance or {}),
        }
        arrays: dict[str, Any] = {name: getattr(self, field) for name, (field, _) in ARRAYS.items()}
        recorded = {name: array for name, array in arrays.items() if array is not None}
        with path.open("wb") as file:  # a file, because numpy appends a suffix to a path
            np.savez_compressed(file, header=np.array(json.dumps(header)), **recorded)

    @classmethod
    def load(cls, path: Path) -> ExitRecords:
        """Returns the records in a file; raises DataError with the path."""
        header, arrays = _read(path)
        per_input: dict[str, Any] = {field: arrays.get(name) for name, (field, _) in ARRAYS.items()} | {
            "sample_ids": tuple(map(str, np.atleast_1d(arrays["sample_ids"]))),
            "scores_NR": arrays["scores"].astype(np.float32),  # the dtype in which policies compare
            "losses_NR": arrays["losses"].astype(np.float64),
        }
        try:
            return cls(**header.model_dump(exclude={"schema_version"}) | per_input)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error


PER_INPUT = tuple(field.name for field in fields(ExitRecords) if field.name.endswith(("_NR", "_NE", "_N")))
DEEP = ("answers_NE", "tallies_NE")
"""Arrays with further axes."""


def check_shapes(arrays: Mapping[str, npt.NDArray[Any] | None], num_inputs: int, num_ramps: int) -> None:
    """Raises DataError for an array without the axes in its name: N inputs, R ramps, E exits (R + 1)."""
    sizes = {"N": num_inputs, "R": num_ramps, "E": num_ramps + 1}
    for name, array in arrays.items():
        base, _, axes = name.rpartition("_")
        wanted = [sizes[axis] for axis in axes]
        shape = wanted if array is None else list(array.shape)
        if (shape[: len(wanted)] if name in DEEP else shape) != wanted:
            raise DataError(
                f"records of {num_inputs} inputs and {num_ramps} ramps need {base} of the shape {wanted}, not {shape}"
            )


def check_losses(losses: npt.NDArray[np.floating[Any]], *, zero_one: bool) -> None:
    """Raises DataError for losses outside [0, 1] and, if `zero_one`, for losses other than 0 and 1."""
    if not ((losses >= 0) & (losses <= 1)).all():
        raise DataError("losses must be numbers from 0 to 1")
    if zero_one and not ((losses == 0) | (losses == 1)).all():
        raise DataError("losses must be 0 or 1")


def _against(right_N: ValueArray, answers_NX: ValueArray, loss: Loss) -> FloatArray:
    """Returns the losses (N, X) of answers (N, X, ...) against the right answers."""
    columns = [loss(answers_NX[:, column], right_N) for column in range(answers_NX.shape[1])]
    return np.stack(columns, axis=1) if columns else np.zeros((len(right_N), 0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedBatches:
    """Recorded inputs (N) in order of arrival, divided into K batches of `size` inputs, with one column per ramp (R).

    The time of a batch depends on how many of its own inputs survive each ramp, which differs from batch to batch. For
    any set of active ramps, the batches have the counts of PAME's batching pattern matrix (section 6.3.2).
    """

    num_blocks: int
    ramps: tuple[int, ...]
    """All ramps, ascending, active or not."""
    sure_NR: BoolArray
    """Whether each score passes the threshold."""
    losses_NR: FloatArray
    """Loss of a ramp's answer against the full model's, in [0, 1]; 0 if the score does not pass the threshold."""
    size: int
    """Inputs per batch (the paper's n). Inputs after the last whole batch are in no batch."""

    def __post_init__(self) -> None:
        check_ramps(self.ramps, self.num_blocks)
        check_shapes({"sure_NR": self.sure_NR, "losses_NR": self.losses_NR}, len(self), len(self.ramps))
        if not 1 <= self.size <= len(self.sure_NR):
            raise DataError(f"the batch size must be from 1 to {len(self)}, the recorded inputs, not {self.size}")
        check_losses(self.losses_NR, zero_one=False)
        if self.losses_NR[~self.sure_NR].any():
            raise DataError("recorded batches have losses at ramps where the input does not leave")

    @classmethod
    def of_records(
        cls, records: ExitRecords, thresholds: Mapping[int, float], size: int, ramps: Sequence[int]
    ) -> RecordedBatches:
        """Returns batches of recorded inputs, in order of arrival if times are known.

        Raises DataError as `ExitRecords.outcome` does, and for a wrong size.
        """
        columns = [records.ramps.index(ramp) for ramp in ramps if ramp in records.ramps]
        order_N = np.arange(len(records)) if records.times_s_N is None else records.times_s_N.argsort(kind="stable")
        sure_NR = records.sure_NR(thresholds)[order_N][:, columns]
        return cls(
            num_blocks=records.num_blocks,
            ramps=tuple(ramps),
            sure_NR=sure_NR,
            losses_NR=np.where(sure_NR, records.losses_NR[order_N][:, columns], 0.0),
            size=size,
        )

    def __len__(self) -> int:
        """Number of recorded inputs."""
        return len(self.sure_NR)

    def exits_N(self, active: Sequence[int]) -> IntArray:
        """Returns the block after which each input leaves if exactly these ramps are active.

        Raises DataError for ramps that were not recorded.
        """
        ramps = sorted(active)
        if unknown := sorted(set(ramps) - set(self.ramps)):
            raise DataError(f"no recorded batches of ramps {unknown}; recorded are {list(self.ramps)}")
        columns = [self.ramps.index(ramp) for ramp in ramps]
        sure_NE = np.column_stack([self.sure_NR[:, columns], np.ones(len(self), dtype=bool)])
        return np.asarray(np.array([*ramps, self.num_blocks - 1])[sure_NE.argmax(1)])

    def survival(self, active: Sequence[int]) -> tuple[float, ...]:
        """Returns the share of inputs that reach each block if exactly these ramps are active."""
        exits_N = self.exits_N(active)
        return tuple(float((exits_N >= block).mean()) for block in range(self.num_blocks))


def batch_counts(some_N: BoolArray, size: int) -> IntArray:
    """Returns the number of inputs in each whole batch for which `some_N` is True, (K,)."""
    num_batches = len(some_N) // size
    return np.asarray(some_N[: num_batches * size].reshape(num_batches, size).sum(1), dtype=np.int64)
