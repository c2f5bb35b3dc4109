"""Default prices, memory sizes and link properties, with their sources, for inventories that leave them out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cluster.devices import EMULATED
from earlyexit.data.source_file import StrictDocument, read_source
from earlyexit.data.strict import FromFile
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLink(FromFile):
    """The network between replicas. In a cluster file it defaults to the link of `cluster/catalogue.yaml`."""

    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)]
    delay_s: Annotated[float, Field(ge=0)] = 0.0
    source: str | None = None


class ClusterCatalogueDocument(StrictDocument):
    """The content of catalogue.yaml."""

    schema_version: Literal[1]
    sources: dict[str, str]
    devices: dict[str, KnownDeviceDocument]
    link: ClusterLink
    """Its source is a key of `sources`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """Price and memory of one accelerator type; None if unknown."""

    usd_per_hour: float | None = None
    memory_bytes: int | None = None
    source: str | None = None
    """Sources of price and memory, as text."""


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
    return replace(catalogue.link, source=catalogue.sources[str(catalogue.link.source)])


@cache
def read_cluster_catalogue() -> ClusterCatalogueDocument:
    """Returns the content of catalogue.yaml."""
    return read_source(CATALOGUE, DataError).parse(ClusterCatalogueDocument, called="the catalogue")
