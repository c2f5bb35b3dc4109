"""Published accelerator figures as latency profiles, for planning before anything was measured.

Sources print the latency of a whole model. It is spread over the blocks, embedding and head too: evenly, as layers
of a transformer encoder are equal (Apparate's profiler averages them likewise), or by what blocks compute, where
catalogue.yaml tells that. A ramp costs the share of a mean block that was measured once (`ramp_share`). Accelerators
without figures of their own are derived from another by a published relative speed. Every profile says in its
provenance what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from earlyexit.data.source_file import StrictDocument, read_source
from earlyexit.errors import DataError
from profiles.latency import LatencyProfile
from profiles.table import FloatArray, LatencyTable

CATALOGUE = Path(__file__).with_name("catalogue.yaml")
Precision = Literal["FP32", "FP16", "FP16-AMP"]
Milliseconds = Annotated[float, Field(gt=0)]


class SourceDocument(StrictDocument):
    """Where figures stand."""

    repo: str
    path: str
    commit: str = Field(pattern="^[0-9a-f]{40}$")
    backend: str
    licence: str


class ModelDocument(StrictDocument):
    """What is spread, and how."""

    num_blocks: int = Field(ge=2)
    block: str
    work: list[Annotated[float, Field(gt=0)]] | None = None
    """What every block computes, in any unit; None: they are alike."""

    @model_validator(mode="after")
    def _check_work(self) -> ModelDocument:
        if self.work is not None and len(self.work) != self.num_blocks:
            raise ValueError(f"work has {len(self.work)} values; {self.num_blocks} are needed, one per block")
        return self

    @property
    def parts(self) -> list[float]:
        """How many times a block's time the whole model's is, block by block."""
        work = self.work or [1.0] * self.num_blocks
        return [sum(work) / each for each in work]


class FiguresDocument(StrictDocument):
    """Whole-model latencies at one length, one a batch size."""

    length: int = Field(ge=1)
    line: int = Field(ge=1)
    batch: list[int] = Field(min_length=1)
    latency_ms: list[Milliseconds]


class WholeDocument(StrictDocument):
    """A whole model on one accelerator."""

    model: str
    device: str
    source: str
    precision: Precision
    tables: list[FiguresDocument] = Field(min_length=1)


class LayersDocument(StrictDocument):
    """A model by layers at one batch size."""

    model: str
    device: str
    source: str
    precision: Precision
    length: int = Field(ge=1)
    batch: int = Field(ge=1)
    until_ms: list[Milliseconds] = Field(min_length=2)
    whole_ms: Milliseconds
    ramp_ms: Milliseconds


class ScaledDocument(StrictDocument):
    """An accelerator that is some constant slower than another."""

    device: str
    base: str
    source: str
    models: list[str]
    job: str
    base_steps_per_s: float = Field(gt=0)
    steps_per_s: float = Field(gt=0)


class ComparedDocument(StrictDocument):
    """An accelerator that is slower than another by an amount that depends on the batch."""

    model: str
    device: str
    base: str
    source: str
    precision: Precision
    length: int = Field(ge=1)
    batch: list[int] = Field(min_length=1)
    base_line: int = Field(ge=1)
    base_ms: list[Milliseconds]
    line: int = Field(ge=1)
    latency_ms: list[Milliseconds]


class CatalogueDocument(StrictDocument):
    """The whole of catalogue.yaml."""

    schema_version: Literal[1]
    sources: dict[str, SourceDocument]
    models: dict[str, ModelDocument]
    ramp_share: float = Field(ge=0)
    whole: list[WholeDocument]
    layers: list[LayersDocument]
    scaled: list[ScaledDocument]
    compared: list[ComparedDocument]


@cache
def read_catalogue() -> CatalogueDocument:
    """The quoted numbers, as they stand in catalogue.yaml."""
    return read_source(CATALOGUE, DataError).parse(CatalogueDocument, called="the catalogue")


MS = 1e-3
DTYPES = {"FP32": "float32", "FP16": "float16", "FP16-AMP": "float16"}


def published_profile(model: str, device: str) -> LatencyProfile:
    """The profile of a model on an accelerator type; raises DataError that lists what there is."""
    known = published_profiles()
    if (model, device) in known:
        return known[model, device]
    devices = [each for name, each in known if name == model]
    if devices:
        raise DataError(f"no published figures of {model} on {device!r}; there are of {', '.join(devices)}")
    models = ", ".join(sorted({name for name, _ in known}))
    raise DataError(f"no published figures of model {model!r}; there are of {models}")


@cache
def published_profiles() -> dict[tuple[str, str], LatencyProfile]:
    """Every profile with published or derived figures, by model and accelerator type."""
    document = read_catalogue()
    profiles = [_from_whole(document, each) for each in document.whole]
    profiles += [_from_layers(document, each) for each in document.layers]
    found = {(profile.model, profile.device): profile for profile in profiles}
    derived = [_scaled(document, each, found[model, each.base]) for each in document.scaled for model in each.models]
    derived += [_compared(document, each, found[each.model, each.base]) for each in document.compared]
    found |= {(profile.model, profile.device): profile for profile in derived}
    for table in (table for profile in found.values() for table in profile.tables.values()):
        table.block_s_NB.setflags(write=False)  # all callers share them
        table.ramp_s_EB.setflags(write=False)
    return dict(sorted(found.items()))


def _from_whole(document: CatalogueDocument, entry: WholeDocument) -> LatencyProfile:
    model = document.models[entry.model]
    tables = {
        each.length: _spread(tuple(each.batch), _whole_s_B(each), model, document.ramp_share) for each in entry.tables
    }
    said = {
        "lines": {str(each.length): each.line for each in entry.tables},
        "blocks": f"the latency of the whole model spread {_how(model)} its {model.num_blocks} {model.block}s",
        "ramps": f"derived: {document.ramp_share:.1%} of a block, measured for DistilBERT on an A6000 at batch 1",
        **_smoothed(entry),
    }
    return _published(document, entry, tables, said)


def _published(
    document: CatalogueDocument,
    entry: WholeDocument | LayersDocument,
    tables: Mapping[int, LatencyTable],
    said: Mapping[str, Any],
) -> LatencyProfile:
    source, num_blocks = document.sources[entry.source], document.models[entry.model].num_blocks
    return LatencyProfile(
        model=entry.model,
        num_blocks=num_blocks,
        ramps=tuple(range(num_blocks - 1)),
        device=entry.device,
        backend=source.backend,
        dtype=DTYPES[entry.precision],
        kind="published",
        tables=tables,
        provenance={"source": source.model_dump(), "precision": entry.precision, **said},
    )


def _how(model: ModelDocument) -> str:
    return "evenly over" if model.work is None else "by multiply-adds over"


def _whole_s_B(figures: FiguresDocument) -> FloatArray:
    return _never_falling(figures.latency_ms) * MS


def _spread(batches: tuple[int, ...], whole_s_B: FloatArray, model: ModelDocument, ramp_share: float) -> LatencyTable:
    """Blocks take their parts of the whole, ramps the share of a mean block."""
    return LatencyTable(
        batches=batches,
        block_s_NB=whole_s_B / np.array(model.parts)[:, None],
        ramp_s_EB=np.tile(whole_s_B / model.num_blocks * ramp_share, (model.num_blocks - 1, 1)),
    )


def _never_falling(latency_ms: list[float]) -> FloatArray:
    """Running maximum over the batch: a smaller batch was published as slower here and there, by chance."""
    return np.maximum.accumulate(np.array(latency_ms, dtype=np.float64))


def _smoothed(entry: WholeDocument) -> Mapping[str, Any]:
    raised = {
        str(each.length): [
            batch
            for batch, ms, kept_ms in zip(each.batch, each.latency_ms, _never_falling(each.latency_ms), strict=True)
            if kept_ms > ms
        ]
        for each in entry.tables
    }
    found = {length: batches for length, batches in raised.items() if batches}
    if not found:
        return {}
    return {"smoothed": {"how": "latency raised to that of the next smaller batch", "batches_by_length": found}}


def _from_layers(document: CatalogueDocument, entry: LayersDocument) -> LatencyProfile:
    ends_ms = [*entry.until_ms[:-1], entry.whole_ms]  # the head belongs to the last block, the embedding to the first
    table = LatencyTable(
        batches=(entry.batch,),
        block_s_NB=np.diff(ends_ms, prepend=0.0)[:, None] * MS,
        ramp_s_EB=np.full((document.models[entry.model].num_blocks - 1, 1), entry.ramp_ms * MS),
    )
    said = {
        "blocks": "by layer; the embedding is in the first block, the head in the last",
        "ramps": "measured",
        "length": "not stated: that of Apparate's script for BERT, profiling/deepspeed_profile_bert.py",
    }
    return _published(document, entry, {entry.length: table}, said)


def _scaled(document: CatalogueDocument, entry: ScaledDocument, base: LatencyProfile) -> LatencyProfile:
    slower = entry.base_steps_per_s / entry.steps_per_s
    tables = {
        length: replace(table, block_s_NB=table.block_s_NB * slower, ramp_s_EB=table.ramp_s_EB * slower)
        for length, table in base.tables.items()
    }
    how = (
        f"seconds on {base.device} times {slower:.3f}: training {entry.job} alone makes {entry.base_steps_per_s} "
        f"steps/s on {base.device}, {entry.steps_per_s} on {entry.device}"
    )
    caution = f"training speeds; half precision gains more on {base.device}, so {entry.device} may be slower than this"
    return _derived(document, entry, base, tables, {"derived": how, "caution": caution})


def _compared(document: CatalogueDocument, entry: ComparedDocument, base: LatencyProfile) -> LatencyProfile:
    known = base.tables[entry.length]
    batches = tuple(batch for batch in entry.batch if batch in known.batches)
    here = [entry.batch.index(batch) for batch in batches]
    there = [known.batches.index(batch) for batch in batches]
    slower_B = (np.array(entry.latency_ms) / np.array(entry.base_ms))[here]
    whole_s_B = np.maximum.accumulate(known.block_s_NB[:, there].sum(0) * slower_B)
    table = _spread(batches, whole_s_B, document.models[entry.model], document.ramp_share)
    how = (
        f"seconds on {base.device} times, at each batch size, what {entry.device} takes in seconds of {base.device} "
        f"under {document.sources[entry.source].backend} {entry.precision}"
    )
    said = {"derived": how, "lines": {base.device: entry.base_line, entry.device: entry.line}}
    return _derived(document, entry, base, {entry.length: table}, said)


def _derived(
    document: CatalogueDocument,
    entry: ScaledDocument | ComparedDocument,
    base: LatencyProfile,
    tables: Mapping[int, LatencyTable],
    said: Mapping[str, Any],
) -> LatencyProfile:
    source = document.sources[entry.source].model_dump()
    provenance = {**said, "source": source, "base": dict(base.provenance)}
    return replace(base, device=entry.device, kind="derived", tables=tables, provenance=provenance)
