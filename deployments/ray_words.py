"""What Ray says of its workers, in one line of ours each: its own are kilobytes of advice, at clean ends too."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

DIED = re.compile(r"Worker PID: (?P<pid>\d+)\b.*?\bWorker exit type: (?P<how>\w+)", flags=re.DOTALL)
NO_NEWS = ("killed by `ray.kill`", "Raylet is terminated")
"""Serve ends its own actors so, its controller among them; and who watches the raylet says more of its end."""
MOST_LETTERS = 200

logger = logging.getLogger("offramp")


def our_words(message: str) -> str | None:
    """One line for a message of Ray's to its driver; None for what is no news."""
    died = DIED.search(message)
    if died is not None:
        return f"a worker of Ray's has died, pid {died['pid']} ({died['how']})"
    if any(words in message for words in NO_NEWS):
        return None
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return f"Ray says: {first if len(first) <= MOST_LETTERS else first[:MOST_LETTERS] + ' ...'}" if first else None


def use_our_words() -> None:
    """From here on what Ray would print of its workers goes to our log, by its driver's one way to print it."""
    from ray._private import worker

    assert hasattr(worker, "print_to_stdstream"), "this release of Ray prints by another way"
    worker.print_to_stdstream = _log


def _log(data: Mapping[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001 - Ray's own signature
    for words in map(our_words, data["lines"]):
        if words is not None:
            logger.warning(words)
