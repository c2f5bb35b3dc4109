"""A recorded stream and the times of the model that it was recorded with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments.apparate import made_up
from experiments.apparate.recording import Kind, Stream, streams
from experiments.studies.study import Effort
from optimizer.live.exit_times import ExitTimes
from profiles.catalogue import published_profile
from profiles.table import LatencyTable

BUDGET = 0.01
"""Of answers that differ from the full model's (Apparate section 5.1)."""
RAMP_BUDGET = 0.02
"""What ramps may add to the worst case (the same)."""
TEXT_DEVICE, VISION_DEVICE = "A6000", "V100"
"""Apparate's own, of whose DistilBERT, with as many blocks as MiniLM, a figure per block is published; and the one of
whose ResNet-50 times at many batch sizes are."""
VISION_RAMP = 0.11 / 16
"""A ramp's part of the model: BranchyNet's of a ResNet-50, one after each of its 16 blocks, cost 11 % (table 2)."""
VISION_BLOCKS = 15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What strategies are compared on."""

    stream: Stream
    table: LatencyTable

    @property
    def name(self) -> str:
        return self.stream.name

    @property
    def kind(self) -> Kind:
        return self.stream.kind

    @property
    def times(self) -> ExitTimes:
        """At batch 1."""
        return ExitTimes.of(self.table, self.stream.records.ramps, 1)


def cases(effort: Effort) -> list[Case]:
    """The eight streams; with quick effort two made-up ones, which need no data."""
    if effort == "quick":
        return [Case(stream=stream, table=made_up.table()) for stream in made_up.streams()]
    return [Case(stream=stream, table=table_of(stream.kind)) for stream in streams()]


@cache
def table_of(kind: Kind) -> LatencyTable:
    """Of a published model with as many blocks as the recorded one, or nearly: MiniLM has 6, ResNet-32 15."""
    if kind == "text":
        (table,) = published_profile("distilbert-base", TEXT_DEVICE).tables.values()
        return table
    (table,) = published_profile("resnet50", VISION_DEVICE).tables.values()
    block_s_B = table.block_s_NB.sum(0) / VISION_BLOCKS
    ramp_s_B = VISION_RAMP * table.block_s_NB.sum(0)
    return LatencyTable(
        batches=table.batches,
        block_s_NB=np.tile(block_s_B, (VISION_BLOCKS, 1)),
        ramp_s_EB=np.tile(ramp_s_B, (VISION_BLOCKS - 1, 1)),
    )
