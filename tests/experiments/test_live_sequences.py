from __future__ import annotations

import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from experiments.live.sequences import Asked, _later, problem_of, simulated, with_calls
from optimizer.plan import stock_plan
from profiles.table import LatencyTable
from tests.deployments.ingress.completions.generating import Teller, listening
from tests.earlyexit.codecs.prompts import prompt_codec

PLAN = stock_plan(2, batch=4)
TABLE = LatencyTable(batches=(1, 4), block_s_NB=np.full((2, 2), 0.25), ramp_s_EB=np.zeros((1, 2)), length=1)
ASKED = [Asked(prompt=(5, 6), num_tokens=4, at_s=0.0), Asked(prompt=(7,), num_tokens=3, at_s=0.1)]


def test_what_calls_cost_is_part_of_every_batch_and_sequences_share_those() -> None:
    problem = problem_of(PLAN, (0,), TABLE)
    for call_s in (0.0, 0.125):
        found = simulated(with_calls(problem, call_s), PLAN, ASKED, [each.at_s for each in ASKED])
        assert found.said_K.tolist() == [4, 3]
        assert found.tpot_s_K.tolist() == pytest.approx([0.5 + call_s] * 2)


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
