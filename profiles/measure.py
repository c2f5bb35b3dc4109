"""Measures how long blocks and ramps take, by running one-block splits the way a replica runs any split.

`time_splits` runs; `latency_tables` computes, and knows neither torch nor time. E3 section 3.2 plans from such tables.
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
"""Two runs in a row this close, relatively, end the warm-up."""
OUTLIER_MADS = 3.0
MAD_TO_SIGMA = 1.4826
"""Makes the median absolute deviation estimate a normal distribution's standard deviation."""
LEAST_SHARE = 0.1
"""Of a block's time alone, that it takes at least in a split: where calls cost nearly all, noise may leave nothing."""
ONE_NETWORK = (0,)
FAR_BATCH = 8
"""The most steps that are timed with a longer context: keys and values of more take much memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSplit:
    """What is timed: one batch through one split. All inputs have one length, and none leaves early."""

    split: Split
    length: int
    """Tokens of every input."""
    further: int = 0
    """Of steps of sequences: tokens that each has come to beyond the profile's context."""

    @property
    def is_prompt(self) -> bool:
        """Of a network that keeps something of sequences: whether it runs what was given, and not a step of each."""
        return self.length > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A split's seconds, one per round; rounds of points that were timed together are comparable pairwise."""

    timed: TimedSplit
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Scaled median absolute deviation (MAD) of the rounds, relative to their median: how noisy the machine was."""
        return self._sigma_s / self.median_s if self.median_s else 0.0

    @property
    def outliers(self) -> int:
        """Rounds further from the median than three scaled MADs; the median is of all rounds."""
        return int((self._distance_R > OUTLIER_MADS * self._sigma_s).sum())

    def to_json(self) -> dict[str, Any]:
        """Plain data, one line of a file of points."""
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
    """What `latency_tables` needs: every block alone, every block with its ramp, and every network in one piece.

    `starts`: the first blocks of a chain's networks, which no split crosses. `further`: of a decoder, tokens of context
    that a batch of steps is timed with once more, beyond the profile's; 0: none is.
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
    """Time every split once per round, in an order drawn anew for each, so that the machine's drift hits all alike.

    `prepare` gives a call that runs a split once, and returns when the device has finished it.
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
    """One table per input length, from the points of `profile_splits`; `context`: of a decoder, what came before steps.

    Rows rise with the batch size: where noise says otherwise, the nearest rows that do (isotonic regression).
    Raises DataError where points are missing, or do not come from the same rounds.
    """
    seconds_R = {point.timed: np.array(point.seconds) for point in points}
    further = max((timed.further for timed in seconds_R), default=0)
    lengths = sorted({timed.length for timed in seconds_R})
    batches = tuple(sorted({timed.split.batch for timed in seconds_R}))
    needed = profile_splits(num_blocks, ramps, batches, lengths, starts, further)
    missing = [timed for timed in needed if timed not in seconds_R]
    if missing:
        raise DataError(f"points of the profile are missing: {len(missing)}, the first of them {missing[0]}")
    if len({len(point.seconds) for point in points}) > 1:
        raise DataError("the points of a profile must come from the same rounds; these have unequal numbers of them")
    networks = _networks(num_blocks, ramps, starts)
    tables = {length: _table(seconds_R, networks, batches, length) for length in lengths}
    if context is not None and 1 in tables:
        context_s = _context_s(seconds_R, needed[-1], num_blocks) if further else 0.0
        tables[1] = replace(tables[1], context=context, context_s=context_s)
    return tables


def _context_s(seconds_R: Mapping[TimedSplit, FloatArray], far: TimedSplit, num_blocks: int) -> float:
    """What a block takes longer for a further token that one step of a batch looks at: of many steps, side by side."""
    added_s = float(np.median(seconds_R[far] - seconds_R[replace(far, further=0)]))
    return max(0.0, added_s) / (far.further * far.split.batch * num_blocks)


@dataclass(frozen=True, slots=True)
class _Network:
    """One of the networks that are timed, each in itself."""

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
    return tuple(dict.fromkeys([*alone, *with_ramp, *whole]))  # one block is the whole of its network


def _alone(block: int, batch: int, ramps: tuple[int, ...] = ()) -> Split:
    return Split(first=block, end=block + 1, batch=batch, ramps=ramps)


def _whole(network: _Network, batch: int) -> Split:
    return Split(first=network.first, end=network.end, batch=batch)


def _warm(
    run: Callable[[], None], clock: Clock, progress: Progress | None, index: int, total: int
) -> Callable[[], None]:
    """Run until two runs in a row take about as long; the first may export, compile or page in."""
    seconds = [_timed(run, clock) for _ in range(LEAST_WARM_UPS)]
    while abs(seconds[-1] - seconds[-2]) > STABLE * seconds[-2] and len(seconds) < MOST_WARM_UPS:
        seconds.append(_timed(run, clock))
    if progress:
        progress("warm-up", index + 1, total)
    return run


def _timed(run: Callable[[], None], clock: Clock) -> float:
    started_s = clock.now_s()
    run()
    return clock.now_s() - started_s


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
    """Seconds of every block (N) and ramp (E) at one batch size, from the rounds (R) of every split of a network.

    Blocks run one by one pay the price of a call (fusing, index tensors, a session's start) N times, run together
    once. The cost model has no row for it, so every block carries half of what one more call costs it: the sum of the
    blocks is then as far above the whole model's time as it is below that of its blocks alone, and every split lies
    between these two. A ramp ends the segment it is in, and what follows pays for a start of its own: a block with
    its ramp is charged what that takes alone.
    """
    first, end, ramps = network.first, network.end, network.ramps
    alone_NR = np.stack([seconds_of(_alone(block, batch)) for block in range(first, end)])
    whole_R = seconds_of(_whole(network, batch))
    half_call_s = float(np.median(alone_NR.sum(axis=0) - whole_R)) / (2 * (end - first))
    block_s_N = np.median(alone_NR, axis=1) - half_call_s
    added_E = [np.median(seconds_of(_alone(ramp, batch, (ramp,))) - alone_NR[ramp - first]) for ramp in ramps]
    ramp_s_E = np.array(added_E, dtype=np.float64) + half_call_s
    return np.maximum(block_s_N, LEAST_SHARE * np.median(alone_NR, axis=1)), np.maximum(ramp_s_E, 0.0)


def _rising(seconds_RB: FloatArray) -> FloatArray:
    """The nearest rows, by squares, that never fall (Barlow et al., pool adjacent violators)."""
    from scipy.optimize import isotonic_regression

    rows: list[npt.NDArray[np.float64]] = [isotonic_regression(row).x for row in seconds_RB]
    return np.array(rows, dtype=np.float64).reshape(seconds_RB.shape)


NEVER = math.inf
"""No exit is so sure: inputs stay, so that a timed split's batch is the same at its end."""
PROMPTS = 1 << 20
"""Above the numbers of sequences that take steps."""
FAR = 1 << 19
"""The same of those with a longer context."""


class LiveSplits:
    """Inputs are fused, then cut by cut.

    What goes in is random: the values do not change how long a block takes.
    """

    def __init__(
        self,
        network: Network,
        rng: np.random.Generator,
        segments: SegmentRunner | None = None,
        context: int | None = None,
    ) -> None:
        """`segments` compute the cuts; None for the network itself.

        `context`: of a network that keeps something of sequences, and whose memory is open, how many tokens came before
        a step; None for all others.
        """
        from earlyexit.policies.threshold import ConfidencePolicy

        self._network = network
        self.context = context
        self._rng = rng
        self.segments = segments
        self._policy = ConfidencePolicy(NEVER)
        self._pieces: dict[tuple[int, tuple[int, ...], int], Piece] = {}

    def make_ready(self, splits: Sequence[TimedSplit]) -> None:
        """Whatever is slow the first time of these splits, as a replica does it before it serves them."""
        if self.segments is not None:
            ascending = sorted((timed.split for timed in splits), key=lambda split: split.batch)
            self.segments.prepare({segment: split.budget for split in ascending for segment in split.segments()})

    def prepare(self, timed: TimedSplit) -> Callable[[], None]:
        """Prompts of as many tokens as all inputs together run as one, which is how a decoder gets them."""
        if self.context is not None and timed.is_prompt:
            return self.prepare_mixed(timed.split, (timed.length * timed.split.batch,))
        return self.prepare_mixed(timed.split, (timed.length,) * timed.split.batch, timed.further)

    def prepare_mixed(self, split: Split, lengths: tuple[int, ...], further: int = 0) -> Callable[[], None]:
        """The same of a batch of inputs of these lengths; `further`: see `TimedSplit`."""
        from earlyexit.network.cut import Cut
        from earlyexit.network.piece import fuse

        cut = Cut(self._network, split.first, split.end, split.ramps, self._policy, self.segments)
        singles = self._piece(split.first, lengths, further).singles()

        def run() -> None:
            for _ in cut.run(fuse(singles)):
                pass
            self._wait()

        return run

    def _piece(self, first: int, lengths: tuple[int, ...], further: int = 0) -> Piece:
        """Kept, so that all splits of the same lengths that begin at one block run the same inputs."""
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
        """Kernels of a GPU run on after the call that started them."""
        import torch

        if self._network.device.type == "cuda":
            torch.cuda.synchronize(self._network.device)


def room_for(splits: Sequence[TimedSplit], context: int) -> int:
    """Tokens that a network must be able to keep at once to be timed so, whatever it keeps of one."""
    steps = max((timed.split.batch for timed in splits if not timed.is_prompt), default=0)
    far = [context + timed.further + 1 for timed in splits if timed.further for _ in range(timed.split.batch)]
    prompts = {timed.length * timed.split.batch for timed in splits if timed.is_prompt}
    return PAGE_TOKENS * sum(-(-tokens // PAGE_TOKENS) for tokens in [*[context + 1] * steps, *far, *prompts])


def _in_sequences(
    boundary: Boundary, tensors: Tensors, lengths: Sequence[int], context: int, *, far: bool = False
) -> Tensors:
    """Inputs of a token are steps of sequences that have come to `context` tokens, others are whole prompts.

    Sequences of a kind have the same number again whichever block they are at: what they keep is kept once.
    """
    import torch

    above = FAR if far else 0
    runs = [
        run_of(above + k, context, context + 1, context) if length == 1 else run_of(PROMPTS + length, 0, length, length)
        for k, length in enumerate(lengths, 1)
    ]
    runs_B5 = torch.tensor(runs, dtype=torch.int32)
    return tuple(
        runs_B5.to(each.device) if spec.name == RUN else each for spec, each in zip(boundary, tensors, strict=True)
    )
