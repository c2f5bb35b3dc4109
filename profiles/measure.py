"""Measurement of the seconds of blocks and ramps, by running one-block splits in the same way as a replica.

`time_splits` runs and times the splits. `latency_tables` computes tables from the times, without torch or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from earlyexit.clock import Clock
from earlyexit.errors import DataError
from earlyexit.network.boundary import Split
from earlyexit.sequences.sequence import PAGE_TOKENS, RUN, run_of
from profiles.table import FloatArray, LatencyTable

if TYPE_CHECKING:
    from earlyexit.network.boundary import Boundary
    from earlyexit.network.model import Network, SegmentRunner
    from earlyexit.network.piece import Piece, Tensors
    from earlyexit.training.ramps import Progress


LEAST_WARM_UPS = 3
MOST_WARM_UPS = 10
STABLE = 0.1
"""The warm-up ends if two consecutive runs differ by at most this share."""
OUTLIER_MADS = 3.0
MAD_TO_SIGMA = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""
LEAST_SHARE = 0.1
"""Lower bound of a block's seconds in a split, as a share of its seconds alone. If the overhead of calls dominates,
noise could make the estimate 0 or negative."""
ONE_NETWORK = (0,)
FAR_BATCH = 8
"""Maximum batch of steps that are timed with a longer context, to bound the memory for keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSplit:
    """One measurement: a batch of inputs of one length runs through a split, and no input leaves early."""

    split: Split
    length: int
    """Tokens per input."""
    further: int = 0
    """For decode steps: additional tokens of context in each sequence, beyond the profile's context."""

    @property
    def is_prompt(self) -> bool:
        """For a decoder: whether the batch is a prompt rather than decode steps."""
        return self.length > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The seconds of a split in each round. Round r of all points was timed under similar conditions."""

    timed: TimedSplit
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """The noise of the measurement: the scaled median absolute deviation (MAD) of the rounds over their median."""
        return self._sigma_s / self.median_s if self.median_s else 0.0

    @property
    def outliers(self) -> int:
        """Number of rounds further from the median than three scaled MADs. The median includes them."""
        return int((self._distance_R > OUTLIER_MADS * self._sigma_s).sum())

    def to_json(self) -> dict[str, Any]:
        """Returns the point as plain data, for one line of a file of points."""
        split = self.timed.split
        return {
            "length": self.timed.length,
            **({"further": self.timed.further} if self.timed.further else {}),
            "batch": split.batch,
            "first": split.first,
            "end": split.end,
            "ramps": list(split.ramps),
            "median_s": self.median_s,
            "spread": self.spread,
            "outliers": self.outliers,
            "seconds": list(self.seconds),
        }

    @property
    def _distance_R(self) -> FloatArray:
        return np.abs(np.array(self.seconds) - self.median_s)

    @property
    def _sigma_s(self) -> float:
        return MAD_TO_SIGMA * float(np.median(self._distance_R))


def profile_splits(
    num_blocks: int,
    ramps: Sequence[int],
    batches: Sequence[int],
    lengths: Sequence[int],
    starts: Sequence[int] = ONE_NETWORK,
    further: int = 0,
) -> tuple[TimedSplit, ...]:
    """Returns the splits that `latency_tables` needs: each block alone, each block with its ramp, and each network.

    `starts`: the first blocks of a chain's networks. `further`: for a decoder, additional tokens of context for another
    measurement of a batch of steps; 0 for none.
    """
    timed = tuple(
        TimedSplit(split=split, length=length)
        for length in sorted(set(lengths))
        for batch in sorted(set(batches))
        for split in _splits(num_blocks, ramps, batch, starts)
    )
    if not further or 1 not in lengths:
        return timed
    batch = max((batch for batch in batches if batch <= FAR_BATCH), default=min(batches))
    return (*timed, TimedSplit(split=_whole(_Network(0, num_blocks, ()), batch), length=1, further=further))


def time_splits(
    splits: Sequence[TimedSplit],
    prepare: Callable[[TimedSplit], Callable[[], None]],
    *,
    clock: Clock,
    rng: np.random.Generator,
    repeats: int,
    progress: Progress | None = None,
) -> tuple[Point, ...]:
    """Time every split once per round. Each round has a new random order, so that drift affects all splits alike.

    `prepare` returns a function that runs a split once, and returns when the device has finished.
    """
    runs = [_warm(prepare(timed), clock, progress, k, len(splits)) for k, timed in enumerate(splits)]
    seconds_PR = np.empty((len(splits), repeats))
    for round_ in range(repeats):
        for k in rng.permutation(len(splits)):
            seconds_PR[k, round_] = _timed(runs[k], clock)
        if progress:
            progress("measure", round_ + 1, repeats)
    return tuple(Point(timed=timed, seconds=tuple(row)) for timed, row in zip(splits, seconds_PR.tolist(), strict=True))


def latency_tables(
    points: Sequence[Point],
    num_blocks: int,
    ramps: Sequence[int],
    starts: Sequence[int] = ONE_NETWORK,
    context: int | None = None,
) -> dict[int, LatencyTable]:
    """Returns a table per input length from the points of `profile_splits`.

    `context`: for a decoder, tokens before each step. Seconds that fall with the batch size because of noise are
    replaced by isotonic regression. Raises DataError for missing points, and for points with unequal rounds.
    """
    seconds_R = {point.timed: np.array(point.seconds) for point in points}
    further = max((timed.further for timed in seconds_R), default=0)
    lengths = sorted({timed.length for timed in seconds_R})
    batches = tuple(sorted({timed.split.batch for timed in seconds_R}))
    needed = profile_splits(num_blocks, ramps, batches, lengths, starts, further)
    missing = [timed for timed in needed if timed not in seconds_R]
    if missing:
        raise DataError(f"{len(missing)} points of the profile are missing, the first one is {missing[0]}")
    if len({len(point.seconds) for point in points}) > 1:
        raise DataError("all points of a profile must have the same number of rounds")
    networks = _networks(num_blocks, ramps, starts)
    tables = {length: _table(seconds_R, networks, batches, length) for length in lengths}
    if context is not None and 1 in tables:
        context_s = _context_s(seconds_R, needed[-1], num_blocks) if further else 0.0
        tables[1] = replace(tables[1], context=context, context_s=context_s)
    return tables


def _context_s(seconds_R: Mapping[TimedSplit, FloatArray], far: TimedSplit, num_blocks: int) -> float:
    """Returns the seconds that one further token of context, in one sequence, adds to a block."""
    added_s = float(np.median(seconds_R[far] - seconds_R[replace(far, further=0)]))
    return max(0.0, added_s) / (far.further * far.split.batch * num_blocks)


@dataclass(frozen=True, slots=True)
class _Network:
    """The blocks and ramps of one network of a chain."""

    first: int
    end: int
    ramps: tuple[int, ...]


def _networks(num_blocks: int, ramps: Sequence[int], starts: Sequence[int]) -> tuple[_Network, ...]:
    return tuple(
        _Network(first, end, tuple(ramp for ramp in ramps if first <= ramp < end))
        for first, end in pairwise([*starts, num_blocks])
    )


def _splits(num_blocks: int, ramps: Sequence[int], batch: int, starts: Sequence[int]) -> tuple[Split, ...]:
    alone = [_alone(block, batch) for block in range(num_blocks)]
    with_ramp = [_alone(ramp, batch, (ramp,)) for ramp in ramps]
    whole = [_whole(network, batch) for network in _networks(num_blocks, ramps, starts)]
    return tuple(dict.fromkeys([*alone, *with_ramp, *whole]))  # without duplicates, for networks of one block


def _alone(block: int, batch: int, ramps: tuple[int, ...] = ()) -> Split:
    return Split(first=block, end=block + 1, batch=batch, ramps=ramps)


def _whole(network: _Network, batch: int) -> Split:
    return Split(first=network.first, end=network.end, batch=batch)


def _warm(
    run: Callable[[], None], clock: Clock, progress: Progress | None, index: int, total: int
) -> Callable[[], None]:
    """Runs a split until two consecutive runs take about the same time. The first one may export or compile."""
    seconds = [_timed(run, clock) for _ in range(LEAST_WARM_UPS)]
    while abs(seconds[-1] - seconds[-2]) > STABLE * seconds[-2] and len(seconds) < MOST_WARM_UPS:
        seconds.append(_timed(run, clock))
    if progress:
        progress("warm-up", index + 1, total)
    return run


def _timed(run: Callable[[], None], clock: Clock) -> float:
    start_s = clock.now_s()
    run()
    return clock.now_s() - start_s


def _table(
    seconds_R: Mapping[TimedSplit, FloatArray], networks: Sequence[_Network], batches: tuple[int, ...], length: int
) -> LatencyTable:
    def seconds_of(split: Split) -> FloatArray:
        return seconds_R[TimedSplit(split=split, length=length)]

    blocks_BN, ramps_BE = [], []
    for batch in batches:
        rows = [_column(seconds_of, network, batch) for network in networks]
        blocks_BN.append(np.concatenate([blocks for blocks, _ in rows]))
        ramps_BE.append(np.concatenate([ramps for _, ramps in rows]))
    return LatencyTable(
        batches=batches, block_s_NB=_rising(np.stack(blocks_BN, axis=1)), ramp_s_EB=_rising(np.stack(ramps_BE, axis=1))
    )


def _column(seconds_of: Callable[[Split], FloatArray], network: _Network, batch: int) -> tuple[FloatArray, FloatArray]:
    """Returns the seconds of every block (N) and ramp (E) at one batch size, from the rounds (R) of all splits.

    A call has overhead: fusing, index tensors, the start of a session or of a graph. Blocks that run one by one pay it
    N times, and blocks that run together pay it once. So the blocks together take the time of the whole network, and
    a ramp is charged a call, because it ends its segment. The cost model has no term for a split that ends at no ramp.
    """
    first, end, ramps = network.first, network.end, network.ramps
    alone_NR = np.stack([seconds_of(_alone(block, batch)) for block in range(first, end)])
    calls_s = float(np.median(alone_NR.sum(axis=0) - seconds_of(_whole(network, batch))))
    block_s_N = np.median(alone_NR, axis=1) - calls_s / (end - first)
    added_E = [np.median(seconds_of(_alone(ramp, batch, (ramp,))) - alone_NR[ramp - first]) for ramp in ramps]
    ramp_s_E = np.array(added_E, dtype=np.float64) + max(0.0, calls_s) / max(1, end - first - 1)
    return np.maximum(block_s_N, LEAST_SHARE * np.median(alone_NR, axis=1)), np.maximum(ramp_s_E, 0.0)


def _rising(seconds_RB: FloatArray) -> FloatArray:
    """Returns the nearest rows, by least squares, that never fall (isotonic regression, Barlow et al.)."""
    from scipy.optimize import isotonic_regression

    rows: list[npt.NDArray[np.float64]] = [isotonic_regression(row).x for row in seconds_RB]
    return np.array(rows, dtype=np.float64).reshape(seconds_RB.shape)


NEVER = math.inf
"""A threshold that no score reaches, so that no input leaves in a timed split."""
PROMPTS = 1 << 20
"""Offset of the numbers of sequences that are prompts, above those of decode steps."""
FAR = 1 << 19
"""Offset of the numbers of sequences with a longer context."""


class LiveSplits:
    """Runs splits of a network on random inputs. Their values do not influence the time of a block."""

    def __init__(
        self,
        network: Network,
        rng: np.random.Generator,
        segments: SegmentRunner | None = None,
        context: int | None = None,
    ) -> None:
        """`segments`: the backend that runs the network's segments; None for the network itself.

        `context`: for a decoder, whose memory must be open, the tokens before a step; None for other networks.
        """
        from earlyexit.policies.threshold import ConfidencePolicy

        self._network = network
        self.context = context
        self._rng = rng
        self.segments = segments
        self._policy = ConfidencePolicy(NEVER)
        self._pieces: dict[tuple[int, tuple[int, ...], int], Piece] = {}

    def make_ready(self, splits: Sequence[TimedSplit]) -> None:
        """Prepare the backend for these splits, as a replica does before it serves them."""
        if self.segments is not None:
            ascending = sorted((timed.split for timed in splits), key=lambda split: split.batch)
            self.segments.prepare({segment: split.budget for split in ascending for segment in split.segments()})

    def prepare(self, timed: TimedSplit) -> Callable[[], None]:
        """Returns a function that runs a split once. For a decoder, prompts run as one prompt of all their tokens."""
        from earlyexit.network.model import Cut
        from earlyexit.network.piece import fuse

        split, lengths = timed.split, (timed.length,) * timed.split.batch
        if self.context is not None and timed.is_prompt:
            lengths = (sum(lengths),)
        cut = Cut(self._network, split.first, split.end, split.ramps, self._policy, self.segments)
        singles = self._piece(split.first, lengths, timed.further).singles()

        def run() -> None:
            for _ in cut.run(fuse(singles)):
                pass
            self._wait()

        return run

    def _piece(self, first: int, lengths: tuple[int, ...], further: int) -> Piece:
        """Returns inputs before block `first`, the same for all splits with equal lengths."""
        from earlyexit.network.model import arbitrary_tensors
        from earlyexit.network.piece import Piece

        network, batch = self._network, len(lengths)
        key = (first, lengths, further)
        if key not in self._pieces:
            lengths_B = np.array(lengths, dtype=np.int32)
            tensors = arbitrary_tensors(network, first, lengths_B, self._rng)
            if self.context is not None:
                tensors = _in_sequences(network.takes(first), tensors, lengths, self.context + further, far=further > 0)
            self._pieces[key] = Piece(
                sample_ids=tuple(map(str, range(batch))),
                next_block=first,
                lengths_B=lengths_B,
                tensors=tensors,
                state_BS=self._policy.initial_state(batch, network.task.num_outputs, network.device),
            )
        return self._pieces[key]

    def _wait(self) -> None:
        """Waits for a GPU's kernels, which run asynchronously."""
        import torch

        if self._network.device.type == "cuda":
            torch.cuda.synchronize(self._network.device)


