"""TCB's device, schemes, orders and request streams, from its paper and from published times."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, NamedTuple

import numpy as np
from scipy.optimize import nnls

from earlyexit.engine.engine import Batch, BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member, OrderSpec, first_fit_decreasing
from earlyexit.errors import DataError
from earlyexit.network.boundary import Split
from experiments.studies.picture import Lines, Values
from experiments.studies.study import Effort, Table, largest, ratio
from profiles.catalogue import published_profile
from simulator.inputs import BoolArray, IntArray, truncated_normal
from simulator.scenario import FloatArray

# The time of a transformer's batch, from the work of its layout.


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one run of the model."""

    tokens: int
    """Rows of its linear layers, including padding."""
    cells: int
    """Elements of one head's score matrices, including padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost model of an accelerator and a model."""

    fixed_s: float
    token_s: float
    cell_s: float
    worst: float = 0.0
    """The largest relative error of the fit."""

    def seconds(self, work: Work) -> float:
        """Returns the seconds of one run."""
        return self.fixed_s + self.token_s * work.tokens + self.cell_s * work.cells

    def stretched(self, times: float) -> Cost:
        """Returns a cost that is larger by this factor."""
        return Cost(
            fixed_s=self.fixed_s * times, token_s=self.token_s * times, cell_s=self.cell_s * times, worst=self.worst
        )


def fit(seconds: Mapping[Work, float]) -> Cost:
    """Fits the cost to measured runs by relative errors; no part is negative."""
    if len(seconds) < 3:
        raise DataError(f"a cost needs at least three runs, not {len(seconds)}")
    took_s = np.array(list(seconds.values()))
    parts = np.array([(1.0, work.tokens, work.cells) for work in seconds]) / took_s[:, None]
    scale = parts.max(0)  # the parts differ by orders of magnitude
    by_side = nnls(parts / scale, np.ones(len(took_s)))[0] / scale
    fixed_s, token_s, cell_s = by_side.tolist()
    return Cost(fixed_s=fixed_s, token_s=token_s, cell_s=cell_s, worst=float(np.abs(parts @ by_side - 1).max()))


def published_v100() -> Cost:
    """Returns BERT-base on a V100 in TensorRT, from its published batches of 1 to 128 inputs of 128 and 384 tokens.

    All inputs of a batch have one length, so there is no padding.
    """
    return fit(
        {
            Work(size * length, size * length * length): float(seconds)
            for length, table in published_profile("bert-base", "V100").tables.items()
            for size, seconds in zip(table.batches, table.block_s_NB.sum(0), strict=True)
        }
    )


# Layouts of a batch: TCB's baselines, its own two schemes, and Offramp's.

Scheme = Literal["padded", "grouped", "rows", "slotted rows", "packed", "slots"]


class Run(NamedTuple):
    """Inputs of a batch that run together, by position, and their work."""

    positions: tuple[int, ...]
    work: Work


def layout(scheme: Scheme, lengths: Sequence[int], cost: Cost, *, row: int = 0) -> list[Run]:
    """Returns the runs of a batch in order; only `grouped` has more than one.

    `row` is the number of tokens per row, for schemes with rows. Raises DataError for an input longer than its row.
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
    """Returns the work of rows with this number of slots; one slot is the whole row."""
    if max(lengths) > row:
        raise DataError(f"an input of {max(lengths)} tokens does not fit into a row of {row}")
    width = row // per_row
    rows = -(-len(first_fit_decreasing(lengths, width)) // per_row)
    return Work(rows * row, rows * per_row * width**2)


def grouped(lengths: Sequence[int], cost: Cost) -> list[Run]:
    """Returns runs of similar lengths: the division of the sorted inputs with the least total time.

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


