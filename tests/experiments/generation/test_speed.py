from __future__ import annotations

import pytest

from earlyexit.families.decoder import Llama
from earlyexit.network.checkpoint import RampOptions, add_ramps
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.token import TokenTask
from experiments.generation.speed import Engine, Job, ScriptedPolicy, plans
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.earlyexit.families.decoders import NUM_BLOCKS, PAGE_TOKENS, backbone_of, hf_decoder

JOBS = [Job((7,), 4), Job((1, 200, 3), 3), Job(tuple(range(1, 10)), 5), Job((30, 31, 32), 1), Job((5, 6), 6)]
RAMP = 2


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    model = add_ramps(
        Llama().from_transformers(hf_decoder()),
        name="tiny",
        family="llama",
        codec={"name": "prompt", "max_length": 128},
        task=TokenTask(256),
        ramps=RampOptions(style="normed", at=(RAMP,), pooling="last"),
    ).requires_grad_(False)
    backbone_of(model).open_store(16, page_tokens=PAGE_TOKENS)
    return model


PLANS = plans(NUM_BLOCKS, (RAMP,), 2, ("compute", "copy"))


@pytest.mark.parametrize("plan", PLANS)
def test_every_sequence_generates_its_tokens_two_at_a_time_under_every_plan(model: EarlyExitModel, plan: str) -> None:
    splits, fill = PLANS[plan]
    engine = Engine(model, splits, ScriptedPolicy(0.5), byte_tokenizer(), fill=fill)
    finished = engine.run(JOBS, concurrency=2, chunk=4)
    assert sorted(len(each.token_s) for each in finished) == [1, 3, 4, 5, 6]
    assert all(each.due_s <= each.token_s[0] <= each.token_s[-1] for each in finished)
    assert backbone_of(model).memory.use().peak_pages <= 2 * 4
