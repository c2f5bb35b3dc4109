"""A side's turn: its processor time and latency at rates that all sides get, and the highest rate that it sustains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from earlyexit.errors import InputError, OfframpError
from earlyexit.network.store import read_card
from experiments.peers.client import LoadResult
from experiments.peers.sides import ServedSide
from experiments.peers.workloads import Workload

# The highest Poisson rate that a server sustains, found by bisection; pure, so that several searches can take turns.

Verdict = Literal["passed", "failed", "client late"]
"""`client late` says nothing about the server: the client did not send at the rate that it was told to."""

Ending = Literal["bracketed", "client late", "highest", "none passed", "most probes"]
"""Why a search is over.

A rate that failed meets the result from above; or one at which the client was late, or the highest that may be asked,
and the server may do more; or nothing passed; or it took too many probes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a server must do at a rate to sustain it."""

    slo_s: float
    """The 99th percentile of latency, at most."""
    lost_share: float = 0.01
    """Of requests, what may be refused or fail."""
    lateness_share: float = 0.1
    """Of the SLO, what the 99th percentile of the client's own lateness may be."""

    def __post_init__(self) -> None:
        if not (self.slo_s > 0 and 0 <= self.lost_share < 1 and 0 < self.lateness_share < 1):
            raise InputError(f"not a target: {self}")

    def verdict(self, measured: LoadResult) -> Verdict:
        """A late client is no excuse for a server that lost requests, or took too long by more than that lateness."""
        if measured.lost_share > self.lost_share or measured.p99_s is None or measured.from_sent_p99_s is None:
            return "failed"
        lateness_s = measured.lateness_p99_s or 0.0
        if measured.from_sent_p99_s > self.slo_s + lateness_s:
            return "failed"
        if lateness_s > self.lateness_share * self.slo_s:
            return "client late"
        return "passed" if measured.p99_s <= self.slo_s else "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Where a search looks, and how closely."""

    low_per_s: float
    """What fails here sustains nothing worth telling."""
    high_per_s: float
    """What passes here is asked no more."""
    resolution: float = 0.03
    """Ratio, less 1, of the rate that failed to the one that passed, at the end."""
    most_probes: int = 20
    """Of one search, confirmations included."""

    def __post_init__(self) -> None:
        if not 0 < self.low_per_s < self.high_per_s < float("inf"):
            raise InputError(f"rates must be above 0, low before high: {self}")
        if not (self.resolution > 0 and self.most_probes >= 1):
            raise InputError(f"not the bounds of a search: {self}")

    def within(self, rate_per_s: float) -> float:
        """The nearest rate that may be tried."""
        return min(max(rate_per_s, self.low_per_s), self.high_per_s)


