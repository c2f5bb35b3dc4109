"""`offramp profile`: latencies of a model's blocks and ramps, measured; printed in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earlyexit.errors import InputError
from offramp.cli.options import (
    BACKENDS,
    DTYPES,
    AsJson,
    Backend,
    Dtype,
    ModelFolder,
    Seed,
    choice,
    in_a_folder,
    integers,
    make_table,
    show,
)

if TYPE_CHECKING:
    from rich.table import Table

NOISY = 0.05
"""Spread above which something else used the machine."""


def profile(
    model: ModelFolder,
    out: Annotated[Path, typer.Option(help="Latency profile to write, .json: what a plan problem names.")],
    device: Annotated[str, typer.Option(help="cpu, cuda, or the accelerator type that cuda is here.")] = "cpu",
    backend: Backend = "torch",
    dtype: Dtype = "float32",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8,16",
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens per input; default: 16,32,64; of decoders 1,16, where inputs have none 1."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Of decoders: tokens that came before a step; default: 64.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a CPU replica.")] = 1,
    seed: Seed = 0,
    jsonl: Annotated[Path | None, typer.Option(help="Every measured point, one JSON line each.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the seconds of every block and ramp of a model on this machine."""
    from offramp.commands.profile import ProfileJob, profile_figures, profile_model, write_points
    from offramp.commands.progress import progress_bars

    in_a_folder("out", out)
    in_a_folder("jsonl", jsonl)
    if jsonl is not None and jsonl.resolve() == out.resolve():
        raise InputError(f"--out and --jsonl are both {out}; two files are needed")
    job = ProfileJob(
        device=device,
        backend=choice("backend", backend, BACKENDS),
        dtype=choice("dtype", dtype, DTYPES),
        batches=integers("batches", batches),
        lengths=None if lengths is None else integers("lengths", lengths),
        context=context,
        repeats=repeats,
        threads=threads,
        seed=seed,
    )
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
    table = make_table("length", "batch", "model ms", "inputs/s", "block ms", "ramp ms", title=title)
    for row in figures["rows"]:
        ramp = "-" if row["ramp_s"] is None else f"{row['ramp_s'] * 1e3:.3f}"
        table.add_row(
            str(row["length"]),
            str(row["batch"]),
            f"{row['model_s'] * 1e3:.2f}",
            f"{row['batch'] / row['model_s']:.0f}",
            f"{row['block_s'] * 1e3:.3f}",
            ramp,
        )
    return table


def noise_text(figures: dict[str, Any]) -> str:
    """How noisy the machine was, in one line, or two where it was too noisy."""
    text = f"spread {figures['spread']:.1%}, {figures['outliers']} outliers in {figures['timings']} timings"
    if figures["spread"] <= NOISY:
        return text
    return (
        f"{text}\nwarning: a spread above {NOISY:.0%}: something else used the machine; measure again when it is idle"
    )
