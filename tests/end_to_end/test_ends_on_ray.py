"""Tests that `offramp serve` leaves no process, however and whenever it ends.

`test_quickstart.py` tests SIGTERM for a service that is ready.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import httpx
import psutil
import pytest

from optimizer.plans.plan import PolicySpec
from tests.end_to_end.one_ray import MARK, OneRay, kill_remaining, remaining
from tests.end_to_end.tiny_service import NUM_BLOCKS, Tiny, text_service, two_stages
from tests.free_port import free_port

pytestmark = pytest.mark.ray
START_S, END_S, AGENTS_S = 120.0, 60.0, 5.0
MOMENTS = {"Ray starts": {"gcs_server"}, "Ray connects": {"gcs_server", "raylet"}}
"""Processes that `offramp serve` has started by then."""


def names_below(process: subprocess.Popen[bytes]) -> set[str]:
    names = set()
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            names.add(child.name())
        except psutil.NoSuchProcess:  # it has ended
            continue
    return names


def test_a_service_that_is_killed_leaves_no_process(one_ray: OneRay, tiny: Tiny) -> None:
    """First in the file, because later tests need all processors."""
    one_ray.serve(text_service(tiny))
    before = len(one_ray.log.read_bytes())
    assert one_ray.kill() == {}
    assert b"received at time" not in one_ray.log.read_bytes()[before:]


def test_accepted_requests_are_answered_by_all_stages_before_a_service_ends(
    tiny: Tiny, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    plan = replace(two_stages(tiny.thresholds), policy=PolicySpec(name="own", own="by_permits:policy"))
    settings = text_service(tiny, plan=plan)
    own_ray = OneRay(tmp_path, settings)  # starts with this service, so that no other one has to be replaced
    request.addfinalizer(own_ray.end)
    url = own_ray.serve(settings)
    own_ray.permits.write_bytes(b"")
    with ThreadPoolExecutor() as threads:
        accepted = threads.submit(httpx.post, f"{url}/predict", json={"inputs": tiny.texts[0]}, timeout=END_S)
        while not httpx.get(f"{url}/stats").json()["unanswered"]:
            time.sleep(0.02)
        ending = threads.submit(own_ray.end)
        while httpx.get(f"{url}/stats").status_code == HTTPStatus.OK:
            time.sleep(0.02)
        own_ray.permits.unlink()  # the first stage may run now
        answer = accepted.result()
        ending.result()
    assert (answer.status_code, answer.json().get("exit")) == (HTTPStatus.OK, NUM_BLOCKS - 1)


@pytest.mark.parametrize(("moment", "sent"), [("Ray starts", signal.SIGTERM), ("Ray connects", signal.SIGINT)])
def test_a_signal_ends_a_service_that_starts_and_every_process_of_it(
    tiny: Tiny, tmp_path: Path, moment: str, sent: signal.Signals
) -> None:
    mark, log = uuid.uuid4().hex, tmp_path / "log"
    environment = os.environ | {MARK: mark, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "offramp", "serve", str(tiny.folder), "--plan", "stock"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(free_port())], stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        until_s = time.monotonic() + START_S
        while not names_below(process) >= MOMENTS[moment]:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.02)
        process.send_signal(sent)
        assert process.wait(END_S) == 0, log.read_text()
        assert remaining(mark, patience_s=AGENTS_S) == {}
        assert "received at time" not in log.read_text()
    finally:
        process.kill()
        process.wait()
        kill_remaining(mark)
