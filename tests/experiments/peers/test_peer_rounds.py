from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from earlyexit.errors import InputError, OfframpError
from experiments.peers.comparison import PROBE_HEADER, Comparison, ProbeRecord, RoundGoodput, Spread, probe_line
from experiments.peers.goodput import Bounds, Target
from experiments.peers.rounds import Hunt, Journal, at_rate, interleave
from experiments.peers.tally import LoadResult

TARGET = Target(slo_s=0.1)
BOUNDS = Bounds(low_per_s=10.0, high_per_s=1000.0, resolution=0.5)


def result(p99_s: float = 0.05, p50_s: float = 0.01) -> LoadResult:
    return LoadResult(
        duration_s=1.0,
        num_sent=100,
        num_counted=100,
        num_answered=98,
        num_refused=1,
        failed={},
        num_within_slo=98,
        offered_per_s=100.0,
        goodput_per_s=98.0,
        p50_s=p50_s,
        p90_s=p99_s,
        p99_s=p99_s,
        max_s=p99_s,
        from_sent_p99_s=p99_s,
        lateness_p50_s=0.0,
        lateness_p99_s=0.0,
        num_retried=0,
        num_waited=0,
        num_connections=1,
        cpu_s=0.0,
    )


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
        return result(0.05 if rate_per_s <= self.capacity_per_s else 0.2)


def hunt(num_rounds: int = 1, **starts_per_s: float) -> Hunt:
    return Hunt(
        num_rounds=num_rounds, starts_per_s=starts_per_s, bounds=BOUNDS, target=TARGET, cold_growth=2.0, warm_growth=1.4
    )


def comparison_of(**goodputs_per_s: list[float | None]) -> Comparison:
    rounds = [
        RoundGoodput(round_index=index, side=side, goodput_per_s=value, ending=None if value is None else "bracketed")
        for side, values in goodputs_per_s.items()
        for index, value in enumerate(values)
    ]
    return Comparison(sides=tuple(goodputs_per_s), rounds=tuple(rounds), probes=())


def test_sides_take_turns_probe_by_probe_and_begin_in_turn() -> None:
    log: list[tuple[str, float, int]] = []
    sides = [Fake("a", 100.0, log), Fake("b", 250.0, log)]
    comparison = interleave(sides, hunt(a=100.0, b=100.0))
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
    assert (comparison.goodputs_per_s("a"), comparison.goodputs_per_s("b")) == ((100.0,), (200.0,))
    assert [(each.side, each.ending) for each in comparison.rounds] == [("a", "bracketed"), ("b", "bracketed")]


def test_a_later_round_starts_from_the_last_one_in_small_steps_with_other_seeds() -> None:
    side = Fake("a", 150.0)
    comparison = interleave([side], hunt(num_rounds=2, a=20.0))
    first = [(rate, seed) for _, rate, seed in side.log if seed < 1000]
    assert first == [(20.0, 0), (40.0, 1), (160.0, 2), (80.0, 3), (113.1, 4), (160.0, 5)]
    later = [(rate, seed) for _, rate, seed in side.log if seed >= 1000]
    assert later == [(113.1, 1000), (158.4, 1001), (158.4, 1002)]
    assert comparison.goodputs_per_s("a") == pytest.approx((113.1, 113.1), abs=0.1)


def test_a_side_that_dies_is_out_for_the_round_and_the_others_go_on() -> None:
    sides = [Fake("a", 100.0, dies=(1,)), Fake("b", 100.0)]
    comparison = interleave(sides, hunt(num_rounds=2, a=100.0, b=100.0))
    assert comparison.goodputs_per_s("a") == (None, 100.0)
    assert comparison.goodputs_per_s("b") == (100.0, 100.0)
    (failure,) = comparison.failures("a")
    assert (failure.round_index, failure.rate_per_s) == (0, 200.0)
    assert failure.error == "OfframpError: the server is gone"
    assert comparison.spread("a") == Spread(median=100.0, low=100.0, high=100.0)
    assert comparison.ratios("a", "b") == (None, 1.0)


def test_what_is_not_raised_on_purpose_is_not_taken_for_a_dead_server() -> None:
    class Broken:
        name = "a"

        def measure(self, rate_per_s: float, seed: int) -> LoadResult:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave([Broken()], hunt(a=100.0))


def test_ratios_are_taken_within_each_round_before_their_median() -> None:
    comparison = comparison_of(ours=[100.0, 400.0, 90.0], theirs=[50.0, 100.0, 100.0])
    assert comparison.ratios("ours", "theirs") == (2.0, 4.0, 0.9)
    assert comparison.ratio("ours", "theirs") == Spread(median=2.0, low=0.9, high=4.0)
    # The ratio of the medians would be 100 / 100.
    assert comparison.spread("ours") == Spread(median=100.0, low=90.0, high=400.0)


