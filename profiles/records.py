"""Exit records: how sure every ramp is and what its answer would cost, for N inputs.

For any set of active ramps and thresholds they show which inputs would have left where: survival (E3 section 3.1),
agreement with the full model (Apparate section 3.2), mean blocks run. What answers are is their task's affair: a loss
says how far one is from the full model's, 0 where they agree.
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
from earlyexit.tasks.label import differ
from profiles.scores import SCORES, BoolArray, FloatArray, Score, check_recorded, check_score, sure_NR
from profiles.table import check_ramps

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitOutcome:
    """Where every recorded input (N) leaves under some thresholds, and what that costs."""

    num_blocks: int
    exits_N: IntArray
    """The block that each input leaves after."""
    losses_N: FloatArray
    """Against the full model's answer, in [0, 1]."""
    answers_N: npt.NDArray[Any] | None
    """Where answers were recorded."""
    true_losses_N: FloatArray | None
    """Against the truth, where it is known; the next one is the full model's."""
    full_true_losses_N: FloatArray | None
    tallies_N: IntArray | None = None
    """(N, K), where a task's figures are made of such numbers; the next ones are the full model's."""
    full_tallies_N: IntArray | None = None

    @property
    def agreement(self) -> float:
        """1 - mean loss; of labels, the share of inputs answered as the full model would."""
        return 1 - float(self.losses_N.mean())

    @property
    def accuracy(self) -> float | None:
        """1 - mean loss against the truth, where that is known; of labels, the share answered right."""
        return None if self.true_losses_N is None else 1 - float(self.true_losses_N.mean())

    @property
    def full_accuracy(self) -> float | None:
        """The full model's."""
        return None if self.full_true_losses_N is None else 1 - float(self.full_true_losses_N.mean())

    @property
    def harm(self) -> float | None:
        """Mean loss against the truth beyond the full model's; of labels, the share wrong where the full one is right.

        None where the truth is not known.
        """
        if self.true_losses_N is None or self.full_true_losses_N is None:
            return None
        return float(np.clip(self.true_losses_N - self.full_true_losses_N, 0.0, 1.0).mean())

    @property
    def mean_blocks(self) -> float:
        """Blocks run per input."""
        return float(self.exits_N.mean()) + 1

    @property
    def survival(self) -> tuple[float, ...]:
        """Per block, the share of inputs that reach it."""
        return tuple(float((self.exits_N >= block).mean()) for block in range(self.num_blocks))

    def survival_by(self, weights_N: IntArray) -> tuple[float, ...]:
        """Per block, the share that inputs which reach it have of all weights, such as tokens."""
        total = float(weights_N.sum())
        return tuple(float(weights_N[self.exits_N >= block].sum()) / total for block in range(self.num_blocks))

    @property
    def exit_counts(self) -> dict[int, int]:
        """Inputs per exit, only exits that were taken."""
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
"""The arrays of a file: the field of `ExitRecords` that each fills, and its kinds as numpy calls them."""
REQUIRED = ("sample_ids", "scores", "losses")


class RecordsHeader(StrictDocument):
    """What a file holds of exit records but their arrays."""

    schema_version: Literal[2]
    score: Score
    zero_one: bool = True
    num_blocks: int = Field(ge=1)
    ramps: list[int]
    confidences: dict[Annotated[int, Field(strict=False)], float] | None = None
    provenance: dict[str, Any]


def _read(path: Path) -> tuple[RecordsHeader, dict[str, npt.NDArray[Any]]]:
    """Returns the checked header and the other arrays of a file; raises DataError that names it for anything else."""
    called = f"{path} does not hold exit records"
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            document = json.loads(str(file["header"]))
            arrays = {name: file[name] for name in file.files if name != "header"}
    # Zip, zlib, numpy's reader of array headers and JSON each fail in ways of their own, not all of them documented.
    except Exception as error:
        raise DataError(f"{called}: {error}") from error
    schema: Any = document.get("schema_version") if isinstance(document, dict) else SCHEMA
    if schema != SCHEMA:
        raise DataError(f"{path} has schema {schema}, this version reads {SCHEMA}")
    source = Source(document=document, where=f"{called}: header", raises=DataError)
    header = source.parse(RecordsHeader, called="all of it")
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise DataError(f"{called}: no array {missing[0]!r}")
    for name, array in arrays.items():
        if name not in ARRAYS or array.dtype.kind not in ARRAYS[name][1]:
            raise DataError(f"{called}: no array {name!r} of {array.dtype} belongs there")
    return header, arrays


