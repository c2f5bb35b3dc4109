"""E3, figure 16: the mix of easy and hard inputs changes, and the live controller's plan follows.

Simulated: engine, ingress and controller are the live ones. The mix changes in the middle of a planning period.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.adapting import BIN_S, CONTROLLED, PERIOD_S, SIDES, Bench, Load, Side, bench, play, stretch
from experiments.studies.picture import Bars, Lines
from experiments.studies.sides import SEED, equal_cluster, mixed_cluster
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, largest_ratios, ratio
from simulator.control.run import Controlled

WORST = 1 - 0.23
"""E3 over the model without exits where 80 % are hard (section 5.9)."""
TIME_SCALE: Mapping[Effort, float] = {"full": 40.0, "quick": 400.0}
PROBES: Mapping[Effort, float] = {"full": 0.005, "quick": 0.04}
"""Share of probes. At the edge of capacity a probe costs what it makes the service miss; the default of 2 % is for
services that are not full."""
CLUSTERS = {"homogeneous": equal_cluster, "heterogeneous": mixed_cluster}
RUNS: Mapping[Effort, tuple[tuple[str, Load], ...]] = {
    "full": (
        ("homogeneous", "closed"),
        ("heterogeneous", "closed"),
        ("homogeneous", "open"),
        ("heterogeneous", "open"),
    ),
    "quick": (("homogeneous", "closed"),),
}

Played = Mapping[str, Any]
"""What the sides did on one cluster under one load, per unstretched second, as plain data.

`mixes`; `predicted_per_s` of the best plan for each, which `omniscient` has; by side, `goodput_per_s` in the period
that begins one period after each switch, `bins_per_s` over time, `settled_s` after each switch, until the last plan of
the scored periods was followed (None where none was put in force), and `plans` in force with reason and second.
"""


def play_all(on: Bench, load: Load, sides: Sequence[Side] = SIDES) -> Played:
    """Sides one after the other, with the same inputs."""
    results = {side: play(on, side, load, seed=SEED) for side in sides}
    bins = [(index * BIN_S, (index + 1) * BIN_S) for index in range(round(on.duration_s / BIN_S))]
    scored = [phase.scored_s for phase in on.phases]
    return {
        "mixes": tuple(phase.name for phase in on.phases),
        "predicted_per_s": tuple(on.rate_per_s("best", phase) * on.time_scale for phase in on.phases),
        "goodput_per_s": {side: _rates(on, result, scored) for side, result in results.items()},
        "bin_s": BIN_S,
        "bins_per_s": {side: _rates(on, result, bins) for side, result in results.items()},
        "settled_s": {side: _settled(on, result) for side, result in results.items()},
        "plans": {side: _plans(result) for side, result in results.items()},
    }


def _rates(on: Bench, result: Controlled | None, spans: Sequence[tuple[float, float]]) -> tuple[float | None, ...]:
    if result is None:
        return (None,) * len(spans)
    return tuple(result.outcome.figures_between(*span).goodput_per_s * on.time_scale for span in spans)


def _settled(on: Bench, result: Controlled | None) -> tuple[float | None, ...]:
    """The controller says "plan" when a change is over."""
    said_s = [] if result is None else [float(each["at_s"]) for each in result.said if each["kind"] == "plan"]
    return tuple(
        max((at_s - phase.start_s for at_s in said_s if phase.start_s <= at_s < phase.scored_s[1]), default=None)
        for phase in on.phases[1:]
    )


def _plans(result: Controlled | None) -> tuple[Mapping[str, Any], ...]:
    plans = [] if result is None else [plan for plan in result.plans if plan.outcome == "in force"]
    return tuple({"at_s": each.at_s, "reason": each.reason, "plan": each.placed["plan"]["stages"]} for each in plans)


def result_of(played: Mapping[str, Played]) -> StudyResult:
    """What the study gives, of the runs of one effort by cluster and load; its ratios are those of the first."""
    first = next(iter(played.values()))["goodput_per_s"]
    return StudyResult(
        comparisons=tuple(each for name, one in played.items() for each in _comparisons(name, one)),
        pictures=tuple(picture for name, one in played.items() for picture in _pictures(name, one)),
        e3=largest_ratios(first, "e3"),
        best=largest_ratios(first, "best"),
        figures=played,
        tables=tuple(_table(name, one) for name, one in played.items()),
    )


def _comparisons(name: str, played: Played) -> Iterator[Comparison]:
    """The paper gives a figure of its closed loop, where inputs are hardest."""
    rates, last = played["goodput_per_s"], played["mixes"][-1]
    e3, best = (ratio(rates[side][-1], rates["stock"][-1]) for side in ("e3", "best"))
    yield Comparison(f"{name}: e3 / stock, {last}", e3, WORST if "closed" in name else None)
    yield Comparison(f"{name}: best / stock, {last}", best)
    for other in ("omniscient", "first plan"):
        for mix, ours, theirs in zip(played["mixes"], rates["best"], rates[other], strict=True):
            yield Comparison(f"{name}: best / {other}, {mix}", ratio(ours, theirs))


def _table(name: str, played: Played) -> Table:
    """How the controlled sides followed, and how near to what is predicted the best plans come."""
    mixes, rows = played["mixes"], dict[str, str | float | None]()
    for side in CONTROLLED:
        rows[f"{side}: changes of plan"] = len(played["plans"][side]) - 1
        for mix, settled_s in zip(mixes[1:], played["settled_s"][side], strict=True):
            rows[f"{side}: last plan in force after the switch to {mix} (s)"] = settled_s
    for mix, did, predicted in zip(
        mixes, played["goodput_per_s"]["omniscient"], played["predicted_per_s"], strict=True
    ):
        rows[f"omniscient, {mix}: goodput over what is predicted"] = ratio(did, predicted)
    return Table(name, ("", ""), tuple(rows.items()))


def _pictures(name: str, played: Played) -> tuple[Bars, Lines]:
    over, unit = played["bins_per_s"], "goodput (inputs/s)"
    x = tuple((index + 0.5) * BIN_S / PERIOD_S for index in range(len(over["best"])))
    mixes, after = played["mixes"], played["goodput_per_s"]
    return (
        Bars(f"Goodput after each switch: {name}", "easy : hard inputs (%)", unit, mixes, after),
        Lines(f"Goodput over time: {name}", "planning periods", unit, x, over),
    )


def run(effort: Effort) -> StudyResult:
    """Both clusters, closed and open loop; quick: equal accelerators in a closed loop, fewer inputs."""
    records, time_scale = bert12_sst2("entropy"), TIME_SCALE[effort]
    played = {}
    for cluster, load in RUNS[effort]:
        problem = CLUSTERS[cluster](stretch(time_scale))
        on = bench(problem, records, time_scale=time_scale, probe_share=PROBES[effort])
        played[f"{cluster}, {load} loop"] = play_all(on, load)
    return result_of(played)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