# One device with the live batch engine and its orders; a batch takes the time of its scheme's layout.


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The limits, the choice and the layout of batches."""

    scheme: Scheme
    inputs: int
    """Largest number of inputs per batch."""
    tokens: int | None = None
    """Largest number of tokens per batch."""
    row: int = 0
    """Tokens per row, for schemes with rows."""

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
    """On the clock of the arrivals; infinite without a deadline."""

    def __len__(self) -> int:
        return len(self.arrivals_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """The outcome of a stream."""

    stream: Stream
    done_s_N: FloatArray
    """Time of each answer; NaN if the input was dropped."""
    began_s_N: FloatArray
    """Begin of each input's batch; NaN if the input was dropped."""
    batch_s: FloatArray
    """Seconds of every batch."""
    batch_inputs: IntArray
    choosing_s: FloatArray
    """Real processor time in which the engine chose each batch."""
    ended_s: float

    @property
    def scheduled_N(self) -> BoolArray:
        """Whether the batch of each request began before the deadline, as TCB counts (section 5.1)."""
        return self.began_s_N <= self.stream.deadlines_s

    @property
    def in_time_N(self) -> BoolArray:
        """Whether each request was answered by its deadline, as callers count."""
        return self.done_s_N <= self.stream.deadlines_s

    def per_s(self, counted_N: BoolArray) -> float:
        """Returns these requests per second of the run."""
        return float(counted_N.sum()) / self.ended_s

    def utility_per_s(self, counted_N: BoolArray) -> float:
        """Returns the sum of 1 / length (TCB, section 5.1) of these requests per second of the run."""
        return float((1 / self.stream.lengths[counted_N]).sum()) / self.ended_s


def serve(stream: Stream, side: Side, order: OrderSpec, cost: Cost) -> Served:
    """Runs a stream to its end: whenever the device is free, it runs the engine's next batch."""
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
        """Returns a batch of requests that have arrived, or, if none waits, of the next arrivals; None at the end."""
        while True:
            self._arrive()
            began_s = time.thread_time()
            batch = self._engine.begin(self._now_s).batch
            if batch is not None:
                self._choosing_s.append(time.thread_time() - began_s)
                return batch
            if self._submitted == len(self._stream):
                return None
            self._now_s = float(self._stream.arrivals_s[self._submitted])

    def run(self, batch: Batch[int], runs: Sequence[Run], cost: Cost) -> None:
        """Runs the batch's runs in order; the inputs of a run are answered at its end."""
        numbers = [member.payload for member in batch.members]
        self._began_s_N[numbers] = self._now_s
        ends_s = np.cumsum([cost.seconds(run.work) for run in runs])
        for run, end_s in zip(runs, ends_s, strict=True):
            self._done_s_N[[numbers[position] for position in run.positions]] = self._now_s + end_s
        total_s = float(ends_s[-1])
        ended_s = self._now_s + total_s
        self._engine.end(batch, first_s=float(ends_s[0]), total_s=total_s, now_s=ended_s)
        self._engine.leave(batch, ended_s)
        self._took_s.append(total_s)
        self._sizes.append(len(numbers))
        self._now_s += total_s

    def served(self) -> Served:
        """Returns the outcome."""
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


# The workloads of TCB's section 6, with assumptions for values that the paper does not state.

LOW, HIGH, MEAN = 3, 100, 20
"""Tokens (section 6.2.1)."""
BATCH = 64
"""Inputs of TNB's batch, and rows of TCB's."""
ROW = 100
"""Tokens of TCB's rows. Assumed: the length of the longest input."""
DEADLINES_S: Final = (1.0, 3.0)
"""Range of the deadlines, drawn evenly. Assumed: a batch of 64 rows takes 0.2 to 0.6 s."""
SATURATED_PER_S = 350.0
"""Rate at which the paper's TNB is saturated (figure 9). The device is slowed so that ours is saturated, too."""
DRAWN = 12_800
"""Number of drawn lengths; longer runs repeat them."""
SEED = 0
ARRIVAL, DAS, SHORTEST, DEADLINE = (
    OrderSpec(name="arrival"),
    OrderSpec(name="das", overdue_s=math.inf),
    OrderSpec(name="shortest", overdue_s=math.inf),
    OrderSpec(name="deadline", overdue_s=math.inf),
)
"""Eta and q of DAS are 0.5 each, as in the paper's theorem. No request is overdue, because the paper has no such
rule and its deadlines end every wait."""

ANY = 10_000
"""No limit on inputs, for a batch that is limited by tokens."""

TNB = Side(scheme="padded", inputs=BATCH)
TTB = Side(scheme="grouped", inputs=ANY, tokens=BATCH * ROW)
"""Its dynamic program chooses from the inputs of TCB's batch."""
TCB = Side(scheme="rows", inputs=ANY, tokens=BATCH * ROW, row=ROW)
SLOTTED_TCB = Side(scheme="slotted rows", inputs=ANY, tokens=BATCH * ROW, row=ROW)
PACKED = Side(scheme="packed", inputs=BATCH)
"""As many inputs as TNB."""
PACKED_FULL = Side(scheme="packed", inputs=ANY, tokens=BATCH * ROW)
"""As many tokens as TCB's rows have places."""


def lengths(num: int, variance: float, seed: int = SEED) -> IntArray:
    """Returns lengths of requests."""
    return truncated_normal(num, mean=MEAN, variance=variance, low=LOW, high=HIGH, seed=seed)


