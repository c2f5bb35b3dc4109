"""`offramp demo`: what early exits and fusing are worth, shown on this machine in minutes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from rich.console import Console

from offramp.commands.options import DemoJob
from offramp.demo.run import demo, keep


def run(job: DemoJob) -> None:
    """Train, plan and compare, or serve the planned model until told to stop."""
    data = job.data
    runs = job.out or Path("runs") / ("demo" if data is None else f"demo-{data.stem}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is ended
    (keep if job.keep else demo)(runs, data, job.port, Console(highlight=False))
