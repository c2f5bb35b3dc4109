"""Cuts, which run consecutive blocks of a model on a piece, and the runner that runs batches through cuts.

Exits may share an expensive head, such as one over a vocabulary. It is computed once per batch, so inputs that leave
early wait for the end of the batch. SmolLM2's head has a fifth of all weights, and a CPU reads all of them even for a
single row. The wait delays no sequence: the device could not run its next token before the end of the batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from earlyexit.engine.device import Memory, Step, warm_up_length
from earlyexit.engine.engine import Batch
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Answer, ExitResult, Segment, Split, WirePiece, values_of
from earlyexit.network.model import EarlyExitModel, Network, SegmentRunner, arbitrary_tensors, from_wire
from earlyexit.network.piece import (
    Piece,
    Tensors,
    all_to_host,
    fuse,
    mark_cuda,
    to_device,
    to_host,
    wait_for,
    when_computed,
)
from earlyexit.policies.base import Decision, ExitOutput, ExitPolicy
from earlyexit.policies.threshold import Foreseen
from earlyexit.ramps.heads import NormedRamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Inputs that leave at a ramp and wait for the shared head."""

    piece: Piece
    positions: list[int]
    """The positions in the piece of the inputs that leave."""
    score_B: Tensor
    """The scores of all inputs of the piece."""
    ramp: int
    rows_KD: Tensor
    """The inputs of the shared head."""


