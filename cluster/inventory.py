"""What a cluster has: accelerators by type with price and memory, and the link between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.catalogue import ClusterLink, known_device, known_link
from cluster.devices import EMULATED, RAY_ACCELERATORS
from earlyexit.errors import InputError

ACCELERATOR_TYPE = "accelerator_type:"
"""Before an accelerator's name, among the resources of a Ray node."""

NODE_ID = "ray.io/node-id"
"""The label that Ray gives every node, each its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """All accelerators of one type."""

    count: int
    usd_per_hour: float | None = None
    """Of one; None: not known."""
    memory_bytes: int | None = None
    """Of one; None: not known, and nothing is held against it."""
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
    """A whole cluster; refuses real accelerators whose time would have to be stretched."""

    devices: Mapping[str, Accelerators]
    """By the names of `cluster.devices`."""
    link: ClusterLink
    time_scale: float = 1.0
    """An emulated second takes so many seconds; of link and latencies alike."""

    def __post_init__(self) -> None:
        real = [name for name in self.devices if not name.startswith(EMULATED)]
        if self.time_scale != 1 and real:
            raise InputError(
                f"time_scale {self.time_scale:g} stretches emulated time; {', '.join(real)} cannot be stretched"
            )

    @property
    def counts(self) -> dict[str, int]:
        """Accelerators by type, only types there are any of."""
        return {name: each.count for name, each in self.devices.items() if each.count}


def accelerators(
    name: str,
    *,
    usd_per_hour: float | None = None,
    memory_bytes: int | None = None,
    source: str | None = None,
    **said: Any,
) -> Accelerators:
    """Those of a type, with the catalogue's price and memory where none are said."""
    known = known_device(name)
    return Accelerators(
        usd_per_hour=known.usd_per_hour if usd_per_hour is None else usd_per_hour,
        memory_bytes=memory_bytes or known.memory_bytes,
        source=source or known.source,
        **said,
    )


def from_nodes(nodes: Iterable[Mapping[str, Any]]) -> Inventory:
    """What a live cluster has, from the list that `ray.nodes()` returns; nodes that are not alive count for nothing.

    GPUs of a type that Ray did not tell are `cuda`. Prices and memory are the catalogue's, and so is the link.
    """
    counts: Counter[str] = Counter()
    labels: dict[str, dict[str, str]] = {}
    for node in nodes:
        if not node["Alive"]:
            continue
        here = {key: value for key, value in (node.get("Labels") or {}).items() if key != NODE_ID}
        for name, count in _on_node(node["Resources"]).items():
            counts[name] += count
            labels[name] = _common(labels[name], here) if name in labels else here
    devices = {name: accelerators(name, count=count, labels=labels[name]) for name, count in sorted(counts.items())}
    return Inventory(devices=devices, link=known_link())


def lacking(wanted: Mapping[str, int], there: Inventory) -> dict[str, int]:
    """How many accelerators of each type are missing, only types that lack some.

    `cuda` takes any GPU that is not wanted by its name.
    """
    counts = there.counts
    missing = {name: count - counts.get(name, 0) for name, count in wanted.items() if name != "cuda"}
    if "cuda" in wanted:
        left = sum(max(0, counts[name] - wanted.get(name, 0)) for name in RAY_ACCELERATORS if name in counts)
        missing["cuda"] = wanted["cuda"] - left - counts.get("cuda", 0)
    return {name: count for name, count in missing.items() if count > 0}


def _on_node(resources: Mapping[str, Any]) -> dict[str, int]:
    found = {name: int(amount) for name, amount in resources.items() if name.startswith(EMULATED)}
    found["cpu"] = int(resources.get("CPU", 0))
    types = [name.removeprefix(ACCELERATOR_TYPE) for name in resources if name.startswith(ACCELERATOR_TYPE)]
    known = [name for name in types if name in RAY_ACCELERATORS]
    found[known[0] if known else "cuda"] = int(resources.get("GPU", 0))
    return {name: count for name, count in found.items() if count}


def _common(labels: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """What all nodes of a type say alike."""
    return {key: value for key, value in labels.items() if others.get(key) == value}
