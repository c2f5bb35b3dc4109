"""A study that the system kills, as it does where memory is short.

python -m tests.experiments.studies.fig95_dies
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

from experiments.studies.kit import Effort, StudyResult, command
from tests.experiments.studies import fig99_works


def run(effort: Effort) -> StudyResult:
    """Die."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives this signal")


STUDY = replace(fig99_works.STUDY, name="fig95_dies", figure="95", run=run)

if __name__ == "__main__":
    command(STUDY)
