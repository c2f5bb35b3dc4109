"""E3, figure 16: the mix of easy and hard inputs changes, and the live controller's plan follows.

Simulated: engine, ingress and controller are the live ones. The mix changes in the middle of a planning period.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.adapting import BIN_S, CONTROLLED, PERIOD_S, SIDES, Bench, Load, Side, bench, play, stretch
from experiments.studies.picture import Bars, Lines
from experiments.studies.sides import SEED, equal_cluster, mixed_cluster
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, largest_ratios, ratio
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

Rates = Mapping[Side, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the sides did on one cluster under one load, per unstretched second."""

    cluster: str
    load: Load
    mixes: tuple[str, ...]
    predicted_per_s: tuple[float, ...]
    """Of the best plan for each mix, which `omniscient` has."""
    goodput_per_s: Rates
    """In the period that begins one period after each switch."""
    bins_per_s: Rates
    """Over time."""
    settled_s: Rates
    """After each switch, until the last plan of the scored periods was followed; None where none was put in force."""
    plans: Mapping[Side, tuple[Mapping[str, Any], ...]]
    """Those in force, with reason and second."""

    @property
    def name(self) -> str:
        return f"{self.cluster}, {self.load} loop"


def play_all(on: Bench, cluster: str, load: Load, sides: Sequence[Side] = SIDES) -> Played:
    """Sides one after the other, with the same inputs."""
    results = {side: play(on, side, load, seed=SEED) for side in sides}
    bins = [(index * BIN_S, (index + 1) * BIN_S) for index in range(round(on.duration_s / BIN_S))]
    return Played(
        cluster=cluster,
        load=load,
        mixes=tuple(phase.name for phase in on.phases),
        predicted_per_s=tuple(on.rate_per_s("best", phase) * on.time_scale for phase in on.phases),
        goodput_per_s={
            side: _rates(on, result, [phase.scored_s for phase in on.phases]) for side, result in results.items()
        },
        bins_per_s={side: _rates(on, result, bins) for side, result in results.items()},
        settled_s={side: _settled(on, result) for side, result in results.items()},
        plans={side: _plans(result) for side, result in results.items()},
    )


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


def result_of(played: Sequence[Played]) -> StudyResult:
    """What the study gives, of the runs of one effort; its ratios are those of the first run."""
    return StudyResult(
        comparisons=tuple(each for one in played for each in _comparisons(one)),
        pictures=tuple(picture for one in played for picture in _pictures(one)),
        e3=_ratios(played[0], "e3"),
        best=_ratios(played[0], "best"),
        figures={one.name: _document(one) for one in played},
        tables=tuple(_table(one) for one in played),
    )


def _ratios(played: Played, strategy: Side) -> Ratios:
    return largest_ratios({str(side): values for side, values in played.goodput_per_s.items()}, strategy)


def _comparisons(played: Played) -> tuple[Comparison, ...]:
    rates, last = played.goodput_per_s, played.mixes[-1]
    e3, best = (ratio(rates[side][-1], rates["stock"][-1]) for side in ("e3", "best"))
    others: tuple[Side, ...] = ("omniscient", "first plan")
    return (
        Comparison(f"{played.name}: e3 / stock, {last}", e3, WORST if played.load == "closed" else None),
        Comparison(f"{played.name}: best / stock, {last}", best),
        *(
            Comparison(f"{played.name}: best / {other}, {mix}", ratio(ours, theirs))
            for other in others
            for mix, ours, theirs in zip(played.mixes, rates["best"], rates[other], strict=True)
        ),
    )


def _table(played: Played) -> Table:
    """How the controlled sides followed, and how near to what is predicted the best plans come."""
    rows: dict[str, str | float | None] = {}
    for side in CONTROLLED:
        rows[f"{side}: changes of plan"] = len(played.plans[side]) - 1
        for mix, settled_s in zip(played.mixes[1:], played.settled_s[side], strict=True):
            rows[f"{side}: last plan in force after the switch to {mix} (s)"] = settled_s
    for mix, did, predicted in zip(
        played.mixes, played.goodput_per_s["omniscient"], played.predicted_per_s, strict=True
    ):
        rows[f"omniscient, {mix}: goodput over what is predicted"] = ratio(did, predicted)
    return Table(played.name, ("", ""), tuple(rows.items()))


def _document(played: Played) -> dict[str, Any]:
    names = ("mixes", "predicted_per_s", "goodput_per_s", "bins_per_s", "settled_s", "plans")
    return {"bin_s": BIN_S, **{name: getattr(played, name) for name in names}}


def _pictures(played: Played) -> tuple[Bars, Lines]:
    after, over = (
        {str(side): row for side, row in rates.items()} for rates in (played.goodput_per_s, played.bins_per_s)
    )
    x = tuple((index + 0.5) * BIN_S / PERIOD_S for index in range(len(over["best"])))
    title, unit = "Goodput after each switch", "goodput (inputs/s)"
    return (
        Bars(f"{title}: {played.name}", "easy : hard inputs (%)", unit, played.mixes, after),
        Lines(f"Goodput over time: {played.name}", "planning periods", unit, x, over),
    )


def run(effort: Effort) -> StudyResult:
    """Both clusters, closed and open loop; quick: equal accelerators in a closed loop, fewer inputs."""
    records, time_scale = bert12_sst2("entropy"), TIME_SCALE[effort]
    played = []
    for cluster, load in RUNS[effort]:
        problem = CLUSTERS[cluster](stretch(time_scale))
        on = bench(problem, records, time_scale=time_scale, probe_share=PROBES[effort])
        played.append(play_all(on, cluster, load))
    return result_of(played)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
