"""Inventories: the accelerators of a cluster by type, with price and memory, and the link between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from cluster.catalogue import ClusterLink, known_device, known_link
from cluster.devices import EMULATED, RAY_ACCELERATORS, DeviceName
from earlyexit.data.source_file import read_source
from earlyexit.data.strict import FromFile, checked
from earlyexit.errors import InputError

MAX_COUNT = 1_000_000
"""Maximum number of accelerators of one type in files."""

ACCELERATOR_TYPE = "accelerator_type:"
"""Prefix of accelerator types among the resources of a Ray node."""

NODE_ID = "ray.io/node-id"
"""Ray's label with the id of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators(FromFile):
    """The accelerators of one type. In a file, price and memory default to those of `cluster/catalogue.yaml`."""

    count: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    usd_per_hour: Annotated[float | None, Field(ge=0)] = None
    """Price of one accelerator. None: unknown, or in a file the catalogue's."""
    per_node: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """Accelerators in a node, of all types together, which share its network card."""
    memory_bytes: Annotated[int | None, Field(gt=0)] = None
    """Memory of one accelerator. None: unknown and not checked, or in a file the catalogue's."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray labels of the nodes on which the replicas run."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Kubernetes labels of the nodes, for KubeRay."""
    source: str | None = None
    """The source of price and memory."""


if TYPE_CHECKING:
    FileDevices = Mapping[str, Accelerators]
else:
    FileDevices = Annotated[
        dict[DeviceName, Accelerators],
        Field(min_length=1),
        checked(lambda devices, _: {name: with_known(name, each) for name, each in devices.items()}),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(FromFile):
    """The accelerators and the link of a cluster. A time scale other than 1 requires that all devices are emulated."""

    schema_version: Literal[1] = 1
    devices: FileDevices
    """By the name of the accelerator type, such as `V100` or `cpu`."""
    link: ClusterLink = field(default_factory=known_link)
    """Between replicas. None: the link of `cluster/catalogue.yaml`."""
    time_scale: Annotated[float, Field(gt=0)] = 1.0
    """Real seconds per emulated second, for the link and for latencies."""

    def __post_init__(self) -> None:
        real = [name for name in self.devices if not name.startswith(EMULATED)]
        if self.time_scale != 1 and real:
            message = f"time_scale {self.time_scale:g} stretches emulated time; {', '.join(real)} cannot be stretched"
            raise InputError(message, at=("time_scale",))

    @property
    def counts(self) -> dict[str, int]:
        """The number of accelerators by type, without types whose number is 0."""
        return {name: each.count for name, each in self.devices.items() if each.count}


def read_inventory(path: Path) -> Inventory:
    """Returns the inventory of a YAML or JSON file; raises InputError with file, line, mistake and what is allowed."""
    return read_source(path, InputError).parse(Inventory, called="the cluster")


def with_known(name: str, given: Accelerators) -> Accelerators:
    """Returns the accelerators of a type, with the catalogue's price, memory and source where none are given."""
    known = known_device(name)
    return replace(
        given,
        usd_per_hour=known.usd_per_hour if given.usd_per_hour is None else given.usd_per_hour,
        memory_bytes=given.memory_bytes or known.memory_bytes,
        source=given.source or known.source,
    )


def inventory_of_nodes(nodes: Iterable[Mapping[str, Any]]) -> Inventory:
    """Returns the inventory of a running cluster from the result of `ray.nodes()`. Only live nodes count.

    GPUs whose type Ray did not detect are `cuda`. Prices, memory and the link are the catalogue's.
    """
    counts: Counter[str] = Counter()
    labels: dict[str, dict[str, str]] = {}
    for node in (each for each in nodes if each["Alive"]):
        node_labels = {key: value for key, value in (node.get("Labels") or {}).items() if key != NODE_ID}
        for name, count in accelerators_on_node(node["Resources"]).items():
            counts[name] += count
            labels[name] = _common(labels[name], node_labels) if name in labels else node_labels
    devices = {
        name: with_known(name, Accelerators(count=count, labels=labels[name])) for name, count in sorted(counts.items())
    }
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