class Cut:
    """Blocks `first` to `end` - 1 with active ramps. An input's answer does not depend on the rest of its batch.

    Only active ramps let inputs leave and change the policy's state. In a cut for inputs that stay, an answered input
    remains in the piece, and steps also hold the results of the observing ramps and of the model's end.
    """

    def __init__(
        self,
        network: Network,
        first: int,
        end: int,
        ramps: tuple[int, ...],
        policy: ExitPolicy,
        segments: SegmentRunner | None = None,
        *,
        looks: frozenset[int] | None = None,
    ) -> None:
        """`segments`: the backend that computes the blocks; None: the network itself.

        `looks`: if inputs stay, the ramps that are observed, active or not; None: inputs leave.
        Raises PlanError for blocks or ramps that the network does not have, and for a policy that cannot judge them.
        """
        _check(network, first, end, ramps, policy)
        self.first = first
        self.end = end
        self._network = network
        self._model = network if isinstance(network, EarlyExitModel) else None  # checked once, because it is slow
        self._ramps = ramps
        self._policy = policy
        self._segment_runner = segments
        self._stays = looks is not None
        self._looks = looks or frozenset()
        active = Split(first=first, end=end, batch=1, ramps=ramps)
        evaluated = tuple(sorted(self._looks.union(ramps)))
        self._segments = replace(active, ramps=evaluated).segments()
        if policy.foresees == "states":
            self._segments = tuple(part for segment in self._segments for part in _split_before_last(segment))
        # Cuts with observing inactive ramps run about one batch in fifty. The network itself computes them, because an
        # ONNX Runtime session per ramp would hold its own copy of the weights.
        self._runner = network if segments is None or evaluated != ramps else segments

    def staying(self) -> Cut:
        """Returns the same cut for inputs that stay. All active ramps are observed."""
        return self._staying(self._ramps)

    def for_probes(self) -> Cut:
        """Returns the same cut for probes, which stay. All ramps are observed."""
        return self._staying(self._network.ramp_indices)

    def _staying(self, ramps: Iterable[int]) -> Cut:
        looks = frozenset(ramp for ramp in ramps if self.first <= ramp < self.end and self._policy.can_look(ramp))
        return Cut(self._network, self.first, self.end, self._ramps, self._policy, self._segment_runner, looks=looks)

    def run(self, piece: Piece) -> Iterator[Step[Piece]]:
        """Runs a piece whose next block is `first`. Yields a step per segment, as soon as it is computed.

        Inputs that leave at an exit with the shared head are answered in the last step. The survivors of the last step
        wait for block `end`. After the model's last block there are no survivors.
        """
        assert piece.next_block == self.first
        steps = self._steps(piece)
        device = self._network.device
        if device.type == "cuda" and self._policy.ignores_outputs:  # other policies would wait for the logits
            return when_computed(steps, lambda: mark_cuda(device))
        return steps

    @torch.inference_mode()
    def _steps(self, piece: Piece) -> Iterator[Step[Piece]]:
        inside: Piece | None = piece
        answered: set[str] = set()
        deferred: list[Leaving] = []
        for segment in self._segments:
            if inside is None:
                break
            if deferred and segment.end == self._network.num_blocks and self._runner is self._network:
                yield self._last_step(deferred, segment, inside)
                return
            step = self._step(segment, inside, answered, deferred)
            inside = step.survivors
            yield step
        if deferred:
            yield Step(answers=self._run_shared_head(deferred)[0], survivors=inside)

    def _run_shared_head(
        self, deferred: Sequence[Leaving], *others: tuple[int, Tensor]
    ) -> tuple[tuple[Answer, ...], list[Tensor]]:
        """Runs the shared head once. Returns the answers of the deferred inputs, and the outputs for `others`."""
        model = self._model
        assert model is not None
        outputs = model.outputs_together([*((each.ramp, each.rows_KD) for each in deferred), *others])
        answers: list[Answer] = []
        for each, outputs_KC in zip(deferred, outputs, strict=False):
            value_K = to_host(model.task.answer(outputs_KC))
            answers += _answers(each.piece, each.positions, value_K, each.score_B, each.ramp)
        return tuple(answers), outputs[len(deferred) :]

    def _last_step(self, deferred: Sequence[Leaving], segment: Segment, piece: Piece) -> Step[Piece]:
        """Runs the model's last blocks, and the shared head once for their outputs and the deferred inputs."""
        model = self._model
        assert model is not None
        last = model.num_blocks - 1
        hidden = model.run_blocks(segment.first, segment.end, piece.tensors, model.layout(piece.lengths_B))
        last_BD = model.before_head(last, model.gathered(last, hidden, piece.lengths_B))
        assert last_BD is not None, "the full model has the head that its ramps share"
        answers, (outputs_BC,) = self._run_shared_head(deferred, (last, last_BD))
        output, state_BS = self._exit_output(segment, piece, (), outputs_BC)
        return Step(answers=(*answers, *self._conclude(piece, output, state_BS).answers), survivors=None)

    def _step(self, segment: Segment, piece: Piece, answered: set[str], deferred: list[Leaving]) -> Step[Piece]:
        """Runs a segment and the exit at its end. Adds to `answered`, and to `deferred`, the inputs that leave."""
        foresees = self._policy.foresees is not None and segment.ramp is not None
        values, outputs_BC = self._runner.run(replace(segment, ramp=None) if foresees else segment, piece)
        after = replace(piece, next_block=segment.end, tensors=values)
        if outputs_BC is None and not foresees:
            if not self._policy.ignores_outputs:
                wait_for(self._network.device)  # else the duration of the batch would be unknown
            return Step(answers=(), survivors=after)
        output, state_BS = self._exit_output(segment, piece, values, outputs_BC)
        if segment.end == self._network.num_blocks:
            return self._conclude(piece, output, state_BS)
        assert segment.ramp is not None
        seen = self._look(segment.ramp, output, state_BS, piece) if segment.ramp in self._looks else ()
        if segment.ramp not in self._ramps:
            return Step(answers=(), survivors=after, seen=seen)
        decision = self._policy.decide(segment.ramp, output, state_BS, piece.sample_ids)
        leave_B = decision.leave_B.tolist()
        leaving = [k for k, leaves in enumerate(leave_B) if leaves and piece.sample_ids[k] not in answered]
        is_deferred = bool(leaving) and self._defer(deferred, piece, leaving, output, decision, segment.ramp)
        answers: tuple[Answer, ...] = ()
        if leaving and not is_deferred:
            value_K = output.answers(leaving) if decision.value_B is None else decision.value_B[leaving]
            answers = _answers(piece, leaving, value_K, decision.score_B, segment.ramp)
        after = replace(after, state_BS=to_device(decision.state_BS, piece.state_BS.device))
        if self._stays:
            answered.update(answer.sample_id for answer in answers)
            return Step(answers=answers, survivors=after, seen=seen)
        if not leaving:
            return Step(answers=(), survivors=after)
        surviving = [k for k, leaves in enumerate(leave_B) if not leaves]
        return Step(answers=answers, survivors=after.select(surviving) if surviving else None)

    def _exit_output(
        self, segment: Segment, before: Piece, after: Tensors, outputs_BC: Tensor | None
    ) -> tuple[ExitOutput, Tensor]:
        """Returns the exit's output and the policy's state. `outputs_BC`: None if the policy foresees them."""
        if outputs_BC is None:
            assert self._model is not None
            assert segment.ramp is not None
            foreseen = Foreseen(self._model, segment.ramp, before, after, self._policy.foresees)
            return foreseen, to_host(before.state_BS)
        state_BS = before.state_BS
        stay_on_device = self._policy.ignores_outputs or self._network.task.large
        if not stay_on_device:
            outputs_BC, state_BS = all_to_host((outputs_BC, state_BS))
        return ExitOutput(self._network.task, outputs_BC), state_BS

    def _defer(
        self, deferred: list[Leaving], piece: Piece, rows: list[int], output: ExitOutput, decision: Decision, ramp: int
    ) -> bool:
        """Adds the inputs of these rows to `deferred` if their exit has the shared head. Returns whether it did."""
        if self._stays or decision.value_B is not None or not isinstance(output, Foreseen):
            return False
        rows_KD = output.before_head(rows)
        if rows_KD is None:
            return False
        deferred.append(Leaving(piece=piece, positions=rows, score_B=decision.score_B, ramp=ramp, rows_KD=rows_KD))
        return True

    def _conclude(self, piece: Piece, output: ExitOutput, state_BS: Tensor) -> Step[Piece]:
        """Returns the step of the model's end."""
        value_B, score_B = self._policy.conclude(output, state_BS, piece.sample_ids)
        last = self._network.num_blocks - 1
        answers = _answers(piece, range(len(piece)), value_B, score_B, last)
        if not self._stays:
            return Step(answers=answers, survivors=None)
        full_B = self._policy.full_answers(output, piece.sample_ids)
        seen = _exit_results(piece, full_B, [math.nan] * len(piece), last)
        return Step(answers=answers, survivors=None, seen=seen)

    def _look(self, ramp: int, output: ExitOutput, state_BS: Tensor, piece: Piece) -> tuple[ExitResult, ...]:
        """Returns the ramp's results. Results that are not finite are left out: a broken ramp must not fail inputs."""
        score_B, value_B = self._policy.look(ramp, output, state_BS, piece.sample_ids)
        seen = _exit_results(piece, value_B, score_B.tolist(), ramp)
        finite_B = _are_finite(value_B).tolist()
        return tuple(each for each, finite in zip(seen, finite_B, strict=True) if finite and not math.isnan(each.score))


