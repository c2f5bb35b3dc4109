"""A recorded stream and the times of the model that it was recorded with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from experiments.apparate import made_up
from experiments.apparate.recording import FOLDER, Kind, Stream, cifar_network, streams, with_ramps
from experiments.studies.study import Effort
from optimizer.live.exit_times import ExitTimes
from profiles.catalogue import published_profile
from profiles.latency import LatencyProfile
from profiles.table import LatencyTable

BUDGET = 0.01
"""Of answers that differ from the full model's (Apparate section 5.1)."""
RAMP_BUDGET = 0.02
"""What ramps may add to the worst case (the same)."""
TEXT_DEVICE = "A6000"
"""Apparate's own; of its DistilBERT, which has as many blocks as MiniLM, one figure per block is published."""
BATCHES = (1, 2, 4, 8)
IN_WORDS = {
    "text": "DistilBERT's published times on an A6000, of as many blocks as MiniLM has",
    "vision": "ResNet-32's times measured on one CPU core",
}


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
        return self.times_at(1)

    def times_at(self, batch: int) -> ExitTimes:
        """At another batch size."""
        return ExitTimes.of(self.table, self.stream.records.ramps, batch)


def cases(effort: Effort, ramps: str = "light") -> list[Case]:
    """The eight streams; with quick effort made-up ones, which need no data."""
    if effort == "quick":
        return [Case(stream=stream, table=made_up.table()) for stream in made_up.streams()]
    found = streams(ramps="mlp" if ramps == "mlp" else "light")
    return [Case(stream=stream, table=table_of(stream.kind)) for stream in found]


@cache
def table_of(kind: Kind) -> LatencyTable:
    """Of the model that a kind of stream is recorded with; see `IN_WORDS`."""
    if kind == "text":
        (table,) = published_profile("distilbert-base", TEXT_DEVICE).tables.values()
        return table
    (table,) = vision_profile(FOLDER).tables.values()
    return table


def vision_profile(folder: Path) -> LatencyProfile:
    """ResNet-32 with all its ramps, measured on this machine once and kept."""
    from earlyexit.store import save_model
    from offramp.jobs.profiling import ProfileJob, profile_model
    from offramp.jobs.progress import progress_bars

    path = folder / "resnet32_cpu.json"
    if not path.is_file():
        model_folder = folder / "resnet32"
        save_model(with_ramps(cifar_network(), "light"), model_folder)
        with progress_bars() as progress:
            profile, _ = profile_model(model_folder, ProfileJob(batches=BATCHES, repeats=15), progress=progress)
        profile.save(path)
    return LatencyProfile.load(path)
