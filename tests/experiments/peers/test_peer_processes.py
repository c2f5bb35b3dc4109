from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from earlyexit.errors import OfframpError
from experiments.peers.client import ROOT
from experiments.peers.options import ServerOptions
from experiments.peers.processes import MARK, PEERS, PEERS_PYTHON, Server, interpreter, serving, threads_of

OPTIONS = ServerOptions(model=Path("model"))
# A parent whose child forgets its environment and says its own process id, as a process does that renames itself.
FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], env={}, stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_every_peer_has_a_module_that_is_in_the_repository() -> None:
    modules = [peer.command[-1].partition(":")[0] for peer in PEERS.values()]
    assert sorted(PEERS) == ["bentoml", "litserve", "mosec", "ray-serve"]
    assert [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()] == []


def test_ray_serve_runs_in_the_environment_that_runs_offramp() -> None:
    assert interpreter(PEERS["ray-serve"]) == Path(sys.executable)


def test_where_the_peers_environment_is_missing_it_is_said_how_to_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.peers.processes.PEERS_PYTHON", PEERS_PYTHON.with_name("no-such-python"))
    with pytest.raises(SystemExit, match="is missing: `make peers` makes"):
        interpreter(PEERS["mosec"])


def test_tokenizers_take_no_more_threads_than_the_model() -> None:
    assert threads_of(1) == {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    assert threads_of(2) == {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "2"}


def test_a_server_is_its_process_those_with_its_mark_and_their_children() -> None:
    marked = os.environ | {MARK: "of-this-test"}
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen(sleeper, stdin=subprocess.PIPE) as leader,
        subprocess.Popen(
            [sys.executable, "-c", FAMILY], env=marked, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as parent,
        subprocess.Popen(sleeper, stdin=subprocess.PIPE) as stranger,
    ):
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        server = Server("", leader, "of-this-test", Path())
        assert {process.pid for process in server.processes()} == {leader.pid, parent.pid, child}
        assert stranger.pid not in {process.pid for process in server.processes()}
        assert server.memory_bytes() > 3_000_000  # three interpreters; even what they share is counted, in parts
        assert server.cpu_s() >= 0
    assert server.processes() == []
    assert (server.memory_bytes(), server.cpu_s()) == (0, 0)


def test_a_server_that_cannot_start_is_an_error_that_shows_its_log(tmp_path: Path) -> None:
    missing = OPTIONS.model_copy(update={"model": tmp_path / "no-such-model", "port": free_port()})
    with (
        pytest.raises(OfframpError, match=r"ended with 1 before it answered:\n[\s\S]*no-such-model"),
        serving("ray-serve", missing, logs=tmp_path),
    ):
        pytest.fail("it cannot have answered")


def test_a_port_where_something_answers_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = OPTIONS.model_copy(update={"port": taken.getsockname()[1]})
        with pytest.raises(OfframpError, match="is taken"), serving("ray-serve", options, logs=tmp_path):
            pytest.fail("it cannot have started")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
