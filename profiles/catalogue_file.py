"""The shape of catalogue.yaml: published figures as their sources print them, in milliseconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from earlyexit.errors import DataError
from earlyexit.source_file import StrictDocument, read_source

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
