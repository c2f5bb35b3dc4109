"""`offramp profile`: measures the execution time of every block and ramp of a model on this machine."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from cluster.devices import find_device
from earlyexit.backends import computed_by
from earlyexit.clock import Clock, MonotonicClock
from earlyexit.engine.cpu import first_processor
from earlyexit.errors import DataError, InputError
from earlyexit.network.store import WEIGHTS_FILE, ModelCard, read_card
from offramp.commands.jobs import ProfileJob, ProfileOptions
from offramp.commands.output import make_table, print_result, progress_bars, provenance
from profiles.latency import LatencyProfile
from profiles.measure import LiveSplits, Point, TimedSplit, latency_tables, profile_splits, room_for, time_splits
from profiles.records import ExitRecords

if TYPE_CHECKING:
    from earlyexit.network.model import Network
    from earlyexit.training.ramps import Progress


OF_BLOCK = re.compile(r"backbone\.blocks\.(\d+)\.")
"""Names of a block's weights in a weights file."""


def measured_costs(latency: Path | None, records: ExitRecords) -> list[float] | None:
    """Returns the seconds of each block at the largest batch and the length nearest to the inputs' mean length.

    Returns None without a profile. Raises DataError for a profile of another model.
    """
    if latency is None:
        return None
    profile = LatencyProfile.load(latency)
    if profile.num_blocks != records.num_blocks:
        raise DataError(f"{latency} has {profile.num_blocks} blocks, the model {records.num_blocks}")
    mean = 1.0 if records.tokens_N is None else float(records.tokens_N.mean())
    nearest = min(profile.lengths, key=lambda length: abs(length - mean))
    costs: list[float] = profile.tables[nearest].block_s_NB[:, -1].tolist()
    return costs


def parameters_by_block(folder: Path, card: ModelCard) -> list[float] | None:
    """Returns the number of parameters of each block, as its estimated cost; None if it is unknown for a network."""
    sizes = [block_sizes(member) for member in card.members(folder)]
    if any(len(each) != length for each, length in zip(sizes, card.chain.lengths, strict=True)):
        return None
    return [num_parameters for each in sizes for num_parameters in each.values()]


