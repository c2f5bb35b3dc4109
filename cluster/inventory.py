"""Inventories: the accelerators of a cluster by type, with price and memory, and the link between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.catalogue import ClusterLink, known_device, known_link
from cluster.devices import EMULATED, RAY_ACCELERATORS
from earlyexit.errors import InputError

ACCELERATOR_TYPE = "accelerator_type:"
"""Prefix of accelerator types among the resources of a Ray node."""

NODE_ID = "ray.io/node-id"
"""Ray's label with the id of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """All accelerators of one type."""

    count: int
    usd_per_hour: float | None = None
    """Price of one accelerator; None if unknown."""
    memory_bytes: int | None = None
    """Memory of one accelerator; None if unknown, in which case memory is not checked."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray labels of the nodes that have these accelerators."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Kubernetes labels of the nodes that have these accelerators."""
    source: str | None = None
    """The source of price and memory."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InputError(f"a device count must be at least 0, not {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The accelerators and the link of a cluster. A time scale other than 1 requires that all devices are emulated."""

    devices: Mapping[str, Accelerators]
    """By the name of the accelerator type; see `cluster.devices`."""
    link: ClusterLink
    time_scale: float = 1.0
    """Real seconds per emulated second, for the link and for latencies."""

    def __post_init__(self) -> None:
        real = [name for name in self.devices if not name.startswith(EMULATED)]
        if self.time_scale != 1 and real:
            raise InputError(
                f"time_scale {self.time_scale:g} stretches emulated time; {', '.join(real)} cannot be stretched"
            )

    @property
    def counts(self) -> dict[str, int]:
        """The number of accelerators by type, without types whose number is 0."""
        return {name: each.count for name, each in self.devices.items() if each.count}


def accelerators(
    name: str,
    *,
    usd_per_hour: float | None = None,
    memory_bytes: int | None = None,
    source: str | None = None,
    **fields: Any,
) -> Accelerators:
    """Returns the accelerators of a type. Price and memory default to the catalogue's."""
    known = known_device(name)
    return Accelerators(
        usd_per_hour=known.usd_per_hour if usd_per_hour is None else usd_per_hour,
        memory_bytes=memory_bytes or known.memory_bytes,
        source=source or known.source,
        **fields,
    )


def inventory_of_nodes(nodes: Iterable[Mapping[str, Any]]) -> Inventory:
    """Returns the inventory of a running cluster from the result of `ray.nodes()`. Only live nodes count.

    GPUs whose type Ray did not detect are `cuda`. Prices, memory and the link are the catalogue's.
    """
    counts: Counter[str] = Counter()
    labels: dict[str, dict[str, str]] = {}
    for node in nodes:
        if not node["Alive"]:
            continue
        node_labels = {key: value for key, value in (node.get("Labels") or {}).items() if key != NODE_ID}
        for name, count in accelerators_on_node(node["Resources"]).items():
            counts[name] += count
            labels[name] = _common(labels[name], node_labels) if name in labels else node_labels
    devices = {name: accelerators(name, count=count, labels=labels[name]) for name, count in sorted(counts.items())}
    return Inventory(devices=devices, link=known_link())


def missing_accelerators(wanted: Mapping[str, int], available: Inventory) -> dict[str, int]:
    """Returns the number of missing accelerators by type, without types that have enough.

    A GPU of any type can serve as `cuda` unless `wanted` names its type.
    """
    counts = available.counts
    missing = {name: count - counts.get(name, 0) for name, count in wanted.items() if name != "cuda"}
    if "cuda" in wanted:
        spare = sum(max(0, counts[name] - wanted.get(name, 0)) for name in RAY_ACCELERATORS if name in counts)
        missing["cuda"] = wanted["cuda"] - spare - counts.get("cuda", 0)
    return {name: count for name, count in missing.items() if count > 0}


def accelerators_on_node(resources: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of accelerators of a Ray node by type. GPUs whose type Ray did not detect are `cuda`."""
    counts = {name: int(amount) for name, amount in resources.items() if name.startswith(EMULATED)}
    counts["cpu"] = int(resources.get("CPU", 0))
    known = [name for name in RAY_ACCELERATORS if f"{ACCELERATOR_TYPE}{name}" in resources]
    counts[known[0] if known else "cuda"] = int(resources.get("GPU", 0))
    return {name: count for name, count in counts.items() if count}


def _common(labels: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels that have the same value in both mappings."""
    return {key: value for key, value in labels.items() if others.get(key) == value}
