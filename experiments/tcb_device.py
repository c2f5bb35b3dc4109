"""TCB's device, schemes, orders and streams of requests, by its paper and by published times."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, NamedTuple

import numpy as np
from scipy.optimize import nnls

from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.engine.queue import Member, OrderSpec, first_fit_decreasing
from earlyexit.engine.times import ObservedTimes
from earlyexit.errors import DataError
from earlyexit.network.boundary import Split
from experiments.studies.picture import Lines, Values
from experiments.studies.study import Effort, Table, largest, ratio
from profiles.catalogue import published_profile
from profiles.latency import LatencyProfile
from simulator.inputs import BoolArray, IntArray, truncated_normal
from simulator.scenario import FloatArray

# What a batch of a transformer takes, from what its layout has the accelerator compute.


@dataclass(frozen=True, slots=True)
class Work:
    """What one run of the model is given."""

    tokens: int
    """Rows of its linear layers, padding included."""
    cells: int
    """Of one head's score matrices, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """An accelerator and a model."""

    fixed_s: float
    token_s: float
    cell_s: float
    worst: float = 0.0
    """Of what it was fitted to, the largest error, as a share."""

    def seconds(self, work: Work) -> float:
        """Of one run."""
        return self.fixed_s + self.token_s * work.tokens + self.cell_s * work.cells

    def stretched(self, times: float) -> Cost:
        """So many times slower."""
        return Cost(
            fixed_s=self.fixed_s * times, token_s=self.token_s * times, cell_s=self.cell_s * times, worst=self.worst
        )


def fit(seconds: Mapping[Work, float]) -> Cost:
    """The cost nearest to measured runs, by relative errors; no part of it is negative."""
    if len(seconds) < 3:
        raise DataError(f"three runs are needed to tell a cost by, not {len(seconds)}")
    took_s = np.array(list(seconds.values()))
    parts = np.array([(1.0, work.tokens, work.cells) for work in seconds]) / took_s[:, None]
    scale = parts.max(0)  # the parts are of very different sizes
    found = nnls(parts / scale, np.ones(len(took_s)))[0] / scale
    fixed_s, token_s, cell_s = found.tolist()
    return Cost(fixed_s=fixed_s, token_s=token_s, cell_s=cell_s, worst=float(np.abs(parts @ found - 1).max()))


def uniform_runs(profile: LatencyProfile) -> dict[Work, float]:
    """Every measured batch of a profile: all of its inputs have one length, so none is padded."""
    return {
        Work(size * length, size * length * length): float(seconds)
        for length, table in profile.tables.items()
        for size, seconds in zip(table.batches, table.block_s_NB.sum(0), strict=True)
    }


def published_v100() -> Cost:
    """BERT-base on a V100 in TensorRT, from its published batches of 1 to 128 inputs of 128 and 384 tokens."""
    return fit(uniform_runs(published_profile("bert-base", "V100")))


# How the inputs of a batch are laid out for the accelerator: TCB's baselines, its own two schemes, and ours.

Scheme = Literal["padded", "grouped", "rows", "slotted rows", "packed", "slots"]


class Run(NamedTuple):
    """Inputs of a batch that run together, by position, and what the model is given."""

    positions: tuple[int, ...]
    work: Work


