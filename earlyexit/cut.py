"""A runnable part of a model: pieces in, answers and survivors out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from earlyexit.layout import Layout
from earlyexit.piece import Piece
from earlyexit.policies import ExitPolicy
from earlyexit.release import Step
from earlyexit.split import Segment, Split
from earlyexit.transfer import mark_cuda, to_host, when_computed
from earlyexit.wire import Answer, Seen

if TYPE_CHECKING:
    from earlyexit.model import EarlyExitModel


class SegmentRunner(Protocol):
    """How a segment is computed: torch in this file, ONNX Runtime in `onnx_backend.py`."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensor, Tensor | None]:
        """Hidden state (N, D) after the segment, and the logits (B, C) of the exit at its end, if there is one."""
        ...


@runtime_checkable
class PreparedSegments(SegmentRunner, Protocol):
    """Segments that take seconds of preparation each."""

    def is_ready(self, segment: Segment) -> bool:
        """Whether `run` computes it at once."""
        ...

    def prepare(self, segments: Collection[Segment]) -> None:
        """Be ready for these; what is neither among them nor among the last ones prepared may be given up."""
        ...


class TorchSegments:
    """Segments computed by the model's own modules."""

    def __init__(self, model: EarlyExitModel) -> None:
        self._model = model

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensor, Tensor | None]:
        return compute(self._model, segment, piece.values, Layout(piece.lengths_B, self._model.device))


def compute(model: EarlyExitModel, segment: Segment, values: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """What `SegmentRunner.run` gives, by the model's own modules."""
    hidden_ND = model.run_blocks(segment.first, segment.end, values, layout)
    if segment.ramp is None and segment.end != model.num_blocks:
        return hidden_ND, None
    return hidden_ND, model.exit_logits(segment.end - 1, hidden_ND, layout)


class Cut:
    """Blocks first to end - 1 with some ramps active. An input's answer does not depend on its batch-mates.

    For probes every ramp that the policy can look at is an exit to look at. The active ones alone decide, and change
    the policy's state; those whom they let leave are answered and stay inside all the same.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        first: int,
        end: int,
        ramps: tuple[int, ...],
        policy: ExitPolicy,
        segments: SegmentRunner | None = None,
        *,
        probe: bool = False,
    ) -> None:
        self.first = first
        self.end = end
        self._model = model
        self._ramps = ramps
        self._policy = policy
        self._probe = probe
        active = Split(first=first, end=end, batch=1, ramps=ramps)
        self._segments = (_with_looks(active, model.ramp_indices, policy) if probe else active).segments()
        # Probes are run by torch whatever the others are run by: one batch in fifty is no reason to hold a session of
        # ONNX Runtime, with its own copy of the weights, for every ramp.
        self._runner = TorchSegments(model) if probe or segments is None else segments

    def for_probes(self) -> Cut:
        """The same blocks and active ramps, for batches of probes."""
        return Cut(self._model, self.first, self.end, self._ramps, self._policy, probe=True)

    def run(self, piece: Piece) -> Iterator[Step[Piece]]:
        """Run a piece whose next block is `first`; one step per segment, as soon as it is known and computed.

        The survivors of the last step wait for block `end`; at the model's end there are none.
        """
        assert piece.next_block == self.first
        steps = self._steps(piece)
        device = self._model.device
        if device.type == "cuda" and self._policy.foreknows:  # others read the logits, and so wait for them
            return when_computed(steps, lambda: mark_cuda(device))
        return steps

    @torch.inference_mode()
    def _steps(self, piece: Piece) -> Iterator[Step[Piece]]:
        inside: Piece | None = piece
        answered: set[str] = set()
        for segment in self._segments:
            if inside is None:
                return
            step = self._step(segment, inside, answered)
            inside = step.survivors
            yield step

    def _step(self, segment: Segment, piece: Piece, answered: set[str]) -> Step[Piece]:
        hidden_ND, logits_BC = self._runner.run(segment, piece)
        after = replace(piece, next_block=segment.end, values=hidden_ND)
        if logits_BC is None:
            return Step(answers=(), survivors=after)
        if not self._policy.foreknows:
            logits_BC = to_host(logits_BC)
        if segment.end == self._model.num_blocks:
            return self._conclude(piece, logits_BC)
        assert segment.ramp is not None
        seen = self._look(segment.ramp, logits_BC, piece) if self._probe else ()
        if segment.ramp not in self._ramps:
            return Step(answers=(), survivors=after, seen=seen)
        state_BS = piece.state_BS.to(logits_BC.device)
        verdict = self._policy.decide(segment.ramp, logits_BC, state_BS, piece.sample_ids)
        leave_B = verdict.leave_B.tolist()
        left = [k for k, leaves in enumerate(leave_B) if leaves and piece.sample_ids[k] not in answered]
        answers = _answers(piece, left, verdict.label_B, verdict.score_B, segment.ramp)
        after = replace(after, state_BS=verdict.state_BS.to(piece.state_BS.device))
        if self._probe:
            answered.update(answer.sample_id for answer in answers)
            return Step(answers=answers, survivors=after, seen=seen)
        if not left:
            return Step(answers=(), survivors=after)
        stay = [k for k, leaves in enumerate(leave_B) if not leaves]
        return Step(answers=answers, survivors=after.select(stay) if stay else None)

    def _conclude(self, piece: Piece, logits_BC: Tensor) -> Step[Piece]:
        label_B, score_B = self._policy.conclude(logits_BC, piece.sample_ids)
        last = self._model.num_blocks - 1
        seen = _seen(piece, label_B.tolist(), [math.nan] * len(piece), last) if self._probe else ()
        return Step(answers=_answers(piece, range(len(piece)), label_B, score_B, last), survivors=None, seen=seen)

    def _look(self, ramp: int, logits_BC: Tensor, piece: Piece) -> tuple[Seen, ...]:
        if not self._policy.can_look(ramp):
            return ()
        score_B, label_B = self._policy.look(ramp, logits_BC, piece.sample_ids)
        # A ramp that is broken, and perhaps not even active, costs the record of an input, not its answer.
        seen = _seen(piece, label_B.tolist(), score_B.tolist(), ramp)
        return tuple(each for each in seen if not math.isnan(each.score))


def _with_looks(split: Split, ramps: Sequence[int], policy: ExitPolicy) -> Split:
    looks = {ramp for ramp in ramps if split.first <= ramp < split.end and policy.can_look(ramp)}
    return replace(split, ramps=tuple(sorted(looks.union(split.ramps))))


def _seen(piece: Piece, labels: Sequence[int], scores: Sequence[float], block: int) -> tuple[Seen, ...]:
    return tuple(
        Seen(sample_id=sample_id, block=block, score=score, label=label)
        for sample_id, label, score in zip(piece.sample_ids, labels, scores, strict=True)
    )


def _answers(
    piece: Piece, positions: list[int] | range, label_B: Tensor, score_B: Tensor, block: int
) -> tuple[Answer, ...]:
    labels, scores = label_B.tolist(), score_B.tolist()
    if any(map(math.isnan, scores)):
        raise ArithmeticError(f"the exit after block {block} gave scores that are not numbers")
    return tuple(Answer(sample_id=piece.sample_ids[k], label=labels[k], score=scores[k], exit=block) for k in positions)
