"""Facts of the machine that runs the tests, and of files made for them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from earlyexit.network.store import WEIGHTS_FILE
from offramp.doctor.checks import ok, warning
from offramp.doctor.look import examine, look_at_target
from optimizer.calibration_file import CALIBRATION_FILE
from tests.offramp.service.service_folders import with_card, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A calibrated model's folder, whole."""
    model = write_model(tmp_path / "model")
    (model / WEIGHTS_FILE).unlink()
    save_file({}, model / WEIGHTS_FILE)
    Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(model / "tokenizer.json"))
    return model


def test_the_facts_of_this_machine_are_found() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        number = listening.getsockname()[1]
        found = {name: " ".join(each.found for each in findings) for name, findings in examine([], [number]).items()}
    assert re.search(rf"\b{number} \(service\) is taken by \S+, pid {os.getpid()}\b", found["ports"])
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert int(found["packages"].removesuffix(" as pyproject.toml asks")) > 10
    assert int(found["pins"].removesuffix(" as constraints.txt pins them")) > 10
    assert found["torch"].startswith("2.13.0")
    assert found["cores"].split()[0] == str(len(os.sched_getaffinity(0)))
    assert "free" in found["memory"]
    assert "/tmp/ray has" in found["disk"]
    assert f"{Path.cwd()} has" in found["disk"]
    assert "given" not in found, "nothing was named"


def said_of(path: Path) -> str:
    """What is wrong with a model or a service file."""
    finding, _ = look_at_target(path)
    assert (finding.verdict, finding.advice) == ("failed", "mend what it says; offramp serve would refuse it")
    return finding.found


def test_a_model_folder_is_read_by_the_readers_of_the_service(folder: Path) -> None:
    assert look_at_target(folder) == (ok(f"{folder}: m, bert, 3 blocks, 2 labels"), None)
    (folder / CALIBRATION_FILE).unlink()
    advice = f"offramp calibrate {folder} --data VALIDATION_FILE, or serve with --plan stock"
    words = f"{folder}: m, bert, 3 blocks, 2 labels; no input leaves early"
    assert look_at_target(folder) == (warning(words, advice), None)


def test_a_checkpoint_of_transformers_is_what_serve_takes(checkpoint: Path, tmp_path: Path) -> None:
    words = f"{checkpoint}: a classifier of transformers, 2 labels, served as it is; no input leaves early"
    assert look_at_target(checkpoint) == (warning(words, f"offramp ramp {checkpoint} --data LOG"), None)
    assert "nor is it a checkpoint of transformers" in said_of(tmp_path)
    shutil.copy(checkpoint / "config.json", tmp_path)
    assert said_of(tmp_path) == f"{tmp_path}: {tmp_path} has no weights: neither *.safetensors nor *.bin"


def test_what_is_missing_or_broken_in_a_folder_is_its_readers_message(folder: Path, tmp_path: Path) -> None:
    assert said_of(tmp_path / "gone") == f"{tmp_path / 'gone'}: no such file or folder"
    with_card(folder, ramps=[0])
    assert "is of another model: its ramps are not [0]" in said_of(folder)
    with_card(folder, ramps=[0, 1])
    (folder / WEIGHTS_FILE).write_bytes(b"no")
    assert "model.safetensors cannot be read" in said_of(folder)
    with_card(folder, num_blocks=0)
    assert "num_blocks" in said_of(folder)


def test_a_service_file_is_read_with_all_that_it_names(folder: Path) -> None:
    service = folder.parent / "service.yaml"
    service.write_text(
        "schema_version: 1\nname: s\n"
        "model:\n  folder: model\n"
        "  latency:\n    V100: {batch: [1, 2], block_s: [[1, 1], [1, 1], [1, 1]], ramp_s: [[1, 1], [1, 1]]}\n"
        "slo: {latency_s: 1}\ncluster:\n  devices:\n    V100: {count: 3}\ningress: {port: 8250}\n",
        encoding="utf-8",
    )
    assert look_at_target(service, 3) == (ok(f"{service}: s, m on 3 V100"), 8250)
    lacking, _ = look_at_target(service, 1)
    assert (lacking.verdict, "offramp deploy" in str(lacking.advice)) == ("failed", True)
    assert lacking.found == f"{service}: s, m on 3 V100; needs 3 GPUs, 1 are here"
    service.write_text("schema_version: 1\nname: s\n", encoding="utf-8")
    assert "service.yaml:1: model: Field required" in said_of(service)


def test_the_command_ends_with_1_where_something_failed_and_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['offramp', 'doctor', 'gone', '--json', '--port', '8251']\n"
        "from offramp.cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n    assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    [given] = [each for each in json.loads(done.stdout) if each["check"] == "given"]
    assert (given["verdict"], given["found"]) == ("failed", "gone: no such file or folder")
