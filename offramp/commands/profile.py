"""`offramp profile`: measures the seconds of every block and ramp of a model on this machine."""

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
from offramp.commands.output import make_table, print_result
from offramp.commands.progress import progress_bars, provenance
from profiles.latency import LatencyProfile
from profiles.measure import LiveSplits, Point, TimedSplit, latency_tables, profile_splits, room_for, time_splits
from profiles.records import ExitRecords

if TYPE_CHECKING:
    from earlyexit.network.chain_network import AnyNetwork
    from earlyexit.training.ramps import Progress


OF_BLOCK = re.compile(r"backbone\.blocks\.(\d+)\.")
"""Name of a block's weights in a model's file."""


def measured_costs(latency: Path | None, records: ExitRecords) -> list[float] | None:
    """Returns the seconds of every block at the largest batch and the length nearest to the inputs' mean.

    None where no profile is given. Raises DataError for one of another model.
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
    """Returns the sizes of the blocks, as costs if none were measured; None if a network does not tell them."""
    sizes = [block_sizes(member) for member in card.members(folder)]
    told = all(len(each) == length for each, length in zip(sizes, card.chain.lengths, strict=True))
    return [of_block for each in sizes for of_block in each.values()] if told else None


def block_sizes(folder: Path) -> dict[int, float]:
    """Returns the number of parameters of each block, in ascending order, by the names of the weights."""
    from safetensors import safe_open

    sizes: dict[int, float] = {}
    with safe_open(folder / WEIGHTS_FILE, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            if found := OF_BLOCK.match(name):
                sizes[int(found[1])] = sizes.get(int(found[1]), 0.0) + prod(file.get_slice(name).get_shape())
    return dict(sorted(sizes.items()))


USUAL_LENGTHS = (16, 32, 64)
STEPS_AND_PROMPTS = (1, 16)
"""Default lengths for decoders: a step of each sequence, and prompts of so many tokens times the batch."""
FURTHER = 7
"""A batch of steps is timed again after this many times more tokens of context."""


def splits_of(job: ProfileJob, model: AnyNetwork) -> tuple[TimedSplit, ...]:
    """Returns the splits to time for a profile; raises InputError for lengths that the model does not take."""
    from earlyexit.network.chain_network import keeps_sequences

    keeps = keeps_sequences(model)
    lengths = job.lengths or ((1,) if model.max_length == 1 else STEPS_AND_PROMPTS if keeps else USUAL_LENGTHS)
    if lengths[-1] > model.max_length:
        raise InputError(f"length {lengths[-1]}; the model takes at most {model.max_length} tokens")
    further = 0
    if keeps:
        _check_sequences(job, model, lengths)
        # Tokens of context beyond those that steps are timed after, so far away that what they cost can be told.
        further = max(0, min(FURTHER * job.steps_after, model.max_length - 1 - job.steps_after))
    elif job.context is not None:
        raise InputError("context is of decoders, whose steps read the keys and values of what came before")
    return profile_splits(model.num_blocks, model.ramp_indices, job.batches, lengths, model.chain.starts, further)


def _check_sequences(job: ProfileJob, model: AnyNetwork, lengths: Sequence[int]) -> None:
    """Raises InputError if prompts, or steps after the context, are longer than the model's sequences."""
    prompt = job.batches[-1] * lengths[-1] if lengths[-1] > 1 else 1
    if prompt > model.max_length:
        raise InputError(
            f"batch {job.batches[-1]} of length {lengths[-1]} is a prompt of {prompt} tokens; the model takes at "
            f"most {model.max_length}"
        )
    if job.steps_after >= model.max_length:
        raise InputError(f"a step after {job.steps_after} tokens; the model takes at most {model.max_length}")


