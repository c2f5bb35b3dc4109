"""A cascade that emulated services serve: six blocks before twelve, decisions recorded, weights random and tiny.

Both networks have a ramp after every block. Who leaves where is made up: the small one returns 60 % of the inputs,
half of them before its end.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.data import RUNS
from experiments.live.emulation import Emulation
from experiments.live.model import NUM_MADE_UP, card, made_up
from optimizer.calibration_file import CALIBRATION_FILE, RECORDS_FILE
from optimizer.problem import PlanProblem
from profiles.records import ExitRecords
from profiles.table import LatencyTable

FOLDER = RUNS / "emulated" / "recorded-cascade"
SMALL, LARGE = 6, 12
SURVIVAL = (
    *(1.0, 0.97, 0.92, 0.86, 0.78, 0.70),
    *(0.40, 0.39, 0.37, 0.35, 0.33, 0.31, 0.29, 0.27, 0.25, 0.23, 0.21, 0.20),
)
SHARE_OF_BLOCK = 0.5
"""Seconds of one of the small network's blocks, in those of the large one's."""


@dataclass(frozen=True, kw_only=True)
class CascadeEmulation(Emulation):
    """The same accelerators, for six blocks of half of the time before the published twelve."""

    def problem(self, survival: tuple[float, ...], *, time_scale: float | None = None) -> PlanProblem:
        alone = Emulation.problem(self, (1.0,) * LARGE, time_scale=time_scale)
        return replace(
            alone,
            num_blocks=SMALL + LARGE,
            ramps=tuple(range(SMALL + LARGE - 1)),
            survival_N=survival,
            latency={device: _both(table) for device, table in alone.latency.items()},
            bytes_per_sample_N=(alone.bytes_per_sample_N[0],) * (SMALL + LARGE),
            networks=(SMALL, SMALL + LARGE),
        )


def _both(table: LatencyTable) -> LatencyTable:
    """Of the small network, whose end has a ramp, and then the large one."""
    return replace(
        table,
        block_s_NB=np.vstack([table.block_s_NB[:SMALL] * SHARE_OF_BLOCK, table.block_s_NB]),
        ramp_s_EB=np.vstack([table.ramp_s_EB[:SMALL] * SHARE_OF_BLOCK, table.ramp_s_EB]),
    )


def ensure_cascade(folder: Path = FOLDER) -> ExitRecords:
    """The records of the folder, which is made first where it is missing."""
    if (folder / RECORDS_FILE).is_file() and (folder / CALIBRATION_FILE).is_file():
        return ExitRecords.load(folder / RECORDS_FILE)
    return make_cascade(folder)


def make_cascade(folder: Path) -> ExitRecords:
    """Write both models and their chain, with records and cards; gives the chain's records."""
    from experiments.models import tiny_model  # torch, which a process that only loads a service need not import
    from offramp.jobs.chaining import chain_models

    members = []
    for name, num_blocks, survival in (("small", SMALL, SURVIVAL[:SMALL]), ("large", LARGE, SURVIVAL[SMALL:])):
        member = tiny_model(folder.parent / f"{folder.name}-{name}", name=name, num_blocks=num_blocks, hidden_size=8)
        _keep(made_up((1.0, *survival[1:]), num_inputs=NUM_MADE_UP, rng=np.random.default_rng(0)), member)
        members.append(member)
    chain_models(members, folder)
    records = made_up(SURVIVAL, num_inputs=NUM_MADE_UP, rng=np.random.default_rng(0))
    _keep(records, folder)
    return records


def _keep(records: ExitRecords, folder: Path) -> None:
    records.save(folder / RECORDS_FILE)
    (folder / CALIBRATION_FILE).write_text(card(records).model_dump_json(indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make_cascade(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
