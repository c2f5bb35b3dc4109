"""What thresholds do to sequences that are really generated, on a small decoder whose ramps say anything."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from earlyexit.checkpoint import RampOptions, add_ramps
from earlyexit.families.llama import Llama
from earlyexit.model import EarlyExitModel
from earlyexit.offline import generate
from earlyexit.tasks.token import TokenTask
from earlyexit.train import no_progress
from experiments.generation.guarantee import Judge, asked_of, leaving, nats
from offramp.jobs.token_calibration import record_generations
from optimizer.sequences import differing, of_sequences
from tests.earlyexit.decoders import VOCABULARY, hf_decoder

ANSWER, NUM_PROMPTS, RAMPS = 10, 16, (1, 2)


@pytest.fixture(scope="module")
def hf_model() -> LlamaForCausalLM:
    return hf_decoder(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model(hf_model: LlamaForCausalLM) -> EarlyExitModel:
    torch.manual_seed(5)
    return add_ramps(
        Llama().from_transformers(hf_model),
        name="tiny",
        family="llama",
        codec={"name": "prompt", "max_length": 128},
        task=TokenTask(VOCABULARY),
        ramps=RampOptions(at=RAMPS, style="adapted", pooling="last"),
    ).requires_grad_(False)


@pytest.fixture(scope="module")
def judge(model: EarlyExitModel) -> Judge:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 9))] for _ in range(NUM_PROMPTS)]
    records = record_generations(model, prompts, "foreseen", max_tokens=ANSWER, progress=no_progress)
    return Judge.of(model, prompts, records, ANSWER)


def test_only_sequences_that_may_part_from_the_full_model_are_generated_to_tell_all_losses(judge: Judge) -> None:
    chosen = np.arange(NUM_PROMPTS)[::-2].copy()
    scores_NR = of_sequences(judge.records, chosen).scores_NR
    thresholds = {ramp: float(np.quantile(scores_NR[:, k], 0.97)) for k, ramp in enumerate(RAMPS)}
    bounded_S, losses_S = judge.losses(chosen, thresholds)
    early = generate(judge.model, [judge.prompts[k] for k in chosen], leaving(judge.asked, thresholds, "compute"))
    pairs = [(each.answer, judge.full[k].answer) for k, each in zip(chosen, early, strict=True)]
    assert losses_S.tolist() == [differing(*pair) for pair in pairs]
    assert 0 < np.count_nonzero(bounded_S) < len(chosen)
    assert losses_S.sum() > 0
    assert (losses_S <= bounded_S + 1e-9).all()


def test_the_full_model_says_how_likely_it_holds_an_answer(hf_model: LlamaForCausalLM, judge: Judge) -> None:
    said = generate(judge.model, judge.prompts[:3], asked_of(judge.model, ANSWER))
    logits = [hf_model(torch.tensor([each.tokens])).logits[0, len(each.prompt) - 1 : -1] for each in said]
    wanted = [float(F.cross_entropy(rows, torch.tensor(each.answer))) for rows, each in zip(logits, said, strict=True)]
    assert nats(judge.model, said).tolist() == pytest.approx(wanted, abs=1e-4)
