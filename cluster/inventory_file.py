"""Reads inventories from YAML or JSON: a cluster file, or the part of another file. Errors name file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from cluster.catalogue import ClusterLink, known_link
from cluster.devices import find_device
from cluster.inventory import Inventory, accelerators
from earlyexit.data.source_file import Source, StrictDocument, read_source
from earlyexit.errors import InputError

MAX_COUNT = 1_000_000
"""Maximum number of accelerators of one type, the same as in problem files."""


class AcceleratorsDocument(StrictDocument):
    """The accelerators of one type. Price and memory default to those of `cluster/catalogue.yaml`."""

    count: int = Field(ge=0, le=MAX_COUNT)
    usd_per_hour: float | None = Field(default=None, ge=0)
    memory_bytes: int | None = Field(default=None, gt=0)
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray labels of the nodes on which the replicas run."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Kubernetes labels of the nodes, for KubeRay."""
    source: str | None = None
    """The source of price and memory."""


class ClusterLinkDocument(StrictDocument):
    """The network between replicas. It defaults to the link of `cluster/catalogue.yaml`."""

    bandwidth_bytes_per_s: float = Field(gt=0)
    delay_s: float = Field(default=0.0, ge=0)
    source: str | None = None


class InventoryDocument(StrictDocument):
    """The accelerators, and the network between them."""

    schema_version: Literal[1] = 1
    devices: dict[str, AcceleratorsDocument] = Field(min_length=1)
    link: ClusterLinkDocument | None = None
    time_scale: float = Field(default=1.0, gt=0)
    """Real seconds per emulated second."""


def read_inventory(path: Path) -> Inventory:
    """Returns the inventory of a cluster file; raises InputError with file, line, mistake and what is allowed."""
    source = read_source(path, InputError)
    return build_inventory(source.parse(InventoryDocument, called="the cluster"), source)


def build_inventory(document: InventoryDocument, source: Source, at: tuple[str, ...] = ()) -> Inventory:
    """Returns the inventory of a document that stands at the path `at` of its source; raises the source's error."""
    devices = {}
    for name, values in document.devices.items():
        with source.errors_at((*at, "devices", name)):
            find_device(name)
            devices[name] = accelerators(name, **values.model_dump())
    link = known_link() if document.link is None else ClusterLink(**document.link.model_dump())
    with source.errors_at((*at, "time_scale")):
        return Inventory(devices=devices, link=link, time_scale=document.time_scale)
