"""How the Makefile installs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")


def test_pip_prints_errors_and_no_warnings(tmp_path: Path) -> None:
    [options] = re.findall(r"^INSTALL := (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert MAKEFILE.count("-m pip") == 1, "every target installs with $(INSTALL)"
    nowhere = ["--no-index", "--find-links", (tmp_path / "missing").as_uri(), "--dry-run", "no-such-package-of-ours"]
    done = subprocess.run(
        [sys.executable, *options.split(), *nowhere], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "ERROR: No matching distribution" in done.stderr
    assert "WARNING" not in done.stdout + done.stderr