ValueArray = npt.NDArray[Any]
Loss = Callable[[ValueArray, ValueArray], FloatArray]
"""What answering `early` costs where `full` is right, per input, in [0, 1]; `Task.loss` is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecords:
    """One row per input, at least one, and one column per ramp (R), ascending; refuses what does not fit together.

    Where the full model has a column as well, it is the last (E = R + 1).
    """

    score: Score
    """What `scores_NR` measures, and in which direction."""
    num_blocks: int
    ramps: tuple[int, ...]
    sample_ids: tuple[str, ...]
    scores_NR: npt.NDArray[np.float32]
    losses_NR: FloatArray
    """What each ramp's answer costs against the full model's, in [0, 1]; the full model's own is 0."""
    zero_one: bool = True
    """Whether a loss is 0 or 1 by its nature, as of labels: then guarantees are tested exactly."""
    answers_NE: ValueArray | None = None
    """(N, E, ...), where the answers themselves are needed."""
    true_losses_NE: FloatArray | None = None
    """Against the truth, where it is known."""
    times_s_N: FloatArray | None = None
    """When each input arrived, on the recorder's clock; None for records without an order."""
    tokens_N: IntArray | None = None
    """How long each input is; None where that is not known, or inputs have no tokens."""
    sequences_N: IntArray | None = None
    """Of tokens, which sequence each is of; a sequence's lie side by side, in its order. None for other inputs."""
    confidences: Mapping[int, float] | None = None
    """Of shares, per ramp: above which a principal value was counted."""
    tallies_NE: ValueArray | None = None
    """(N, E, K), against the truth: numbers that a task's figures are made of, summed over inputs."""
    end_losses_N: FloatArray | None = None
    """What the end costs where it does not answer as the full model: words pruned before it, answers mixed; None: 0."""
    end_true_losses_N: FloatArray | None = None
    """Against the truth, where it is known, of what the end then answers; None: as the full model's."""
    provenance: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        num_inputs, num_ramps = len(self.sample_ids), len(self.ramps)
        check_score(self.score)
        if not num_inputs:
            raise DataError("exit records need at least one input: shares of none are not numbers")
        check_shapes({name: getattr(self, name) for name in PER_INPUT}, num_inputs, num_ramps)
        if self.times_s_N is not None and not np.isfinite(self.times_s_N).all():
            raise DataError("exit records hold arrival times that are not finite")
        if self.tokens_N is not None and (self.tokens_N < 1).any():
            raise DataError("exit records hold an input of fewer than 1 token")
        check_ramps(self.ramps, self.num_blocks)
        if self.confidences is not None and set(self.confidences) != set(self.ramps):
            raise DataError(f"exit records of ramps {list(self.ramps)} need a confidence for each, if for any")
        if np.isnan(self.scores_NR).any():
            raise DataError("exit records hold scores that are not numbers")
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
        loss: Loss = differ,
        keep_answers: bool = True,
        **facts: Any,
    ) -> ExitRecords:
        """Records of what every exit answered, the full model last; `loss` is that of labels unless said otherwise.

        `facts`: all other fields of the records.
        """
        if answers_NE.shape[:2] != (len(sample_ids), len(ramps) + 1):
            raise DataError(f"{len(sample_ids)} inputs and {len(ramps) + 1} exits need as many answers")
        if truth_N is not None and len(truth_N) != len(sample_ids):
            raise DataError(f"exit records of {len(sample_ids)} inputs need as many true answers")
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
        """The inputs of several records of one model and one kind, one after the other.

        Raises DataError for shares above different confidences.
        """
        first = parts[0]
        other = next((part for part in parts if part.confidences != first.confidences), None)
        if other is not None:
            raise DataError(
                f"exit records of confidences {first.confidences} and {other.confidences} do not go together"
            )
        per_input: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in PER_INPUT
            if getattr(first, name) is not None
        }
        return replace(first, sample_ids=tuple(chain.from_iterable(part.sample_ids for part in parts)), **per_input)

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def sureness_NR(self) -> npt.NDArray[np.float32]:
        """Scores with one direction: larger is surer."""
        return self.scores_NR * np.float32(SCORES[self.score].direction)

    def answers(self) -> ValueArray:
        """(N, E, ...), the full model's last; raises DataError where only losses were recorded."""
        if self.answers_NE is None:
            raise DataError("these exit records hold losses and no answers: they tell what exits cost, not what to say")
        return self.answers_NE

    def subset(self, rows: IntArray) -> ExitRecords:
        """The records of some inputs, in the given order."""
        per_input = {name: getattr(self, name) for name in PER_INPUT}
        taken = {name: array[rows] for name, array in per_input.items() if array is not None}
        return replace(self, sample_ids=tuple(self.sample_ids[row] for row in rows), **taken)

    def of_ramps(self, ramps: Collection[int]) -> ExitRecords:
        """What records of these ramps alone would hold; raises DataError for ramps that were not recorded."""
        check_recorded(self.ramps, ramps)
        kept = [column for column, ramp in enumerate(self.ramps) if ramp in ramps]
        of_ramps = {name: getattr(self, name)[:, kept] for name in ("scores_NR", "losses_NR")}
        per_exit = {name: getattr(self, name) for name in PER_INPUT if name.endswith("_NE")}
        of_exits = {name: array[:, [*kept, -1]] for name, array in per_exit.items() if array is not None}
        confidences = self.confidences and {ramp: self.confidences[ramp] for ramp in self.ramps if ramp in ramps}
        left = tuple(self.ramps[column] for column in kept)
        return replace(self, ramps=left, confidences=confidences, **of_ramps, **of_exits)

    def of_harm(self) -> ExitRecords:
        """The same, whose losses are harm: what an answer costs against the truth beyond what the full model's does.

        Of labels 1 where it is wrong and the full model right. What is promised of such records is promised of harm.
        Where of the end no more is known than how far it is from the full model's answer, it harms at most as much, and
        only where that is right. Raises DataError where the truth is not known.
        """
        if self.true_losses_NE is None:
            raise DataError("harm is a loss against the truth, and these exit records hold none: give labels")
        full_N, end_N = self.true_losses_NE[:, -1], self.end_losses_N
        if self.end_true_losses_N is not None:
            end_N = np.clip(self.end_true_losses_N - full_N, 0.0, 1.0)
        elif end_N is not None:
            end_N = np.minimum(end_N, 1 - full_N)
        losses_NR = np.clip(self.true_losses_NE[:, :-1] - full_N[:, None], 0.0, 1.0)
        return replace(self, losses_NR=losses_NR, end_losses_N=end_N)

    def outcome(self, thresholds: Mapping[int, float]) -> ExitOutcome:
        """What happens when exactly the ramps named in `thresholds` are active, with these thresholds.

        Raises DataError for ramps that were not recorded, and for thresholds that are not numbers.
        """
        sure = self.sure_NR(thresholds)
        rows, last = np.arange(len(self)), len(self.ramps)
        column_N = np.where(sure.any(1), sure.argmax(1), last) if self.ramps else np.full(len(self), last)
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
        """Per input, the largest loss that any subset of these ramps can cause: that of the worst ramp that is sure.

        With a subset active an input leaves at the first ramp of it that is sure, or at the end, which costs nothing
        unless `end_losses_N` says so. Raises DataError as `outcome` does.
        """
        worst_N = np.where(self.sure_NR(thresholds), self.losses_NR, 0.0).max(1, initial=0.0)
        return np.asarray(np.maximum(worst_N, self._end_losses_N))

    @property
    def _end_losses_N(self) -> FloatArray:
        return np.zeros(len(self)) if self.end_losses_N is None else self.end_losses_N

    def nested_survival(self, thresholds: Mapping[int, float]) -> tuple[float, ...]:
        """Per block, the share of inputs that no ramp before it lets out, all ramps active.

        What a plan problem's `survival` holds. Raises DataError unless every recorded ramp has a threshold.
        """
        without = sorted(set(self.ramps) - set(thresholds))
        if without:
            raise DataError(f"nested survival has all ramps active; {without} have no threshold")
        return self.outcome(thresholds).survival

    def sure_NR(self, thresholds: Mapping[int, float]) -> BoolArray:
        """Which ramps are sure of each input; raises DataError as `outcome` does."""
        return sure_NR(self.score, self.ramps, self.scores_NR, thresholds)

    def save(self, path: Path) -> None:
        """Write one compressed .npz file."""
        header = {
            "schema_version": SCHEMA,
            "score": self.score,
            "zero_one": self.zero_one,
            "num_blocks": self.num_blocks,
            "ramps": list(self.ramps),
            **({} if self.confidences is None else {"confidences": dict(self.confidences)}),
            "provenance": dict(self.provenance or {}),
        }
        arrays = {name: getattr(self, field) for name, (field, _) in ARRAYS.items()}
        there: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
        with path.open("wb") as file:  # given a path, numpy adds an ending to it
            np.savez_compressed(file, header=np.array(json.dumps(header)), **there)

    @classmethod
    def load(cls, path: Path) -> ExitRecords:
        """Read what `save` wrote; raises DataError for anything else."""
        header, arrays = _read(path)
        given: dict[str, Any] = {field: arrays.get(name) for name, (field, _) in ARRAYS.items()} | {
            "sample_ids": tuple(map(str, np.atleast_1d(arrays["sample_ids"]))),
            "scores_NR": arrays["scores"].astype(np.float32),  # as policies compare
            "losses_NR": arrays["losses"].astype(np.float64),
        }
        facts = {name: getattr(header, name) for name in RecordsHeader.model_fields if name != "schema_version"}
        return cls(**facts | given | {"ramps": tuple(header.ramps)})


