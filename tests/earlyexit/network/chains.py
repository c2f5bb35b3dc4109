"""Chains of small text models, their answers offline, and their answers with any cuts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from earlyexit.network.boundary import Answer, Encoded, Split, WirePiece, entry_piece
from earlyexit.network.checkpoint import RampOptions
from earlyexit.network.model import ChainNetwork, Cut, EarlyExitModel, ModelInfo, SegmentRunner, from_wire
from earlyexit.network.piece import Piece
from earlyexit.policies.base import ExitOutput, ExitPolicy
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.network.cuts import in_random_order
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs


def renamed(model: EarlyExitModel, name: str) -> EarlyExitModel:
    info: ModelInfo = replace(model.info, name=name)
    model.info = info
    return model


def spread(model: EarlyExitModel) -> EarlyExitModel:
    """Makes the exits disagree: the logits of each are spread around zero over random inputs."""
    outputs = exit_outputs(model, random_inputs(np.random.default_rng(0), [9] * 64, least=1))
    for block, logits_NC in outputs.items():
        head = model.exit_head(block)
        assert isinstance(head.classifier, torch.nn.Linear)
        scale = 1 / logits_NC.std(0)[:, None]
        head.classifier.bias.sub_(logits_NC.mean(0)).mul_(scale[:, 0])
        head.classifier.weight.mul_(scale)
    return model


def chained(*lengths: int, seed: int = 1, width: int = 32, at: Sequence[Sequence[int]] | None = None) -> ChainNetwork:
    """Returns networks of these numbers of blocks and different widths. `at`: their ramps; None: after each block."""
    members = [
        renamed(
            spread(
                small(
                    seed=seed + place,
                    num_blocks=length,
                    hidden_size=width + 8 * place,
                    ramps=RampOptions() if at is None else RampOptions(at=tuple(at[place])),
                )
            ),
            f"m{place}",
        )
        for place, length in enumerate(lengths)
    ]
    return ChainNetwork(members)


@dataclass(frozen=True)
class Inputs:
    """The inputs of every network of a chain: each network has other tokens, and another number of tokens."""

    of_network: tuple[tuple[Encoded, ...], ...]

    def __len__(self) -> int:
        return len(self.of_network[0])

    @property
    def ids(self) -> list[str]:
        return [f"i{k}" for k in range(len(self))]

    def wire(self, network: int, first: int, ids: Sequence[str]) -> WirePiece:
        """Returns some inputs before the first block of a network."""
        rows = [self.of_network[network][int(each[1:])] for each in ids]
        return replace(entry_piece(ids, rows), next_block=first)


def inputs_for(network: ChainNetwork, *, count: int = 20, seed: int = 7) -> Inputs:
    rng = np.random.default_rng(seed)
    encodings = [random_inputs(rng, rng.integers(2, 16, size=count).tolist(), least=1) for _ in network.members]
    return Inputs(tuple(map(tuple, encodings)))


def offline(
    network: ChainNetwork, policy: ExitPolicy, inputs: Inputs, ramps: Sequence[int], used: Sequence[int]
) -> tuple[dict[str, Answer], dict[tuple[str, int], tuple[float, int]]]:
    """Returns the answers of each network by itself, and (score, answer) of every exit of the used networks."""
    chain, last = network.chain, network.num_blocks - 1
    outputs: dict[int, torch.Tensor] = {}
    for place in used:
        alone = exit_outputs(network.members[place], inputs.of_network[place])
        outputs |= {chain.starts[place] + block: of_block for block, of_block in alone.items()}
    answers: dict[str, Answer] = {}
    said: dict[tuple[str, int], tuple[float, int]] = {}
    for k, sample_id in enumerate(inputs.ids):
        state = policy.initial_state(1, network.task.num_outputs, network.device)
        for block in sorted(outputs):
            of_exit = ExitOutput(network.task, outputs[block][k : k + 1])
            if block == last:
                value_B, score_B = policy.conclude(of_exit, state, (sample_id,))
                leaves = True
            else:
                if policy.can_observe(block):
                    score, value = policy.observe(block, of_exit, state, (sample_id,))
                    said[sample_id, block] = (float(score[0]), int(value[0]))
                if block not in ramps:
                    continue
                verdict = policy.decide(block, of_exit, state, (sample_id,))
                state, leaves = verdict.state_BS, bool(verdict.leave_B[0])
                value_B = of_exit.value_B if verdict.value_B is None else verdict.value_B
                score_B = verdict.score_B
            if leaves and sample_id not in answers:
                answers[sample_id] = Answer(
                    sample_id=sample_id, value=int(value_B[0]), score=float(score_B[0]), exit=block
                )
    return answers, said


def follow(
    network: ChainNetwork,
    policy: ExitPolicy,
    inputs: Inputs,
    splits: Sequence[Split],
    *,
    seed: int = 0,
    segments: SegmentRunner | None = None,
    kind: str = "plain",
) -> tuple[dict[str, Answer], dict[tuple[str, int], Answer]]:
    """Splits run in random order on random handfuls of waiting inputs; at a network's end they are encoded anew.

    `kind`: `plain`, `stay`, or `probe`. Gives the answers and what was seen.
    """
    cuts = {split.first: _cut(network, policy, split, segments, kind) for split in splits}
    firsts, starts = sorted(cuts), network.chain.starts
    answers: dict[str, Answer] = {}
    seen: dict[tuple[str, int], Answer] = {}

    def goes_on(survivors: Piece) -> tuple[int, list[Piece]]:
        if survivors.next_block not in starts:
            return survivors.next_block, from_wire(network, survivors.to_wire(), policy).singles()
        assert survivors.tensors == ()
        to = next(each for each in firsts if each >= survivors.next_block)
        wire = inputs.wire(network.chain.network_of(to), to, survivors.sample_ids)
        return to, _enter(network, policy, wire, survivors)

    wire = inputs.wire(network.chain.network_of(firsts[0]), firsts[0], inputs.ids)
    waiting = {firsts[0]: list(_enter(network, policy, wire, None))}
    for step in in_random_order(cuts, waiting, goes_on, random.Random(seed)):
        assert kind != "plain" or not answers.keys() & {answer.sample_id for answer in step.answers}
        answers = {answer.sample_id: answer for answer in step.answers} | answers  # the first one counts
        seen |= {(each.sample_id, each.exit): each for each in step.seen}
    return answers, seen


def _enter(network: ChainNetwork, policy: ExitPolicy, wire: WirePiece, before: Piece | None) -> list[Piece]:
    if before is not None:
        wire = replace(wire, state_BS=before.to_wire().state_BS)
    return from_wire(network, wire, policy).singles()


def _cut(network: ChainNetwork, policy: ExitPolicy, split: Split, segments: SegmentRunner | None, kind: str) -> Cut:
    cut = Cut(network, split.first, split.end, split.ramps, policy, segments)
    of_kind: Mapping[str, Cut] = {
        "plain": cut,
        "stay": cut.observing(split.ramps),
        "probe": cut.observing(network.ramp_indices),
    }
    return of_kind[kind]
