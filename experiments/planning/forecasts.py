"""Forecasts of survival and of the request rate against the last value: rolling origin, one window ahead.

    OFFRAMP_DATA=... python -m experiments.planning.forecasts

Survival: recorded exits of BERT-base with 11 ramps on SST-2 dev (entropy at most 0.4 nats), mixed from easy and hard
inputs. Windows of 120 s at 100 requests/s; the history of each holds the probes alone, 2 % of them (240 a window, in
Poisson numbers), as for ramps that are off. The error of a forecast is the mean distance, over blocks 1 to 11, to the
share that *all* inputs of the coming window show. "all seen" repeats this with every input in the history, as for
ramps that are on; intervals are of the level, and there the coming window's own scatter is as large as they are, so
they hold less often. Histories are the last 60 windows; the first 10 windows are not forecast. The method was chosen on
synthetic exits, on other mixes of these, on the first four days of the Twitter trace (left out here), and in its last
settings on these workloads with other seeds: the seeds below were drawn once, for the report. Some fourteen minutes on
one core; writes runs/forecasts/results.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.data import RUNS, require_data
from experiments.kit import keep, show
from experiments.planning.drift import (
    Kinds,
    azure_function_rates,
    bursts,
    cycle,
    draw_reach,
    easy_and_hard,
    gradual,
    switching,
    twitter_rates,
    wandering,
)
from experiments.recorded_exits import bert12_sst2
from offramp.jobs.provenance import provenance
from profiles.forecast import SurvivalHistory, forecast_rate, forecast_survival

FloatArray = npt.NDArray[np.float64]

ENTROPY = 0.4
WINDOW_S = 120
RATE_RPS = 100
PROBE_SHARE = 0.02
HISTORY = 60
FIRST = 10
SEEDS = (2031, 2032)
TWITTER = "traces/twitter_per_second_infadapter.txt.gz"
AZURE = "traces/azure_functions_2019_sample_500_inv.csv.gz"
DESIGN_DAYS = 4
"""Of the Twitter trace, that the method was chosen on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A share of easy inputs per window."""

    name: str
    easy_W: Callable[[np.random.Generator], FloatArray]
    stride: int = 1
    drifts: bool = True


WORKLOADS = (
    Workload(name="switch every 15", easy_W=lambda _: switching(240, 15)),
    Workload(name="switch every 30", easy_W=lambda _: switching(240, 30)),
    Workload(name="gradual, 60 one way", easy_W=lambda _: gradual(240, 60)),
    Workload(name="daily cycle", easy_W=lambda _: cycle(720, 720), stride=3),
    Workload(name="four-hour cycle", easy_W=lambda _: cycle(240, 120)),
    Workload(name="bursts", easy_W=lambda rng: bursts(240, rng)),
    Workload(name="wandering", easy_W=lambda rng: wandering(240, rng)),
    Workload(name="steady", easy_W=lambda _: np.full(120, 0.5), drifts=False),
)


def backtest(seen_WK: FloatArray, true_WK: FloatArray, stride: int = 1) -> dict[str, float]:
    """Forecast each window from those before it; `seen_WK` counts inputs that reach each block, `true_WK` shares.

    Gives mean absolute errors, in shares, and `coverage`: figures inside their intervals, which promise 80 %.
    """
    errors: dict[str, list[float]] = {"last": [], "mean": [], "forecast": [], "coverage": []}
    for now in range(FIRST, len(seen_WK), stride):
        past = SurvivalHistory.from_counts(seen_WK[max(0, now - HISTORY) : now])
        found = forecast_survival(past)
        guesses = {"forecast": found.survival_HK[0], "last": past.survival_WK[-1], "mean": past.survival_WK.mean(0)}
        for name, guess_K in guesses.items():
            errors[name].append(float(np.abs(guess_K - true_WK[now])[1:].mean()))
        inside_K = (found.survival_low_HK[0] <= true_WK[now]) & (true_WK[now] <= found.survival_high_HK[0])
        errors["coverage"].append(float(inside_K[1:].mean()))
    return {name: float(np.mean(values)) for name, values in errors.items()}


def run_workload(workload: Workload, kinds: Kinds, num_probes: float, seed: int) -> dict[str, float]:
    """One workload; `num_probes` expected per window, and as many as there are inputs where all are seen."""
    rng = np.random.default_rng(seed)
    exits_WK = kinds.exits(workload.easy_W(rng))
    num_inputs = RATE_RPS * WINDOW_S
    all_WK = draw_reach(exits_WK, rng.poisson(num_inputs, len(exits_WK)), rng)
    if num_probes >= num_inputs:
        seen_WK = all_WK
    else:
        seen_WK = draw_reach(exits_WK, np.maximum(rng.poisson(num_probes, len(exits_WK)), 1), rng)
    return backtest(seen_WK, all_WK / all_WK[:, :1], workload.stride)


def survival_table(kinds: Kinds, num_probes: float) -> dict[str, Any]:
    """Every workload, and the drifting ones together."""
    rows = {
        workload.name: _mean([run_workload(workload, kinds, num_probes, seed) for seed in SEEDS])
        for workload in WORKLOADS
    }
    drifting = [rows[workload.name] for workload in WORKLOADS if workload.drifts]
    together = sum(row["forecast"] for row in drifting) / sum(row["last"] for row in drifting)
    _show(f"{num_probes:.0f} inputs a window in the history", rows)
    print(f"drifting workloads together: {together:.3f} of the last value's error\n")
    return {"workloads": rows, "drifting_ratio": together}


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the errors, name by name, and the ratio of two of them."""
    row = {name: float(np.mean([each[name] for each in found])) for name in found[0]}
    return {**row, "ratio": row["forecast"] / row["last"]}


