from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offramp
from deployments.choices import TracingSettings
from deployments.keys import AccessSettings
from deployments.local_ray.cluster import LocalCluster
from deployments.settings import ServeSettings
from offramp.cli.app import main
from offramp.commands.predict import _summary_line
from optimizer.plans.plan import stock_plan
from tests.free_port import free_port
from tests.model_cards import change_card
from tests.offramp.cli.runs import ROOT, Always, Captured, refused, run, serving, url_of, written


class SoonFull(HTTPServer):
    """A server that answers its first requests and refuses all others."""

    request_queue_size = 1000
    """More than a probe sends at once: without room in the backlog, a connection takes seconds."""
    places = 0


class UntilFull(Always):
    server: SoonFull

    def do_POST(self) -> None:
        if self.server.places:
            self.server.places -= 1
            super().do_POST()
        else:
            self.take()
            self.say({"error": {"kind": "overloaded", "message": "full"}, "request_id": "r"}, status=503)


@pytest.fixture
def soon_full() -> Iterator[SoonFull]:
    yield from serving(SoonFull(("127.0.0.1", 0), UntilFull))


def test_the_version_is_printed_a_typo_is_mended_and_help_shows_no_type_next_to_a_flag(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"offramp {offramp.__version__}\n")
    assert (run("trian"), "Did you mean 'train'" in capsys.readouterr().err) == (2, True)
    assert run("train", "-h") == 0
    said = capsys.readouterr().out
    assert ("--joint" in said, "bool" in said) == (True, False)


def test_a_model_is_trained_in_the_working_folder(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "banking").mkdir()
    monkeypatch.chdir(tmp_path / "banking")
    Path("held_out.csv").touch()
    assert run("train", "--data", data, "--backbone", checkpoint, "--out", ".", "--epochs", 1) == 0
    assert json.loads(Path("model.json").read_text(encoding="utf-8"))["name"] == "banking"
    said = capsys.readouterr()
    assert "head of the full model: the checkpoint's\n" in said.out
    assert "warning: held_out.csv was held out of an earlier training" in said.err
    assert run("train", "--data", data, "--backbone", checkpoint, "--out", ".", "--hold-out", 0.5, "--ramps", 9) == 2
    assert not Path("held_out.csv").read_text(encoding="utf-8"), "the model is still the earlier one"


def test_a_calibration_shows_progress_and_prints_its_result(model: Path, data: Path, capsys: Captured) -> None:
    promise = ("--budget", 0.5, "--confidence", 0.9)
    assert run("calibrate", model, "--data", data, "--test", data, *promise, "--json") == 0
    captured = capsys.readouterr()
    assert set(json.loads(captured.out)) == {"thresholds", "tested", "test", "warnings"}
    steps = [" ".join(line.split()) for line in captured.err.splitlines()]
    assert {"records 40 / 40", "test records 40 / 40"} <= set(steps)


def test_a_taken_port_is_refused_before_a_model_is_measured(model: Path, answering_url: str, capsys: Captured) -> None:
    port = answering_url.rpartition(":")[2]
    assert refused(capsys, "serve", model, "--port", port, status=1).startswith(f"port {port} of 127.0.0.1 is taken")


@pytest.mark.parametrize("missing", ["tokenizer.json", "gone"])
def test_what_a_model_lacks_is_reported_before_ray_starts(missing: str, model: Path, capsys: Captured) -> None:
    (model / missing).unlink(missing_ok=True)
    change_card(model, **({"family": "gone:build"} if missing == "gone" else {}))
    assert missing in refused(capsys, "serve", model, "--plan", "stock", "--port", 8999)