@pytest.mark.parametrize("theirs", [[None, 100.0], [0.0, 100.0]], ids=["failed", "nothing passed"])
def test_rounds_that_one_side_has_nothing_of_have_no_ratio(theirs: list[float | None]) -> None:
    comparison = comparison_of(ours=[100.0, 300.0], theirs=theirs)
    assert comparison.ratios("ours", "theirs") == (None, 3.0)
    assert comparison.ratio("ours", "theirs") == Spread(median=3.0, low=3.0, high=3.0)


def test_without_any_round_there_is_no_figure() -> None:
    comparison = comparison_of(ours=[None])
    assert (comparison.spread("ours"), comparison.ratio("ours", "ours")) == (None, None)


def test_the_record_on_disk_has_every_probe_so_far(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    seen: list[tuple[str, int]] = []

    def look(probe: ProbeRecord) -> None:
        seen.append((probe.side, len(json.loads(path.read_text())["probes"])))

    journal = Journal(path=path, about={"machine": "here"}, on_probe=look)
    interleave([Fake("a", 100.0), Fake("b", 1e9, dies=(1,))], hunt(a=100.0, b=900.0), journal)
    assert seen == [("a", 1), ("b", 2), ("b", 3), ("a", 4), ("a", 5), ("a", 6)]
    record = json.loads(path.read_text())
    assert (record["schema"], record["machine"]) == (1, "here")
    assert record["goodput_per_s"] == {"a": {"median": 100.0, "low": 100.0, "high": 100.0}, "b": None}
    assert record["probes"][2]["error"] == "OfframpError: the server is gone"
    assert record["probes"][0]["result"]["p99_s"] == 0.05
    assert list(tmp_path.iterdir()) == [path]


def test_an_interruption_leaves_the_record_of_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "record.json"

    class Interrupted(Fake):
        def measure(self, rate_per_s: float, seed: int) -> LoadResult:
            if self.num_probes == 2:
                raise KeyboardInterrupt
            return super().measure(rate_per_s, seed)

    with pytest.raises(KeyboardInterrupt):
        interleave([Interrupted("a", 500.0)], hunt(a=100.0), Journal(path=path))
    assert [probe["rate_per_s"] for probe in json.loads(path.read_text())["probes"]] == [100.0, 200.0]


def test_at_one_rate_all_sides_see_the_same_arrivals_in_turns(tmp_path: Path) -> None:
    log: list[tuple[str, float, int]] = []
    sides = [Fake("a", 100.0, log), Fake("b", 10.0, log, dies=(2,))]
    path = tmp_path / "record.json"
    found = at_rate(sides, 30.0, num_rounds=3, target=TARGET, seed=7, journal=Journal(path=path))
    assert log == [
        ("a", 30.0, 7),
        ("b", 30.0, 7),
        ("b", 30.0, 1007),
        ("a", 30.0, 1007),
        ("a", 30.0, 2007),
        ("b", 30.0, 2007),
    ]
    assert found.spread("a", lambda each: each.p99_s) == Spread(median=0.05, low=0.05, high=0.05)
    assert [probe.verdict for probe in found.probes if probe.side == "b"] == ["failed", "failed", None]
    latency = json.loads(path.read_text())["latency"]
    assert latency["b"]["p99_s"] == {"median": 0.2, "low": 0.2, "high": 0.2}


def test_a_probe_is_a_line_in_fixed_columns() -> None:
    def probe(side: str, error: str | None = None) -> ProbeRecord:
        figures = None if error else result(p50_s=0.0123, p99_s=0.0987)
        verdict = None if error else TARGET.verdict(result())
        return ProbeRecord(
            round_index=1, side=side, rate_per_s=212.45, seed=0, result=figures, verdict=verdict, error=error
        )

    assert [PROBE_HEADER, probe_line(probe("mosec")), probe_line(probe("litserve", "OfframpError: gone"))] == [
        "round  side                  rate/s   p50 ms   p99 ms  refused   failed  verdict",
        "    2  mosec                  212.4     12.3     98.7        1        0  passed",
        "    2  litserve               212.4  OfframpError: gone",
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
        interleave(sides, hunt(1, **starts_per_s))


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda: ProbeRecord(round_index=0, side="a", rate_per_s=1.0, seed=0, result=None, verdict=None, error=None),
            id="neither figures nor error",
        ),
        pytest.param(
            lambda: RoundGoodput(round_index=0, side="a", goodput_per_s=1.0, ending=None), id="figures without an end"
        ),
    ],
)
def test_records_that_contradict_themselves_cannot_be(build: Callable[[], object]) -> None:
    with pytest.raises(AssertionError):
        build()
