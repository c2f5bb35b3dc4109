from __future__ import annotations

import numpy as np
import pytest

from experiments.live.load import INPUTS_PER_REQUEST, Phase, closed_keys, closed_turns, open_schedule, starts_of

EASY, HARD = ("e",) * 16, ("h",) * 16


def open_phases() -> list[Phase]:
    return [
        Phase(name="easy", seconds=10.0, keys=EASY, rate_per_s=80.0),
        Phase(name="hard", seconds=5.0, keys=HARD, rate_per_s=160.0),
        Phase(name="nothing", seconds=2.0, keys=HARD, rate_per_s=0.0),
    ]


def test_phases_follow_each_other() -> None:
    assert starts_of(open_phases()) == (0.0, 10.0, 15.0)


def test_an_open_loop_sends_each_phase_its_own_mix_at_its_own_rate() -> None:
    send_s, keys = open_schedule(open_phases(), np.random.default_rng(0))
    assert list(send_s) == sorted(send_s)
    assert len(keys) == INPUTS_PER_REQUEST * len(send_s)
    per_phase = np.histogram(send_s, [0, 10, 15, 17])[0]
    # 80 inputs/s are 10 requests/s for 10 s, 160 are 20 for 5 s: 100 each, give or take three deviations of 10.
    assert per_phase[:2] == pytest.approx([100, 100], abs=30)
    assert per_phase[2] == 0
    assert keys == ("e",) * int(8 * per_phase[0]) + ("h",) * int(8 * per_phase[1])


def test_the_same_seed_sends_the_same() -> None:
    first, again = (open_schedule(open_phases(), np.random.default_rng(3)) for _ in range(2))
    assert first == again


def test_phases_of_one_mix_go_on_in_it() -> None:
    keys = tuple(map(str, range(24)))
    phases = [Phase(name="trace", seconds=1.0, keys=keys, rate_per_s=80.0) for _ in range(3)]
    _, sent = open_schedule(phases, np.random.default_rng(0))
    assert len(sent) > 24, "some 30 requests of 8"
    assert sent == tuple(str(k % 24) for k in range(len(sent)))


def test_a_closed_loop_sends_what_the_phase_of_the_moment_sends_until_the_last_ends() -> None:
    phases = [
        Phase(name=keys[0], seconds=seconds, keys=keys, workers=2) for keys, seconds in ((EASY, 3.0), (HARD, 2.0))
    ]
    assert closed_keys(phases) == EASY + HARD
    now_s, sent = iter([0.0, 1.0, 2.9, 3.0, 4.9, 5.0]), list[int]()
    # 16 keys are 2 requests of 8: a phase's third request begins anew.
    assert list(closed_turns(phases, lambda: next(now_s), sent)) == sent == [0, 1, 0, 2, 3]
