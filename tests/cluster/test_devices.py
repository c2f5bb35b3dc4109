from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cluster.devices import find_device
from cluster.memory import machine_memory
from earlyexit.errors import PlanError


@pytest.mark.parametrize(
    ("name", "torch_device", "options"),
    [
        ("cpu", "cpu", {"num_cpus": 1}),
        ("cuda", "cuda", {"num_cpus": 1, "num_gpus": 1}),
        ("V100", "cuda", {"num_cpus": 1, "num_gpus": 1, "accelerator_type": "V100"}),
        ("emulated:V100", "cpu", {"num_cpus": 0, "resources": {"emulated:V100": 1}}),
        ("emulated:cpu", "cpu", {"num_cpus": 0, "resources": {"emulated:cpu": 1}}),
        ("emulated:edge-box", "cpu", {"num_cpus": 0, "resources": {"emulated:edge-box": 1}}),
    ],
    ids=["cpu", "any GPU", "a GPU type", "an emulated GPU", "an emulated CPU", "a name of its own"],
)
def test_a_device_tells_what_torch_and_ray_call_it(name: str, torch_device: str, options: dict[str, object]) -> None:
    device = find_device(name)
    assert (device.name, device.torch_device, device.actor_options) == (name, torch_device, options)


@pytest.mark.parametrize(
    "name", ["gpu", "CPU", "v100", "", "emulated:", "emulated:cuda", "emulated:emulated:cpu", "emulated:-x", "edge-box"]
)
def test_an_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(PlanError, match=f"unknown device '{name}'; known: cpu, cuda, .*V100.*H200.*; emulated: before"):
        find_device(name)


MIB = 1 << 20


def test_a_containers_limit_is_all_it_has(tmp_path: Path) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text(f"{64 * MIB}\n")
    used.write_text(f"{40 * MIB}\n")
    assert machine_memory(limit, used) == (64 * MIB, 24 * MIB)
    used.write_text(f"{65 * MIB}\n")
    assert machine_memory(limit, used) == (64 * MIB, 0)


@pytest.mark.parametrize("limit", ["max", str(1 << 60), None], ids=["none", "more than there is", "no container"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, limit: str | None) -> None:
    if limit is not None:
        (tmp_path / "max").write_text(limit)
        (tmp_path / "current").write_text("1")
    total, free = machine_memory(tmp_path / "max", tmp_path / "current")
    assert total == psutil.virtual_memory().total
    assert 0 < free <= total
