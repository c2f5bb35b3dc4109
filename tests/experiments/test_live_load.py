from __future__ import annotations

import asyncio
import random
from itertools import count

import numpy as np
import pytest

from earlyexit.clock import ManualClock
from experiments.live.load import ClosedLoop
from experiments.live.phases import (
    INPUTS_PER_REQUEST,
    Phase,
    closed_keys,
    open_schedule,
    phase_at,
    request_index,
    starts_of,
)
from offramp.client.protocol import Outcome, Reply
from offramp.load.generator import Body, Generator
from offramp.load.report import RequestRecord
from offramp.load.workload import LoadConfig

EASY, HARD = ("e",) * 16, ("h",) * 16


def open_phases() -> list[Phase]:
    return [
        Phase(name="easy", seconds=10.0, keys=EASY, rate_per_s=80.0),
        Phase(name="hard", seconds=5.0, keys=HARD, rate_per_s=160.0),
        Phase(name="nothing", seconds=2.0, keys=HARD, rate_per_s=0.0),
    ]


def test_phases_follow_each_other() -> None:
    assert starts_of(open_phases()) == (0.0, 10.0, 15.0)
    assert [phase_at(open_phases(), at_s) for at_s in (0.0, 9.9, 10.0, 15.5, 17.0)] == [0, 0, 1, 2, None]


def test_an_open_loop_sends_each_phase_its_own_mix_at_its_own_rate() -> None:
    schedule = open_schedule(open_phases(), np.random.default_rng(0))
    assert list(schedule.send_s) == sorted(schedule.send_s)
    assert len(schedule.keys) == INPUTS_PER_REQUEST * len(schedule.send_s)
    per_phase = np.histogram(schedule.send_s, [0, 10, 15, 17])[0]
    # 80 inputs/s are 10 requests/s for 10 s, 160 are 20 for 5 s: 100 each, give or take three deviations of 10.
    assert per_phase[:2] == pytest.approx([100, 100], abs=30)
    assert per_phase[2] == 0
    assert schedule.keys == ("e",) * int(8 * per_phase[0]) + ("h",) * int(8 * per_phase[1])


def test_the_same_seed_sends_the_same() -> None:
    first, again = (open_schedule(open_phases(), np.random.default_rng(3)) for _ in range(2))
    assert first == again


def test_phases_of_one_mix_go_on_in_it() -> None:
    keys = tuple(map(str, range(24)))
    phases = [Phase(name="trace", seconds=1.0, keys=keys, rate_per_s=80.0) for _ in range(3)]
    sent = open_schedule(phases, np.random.default_rng(0)).keys
    assert len(sent) > 24, "some 30 requests of 8"
    assert sent == tuple(str(k % 24) for k in range(len(sent)))


def test_in_a_closed_loop_every_phase_has_keys_of_its_own() -> None:
    phases = [Phase(name=keys[0], seconds=1.0, keys=keys, workers=2) for keys in (EASY, HARD)]
    assert closed_keys(phases) == EASY + HARD
    # 16 keys are 2 requests of 8: a phase's third request begins anew.
    assert [request_index(1, turn, 16) for turn in range(3)] == [2, 3, 2]


async def test_closed_workers_send_what_the_phase_of_the_moment_sends_and_pause_after_refusals() -> None:
    clock = ManualClock()
    bodies: list[list[str]] = []

    async def post(request_id: str, body: Body, timeout_s: float) -> Outcome:
        assert isinstance(body, dict)
        ids = body["ids"]
        assert isinstance(ids, list)
        bodies.append(ids)
        clock.advance(1.0)
        await asyncio.sleep(0)
        if len(bodies) == 1:
            return Reply(status=503, payload={"error": {"kind": "overloaded", "message": "later"}})
        answer = {"label": "positive", "score": 1.0, "exit": 3}
        return Reply(status=200, payload={"outputs": [answer] * len(ids), "request_id": request_id})

    paused_s: list[float] = []

    async def sleep(seconds: float) -> None:
        paused_s.append(seconds)
        clock.advance(seconds)

    phases = (
        Phase(name="easy", seconds=3.0, keys=EASY, workers=1),
        Phase(name="hard", seconds=2.0, keys=HARD, workers=1),
    )
    keys = closed_keys(phases)
    config = LoadConfig(
        url="", inputs=("so",) * 32, keys=keys, num_requests=4, concurrency=1, inputs_per_request=8, slo_s=1.0
    )
    generator = Generator(config=config, post=post, rng=random.Random(0), clock=clock, sleep=sleep)
    records: list[RequestRecord] = []
    loop = ClosedLoop(phases=phases, generator=generator, start_s=0.0, records=records, turns=[count() for _ in phases])
    num_sent = await loop.run()
    # Sent at 0 (refused; a pause of 0.1), 1.1 and 2.1 of the easy mix, at 3.1 and 4.1 of the hard one.
    assert [body[0] for body in bodies] == ["e", "e", "e", "h", "h"]
    assert num_sent == len(records) == 5
    assert [record.error for record in records] == ["overloaded", None, None, None, None]
    assert paused_s == [pytest.approx(0.1)]
