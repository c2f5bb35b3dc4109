"""E3, figure 21: forecast and actual batch sizes at two cuts.

Computed: ten windows of two minutes at 100 requests/s, mixed from recorded easy and hard inputs. A history of 60
windows holds the probes (2 % of the inputs), or every input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from experiments.problems import ENTROPY
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from profiles.forecast import forecast_survival
from profiles.records import ExitOutcome
from profiles.windows import SurvivalHistory

FloatArray = npt.NDArray[np.float64]
WINDOW_S, RATE_RPS = 120, 100
NUM_INPUTS = WINDOW_S * RATE_RPS
PROBE_SHARE = 0.02
HISTORY, WINDOWS = 60, 10
INPUT_BATCH = 8
HISTORIES = {"probes": PROBE_SHARE * NUM_INPUTS, "all inputs": float(NUM_INPUTS)}
"""Observed inputs in each past window."""
SEEDS: dict[Effort, int] = {"full": 3, "quick": 1}

Kinds = tuple[FloatArray, FloatArray]
"""Shares of easy and of hard inputs by the block after which they leave (K)."""


def easy_and_hard(outcome: ExitOutcome) -> Kinds:
    """Returns easy inputs, which leave in the first half of the model, and hard inputs (E3 section 5.4 has no rule)."""
    easy_N = outcome.exits_N < outcome.num_blocks // 2
    easy_K, hard_K = (
        np.bincount(outcome.exits_N[rows], minlength=outcome.num_blocks) / rows.sum() for rows in (easy_N, ~easy_N)
    )
    return easy_K, hard_K


def mixed(kinds: Kinds, easy_W: FloatArray) -> FloatArray:
    """Returns the shares by exit (W, K) of each window's mix."""
    return easy_W[:, None] * kinds[0] + (1 - easy_W[:, None]) * kinds[1]


