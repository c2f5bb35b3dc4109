"""A side's turn: its processor time and latency at rates that all sides get, and the highest rate that it sustains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.peers.answers import check_answers
from experiments.peers.client import LoadResult
from experiments.peers.rounds import SEEDS_PER_ROUND, Hunt, Probe, interleave, probe_line
from experiments.peers.search import Bounds, Target
from experiments.peers.sides import ServedSide
from experiments.peers.workloads import Workload

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
    hunt = Hunt(
        num_rounds=1,
        starts_per_s={side.name: turn.start_per_s},
        bounds=Bounds(
            low_per_s=turn.start_per_s / SPAN,
            high_per_s=turn.start_per_s * SPAN,
            resolution=RESOLUTION,
            most_probes=MOST_PROBES,
        ),
        target=turn.target,
        seed=seed + 2,
        cold_growth=WARM_GROWTH if turn.is_known else COLD_GROWTH,
    )
    probing = replace(side, load=side.load.model_copy(update={"duration_s": PROBE_SHARE * side.load.duration_s}))
    found = interleave([probing], hunt, _print_probe)
    (reached,) = found.rounds
    return {
        "light": light,
        "heavy": heavy,
        "answers": check_answers(turn.workload, turn.drawn, answers),
        "sustained_per_s": reached.sustained_per_s or 0.0,
        "ending": reached.ending,
        "probes": [probe.document() for probe in found.probes],
    }


def sustained(turn: Mapping[str, Any]) -> float | None:
    """The highest rate that passed in a turn, which results of before 23 November 2026 call goodput; None for none."""
    return float(turn["sustained_per_s"] if "sustained_per_s" in turn else turn["goodput_per_s"]) or None


def costed(side: ServedSide, rate_per_s: float, seed: int, turn: Turn) -> dict[str, Any]:
    """Figures at a rate, and processor seconds per answer, of our processes by part, of a peer as a whole."""
    side.begin()
    before = side.server.cpu_s_by_part()
    result = side.measure(rate_per_s, seed)
    parts = per_answer(before, side.server.cpu_s_by_part(), result, side.load.inputs_per_request)
    probe = Probe(
        round_index=turn.index,
        side=side.name,
        rate_per_s=rate_per_s,
        seed=seed,
        result=result,
        verdict=turn.target.verdict(result),
        error=None,
    )
    told = f"{1e3 * sum(parts.values()):.2f} ms of processor time per answer"
    print(f"{probe_line(probe)}  {told}", flush=True)
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


def _print_probe(probe: Probe) -> None:
    print(probe_line(probe), flush=True)
