"""Sequences that come whenever they come: all are made, on a clock that skips what nobody waits for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from earlyexit.checkpoint import RampOptions, add_ramps
from earlyexit.families import find_family
from earlyexit.model import EarlyExitModel
from earlyexit.offline import NOBODY
from earlyexit.policies.foresight import ForeseenPolicy
from earlyexit.split import Split
from earlyexit.tasks.token import TokenTask
from experiments.generation.peers import Job, TokenTimes
from experiments.generation.slos import Slos
from experiments.generation.speed import Engine
from experiments.kit import ProcessorClock
from experiments.peers.search import Bounds, Search
from experiments.translation.sustained import Side, searched, slos_of
from tests.earlyexit.decoders import NUM_BLOCKS, PAGE_TOKENS, VOCABULARY, backbone_of, byte_tokenizer
from tests.earlyexit.encoder_decoders import PAD, hf_seq2seq

JOBS = [Job((7,), 4), Job((1, 200, 3), 3), Job(tuple(range(1, 10)), 5)]
RAMPS = (1, 2)


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    model = add_ramps(
        find_family("t5").from_transformers(hf_seq2seq("t5")),
        name="tiny",
        family="t5",
        codec={"name": "prompt", "max_length": 128},
        task=TokenTask(VOCABULARY, start=PAD["t5"]),
        ramps=RampOptions(style="adapted", at=RAMPS, pooling="last"),
    ).requires_grad_(False)
    backbone_of(model).open_store(32, page_tokens=PAGE_TOKENS)
    return model


@pytest.mark.parametrize("bounds", [(0, NUM_BLOCKS), (0, 2, NUM_BLOCKS)], ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.5, 2.0])
def test_every_sequence_is_made_whenever_it_comes(
    model: EarlyExitModel, bounds: tuple[int, ...], threshold: float
) -> None:
    splits = [
        Split(first=first, end=end, batch=4, ramps=tuple(ramp for ramp in RAMPS if first <= ramp < end))
        for first, end in pairwise(bounds)
    ]
    clock = ProcessorClock()
    policy = ForeseenPolicy(dict.fromkeys(RAMPS, threshold))
    side = Side(Engine(model, splits, policy, byte_tokenizer(), clock), clock, "compute")
    begun_s = clock.now_s()
    made = side.serve(JOBS, [0.0, 0.0, 1000.0])
    assert sorted(len(each.said_s) for each in made) == [3, 4, 5]
    assert all(each.due_s <= each.said_s[0] for each in made)
    assert 1000 <= made[-1].due_s - begun_s < 1001
    assert not backbone_of(model).kv.sequences


def test_slos_and_rates_are_told_by_what_stock_does(model: EarlyExitModel) -> None:
    clock = ProcessorClock()
    splits = [Split(first=0, end=NUM_BLOCKS, batch=4)]
    stock = Side(Engine(model, splits, NOBODY, byte_tokenizer(), clock), clock, "compute")
    slos, capacity = slos_of(stock, JOBS, 1e6)
    assert min(slos.ttft_s, slos.tpot_s) > 1
    assert capacity > 0
    bounds = Bounds(low_per_s=capacity / 2, high_per_s=2 * capacity)
    found, tried = searched(stock, JOBS, slos, Search(start_per_s=capacity, bounds=bounds, growth=3.0))
    assert (found.best_per_s, found.ending) == (2 * capacity, "highest")
    assert [(each.rate, each.kept) for each in tried] == [(capacity, 1.0), (2 * capacity, 1.0)]


def test_who_keeps_both_slos_counts() -> None:
    made = [TokenTimes(0.0, [1.0, 1.5, 2.0]), TokenTimes(0.0, [1.0, 3.0, 5.0]), TokenTimes(0.0, [3.0, 3.5])]
    assert Slos(ttft_s=1.5, tpot_s=1.0).kept(made) == pytest.approx(1 / 3)