def test_options_of_serve_become_settings_and_where_it_listens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("offramp.commands.serve._serve_until_stopped", lambda *what, **_: started.extend(what))
    keys = written(model / "keys", "alice:0123456789abcdef\n")
    keys.chmod(0o600)
    listening = ("--port", 9000, "--host", "0.0.0.0", "--front", "proxy", "--metrics-port", 9002)
    kind = ("--dtype", "bfloat16", "--backend", "onnx", "--threads", 3, "--ingress-replicas", 2)
    limits = ("--max-queued", 7, "--max-body-bytes", 8, "--max-held-bytes", 10, "--timeout-s", 9)
    access = ("--api-keys", keys, "--rate-limit", 5, "--cors-origin", "https://a.b", "--cors-origin", "http://c:1")
    tracing = ("--otlp-endpoint", "http://collector:4318", "--trace-ratio", 0.5)
    assert run("serve", model, "--plan", "stock", "--batch", 4, *listening, *kind, *limits, *access, *tracing) == 0
    settings, cluster = started
    assert settings == ServeSettings(
        model=str(model),
        plan=stock_plan(3, batch=4),
        dtype="bfloat16",
        backend="onnx",
        threads_per_replica=3,
        ingress_replicas=2,
        max_queued=7,
        max_body_bytes=8,
        max_held_bytes=10,
        default_timeout_s=9.0,
        access=AccessSettings(keys_file=str(keys), rate_per_s=5.0, cors_origins=("https://a.b", "http://c:1")),
        tracing=TracingSettings(endpoint="http://collector:4318", ratio=0.5),
    )
    assert cluster == LocalCluster(host="0.0.0.0", front="proxy", port=9000, metrics_port=9002)
    assert run("serve", model, "--plan", "stock") == 0
    assert started[2] == ServeSettings(model=str(model), plan=started[2].plan)


def test_an_unreachable_server_is_one_line_and_exit_status_1(capsys: Captured, data: Path) -> None:
    dead_url = f"http://127.0.0.1:{free_port()}"
    assert refused(capsys, "predict", "a text", "--url", dead_url, status=1).startswith("no connection to http://127")
    assert run("bench", "--data", data, "--url", dead_url, "--requests", 3, "--json") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["errors"] == {"connection": 3}
    assert "connection, 3 of 3 requests, the first: " in captured.err
    assert captured.err.endswith(f"offramp: none of 3 requests was answered by {dead_url}\n")


def test_a_load_reports_why_inputs_failed(answering_url: str, data: Path, capsys: Captured) -> None:
    assert run("bench", "--data", data, "--url", f"{answering_url}/spoilt", "--requests", 2) == 1
    assert "\nunprocessable_input, 2 of 2 requests, the first: no\n" in capsys.readouterr().err
    assert run("bench", "--data", data, "--url", f"{answering_url}/moved", "--requests", 2) == 1
    assert "HTTP 308 from the server: redirect to https://elsewhere:8443/x\n" in capsys.readouterr().err


def test_bench_sends_a_load_by_requests_or_by_an_arrival_process(
    answering_url: str, tmp_path: Path, capsys: Captured
) -> None:
    path = written(tmp_path / "one.csv", "text,label\na,bill\nb,bill\n")
    assert run("bench", "--data", path, "--url", answering_url, "--requests", 4, "--concurrency", 1, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["accuracy"] == 1.0
    assert " ".join(captured.err.splitlines()[-1].split()) == "requests 4 / 4"
    path.write_text("text,to\na,bill\n", encoding="utf-8")
    assert run("bench", "--data", path, "--url", answering_url, "--requests", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] is None
    (tmp_path / "texts.txt").write_text("a\nb\n", encoding="utf-8")
    (tmp_path / "trace").write_text("0.0\n0.02\n0.04\n", encoding="utf-8")
    bench = ("bench", "--data", tmp_path / "texts.txt", "--url", answering_url, "--json")
    assert run(*bench, "--arrivals", f"trace:{tmp_path / 'trace'}", "--seconds", 0.05) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["num_requests"], report["offered_rps"]) == (3, 3 / 0.05)
    assert report["achieved_rps"] <= report["offered_rps"]  # the load lasts 0.05 s, also after its last arrival
    assert "repeats if more is drawn" in captured.err