def block_sizes(folder: Path) -> dict[int, float]:
    """Returns the number of parameters of each block, in ascending order of the blocks."""
    from safetensors import safe_open

    sizes: dict[int, float] = {}
    with safe_open(folder / WEIGHTS_FILE, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if match := OF_BLOCK.match(name):
                block = int(match[1])
                sizes[block] = sizes.get(block, 0.0) + prod(file.get_slice(name).get_shape())
    return dict(sorted(sizes.items()))


USUAL_LENGTHS = (16, 32, 64)
STEPS_AND_PROMPTS = (1, 16)
"""Default lengths for decoders: a decode step of each sequence, and prompts of 16 x batch tokens."""
FURTHER = 7
"""Decode steps are also timed with this many times more context tokens."""


def splits_of(job: ProfileJob, model: Network) -> tuple[TimedSplit, ...]:
    """Returns the splits to time for a profile; raises InputError for lengths that the model does not support."""
    keeps = model.members[0].backbone.kept_bytes > 0
    lengths = job.lengths or ((1,) if model.max_length == 1 else STEPS_AND_PROMPTS if keeps else USUAL_LENGTHS)
    if lengths[-1] > model.max_length:
        raise InputError(f"length {lengths[-1]}; the model takes at most {model.max_length} tokens")
    further = 0
    if keeps:
        prompt = job.batches[-1] * lengths[-1] if lengths[-1] > 1 else 1
        if prompt > model.max_length:
            raise InputError(
                f"batch {job.batches[-1]} of length {lengths[-1]} is a prompt of {prompt} tokens; the model takes at "
                f"most {model.max_length}"
            )
        if job.context_tokens >= model.max_length:
            raise InputError(f"a step after {job.context_tokens} tokens; the model takes at most {model.max_length}")
        # Additional context tokens, enough to measure the cost of context.
        further = max(0, min(FURTHER * job.context_tokens, model.max_length - 1 - job.context_tokens))
    elif job.context is not None:
        raise InputError("--context is only for decoders, whose steps read the keys and values of earlier tokens")
    return profile_splits(model.num_blocks, model.ramp_indices, job.batches, lengths, model.chain.starts, further)


def profile_model(
    folder: Path,
    job: ProfileJob,
    *,
    one_of_each: bool = False,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> tuple[LatencyProfile, tuple[Point, ...]]:
    """Measures a model on this machine, with the device and the backend of a replica.

    Returns the profile and the measured points. `one_of_each`: inner blocks with the same structure are measured only
    once. Changes torch's number of threads during the measurement. Raises InputError for an unavailable device or
    backend, or an impossible length.
    """
    import torch

    from earlyexit.network.store import load_network, open_network

    torch_device = find_device(job.device).torch_device
    if torch_device == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {job.device!r} needs CUDA, which torch does not find on this machine")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        model = load_network(folder, device=torch_device, dtype=getattr(torch, job.dtype))
        rng = np.random.default_rng(job.seed)
        segments = open_network(job.backend, model, folder)
        live, splits = LiveSplits(model, rng, segments, _context(job, model)), splits_of(job, model)
        stand_ins = same_times(splits, _block_kinds(model)) if one_of_each else {each: each for each in splits}
        measured = tuple(dict.fromkeys(stand_ins.values()))
        live.make_ready(measured)
        clock = clock or MonotonicClock()
        points = time_splits(measured, live.prepare, clock=clock, rng=rng, repeats=job.repeats, progress=progress)
    finally:
        torch.set_num_threads(threads_before)
    point_of = {point.timed: point for point in points}
    every = [replace(point_of[stand_in], timed=timed) for timed, stand_in in stand_ins.items()]
    starts, ramps = model.chain.starts, model.ramp_indices
    profile = LatencyProfile(
        model=read_card(folder).name,
        num_blocks=model.num_blocks,
        ramps=ramps,
        device=job.device,
        backend=computed_by(segments) or job.backend,
        dtype=job.dtype,
        kind="measured",
        tables=latency_tables(every, model.num_blocks, ramps, starts, context=live.context),
        provenance=_provenance(job, model, points, live.context),
    )
    return profile, points


def same_times(splits: Sequence[TimedSplit], kinds_N: Sequence[Hashable]) -> dict[TimedSplit, TimedSplit]:
    """Maps each split to the first one with the same times, which runs a block of the same kind."""
    first: dict[Hashable, TimedSplit] = {}

    def kind(timed: TimedSplit) -> Hashable:
        split = timed.split
        blocks = kinds_N[split.first] if split.end == split.first + 1 else (split.first, split.end)
        return blocks, split.batch, bool(split.ramps), timed.length, timed.further

    return {timed: first.setdefault(kind(timed), timed) for timed in splits}


def _block_kinds(model: Network) -> list[Hashable]:
    """Returns the kind of each block, which is the same for inner blocks with equal modules, inputs and outputs.

    The first and the last block have their own kinds, because they also embed the input and end the model.
    """
    from torch import nn

    modules = getattr(getattr(model, "backbone", None), "blocks", None)
    kinds: list[Hashable] = list(range(model.num_blocks))
    if isinstance(modules, nn.ModuleList):
        for block in range(1, model.num_blocks - 1):
            kinds[block] = repr(modules[block]), model.boundary(block - 1), model.boundary(block)
    return kinds


def _context(job: ProfileJob, model: Network) -> int | None:
    """Allocates the KV cache of a decoder, and returns its number of context tokens; None for other models."""
    from earlyexit.families.seq2seq import Seq2SeqBackbone
    from earlyexit.network.store import open_memory

    backbone = model.members[0].backbone
    if not backbone.kept_bytes:
        return None
    if isinstance(backbone, Seq2SeqBackbone):
        raise InputError("encoder-decoders cannot be profiled yet, because profiles have no cost of the source text")
    open_memory(model, room_for(splits_of(job, model), job.context_tokens), "compute", 0)
    return job.context_tokens


def profile_figures(profile: LatencyProfile) -> dict[str, Any]:
    """Returns a summary of a profile: times of the full model, a mean block and a mean ramp for each length and batch.

    `spread` is the median of `Point.spread`. Above a few percent, other programs used the machine.
    """
    return {
        "model": profile.model,
        "device": profile.device,
        "backend": profile.backend,
        "dtype": profile.dtype,
        "device_name": profile.provenance["device_name"],
        **{name: profile.provenance[name] for name in ("timings", "outliers", "spread")},
        "rows": [
            {
                "length": length,
                "batch": batch,
                "model_s": float(table.block_s_NB[:, column].sum()),
                "block_s": float(table.block_s_NB[:, column].mean()),
                "ramp_s": float(table.ramp_s_EB[:, column].mean()) if profile.ramps else None,
            }
            for length, table in profile.tables.items()
            for column, batch in enumerate(table.batches)
        ],
    }


def _provenance(job: ProfileJob, model: Network, points: Sequence[Point], context: int | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"device_name": cpu_name()}
    if model.device.type == "cuda":
        import torch
        from torch.utils import collect_env

        facts = {
            "device_name": torch.cuda.get_device_name(model.device),
            "cuda": torch.version.cuda,
            "driver": collect_env.get_nvidia_driver_version(collect_env.run),  # type: ignore[no-untyped-call]
        }
    return provenance(
        **facts,
        **({} if context is None else {"context": context}),
        **job.model_dump(include={"threads", "seed", "repeats"}),
        timings=sum(len(point.seconds) for point in points),
        outliers=sum(point.outliers for point in points),
        spread=float(np.median([point.spread for point in points])),
    )


def cpu_name() -> str:
    """Returns the name of the processor."""
    return first_processor().get("model name") or platform.processor() or platform.machine()


NOISY = 0.05
"""Spread above which other programs probably used the machine."""


def run(job: ProfileOptions) -> None:
    """Measures a model, writes the profile, and prints a summary."""
    with progress_bars() as progress:
        profile, points = profile_model(job.model, job, progress=progress)
    profile.save(job.out)
    if job.jsonl is not None:
        job.jsonl.write_text("".join(f"{json.dumps(each.to_json())}\n" for each in points), encoding="utf-8")
    figures = profile_figures(profile)
    lines = (noise_text(figures), f"latency profile: {job.out}")
    print_result(figures, lambda: [profile_table(figures)], lines, as_json=job.as_json)


def profile_table(figures: dict[str, Any]) -> Table:
    """Returns a table with a row per length and batch size, from the result of `profile_figures`."""
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
    """Returns a line about the noise of the measurement, with a warning if it is too large."""
    text = f"spread {figures['spread']:.1%}, {figures['outliers']} outliers in {figures['timings']} timings"
    if figures["spread"] <= NOISY:
        return text
    return (
        f"{text}\nwarning: a spread above {NOISY:.0%}: other programs used the machine; measure again when it is idle"
    )