def _check(network: Network, first: int, end: int, ramps: tuple[int, ...], policy: ExitPolicy) -> None:
    if not 0 <= first < end <= network.num_blocks:
        raise PlanError(
            f"blocks {first} to {end - 1} are not in the model, whose blocks are 0 to {network.num_blocks - 1}"
        )
    unknown = sorted(set(ramps) - set(network.ramp_indices))
    if unknown:
        raise PlanError(f"the model has no ramps {unknown}; its ramps are {list(network.ramp_indices)}")
    policy.check_ramps(ramps)
    if ramps:
        policy.check_task(network.task)
    if ramps and policy.foresees is not None:
        named = f"exit policy {policy.name!r}"
        if not isinstance(network, EarlyExitModel):
            raise PlanError(f"{named} decides before a ramp's outputs are computed, which a chain does not support")
        without = [ramp for ramp in ramps if not isinstance(network.exit_head(ramp), NormedRamp)]
        if without and policy.foresees == "classifier":
            raise PlanError(f"{named} needs ramps with a small classifier of their own; ramps {without} have none")


def _split_before_last(segment: Segment) -> tuple[Segment, ...]:
    """Splits a segment before its ramp's block, so that the policy can read the hidden state before that block."""
    if segment.ramp is None or segment.first == segment.end - 1:
        return (segment,)
    last = segment.end - 1
    return Segment(first=segment.first, end=last, ramp=None), replace(segment, first=last)


def _exit_results(piece: Piece, value_B: Tensor, scores: Sequence[float], block: int) -> tuple[ExitResult, ...]:
    values = values_of(value_B.numpy(), pack=True)
    return tuple(
        ExitResult(sample_id=sample_id, block=block, score=score, value=value)
        for sample_id, value, score in zip(piece.sample_ids, values, scores, strict=True)
    )


def _answers(
    piece: Piece, positions: list[int] | range, value_K: Tensor, score_B: Tensor, block: int
) -> tuple[Answer, ...]:
    scores = score_B.tolist()
    if any(map(math.isnan, scores)):
        raise ArithmeticError(f"the exit after block {block} gave a score that is NaN")
    if value_K.is_floating_point() and not _are_finite(value_K).all():
        raise ArithmeticError(f"the exit after block {block} gave an answer that is not finite")
    values = values_of(value_K.numpy())
    return tuple(
        Answer(sample_id=piece.sample_ids[k], value=value, score=scores[k], exit=block)
        for k, value in zip(positions, values, strict=True)
    )


