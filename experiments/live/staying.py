"""Answers before the end on the real service: a plan that stays beside the model without exits, at equal rate.

    python -m experiments.live.staying [--requests 800] [--load 0.6]

Four EMULATED V100 run the whole model in batches of 8; requests of one input come at a share of what the model without
exits does, the same ones at the same times on both sides. One side is *stock*; the other has those ramps on that give
the least mean answer time by the records, within 2 % of the model's time (Apparate's budget), and its inputs run on
when they are answered. What the records promise is the simulator's word: the same arrivals, exits and profile, and no
processes that could be late. Told are p25, p50 and p99 of both, how far the savings are from what was promised, and
answers per second. Writes runs/live/staying.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from earlyexit.split import AfterAnswer, Split
from experiments.kit import show
from experiments.live.emulation import Bench, emulated
from experiments.live.load import Driven
from experiments.live.scenario import command, judged, milliseconds, played
from optimizer.live.exit_times import ExitTimes
from optimizer.plan import Plan, Stage
from simulator.decisions import recorded
from simulator.scenario import Scenario
from simulator.simulate import simulate

COUNTS = {"V100": 4}
NUM_BLOCKS, BATCH = 12, 8
RAMP_BUDGET = 0.02
MOST_RAMPS = 4
"""Each takes 0.44 % of the model's time."""
SLO_S = 1.0
"""Emulated: nothing is dropped, so that the sides answer the same requests."""
SHARES = {"p25_s": 25, "p50_s": 50, "p99_s": 99}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Latencies and answers per second, served or simulated."""

    p25_s: float
    p50_s: float
    p99_s: float
    answers_per_s: float


def run(on: Bench) -> dict[str, Any]:
    """Both sides, one after the other."""
    on = replace(on, emulation=replace(on.emulation, slo_s=SLO_S))
    ramps = best_ramps(on)
    plans = {"stock": whole_model(on, (), "stop"), "stay": whole_model(on, ramps, "stay")}
    rate_per_s = on.options.load * on.predicted(plans["stock"]).rate_per_s
    print(f"ramps {list(ramps)}; {rate_per_s:.1f} inputs/s")
    told, live, promised = {}, {}, {}
    for name, plan in plans.items():
        phase = on.steady("all", on.options.requests / rate_per_s, rate_per_s)
        driven = played(on, plan, [phase], inputs_per_request=1).driven
        told[name] = judged(on, driven, {name: [(0.0, phase.seconds)]}, title=name)
        live[name], promised[name] = served_side(driven), simulated_side(on, plan, driven)
    show("", ("", "p25 ms", "p50 ms", "p99 ms", "answers/s"), rows_of(live, promised))
    savings = {name: saved(live, promised, name) for name in ("p25_s", "p50_s")}
    for name, (got, said) in savings.items():
        print(f"{name[:3]}: {milliseconds(got)} ms saved, {milliseconds(said)} promised: {got / said:.3f} of it")
    for name in ("p99_s", "answers_per_s"):
        print(f"{name}: stay / stock {getattr(live['stay'], name) / getattr(live['stock'], name):.3f}")
    return {
        "ramps": ramps,
        "rate_per_s": rate_per_s,
        "live": {name: asdict(side) for name, side in live.items()},
        "promised": {name: asdict(side) for name, side in promised.items()},
        "saved": savings,
        "sides": told,
    }


def best_ramps(on: Bench) -> tuple[int, ...]:
    """Those whose answers come soonest on average, by the records; all subsets within the budget are tried."""
    (table,) = on.problem.latency.values()
    times = ExitTimes.of(table, on.records.ramps, BATCH)
    subsets = [each for number in range(1, MOST_RAMPS + 1) for each in combinations(on.records.ramps, number)]
    within = [each for each in subsets if times.overhead(each) <= RAMP_BUDGET]

    def mean_s(ramps: tuple[int, ...]) -> float:
        outcome = on.records.outcome({ramp: on.thresholds[ramp] for ramp in ramps})
        return times.mean_s(outcome.exits_N, ramps)

    return min(within, key=mean_s)


def whole_model(on: Bench, ramps: tuple[int, ...], after_answer: AfterAnswer) -> Plan:
    """One split on every accelerator."""
    split = Split(first=0, end=NUM_BLOCKS, batch=BATCH, ramps=ramps, after_answer=after_answer)
    return on.plan((Stage(device=emulated("V100"), replicas=COUNTS["V100"], splits=(split,)),))


def served_side(driven: Driven) -> Side:
    """From when a request was sent: a late client is not the service's affair."""
    done = [record for record in driven.records if record.error is None]
    return _side([record.done_s - record.sent_s for record in done], max(record.done_s for record in done))


def simulated_side(on: Bench, plan: Plan, driven: Driven) -> Side:
    """The same requests, sent when they were."""
    row_of = {sample_id: row for row, sample_id in enumerate(on.records.sample_ids)}
    sent = sorted(driven.records, key=lambda record: record.sent_s)
    scenario = Scenario(
        problem=on.problem,
        plan=plan,
        decisions=recorded(on.records, on.thresholds),
        rows_N=np.array([row_of[driven.keys[record.input_indices[0]]] for record in sent]),
        arrivals_s=np.array([record.sent_s for record in sent]),
        duration_s=max(record.sent_s for record in sent) + 1.0,
        slo_s=math.inf,
    )
    outcome = simulate(scenario)
    return _side(outcome.latency_s_N.tolist(), float((outcome.arrived_s_R + outcome.latency_s_N).max()))


def _side(latencies_s: Sequence[float], ended_s: float) -> Side:
    figures = {name: float(np.percentile(latencies_s, share)) for name, share in SHARES.items()}
    return Side(**figures, answers_per_s=len(latencies_s) / ended_s)


def saved(live: Mapping[str, Side], promised: Mapping[str, Side], name: str) -> tuple[float, float]:
    """How much sooner the answers come, served and promised."""
    got, said = ((getattr(of["stock"], name) - getattr(of["stay"], name)) for of in (live, promised))
    return got, said


def rows_of(live: Mapping[str, Side], promised: Mapping[str, Side]) -> list[tuple[str, ...]]:
    """For the table."""
    return [
        (f"{name}, {how}", *(milliseconds(getattr(side, share)) for share in SHARES), f"{side.answers_per_s:.2f}")
        for how, sides in (("live", live), ("promised", promised))
        for name, side in sides.items()
    ]


if __name__ == "__main__":
    command("staying", __doc__, run, COUNTS, time_scale=60.0, requests=800, load=0.6)