def stream(
    rate_per_s: float,
    num: int,
    drawn: IntArray,
    *,
    deadlines_s: tuple[float, float] = DEADLINES_S,
    seed: int = SEED,
) -> Stream:
    """Returns Poisson arrivals with the same order and draws at every rate, so that rates are comparable."""
    rng = np.random.default_rng(seed)
    arrivals_s: FloatArray = np.cumsum(rng.exponential(1.0, num)) / rate_per_s
    return Stream(
        arrivals_s=arrivals_s,
        lengths=np.resize(drawn, num),
        deadlines_s=arrivals_s + rng.uniform(*deadlines_s, num),
    )


def saturated(drawn: IntArray) -> Stream:
    """Returns requests that all arrive at once without deadlines, to measure the device's capacity."""
    zeros = np.zeros(len(drawn))
    return Stream(arrivals_s=zeros, lengths=drawn, deadlines_s=np.full(len(drawn), np.inf))


def capacity(side: Side, drawn: IntArray, cost: Cost, order: OrderSpec = ARRIVAL) -> float:
    """Returns requests per second with full batches."""
    served = serve(saturated(drawn), side, order, cost)
    return served.per_s(served.in_time_N)


def paper_device(effort_num: int = 6400) -> Cost:
    """Returns the published V100, slowed until TNB is saturated at the paper's rate."""
    published = published_v100()
    return published.stretched(capacity(TNB, lengths(effort_num, 20), published) / SATURATED_PER_S)


# TNB, TTB, TCB and packed batches at rising rates: the form of TCB's figures 9 to 12.

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
"""Requests whose batch began before their deadline, as the paper counts."""
ANSWERED, UTILITY_ANSWERED = "answered per s", "utility per s, answered"
"""Requests that were answered before their deadline."""
WAIT = "longest wait s"
SHARE = "answered share"
"""Answered share of all requests."""
MEASURES = (SCHEDULED, UTILITY, ANSWERED, UTILITY_ANSWERED, WAIT, SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRate:
    """Every side at every rate."""

    rates_per_s: tuple[float, ...]
    series: Mapping[str, Values]
    """By measure, then by side."""

    def over(self, measure: str, other: str, side: str = "TCB") -> float | None:
        """Returns the ratio of the largest values of two sides ("maximum throughput")."""
        of = self.series[measure]
        return ratio(largest(of[side]), largest(of[other]))

    def gap(self, measure: str, other: str, side: str = "TCB") -> float | None:
        """Returns the largest ratio of two sides over the rates ("maximum performance gap")."""
        of = self.series[measure]
        return largest(ratio(ours, theirs) for ours, theirs in zip(of[side], of[other], strict=True))

    def last_over(self, measure: str, other: str, side: str = "TCB") -> float | None:
        """Returns the ratio at the highest rate ("after saturation")."""
        of = self.series[measure]
        return ratio(of[side][-1], of[other][-1])

    def holds_per_s(self, side: str, share: float = 0.99) -> float | None:
        """Returns the highest simulated rate at which this share is answered in time."""
        answered = zip(self.rates_per_s, self.series[SHARE][side], strict=True)
        return largest(rate for rate, of_all in answered if of_all is not None and of_all >= share)

    def lines(self, measure: str, title: str, y_label: str) -> Lines:
        """Returns the picture in the paper's form."""
        return Lines(title, "requests per second", y_label, self.rates_per_s, self.series[measure])

    def table(self) -> Table:
        """Returns the table of all values."""
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
    """Simulates every side at every rate."""
    rates = RATES[effort]
    streams = [stream(rate, REQUESTS[effort], drawn, deadlines_s=deadlines_s) for rate in rates]
    by_side = {name: [measured(serve(each, side, order, cost)) for each in streams] for name, side in SIDES.items()}
    series = {
        measure: {name: tuple(point[at] for point in points) for name, points in by_side.items()}
        for at, measure in enumerate(MEASURES)
    }
    return ByRate(rates_per_s=rates, series=series)


def measured(served: Served) -> tuple[float, ...]:
    """Returns the measures in the order of `MEASURES`."""
    began_N, answered_N = served.scheduled_N, served.in_time_N
    return (
        served.per_s(began_N),
        served.utility_per_s(began_N),
        served.per_s(answered_N),
        served.utility_per_s(answered_N),
        float(np.nanmax(served.began_s_N - served.stream.arrivals_s)),
        float(answered_N.mean()),
    )