def layout(scheme: Scheme, lengths: Sequence[int], cost: Cost, *, row: int = 0) -> list[Run]:
    """The runs of a batch, one after the other; only `grouped` has more than one.

    `row`: tokens of a row, for the schemes that have rows. Raises DataError for an input longer than its row.
    """
    if scheme == "grouped":
        return grouped(lengths, cost)
    everybody, total, longest = tuple(range(len(lengths))), sum(lengths), max(lengths)
    if scheme in ("rows", "slotted rows"):
        return [Run(everybody, _rows(lengths, row, per_row=max(1, row // longest) if scheme == "slotted rows" else 1))]
    if scheme == "padded":
        return [Run(everybody, Work(len(lengths) * longest, len(lengths) * longest**2))]
    slots = len(lengths) if scheme == "packed" else len(first_fit_decreasing(lengths, longest))
    return [Run(everybody, Work(total, slots * longest**2))]


def _rows(lengths: Sequence[int], row: int, per_row: int) -> Work:
    """Rows with so many slots each; one slot is the whole row."""
    if max(lengths) > row:
        raise DataError(f"an input of {max(lengths)} tokens fits into no row of {row}")
    width = row // per_row
    rows = -(-len(first_fit_decreasing(lengths, width)) // per_row)
    return Work(rows * row, rows * per_row * width**2)


def grouped(lengths: Sequence[int], cost: Cost) -> list[Run]:
    """Runs of similar length: the cut of the sorted inputs that takes least in all.

    TurboTransformers (PPoPP'21, algorithm 3): best[i] = min over j of best[j] + the padded run of j to i - 1.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best_s, begins = np.zeros(len(order) + 1), [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        sizes, longest = np.arange(end, 0, -1), lengths[order[end - 1]]
        run_s = cost.fixed_s + sizes * longest * (cost.token_s + cost.cell_s * longest)
        total_s = best_s[:end] + run_s
        at = int(total_s.argmin())
        best_s[end], begins[end] = total_s[at], at
    runs: list[Run] = []
    end = len(order)
    while end:
        first, longest = begins[end], lengths[order[end - 1]]
        size = end - first
        runs.append(Run(tuple(order[first:end]), Work(size * longest, size * longest**2)))
        end = first
    return runs[::-1]


# One device with the live batch engine and its orders, whose batches take what a scheme's layout costs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How batches are bounded, chosen and laid out."""

    scheme: Scheme
    inputs: int
    """At most, in a batch."""
    tokens: int | None = None
    """At most, in a batch."""
    row: int = 0
    """Tokens of a row, for schemes with rows."""

    @property
    def split(self) -> Split:
        """The whole model, as one split."""
        return Split(first=0, end=1, batch=self.inputs, tokens=self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """Requests of one input each."""

    arrivals_s: FloatArray
    """Ascending."""
    lengths: IntArray
    deadlines_s: FloatArray
    """On the same clock as the arrivals; infinite where there are none."""

    def __len__(self) -> int:
        return len(self.arrivals_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """What came of a stream."""

    stream: Stream
    done_s_N: FloatArray
    """When each was answered; NaN: dropped."""
    began_s_N: FloatArray
    """When each one's batch began; NaN: dropped."""
    batch_s: FloatArray
    """Of every batch."""
    batch_inputs: IntArray
    choosing_s: FloatArray
    """Processor time here that the engine took to choose each batch."""
    ended_s: float

    @property
    def scheduled_N(self) -> BoolArray:
        """Whose batch began before the deadline: what TCB counts (section 5.1)."""
        return self.began_s_N <= self.stream.deadlines_s

    @property
    def in_time_N(self) -> BoolArray:
        """Which requests were answered by the deadline: what callers count."""
        return self.done_s_N <= self.stream.deadlines_s

    def per_s(self, counted_N: BoolArray) -> float:
        """So many of these requests per second of the run."""
        return float(counted_N.sum()) / self.ended_s

    def utility_per_s(self, counted_N: BoolArray) -> float:
        """Their sum of 1 / length (TCB, section 5.1) per second of the run."""
        return float((1 / self.stream.lengths[counted_N]).sum()) / self.ended_s


def serve(stream: Stream, side: Side, order: OrderSpec, cost: Cost) -> Served:
    """Run a stream to its end: whenever the device is free, the engine's next batch."""
    device = _Device(stream, side, order)
    while (batch := device.next_batch()) is not None:
        device.run(batch, layout(side.scheme, [member.tokens for member in batch.members], cost, row=side.row), cost)
    return device.served()


class _Device:
    """The state of a run."""

    def __init__(self, stream: Stream, side: Side, order: OrderSpec) -> None:
        self._stream, self._now_s, self._submitted = stream, 0.0, 0
        self._engine: BatchEngine[int] = BatchEngine([side.split], ObservedTimes())
        self._engine.follow([side.split], "work-conserving", order)
        self._members = _members(stream)
        self._began_s_N, self._done_s_N = np.full(len(stream), np.nan), np.full(len(stream), np.nan)
        self._took_s: list[float] = []
        self._sizes: list[int] = []
        self._choosing_s: list[float] = []

    def next_batch(self) -> Batch[int] | None:
        """Of requests that have arrived; where none waits, of the next that arrives. None at the end."""
        while True:
            self._arrive()
            began_s = time.thread_time()
            batch = self._engine.choose(self._now_s).batch
            if batch is not None:
                self._choosing_s.append(time.thread_time() - began_s)
                return batch
            if self._submitted == len(self._stream):
                return None
            self._now_s = float(self._stream.arrivals_s[self._submitted])

    def run(self, batch: Batch[int], runs: Sequence[Run], cost: Cost) -> None:
        """The batch's runs, one after the other; each one's inputs have their answers when it ends."""
        numbers = [member.payload for member in batch.members]
        self._began_s_N[numbers] = self._now_s
        ends_s = np.cumsum([cost.seconds(run.work) for run in runs])
        for run, end_s in zip(runs, ends_s, strict=True):
            self._done_s_N[[numbers[position] for position in run.positions]] = self._now_s + end_s
        total_s = float(ends_s[-1])
        self._engine.finished(batch, first_s=float(ends_s[0]), total_s=total_s)
        self._took_s.append(total_s)
        self._sizes.append(len(numbers))
        self._now_s += total_s

    def served(self) -> Served:
        """All that was seen."""
        return Served(
            stream=self._stream,
            done_s_N=self._done_s_N,
            began_s_N=self._began_s_N,
            batch_s=np.array(self._took_s),
            batch_inputs=np.array(self._sizes, dtype=np.int64),
            choosing_s=np.array(self._choosing_s),
            ended_s=max(self._now_s, float(self._stream.arrivals_s[-1])),
        )

    def _arrive(self) -> None:
        until = int(np.searchsorted(self._stream.arrivals_s, self._now_s, side="right"))
        for number in range(self._submitted, until):
            self._engine.submit(0, [self._members[number]], float(self._stream.arrivals_s[number]))
        self._submitted = until


def _members(stream: Stream) -> Sequence[Member[int]]:
    return [
        Member(sample_id="", payload=number, tokens=tokens, deadline_s=deadline_s)
        for number, (tokens, deadline_s) in enumerate(
            zip(stream.lengths.tolist(), stream.deadlines_s.tolist(), strict=True)
        )
    ]


# The workloads of TCB's section 6, and what was taken where the paper leaves something open.

LOW, HIGH, MEAN = 3, 100, 20
"""Tokens (section 6.2.1)."""
BATCH = 64
"""Inputs of TNB's batch, and rows of TCB's."""
ROW = 100
"""Tokens of TCB's rows. The paper does not say; what is longer than the longest input has no need."""
DEADLINES_S: Final = (1.0, 3.0)
"""Every request's time is drawn evenly between these. The paper does not say; a batch of 64 rows takes 0.2 to 0.6 s."""
SATURATED_PER_S = 350.0
"""Where the paper's TNB is saturated (figure 9): the device is made so slow that ours is, too."""
DRAWN = 12_800
"""Lengths; then they come again."""
SEED = 0
ARRIVAL, DAS, SHORTEST, DEADLINE = (
    OrderSpec(name="arrival"),
    OrderSpec(name="das", overdue_s=math.inf),
    OrderSpec(name="shortest", overdue_s=math.inf),
    OrderSpec(name="deadline", overdue_s=math.inf),
)
"""Eta and q of DAS are a half each: what the paper's theorem is told for. No request is overdue: the
paper has no such rule, its deadlines end every wait."""

ANY = 10_000
"""Inputs of a batch that is bounded by tokens."""

TNB = Side(scheme="padded", inputs=BATCH)
TTB = Side(scheme="grouped", inputs=ANY, tokens=BATCH * ROW)
"""Its dynamic program has the inputs of TCB's batch to choose from."""
TCB = Side(scheme="rows", inputs=ANY, tokens=BATCH * ROW, row=ROW)
SLOTTED_TCB = Side(scheme="slotted rows", inputs=ANY, tokens=BATCH * ROW, row=ROW)
PACKED = Side(scheme="packed", inputs=BATCH)
"""As many inputs as TNB's."""
PACKED_FULL = Side(scheme="packed", inputs=ANY, tokens=BATCH * ROW)
"""As many tokens as TCB's rows have places."""


def lengths(num: int, variance: float, seed: int = SEED) -> IntArray:
    """Of requests."""
    return truncated_normal(num, mean=MEAN, variance=variance, low=LOW, high=HIGH, seed=seed)


def stream(
    rate_per_s: float,
    num: int,
    drawn: IntArray,
    *,
    deadlines_s: tuple[float, float] = DEADLINES_S,
    seed: int = SEED,
) -> Stream:
    """Poisson arrivals, at any rate in the same order and with the same draws, so that chance does not move between."""
    rng = np.random.default_rng(seed)
    arrivals_s: FloatArray = np.cumsum(rng.exponential(1.0, num)) / rate_per_s
    return Stream(
        arrivals_s=arrivals_s,
        lengths=np.resize(drawn, num),
        deadlines_s=arrivals_s + rng.uniform(*deadlines_s, num),
    )


def saturated(drawn: IntArray) -> Stream:
    """Everything there at once, without deadlines: what is served per second is what the device can do."""
    zeros = np.zeros(len(drawn))
    return Stream(arrivals_s=zeros, lengths=drawn, deadlines_s=np.full(len(drawn), np.inf))


def capacity(side: Side, drawn: IntArray, cost: Cost, order: OrderSpec = ARRIVAL) -> float:
    """Requests per second where every batch is full."""
    served = serve(saturated(drawn), side, order, cost)
    return served.per_s(served.in_time_N)


def paper_device(effort_num: int = 6400) -> Cost:
    """The published V100, as many times slower as it takes for TNB to be saturated at the paper's rate."""
    published = published_v100()
    return published.stretched(capacity(TNB, lengths(effort_num, 20), published) / SATURATED_PER_S)


# What TNB, TTB, TCB and packed batches serve at rising rates: the form of TCB's figures 9 to 12.

SIDES: Mapping[str, Side] = {
    "TNB": TNB,
    "TTB": TTB,
    "TCB": TCB,
    "packed, 64 inputs": PACKED,
    "packed, 6400 tokens": PACKED_FULL,
}
RATES: Mapping[Effort, tuple[float, ...]] = {
    "full": (150, 200, 250, 300, 350, 400, 450, 500, 550, 600, 700, 800),
    "quick": (250, 450, 800),
}
REQUESTS: Mapping[Effort, int] = {"full": 12_000, "quick": 1500}

SCHEDULED, UTILITY = "scheduled per s", "utility per s, scheduled"
"""Of those whose batch began before their deadline: what the paper counts."""
ANSWERED, UTILITY_ANSWERED = "answered per s", "utility per s, answered"
"""Of those that were answered before it."""
WAIT = "longest wait s"
SHARE = "answered share"
"""Of all requests."""
MEASURES = (SCHEDULED, UTILITY, ANSWERED, UTILITY_ANSWERED, WAIT, SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRate:
    """Every side at every rate."""

    rates_per_s: tuple[float, ...]
    series: Mapping[str, Values]
    """By measure, then by side."""

    def over(self, measure: str, other: str, side: str = "TCB") -> float | None:
        """How many times the other's largest value the side's is ("maximum throughput")."""
        of = self.series[measure]
        return ratio(largest(of[side]), largest(of[other]))

    def gap(self, measure: str, other: str, side: str = "TCB") -> float | None:
        """How many times the other's it is at the rate where that is most ("maximum performance gap")."""
        of = self.series[measure]
        return largest(ratio(ours, theirs) for ours, theirs in zip(of[side], of[other], strict=True))

    def last_over(self, measure: str, other: str, side: str = "TCB") -> float | None:
        """The same at the highest rate ("after saturation")."""
        of = self.series[measure]
        return ratio(of[side][-1], of[other][-1])

    def holds_per_s(self, side: str, share: float = 0.99) -> float | None:
        """The highest rate of which the share is answered in time, of those simulated."""
        answered = zip(self.rates_per_s, self.series[SHARE][side], strict=True)
        return largest(rate for rate, of_all in answered if of_all is not None and of_all >= share)

    def lines(self, measure: str, title: str, y_label: str) -> Lines:
        """As the paper draws it."""
        return Lines(title, "requests per second", y_label, self.rates_per_s, self.series[measure])

    def table(self) -> Table:
        """All of it."""
        rows = [
            (side, rate, *(self.series[measure][side][at] for measure in MEASURES))
            for side, (at, rate) in product(SIDES, enumerate(self.rates_per_s))
        ]
        return Table("Every side at every rate", ("", "requests/s", *MEASURES), tuple(rows))


def by_rate(
    drawn: IntArray,
    order: OrderSpec,
    cost: Cost,
    effort: Effort,
    *,
    deadlines_s: tuple[float, float] = DEADLINES_S,
) -> ByRate:
    """Simulate."""
    rates = RATES[effort]
    streams = [stream(rate, REQUESTS[effort], drawn, deadlines_s=deadlines_s) for rate in rates]
    found = {name: [measured(serve(each, side, order, cost)) for each in streams] for name, side in SIDES.items()}
    series = {
        measure: {name: tuple(point[at] for point in points) for name, points in found.items()}
        for at, measure in enumerate(MEASURES)
    }
    return ByRate(rates_per_s=rates, series=series)


def measured(served: Served) -> tuple[float, ...]:
    """In the order of `MEASURES`."""
    began_N, answered_N = served.scheduled_N, served.in_time_N
    return (
        served.per_s(began_N),
        served.utility_per_s(began_N),
        served.per_s(answered_N),
        served.utility_per_s(answered_N),
        float(np.nanmax(served.began_s_N - served.stream.arrivals_s)),
        float(answered_N.mean()),
    )
