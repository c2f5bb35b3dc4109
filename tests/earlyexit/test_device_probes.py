from __future__ import annotations

from earlyexit.device import Device
from earlyexit.split import Split
from tests.earlyexit.letters import EVERYONE, Bench, FailsLater, Part, members, one_split


def test_an_answered_probe_stays_until_the_end_and_exits_say_what_they_saw() -> None:
    bench = one_split([Part(1, 1, "a"), Part(1, 4, EVERYONE)])
    a, b = probes = members("ab", probe=True)
    assert bench.run(probes) == [
        "1.000 look a at 0, look b at 0, answer a after 0, stays",
        "2.000 look a at 3, look b at 3, answer a after 3, answer b after 3",
    ]
    assert (a.compute_s, b.compute_s) == (2.0, 2.0)


def test_an_early_answer_knows_how_long_it_ran_until_then() -> None:
    compute_s: list[float] = []
    bench = one_split([Part(1, 1, "a"), Part(4, 2, "")])
    device = Device(bench.engine, bench.runner, bench.clock, lambda releases: compute_s.append(a.compute_s))
    (a,) = probe = members("a", probe=True)
    bench.engine.submit(0, probe, 0.0)
    device.run_until_idle()
    assert compute_s == [1.0, 1.0, 5.0]  # answered, looked at after block 1, gone on


def test_an_answered_probe_goes_on_to_the_next_split_and_elsewhere_with_the_others() -> None:
    splits = [Split(first=0, end=1, batch=4), Split(first=1, end=2, batch=4)]
    bench = Bench(splits, {0: [Part(1, 1, "a")], 1: [Part(1, 2, "")]})
    assert bench.run(members("ab", probe=True)) == [
        "1.000 look a at 0, look b at 0, answer a after 0, stays",
        "2.000 look a at 1, look b at 1",
        "2.000 goes on 2:[a b]",
    ]


def test_probes_that_run_again_after_a_failure_say_nothing_twice_and_end_once() -> None:
    parts = {0: [Part(1, 1, "ab"), Part(1, 4, EVERYONE)]}
    bench = Bench([Split(first=0, end=4, batch=4)], parts, "b", FailsLater)
    assert bench.run(members("abc", probe=True)) == [
        "1.000 look a at 0, look b at 0, look c at 0, answer a after 0, stays, answer b after 0, stays",
        "4.000 look a at 3, answer a after 3",
        "6.000 lost b execution: the model failed on this input: ValueError: too much",
        "8.000 look c at 3, answer c after 3",
    ]