class Tried(NamedTuple):
    """One rate of a search."""

    rate_per_s: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Which rate to try next, by what the rates before it gave.

    From `start_per_s` it goes up, or down, by `growth`, then its square and so on, until one rate has passed and a
    higher one has not; then it tries their geometric mean until they are `resolution` apart. The rate that did not pass
    is then tried again: only what failed twice counts as the end, for a machine that others use fails a probe now and
    then. If it passes this time, the search goes on above it. A probe with a late client is repeated once at once; late
    again, it ends the search from above like a failure, but the ending tells.

    Where chance decides a probe, asking failures again but not passes errs upwards, for every server alike: let a probe
    count a thousand requests or more.
    """

    start_per_s: float
    bounds: Bounds
    growth: float = 1.6
    """Of the first step; near 1 where `start_per_s` is well known."""
    probes: tuple[Tried, ...] = ()

    def __post_init__(self) -> None:
        if self.start_per_s <= 0 or self.growth <= 1:
            raise InputError(f"a search starts above 0 and grows by more than 1, not {self.start_per_s}, {self.growth}")

    def learn(self, rate_per_s: float, verdict: Verdict) -> Search:
        """The search with one more probe."""
        return replace(self, probes=(*self.probes, Tried(rate_per_s, verdict)))

    def next_rate(self) -> float | None:
        """The rate to try next; None where the search is over."""
        return None if self.ending is not None else self._next()

    @property
    def best_per_s(self) -> float:
        """The highest rate that passed; 0 where none did."""
        return max((probe.rate_per_s for probe in self.probes if probe.verdict == "passed"), default=0.0)

    @property
    def ending(self) -> Ending | None:
        """Why the search is over; None while it goes on."""
        best_per_s, bound_per_s = self.best_per_s, self._bound_per_s
        if best_per_s >= self.bounds.high_per_s:
            return "highest"
        if bound_per_s is not None and self._is_confirmed(bound_per_s):
            is_failure = self._count(bound_per_s, "failed") > 0
            if not best_per_s and bound_per_s <= self.bounds.low_per_s:
                return "none passed" if is_failure else "client late"
            if best_per_s and self._is_close(best_per_s, bound_per_s):
                return "bracketed" if is_failure else "client late"
        return "most probes" if len(self.probes) >= self.bounds.most_probes else None

    def _next(self) -> float:
        best_per_s, bound_per_s = self.best_per_s, self._bound_per_s
        if not self.probes:
            return self.bounds.within(self.start_per_s)
        last = self.probes[-1]
        if last.verdict == "client late" and not self._is_confirmed(last.rate_per_s):
            return last.rate_per_s
        if bound_per_s is None:
            return self.bounds.within(best_per_s * self._step())
        if not best_per_s:
            return self.bounds.within(bound_per_s / self._step())
        if not self._is_close(best_per_s, bound_per_s):
            return float((best_per_s * bound_per_s) ** 0.5)
        return bound_per_s

    @property
    def _bound_per_s(self) -> float | None:
        """The lowest rate, above all that passed, that did not."""
        above = [probe for probe in self.probes if probe.rate_per_s > self.best_per_s]
        return min(
            (probe.rate_per_s for probe in above if probe.verdict == "failed" or self._is_confirmed(probe.rate_per_s)),
            default=None,
        )

    def _step(self) -> float:
        """Squared with every rate that agrees with the last; small at first where there was a bracket already."""
        best_per_s = self.best_per_s
        told = [probe for probe in self.probes if probe.verdict != "client late" or probe.rate_per_s > best_per_s]
        has_passed = told[-1].verdict == "passed"
        agreeing = list(takewhile(lambda probe: (probe.verdict == "passed") == has_passed, reversed(told)))
        first = self.growth if len(agreeing) == len(told) else 1 + self.bounds.resolution
        return float(first ** (2 ** (len({probe.rate_per_s for probe in agreeing}) - 1)))

    def _is_close(self, low_per_s: float, high_per_s: float) -> bool:
        return high_per_s / low_per_s <= 1 + self.bounds.resolution

    def _is_confirmed(self, rate_per_s: float) -> bool:
        return self._count(rate_per_s, "failed") + self._count(rate_per_s, "client late") > 1

    def _count(self, rate_per_s: float, verdict: Verdict) -> int:
        return sum(probe.rate_per_s == rate_per_s and probe.verdict == verdict for probe in self.probes)


SEEDS_PER_ROUND = 1000
"""More than a round has probes, so that no two of a comparison see the same arrivals."""
PROBE_HEADER = "round  side                  rate/s   p50 ms   p99 ms     lost  verdict"
SPAN = 20.0
"""How far from where a search starts it may end, as a ratio."""
MOST_PROBES = 6
PROBE_SHARE = 0.5
"""Of the seconds of a run, those of a probe."""
RESOLUTION = 0.05
COLD_GROWTH, WARM_GROWTH = 1.15, 1.06
"""The first step from a start that was guessed, and from what the round before gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Requests per second, Poisson."""

    light_per_s: float
    heavy_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a side is asked in its turn."""

    workload: Workload
    drawn: Sequence[int]
    rates: Rates
    start_per_s: float
    is_known: bool
    """Whether an earlier round ended there."""
    target: Target
    index: int
    """Of the round, whose arrivals are the same for all sides."""


def take_turn(side: ServedSide, turn: Turn) -> dict[str, Any]:
    """Measure a side that is up and warm; for JSON."""
    seed = turn.index * SEEDS_PER_ROUND
    answers = side.load.inputs.with_name(f"{side.name}.answers")
    keeping = replace(side, load=side.load.model_copy(update={"answers": answers}))
    light = costed(side, turn.rates.light_per_s, seed, turn)
    heavy = costed(keeping, turn.rates.heavy_per_s, seed + 1, turn)
    search = Search(
        start_per_s=turn.start_per_s,
        bounds=Bounds(
            low_per_s=turn.start_per_s / SPAN,
            high_per_s=turn.start_per_s * SPAN,
            resolution=RESOLUTION,
            most_probes=MOST_PROBES,
        ),
        growth=WARM_GROWTH if turn.is_known else COLD_GROWTH,
    )
    probing = replace(side, load=side.load.model_copy(update={"duration_s": PROBE_SHARE * side.load.duration_s}))
    search, probes = _searched(probing, search, turn, seed + 2)
    return {
        "light": light,
        "heavy": heavy,
        "answers": check_answers(turn.workload, turn.drawn, answers),
        "sustained_per_s": 0.0 if search.ending is None else search.best_per_s,
        "ending": search.ending,
        "probes": probes,
    }