PER_INPUT = tuple(field.name for field in fields(ExitRecords) if field.name.endswith(("_NR", "_NE", "_N")))
DEEP = ("answers_NE", "tallies_NE")
"""Arrays that hold more than one number per input and exit."""


def check_shapes(arrays: Mapping[str, npt.NDArray[Any] | None], num_inputs: int, num_ramps: int) -> None:
    """Raise DataError for an array without the axes in its name: N inputs, R ramps, E exits (R + 1)."""
    sizes = {"N": num_inputs, "R": num_ramps, "E": num_ramps + 1}
    for name, array in arrays.items():
        called, _, axes = name.rpartition("_")
        wanted = [sizes[axis] for axis in axes]
        shape = wanted if array is None else list(array.shape)
        if (shape[: len(wanted)] if name in DEEP else shape) != wanted:
            raise DataError(
                f"records of {num_inputs} inputs and {num_ramps} ramps need {called} of the shape {wanted}, not {shape}"
            )


def check_losses(losses: npt.NDArray[np.floating[Any]], *, zero_one: bool) -> None:
    """Raise DataError for losses outside [0, 1], and for those in between where there are to be none."""
    if not ((losses >= 0) & (losses <= 1)).all():
        raise DataError("losses must be numbers from 0 to 1")
    if zero_one and not ((losses == 0) | (losses == 1)).all():
        raise DataError("losses are to be 0 or 1, and one lies between")


