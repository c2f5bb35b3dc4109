"""What a service file names, read and held together: cluster, model, latencies, exits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.devices import EMULATED
from cluster.inventory import Inventory
from cluster.inventory_file import InventoryDocument, build_inventory, read_inventory, refuse_unknown_fields
from earlyexit.errors import InputError
from earlyexit.source_file import Source, read_source
from earlyexit.store import read_card
from offramp.service.model import Exits, check_memory, check_models, latency_tables, read_exits
from offramp.service.shape import ServiceDocument
from profiles.table import LatencyTable

if TYPE_CHECKING:
    from earlyexit.store import ModelCard


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """What a service file names, read."""

    document: ServiceDocument
    source: Source
    base: Path
    """The file's folder, which what it names is relative to."""
    model: Path
    card: ModelCard
    inventory: Inventory
    tables: Mapping[str, LatencyTable]
    """Per device with every ramp of the model, in the file's seconds."""
    exits: Exits


def read_parts(path: Path) -> ServiceParts:
    """Read a service file and what it names; raises InputError naming file, line and what is wrong."""
    source = read_source(path, InputError)
    refuse_unknown_fields(source, ServiceDocument)
    document = source.parse(ServiceDocument, called="the service")
    base = path.parent
    inventory = _inventory(document.cluster, source, base)
    model = (base / document.model.folder).resolve()
    with source.said_at(("model", "folder")):
        card = read_card(model)
    check_models(document.model, model, card, source, base)
    check_memory(document.model, model, card, inventory, source)
    devices = tuple(inventory.counts)
    recorded = document.model.decisions == "recorded" and any(name.startswith(EMULATED) for name in devices)
    return ServiceParts(
        document=document,
        source=source,
        base=base,
        model=model,
        card=card,
        inventory=inventory,
        tables=latency_tables(document.model, card, devices, source, base),
        exits=read_exits(document.accuracy, model, card, source, base, recorded=recorded),
    )


def _inventory(document: str | InventoryDocument, source: Source, base: Path) -> Inventory:
    if isinstance(document, InventoryDocument):
        inventory = build_inventory(document, source, ("cluster",))
    else:
        inventory = read_inventory(base / document)
    with source.said_at(("cluster",)):
        if not inventory.counts:
            raise InputError("the cluster has no accelerator: every count is 0")
    return inventory
