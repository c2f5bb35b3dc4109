from __future__ import annotations

import queue
import subprocess

import pytest

from deployments.local_ray.processes import loss_words, watched
from earlyexit.errors import HeadLostError


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param({"gcs_server": (7, -9), "raylet": (8, None)}, "gcs_server 7 was killed by SIGKILL", id="killed"),
        pytest.param({"raylet": (8, 1)}, "raylet 8 ended with status 1", id="ended"),
        pytest.param({"gcs_server": (7, -40)}, "gcs_server 7 was killed by signal 40", id="a-nameless-signal"),
        pytest.param(
            {"gcs_server": (7, -9), "raylet": (8, 0)},
            "gcs_server 7 was killed by SIGKILL, raylet 8 ended with status 0",
            id="both",
        ),
    ],
)
def test_a_loss_is_told_by_what_ended_and_how(found: dict[str, tuple[int, int | None]], words: str) -> None:
    assert loss_words(found) == f"Ray's head is gone ({words}); what was left of the service is ended"


def test_the_end_of_one_of_several_processes_is_the_loss() -> None:
    losses: queue.Queue[HeadLostError] = queue.Queue()
    with (
        subprocess.Popen(["sleep", "60"]) as stays,
        subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE) as ends,
    ):
        assert ends.stdin is not None
        with watched({"raylet": stays, "gcs_server": ends}, losses.put):
            assert losses.empty()
            ends.stdin.close()
            loss = losses.get(timeout=10)
        stays.kill()
    assert f"gcs_server {ends.pid} ended with status 3)" in str(loss)
    assert losses.empty()


def test_one_that_was_waited_for_already_is_lost() -> None:
    losses: queue.Queue[HeadLostError] = queue.Queue()
    ended = subprocess.Popen(["true"])
    ended.wait()
    with watched({"raylet": ended}, losses.put):
        assert "ended with status 0" in str(losses.get(timeout=10))
