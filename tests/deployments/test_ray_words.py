from __future__ import annotations

import pytest

from deployments.local_ray.start import MOST_LETTERS, our_words

DIED = (
    "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, "
    "check the logs for the dead worker. Lease ID: 0500 Worker ID: 273e Node ID: dbf9 Worker IP address: 127.0.0.1 "
    "Worker port: 39733 Worker PID: 3978 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits "
    "with a connection error code 2. End of file. Some common causes include: (1) the process was killed by"
)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param(DIED, "a worker of Ray's has died, pid 3978 (SYSTEM_ERROR)", id="a-worker-died"),
        pytest.param(
            "Task ServeController.graceful_shutdown failed. There are infinite retries remaining, so the task will be "
            "retried. Error: The actor is dead because it was killed by `ray.kill`.",
            None,
            id="Serve-ends-its-own",
        ),
        pytest.param(
            "\n2 workers killed due to memory pressure\nRefer to",
            "Ray says: 2 workers killed due to memory pressure",
            id="the-first-line",
        ),
        pytest.param("x" * 300, f"Ray says: {'x' * MOST_LETTERS} ...", id="not-more-than-a-line"),
        pytest.param("Raylet is terminated. Termination is unexpected.", None, id="its-watcher-says-more"),
        pytest.param("\n", None, id="nothing"),
    ],
)
def test_what_ray_says_of_its_workers_is_one_line_of_ours(message: str, words: str | None) -> None:
    assert our_words(message) == words
