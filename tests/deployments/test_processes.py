"""The head watch, and background tasks of processes."""

from __future__ import annotations

import asyncio
import logging
import queue
import subprocess
from typing import Any
from unittest.mock import Mock

import pytest

from deployments.local_ray.cluster import watch_processes
from deployments.process_setup import BackgroundTasks
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
def test_a_loss_names_the_ended_processes(found: dict[str, tuple[int, int | None]], words: str) -> None:
    losses: queue.Queue[HeadLostError] = queue.Queue()
    processes: Any = {name: Mock(pid=pid, poll=lambda end=end: end) for name, (pid, end) in found.items()}
    with watch_processes(processes, losses.put):
        assert str(losses.get(timeout=10)) == f"Ray's head is gone ({words}); the rest of the service is stopped"


def test_the_end_of_one_of_several_processes_is_reported() -> None:
    losses: queue.Queue[HeadLostError] = queue.Queue()
    with (
        subprocess.Popen(["sleep", "60"]) as stays,
        subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE) as ends,
    ):
        assert ends.stdin is not None
        with watch_processes({"raylet": stays, "gcs_server": ends}, losses.put):
            assert losses.empty()
            ends.stdin.close()
            loss = losses.get(timeout=10)
        stays.kill()
    assert f"gcs_server {ends.pid} ended with status 3)" in str(loss)
    assert losses.empty()
    with watch_processes({"gcs_server": ends}, losses.put):
        assert "ended with status 3" in str(losses.get(timeout=10))


async def fail() -> None:
    raise LookupError("no plan")


async def test_a_background_task_that_fails_fails_the_health_check(caplog: pytest.LogCaptureFixture) -> None:
    background, goes_on = BackgroundTasks(), asyncio.Event()
    background.start("wait", goes_on.wait())
    background.start("start", asyncio.sleep(0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    background.check_health()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "start"]
    with caplog.at_level(logging.ERROR):
        background.start("learn the plan", fail())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match=r"the background task 'learn the plan' has ended: LookupError\('no plan'\)"):
        background.check_health()
    assert [record.getMessage() for record in caplog.records] == ["the background task 'learn the plan' has ended"]
    goes_on.set()


def test_a_full_disk_of_logs_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)
    log = logging.Logger("full")
    log.addHandler(logging.StreamHandler(Mock(write=Mock(side_effect=OSError))))
    monkeypatch.setattr("sys.stderr", Mock(write=log.error))  # as in Serve's replicas
    BackgroundTasks()
    log.error("nowhere")
