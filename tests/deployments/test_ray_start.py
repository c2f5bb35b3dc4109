import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deployments.local_ray.cluster import without_pandas
from deployments.local_ray.private import log_ray_messages
from deployments.startup.sitecustomize import BLOCKED_MODULE, IMPORTER, PandasBlocker

TRY = f"""
try:
    import {BLOCKED_MODULE} as found
except ImportError:
    found = None
"""


def test_serve_does_not_import_pandas_but_other_modules_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, BLOCKED_MODULE, ModuleType(BLOCKED_MODULE))  # modules are restored afterwards
    monkeypatch.delitem(sys.modules, BLOCKED_MODULE)
    monkeypatch.setattr(sys, "meta_path", [PandasBlocker(), *sys.meta_path])
    (tmp_path / f"{BLOCKED_MODULE}.py").write_text("here = True", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found: dict[str, Any] = {"__name__": IMPORTER}
    exec(TRY, found)
    assert found["found"] is None
    others: dict[str, Any] = {"__name__": "another.module"}
    exec(TRY, others)
    assert others["found"].here


def test_processes_started_within_the_block_do_not_import_pandas_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for told in (None, "/mine"):
        if told is not None:
            monkeypatch.setenv("PYTHONPATH", told)
        with without_pandas():
            first, *others = os.environ["PYTHONPATH"].split(os.pathsep)
            assert os.path.isfile(os.path.join(first, "sitecustomize.py"))
            assert others == ([] if told is None else [told])
        assert os.environ.get("PYTHONPATH") == told


# Ray's messages


def test_rays_messages_about_workers_are_logged_unless_they_are_expected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # restores it
    log_ray_messages()
    for message in (
        "A worker died or was killed while executing a task by an unexpected system error. Worker PID: 3978",
        "Task ServeController.graceful_shutdown failed. Error: The actor is dead because it was killed by `ray.kill`.",
        "\n2 workers killed due to memory pressure\nRefer to",
        "Raylet is terminated. Termination is unexpected.",
        "WARNING: 8 PYTHON worker processes have been started on node: 5",
        "\n",
    ):
        worker.print_to_stdstream({"lines": [message], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert caplog.messages == [
        "Ray says: A worker died or was killed while executing a task by an unexpected system error. Worker PID: 3978",
        "Ray says: 2 workers killed due to memory pressure\nRefer to",
    ]
