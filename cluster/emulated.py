"""Accelerators that are not there: what leaves where is decided from exit records. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from earlyexit.boundary import HopDtype
from earlyexit.device import Runner, warm_up_length
from earlyexit.engine import Batch
from earlyexit.errors import PlanError, UnprocessableInputError
from earlyexit.member import Member
from earlyexit.release import Step
from earlyexit.split import Split
from earlyexit.wire import Answer, Lengths, Seen, Value, WirePiece, values_of
from profiles.records import ExitRecords

IntArray = npt.NDArray[np.int64]
NOWHERE = -1
"""The ramp of an input that none lets leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPiece:
    """Inputs on their way through a model that is not computed: who they are, without a hidden state."""

    sample_ids: tuple[str, ...]
    next_block: int
    lengths_B: Lengths

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, keep: Sequence[int]) -> EmulatedPiece:
        """The inputs at the given positions, in the given order."""
        return self.at(self.next_block, keep)

    def singles(self) -> list[EmulatedPiece]:
        """One piece per input."""
        return [
            EmulatedPiece(sample_ids=(sample_id,), next_block=self.next_block, lengths_B=self.lengths_B[k : k + 1])
            for k, sample_id in enumerate(self.sample_ids)
        ]

    def to_wire(self, hop_dtype: HopDtype = "same") -> WirePiece:
        """For another process, without values."""
        return WirePiece(
            sample_ids=self.sample_ids,
            next_block=self.next_block,
            lengths_B=self.lengths_B,
            tensors=(),
            state_BS=None,
        )

    def at(self, next_block: int, keep: Sequence[int]) -> EmulatedPiece:
        """The inputs at the given positions, further on."""
        return EmulatedPiece(
            sample_ids=tuple([self.sample_ids[k] for k in keep]),
            next_block=next_block,
            lengths_B=self.lengths_B[list(keep)],
        )


def _together(members: Sequence[Member[EmulatedPiece]]) -> EmulatedPiece:
    return EmulatedPiece(
        sample_ids=tuple([member.sample_id for member in members]),
        next_block=members[0].payload.next_block,
        lengths_B=np.concatenate([member.payload.lengths_B for member in members]),
    )


