"""E3, figure 21: batch sizes forecast at two cuts, and what they were.

Computed: ten windows of two minutes at 100 requests/s, mixed from recorded easy and hard inputs. A history of 60
windows holds the probes (2 % of the inputs), or every input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from profiles.forecast import SurvivalHistory, forecast_survival
from profiles.outcome import ExitOutcome

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ENTROPY = 0.4
WINDOW_S = 120
RATE_RPS = 100
PROBE_SHARE = 0.02
HISTORY = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Easy and hard inputs: shares by the block they leave after."""

    easy_K: FloatArray
    hard_K: FloatArray

    def exits(self, easy_W: FloatArray) -> FloatArray:
        """Per window, the shares by exit (W, K) of a mix with so many easy inputs."""
        return easy_W[:, None] * self.easy_K + (1 - easy_W[:, None]) * self.hard_K


def easy_and_hard(outcome: ExitOutcome) -> Kinds:
    """Easy is what leaves in the first half of the model, hard is the rest (E3 section 5.4 does not say its rule)."""
    easy_N = outcome.exits_N < outcome.num_blocks // 2
    shares = [
        np.bincount(outcome.exits_N[rows], minlength=outcome.num_blocks) / rows.sum() for rows in (easy_N, ~easy_N)
    ]
    return Kinds(easy_K=shares[0], hard_K=shares[1])


