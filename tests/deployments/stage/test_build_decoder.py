"""What a replica of a decoder keeps of its sequences: how many pages, and for which inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deployments.replica.build import build_runner, expect_no_loss, warm_up
from deployments.replica.host import StageHost
from deployments.settings import ServeSettings
from earlyexit.clock import MonotonicClock
from earlyexit.errors import InputError
from earlyexit.network.boundary import Encoded, Split, entering
from earlyexit.network.chain_network import open_memory, tokens_that_fit
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import save_model
from earlyexit.sequences.memory import PAGE_TOKENS, MemoryUse
from earlyexit.sequences.sequence import run_of
from earlyexit.tasks.token import TokenTask
from optimizer.plan import Plan, PolicySpec, Stage

VOCABULARY, NUM_BLOCKS = 32, 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_blocks": NUM_BLOCKS,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_size": 8,
    "intermediate_size": 16,
    "max_length": 4096,
}
STAGE = Stage(
    device="cpu",
    replicas=1,
    splits=(Split(first=0, end=1, batch=32, ramps=(0,)), Split(first=1, end=NUM_BLOCKS, batch=32, ramps=(1,))),
)
PLAN = Plan(stages=(STAGE,), policy=PolicySpec(name="confidence", thresholds=0.04))


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    ramps = RampOptions(at=(0, 1), pooling="last")
    return random_model(SIZES, family="llama", task=TokenTask(VOCABULARY), ramps=ramps).requires_grad_(False)


def test_a_replica_of_a_decoder_warms_up_and_reports_its_free_pages(model: EarlyExitModel, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    settings = ServeSettings(model=str(tmp_path), plan=PLAN, kv_tokens=100, kv_fill="copy")
    clock = MonotonicClock()
    runner = build_runner(settings, "cpu", None, clock=clock)
    times = warm_up(runner, [STAGE.splits], clock=clock)
    assert all(times.batch_s(split, 16.0) > 0 for split in STAGE.splits)
    host = StageHost(settings, "cpu", runner, clock, expect_no_loss)
    kept = MemoryUse(num_pages=100 // PAGE_TOKENS, page_tokens=PAGE_TOKENS)
    assert host.report(replica="r", node="n").memory == kept, "warming up leaves no pages in use"
    assert host.stats()["memory"]["num_pages"] == 6


def test_without_a_setting_the_free_memory_decides_how_many_tokens_are_kept() -> None:
    assert tokens_that_fit(10_000, 100, 1000, on_gpu=True) == 80
    assert tokens_that_fit(10_000, 100, 1000, on_gpu=False) == 25
    assert tokens_that_fit(1 << 40, 1 << 20, 1 << 40, on_gpu=False) == 4 << 10
    assert tokens_that_fit(1 << 40, 1, 128, on_gpu=False) == 256 * 128
    assert tokens_that_fit(0, 100, 1000, on_gpu=False) == PAGE_TOKENS


def test_an_input_that_is_no_sequence_is_refused_with_what_to_do(model: EarlyExitModel) -> None:
    memory = open_memory(model, 1024, "compute", 0)
    assert memory is not None
    ids, run = np.arange(2, dtype=np.int32), np.array([run_of(0, 0, 4, 2)], np.int32)
    [error] = memory.admit(entering(["a"], [Encoded(2, (ids, run))]), [0])
    assert isinstance(error, InputError)
    assert "ask it to generate" in str(error)