def profile_model(
    folder: Path,
    job: ProfileJob,
    *,
    one_of_each: bool = False,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> tuple[LatencyProfile, tuple[Point, ...]]:
    """Measures a model on this machine, on device and backend like a replica.

    `one_of_each`: of inner blocks that are built alike, only the first is measured, and the others get its times.
    The points are what the profile was computed from. Torch's threads are set for as long. Raises InputError where the
    device, the backend or a length is not to be had.
    """
    import torch

    from earlyexit.network.chain_network import load_network, open_network

    torch_device = find_device(job.device).torch_device
    if torch_device == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {job.device!r} needs CUDA, and torch finds none here")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        model = load_network(folder, device=torch_device, dtype=getattr(torch, job.dtype))
        rng = np.random.default_rng(job.seed)
        segments = open_network(job.backend, model, folder, job.threads)
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
    """Returns, for each split, the first one that differs from it only in which block of the same kind it runs."""
    first: dict[Hashable, TimedSplit] = {}

    def alike(timed: TimedSplit) -> Hashable:
        split = timed.split
        blocks = kinds_N[split.first] if split.end == split.first + 1 else (split.first, split.end)
        return blocks, split.batch, bool(split.ramps), timed.length, timed.further

    return {timed: first.setdefault(alike(timed), timed) for timed in splits}


def _block_kinds(model: AnyNetwork) -> list[Hashable]:
    """Returns one kind per block: the same for inner blocks of equal modules and equal tensors around them.

    The first block and the last are of their own kinds: they also embed, and end the model.
    """
    from torch import nn

    modules = getattr(getattr(model, "backbone", None), "blocks", None)
    kinds: list[Hashable] = list(range(model.num_blocks))
    if isinstance(modules, nn.ModuleList):
        for block in range(1, model.num_blocks - 1):
            kinds[block] = repr(modules[block]), model.boundary(block - 1), model.boundary(block)
    return kinds


def _context(job: ProfileJob, model: AnyNetwork) -> int | None:
    """Allocates memory for a decoder, and returns its tokens of context; None for other models."""
    from earlyexit.families.seq2seq import Seq2SeqBackbone
    from earlyexit.network.chain_network import keeps_sequences, open_memory

    if not keeps_sequences(model):
        return None
    if isinstance(getattr(model, "backbone", None), Seq2SeqBackbone):
        raise InputError("an encoder-decoder is not profiled yet: what a source costs has no row of its own")
    open_memory(model, room_for(splits_of(job, model), job.steps_after), "compute", 0)
    return job.steps_after


def profile_figures(profile: LatencyProfile) -> dict[str, Any]:
    """Returns what is shown of a profile: full model, mean block and mean ramp for each length and batch size.

    `spread` is the median of `Point.spread`: above a few percent, something else used the machine.
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


def _provenance(job: ProfileJob, model: AnyNetwork, points: Sequence[Point], context: int | None) -> dict[str, Any]:
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
        threads=job.threads,
        seed=job.seed,
        repeats=job.repeats,
        timings=sum(len(point.seconds) for point in points),
        outliers=sum(point.outliers for point in points),
        spread=float(np.median([point.spread for point in points])),
    )


def cpu_name() -> str:
    """Returns the processor's name by the kernel, or else by the platform."""
    return first_processor().get("model name") or platform.processor() or platform.machine()


NOISY = 0.05
"""Above this spread, another program probably used the machine."""


def run(job: ProfileOptions) -> None:
    """Measure, write the profile, and print what it says."""
    with progress_bars() as progress:
        measured, points = profile_model(job.model, job, progress=progress)
    measured.save(job.out)
    if job.jsonl is not None:
        job.jsonl.write_text("".join(f"{json.dumps(each.to_json())}\n" for each in points), encoding="utf-8")
    figures = profile_figures(measured)
    words = (noise_text(figures), f"latency profile: {job.out}")
    print_result(figures, lambda: [profile_table(figures)], words, as_json=job.as_json)


def profile_table(figures: dict[str, Any]) -> Table:
    """One row per length and batch size; `figures` as `profile_figures` gives them."""
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
    """Returns one line on how noisy the machine was, and a warning if it was too noisy."""
    text = f"spread {figures['spread']:.1%}, {figures['outliers']} outliers in {figures['timings']} timings"
    if figures["spread"] <= NOISY:
        return text
    return (
        f"{text}\nwarning: a spread above {NOISY:.0%}: something else used the machine; measure again when it is idle"
    )