def _against(right_N: ValueArray, answers_NX: ValueArray, loss: Loss) -> FloatArray:
    """Loss of every column's answers (N, X, ...) where `right_N` is right, (N, X)."""
    columns = [loss(answers_NX[:, column], right_N) for column in range(answers_NX.shape[1])]
    return np.stack(columns, axis=1) if columns else np.zeros((len(right_N), 0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedBatches:
    """Inputs in order of arrival (N), one column per ramp (R); every `size` of them are a batch (K whole ones).

    What a batch takes depends on how many of *its* inputs go on, and a promise about slow batches on the worst of them.
    For any set of active ramps this holds, batch by batch, what PAME's batching pattern matrix (section 6.3.2) counts.
    """

    num_blocks: int
    ramps: tuple[int, ...]
    """Ascending; of all there is a column, whether a plan switches them on or not."""
    sure_NR: BoolArray
    """Which ramps let each input leave."""
    losses_NR: FloatArray
    """What the answers of those ramps cost against the full model's, in [0, 1]; 0 where a ramp is not sure."""
    size: int
    """Inputs of a batch (the paper's n). What is left after the last whole batch is in none."""
    zero_one: bool = True
    """Whether a loss is 0 or 1 by its nature."""

    def __post_init__(self) -> None:
        check_ramps(self.ramps, self.num_blocks)
        check_shapes({"sure_NR": self.sure_NR, "losses_NR": self.losses_NR}, len(self), len(self.ramps))
        if not 1 <= self.size <= len(self.sure_NR):
            raise DataError(f"{len(self)} recorded inputs make no batch of {self.size}; allowed are 1 to {len(self)}")
        check_losses(self.losses_NR, zero_one=self.zero_one)
        if self.losses_NR[~self.sure_NR].any():
            raise DataError("recorded batches hold losses of ramps at which no input leaves")

    @classmethod
    def of_records(
        cls, records: ExitRecords, thresholds: Mapping[int, float], size: int, ramps: Sequence[int] | None = None
    ) -> RecordedBatches:
        """With these thresholds, for `ramps`, by default those that have one; arrivals in order where times are known.

        Raises DataError as `ExitRecords.outcome` does, and where the inputs make no batch.
        """
        ramps = tuple(sorted(thresholds)) if ramps is None else tuple(ramps)
        columns = [records.ramps.index(ramp) for ramp in ramps if ramp in records.ramps]
        order_N = np.arange(len(records)) if records.times_s_N is None else records.times_s_N.argsort(kind="stable")
        sure_NR = records.sure_NR(thresholds)[order_N][:, columns]
        return cls(
            num_blocks=records.num_blocks,
            ramps=ramps,
            sure_NR=sure_NR,
            losses_NR=np.where(sure_NR, records.losses_NR[order_N][:, columns], 0.0),
            size=size,
            zero_one=records.zero_one,
        )

    def __len__(self) -> int:
        """Recorded inputs."""
        return len(self.sure_NR)

    def exits_N(self, active: Sequence[int]) -> IntArray:
        """The block that each input leaves after when exactly these ramps are active.

        Raises DataError for ramps that were not recorded.
        """
        columns, ramps = self._columns(active), sorted(active)
        if not ramps:
            return np.full(len(self), self.num_blocks - 1, dtype=np.int64)
        sure_NA = self.sure_NR[:, columns]
        return np.where(sure_NA.any(1), np.array(ramps)[sure_NA.argmax(1)], self.num_blocks - 1).astype(np.int64)

    def _columns(self, active: Sequence[int]) -> list[int]:
        unknown = sorted(set(active) - set(self.ramps))
        if unknown:
            raise DataError(f"no recorded batches of ramps {unknown}; recorded are {list(self.ramps)}")
        return [self.ramps.index(ramp) for ramp in sorted(active)]


def batch_counts(some_N: BoolArray, size: int) -> IntArray:
    """How many inputs of every whole batch are among some (K)."""
    num_batches = len(some_N) // size
    return np.asarray(some_N[: num_batches * size].reshape(num_batches, size).sum(1), dtype=np.int64)
