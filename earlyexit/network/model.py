"""Networks that can be cut between any two blocks: one of torch modules, or a chain of several.

A network has blocks 0 to `num_blocks` - 1, a ramp after some of them, and the full model's exit after the last. Users
of a network need not know how blocks work, or which tensors pass between them. The values of an input never depend on
the other inputs of its batch.

A cut runs consecutive blocks of a network on a piece, and the exit policy decides at the ramps. Exits may share an
expensive head, such as one over a vocabulary. It is computed once per batch, so inputs that leave early wait for the
end of the batch. SmolLM2's head has a fifth of all weights, and a CPU reads all of them even for a single row. The wait
delays no sequence: the device could not run its next token before the end of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.engine.device import Memory, Step, warm_up_length
from earlyexit.engine.engine import Batch
from earlyexit.engine.queue import Attention
from earlyexit.errors import ModelFolderError, PlanError
from earlyexit.families.base import Backbone
from earlyexit.families.own import examples
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Answer, Boundary, Budget, Lengths, Segment, Split, WirePiece, values_of
from earlyexit.network.chain import ModelChain, join_chains
from earlyexit.network.piece import Layout, Piece, Tensors, all_to_host, fuse, halved, to_device, to_host, wait_for
from earlyexit.policies.base import ExitOutput, ExitPolicy, Foresight
from earlyexit.ramps import RampStyle
from earlyexit.ramps.heads import BridgeRamp, NormedRamp, Ramp, VocabularyHead
from earlyexit.ramps.pooling import Pooling
from earlyexit.tasks.base import Task


class SegmentRunner(Protocol):
    """Computes segments of a network: with its torch modules, with ONNX Runtime, or as CUDA graphs."""

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        """Returns the hidden state after the segment, and the outputs (B, *output_shape) of the exit at its end.

        Segments that are not prepared are computed by the network's own modules, so that no batch waits for seconds.
        If the last tensor of the piece is `importance`, the result has it too, with the segment's attention added.
        """

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        """Prepares segments for batches within their budgets, while other segments run. By default does nothing.

        Segments that are neither in this call nor in the last one may be released.
        """
        return


def from_wire(network: Network, wire: WirePiece, policy: ExitPolicy) -> Piece:
    """Returns the piece on the network's device. Without a state it gets the policy's initial state.

    float16, of hidden states of float32 networks and of `importance`, is converted to float32.
    """
    if wire.state_BS is not None:
        state_BS = to_device(_tensor(wire.state_BS), network.device)
    elif policy.uses_positions:
        from earlyexit.sequences.kv import places_of  # imports tokenizers, which classifiers do not need

        state_BS = to_device(_tensor(places_of(wire)[:, None]), network.device)
    else:
        state_BS = policy.initial_state(len(wire.sample_ids), network.task.num_outputs, network.device)
    tensors = [to_device(_tensor(values), network.device) for values in wire.tensors]
    return Piece(
        sample_ids=wire.sample_ids,
        next_block=wire.next_block,
        lengths_B=wire.lengths_B,
        tensors=tuple(each.float() if each.dtype == torch.float16 else each for each in tensors),
        state_BS=state_BS,
    )


def arbitrary_tensors(network: Network, block: int, lengths_B: Lengths, rng: np.random.Generator) -> Tensors:
    """Returns random tensors for the boundary before `block`, for inputs of these lengths, on the network's device."""
    values = examples(network.takes(block), Layout(lengths_B), seed=int(rng.integers(2**31)))
    return tuple(each.to(network.device, network.dtype if each.is_floating_point() else each.dtype) for each in values)


