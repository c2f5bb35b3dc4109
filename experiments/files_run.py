"""Counts the files of this project whose functions run while a service answers one warm request.

    python -m experiments.files_run MODEL [--path /predict] [--body '{"inputs": "turn on the light"}'] [--inside]

A profile function runs in the processes that `offramp serve MODEL` starts. A request is sent ten times, and a file
counts if its functions ran in each of the ten windows, so that periodic work does not count. With `--inside`, one
request for a long stream is sent, and the windows are parts of its answer, so that generated tokens are counted.

    python -m experiments.files_run examples/laptop.yaml --change

A service file is served, and the batch size of its plan changes. Each window begins when the controller applies a plan.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import IncompleteRead
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
OURS = ("deployments", "earlyexit", "offramp", "optimizer", "profiles", "cluster")
NUM_WINDOWS, NUM_WARM = 10, 5
POLL_S, SETTLE_S, START_S, INSIDE_S = 0.005, 0.1, 180.0, 0.1


def record(folder: Path) -> None:
    """Installs the profile function in this process; each window's files are written when the window ends."""
    ran: set[str] = set()
    is_open = False

    def called(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or frame.f_lineno != code.co_firstlineno:  # a coroutine that goes on has not been called
            return
        if code.co_qualname == "ControlLoop._apply_plan":
            for due in folder.glob("*.due"):
                due.rename(due.with_suffix(".open"))
                time.sleep(SETTLE_S)
        if is_open:
            ran.add(code.co_filename)

    def watch() -> None:
        nonlocal is_open
        while True:
            for window in range(NUM_WINDOWS):
                opened, ended = folder / f"{window}.open", folder / f"{window}.{os.getpid()}.json"
                if opened.exists() and not ended.exists():
                    ran.clear()
                    is_open = True
                    while opened.exists():
                        time.sleep(POLL_S)
                    is_open = False
                    ended.write_text(json.dumps(sorted(ran)))
            time.sleep(POLL_S)

    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(called)
    sys.setprofile(called)


def main() -> None:
    """Serves the model, and prints the files with the number of their lines."""
    parser = ArgumentParser(prog="python -m experiments.files_run", description=__doc__)
    parser.add_argument("model", help="a model folder; with --change, a service file with a controller")
    parser.add_argument("--plan", default="stock")
    parser.add_argument("--path", default="/predict")
    parser.add_argument("--body", default='{"inputs": "turn on the light"}')
    parser.add_argument("--inside", action="store_true", help="open the windows inside the answer of one request")
    parser.add_argument("--change", action="store_true", help="change the plan instead of sending requests")
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        # The command itself only watches Ray's processes.
        start = f"from {__spec__.name} import *\nif os.getppid() != {os.getpid()}: record(Path({name!r}))"
        (folder / "sitecustomize.py").write_text(start)
        os.environ["PYTHONPATH"] = os.pathsep.join((name, str(ROOT), os.environ.get("PYTHONPATH", "")))
        with (changing if options.change else asking)(options) as step:
            for _ in range(NUM_WARM):
                step()
            begin = "due" if options.change else "open"
            files = set.intersection(*(files_of_window(folder, k, step, begin) for k in range(NUM_WINDOWS)))
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in sorted(files)}
    for file, count in lines.items():
        print(f"{count:6} {file}")
    print(f"{sum(lines.values()):6} lines in {len(lines)} files")


@contextmanager
def asking(options: Namespace) -> Iterator[Callable[[], None]]:
    """Serves a model folder; yields what sends a request or, with `--inside`, waits during its answer."""
    from offramp.client.client import Client  # the recorded processes, which import this module, do not need it

    url = f"http://127.0.0.1:{options.port}"
    command = [str(Path(sys.executable).parent / "offramp"), "serve", options.model, "--plan", options.plan]
    process = subprocess.Popen([*command, "--port", str(options.port)])
    try:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=START_S)
        ask = partial(send, f"{url}{options.path}", options.body)
        if options.inside:
            threading.Thread(target=ask, daemon=True).start()
        yield partial(time.sleep, INSIDE_S) if options.inside else ask
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextmanager
def changing(options: Namespace) -> Iterator[Callable[[], object]]:
    """Serves a service file; yields what changes the batch size of its plan."""
    from deployments.local_ray.cluster import LocalCluster, serving
    from deployments.wire.controller_link import apply_plan
    from offramp.spec.file import read_service
    from optimizer.plans.plan_file import plan_document

    settings = read_service(Path(options.model)).settings
    documents = cycle([plan_document(settings.plan.with_splits(batch=batch)) for batch in (4, 8)])
    with serving(settings, LocalCluster(port=options.port)):
        yield lambda: apply_plan(settings.app, next(documents), hold=False, timeout_s=START_S)


def send(url: str, body: str) -> None:
    """Posts the body and reads the answer, to its end or until the service ends."""
    with suppress(IncompleteRead), urlopen(Request(url, body.encode(), {"Content-Type": "application/json"})) as answer:
        answer.read()


def files_of_window(folder: Path, window: int, step: Callable[[], object], begin: str) -> set[str]:
    """Returns the project's files whose functions ran in any process during `step` or, if `due`, since its change."""
    (folder / f"{window}.{begin}").touch()
    time.sleep(SETTLE_S)
    step()
    time.sleep(SETTLE_S)  # replicas follow a plan after the call that changed it has returned
    (folder / f"{window}.open").unlink()
    time.sleep(SETTLE_S)
    ran = {file for each in folder.glob(f"{window}.*.json") for file in json.loads(each.read_text())}
    ours = (Path(file).relative_to(ROOT) for file in ran if file.startswith(f"{ROOT}/"))
    return {str(file) for file in ours if file.parts[0] in OURS}


if __name__ == "__main__":
    main()
