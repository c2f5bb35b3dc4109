"""A small decoder with random weights, and sequences that it runs in handfuls, cut anyhow."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from earlyexit.families.base import Pretrained
from earlyexit.families.decoder import DecoderBackbone, Llama
from earlyexit.network.boundary import Answer, PackedArray, entry_piece
from earlyexit.network.checkpoint import RampOptions
from earlyexit.network.model import EarlyExitModel, from_wire
from earlyexit.network.piece import Piece
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.ramps import RampStyle
from earlyexit.sequences.kv import KvStore
from earlyexit.sequences.sequence import Sampling, StepResult, TextStream, TokenSequence
from earlyexit.tasks.token import TokenTask
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.earlyexit.network.cuts import cuts_of, in_random_order
from tests.earlyexit.network.models import ramped

NUM_BLOCKS = 5
VOCABULARY = 256
NOBODY = ConfidencePolicy(2.0)
"""No exit is ever so sure."""
SOMETIMES = ConfidencePolicy(0.4)
"""Between the confidences of the random ramps: some tokens leave at each."""
PROMPTS = ([7], [1, 200, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1], [30, 31, 32, 33, 34])
PAGE_TOKENS = 4


def hf_decoder(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Five blocks whose answers differ from token to token: its weights are three times what they are born with."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval().requires_grad_(False)
    for weights in model.parameters():
        if weights.ndim > 1:
            weights.mul_(3.0)
    return model


def decoder(hf_model: LlamaForCausalLM, *, num_pages: int = 64) -> EarlyExitModel:
    """Returns our model of the same weights, with ramps after blocks 1 and 2 that answer at random."""
    torch.manual_seed(1)
    model = model_of(Llama().from_transformers(hf_model), ramps=(1, 2), num_pages=num_pages)
    for ramp in (1, 2):
        classifier = model.exit_head(ramp).classifier
        assert isinstance(classifier, torch.nn.Linear)
        classifier.weight.mul_(100.0)
    return model


def model_of(
    pretrained: Pretrained,
    *,
    ramps: tuple[int, ...],
    num_pages: int = 64,
    family: str = "llama",
    style: RampStyle = "light",
    seed: int | None = None,
) -> EarlyExitModel:
    """Returns a model with untrained ramps and a store of its own."""
    assert isinstance(pretrained.backbone, DecoderBackbone)
    task, options = TokenTask(pretrained.backbone.config.vocab_size), RampOptions(at=ramps, style=style, pooling="last")
    codec = {"name": "text", "max_length": 128}
    model = ramped(pretrained, family, task, codec=codec, ramps=options, seed=seed, name="tiny")
    backbone_of(model).open_store(num_pages, page_tokens=PAGE_TOKENS)
    return model


def backbone_of(model: EarlyExitModel) -> DecoderBackbone:
    assert isinstance(model.backbone, DecoderBackbone)
    return model.backbone


def sequence(prompt: Sequence[int], *, chunk: int = 64, stops: Sequence[str] = (), **changes: Any) -> TokenSequence:
    """Returns a sequence of twelve tokens, the most likely ones, unless `changes` differ."""
    options: dict[str, Any] = {"max_tokens": 12, "max_length": 128, "ends": (), "sampling": Sampling()}
    text = TextStream(byte_tokenizer(), prompt, stops)
    return TokenSequence(prompt, text, chunk=chunk, **options | changes)


def say(sequence: TokenSequence, tokens: Sequence[int]) -> None:
    """Answers a sequence's steps with these tokens."""
    sequence.begin(1)
    for token in tokens:
        while sequence.answered(np.array([[token], [0.0]]), 0) is None:
            pass


@dataclass(kw_only=True)
class Handfuls:
    """Runs sequences to their ends: splits in random order, on random handfuls of the inputs that wait for them."""

    model: EarlyExitModel
    policy: ExitPolicy = NOBODY
    bounds: Sequence[int] = (0, NUM_BLOCKS)
    ramps: Sequence[int] = ()
    seed: int = 0

    def run(self, sequences: Mapping[int, TokenSequence], *, end: bool = True) -> dict[int, list[StepResult]]:
        """Returns the steps of each sequence, by its number; `end`: whether sequences return their pages."""
        cuts = cuts_of(self.model, self.policy, self.bounds, self.ramps)
        said: dict[int, list[StepResult]] = {number: [] for number in sequences}
        for number, each in sequences.items():
            each.begin(number)
        waiting = {0: [self._piece(number, each) for number, each in sequences.items()]}

        def goes_on(survivors: Piece) -> tuple[int, list[Piece]]:
            return survivors.next_block, survivors.singles()

        for step in in_random_order(cuts, waiting, goes_on, random.Random(self.seed)):
            for answer in step.answers:
                number = int(answer.sample_id)
                if self._answered(sequences[number], said[number], answer):
                    waiting[0].append(self._piece(number, sequences[number]))
                elif end:
                    backbone_of(self.model).memory.end(number)
        return said

    def _piece(self, number: int, each: TokenSequence) -> Piece:
        (piece,) = from_wire(self.model, entry_piece([str(number)], [each.step()]), self.policy).singles()
        return piece

    def _answered(self, each: TokenSequence, said: list[StepResult], answer: Answer) -> bool:
        assert isinstance(answer.value, PackedArray)
        found = each.answered(answer.value.numpy(), answer.exit)
        said += [] if found is None else [found]
        return each.ended is None


def held(kv: KvStore, block: int, sequence: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence's first tokens in a block, each (tokens, K, d)."""
    places = torch.from_numpy(kv.place_of(sequence, tokens))
    return kv._keys[block][places], kv._values[block][places]