def _tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    """Returns a tensor on the array's memory, or on a copy if it is read-only. uint16 holds the bits of bfloat16."""
    tensor = torch.from_numpy(np.require(array, requirements="W"))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The description of a model, without its weights."""

    name: str
    family: str
    codec: NamedSpec
    """How its inputs are encoded: see `earlyexit.codecs`."""
    task: Task
    ramp_style: RampStyle
    pooling: Pooling
    head_style: RampStyle
    """The style of the full model's head. A head from a checkpoint has its own style."""
    head_pooling: Pooling
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The origin of the weights, and how the ramps were trained."""


class EarlyExitModel(nn.Module, SegmentRunner):
    """A backbone's blocks, ramps after any of them but the last, and a head. It is also the module that is trained."""

    def __init__(self, info: ModelInfo, backbone: Backbone, ramps: Mapping[int, Ramp], head: Ramp) -> None:
        super().__init__()
        self.info = info
        self.backbone = backbone
        self.num_blocks = backbone.num_blocks
        self.ramp_indices = tuple(sorted(ramps))
        self.ramps = nn.ModuleDict({str(index): ramp for index, ramp in ramps.items()})
        self.head = head
        self.register_buffer("temperatures_E", torch.ones(backbone.num_blocks))
        self.temperatures_E: Tensor
        """The divisor of the outputs of the exit after each block; 1 until it is calibrated."""
        self.attention: Attention = "auto"
        """How attention is computed for packed inputs."""
        self.is_last = True
        """False if another network of a chain follows. The end of this network is then a ramp."""

    @property
    def members(self) -> tuple[EarlyExitModel, ...]:
        """The networks of the chain that consists of this network alone. Only such a network can keep sequences."""
        return (self,)

    @property
    def chain(self) -> ModelChain:
        """The chain that consists of this network alone."""
        return ModelChain(names=(self.info.name,), lengths=(self.num_blocks,), ramps=self.ramp_indices)

    @property
    def task(self) -> Task:
        return self.info.task

    @property
    def max_length(self) -> int:
        """The longest input that its codec accepts, in tokens."""
        return int(self.info.codec.get("max_length", self.backbone.max_length))

    @property
    def device(self) -> torch.device:
        return self.temperatures_E.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.backbone.float32_only else next(self.backbone.parameters()).dtype

    def takes(self, block: int) -> Boundary:
        """Returns the tensors of a piece before a block, or after the last one. Before block 0 they are the inputs."""
        return self.backbone.boundary(block - 1) if block else self.backbone.inputs

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        return self.compute(segment, piece.tensors, piece.layout(self.attention))

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        self.backbone.prepare({(each.first, each.end) for each in segments}, self.device)

    def compute(self, segment: Segment, values: Tensors, layout: Layout) -> tuple[Tensors, Tensor | None]:
        """Computes a segment like `run`, for tensors with a known layout."""
        hidden = self.run_blocks(segment.first, segment.end, values, layout)
        if not self.has_exit(segment):
            return hidden, None
        return hidden, self.exit_outputs(segment.end - 1, hidden, layout)

    def has_exit(self, segment: Segment) -> bool:
        """Whether an exit is evaluated at the end of a segment."""
        return segment.ramp is not None or (self.is_last and segment.end == self.num_blocks)

    def exit_head(self, block: int) -> Ramp:
        """Returns the ramp after `block`, or the full model's head after the last block."""
        head = self.head if block == self.num_blocks - 1 else self.ramps[str(block)]
        assert isinstance(head, Ramp)
        return head

    def exit_outputs(self, block: int, hidden: Tensors, layout: Layout) -> Tensor:
        """Returns the outputs of the exit after `block`, divided by its temperature, in float32 (B, C)."""
        return self.outputs_of(block, self.gathered(block, hidden, layout))

    # The next four methods let a policy decide before an exit's outputs are computed.

    def gathered(self, block: int, hidden: Tensors, layout: Layout) -> Tensor:
        """Returns the features (B, ...) that the exit's head reads, for a hidden state before or after its block."""
        return self.exit_head(block).gather(hidden[0], layout)

    def outputs_of(self, exit_block: int, gathered: Tensor) -> Tensor:
        """Returns the exit's outputs (B, *output_shape) for the result of `gathered`."""
        outputs_BC: Tensor = self.exit_head(exit_block).classify(gathered)
        return outputs_BC.float() / self.temperatures_E[exit_block]

    def before_head(self, exit_block: int, gathered: Tensor) -> Tensor | None:
        """Returns the inputs (B, D) of the shared head; None for an exit that has its own head."""
        head = self.exit_head(exit_block)
        if head is self.head:
            return gathered
        return head.prepared(gathered) if isinstance(head, NormedRamp) else None

    def outputs_together(self, rows: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Runs the shared head once for several exits; `rows`: for each exit its block and result of `before_head`."""
        outputs_KC: Tensor = self.head.classify(torch.cat([each for _, each in rows]))
        parts = torch.split(outputs_KC, [len(each) for _, each in rows])
        return [part.float() / self.temperatures_E[block] for part, (block, _) in zip(parts, rows, strict=True)]

    @property
    def tied(self) -> Mapping[str, str]:
        """Names of tied weights, and the weights to which they are tied. Tied weights are stored once."""
        tied = self.backbone.vocabulary is not None and isinstance(self.head, VocabularyHead)
        return {"head.classifier.weight": f"backbone.{self.backbone.vocabulary}"} if tied else {}

    def tie(self) -> None:
        """Shares the embedding's weights with the head if they are tied, and the head with the ramps that use it."""
        for name, other in self.tied.items():
            module, _, last = name.rpartition(".")
            setattr(self.get_submodule(module), last, self.get_parameter(other))
        for ramp in self.ramps.values():
            if isinstance(ramp, NormedRamp) and isinstance(self.head, VocabularyHead):
                ramp.share(self.head)

    def run_blocks(self, first: int, end: int, values: Tensors, layout: Layout) -> Tensors:
        """Runs blocks `first` to `end` - 1 on the hidden state before them; for `first` 0, on the model's inputs."""
        if not first:
            num_inputs = len(self.backbone.inputs)
            # Codecs return float32. Tensors beside the inputs, such as `importance`, are not converted.
            inputs = tuple(each.to(self.dtype) if each.is_floating_point() else each for each in values[:num_inputs])
            values = (*self.backbone.embed(inputs, layout), *values[num_inputs:])
        return self.backbone.run_blocks(first, end, values, layout)


def bridge_of(backbone: Backbone, block: int) -> nn.Module:
    """Returns the bridge after a block. Raises ModelFolderError for a family without bridges."""
    bridge = backbone.bridge(block)
    if bridge is None:
        raise ModelFolderError(
            f"{type(backbone).__name__} has no bridges: its blocks all return the same shape, or do not define which "
            "of them begin a region; use the ramp style of the full model's head"
        )
    return bridge


def init_bridges(model: EarlyExitModel) -> None:
    """Initializes every ramp with a bridge from the backbone's blocks and the full model's head."""
    for block in model.ramp_indices:
        ramp = model.exit_head(block)
        if isinstance(ramp, BridgeRamp):
            ramp.transfer(bridge_of(model.backbone, block), model.head)


class ChainNetwork(SegmentRunner):
    """Several networks, with consecutively numbered blocks and ramps. Each segment and each cut is within one of them.

    The end of every network but the last is a ramp. Its head is computed if that ramp is active or observed. No hidden
    state passes such an end, only `importance` does, in float16. A survivor there returns to the ingress, which encodes
    the original input again for the next network.
    """

    def __init__(self, members: Sequence[EarlyExitModel], runners: Sequence[SegmentRunner] | None = None) -> None:
        """Raises ModelFolderError unless the networks have the same device, float type and task.

        All networks but the last are marked as parts of a chain, whose ends are ramps. `runners`: what computes the
        segments of each network; None for the networks themselves.
        """
        first, last = members[0], members[-1]
        for member in members:
            if member.backbone.kept_bytes:
                raise ModelFolderError(f"{member.info.name} keeps memory of sequences, so it cannot be part of a chain")
            if member.task.spec() != last.task.spec():
                raise ModelFolderError(f"{member.info.name} and {last.info.name} have different tasks: no chain")
            if (member.dtype, member.device) != (first.dtype, first.device):
                raise ModelFolderError(f"{member.info.name} and {first.info.name} differ in float type or device")
            member.is_last = member is last
        self.members = tuple(members)
        self.runners: tuple[SegmentRunner, ...] = tuple(members if runners is None else runners)
        self.chain = join_chains([member.chain for member in members])
        self.num_blocks = self.chain.num_blocks
        self.ramp_indices = self.chain.ramps
        self.task = last.task
        self.max_length = min(member.max_length for member in members)
        """The longest input that all networks accept, in tokens."""
        self.device, self.dtype = first.device, first.dtype

    def takes(self, block: int) -> Boundary:
        """Returns the tensors of a piece before a block. At the start of a network these are encoded inputs."""
        network, local = self.chain.locate(block)
        return self.members[network].takes(local)

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        network, own = locate(self.chain, segment)
        member, (tensors, outputs_BC) = self.members[network], self.runners[network].run(own, piece)
        if own.end == member.num_blocks and network < len(self.members) - 1:
            tensors = tuple(map(halved, tensors[len(member.takes(own.end)) :]))
        return tensors, outputs_BC

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        located = [(*locate(self.chain, segment), budget) for segment, budget in segments.items()]
        for index, runner in enumerate(self.runners):
            runner.prepare({own: budget for network, own, budget in located if network == index})


Network = EarlyExitModel | ChainNetwork


def locate(chain: ModelChain, segment: Segment) -> tuple[int, Segment]:
    """Returns the index of a segment's network, and the segment in that network's numbering."""
    network, first = chain.locate(segment.first)
    start = segment.first - first
    assert segment.end - start <= chain.lengths[network], f"{segment} is in two networks"
    ramp = None if segment.ramp is None else segment.ramp - start
    return network, replace(segment, first=first, end=segment.end - start, ramp=ramp)


class Foreseen(ExitOutput):
    """A ramp's scores, and its outputs, which are computed on first use and only for the requested inputs."""

    def __init__(
        self, network: EarlyExitModel, ramp: int, before: Piece, after: Tensors, foresees: Foresight | None
    ) -> None:
        """`before`, `after`: the hidden states before and after the segment that ends with the ramp."""
        self.task = network.task
        self._network, self._ramp, self._foresees = network, ramp, foresees
        self._before, self._after = before, after

    @cached_property
    def gathered(self) -> Tensor:
        """The input of the ramp's head, (B, ...), on the device where it was computed."""
        return self._network.gathered(self._ramp, self._after, self._before.layout(self._network.attention))

    @cached_property
    def score_B(self) -> Tensor:
        """The predicted probability of agreement with the full model, or the cosine of the states, at least 0."""
        if self._foresees == "classifier":
            head = self._network.exit_head(self._ramp)
            assert isinstance(head, NormedRamp)
            return to_host(head.foresee(self.gathered).float().sigmoid())
        layout = self._before.layout(self._network.attention)
        before = self._network.gathered(self._ramp, self._before.tensors, layout)
        similarity_B = torch.cosine_similarity(before.flatten(1).float(), self.gathered.flatten(1).float())
        return to_host(similarity_B.clamp(0, 1))

    @cached_property
    def outputs_BC(self) -> Tensor:
        return self._network.outputs_of(self._ramp, self.gathered)

    def answers(self, rows: Sequence[int] | None = None) -> Tensor:
        if rows is None or len(rows) == len(self.gathered) or "value_B" in self.__dict__:
            return super().answers(rows)
        index_K = to_device(torch.tensor(rows), self.gathered.device)
        outputs_KC = self._network.outputs_of(self._ramp, self.gathered.index_select(0, index_K))
        return to_host(self.task.answer(outputs_KC))

    def before_head(self, rows: Sequence[int]) -> Tensor | None:
        """Returns the shared head's input for some inputs; None if the ramp has its own head."""
        index_K = to_device(torch.tensor(rows), self.gathered.device)
        return self._network.before_head(self._ramp, self.gathered.index_select(0, index_K))


Leaving = tuple[int, Tensor, Callable[[Tensor], tuple[Answer, ...]]]
"""Inputs that leave at a ramp and wait for the shared head: the ramp, the inputs (K, D) of the head, and the function
that returns their answers for their values (K, ...)."""


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
        observed: frozenset[int] | None = None,
    ) -> None:
        """`segments`: the backend that computes the blocks; None: the network itself.

        `observed`: if inputs stay, the ramps that are observed, active or not; None: inputs leave.
        Raises PlanError for blocks or ramps that the network does not have, and for a policy that cannot judge them.
        """
        _check(network, first, end, ramps, policy)
        self.first = first
        self.end = end
        self._network = network
        self._model = network if isinstance(network, EarlyExitModel) else None  # checked once, because it is slow
        self._ramps = ramps
        self._policy = policy
        self._backend = segments
        self._stays = observed is not None
        self._observed = observed or frozenset()
        evaluated = tuple(sorted(self._observed.union(ramps)))
        self._segments = Split(first=first, end=end, batch=1, ramps=evaluated).segments()
        if policy.foresees == "states":
            self._segments = tuple(part for segment in self._segments for part in _split_before_last(segment))
        # Cuts with observing inactive ramps run about one batch in fifty. The network itself computes them, because an
        # ONNX Runtime session per ramp would hold its own copy of the weights.
        self._runner = network if segments is None or evaluated != ramps else segments

    def observing(self, ramps: Iterable[int]) -> Cut:
        """Returns the same cut for inputs that stay. These ramps are observed, if the policy can judge them."""
        observed = frozenset(ramp for ramp in ramps if self.first <= ramp < self.end and self._policy.can_observe(ramp))
        return Cut(self._network, self.first, self.end, self._ramps, self._policy, self._backend, observed=observed)

    @torch.inference_mode()
    def run(self, piece: Piece) -> Iterator[Step[Piece]]:
        """Runs a piece whose next block is `first`. Yields a step per segment, as soon as it is computed.

        Inputs that leave at an exit with the shared head are answered in the last step. The survivors of the last step
        wait for block `end`. After the model's last block there are no survivors.
        """
        assert piece.next_block == self.first
        inside: Piece | None = piece
        answered: set[str] = set()
        waiting: list[Leaving] = []
        for segment in self._segments:
            if inside is None:
                break
            if waiting and segment.end == self._network.num_blocks and self._runner is self._network:
                yield self._last_step(waiting, segment, inside)
                return
            step = self._step(segment, inside, answered, waiting)
            inside = step.survivors
            yield step
        if waiting:
            yield Step(answers=self._run_shared_head(waiting)[0], survivors=inside)

    def _run_shared_head(
        self, waiting: Sequence[Leaving], *others: tuple[int, Tensor]
    ) -> tuple[tuple[Answer, ...], list[Tensor]]:
        """Runs the shared head once. Returns the answers of inputs that wait for it, and the outputs for `others`."""
        model = self._model
        assert model is not None
        outputs = model.outputs_together([*((ramp, rows_KD) for ramp, rows_KD, _ in waiting), *others])
        answers: list[Answer] = []
        for (_, _, answers_of), outputs_KC in zip(waiting, outputs, strict=False):
            answers += answers_of(to_host(model.task.answer(outputs_KC)))
        return tuple(answers), outputs[len(waiting) :]

    def _last_step(self, waiting: Sequence[Leaving], segment: Segment, piece: Piece) -> Step[Piece]:
        """Runs the model's last blocks, and the shared head once for their outputs and inputs that wait for it."""
        model = self._model
        assert model is not None
        last, layout = model.num_blocks - 1, piece.layout(model.attention)
        hidden = model.run_blocks(segment.first, segment.end, piece.tensors, layout)
        last_BD = model.before_head(last, model.gathered(last, hidden, layout))
        assert last_BD is not None, "the full model has the head that its ramps share"
        answers, (outputs_BC,) = self._run_shared_head(waiting, (last, last_BD))
        output, state_BS = self._exit_output(segment, piece, (), outputs_BC)
        return Step(answers=(*answers, *self._conclude(piece, output, state_BS).answers), survivors=None)

    def _step(self, segment: Segment, piece: Piece, answered: set[str], waiting: list[Leaving]) -> Step[Piece]:
        """Runs a segment and its exit. Adds inputs that leave to `answered` if they stay, else to `waiting`."""
        foresees = self._policy.foresees is not None and segment.ramp is not None
        values, outputs_BC = self._runner.run(replace(segment, ramp=None) if foresees else segment, piece)
        after = replace(piece, next_block=segment.end, tensors=values)
        if outputs_BC is None and not foresees:
            wait_for(self._network.device)  # else the duration of the batch would be unknown
            return Step(answers=(), survivors=after)
        output, state_BS = self._exit_output(segment, piece, values, outputs_BC)
        if segment.end == self._network.num_blocks:
            return self._conclude(piece, output, state_BS)
        assert segment.ramp is not None
        seen = self._observe(segment.ramp, output, state_BS, piece) if segment.ramp in self._observed else ()
        if segment.ramp not in self._ramps:
            return Step(answers=(), survivors=after, seen=seen)
        decision = self._policy.decide(segment.ramp, output, state_BS, piece.sample_ids)
        leave_B = decision.leave_B.tolist()
        leaving = [k for k, leaves in enumerate(leave_B) if leaves and piece.sample_ids[k] not in answered]
        answers: tuple[Answer, ...] = ()
        rows_KD: Tensor | None = None
        if leaving and isinstance(output, Foreseen) and decision.value_B is None and not self._stays:
            rows_KD = output.before_head(leaving)
        if rows_KD is not None:
            answers_of = partial(_answers, piece, leaving, score_B=decision.score_B, block=segment.ramp)
            waiting.append((segment.ramp, rows_KD, answers_of))
        elif leaving:
            value_K = output.answers(leaving) if decision.value_B is None else decision.value_B[leaving]
            answers = _answers(piece, leaving, value_K, decision.score_B, segment.ramp)
        if decision.state_BS is not state_BS:
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
        if not self._network.task.large:
            outputs_BC, state_BS = all_to_host((outputs_BC, state_BS))
        return ExitOutput(self._network.task, outputs_BC), state_BS

    def _conclude(self, piece: Piece, output: ExitOutput, state_BS: Tensor) -> Step[Piece]:
        """Returns the step of the model's end."""
        value_B, score_B = self._policy.conclude(output, state_BS, piece.sample_ids)
        last = self._network.num_blocks - 1
        answers = _answers(piece, range(len(piece)), value_B, score_B, last)
        if not self._stays:
            return Step(answers=answers, survivors=None)
        full_B = self._policy.full_answers(output, piece.sample_ids)
        seen = _results(piece, range(len(piece)), full_B, [math.nan] * len(piece), last, pack=True)
        return Step(answers=answers, survivors=None, seen=seen)

    def _observe(self, ramp: int, output: ExitOutput, state_BS: Tensor, piece: Piece) -> tuple[Answer, ...]:
        """Returns the ramp's results. Results that are not finite are left out: a broken ramp must not fail inputs."""
        score_B, value_B = self._policy.observe(ramp, output, state_BS, piece.sample_ids)
        seen = _results(piece, range(len(piece)), value_B, score_B.tolist(), ramp, pack=True)
        finite_B = _are_finite(value_B).tolist()
        return tuple(each for each, finite in zip(seen, finite_B, strict=True) if finite and not math.isnan(each.score))


