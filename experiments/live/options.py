"""What the studies' command lines share."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.live.emulation import Emulation, policy
from experiments.live.model import FOLDER, ensure_model, thresholds
from optimizer.plan import PolicySpec
from profiles.records import ExitRecords


def parser(name: str, description: str | None, *, time_scale: float = 40.0) -> ArgumentParser:
    """With the options that all studies have."""
    made = ArgumentParser(prog=f"python -m experiments.live.{name}", description=description)
    made.add_argument("--model", type=Path, default=FOLDER, help="made where it is missing")
    made.add_argument("--time-scale", type=float, default=time_scale, help="wall-clock seconds of an emulated one")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--front", choices=("haproxy", "proxy"), default="haproxy")
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a study runs on."""

    emulation: Emulation
    model: Path
    records: ExitRecords
    options: Namespace

    @property
    def spec(self) -> PolicySpec:
        return policy(self.records, self.model)

    @property
    def thresholds(self) -> dict[int, float]:
        return thresholds(self.records)


def bench(options: Namespace, counts: Mapping[str, int]) -> Bench:
    """The emulated cluster of a study, and its model."""
    records = ensure_model(options.model)
    emulation = Emulation(counts=counts, time_scale=options.time_scale)
    return Bench(emulation=emulation, model=options.model, records=records, options=options)
