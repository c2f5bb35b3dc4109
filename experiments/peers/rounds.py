"""Several servers measured in turns, probe by probe, so that whatever drifts on the machine hits all of them alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from earlyexit.errors import InputError, OfframpError
from experiments.peers.comparison import AtRate, Comparison, ProbeRecord, RoundGoodput
from experiments.peers.goodput import Bounds, Search, Target
from experiments.peers.tally import LoadResult

SCHEMA = 1
"""Of the record on disk."""
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
class Journal:
    """Told every probe at once, so that an interrupted comparison keeps what it has."""

    path: Path | None = None
    """Rewritten whole after every probe; None keeps no file."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the record says besides its probes: machine, versions, commit, date, options."""
    on_probe: Callable[[ProbeRecord], None] | None = None

    def note(self, probe: ProbeRecord, document: Mapping[str, Any]) -> None:
        """A probe, and everything so far with it."""
        if self.path is not None:
            fresh = self.path.with_name(f"{self.path.name}.new")
            fresh.write_text(json.dumps({"schema": SCHEMA, **self.about, **document}, indent=1) + "\n")
            fresh.replace(self.path)
        if self.on_probe is not None:
            self.on_probe(probe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunt:
    """How goodput is looked for."""

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

    def search(self, side: str, last: RoundGoodput | None) -> Search:
        """A round's search of a side, given the side's last round in which a rate passed."""
        if last is not None and last.goodput_per_s is not None:
            return Search(start_per_s=last.goodput_per_s, bounds=self.bounds, growth=self.warm_growth)
        return Search(start_per_s=self.starts_per_s[side], bounds=self.bounds, growth=self.cold_growth)


def interleave(sides: Sequence[Side], hunt: Hunt, journal: Journal | None = None) -> Comparison:
    """Look for every side's goodput in each round, one probe of each side after the other.

    Who begins moves on with every turn. A side that raises OfframpError is out for the rest of the round, which the
    record says, and is asked again in the next; the others go on.
    """
    names = _names(sides)
    if missing := set(names) - set(hunt.starts_per_s):
        raise InputError(f"no start for {', '.join(sorted(missing))}")
    comparison = Comparison(sides=names, rounds=(), probes=())
    for round_index in range(hunt.num_rounds):
        comparison = _round(sides, hunt, round_index, comparison, journal or Journal())
    return comparison


def at_rate(
    sides: Sequence[Side],
    rate_per_s: float,
    *,
    num_rounds: int,
    target: Target,
    seed: int = 0,
    journal: Journal | None = None,
) -> AtRate:
    """The same rate and arrivals for every side, in turns; failures are kept as in `interleave`."""
    so_far = AtRate(rate_per_s=rate_per_s, sides=_names(sides), probes=())
    for round_index in range(num_rounds):
        for side in _turn(sides, round_index):
            probe = _measure(side, rate_per_s, round_index, seed + round_index * SEEDS_PER_ROUND, target)
            so_far = AtRate(rate_per_s=rate_per_s, sides=so_far.sides, probes=(*so_far.probes, probe))
            (journal or Journal()).note(probe, so_far.document())
    return so_far


def _round(sides: Sequence[Side], hunt: Hunt, round_index: int, comparison: Comparison, journal: Journal) -> Comparison:
    last = {each.side: each for each in comparison.rounds if each.goodput_per_s}  # the latest of each side stays
    searches = {side.name: hunt.search(side.name, last.get(side.name)) for side in sides}
    turn_index = 0
    while searches:
        seed = hunt.seed + round_index * SEEDS_PER_ROUND + turn_index
        for side in _turn(sides, round_index + turn_index):
            if side.name not in searches:
                continue
            search = searches[side.name]
            rate_per_s = search.next_rate()
            assert rate_per_s is not None, "a search that is over has left"
            probe = _measure(side, rate_per_s, round_index, seed, hunt.target)
            search = search if probe.verdict is None else search.learn(rate_per_s, probe.verdict)
            searches[side.name] = search
            if probe.verdict is None or search.ending is not None:
                del searches[side.name]
            comparison = _with(comparison, probe, search)
            journal.note(probe, comparison.document())
        turn_index += 1
    return comparison


def _with(comparison: Comparison, probe: ProbeRecord, search: Search) -> Comparison:
    """What is known after one more probe."""
    rounds = comparison.rounds
    if probe.verdict is None or search.ending is not None:
        ended = RoundGoodput(
            round_index=probe.round_index,
            side=probe.side,
            goodput_per_s=None if probe.verdict is None else search.best_per_s,
            ending=None if probe.verdict is None else search.ending,
        )
        rounds = (*rounds, ended)
    return Comparison(sides=comparison.sides, rounds=rounds, probes=(*comparison.probes, probe))


def _measure(side: Side, rate_per_s: float, round_index: int, seed: int, target: Target) -> ProbeRecord:
    result, error = None, None
    try:
        result = side.measure(rate_per_s, seed)
    except OfframpError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return ProbeRecord(
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


def _names(sides: Sequence[Side]) -> tuple[str, ...]:
    names = tuple(side.name for side in sides)
    if not names or len(set(names)) < len(names):
        raise InputError(f"sides need names of their own, and there must be one: {names}")
    return names