def _check(network: Network, first: int, end: int, ramps: tuple[int, ...], policy: ExitPolicy) -> None:
    if not 0 <= first < end <= network.num_blocks:
        raise PlanError(
            f"blocks {first} to {end - 1} are not in the model, whose blocks are 0 to {network.num_blocks - 1}"
        )
    if unknown := sorted(set(ramps) - set(network.ramp_indices)):
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


def _answers(
    piece: Piece, positions: list[int] | range, value_K: Tensor, score_B: Tensor, block: int
) -> tuple[Answer, ...]:
    scores = score_B.tolist()
    if any(math.isnan(scores[k]) for k in positions):
        raise ArithmeticError(f"the exit after block {block} gave a score that is NaN")
    if value_K.is_floating_point() and not _are_finite(value_K).all():
        raise ArithmeticError(f"the exit after block {block} gave an answer that is not finite")
    return _results(piece, positions, value_K, scores, block)


def _results(
    piece: Piece,
    positions: list[int] | range,
    value_K: Tensor,
    scores: Sequence[float],
    block: int,
    *,
    pack: bool = False,
) -> tuple[Answer, ...]:
    """Returns the answers of the exit after `block` for the inputs at these positions. `scores`: of all inputs."""
    return tuple(
        Answer(sample_id=piece.sample_ids[k], value=value, score=scores[k], exit=block)
        for k, value in zip(positions, values_of(value_K.numpy(), pack=pack), strict=True)
    )


