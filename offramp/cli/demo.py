"""`offramp demo`: what early exits and fusing are worth, shown on this machine in minutes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    data: Annotated[
        Path | None, typer.Option(help="Your own labelled texts: .csv, .tsv, .jsonl, or CLINC150's .json.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Only serve the planned model, until told to stop.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of model, picture and figures. Default: runs/demo.")] = None,
    port: Annotated[int, typer.Option(help="Port of the service.")] = 8000,
) -> None:
    """Train ramps, then compare three plans on this machine's processors and on emulated accelerators (minutes)."""
    from rich.console import Console

    from offramp.demo.run import demo as show
    from offramp.demo.run import keep as serve

    runs = out or Path("runs") / ("demo" if data is None else f"demo-{data.stem}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is ended
    (serve if keep else show)(runs, data, port, Console(highlight=False))
