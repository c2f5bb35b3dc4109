from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cluster.catalogue import ClusterLink, known_link, read_cluster_catalogue
from cluster.devices import find_device
from cluster.inventory import Accelerators, Inventory, inventory_of_nodes, missing_accelerators, read_inventory
from cluster.memory import machine_memory
from cluster.render import Kubernetes, grpc_environment, kubernetes_name, ray_service, serve_config, to_yaml
from earlyexit.errors import PlanError
from tests.cluster.kuberay_schema import RayService
from tests.offramp.cli.runs import written

LINK = ClusterLink(bandwidth_bytes_per_s=1.0)


def node(resources: dict[str, float], labels: dict[str, str] | None = None, *, alive: bool = True) -> dict[str, Any]:
    """Returns a node in the form of `ray.nodes()`, with only the fields that are read."""
    return {"Alive": alive, "Resources": resources, "Labels": labels or {}}


def v100(gpus: float, **labels: str) -> dict[str, Any]:
    resources = {"CPU": 8.0, "GPU": gpus, "accelerator_type:V100": 1.0, "node:10.0.0.1": 1.0, "memory": 1e9}
    return node(resources, labels)


def inventory(**counts: int) -> Inventory:
    return Inventory(devices={name: Accelerators(count=count) for name, count in counts.items()}, link=LINK)


@pytest.mark.parametrize(
    ("nodes", "counts"),
    [
        ([v100(4.0), v100(2.0)], {"V100": 6, "cpu": 16}),
        ([node({"CPU": 8.0}, alive=False), node({"CPU": 2.0})], {"cpu": 2}),
        ([node({"CPU": 1.0, "GPU": 2.0})], {"cuda": 2, "cpu": 1}),
        ([node({"emulated:V100": 6.0}), node({"emulated:V100": 1.0})], {"emulated:V100": 7}),
    ],
    ids=["by the type that Ray told", "of live nodes", "of an unknown type", "emulated"],
)
def test_accelerators_of_all_nodes_are_counted(nodes: list[dict[str, Any]], counts: dict[str, int]) -> None:
    assert inventory_of_nodes(nodes).counts == counts


def test_devices_have_the_labels_of_all_their_nodes_and_catalogue_prices() -> None:
    found = inventory_of_nodes(
        [v100(1.0, tier="fast", zone="a"), v100(1.0, tier="fast", zone="b"), node({"CPU": 1.0}, {"tier": "slow"})]
    )
    assert found.devices["V100"].labels == {"tier": "fast"}
    assert found.devices["cpu"].labels == {}
    itself = node({"CPU": 1.0}, {"ray.io/node-id": "a", "tier": "slow"})
    assert inventory_of_nodes([itself]).devices["cpu"].labels == {"tier": "slow"}
    found = inventory_of_nodes([v100(1.0)])
    assert found.devices["V100"].usd_per_hour == 2.93
    assert found.link == known_link()


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [
        pytest.param({"V100": 4}, {}, id="all there"),
        pytest.param({"V100": 5, "T4": 1}, {"V100": 1, "T4": 1}, id="too few, and none"),
        pytest.param({"cuda": 6}, {}, id="cuda takes any GPU"),
        pytest.param({"cuda": 6, "V100": 1}, {"cuda": 1}, id="but not those wanted by name"),
        pytest.param({"T4": 0}, {}, id="none wanted"),
    ],
)
def test_missing_accelerators_are_counted_by_type(wanted: dict[str, int], missing: dict[str, int]) -> None:
    assert missing_accelerators(wanted, inventory(V100=4, cuda=2, cpu=8)) == missing


def test_every_figure_of_the_catalogue_names_a_source_that_it_has() -> None:
    catalogue = read_cluster_catalogue()
    named = {each.memory for each in catalogue.devices.values()} | {catalogue.link.source}
    named |= {each.price for each in catalogue.devices.values() if each.price is not None}
    assert named == set(catalogue.sources)
    assert all((each.usd_per_hour is None) == (each.price is None) for each in catalogue.devices.values())


def test_a_file_overrides_the_catalogue(tmp_path: Path) -> None:
    found = read_inventory(written(tmp_path / "cluster.yaml", "devices: {V100: {count: 16}}\n"))
    assert found.counts == {"V100": 16}
    assert found.devices["V100"].usd_per_hour == 2.93
    assert found.devices["V100"].memory_bytes == 16 * 2**30
    assert "E3" in (found.devices["V100"].source or "")
    assert (found.link, found.time_scale) == (known_link(), 1)
    text = (
        "schema_version: 1\n"
        "devices:\n"
        "  emulated:V100: {count: 2, usd_per_hour: 1, memory_bytes: 100, source: me,\n"
        "                  labels: {tier: fast}, node_selector: {pool: gpu}}\n"
        "link: {bandwidth_bytes_per_s: 1.0e9, source: iperf}\n"
        "time_scale: 20\n"
    )
    found = read_inventory(written(tmp_path / "cluster.yaml", text))
    each = found.devices["emulated:V100"]
    assert (each.usd_per_hour, each.memory_bytes, each.source) == (1.0, 100, "me")
    assert (each.labels, each.node_selector) == ({"tier": "fast"}, {"pool": "gpu"})
    assert (found.link, found.time_scale) == (ClusterLink(bandwidth_bytes_per_s=1e9, source="iperf"), 20)


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
def test_a_device_has_the_names_of_torch_and_ray(name: str, torch_device: str, options: dict[str, object]) -> None:
    device = find_device(name)
    assert (device.name, device.torch_device, device.actor_options) == (name, torch_device, options)


