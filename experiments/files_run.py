"""Counts the files of this project whose functions run while a service answers one warm request.

    python -m experiments.files_run MODEL [--path /predict] [--body '{"inputs": "turn on the light"}']

`offramp serve MODEL` runs with a profile function in each of its processes. A request is sent ten times, and a file
counts if its functions ran in each of the ten windows, so that periodic work does not count.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from urllib.error import URLError
from urllib.request import Request, urlopen

FOLDER = "OFFRAMP_FILES_RUN"
"""The environment variable that names the folder for windows and for the files that ran."""
ROOT = Path(__file__).parents[1]
OURS = ("deployments", "earlyexit", "offramp", "optimizer", "profiles", "cluster")
NUM_WINDOWS = 10
POLL_S, SETTLE_S, START_S = 0.005, 0.1, 180.0


def record(folder: Path) -> None:
    """Installs the profile function in this process; each window's files are written when the window ends."""
    ran: set[str] = set()
    is_open = False

    def called(frame: FrameType, event: str, _: object) -> None:
        if is_open and event == "call":
            ran.add(frame.f_code.co_filename)

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
    """Serves the model, sends the requests, and prints the files with the number of their lines."""
    parser = ArgumentParser(prog="python -m experiments.files_run", description=__doc__)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("--plan", default="stock")
    parser.add_argument("--path", default="/predict")
    parser.add_argument("--body", default='{"inputs": "turn on the light"}')
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}{options.path}"
    with TemporaryDirectory() as name:
        folder = Path(name)
        start = f"from pathlib import Path\nfrom {__spec__.name} import record\nrecord(Path({name!r}))\n"
        (folder / "sitecustomize.py").write_text(start)
        paths = os.pathsep.join((name, str(ROOT), os.environ.get("PYTHONPATH", "")))
        command = [str(Path(sys.executable).parent / "offramp"), "serve", options.model, "--plan", options.plan]
        command += ["--port", str(options.port)]
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths, FOLDER: name})
        try:
            wait_until_ready(process, url, options.body)
            files = set.intersection(
                *(files_of_window(folder, window, url, options.body) for window in range(NUM_WINDOWS))
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in sorted(files)}
    for file, count in lines.items():
        print(f"{count:6} {file}")
    print(f"{sum(lines.values()):6} lines in {len(lines)} files")


def wait_until_ready(process: subprocess.Popen[bytes], url: str, body: str) -> None:
    """Sends the request until it is answered, then a few more; raises TimeoutError if the service does not start."""
    until_s = time.monotonic() + START_S
    while True:
        try:
            for _ in range(5):
                send(url, body)
            return
        except (URLError, ConnectionError):
            if time.monotonic() > until_s or process.poll() is not None:
                raise TimeoutError(f"{url} did not answer within {START_S:g} s") from None
            time.sleep(SETTLE_S)


def send(url: str, body: str) -> None:
    """Posts the body and reads the whole answer."""
    with urlopen(Request(url, body.encode(), {"Content-Type": "application/json"})) as answer:
        answer.read()


def files_of_window(folder: Path, window: int, url: str, body: str) -> set[str]:
    """Returns the project's files whose functions ran in any process while the request was answered."""
    opened = folder / f"{window}.open"
    opened.touch()
    time.sleep(SETTLE_S)
    send(url, body)
    opened.unlink()
    time.sleep(SETTLE_S)
    ran = {file for each in folder.glob(f"{window}.*.json") for file in json.loads(each.read_text())}
    ours = (Path(file).relative_to(ROOT) for file in ran if file.startswith(f"{ROOT}/"))
    return {str(file) for file in ours if file.parts[0] in OURS}


if __name__ == "__main__":
    main()
