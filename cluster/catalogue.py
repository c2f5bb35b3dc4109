"""Default prices, memory sizes and link properties, with their sources, for inventories that leave them out."""

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
    """The link that is assumed between replicas unless an inventory has a measured one."""

    bandwidth_bytes_per_s: float = Field(gt=0)
    delay_s: float = Field(ge=0)
    source: str


class ClusterCatalogueDocument(StrictDocument):
    """The content of catalogue.yaml."""

    schema_version: Literal[1]
    sources: dict[str, str]
    devices: dict[str, KnownDeviceDocument]
    link: KnownLinkDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """Price and memory of one accelerator type; None if unknown."""

    usd_per_hour: float | None = None
    memory_bytes: int | None = None
    source: str | None = None
    """Sources of price and memory, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLink:
    """The link between two replicas."""

    bandwidth_bytes_per_s: float
    delay_s: float = 0.0
    source: str | None = None


def known_device(name: str) -> KnownDevice:
    """Returns price and memory of an accelerator type. An emulated accelerator has those of the real type."""
    catalogue = read_cluster_catalogue()
    device = catalogue.devices.get(name.removeprefix(EMULATED))
    if device is None:
        return KnownDevice()
    sources = [] if device.price is None else [f"price: {catalogue.sources[device.price]}"]
    sources.append(f"memory: {catalogue.sources[device.memory]}")
    return KnownDevice(usd_per_hour=device.usd_per_hour, memory_bytes=device.memory_bytes, source="; ".join(sources))


def known_link() -> ClusterLink:
    """Returns the default link, for an inventory without one."""
    catalogue = read_cluster_catalogue()
    link = catalogue.link
    return ClusterLink(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, delay_s=link.delay_s, source=catalogue.sources[link.source]
    )


@cache
def read_cluster_catalogue() -> ClusterCatalogueDocument:
    """Returns the content of catalogue.yaml."""
    return read_source(CATALOGUE, DataError).parse(ClusterCatalogueDocument, called="the catalogue")