def _are_finite(value_B: Tensor) -> Tensor:
    """Returns for each answer whether all its numbers are finite, bool (B,)."""
    return value_B.reshape(len(value_B), -1).isfinite().all(1)


logger = logging.getLogger(__name__)


class TorchRunner:
    """A `Runner` of pieces. It runs any split of the model, with one exit policy at a time.

    Inputs may come from earlier plans. No input leaves at an active ramp for which the policy has no threshold.
    An input with the state of another policy gets the initial state.
    """

    def __init__(
        self,
        network: Network,
        policy: ExitPolicy,
        segments: SegmentRunner | None = None,
        memory: Memory[Piece] | None = None,
    ) -> None:
        """`segments`: the backend for all inputs but probes, as soon as it is ready; None: the network itself.

        `memory`: the network's memory of sequences, if it has any.
        """
        self.memory = memory
        self._network = network
        self._segments = None if segments is None or segments is network else _OnceReady(network, segments)
        self._prepared: SegmentRunner = segments or network
        self._cuts = _PolicyCuts(policy)

    def from_wire(self, wire: WirePiece) -> Piece:
        return from_wire(self._network, wire, self._cuts.policy)

    def run(self, batch: Batch[Piece]) -> Iterator[Step[Piece]]:
        cuts = self._cuts  # the policy may be replaced while the batch runs
        pieces = [self._in_state(member.payload, cuts.policy) for member in batch.members]
        return self._cut(cuts, batch.split, probe=batch.probe).run(fuse(pieces))

    def follow(self, policy: ExitPolicy) -> None:
        self._cuts = _PolicyCuts(policy)

    def prepare(self, splits: Sequence[Split]) -> None:
        self._prepared.prepare({segment: split.budget for split in splits for segment in split.segments()})

    def warm_up_pieces(self, split: Split, size: int) -> Piece:
        network, policy = self._network, self._cuts.policy
        lengths_B = np.full(size, min(warm_up_length(split, size), network.max_length), dtype=np.int32)
        return Piece(
            sample_ids=policy.warm_up_ids(size),
            next_block=split.first,
            lengths_B=lengths_B,
            tensors=arbitrary_tensors(network, split.first, lengths_B, np.random.default_rng(0)),
            state_BS=policy.initial_state(size, network.task.num_outputs, network.device),
        )

    def _cut(self, cuts: _PolicyCuts, split: Split, *, probe: bool) -> Cut:
        """Returns the cut of a split. Raises PlanError for blocks or ramps that the model does not have."""
        if (split, probe) not in cuts.by_split:
            ramps = tuple(ramp for ramp in split.ramps if cuts.policy.can_decide(ramp))
            cut = Cut(self._network, split.first, split.end, ramps, cuts.policy, self._segments)
            # If the policy can observe no ramp, a probe runs like any other input.
            if probe and any(map(cuts.policy.can_look, self._network.ramp_indices)):
                cut = cut.for_probes()
            elif split.stays:
                cut = cut.staying()
            cuts.by_split[split, probe] = cut
        return cuts.by_split[split, probe]

    def _in_state(self, piece: Piece, policy: ExitPolicy) -> Piece:
        num_outputs, device = self._network.task.num_outputs, self._network.device
        width = policy.state_width(num_outputs)
        if piece.state_BS.shape[1] == width and (width == 0 or piece.state_BS.dtype == policy.state_dtype):
            return piece
        return replace(piece, state_BS=policy.initial_state(len(piece), num_outputs, device))


@dataclass(frozen=True, slots=True)
class _PolicyCuts:
    """A policy and its cuts. They are one object, so that both are replaced at once while the device runs."""

    policy: ExitPolicy
    by_split: dict[tuple[Split, bool], Cut] = field(default_factory=dict)
    """Cuts by split, and by whether they are for probes."""


class _OnceReady(SegmentRunner):
    """Computes segments with `segments` as soon as it is ready for them, and with the network until then."""

    def __init__(self, network: Network, segments: SegmentRunner) -> None:
        self._network = network
        self._segments = segments

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        if self._segments.is_ready(segment):
            return self._segments.run(segment, piece)
        logger.debug("blocks %d to %d are not prepared yet: torch runs them", segment.first, segment.end - 1)
        return self._network.run(segment, piece)