def test_bench_finds_the_sustained_rate(soon_full: SoonFull, data: Path, capsys: Captured) -> None:
    dead_url = f"http://127.0.0.1:{free_port()}"
    bench = ("bench", "--data", data, "--sustained", "--rate", 20, "--seconds", 0.1, "--json")
    assert run(*bench, "--url", dead_url) == 1
    assert f"no connection to {dead_url} at 20.0 requests/s" in capsys.readouterr().err
    assert run(*bench, "--url", url_of(soon_full)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sustained_per_s"], found["ending"]) == (0.0, "none passed")
    assert [(probe["rate_per_s"], probe["verdict"]) for probe in found["probes"]] == [
        (20.0, "failed"),
        (12.5, "failed"),
        (10.0, "failed"),
        (10.0, "failed"),
    ]
    soon_full.places = 2 + 3  # what a tenth of a second holds of 20/s, then of 32/s
    assert run(*bench, "--url", url_of(soon_full), "--slo-ms", 5000) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["sustained_per_s"], found["ending"]) == (32.0, "bracketed")
    assert captured.err.splitlines()[0].endswith("lost 0.0%  passed")


def test_arrays_of_another_name_are_refused(tmp_path: Path, answering_url: str, capsys: Captured) -> None:
    np.savez(tmp_path / "x.npz", sound=np.zeros((2, 8), dtype=np.float32))
    options = "--data", tmp_path / "x.npz", "--url", f"{answering_url}/arrays"
    assert refused(capsys, "predict", *options).endswith("x.npz: the model takes image; the file holds sound")
    np.savez(tmp_path / "x.npz", image=np.zeros((2, 8)), sound=np.zeros((2, 8)))
    for rate in (), ("--rate", 1000):
        said = refused(capsys, "bench", *options, *rate, "--requests", 100)
        assert said == "every input needs the model's columns, and no others: image"


def test_texts_are_answered_by_line_and_failures_end_in_1(tmp_path: Path, answering_url: str, capsys: Captured) -> None:
    texts = written(tmp_path / "texts.txt", "pay\nmy bill\n")
    assert run("predict", "--data", texts, "--batch", 1, "--concurrency", 1, "--url", answering_url) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["text"] for line in said.out.splitlines()] == ["pay", "my bill"]
    assert json.loads(said.out.splitlines()[0]) == {"text": "pay", "label": "bill", "score": 0.9, "exit": 0}
    assert re.search(r"^2 rows in .* rows/s, 0 failed; answers by exit 0: 2$", said.err, flags=re.MULTILINE)
    out = tmp_path / "out.jsonl"
    assert run("predict", "--data", texts, "--batch", 1, "--out", out, "--url", f"{answering_url}/spoilt") == 1
    assert capsys.readouterr().err.endswith("offramp: 2 of 2 inputs failed; see the column `error` of their rows\n")
    assert [json.loads(line)["error"] for line in out.read_text().splitlines()] == ["unprocessable_input: no"] * 2


def test_standard_input_is_answered_into_a_csv_file(tmp_path: Path, answering_url: str) -> None:
    done = subprocess.run(
        [*(sys.executable, "-m", "offramp", "predict"), *("--out", "out.csv", "--batch", "1", "--url", answering_url)],
        input="pay\n",
        capture_output=True,
        preexec_fn=partial(os.close, 2),  # the caller has closed the command's stderr
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "out.csv").read_text() == "text,label,score,exit,error\npay,bill,0.9,0,\n"


receives = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


