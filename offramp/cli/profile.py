"""`offramp profile`: latencies of a model's blocks and ramps, measured; printed in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earlyexit.errors import InputError
from offramp.cli.fields import takes_fields
from offramp.cli.options import AsJson, ModelFolder, in_a_folder, make_table, show

if TYPE_CHECKING:
    from rich.table import Table

    from offramp.commands.jobs import ProfileJob

NOISY = 0.05
"""Spread above which something else used the machine."""


@takes_fields("offramp.commands.jobs:ProfileJob")
def profile(
    job: ProfileJob,
    model: ModelFolder,
    out: Annotated[Path, typer.Option(help="Latency profile to write, .json: what a plan problem names.")],
    jsonl: Annotated[Path | None, typer.Option(help="Every measured point, one JSON line each.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the seconds of every block and ramp of a model on this machine."""
    from offramp.commands.profile import profile_figures, profile_model, write_points
    from offramp.commands.progress import progress_bars

    in_a_folder("out", out)
    in_a_folder("jsonl", jsonl)
    if jsonl is not None and jsonl.resolve() == out.resolve():
        raise InputError(f"--out and --jsonl are both {out}; two files are needed")
    with progress_bars() as progress:
        measured, points = profile_model(model, job, progress=progress)
    measured.save(out)
    if jsonl is not None:
        write_points(points, jsonl)
    figures = profile_figures(measured)
    if as_json:
        print(json.dumps(figures))
        return
    show(profile_table(figures))
    print(noise_text(figures))
    print(f"latency profile: {out}")


def profile_table(figures: dict[str, Any]) -> Table:
    """One row per length and batch size; `figures` as `offramp.commands.profile.profile_figures` gives them."""
    title = f"{figures['model']} on {figures['device']} ({figures['device_name']}), {figures['backend']}"
    rows = (
        (
            str(row["length"]),
            str(row["batch"]),
            f"{row['model_s'] * 1e3:.2f}",
            f"{row['batch'] / row['model_s']:.0f}",
            f"{row['block_s'] * 1e3:.3f}",
            "-" if row["ramp_s"] is None else f"{row['ramp_s'] * 1e3:.3f}",
        )
        for row in figures["rows"]
    )
    return make_table("length", "batch", "model ms", "inputs/s", "block ms", "ramp ms", title=title, rows=rows)


def noise_text(figures: dict[str, Any]) -> str:
    """How noisy the machine was, in one line, or two where it was too noisy."""
    text = f"spread {figures['spread']:.1%}, {figures['outliers']} outliers in {figures['timings']} timings"
    if figures["spread"] <= NOISY:
        return text
    return (
        f"{text}\nwarning: a spread above {NOISY:.0%}: something else used the machine; measure again when it is idle"
    )
