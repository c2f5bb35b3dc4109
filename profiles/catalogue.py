"""Latency profiles from published benchmarks, for planning without own measurements.

Sources print the latency of a whole model. It is distributed over the blocks, including embedding and head. The
distribution is even, because the layers of a transformer encoder are alike (Apparate's profiler averages them too), or
in proportion to multiply-adds if catalogue.yaml has them. A ramp costs a fixed share of a mean block (`ramp_share`).
Profiles of other accelerators are derived by a published relative speed. Provenance records the source and the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from earlyexit.errors import DataError
from profiles.latency import LatencyProfile
from profiles.table import FloatArray, LatencyTable

CATALOGUE = Path(__file__).with_name("catalogue.yaml")
MS = 1e-3
DTYPES = {"FP32": "float32", "FP16": "float16", "FP16-AMP": "float16"}
Facts = Mapping[str, Any]
"""A mapping in catalogue.yaml, whose comments explain the fields, or a part of a provenance."""
Tables = Mapping[int, LatencyTable]


@cache
def read_catalogue() -> Facts:
    """Returns the content of catalogue.yaml, read by libyaml if PyYAML has it, which takes a seventh of the time."""
    catalogue: Facts = yaml.load(CATALOGUE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return catalogue


def published_profile(model: str, device: str) -> LatencyProfile:
    """Returns the profile of a model on an accelerator type; raises DataError that lists the known ones."""
    known = published_profiles()
    if (model, device) in known:
        return known[model, device]
    devices = [known_device for known_model, known_device in known if known_model == model]
    if devices:
        raise DataError(f"no published figures of {model} on {device!r}; known are {', '.join(devices)}")
    models = ", ".join(sorted({known_model for known_model, _ in known}))
    raise DataError(f"no published figures of model {model!r}; known are {models}")


@cache
def published_profiles() -> dict[tuple[str, str], LatencyProfile]:
    """Returns all published and derived profiles, by model and accelerator type."""
    catalogue = read_catalogue()
    published = [_from_whole(catalogue, entry) for entry in catalogue["whole"]]
    published += [_from_layers(catalogue, entry) for entry in catalogue["layers"]]
    profiles = {(profile.model, profile.device): profile for profile in published}
    scaled, compared = catalogue["scaled"], catalogue["compared"]
    derived = [_scaled(catalogue, each, profiles[model, each["base"]]) for each in scaled for model in each["models"]]
    derived += [_compared(catalogue, entry, profiles[entry["model"], entry["base"]]) for entry in compared]
    profiles |= {(profile.model, profile.device): profile for profile in derived}
    for table in (table for profile in profiles.values() for table in profile.tables.values()):
        table.block_s_NB.setflags(write=False)  # callers share the cached arrays
        table.ramp_s_EB.setflags(write=False)
    return dict(sorted(profiles.items()))


def _from_whole(catalogue: Facts, entry: Facts) -> LatencyProfile:
    model, tables = catalogue["models"][entry["model"]], dict[int, LatencyTable]()
    raised: dict[str, list[int]] = {}
    for table in entry["tables"]:
        # Some batches are published as faster than a smaller batch, by chance. They are raised to its latency.
        rising_ms_B = np.maximum.accumulate(np.array(table["latency_ms"], dtype=np.float64))
        tables[table["length"]] = _spread(catalogue, model, table["batch"], rising_ms_B * MS)
        batches = np.array(table["batch"])[rising_ms_B > table["latency_ms"]].tolist()
        raised |= {str(table["length"]): batches} if batches else {}
    how = "by multiply-adds" if "work" in model else "evenly"
    facts: dict[str, Any] = {
        "lines": {str(table["length"]): table["line"] for table in entry["tables"]},
        "blocks": f"the latency of the whole model spread {how} over its {model['num_blocks']} {model['block']}s",
        "ramps": f"derived: {catalogue['ramp_share']:.1%} of a block, measured for DistilBERT on an A6000 at batch 1",
    }
    if raised:
        facts["smoothed"] = {"how": "latency raised to that of the next smaller batch", "batches_by_length": raised}
    return _published(catalogue, entry, tables, facts)


def _from_layers(catalogue: Facts, entry: Facts) -> LatencyProfile:
    # The first block includes the embedding, and the last block the head.
    ends_ms = [*entry["until_ms"][:-1], entry["whole_ms"]]
    table = LatencyTable(
        batches=(entry["batch"],),
        block_s_NB=np.diff(ends_ms, prepend=0.0)[:, None] * MS,
        ramp_s_EB=np.full((len(ends_ms) - 1, 1), entry["ramp_ms"] * MS),
    )
    facts = {
        "blocks": "by layer; the embedding is in the first block, the head in the last",
        "ramps": "measured",
        "length": "not stated: that of Apparate's script for BERT, profiling/deepspeed_profile_bert.py",
    }
    return _published(catalogue, entry, {entry["length"]: table}, facts)


def _published(catalogue: Facts, entry: Facts, tables: Tables, facts: Facts) -> LatencyProfile:
    source, num_blocks = catalogue["sources"][entry["source"]], catalogue["models"][entry["model"]]["num_blocks"]
    return LatencyProfile(
        model=entry["model"],
        num_blocks=num_blocks,
        ramps=tuple(range(num_blocks - 1)),
        device=entry["device"],
        backend=source["backend"],
        dtype=DTYPES[entry["precision"]],
        kind="published",
        tables=tables,
        provenance={"source": dict(source), "precision": entry["precision"], **facts},
    )


def _spread(catalogue: Facts, model: Facts, batches: list[int], whole_s_B: FloatArray) -> LatencyTable:
    """Returns a table in which the seconds of the whole model are distributed over blocks, and ramps are added."""
    num_blocks = model["num_blocks"]
    work_N = np.array(model.get("work", [1] * num_blocks), dtype=np.float64)
    return LatencyTable(
        batches=tuple(batches),
        block_s_NB=whole_s_B / (work_N.sum() / work_N)[:, None],
        ramp_s_EB=np.tile(whole_s_B / num_blocks * catalogue["ramp_share"], (num_blocks - 1, 1)),
    )


def _scaled(catalogue: Facts, entry: Facts, base: LatencyProfile) -> LatencyProfile:
    slower, device = entry["base_steps_per_s"] / entry["steps_per_s"], entry["device"]
    tables = {length: table.times(slower) for length, table in base.tables.items()}
    how = (
        f"seconds on {base.device} times {slower:.3f}: training {entry['job']} alone makes {entry['base_steps_per_s']} "
        f"steps/s on {base.device}, {entry['steps_per_s']} on {device}"
    )
    caution = f"training speeds; half precision gains more on {base.device}, so {device} may be slower than this"
    return _derived(catalogue, entry, base, tables, {"derived": how, "caution": caution})


def _compared(catalogue: Facts, entry: Facts, base: LatencyProfile) -> LatencyProfile:
    known, device = base.tables[entry["length"]], entry["device"]
    batches = [batch for batch in entry["batch"] if batch in known.batches]
    in_entry = [entry["batch"].index(batch) for batch in batches]
    in_base = [known.batches.index(batch) for batch in batches]
    slower_B = (np.array(entry["latency_ms"]) / np.array(entry["base_ms"]))[in_entry]
    whole_s_B = np.maximum.accumulate(known.block_s_NB[:, in_base].sum(0) * slower_B)
    table = _spread(catalogue, catalogue["models"][entry["model"]], batches, whole_s_B)
    how = (
        f"seconds on {base.device} times, at each batch size, what {device} takes in seconds of {base.device} "
        f"under {catalogue['sources'][entry['source']]['backend']} {entry['precision']}"
    )
    facts = {"derived": how, "lines": {base.device: entry["base_line"], device: entry["line"]}}
    return _derived(catalogue, entry, base, {entry["length"]: table}, facts)


def _derived(catalogue: Facts, entry: Facts, base: LatencyProfile, tables: Tables, facts: Facts) -> LatencyProfile:
    provenance = {**facts, "source": dict(catalogue["sources"][entry["source"]]), "base": dict(base.provenance)}
    return replace(base, device=entry["device"], kind="derived", tables=tables, provenance=provenance)
