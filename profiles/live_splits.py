"""Runs splits on a network as a replica's device runs batches, to be timed: see `measure.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from earlyexit.generation.sequence import RUN, run_of
from earlyexit.memory import PAGE_TOKENS
from earlyexit.split import Split
from profiles.measure import TimedSplit

if TYPE_CHECKING:
    from earlyexit.boundary import Boundary
    from earlyexit.network import Network, SegmentRunner
    from earlyexit.piece import Piece, Tensors

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
        from earlyexit.network import PreparedSegments

        if isinstance(self.segments, PreparedSegments):
            ascending = sorted((timed.split for timed in splits), key=lambda split: split.batch)
            self.segments.prepare({segment: split.budget for split in ascending for segment in split.segments()})

    def prepare(self, timed: TimedSplit) -> Callable[[], None]:
        """Prompts of as many tokens as all inputs together run as one, which is how a decoder gets them."""
        if self.context is not None and timed.is_prompt:
            return self.prepare_mixed(timed.split, (timed.length * timed.split.batch,))
        return self.prepare_mixed(timed.split, (timed.length,) * timed.split.batch, timed.further)

    def prepare_mixed(self, split: Split, lengths: tuple[int, ...], further: int = 0) -> Callable[[], None]:
        """The same of a batch of inputs of these lengths; `further`: see `TimedSplit`."""
        from earlyexit.cut import cut_out
        from earlyexit.piece import fuse

        cut = cut_out(self._network, split.first, split.end, split.ramps, self._policy, self.segments)
        singles = self._piece(split.first, lengths, further).singles()

        def run() -> None:
            for _ in cut.run(fuse(singles)):
                pass
            self._wait()

        return run

    def _piece(self, first: int, lengths: tuple[int, ...], further: int = 0) -> Piece:
        """Kept, so that all splits of the same lengths that begin at one block run the same inputs."""
        from earlyexit.network import arbitrary_tensors
        from earlyexit.piece import Piece

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