def _are_finite(value_B: Tensor) -> Tensor:
    """Returns for each answer whether all its numbers are finite, bool (B,)."""
    return value_B.reshape(len(value_B), -1).isfinite().all(1)


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
        """`segments`: the backend for all inputs but probes; None: the network itself.

        `memory`: the network's memory of sequences, if it has any.
        """
        self.memory = memory
        self._network = network
        self._backend: SegmentRunner = segments or network
        self.follow(policy)

    def from_wire(self, wire: WirePiece) -> Piece:
        return from_wire(self._network, wire, self._policy)

    def run(self, batch: Batch[Piece]) -> Iterator[Step[Piece]]:
        policy = self._policy  # it may be replaced while the batch runs
        width = policy.state_width(self._network.task.num_outputs)
        pieces = [self._in_state(member.payload, policy, width) for member in batch.members]
        return self._cut(policy, batch.split, probe=batch.probe).run(fuse(pieces))

    def follow(self, policy: ExitPolicy) -> None:
        self._policy = policy
        self._cuts: dict[tuple[int, Split, bool], Cut] = {}
        """Cuts by policy, because a batch may still run under the last one, by split, and by whether for probes."""

    def prepare(self, splits: Sequence[Split]) -> None:
        self._backend.prepare({segment: split.budget for split in splits for segment in split.segments()})

    def warm_up_pieces(self, split: Split, size: int) -> Piece:
        network, policy = self._network, self._policy
        lengths_B = np.full(size, min(warm_up_length(split, size), network.max_length), dtype=np.int32)
        return Piece(
            sample_ids=policy.warm_up_ids(size),
            next_block=split.first,
            lengths_B=lengths_B,
            tensors=arbitrary_tensors(network, split.first, lengths_B, np.random.default_rng(0)),
            state_BS=policy.initial_state(size, network.task.num_outputs, network.device),
        )

    def _cut(self, policy: ExitPolicy, split: Split, *, probe: bool) -> Cut:
        """Returns the cut of a split. Raises PlanError for blocks or ramps that the model does not have."""
        key, cuts = (id(policy), split, probe), self._cuts
        if key not in cuts:
            ramps = tuple(ramp for ramp in split.ramps if policy.can_decide(ramp))
            cut = Cut(self._network, split.first, split.end, ramps, policy, self._backend)
            # If the policy can observe no ramp, a probe runs like any other input.
            if probe and any(map(policy.can_observe, self._network.ramp_indices)):
                cut = cut.observing(self._network.ramp_indices)
            elif split.stays:
                cut = cut.observing(ramps)
            cuts[key] = cut
        return cuts[key]

    def _in_state(self, piece: Piece, policy: ExitPolicy, width: int) -> Piece:
        if piece.state_BS.shape[1] == width and (width == 0 or piece.state_BS.dtype == policy.state_dtype):
            return piece
        num_outputs, device = self._network.task.num_outputs, self._network.device
        return replace(piece, state_BS=policy.initial_state(len(piece), num_outputs, device))
