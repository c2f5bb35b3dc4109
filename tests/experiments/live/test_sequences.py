from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from experiments.live.sequences import (
    Asked,
    Ran,
    Told,
    _later,
    cost_of_call,
    mean_of,
    percentiles,
    problem_of,
    simulated,
    slowed,
)
from optimizer.plan import stock_plan
from profiles.table import LatencyTable
from tests.deployments.ingress.completions.generating import Teller, listening
from tests.earlyexit.codecs.prompts import prompt_codec

PLAN = stock_plan(2, batch=4)
TABLE = LatencyTable(batches=(1, 4), block_s_NB=np.full((2, 2), 0.25), ramp_s_EB=np.zeros((1, 2)), length=1)
SLOWER = replace(TABLE, block_s_NB=TABLE.block_s_NB * 2)
ASKED = [Asked(prompt=(5, 6), num_tokens=4, at_s=0.0), Asked(prompt=(7,), num_tokens=3, at_s=0.1)]


def test_sequences_share_batches_and_calls_cost_what_they_do() -> None:
    problem = problem_of(PLAN, (0,), TABLE, replace(TABLE, length=4), ASKED)
    for call_s in (0.0, 0.02):
        found, ran = simulated(problem, PLAN, ASKED, [each.at_s for each in ASKED], call_s)
        assert found.said_K.tolist() == [4, 3]
        assert found.tpot_s_K.tolist() == pytest.approx([0.5 + call_s] * 2)
        assert ran.inputs == 7
        assert ran.seconds == pytest.approx(0.5 * ran.batches)


def test_live_and_played_seconds_are_told_beside_each_other() -> None:
    problem = problem_of(PLAN, (0,), TABLE, replace(TABLE, length=4), ASKED)
    found, _ = simulated(problem, PLAN, ASKED, [each.at_s for each in ASKED], 0.0)
    rows = percentiles(np.array([0.4, 0.6, 0.8]), np.array([1.0, 1.0]), found)
    assert rows["time per token p50"] == pytest.approx((0.6, 0.5))
    assert rows["time per token p99"][0] > 0.79
    assert rows["first token p50"] == pytest.approx((1.0, float(np.median(found.ttft_s_K))))
    assert len(rows) == 4


def test_a_slower_machine_takes_longer_for_everything() -> None:
    problem = problem_of(PLAN, (0,), mean_of(TABLE, SLOWER), SLOWER, ASKED)
    assert problem.latency["cpu"].block_s_NB.tolist() == np.full((2, 2), 0.375).tolist()
    found, ran = simulated(slowed(problem, 2.0), PLAN, ASKED, [each.at_s for each in ASKED], 0.0)
    assert ran.seconds / ran.batches > 0.375 * 4 - 1e-9
    assert found.said_K.tolist() == [4, 3]


def test_a_call_costs_what_batches_of_the_same_sequences_do_not() -> None:
    alone = [
        Told(asked_s=0.0, first_s=1.5, last_s=3.5, num_tokens=2),
        Told(asked_s=4.0, first_s=5, last_s=6, num_tokens=2),
    ]
    assert cost_of_call(alone, Ran(batches=4, inputs=4, seconds=5.0)) == 0.125
    assert cost_of_call(alone, Ran(batches=4, inputs=4, seconds=6.0)) == 0.0


async def test_a_caller_notes_when_tokens_come(tmp_path: Path) -> None:
    teller = Teller(codec=prompt_codec(tmp_path), goes_on=True)
    async with (
        listening(teller) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as http,
    ):
        began_s = time.perf_counter()
        told = await _later(http, "tales", ASKED[0], began_s)
        assert 0 <= told.asked_s <= told.first_s <= told.last_s <= time.perf_counter() - began_s
    assert (told.num_tokens, teller.asked[0].ignores_ends, teller.asked[0].prompt) == (4, True, (5, 6))
