"""What a latency profile predicts for every split, against that split measured.

    python -m experiments.planning.profile_check MODEL [--backend onnx] [--length 32]

Every split (first, end) at every batch size, without ramps and with all of its ramps active but nobody leaving, is
timed in the same rounds as the profile's own splits, and never enters the profile. Writes runs/profile-check-*.json.
Minutes: about 1 on one core. A busy machine shows as spread: repeat where it is above a few percent.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from earlyexit.clock import MonotonicClock
from earlyexit.split import Split
from experiments.data import RUNS
from experiments.kit import keep, show
from offramp.cli.options import integers
from offramp.jobs.profiling import ProfileJob, open_bench
from offramp.jobs.progress import progress_bars
from profiles.latency import LatencyProfile
from profiles.measure import Point, TimedSplit
from profiles.table import LatencyTable

ACCEPTED = 0.10
"""Median of the relative errors' sizes that a planner can live with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One split, measured and predicted."""

    split: Split
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative; above 0 where the profile promises too long a time."""
        return self.predicted_s / self.measured_s - 1


def all_splits(num_blocks: int, ramps: Sequence[int], batches: Sequence[int]) -> tuple[Split, ...]:
    """Every split, without ramps and, where it has any, with all of them."""
    return tuple(
        Split(first=first, end=end, batch=batch, ramps=active)
        for batch in batches
        for first in range(num_blocks)
        for end in range(first + 1, num_blocks + 1)
        for active in dict.fromkeys([(), tuple(ramp for ramp in ramps if first <= ramp < end)])
    )


def predicted_s(table: LatencyTable, ramps: Sequence[int], split: Split) -> float:
    """What the cost model says of a split whose batch stays whole; `ramps` are the table's rows, in order."""
    batch_X = np.array([float(split.batch)])
    block_s_N = table.blocks_at(batch_X)[split.first : split.end, 0]
    ramp_s_E = table.ramps_at(batch_X)[[ramps.index(ramp) for ramp in split.ramps], 0]
    return float(block_s_N.sum() + ramp_s_E.sum())


def check(profile: LatencyProfile, points: Sequence[Point]) -> tuple[Checked, ...]:
    """Every measured split beside its prediction."""
    return tuple(
        Checked(
            split=point.timed.split,
            measured_s=point.median_s,
            predicted_s=predicted_s(profile.at(point.timed.length), profile.ramps, point.timed.split),
        )
        for point in points
    )


def error_figures(checked: Sequence[Checked]) -> dict[str, Any]:
    """Sizes of the relative errors, and the middle of the errors themselves."""
    errors = np.array([each.error for each in checked])
    worst = max(checked, key=lambda each: abs(each.error))
    return {
        "splits": len(checked),
        "median": float(np.median(np.abs(errors))),
        "p90": float(np.quantile(np.abs(errors), 0.9)),
        "worst": float(np.abs(errors).max()),
        "worst_split": _split_text(worst.split),
        "bias": float(np.median(errors)),
    }


def grouped(checked: Sequence[Checked]) -> dict[str, list[Checked]]:
    """All, then by ramps, by batch size and by number of blocks."""
    names = [
        ("all", "all ramps" if s.ramps else "no ramp", f"batch {s.batch}", f"{s.end - s.first} blocks")
        for s in (each.split for each in checked)
    ]
    groups: dict[str, list[Checked]] = {}
    for kind in zip(*names, strict=True):
        for name, each in zip(kind, checked, strict=True):
            groups.setdefault(name, []).append(each)
    return groups


def main() -> None:
    """Measure, print and write; ends with 1 where the profile is not good enough."""
    parser = ArgumentParser(prog="python -m experiments.planning.profile_check", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=("torch", "onnx"), default="torch")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    job = ProfileJob(
        device=options.device,
        backend=options.backend,
        batches=integers("batches", options.batches),
        lengths=(options.length,),
        repeats=options.repeats,
        threads=options.threads,
        seed=options.seed,
    )
    profile, checked = measure(options.model, job)
    figures = {name: error_figures(group) for name, group in grouped(checked).items()}
    path = _write(profile, options.length, checked, figures)
    if options.json:
        print(json.dumps(figures))
    else:
        _print(profile, options.length, figures, path)
    raise SystemExit(0 if figures["all"]["median"] <= ACCEPTED else 1)


def measure(folder: Path, job: ProfileJob) -> tuple[LatencyProfile, tuple[Checked, ...]]:
    """The profile's splits and all others, in the same rounds."""
    # Every split as a file of its own, each with its weights, is nothing to leave in the model's folder.
    with (
        TemporaryDirectory() as exports,
        open_bench(folder, job, exports=Path(exports)) as bench,
        progress_bars() as progress,
    ):
        mine = job.splits(bench.model)
        splits = all_splits(bench.model.num_blocks, bench.model.ramp_indices, job.batches)
        theirs = tuple(TimedSplit(split=split, length=mine[0].length) for split in splits)
        points = bench.time((*mine, *theirs), MonotonicClock(), progress)
        profile = bench.profile(points[: len(mine)])
        return profile, check(profile, points[len(mine) :])


def _write(profile: LatencyProfile, length: int, checked: Sequence[Checked], figures: dict[str, Any]) -> Path:
    name = f"profile-check-{profile.model}-{profile.device}-{profile.backend}-{length}.json"
    splits = [asdict(each.split) | {"measured_s": each.measured_s, "predicted_s": each.predicted_s} for each in checked]
    document = {"provenance": dict(profile.provenance), "length": length, "figures": figures, "splits": splits}
    return keep(document, RUNS / name)


def _print(profile: LatencyProfile, length: int, figures: dict[str, dict[str, Any]], path: Path) -> None:
    facts = profile.provenance
    title = (
        f"{profile.model}, {profile.backend} {profile.dtype} on {facts['device_name']}, {facts['threads']} threads, "
        f"{length} tokens, medians of {facts['repeats']} rounds"
    )
    rows = [
        (
            name,
            str(row["splits"]),
            *(f"{row[key]:.1%}" for key in ("median", "p90", "worst", "bias")),
            row["worst_split"],
        )
        for name, row in figures.items()
    ]
    show(title, ("splits", "number", "|error| median", "p90", "worst", "bias", "worst at"), rows)
    print(f"the profile: {facts['outliers']} outliers in {facts['timings']} timings, spread {facts['spread']:.1%}")
    print(f"written: {path}")


def _split_text(split: Split) -> str:
    return f"blocks {split.first}-{split.end - 1}, batch {split.batch}, {len(split.ramps)} ramps"


if __name__ == "__main__":
    main()
