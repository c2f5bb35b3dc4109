"""Facts of the machine that runs the tests, and of files made for them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from earlyexit.network.store import WEIGHTS_FILE
from offramp.doctor.look import look, look_at_target
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
        machine = look([], [number])
    [port] = [each for each in machine.ports if each.number == number]
    assert port.taken
    assert port.holder is not None
    assert port.holder.pid == os.getpid()
    found = {each.name: each for each in machine.packages}
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "ray", "psutil", "packaging"} <= set(found)
    assert all(each.found is not None and each.pinned is not None for each in machine.packages)
    assert found["torch"].wanted == "==2.13.0"
    assert machine.cores == len(os.sched_getaffinity(0))
    assert 0 < machine.memory_free_bytes <= machine.memory_total_bytes
    assert set(machine.disk_free_bytes) == {str(Path.cwd()), "/tmp/ray"}


def test_a_model_folder_is_read_by_the_readers_of_the_service(folder: Path) -> None:
    target = look_at_target(folder)
    assert (target.kind, target.problem, target.exits_by) == ("model", None, None)
    assert target.words == "m, bert, 3 blocks, 2 labels"


def test_a_model_without_calibration_is_told_apart(folder: Path) -> None:
    (folder / CALIBRATION_FILE).unlink()
    target = look_at_target(folder)
    assert target.problem is None
    assert target.exits_by == f"offramp calibrate {folder} --data VALIDATION_FILE, or serve with --plan stock"


def test_a_checkpoint_of_transformers_is_what_serve_takes(checkpoint: Path, tmp_path: Path) -> None:
    target = look_at_target(checkpoint)
    assert (target.kind, target.problem) == ("model", None)
    assert target.words == "a classifier of transformers, 2 labels, served as it is"
    assert target.exits_by == f"offramp ramp {checkpoint} --data LOG"
    assert "nor is it a checkpoint of transformers" in str(look_at_target(tmp_path).problem)
    shutil.copy(checkpoint / "config.json", tmp_path)
    assert look_at_target(tmp_path).problem == f"{tmp_path} has no weights: neither *.safetensors nor *.bin"


def test_what_is_missing_or_broken_in_a_folder_is_its_readers_message(folder: Path, tmp_path: Path) -> None:
    assert look_at_target(tmp_path / "gone").problem == "no such file or folder"
    (folder / WEIGHTS_FILE).write_bytes(b"no")
    assert "model.safetensors cannot be read" in str(look_at_target(folder).problem)
    with_card(folder, num_blocks=0)
    assert "num_blocks" in str(look_at_target(folder).problem)


def test_a_calibration_of_another_model_is_refused(folder: Path) -> None:
    with_card(folder, ramps=[0])
    assert "is of another model: its ramps are not [0]" in str(look_at_target(folder).problem)


def test_a_service_file_is_read_with_all_that_it_names(folder: Path) -> None:
    service = folder.parent / "service.yaml"
    service.write_text(
        "schema_version: 1\nname: s\n"
        "model:\n  folder: model\n"
        "  latency:\n    V100: {batch: [1, 2], block_s: [[1, 1], [1, 1], [1, 1]], ramp_s: [[1, 1], [1, 1]]}\n"
        "slo: {latency_s: 1}\ncluster:\n  devices:\n    V100: {count: 3}\ningress: {port: 8250}\n",
        encoding="utf-8",
    )
    target = look_at_target(service)
    assert (target.kind, target.problem) == ("service", None)
    assert (target.words, target.gpus, target.port) == ("s, m on 3 V100", 3, 8250)
    service.write_text("schema_version: 1\nname: s\n", encoding="utf-8")
    assert "service.yaml:1: model: Field required" in str(look_at_target(service).problem)


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
