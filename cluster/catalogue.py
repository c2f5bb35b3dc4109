"""Defaults of accelerator types and links for inventories that leave them out: prices, memory, and their sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from cluster.devices import EMULATED
from earlyexit.data.source_file import StrictDocument, read_source
from earlyexit.errors import DataError

CATALOGUE = Path(__file__).with_name("catalogue.yaml")


class KnownDeviceDocument(StrictDocument):
    """One accelerator type."""

    usd_per_hour: float | None = Field(default=None, ge=0)
    price: str | None = None
    """Source of the price."""
    memory_bytes: int = Field(gt=0)
    memory: str
    """Source of the memory."""


class KnownLinkDocument(StrictDocument):
    """The link of a hop that was not measured."""

    bandwidth_bytes_per_s: float = Field(gt=0)
    delay_s: float = Field(ge=0)
    source: str


class ClusterCatalogueDocument(StrictDocument):
    """The whole of catalogue.yaml."""

    schema_version: Literal[1]
    sources: dict[str, str]
    devices: dict[str, KnownDeviceDocument]
    link: KnownLinkDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """What is known of one accelerator type; None where nothing is."""

    usd_per_hour: float | None = None
    memory_bytes: int | None = None
    source: str | None = None
    """Of both, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLink:
    """What a hop between two replicas goes over."""

    bandwidth_bytes_per_s: float
    delay_s: float = 0.0
    source: str | None = None


def known_device(name: str) -> KnownDevice:
    """Price and memory of an accelerator type; an emulated one has those of what it emulates."""
    catalogue = read_cluster_catalogue()
    found = catalogue.devices.get(name.removeprefix(EMULATED))
    if found is None:
        return KnownDevice()
    words = [] if found.price is None else [f"price: {catalogue.sources[found.price]}"]
    return KnownDevice(
        usd_per_hour=found.usd_per_hour,
        memory_bytes=found.memory_bytes,
        source="; ".join([*words, f"memory: {catalogue.sources[found.memory]}"]),
    )


def known_link() -> ClusterLink:
    """The link of an inventory that names none."""
    catalogue = read_cluster_catalogue()
    link = catalogue.link
    return ClusterLink(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        delay_s=link.delay_s,
        source=catalogue.sources[link.source],
    )


@cache
def read_cluster_catalogue() -> ClusterCatalogueDocument:
    """The figures, as they stand in catalogue.yaml."""
    return read_source(CATALOGUE, DataError).parse(ClusterCatalogueDocument, called="the catalogue")