def test_an_interrupt_while_modules_are_imported_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)", encoding="utf-8")
    command, path = (sys.executable, "-m", "offramp"), {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, env=os.environ | path, preexec_fn=receives, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_an_interrupt_ends_predictions_of_a_silent_pipe(answering_url: str) -> None:
    command = (sys.executable, "-m", "offramp", "predict", "-", "--batch", "1", "--url", answering_url)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, preexec_fn=receives
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"pay\n" * 2000)  # answers are written when the buffer of the output is full
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=10) == 130


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("-h", "--version".ljust(32) + "Print the version"),
        ("chain", " {MODELS}... "),
        ("predict", " [TEXTS]... "),
        ("doctor", " [MODEL_OR_SERVICE]... "),
        ("doctor", "65535"),
        ("bench", "Generation is not measured"),
    ],
)
def test_help_shows_arguments_once_and_the_range_of_each_item(command: str, shown: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert shown in capsys.readouterr().out


HEAVY = ("torch", "ray", "numpy", "scipy", "numba", "transformers", "httpx", "aiohttp", "httptools", "psutil")
COMMAND = f"""
import atexit, sys
sys.argv = ["offramp"]
atexit.register(lambda: print(*set({HEAVY!r}) & set(sys.modules), file=sys.stderr))
from offramp.cli.app import main
main()
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Callable[..., list[str]]:
    """Returns the completions for a shell."""

    def ask(instruction: str, *words: str) -> list[str]:
        asking = {"_OFFRAMP_COMPLETE": instruction, "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        for name, value in asking.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["offramp"])
        monkeypatch.setattr(sys.modules["__main__"], "__package__", "")  # else the program is `python -m pytest`
        with pytest.raises(SystemExit, match="0"):
            main()
        return capsys.readouterr().out.split()

    return ask


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("offramp", "doc"), ["doctor"]),
        (("offramp", "serve", "--plan", "s"), ["stock", "serial"]),
        (("offramp", "serve", "--dtype", ""), ["float32", "bfloat16"]),
        (("offramp", "profile", "m", "--backend", "o"), ["onnx"]),
        (("offramp", "plan", "--strategy", "e"), ["early-exit", "e3"]),
        (("offramp", "simulate", "--strategy", "e3"), ["e3"]),
        (("offramp", "calibrate", "--policy", "c"), ["confidence"]),
        (("offramp", "predict", "--format", ""), ["jsonl", "csv"]),
    ],
    ids=lambda value: "-".join(value[1:]),
)
def test_values_are_completed(asked: Callable[..., list[str]], words: tuple[str, ...], completed: list[str]) -> None:
    assert asked("complete_bash", *words) == completed


@pytest.mark.parametrize("words", [("offramp", "serve", "exam"), ("offramp", "train", "--data", "exam")])
def test_completion_of_files_is_left_to_the_shell(asked: Callable[..., list[str]], words: tuple[str, ...]) -> None:
    assert asked("complete_bash", *words) == []
    assert "complete -o default -F" in " ".join(asked("source_bash")), "bash then completes files itself"


def test_completing_loads_nothing_heavy() -> None:
    asking = {"_OFFRAMP_COMPLETE": "complete_bash", "COMP_WORDS": "offramp serve --plan s", "COMP_CWORD": "3"}
    command = [sys.executable, "-c", COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | asking)
    assert (done.stdout.split(), done.stderr.split()) == (["stock", "serial"], [])


PNG = "iVBORw0KGgo" + "A" * 89


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"label": "bill"}, "bill"),
        ({"value": 1.23456}, "1.235"),
        ({"keypoints": [{"joint": "head", "x": 5.5, "y": 9.25, "score": 0.5}]}, "head 5.5 9.25 0.5"),
        (
            {"class_map": PNG, "classes": [{"id": 2, "name": "sky", "share": 0.75, "colour": "#000000"}]},
            "a PNG file of 75 bytes, sky 75.0%",
        ),
        ({"embedding": np.zeros((2, 3), dtype=np.float32)}, "float32 [2, 3]"),
        ({"embedding": [0.5, 1.0]}, "0.5, 1"),
    ],
    ids=["label", "number", "keypoints", "class-map", "array", "list"],
)
def test_an_answer_is_summarised_in_one_line(said: dict[str, Any], words: str) -> None:
    row = {"text": "a", **said, "score": 0.5, "exit": 3}
    assert _summary_line(row, ["text"]) == f"{words}  (score 0.500, left after block 3)"