@pytest.mark.parametrize(
    "name", ["gpu", "CPU", "v100", "", "emulated:", "emulated:cuda", "emulated:emulated:cpu", "emulated:-x", "edge-box"]
)
def test_the_error_for_an_unknown_device_lists_the_known_ones(name: str) -> None:
    with pytest.raises(PlanError, match=f"unknown device '{name}'; known: cpu, cuda, .*V100.*H200.*; emulated: before"):
        find_device(name)


MIB = 1 << 20


def test_a_containers_limit_is_its_memory(tmp_path: Path) -> None:
    for name, number in (("max", 64 * MIB), ("current", 40 * MIB)):
        (tmp_path / f"memory.{name}").write_text(f"{number}\n")
    assert machine_memory(tmp_path) == (64 * MIB, 24 * MIB)
    (tmp_path / "memory.stat").write_text(f"anon 1\nfile {30 * MIB}\ninactive_file {20 * MIB}\nactive_file 1\n")
    assert machine_memory(tmp_path) == (64 * MIB, 44 * MIB), "files that nothing uses can be dropped from the cache"
    (tmp_path / "memory.current").write_text(f"{95 * MIB}\n")
    assert machine_memory(tmp_path) == (64 * MIB, 0)


@pytest.mark.parametrize("limit", ["max", str(1 << 60), None], ids=["none", "more than there is", "no container"])
def test_without_a_limit_memory_is_the_machines(tmp_path: Path, limit: str | None) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("1")
    total, free = machine_memory(tmp_path)
    assert total == psutil.virtual_memory().total
    assert 0 < free <= total


FOLDER = Path(__file__).with_name("manifests")
KUBERNETES = Kubernetes(image="registry/offramp:1", ray_version="2.60.0", environment={"B": "2", "A": "1"})
SELECTOR = {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}
OF_TYPES = {
    "V100": Accelerators(count=6, labels={"tier": "fast"}),
    "T4": Accelerators(count=1, node_selector=SELECTOR),
    "P100": Accelerators(count=0),
    "cpu": Accelerators(count=2),
    "emulated:K80": Accelerators(count=15),
}


def config(grpc_port: int | None = None) -> dict[str, Any]:
    return serve_config(
        {"model": "/offramp/model", "plan": {"stages": [{"device": "cpu", "replicas": 1}]}},
        name="demo",
        environment={"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
        host="0.0.0.0",
        port=8000,
        grpc_port=grpc_port,
        proxy_location="EveryNode",
    )


def manifest(devices: Mapping[str, Accelerators], grpc_port: int | None = None, **redis: Any) -> dict[str, Any]:
    inventory = Inventory(devices=dict(devices), link=ClusterLink(bandwidth_bytes_per_s=1.0))
    return ray_service("My_Demo", config(grpc_port), inventory, replace(KUBERNETES, **redis))


MANIFESTS = {
    "types": manifest(OF_TYPES, grpc_port=9000),
    "redis": manifest({"cpu": Accelerators(count=3)}, redis="redis:6379", redis_secret="mine"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_equals_the_golden_file_and_has_only_fields_of_kuberay(name: str) -> None:
    text = to_yaml(MANIFESTS[name])
    assert text == (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    read = yaml.safe_load(text)
    assert RayService.model_validate(read).metadata.name == "my-demo"
    assert yaml.safe_load(read["spec"]["serveConfigV2"]) == config(9000 if name == "types" else None)


def test_custom_resources_reach_ray_as_json_through_a_shell() -> None:
    found = {}
    for group in MANIFESTS["types"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        for word in shlex.split(group["rayStartParams"].get("resources", "")):
            found[group["groupName"]] = json.loads(word)
    assert found == {
        "v100": {"accelerator_type:V100": 1},
        "t4": {"accelerator_type:T4": 1},
        "emulated-k80": {"emulated:K80": 15},
    }


def test_a_redis_without_a_secret_is_used_without_a_password() -> None:
    cluster = manifest(OF_TYPES, redis="redis:6379")["spec"]["rayClusterConfig"]
    assert cluster["gcsFaultToleranceOptions"] == {"redisAddress": "redis:6379"}


def test_texts_of_several_lines_are_blocks() -> None:
    assert to_yaml({"text": "a: 1\nb: 2\n", "rows": [[1.5, 1e-05]]}) == (
        "text: |\n  a: 1\n  b: 2\nrows:\n- [1.5, 1.0e-05]\n"
    )


def test_the_message_limit_of_serve_is_twice_that_of_the_service() -> None:
    assert set(grpc_environment(20_000).values()) == {str(4 * 2**20)}
    assert set(grpc_environment(3_000_000).values()) == {"6000000"}


def test_names_are_converted_to_valid_names_of_kubernetes() -> None:
    assert kubernetes_name("emulated:V100_x.") == "emulated-v100-x"
