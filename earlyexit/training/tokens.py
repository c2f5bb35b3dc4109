"""Training of a decoder's ramps on its own answers, at every token of texts, with blocks and head frozen.

The target at a token is the full model's answer there, whatever the text's next token is. Adapters learn it by cross
entropy over the tokens that occur, a few thousand of SmolLM2's 49,152. Then each ramp's classifier learns when the
ramp's answer equals the full model's (Schuster et al. 2022, CALM, section 3.4). Legend: N tokens of all texts, D hidden
size, V tokens of the vocabulary, W those that occur.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Layout
from earlyexit.ramps.heads import AdaptedRamp, BiasedVocabularyHead, NormedRamp, VocabularyHead
from earlyexit.sequences.offline import admitted_piece, batches, decoder_of
from earlyexit.sequences.sequence import step_of
from earlyexit.training.ramps import Descent, TrainOptions, draw_anew

TOKEN_OPTIONS = TrainOptions(epochs=10, batch=256, learning_rate=2e-3, weight_decay=0.01)
CLASSIFIER_EPOCHS = 6
ROWS = 256
"""Rows of logits that are computed at once: 50 MB with SmolLM2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStates:
    """The inputs of exits for every token of texts, (N, D) by block, and the full model's answers, (N,)."""

    states: Mapping[int, Tensor]
    full_N: Tensor


@torch.no_grad()
def token_states(
    model: EarlyExitModel, texts: Sequence[Sequence[int]], given: Sequence[int], options: TrainOptions
) -> TokenStates:
    """Returns the states of texts of token ids. Of a prompt, a text's first `given` tokens, only the last counts."""
    last = model.num_blocks - 1
    kept: dict[int, list[Tensor]] = {block: [] for block in (*model.ramp_indices, last)}
    done, prompts = 0, iter(given)
    for batch in batches(model, texts, max_tokens=0):
        lengths = [(len(each.prompt), next(prompts)) for each in batch]
        runs = zip(batch, lengths, strict=True)
        steps = {k: step_of(each.prompt, k, 0, length, prompt) for k, (each, (length, prompt)) in enumerate(runs, 1)}
        piece = admitted_piece(model, steps)
        layout, tensors = Layout(piece.lengths_B, model.device), piece.tensors
        wanted_N = torch.cat([torch.arange(length) >= prompt - 1 for length, prompt in lengths])
        first = 0
        for block in kept:
            tensors = model.run_blocks(first, block + 1, tensors, layout)
            kept[block].append(tensors[0][wanted_N].float())
            first = block + 1
        done += len(batch)
        options.progress("states", done, len(texts))
    states = {block: torch.cat(parts) for block, parts in kept.items()}
    return TokenStates(states=states, full_N=_said(model.head, states[last]))


def train_token_ramps(model: EarlyExitModel, learned: TokenStates, options: TrainOptions = TOKEN_OPTIONS) -> None:
    """Train all ramps. Norms start as copies of the last norm, adapters at zero, and classifiers at random by the seed.

    A model whose blocks end in norms of their own, such as Marian, has no last norm; norms then start as ones.
    """
    ramps = {block: _shared(model.exit_head(block)) for block in model.ramp_indices}
    for block, ramp in ramps.items():
        draw_anew(ramp, options.seed + block)
        norm = decoder_of(model).norm
        with torch.no_grad():
            if isinstance(norm, torch.nn.RMSNorm):
                ramp.norm.weight.copy_(norm.weight)
            if isinstance(ramp, AdaptedRamp):
                ramp.widen.weight.zero_()
    words_W, target_N = torch.unique(learned.full_N, return_inverse=True)
    assert isinstance(model.head, VocabularyHead)
    some_WD = model.head.classifier.weight[words_W].float()
    bias_W = model.head.bias_V[words_W].float() if isinstance(model.head, BiasedVocabularyHead) else None

    def answers(rows: Tensor) -> Tensor:
        return torch.stack(
            [
                F.cross_entropy(
                    F.linear(ramp.norm(ramp.adapted(learned.states[block][rows])), some_WD, bias_W), target_N[rows]
                )
                for block, ramp in ramps.items()
            ]
        ).sum()

    spoken = [p for ramp in ramps.values() for name, p in ramp.named_parameters() if not name.startswith("sureness")]
    Descent(spoken, len(target_N), options).run(answers, "ramps")
    with torch.no_grad():
        right = {block: (_said(ramp, learned.states[block]) == learned.full_N).float() for block, ramp in ramps.items()}

    def sureness(rows: Tensor) -> Tensor:
        losses = [
            F.binary_cross_entropy_with_logits(ramp.foresee(learned.states[block][rows]), right[block][rows])
            for block, ramp in ramps.items()
        ]
        return torch.stack(losses).sum()

    unsure = [p for ramp in ramps.values() for p in ramp.sureness.parameters()]
    Descent(unsure, len(target_N), replace(options, epochs=CLASSIFIER_EPOCHS)).run(sureness, "classifiers")
    model.eval()


def _shared(ramp: object) -> NormedRamp:
    assert isinstance(ramp, NormedRamp), "a decoder's ramps share its head"
    return ramp


@torch.no_grad()
def _said(head: VocabularyHead | NormedRamp | torch.nn.Module, states_ND: Tensor) -> Tensor:
    """Returns the answers of an exit, (N,)."""
    assert isinstance(head, VocabularyHead | NormedRamp)
    return torch.cat([head.classify(rows).argmax(-1) for rows in torch.split(states_ND, ROWS)])