class RecordedRunner(Runner[EmulatedPiece]):
    """Decides from exit records, by sample id (up to its last `#`, so that one record can be asked many times)."""

    def __init__(self, records: ExitRecords, num_blocks: int, *, has_tokens: bool = True) -> None:
        """`has_tokens`: whether inputs have lengths; images, say, have none."""
        self._records = records
        self._answers_NE = records.answers()
        self._num_blocks = num_blocks
        self._has_tokens = has_tokens
        self._column_of = {ramp: column for column, ramp in enumerate(records.ramps)}
        self._row_of = {sample_id: row for row, sample_id in enumerate(records.sample_ids)}
        self._thresholds: dict[int, float] = {}
        self._sure_NR = np.zeros(records.scores_NR.shape, dtype=bool)

    def from_wire(self, wire: WirePiece) -> EmulatedPiece:
        return EmulatedPiece(sample_ids=wire.sample_ids, next_block=wire.next_block, lengths_B=wire.lengths_B)

    def follow(self, policy: Mapping[int, float] | float | None) -> None:
        """Take the thresholds, one per ramp or one for all, in the records' unit; None where no ramp is active."""
        given = policy if isinstance(policy, Mapping) else dict.fromkeys(self._records.ramps, policy)
        thresholds = {ramp: limit for ramp in self._records.ramps if (limit := given.get(ramp)) is not None}
        if thresholds != self._thresholds:
            self._sure_NR = self._records.sure_NR(thresholds)
            self._thresholds = thresholds

    def prepare(self, splits: Sequence[Split]) -> None:
        """Raises PlanError for active ramps that were not recorded."""
        missing = sorted({ramp for split in splits for ramp in split.ramps} - set(self._records.ramps))
        if missing:
            raise PlanError(f"the exit records hold no ramps {missing}; they hold {list(self._records.ramps)}")

    def warm_up_pieces(self, split: Split, size: int) -> EmulatedPiece:
        known = self._records.sample_ids[0]
        return EmulatedPiece(
            sample_ids=tuple(f"{known}#{k}" for k in range(size)),
            next_block=split.first,
            lengths_B=np.full(size, warm_up_length(split, size) if self._has_tokens else 1, dtype=np.int32),
        )

    def run(self, batch: Batch[EmulatedPiece]) -> Iterator[Step[EmulatedPiece]]:
        """One step for every ramp where somebody leaves, or that looks, and one for the split's end.

        Where inputs stay the active ramps look; where they are probes, all that were recorded. At a ramp without a
        threshold, of a plan that another has replaced, nobody leaves. Raises UnprocessableInputError for ids without
        records.
        """
        rows_B = np.array([self._row(member.sample_id) for member in batch.members], dtype=np.int64)
        asked = self._records.ramps if batch.probe else batch.split.ramps if batch.stays else ()
        looks = self._column_of.keys() & asked
        return self._steps(batch, looks, rows_B, self._exits(batch.split.ramps, rows_B))

    def _exits(self, ramps: Sequence[int], rows_B: IntArray) -> list[int]:
        """The first of the ramps where each input is sure enough; NOWHERE for those that leave nowhere."""
        active = [ramp for ramp in ramps if ramp in self._thresholds]
        if not active:
            return [NOWHERE] * len(rows_B)
        sure_BA = self._sure_NR[rows_B[:, None], [self._column_of[ramp] for ramp in active]]
        exits_B = np.where(sure_BA.any(1), np.array(active)[sure_BA.argmax(1)], NOWHERE)
        exits: list[int] = exits_B.tolist()
        return exits

    def _steps(
        self, batch: Batch[EmulatedPiece], looks: set[int], rows_B: IntArray, exits: list[int]
    ) -> Iterator[Step[EmulatedPiece]]:
        split, all_of_it = batch.split, _together(batch.members)
        inside = list(range(len(all_of_it)))
        for ramp in sorted(ramp for ramp in looks.union(exits) if split.first <= ramp < split.end):
            left = [k for k in inside if exits[k] == ramp]
            if not batch.stays:
                inside = [k for k in inside if exits[k] != ramp]
            yield Step(
                answers=self._early(ramp, all_of_it, left, rows_B),
                survivors=all_of_it.at(ramp + 1, inside) if inside else None,
                seen=self._seen(ramp, all_of_it, rows_B) if ramp in looks else (),
            )
            if not inside or ramp + 1 == split.end:
                return
        end = self._end(split, all_of_it, inside, rows_B)
        yield replace(end, seen=tuple(map(_full_model, end.answers))) if batch.stays else end

    def _early(self, ramp: int, inside: EmulatedPiece, left: Sequence[int], rows_B: IntArray) -> tuple[Answer, ...]:
        if not left:
            return ()
        said = self._said(ramp, rows_B[left])
        return tuple(
            [
                Answer(sample_id=inside.sample_ids[k], value=value, score=score, exit=ramp)
                for k, (value, score) in zip(left, said, strict=True)
            ]
        )

    def _seen(self, ramp: int, inside: EmulatedPiece, rows_B: IntArray) -> tuple[Seen, ...]:
        return tuple(
            Seen(sample_id=sample_id, block=ramp, score=score, value=value)
            for sample_id, (value, score) in zip(inside.sample_ids, self._said(ramp, rows_B), strict=True)
        )

    def _said(self, ramp: int, rows_X: IntArray) -> list[tuple[Value, float]]:
        column = self._column_of[ramp]
        answers = values_of(self._answers_NE[rows_X, column])
        return list(zip(answers, self._records.scores_NR[rows_X, column].tolist(), strict=True))

    def _end(self, split: Split, inside: EmulatedPiece, stay: Sequence[int], rows_B: IntArray) -> Step[EmulatedPiece]:
        if split.end < self._num_blocks:
            return Step(answers=(), survivors=inside.at(split.end, stay))
        answers = values_of(self._answers_NE[rows_B[list(stay)], -1])
        return Step(
            answers=tuple(
                [
                    Answer(sample_id=inside.sample_ids[k], value=value, score=1.0, exit=split.end - 1)
                    for k, value in zip(stay, answers, strict=True)
                ]
            ),
            survivors=None,
        )

    def _row(self, sample_id: str) -> int:
        known = sample_id.rpartition("#")[0] or sample_id
        row = self._row_of.get(known)
        if row is None:
            raise UnprocessableInputError(f"no exit records of the id {known!r}; send the `ids` of recorded inputs")
        return row


def _full_model(answer: Answer) -> Seen:
    return Seen(sample_id=answer.sample_id, block=answer.exit, score=math.nan, value=answer.value)
