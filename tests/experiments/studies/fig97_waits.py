"""A study that ends only when it is interrupted.

python -m tests.experiments.studies.fig97_waits
"""

from __future__ import annotations

import threading
from dataclasses import replace

from experiments.studies.kit import Effort, StudyResult, command
from tests.experiments.studies import fig99_works


def run(effort: Effort) -> StudyResult:
    """Say that it has begun, and wait."""
    print("begun", flush=True)  # noqa: T201 - the test reads it
    threading.Event().wait()
    raise AssertionError("nobody sets this event")


STUDY = replace(fig99_works.STUDY, name="fig97_waits", figure="97", run=run)

if __name__ == "__main__":
    command(STUDY)
