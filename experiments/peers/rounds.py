"""Several servers measured in turns, probe by probe, so that whatever drifts on the machine hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from earlyexit.errors import InputError, OfframpError
from experiments.kit import Spread, spread
from experiments.peers.client import LoadResult
from experiments.peers.search import Bounds, Ending, Search, Target, Verdict

SEEDS_PER_ROUND = 1000
"""More than a round has turns, so that no two turns of a comparison see the same arrivals."""


class Side(Protocol):
    """A server that is up."""

    @property
    def name(self) -> str:
        """Differs from every other side's."""
        ...

    def measure(self, rate_per_s: float, seed: int) -> LoadResult:
        """One run of the client; raises OfframpError where the server, or the client, is no more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
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


OnProbe = Callable[[Probe], object]
"""Told every probe at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRate:
    """What one side reached in one round."""

    round_index: int
    side: str
    sustained_per_s: float | None
    """The highest rate that passed, 0 where none did; None where the side failed before its search was over."""
    ending: Ending | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What rounds gave, in the order in which it was measured."""

    rounds: tuple[RoundRate, ...]
    probes: tuple[Probe, ...]

    def spread(self, side: str) -> Spread | None:
        """Of its sustained rate, over the rounds that it finished; None where there is none."""
        return spread(each.sustained_per_s for each in self.rounds if each.side == side)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        spreads = {side: self.spread(side) for side in dict.fromkeys(probe.side for probe in self.probes)}
        return {
            "sustained_per_s": {side: each and each._asdict() for side, each in spreads.items()},
            "rounds": [asdict(each) for each in self.rounds],
            "probes": [probe.document() for probe in self.probes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunt:
    """How sustained rates are looked for."""

    num_rounds: int
    starts_per_s: Mapping[str, float]
    """The first rate of each side, by its name."""
    bounds: Bounds
    target: Target
    seed: int = 0
    cold_growth: float = 1.6
    """First step from a start that was guessed."""
    warm_growth: float = 1.06
    """First step from what the round before gave."""

    def search(self, side: str, last_per_s: float | None) -> Search:
        """A round's search of a side, given what it reached in the last round in which a rate passed."""
        if last_per_s is not None:
            return Search(start_per_s=last_per_s, bounds=self.bounds, growth=self.warm_growth)
        return Search(start_per_s=self.starts_per_s[side], bounds=self.bounds, growth=self.cold_growth)


def interleave(sides: Sequence[Side], hunt: Hunt, on_probe: OnProbe) -> Comparison:
    """Look for every side's sustained rate in each round, one probe of each side after the other.

    Who begins moves on with every turn. A side that raises OfframpError is out for the rest of the round, which the
    record says, and is asked again in the next; the others go on.
    """
    names = [side.name for side in sides]
    if not names or len(set(names)) < len(names) or not set(names) <= set(hunt.starts_per_s):
        raise InputError(f"sides need names of their own, and each a start: {names}, {dict(hunt.starts_per_s)}")
    rounds: list[RoundRate] = []
    probes: list[Probe] = []

    def note(probe: Probe) -> None:
        probes.append(probe)
        on_probe(probe)

    for round_index in range(hunt.num_rounds):
        rounds += _round(sides, hunt, round_index, {each.side: each for each in rounds if each.sustained_per_s}, note)
    return Comparison(rounds=tuple(rounds), probes=tuple(probes))


PROBE_HEADER = "round  side                  rate/s   p50 ms   p99 ms     lost  verdict"


def probe_line(probe: Probe) -> str:
    """A probe below `PROBE_HEADER`."""
    head = f"{probe.round_index + 1:>5}  {probe.side:<18} {probe.rate_per_s:9.1f}"
    if probe.result is None:
        return f"{head}  {probe.error}"
    p50, p99 = (
        "-" if seconds is None else f"{seconds * 1000:.1f}" for seconds in (probe.result.p50_s, probe.result.p99_s)
    )
    return f"{head} {p50:>8} {p99:>8} {probe.result.lost_share:>8.1%}  {probe.verdict}"


def _round(
    sides: Sequence[Side], hunt: Hunt, round_index: int, last: Mapping[str, RoundRate], on_probe: OnProbe
) -> list[RoundRate]:
    before = {name: each.sustained_per_s for name, each in last.items()}
    searches = {side.name: hunt.search(side.name, before.get(side.name)) for side in sides}
    ended: list[RoundRate] = []
    turn_index = 0
    while searches:
        seed = hunt.seed + round_index * SEEDS_PER_ROUND + turn_index
        for side in _turn(sides, round_index + turn_index):
            if (search := searches.get(side.name)) is None:
                continue
            rate_per_s = search.next_rate()
            assert rate_per_s is not None, "a search that is over has left"
            probe = _measure(side, rate_per_s, round_index, seed, hunt.target)
            on_probe(probe)
            sustained_per_s = ending = None
            if probe.verdict is not None:
                searches[side.name] = search = search.learn(rate_per_s, probe.verdict)
                sustained_per_s, ending = search.best_per_s, search.ending
            if probe.verdict is None or ending is not None:
                del searches[side.name]
                ended.append(
                    RoundRate(round_index=round_index, side=side.name, sustained_per_s=sustained_per_s, ending=ending)
                )
        turn_index += 1
    return ended


def _measure(side: Side, rate_per_s: float, round_index: int, seed: int, target: Target) -> Probe:
    result, error = None, None
    try:
        result = side.measure(rate_per_s, seed)
    except OfframpError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Probe(
        round_index=round_index,
        side=side.name,
        rate_per_s=rate_per_s,
        seed=seed,
        result=result,
        verdict=None if result is None else target.verdict(result),
        error=error,
    )


def _turn(sides: Sequence[Side], index: int) -> list[Side]:
    first = index % len(sides)
    return [*sides[first:], *sides[:first]]
