"""What probes of several servers add up to: goodput by side and round, ratios within a round, latencies at one rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from experiments.peers.goodput import Ending, Verdict
from experiments.peers.tally import LoadResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """One run, or what kept it from being one."""

    round_index: int
    side: str
    rate_per_s: float
    seed: int
    """The same for every side in a turn: the same arrivals, at the side's own rate."""
    result: LoadResult | None
    verdict: Verdict | None
    error: str | None
    """What `measure` raised."""

    def __post_init__(self) -> None:
        measured = self.result is not None
        assert measured == (self.verdict is not None) == (self.error is None), "a probe has figures or an error"

    def document(self) -> dict[str, Any]:
        """For JSON."""
        figures = None if self.result is None else self.result.model_dump(mode="json")
        return {name: getattr(self, name) for name in self.__slots__} | {"result": figures}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundGoodput:
    """What one side reached in one round."""

    round_index: int
    side: str
    goodput_per_s: float | None
    """The highest rate that passed, 0 where none did; None where the side failed before its search was over."""
    ending: Ending | None

    def __post_init__(self) -> None:
        assert (self.goodput_per_s is None) == (self.ending is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Over rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What rounds gave so far."""

    sides: tuple[str, ...]
    rounds: tuple[RoundGoodput, ...]
    probes: tuple[ProbeRecord, ...]
    """In the order in which they were measured."""

    def goodputs_per_s(self, side: str) -> tuple[float | None, ...]:
        """One per round that the side has ended, one way or the other."""
        return tuple(each.goodput_per_s for each in self.rounds if each.side == side)

    def spread(self, side: str) -> Spread | None:
        """Of its goodput, over the rounds that it finished; None where there is none."""
        return _spread(self.goodputs_per_s(side))

    def ratios(self, side: str, to: str) -> tuple[float | None, ...]:
        """Goodput relative to another side's, round by round; None where one of them has none."""
        reached = {(each.round_index, each.side): each.goodput_per_s for each in self.rounds}
        pairs = [(reached.get((index, side)), reached.get((index, to))) for index, name in reached if name == side]
        return tuple(own / other if own is not None and other else None for own, other in pairs)

    def ratio(self, side: str, to: str) -> Spread | None:
        """Of the ratios of each round: what all sides of a round have in common cancels out."""
        return _spread(self.ratios(side, to))

    def failures(self, side: str) -> tuple[ProbeRecord, ...]:
        """Probes that raised."""
        return tuple(probe for probe in self.probes if probe.side == side and probe.error is not None)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        spreads = {side: self.spread(side) for side in self.sides}
        return {
            "goodput_per_s": {side: spread and asdict(spread) for side, spread in spreads.items()},
            "rounds": [asdict(each) for each in self.rounds],
            "probes": [probe.document() for probe in self.probes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRate:
    """What every side did at one rate."""

    rate_per_s: float
    sides: tuple[str, ...]
    probes: tuple[ProbeRecord, ...]

    def spread(self, side: str, figure: Callable[[LoadResult], float | None]) -> Spread | None:
        """Of one figure, as `lambda result: result.p50_s`, over the rounds that have it."""
        results = [probe.result for probe in self.probes if probe.side == side and probe.result is not None]
        return _spread([figure(result) for result in results])

    def document(self) -> dict[str, Any]:
        """For JSON."""
        figures: dict[str, Callable[[LoadResult], float | None]] = {
            "p50_s": lambda result: result.p50_s,
            "p99_s": lambda result: result.p99_s,
        }
        spreads = {side: {name: self.spread(side, figure) for name, figure in figures.items()} for side in self.sides}
        return {
            "rate_per_s": self.rate_per_s,
            "latency": {
                side: {name: each and asdict(each) for name, each in of_side.items()}
                for side, of_side in spreads.items()
            },
            "probes": [probe.document() for probe in self.probes],
        }


PROBE_HEADER = "round  side                  rate/s   p50 ms   p99 ms  refused   failed  verdict"


def probe_line(probe: ProbeRecord) -> str:
    """A probe below `PROBE_HEADER`."""
    head = f"{probe.round_index + 1:>5}  {probe.side:<18} {probe.rate_per_s:9.1f}"
    if probe.result is None:
        return f"{head}  {probe.error}"
    result = probe.result
    times = f"{_ms(result.p50_s):>8} {_ms(result.p99_s):>8}"
    return f"{head} {times} {result.num_refused:>8} {result.num_failed:>8}  {probe.verdict}"


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(median=median(known), low=min(known), high=max(known)) if known else None


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
