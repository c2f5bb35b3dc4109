"""The facts of a machine that the checks judge: plain values, gathered once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from deployments.local_ray.ports import RunningProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One library that Offramp asks for."""

    name: str
    wanted: str
    """As pyproject.toml says it, such as >=2.0; empty for any."""
    found: str | None
    """None: not installed."""
    pinned: str | None = None
    """What constraints.txt says; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Python and what is installed for it."""

    python: str
    requires_python: str
    packages: tuple[Package, ...]
    torch_cuda: str | None = None
    """The CUDA release that torch was built for; None for a build without."""
    minilm: bool = True
    """Whether the packaged backbone is there."""
    haproxy: str | None = None
    """The binary that Serve will find; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What there is to compute with; None where the system does not tell."""

    cores: int
    cpu_flags: frozenset[str] | None = None
    memory_total_bytes: int
    memory_free_bytes: int
    gpus: tuple[str, ...] = ()
    """Names, as the driver tells them."""
    gpus_of_torch: int | None = None
    """How many torch can use; None where it was not asked, there being no GPU or no CUDA in it."""
    shm_free_bytes: int | None = None
    disk_free_bytes: Mapping[str, int] = field(default_factory=dict)
    """By folder that is written to."""
    open_files: tuple[int, int] | None = None
    """The limit in force, and how far it may be raised; -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port that a service would listen on."""

    number: int
    purpose: str
    taken: bool
    holder: RunningProcess | None = None
    """None where no process holds it, or the system does not tell which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayState:
    """What Ray has left here, or runs here."""

    processes: tuple[RunningProcess, ...] = ()
    """Heads and raylets."""
    haproxies: tuple[RunningProcess, ...] = ()
    """Those that Serve starts, no others."""
    address: str | None = None
    """What the file that `ray start` leaves says of a cluster."""
    auth_mode: str | None = None
    """RAY_AUTH_MODE."""
    token_file: str | None = None
    """The file with a token, where there is one."""
    sessions: int = 0
    session_bytes: int = 0
    """Of the sessions' logs and spilled objects below /tmp/ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model folder or a service file that was named, as its own reader understood it."""

    path: str
    kind: Literal["model", "service", "neither"]
    problem: str | None = None
    """Why it cannot be served; None where it can."""
    calibrated: bool = True
    words: str = ""
    """What it is, where it can be read."""
    gpus: int = 0
    """That it needs, of whatever type."""
    port: int | None = None
    """Of a service file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that is known."""

    software: Software
    hardware: Hardware
    ports: tuple[Port, ...]
    ray: RayState
    object_store_bytes: int
    """What `offramp serve` asks of /dev/shm."""
    data: str | None = None
    """OFFRAMP_DATA."""
    data_found: bool = True
    targets: tuple[Target, ...] = ()