def room_for(splits: Sequence[TimedSplit], context: int) -> int:
    """Returns the tokens, in whole pages, whose keys and values a decoder must keep at once in these measurements."""
    steps = max((timed.split.batch for timed in splits if not timed.is_prompt), default=0)
    far = [context + timed.further + 1 for timed in splits if timed.further for _ in range(timed.split.batch)]
    prompts = {timed.length * timed.split.batch for timed in splits if timed.is_prompt}
    sequences = [*[context + 1] * steps, *far, *prompts]
    return PAGE_TOKENS * sum(-(-tokens // PAGE_TOKENS) for tokens in sequences)


def _in_sequences(
    boundary: Boundary, tensors: Tensors, lengths: Sequence[int], context: int, *, far: bool = False
) -> Tensors:
    """Returns tensors in which inputs of one token are steps after `context` tokens, and others are whole prompts.

    The numbers of sequences do not depend on the block, so that their keys and values are stored once.
    """
    import torch

    runs = []
    for k, length in enumerate(lengths, 1):
        if length == 1:
            runs.append(run_of((FAR if far else 0) + k, context, context + 1, context))
        else:
            runs.append(run_of(PROMPTS + length, 0, length, length))
    runs_B5 = torch.tensor(runs, dtype=torch.int32)
    specs = zip(boundary, tensors, strict=True)
    return tuple(runs_B5.to(tensor.device) if spec.name == RUN else tensor for spec, tensor in specs)