def switching(num_windows: int, every: int) -> FloatArray:
    """Shares of easy inputs: 80:20, 50:50, 20:80 and back (E3 section 5.4)."""
    return np.array([0.8, 0.5, 0.2, 0.5])[np.arange(num_windows) // every % 4]


def gradual(num_windows: int, one_way: int) -> FloatArray:
    """From 80:20 to 20:80 along a line, and back."""
    return 0.2 + 0.6 * np.abs(np.arange(num_windows) / one_way % 2 - 1)


def cycle(num_windows: int, period: int) -> FloatArray:
    """A sine between 80:20 and 20:80; two-minute windows make 720 a day."""
    return 0.5 + 0.3 * np.sin(2 * np.pi * np.arange(num_windows) / period)


def bursts(num_windows: int, rng: np.random.Generator) -> FloatArray:
    """80:20, broken by bursts of 20:80 that last one to four windows, about every twenty."""
    easy_W = np.full(num_windows, 0.8)
    window = 0
    while window < num_windows:
        window += int(rng.geometric(1 / 20))
        length = int(rng.integers(1, 5))
        easy_W[window : window + length] = 0.2
        window += length
    return easy_W


def wandering(num_windows: int, rng: np.random.Generator) -> FloatArray:
    """A random walk of 0.02 a window, reflected at 80:20 and 20:80."""
    walk_W = 0.5 + np.cumsum(rng.normal(0, 0.02, num_windows))
    return 0.2 + np.abs((walk_W - 0.2 + 0.6) % 1.2 - 0.6)


def draw_reach(exits_WK: FloatArray, num_inputs_W: IntArray, rng: np.random.Generator) -> FloatArray:
    """Numbers of inputs that reach each block (W, K), drawn at random from recorded ones."""
    counts_WK = np.array([rng.multinomial(num, shares) for num, shares in zip(num_inputs_W, exits_WK, strict=True)])
    return np.asarray(counts_WK[:, ::-1].cumsum(1)[:, ::-1], dtype=np.float64)


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
INPUT_BATCH = 8
WINDOWS = 10
TWO_SWITCHES = Workload(
    name="two switches in ten",
    easy_W=lambda _: np.concatenate([np.full(HISTORY, 0.8), np.repeat([0.8, 0.5, 0.2], [4, 3, 3])]),
)
NUM_INPUTS = RATE_RPS * WINDOW_S
HISTORIES = {"probes": PROBE_SHARE * NUM_INPUTS, "all inputs": float(NUM_INPUTS)}
"""Inputs seen in each window of the past."""
DRAWN = ("gradual, 60 one way", TWO_SWITCHES.name)
"""Workloads that have a picture: a drift that can be foreseen, and a jump that cannot."""
SEEDS: dict[Effort, int] = {"full": 3, "quick": 1}


def cuts_of(kinds: Kinds) -> list[int]:
    """Blocks before which the 50:50 mix has first lost a third of its inputs, and half of them."""
    middle_K = 1 - np.concatenate([[0], np.cumsum(kinds.exits(np.array([0.5]))[0])[:-1]])
    return [int(np.argmax(middle_K <= share)) for share in (2 / 3, 1 / 2)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batches:
    """What is left of an input batch of `INPUT_BATCH`, per window and cut."""

    forecast_WC: FloatArray
    last_WC: FloatArray
    """What the window before showed: the simplest forecast."""
    true_WC: FloatArray

    @property
    def forecast_error(self) -> float:
        """Mean absolute error, in inputs."""
        return float(np.abs(self.forecast_WC - self.true_WC).mean())

    @property
    def last_error(self) -> float:
        """The same of the last value."""
        return float(np.abs(self.last_WC - self.true_WC).mean())


def forecast_batches(workload: Workload, kinds: Kinds, num_probes: float, cuts: list[int], seed: int) -> Batches:
    """Ten windows, each forecast from the `HISTORY` before it.

    The paper does not name its workload. `TWO_SWITCHES` is the hardest: the windows that a switch comes with cannot be
    foreseen.
    """
    rng = np.random.default_rng([seed, 21])
    exits_WK = kinds.exits(workload.easy_W(rng))[: HISTORY + WINDOWS]
    all_WK = draw_reach(exits_WK, np.full(len(exits_WK), NUM_INPUTS), rng)
    few_WK = draw_reach(exits_WK, np.full(len(exits_WK), int(num_probes)), rng)
    seen_WK = all_WK if num_probes >= NUM_INPUTS else few_WK
    pasts = [SurvivalHistory.from_counts(seen_WK[now - HISTORY : now]) for now in range(HISTORY, HISTORY + WINDOWS)]
    return Batches(
        forecast_WC=INPUT_BATCH * np.array([forecast_survival(past).survival_HK[0, cuts] for past in pasts]),
        last_WC=INPUT_BATCH * np.array([past.survival_WK[-1, cuts] for past in pasts]),
        true_WC=INPUT_BATCH * all_WK[HISTORY:, cuts] / NUM_INPUTS,
    )


Errors = Mapping[str, float]
"""Mean absolute errors, in inputs of a batch of 8: `forecast`, and `last` of the window before taken as one."""


def errors(found: Sequence[Batches]) -> Errors:
    """On average."""
    return {
        "forecast": float(np.mean([each.forecast_error for each in found])),
        "last": float(np.mean([each.last_error for each in found])),
    }


def compare(kinds: Kinds, workloads: Sequence[Workload], effort: Effort) -> StudyResult:
    """Forecasts beside what came, seen through either history; through the probes alone with quick effort."""
    cuts = cuts_of(kinds)
    found = {
        history: {
            workload.name: [forecast_batches(workload, kinds, seen, cuts, seed) for seed in range(SEEDS[effort])]
            for workload in workloads
        }
        for history, seen in HISTORIES.items()
        if effort == "full" or history == "probes"
    }
    told = {history: {name: errors(each) for name, each in rows.items()} for history, rows in found.items()}
    first = {name: each[0] for name, each in found["probes"].items()}
    return StudyResult(
        comparisons=tuple(each for history, rows in told.items() for each in _comparisons(history, rows)),
        pictures=tuple(_lines(name, cuts, first[name]) for name in DRAWN if name in first),
        tables=(
            Table(
                f"Mean absolute error in inputs; cuts before blocks {cuts[0]} and {cuts[1]}",
                ("history", "workload", "forecast", "last value"),
                tuple(
                    (history, name, each["forecast"], each["last"])
                    for history, rows in told.items()
                    for name, each in rows.items()
                ),
            ),
        ),
    )


def _comparisons(history: str, rows: Mapping[str, Errors]) -> Iterator[Comparison]:
    """The worst, and the mean without the jumps in every window's past that nothing foretells."""
    usual = [each for name, each in rows.items() if name != TWO_SWITCHES.name] or list(rows.values())
    worst = max(rows, key=lambda name: rows[name]["forecast"])
    forecast, last = (float(np.mean([each[of] for each in usual])) for of in ("forecast", "last"))
    yield Comparison(f"mean error of {INPUT_BATCH} inputs, {history}", forecast)
    yield Comparison(f"the same of the last value, {history}", last)
    yield Comparison(f"worst workload ({worst}), {history}", rows[worst]["forecast"])


def _lines(name: str, cuts: Sequence[int], found: Batches) -> Lines:
    series = {
        f"before block {cut}: {which}": tuple(values_WC[:, position].tolist())
        for position, cut in enumerate(cuts)
        for which, values_WC in (("forecast", found.forecast_WC), ("actual", found.true_WC))
    }
    x = tuple(float(window) for window in range(1, WINDOWS + 1))
    return Lines(f"What is left of a batch of {INPUT_BATCH}: {name}", "window of two minutes", "inputs", x, series)


def run(effort: Effort) -> StudyResult:
    """Recorded inputs; quick effort has the workloads that are drawn."""
    records = bert12_sst2("entropy")
    kinds = easy_and_hard(records.outcome(dict.fromkeys(records.ramps, ENTROPY)))
    workloads = [each for each in (*WORKLOADS, TWO_SWITCHES) if effort == "full" or each.name in DRAWN]
    return compare(kinds, workloads, effort)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
