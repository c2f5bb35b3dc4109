from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest

from earlyexit.errors import InputError, OfframpError
from experiments.peers.client import LoadResult
from experiments.peers.rounds import PROBE_HEADER, Comparison, Hunt, Probe, interleave, probe_line
from experiments.peers.search import Bounds, Target
from tests.experiments.peers.results import load_result

TARGET = Target(slo_s=0.1)
BOUNDS = Bounds(low_per_s=10.0, high_per_s=1000.0, resolution=0.5)


@dataclass
class Fake:
    """Sustains a rate, and dies at the probes that `dies` names, counted from 0."""

    name: str
    capacity_per_s: float
    log: list[tuple[str, float, int]] = field(default_factory=list)
    dies: tuple[int, ...] = ()
    num_probes: int = 0

    def measure(self, rate_per_s: float, seed: int) -> LoadResult:
        self.log.append((self.name, round(rate_per_s, 1), seed))
        self.num_probes += 1
        if self.num_probes - 1 in self.dies:
            raise OfframpError("the server is gone")
        return load_result(0.05 if rate_per_s <= self.capacity_per_s else 0.2)


def hunt(num_rounds: int = 1, **starts_per_s: float) -> Hunt:
    return Hunt(
        num_rounds=num_rounds, starts_per_s=starts_per_s, bounds=BOUNDS, target=TARGET, cold_growth=2.0, warm_growth=1.4
    )


def nothing(_: Probe) -> None:
    """Nobody looks on."""


def rates(comparison: Comparison, side: str) -> list[float | None]:
    return [each.sustained_per_s for each in comparison.rounds if each.side == side]


def test_sides_take_turns_probe_by_probe_and_begin_in_turn() -> None:
    log: list[tuple[str, float, int]] = []
    sides = [Fake("a", 100.0, log), Fake("b", 250.0, log)]
    comparison = interleave(sides, hunt(a=100.0, b=100.0), nothing)
    # a: 100 passes, 200 fails, the mean 141.4 fails and is asked again. b: 100, 200 pass, 800 fails, 400 fails, 282.8
    # fails and is asked again. A turn has one seed; b begins every second one.
    assert log == [
        ("a", 100.0, 0),
        ("b", 100.0, 0),
        ("b", 200.0, 1),
        ("a", 200.0, 1),
        ("a", 141.4, 2),
        ("b", 800.0, 2),
        ("b", 400.0, 3),
        ("a", 141.4, 3),
        ("b", 282.8, 4),
        ("b", 282.8, 5),
    ]
    assert (rates(comparison, "a"), rates(comparison, "b")) == ([100.0], [200.0])
    assert [(each.side, each.ending) for each in comparison.rounds] == [("a", "bracketed"), ("b", "bracketed")]


def test_a_later_round_starts_from_the_last_one_in_small_steps_with_other_seeds() -> None:
    side = Fake("a", 150.0)
    comparison = interleave([side], hunt(num_rounds=2, a=20.0), nothing)
    first = [(rate, seed) for _, rate, seed in side.log if seed < 1000]
    assert first == [(20.0, 0), (40.0, 1), (160.0, 2), (80.0, 3), (113.1, 4), (160.0, 5)]
    later = [(rate, seed) for _, rate, seed in side.log if seed >= 1000]
    assert later == [(113.1, 1000), (158.4, 1001), (158.4, 1002)]
    assert rates(comparison, "a") == pytest.approx([113.1, 113.1], abs=0.1)


def test_a_side_that_dies_is_out_for_the_round_and_the_others_go_on() -> None:
    sides = [Fake("a", 100.0, dies=(1,)), Fake("b", 100.0)]
    seen: list[Probe] = []
    comparison = interleave(sides, hunt(num_rounds=2, a=100.0, b=100.0), seen.append)
    assert rates(comparison, "a") == [None, 100.0]
    assert rates(comparison, "b") == [100.0, 100.0]
    [failure] = [probe for probe in seen if probe.error is not None]
    assert (failure.side, failure.round_index, failure.rate_per_s) == ("a", 0, 200.0)
    assert failure.error == "OfframpError: the server is gone"
    assert comparison.probes == tuple(seen)
    document = json.loads(json.dumps(comparison.document()))
    assert document["sustained_per_s"]["a"] == {"median": 100.0, "low": 100.0, "high": 100.0}
    assert document["probes"][0]["result"]["p99_s"] == 0.05
    assert document["rounds"][0] == {"round_index": 0, "side": "a", "sustained_per_s": None, "ending": None}


def test_what_is_not_raised_on_purpose_is_not_taken_for_a_dead_server() -> None:
    class Broken:
        name = "a"

        def measure(self, rate_per_s: float, seed: int) -> LoadResult:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave([Broken()], hunt(a=100.0), nothing)


def test_a_side_that_never_ends_a_round_sustains_nothing() -> None:
    comparison = interleave([Fake("a", 100.0, dies=(0,))], hunt(a=100.0), nothing)
    assert comparison.spread("a") is None
    assert comparison.document()["sustained_per_s"] == {"a": None}


def test_a_probe_is_a_line_in_fixed_columns() -> None:
    side = Fake("mosec", 1e9, dies=(1,))
    lines: list[str] = []
    hunted = replace(hunt(num_rounds=2, mosec=212.4), bounds=replace(BOUNDS, high_per_s=212.4))
    interleave([side], hunted, lambda probe: lines.append(probe_line(probe)))
    assert [PROBE_HEADER, *lines] == [
        "round  side                  rate/s   p50 ms   p99 ms     lost  verdict",
        "    1  mosec                  212.4     10.0     50.0     0.0%  passed",
        "    2  mosec                  212.4  OfframpError: the server is gone",
    ]


@pytest.mark.parametrize(
    ("sides", "starts_per_s"),
    [
        pytest.param([], {}, id="nobody"),
        pytest.param([Fake("a", 1.0), Fake("a", 1.0)], {"a": 1.0}, id="namesakes"),
        pytest.param([Fake("a", 1.0)], {}, id="no start"),
    ],
)
def test_sides_that_cannot_be_compared_are_refused(sides: list[Fake], starts_per_s: dict[str, float]) -> None:
    with pytest.raises(InputError):
        interleave(sides, hunt(1, **starts_per_s), nothing)