def _show(title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    names = list(next(iter(rows.values())))
    show(title, ("", *names), [(label, *(row[name] for name in names)) for label, row in rows.items()])


def rate_errors(rates_W: FloatArray, stride: int) -> dict[str, float]:
    """Mean absolute errors in requests per second; windows after a hole or in one are not forecast."""
    errors: dict[str, list[float]] = {"forecast": [], "last": [], "mean": [], "inside": []}
    for now in range(HISTORY, len(rates_W), stride):
        past_W = rates_W[now - HISTORY : now]
        if np.isnan(rates_W[now - 1 : now + 1]).any():
            continue
        found = forecast_rate(past_W)
        guesses = {"forecast": found.rate_rps_H[0], "last": past_W[-1], "mean": np.nanmean(past_W)}
        for name, guess in guesses.items():
            errors[name].append(abs(float(guess) - rates_W[now]))
        errors["inside"].append(float(found.low_rps_H[0] <= rates_W[now] <= found.high_rps_H[0]))
    return {
        **_mean([{name: float(np.mean(values)) for name, values in errors.items()}]),
        "windows": float(len(errors["last"])),
    }


def rate_table() -> dict[str, Any]:
    """Both traces."""
    design = DESIGN_DAYS * 24 * 3600 // WINDOW_S
    traces = {
        "Twitter": (twitter_rates(require_data(TWITTER))[design:], 4),
        "Azure Functions": (azure_function_rates(require_data(AZURE)), 1),
    }
    rows = {name: rate_errors(rates_W, stride) for name, (rates_W, stride) in traces.items()}
    _show("rates, requests/s", rows)
    return rows


def seconds_for_24_ramps(repeats: int = 3) -> float:
    """Median time to forecast 24 drifting ramps from 60 windows, statsmodels already imported."""
    rng = np.random.default_rng(7)
    shares_WR = 1 / (1 + np.exp(-(3 + np.cumsum(rng.normal(0, 0.1, (HISTORY, 24)), 0))))
    survival_WK = np.cumprod(np.hstack([np.ones((HISTORY, 1)), shares_WR]), axis=1)
    exits_WK = -np.diff(survival_WK, axis=1, append=0)
    history = SurvivalHistory.from_counts(draw_reach(exits_WK, np.full(HISTORY, 240), rng))
    forecast_survival(history)
    times_s = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        forecast_survival(history)
        times_s.append(time.perf_counter() - began_s)
    return float(np.median(times_s))


def main() -> None:
    """All tables, and the file."""
    records = bert12_sst2("entropy")
    kinds = easy_and_hard(records.outcome(dict.fromkeys(records.ramps, ENTROPY)))
    num_inputs = RATE_RPS * WINDOW_S
    probes = PROBE_SHARE * num_inputs
    results = {
        "probes": survival_table(kinds, probes),
        "all_seen": survival_table(kinds, num_inputs),
        "rates": rate_table(),
        "seconds_24_ramps_60_windows": seconds_for_24_ramps(),
    }
    print(f"24 ramps from 60 windows: {results['seconds_24_ramps_60_windows']:.2f} s")
    facts = provenance(seeds=SEEDS, entropy=ENTROPY, rate_rps=RATE_RPS, probe_share=PROBE_SHARE, history=HISTORY)
    document = {"schema_version": 1, "provenance": facts, **results}
    print(f"written: {keep(document, RUNS / 'forecasts' / 'results.json')}")


if __name__ == "__main__":
    main()
