"""Run a scenario of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deployments.ingress.generation.loop import GenerationCounts
from earlyexit.counts import SplitCounts
from earlyexit.split import Split
from simulator.decisions import IntArray
from simulator.scenario import FloatArray, Scenario
from simulator.sequences import GeneratingIngress
from simulator.simulate import Progress, booted, play


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedSequences:
    """What became of all sequences."""

    ended_s: float
    """When the last token came."""
    said_K: IntArray
    """Tokens, by sequence."""
    ttft_s_K: FloatArray
    """NaN where none came."""
    tpot_s_K: FloatArray
    """NaN where no second one came."""
    splits: Mapping[Split, SplitCounts]
    """Batches and their seconds."""
    counts: tuple[GenerationCounts, ...]
    """Of every ingress."""
    interrupted: bool = False
    """Whether it was ended before the last sequence was."""

    @property
    def tokens_per_s(self) -> float:
        return float(self.said_K.sum()) / self.ended_s

    @property
    def exits(self) -> Mapping[int, int]:
        """Tokens by the block they left after."""
        return {
            block: sum(each.exits[block] for each in self.counts)
            for block in sorted({block for each in self.counts for block in each.exits})
        }


def generate(scenario: Scenario, *, progress: Progress | None = None) -> PlayedSequences:
    """Serve the scenario's sequences by its plan, until the last is over. Equal scenarios give equal outcomes.

    Interrupted (Ctrl-C), it gives what it has.
    """
    service = booted(scenario)
    interrupted = play(service, progress=progress).interrupted
    ingresses = [each for each in service.ingresses if isinstance(each, GeneratingIngress)]
    assert len(ingresses) == len(service.ingresses), "a scenario of sequences"
    said_IK = np.array([each.sequences.said for each in ingresses], dtype=np.int64)
    ttft_s_IK, tpot_s_IK = (
        np.array([getattr(each.sequences, name) for each in ingresses]) for name in ("ttft_s", "tpot_s")
    )
    of_K = np.arange(said_IK.shape[1]) % len(ingresses)
    mine = of_K, np.arange(said_IK.shape[1])
    return PlayedSequences(
        ended_s=service.events.time_s if interrupted else max(each.sequences.ended_s for each in ingresses),
        said_K=said_IK[mine],
        ttft_s_K=ttft_s_IK[mine],
        tpot_s_K=tpot_s_IK[mine],
        splits=dict(service.counts),
        counts=tuple(each.loop.counts for each in ingresses),
        interrupted=interrupted,
    )
