"""An exit policy that decides about a token only when a test permits it. Every process of a service can import it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from earlyexit.policies.base import Decision, ExitOutput
from earlyexit.policies.threshold import ConfidencePolicy

PERMITS = "OFFRAMP_TEST_PERMITS"
"""Environment variable with the path of a file of one byte per permitted batch. Without a file all are permitted."""
RAMP = 1
"""The ramp at which the policy waits, once per token."""
THRESHOLD = 0.9
LOOK_S = 0.002
PATIENCE_S = 60.0


class Permitted(ConfidencePolicy):
    """Inputs leave if the exit is sure enough."""

    name = "own"

    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        if ramp == RAMP:
            until_s = time.monotonic() + PATIENCE_S
            while not _taken(Path(os.environ[PERMITS])) and time.monotonic() < until_s:
                time.sleep(LOOK_S)
        return super().decide(ramp, output, state_BS, sample_ids)


def _taken(permits: Path) -> bool:
    try:
        left = permits.stat().st_size
        if left:
            os.truncate(permits, left - 1)
    except FileNotFoundError:
        return True
    return left > 0


policy = Permitted(THRESHOLD)