def switching(num_windows: int, every: int) -> FloatArray:
    """Returns shares of easy inputs: 80:20, 50:50, 20:80 and back (E3 section 5.4)."""
    return np.array([0.8, 0.5, 0.2, 0.5])[np.arange(num_windows) // every % 4]


def cycle(num_windows: int, period: int) -> FloatArray:
    """Returns a sine between 80:20 and 20:80; a day has 720 windows of two minutes."""
    return 0.5 + 0.3 * np.sin(2 * np.pi * np.arange(num_windows) / period)


def bursts(num_windows: int, rng: np.random.Generator) -> FloatArray:
    """Returns 80:20 with bursts of 20:80 that last one to four windows, about every twenty."""
    easy_W = np.full(num_windows, 0.8)
    window = 0
    while window < num_windows:
        window += int(rng.geometric(1 / 20))
        length = int(rng.integers(1, 5))
        easy_W[window : window + length] = 0.2
        window += length
    return easy_W


def wandering(num_windows: int, rng: np.random.Generator) -> FloatArray:
    """Returns a random walk of 0.02 per window, reflected at 80:20 and 20:80."""
    walk_W = 0.5 + np.cumsum(rng.normal(0, 0.02, num_windows))
    return 0.2 + np.abs((walk_W - 0.2 + 0.6) % 1.2 - 0.6)


GRADUAL, TWO_SWITCHES = "gradual, 60 one way", "two switches in ten"
WORKLOADS: Mapping[str, Callable[[np.random.Generator], FloatArray]] = {
    "switch every 15": lambda _: switching(240, 15),
    "switch every 30": lambda _: switching(240, 30),
    GRADUAL: lambda _: 0.2 + 0.6 * np.abs(np.arange(240) / 60 % 2 - 1),
    "daily cycle": lambda _: cycle(720, 720),
    "four-hour cycle": lambda _: cycle(240, 120),
    "bursts": lambda rng: bursts(240, rng),
    "wandering": lambda rng: wandering(240, rng),
    "steady": lambda _: np.full(120, 0.5),
    TWO_SWITCHES: lambda _: np.concatenate([np.full(HISTORY, 0.8), np.repeat([0.8, 0.5, 0.2], [4, 3, 3])]),
}
"""Share of easy inputs per window. The paper does not name its workload. Two switches in ten windows are the hardest
case, because no forecast can foresee them."""
DRAWN = (GRADUAL, TWO_SWITCHES)
"""Workloads with a picture: a drift that a forecast can foresee, and a jump that it cannot."""


def draw_reach(exits_WK: FloatArray, num_inputs: int, rng: np.random.Generator) -> FloatArray:
    """Returns numbers of inputs that reach each block (W, K), drawn at random from recorded ones."""
    counts_WK = np.array([rng.multinomial(num_inputs, shares) for shares in exits_WK])
    return np.asarray(counts_WK[:, ::-1].cumsum(1)[:, ::-1], dtype=np.float64)


class Batches(NamedTuple):
    """Remaining inputs of a batch of `INPUT_BATCH`, per window and cut (W, C)."""

    forecast_WC: FloatArray
    last_WC: FloatArray
    """The value of the previous window, as the simplest forecast."""
    true_WC: FloatArray

    @property
    def errors(self) -> tuple[float, float]:
        """Mean absolute errors in inputs, of the forecast and of the last value."""
        forecast, last = (float(np.abs(each - self.true_WC).mean()) for each in self[:2])
        return forecast, last


def forecast_batches(name: str, kinds: Kinds, num_probes: float, cuts: list[int], seed: int) -> Batches:
    """Forecasts ten windows, each from the `HISTORY` before it."""
    rng = np.random.default_rng([seed, 21])
    exits_WK = mixed(kinds, WORKLOADS[name](rng))[: HISTORY + WINDOWS]
    all_WK = draw_reach(exits_WK, NUM_INPUTS, rng)
    few_WK = draw_reach(exits_WK, int(num_probes), rng)
    seen_WK = all_WK if num_probes >= NUM_INPUTS else few_WK
    pasts = [SurvivalHistory.from_counts(seen_WK[now - HISTORY : now]) for now in range(HISTORY, HISTORY + WINDOWS)]
    return Batches(
        forecast_WC=INPUT_BATCH * np.array([forecast_survival(past).survival_K[cuts] for past in pasts]),
        last_WC=INPUT_BATCH * np.array([past.survival_WK[-1, cuts] for past in pasts]),
        true_WC=INPUT_BATCH * all_WK[HISTORY:, cuts] / NUM_INPUTS,
    )


Errors = Mapping[str, tuple[float, float]]
"""By workload: mean absolute errors of the forecast and of the last value, in inputs of a batch of 8."""


def run(effort: Effort) -> StudyResult:
    """Runs recorded inputs with both histories; quick effort: workloads with a picture, and only the probes."""
    records, full = bert12_sst2("entropy"), effort == "full"
    kinds = easy_and_hard(records.outcome(dict.fromkeys(records.ramps, ENTROPY)))
    middle_K = 1 - np.concatenate([[0], np.cumsum(mixed(kinds, np.array([0.5]))[0])[:-1]])
    cuts = [int(np.argmax(middle_K <= share)) for share in (2 / 3, 1 / 2)]  # the 50:50 mix has lost a third, and half
    found = {
        history: {
            name: [forecast_batches(name, kinds, seen, cuts, seed) for seed in range(SEEDS[effort])]
            for name in (WORKLOADS if full else DRAWN)
        }
        for history, seen in HISTORIES.items()
        if full or history == "probes"
    }
    errors: dict[str, Errors] = {}
    for history, rows in found.items():
        means = {name: np.mean([each.errors for each in of], axis=0).tolist() for name, of in rows.items()}
        errors[history] = {name: (forecast, last) for name, (forecast, last) in means.items()}
    return StudyResult(
        comparisons=tuple(each for history, rows in errors.items() for each in _comparisons(history, rows)),
        pictures=tuple(_lines(name, cuts, found["probes"][name][0]) for name in DRAWN),
        tables=(
            Table(
                f"Mean absolute error in inputs; cuts before blocks {cuts[0]} and {cuts[1]}",
                ("history", "workload", "forecast", "last value"),
                tuple((history, name, *each) for history, rows in errors.items() for name, each in rows.items()),
            ),
        ),
    )


def _comparisons(history: str, rows: Errors) -> Iterator[Comparison]:
    """Returns the worst error, and the mean error without the unforeseeable jumps."""
    usual = [each for name, each in rows.items() if name != TWO_SWITCHES]
    worst = max(rows, key=lambda name: rows[name][0])
    forecast, last = np.mean(usual, axis=0).tolist()
    yield Comparison(f"mean error of {INPUT_BATCH} inputs, {history}", forecast)
    yield Comparison(f"the same of the last value, {history}", last)
    yield Comparison(f"worst workload ({worst}), {history}", rows[worst][0])


def _lines(name: str, cuts: Sequence[int], found: Batches) -> Lines:
    series = {
        f"before block {cut}: {which}": tuple(values_WC[:, position].tolist())
        for position, cut in enumerate(cuts)
        for which, values_WC in (("forecast", found.forecast_WC), ("actual", found.true_WC))
    }
    x = tuple(float(window) for window in range(1, WINDOWS + 1))
    return Lines(f"What is left of a batch of {INPUT_BATCH}: {name}", "window of two minutes", "inputs", x, series)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
