"""A side's turn: its processor time and latency at rates that all sides get, and the highest rate that it sustains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from earlyexit.errors import OfframpError
from earlyexit.network.store import read_card
from experiments.peers.client import LoadResult
from experiments.peers.sides import ServedSide
from experiments.peers.workloads import Workload
from offramp.load.sustained import Bounds, Search, Sustaining

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
    target: Sustaining
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
        verdict = turn.target.verdict(result.measured)
        print(probe_line(side.name, rate_per_s, result, turn), flush=True)
        probes.append(probe | {"result": result.model_dump(mode="json"), "verdict": verdict, "error": None})
        search = search.learn(rate_per_s, verdict)
    return search, probes


def _head(name: str, rate_per_s: float, turn: Turn) -> str:
    return f"{turn.index + 1:>5}  {name:<18} {rate_per_s:9.1f}"


def probe_line(name: str, rate_per_s: float, result: LoadResult, turn: Turn) -> str:
    """A run of the client, below `PROBE_HEADER`."""
    p50, p99 = ("-" if seconds is None else f"{seconds * 1000:.1f}" for seconds in (result.p50_s, result.p99_s))
    verdict = turn.target.verdict(result.measured)
    return f"{_head(name, rate_per_s, turn)} {p50:>8} {p99:>8} {result.measured.lost_share:>8.1%}  {verdict}"


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
