"""A runnable part of a model: pieces in, answers and survivors out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from earlyexit.layout import Layout
from earlyexit.piece import Piece
from earlyexit.policies import ExitPolicy
from earlyexit.split import Segment, Split
from earlyexit.wire import Answer

if TYPE_CHECKING:
    from earlyexit.model import EarlyExitModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one segment of a cut gave: the answers of the inputs that left there, and who is still inside."""

    answers: tuple[Answer, ...]
    survivors: Piece | None
    """None when nobody is left."""


class SegmentRunner(Protocol):
    """How a segment is computed: torch in this file, ONNX Runtime in `onnx_backend.py`."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensor, Tensor | None]:
        """Hidden state (N, D) after the segment, and the logits (B, C) of the exit at its end, if there is one."""
        ...


class TorchSegments:
    """Segments computed by the model's own modules."""

    def __init__(self, model: EarlyExitModel) -> None:
        self._model = model

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensor, Tensor | None]:
        layout = Layout(piece.lengths_B, self._model.device)
        hidden_ND = self._model.run_blocks(segment.first, segment.end, piece.values, layout)
        if segment.ramp is None and segment.end != self._model.num_blocks:
            return hidden_ND, None
        return hidden_ND, self._model.exit_logits(segment.end - 1, hidden_ND, layout)


class Cut:
    """Blocks first to end - 1 with some ramps active. An input's answer does not depend on its batch-mates."""

    def __init__(
        self,
        model: EarlyExitModel,
        first: int,
        end: int,
        ramps: tuple[int, ...],
        policy: ExitPolicy,
        segments: SegmentRunner | None = None,
    ) -> None:
        self.first = first
        self.end = end
        self._num_blocks = model.num_blocks
        self._policy = policy
        self._segments = Split(first=first, end=end, batch=1, ramps=ramps).segments()
        self._runner = segments or TorchSegments(model)

    @torch.inference_mode()
    def run(self, piece: Piece) -> Iterator[Step]:
        """Run a piece whose next block is `first`; one step per segment, as soon as it is known.

        The survivors of the last step wait for block `end`; at the model's end there are none.
        """
        assert piece.next_block == self.first
        inside: Piece | None = piece
        for segment in self._segments:
            if inside is None:
                return
            step = self._step(segment, inside)
            inside = step.survivors
            yield step

    def _step(self, segment: Segment, piece: Piece) -> Step:
        hidden_ND, logits_BC = self._runner.run(segment, piece)
        after = replace(piece, next_block=segment.end, values=hidden_ND)
        if logits_BC is None:
            return Step(answers=(), survivors=after)
        if segment.end == self._num_blocks:
            label_B, score_B = self._policy.conclude(logits_BC, piece.sample_ids)
            everyone = range(len(piece))
            return Step(answers=_answers(piece, everyone, label_B, score_B, segment.end - 1), survivors=None)
        assert segment.ramp is not None
        verdict = self._policy.decide(segment.ramp, logits_BC, piece.state_BS, piece.sample_ids)
        leave_B = verdict.leave_B.tolist()
        left = [k for k, leaves in enumerate(leave_B) if leaves]
        answers = _answers(piece, left, verdict.label_B, verdict.score_B, segment.ramp)
        after = replace(after, state_BS=verdict.state_BS)
        if not left:
            return Step(answers=(), survivors=after)
        stay = [k for k, leaves in enumerate(leave_B) if not leaves]
        return Step(answers=answers, survivors=after.select(stay) if stay else None)


def _answers(
    piece: Piece, positions: list[int] | range, label_B: Tensor, score_B: Tensor, block: int
) -> tuple[Answer, ...]:
    labels, scores = label_B.tolist(), score_B.tolist()
    if any(map(math.isnan, scores)):
        raise ArithmeticError(f"the exit after block {block} gave scores that are not numbers")
    return tuple(Answer(sample_id=piece.sample_ids[k], label=labels[k], score=scores[k], exit=block) for k in positions)