def _searched(side: ServedSide, search: Search, turn: Turn, seed: int) -> tuple[Search, list[dict[str, Any]]]:
    """The search at its end, and its probes; a side that dies ends its search without an ending."""
    probes: list[dict[str, Any]] = []
    while (rate_per_s := search.next_rate()) is not None:
        probe: dict[str, Any] = {"side": side.name, "rate_per_s": rate_per_s, "seed": seed + len(probes)}
        try:
            result = side.measure(rate_per_s, seed + len(probes))
        except OfframpError as error:
            print(f"{_head(side.name, rate_per_s, turn)}  {error}", flush=True)
            return search, [*probes, probe | {"result": None, "verdict": None, "error": str(error)}]
        verdict = turn.target.verdict(result)
        print(probe_line(side.name, rate_per_s, result, turn), flush=True)
        probes.append(probe | {"result": result.model_dump(mode="json"), "verdict": verdict, "error": None})
        search = search.learn(rate_per_s, verdict)
    return search, probes


def _head(name: str, rate_per_s: float, turn: Turn) -> str:
    return f"{turn.index + 1:>5}  {name:<18} {rate_per_s:9.1f}"


def probe_line(name: str, rate_per_s: float, result: LoadResult, turn: Turn) -> str:
    """A run of the client, below `PROBE_HEADER`."""
    p50, p99 = ("-" if seconds is None else f"{seconds * 1000:.1f}" for seconds in (result.p50_s, result.p99_s))
    verdict = turn.target.verdict(result)
    return f"{_head(name, rate_per_s, turn)} {p50:>8} {p99:>8} {result.lost_share:>8.1%}  {verdict}"


def sustained(turn: Mapping[str, Any]) -> float | None:
    """The highest rate that passed in a turn, which results of before 23 November 2026 call goodput; None for none."""
    return float(turn["sustained_per_s"] if "sustained_per_s" in turn else turn["goodput_per_s"]) or None


def costed(side: ServedSide, rate_per_s: float, seed: int, turn: Turn) -> dict[str, Any]:
    """Figures at a rate, and processor seconds per answer, of our processes by part, of a peer as a whole."""
    side.begin()
    before = side.server.cpu_s_by_part()
    result = side.measure(rate_per_s, seed)
    parts = per_answer(before, side.server.cpu_s_by_part(), result, side.load.inputs_per_request)
    told = f"{1e3 * sum(parts.values()):.2f} ms of processor time per answer"
    print(f"{probe_line(side.name, rate_per_s, result, turn)}  {told}", flush=True)
    return result.model_dump(mode="json") | {"cpu_s": parts if side.is_ours else {"server": sum(parts.values())}}


def per_answer(
    before: Mapping[str, float], after: Mapping[str, float], result: LoadResult, inputs_per_request: int = 1
) -> dict[str, float]:
    """Processor seconds per answered input that were spent between, by part; the warm-up counts as the rest does."""
    answered_share = result.num_answered / max(1, result.num_counted)
    return per_input(before, after, max(1.0, result.num_sent * answered_share * inputs_per_request))


def per_input(before: Mapping[str, float], after: Mapping[str, float], num_inputs: float) -> dict[str, float]:
    """Processor seconds that were spent between, by part."""
    return {part: (after[part] - before.get(part, 0.0)) / num_inputs for part in after}


def check_answers(workload: Workload, drawn: Sequence[int], answers: Path) -> dict[str, float | None]:
    """Of a client's file of answers to these texts: how many, and the shares that are right.

    `accuracy` is against true labels, `as_recorded` against the recorded label and exit; None where there are none.
    """
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    pairs = [(drawn[row["input"]], (row["label"], row["exit"])) for row in rows]
    labels, expected = workload.labels, _recorded(workload)
    return {
        "num_inputs": len(pairs),
        "accuracy": _share([answer[0] == labels[index] for index, answer in pairs] if labels else []),
        "as_recorded": _share([answer == expected[index] for index, answer in pairs] if expected else []),
    }


def _recorded(workload: Workload) -> list[tuple[str, int]]:
    """Label and exit of each text; none where exits are computed."""
    if workload.keys is None:
        return []
    names = read_card(workload.folder).label_names
    outcome = workload.records.outcome(workload.thresholds)
    assert outcome.answers_N is not None
    recorded = zip(outcome.answers_N.tolist(), outcome.exits_N.tolist(), strict=True)
    return [(names[label], exit_block) for label, exit_block in recorded]


def _share(rights: Sequence[bool]) -> float | None:
    return sum(rights) / len(rights) if rights else None
