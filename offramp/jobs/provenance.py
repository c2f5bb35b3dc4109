"""What every stored result carries: when, by which versions, on what."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("offramp", "torch", "transformers", "tokenizers", "numpy", "ray", "onnxruntime")


def provenance(**facts: Any) -> dict[str, Any]:
    """Date, machine, versions and commit, and whatever facts the caller adds (seed, data, options)."""
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: found for name in LIBRARIES if (found := _version(name))},
        "commit": _commit(),
        **facts,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit; None for an installed package or where there is no git."""
    here = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
