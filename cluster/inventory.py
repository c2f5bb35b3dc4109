"""The accelerators of a cluster by type, with price and memory, and the link between them."""

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
    """Of one; None if unknown."""
    memory_bytes: int | None = None
    """Of one; None if unknown, and then it is not checked."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's labels of the nodes that have them."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Kubernetes' labels of the nodes that have them."""
    source: str | None = None
    """The source of price and memory."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InputError(f"a device count must be at least 0, not {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A whole cluster; real accelerators allow no time scale but 1."""

    devices: Mapping[str, Accelerators]
    """By their names in `cluster.devices`."""
    link: ClusterLink
    time_scale: float = 1.0
    """How many seconds an emulated second takes, for the link and for latencies."""

    def __post_init__(self) -> None:
        real = [name for name in self.devices if not name.startswith(EMULATED)]
        if self.time_scale != 1 and real:
            raise InputError(
                f"time_scale {self.time_scale:g} stretches emulated time; {', '.join(real)} cannot be stretched"
            )

    @property
    def counts(self) -> dict[str, int]:
        """Returns the number of accelerators by type, without types of which there is none."""
        return {name: each.count for name, each in self.devices.items() if each.count}


def accelerators(
    name: str,
    *,
    usd_per_hour: float | None = None,
    memory_bytes: int | None = None,
    source: str | None = None,
    **said: Any,
) -> Accelerators:
    """Returns the accelerators of a type; price and memory are the catalogue's unless given."""
    known = known_device(name)
    return Accelerators(
        usd_per_hour=known.usd_per_hour if usd_per_hour is None else usd_per_hour,
        memory_bytes=memory_bytes or known.memory_bytes,
        source=source or known.source,
        **said,
    )


def from_nodes(nodes: Iterable[Mapping[str, Any]]) -> Inventory:
    """Returns the inventory of a live cluster, from the list that `ray.nodes()` returns; only live nodes count.

    GPUs of a type that Ray did not tell are `cuda`. Prices and memory are the catalogue's, and so is the link.
    """
    counts: Counter[str] = Counter()
    labels: dict[str, dict[str, str]] = {}
    for node in nodes:
        if not node["Alive"]:
            continue
        here = {key: value for key, value in (node.get("Labels") or {}).items() if key != NODE_ID}
        for name, count in on_node(node["Resources"]).items():
            counts[name] += count
            labels[name] = _common(labels[name], here) if name in labels else here
    devices = {name: accelerators(name, count=count, labels=labels[name]) for name, count in sorted(counts.items())}
    return Inventory(devices=devices, link=known_link())


def lacking(wanted: Mapping[str, int], there: Inventory) -> dict[str, int]:
    """Returns how many accelerators of each type are missing, without types that are complete.

    `cuda` takes any GPU that is not wanted by its name.
    """
    counts = there.counts
    missing = {name: count - counts.get(name, 0) for name, count in wanted.items() if name != "cuda"}
    if "cuda" in wanted:
        left = sum(max(0, counts[name] - wanted.get(name, 0)) for name in RAY_ACCELERATORS if name in counts)
        missing["cuda"] = wanted["cuda"] - left - counts.get("cuda", 0)
    return {name: count for name, count in missing.items() if count > 0}


def on_node(resources: Mapping[str, Any]) -> dict[str, int]:
    """Returns the accelerators of a Ray node by type; GPUs of a type that Ray did not tell are `cuda`."""
    found = {name: int(amount) for name, amount in resources.items() if name.startswith(EMULATED)}
    found["cpu"] = int(resources.get("CPU", 0))
    known = [name for name in RAY_ACCELERATORS if f"{ACCELERATOR_TYPE}{name}" in resources]
    found[known[0] if known else "cuda"] = int(resources.get("GPU", 0))
    return {name: count for name, count in found.items() if count}


def _common(labels: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels that all nodes of a type share."""
    return {key: value for key, value in labels.items() if others.get(key) == value}
