"""When devices begin a batch that is not full, as plans say it."""

from __future__ import annotations

from typing import Literal

from earlyexit.engine.engine import Dispatch

PlanDispatch = Literal["auto", "work-conserving", "deferred", "filling"]
"""`auto`: by what a stage runs on; the others are the batch engine's own."""
ON_PROCESSORS = "cpu"
"""The accelerators that are the machine's own processors."""


def dispatch_on(device: str, dispatch: PlanDispatch) -> Dispatch:
    """What a stage on such accelerators does.

    By `auto` batches fill where processors are shared with the other replicas and with whatever sends them work; an
    accelerator of its own gains nothing by a wait.
    """
    if dispatch == "auto":
        return "filling" if device == ON_PROCESSORS else "work-conserving"
    return dispatch
