"""An older commit beside this one: checked out below runs/ and run by this environment's Python."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from experiments.data import RUNS
from experiments.peers.client import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """One side of a comparison: ours, or an older commit."""

    name: str
    root: Path

    def command(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a module of the checkout to its end; SystemExit tells what it said where it fails."""
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: {' '.join((module, *arguments))}: {done.stderr[-2000:]}")
        return done

    def environment(self, **beside: str) -> dict[str, str]:
        """Ours, but its own modules; and the data by its full path."""
        data = str(Path(os.environ.get("OFFRAMP_DATA", "../shared/data")).resolve())
        quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        return os.environ | quiet | {"PYTHONPATH": str(self.root), "OFFRAMP_DATA": data} | beside


def checked_out(revision: str) -> Path:
    """The folder that holds a commit, made by `git worktree` where it is missing; raises CalledProcessError."""
    folder = (RUNS / "beside" / revision).resolve()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "worktree", "add", "--detach", str(folder), revision], cwd=ROOT, check=True)
    return folder
