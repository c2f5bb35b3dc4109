"""Serve's config and KubeRay's manifests, as they are written down in `manifests/`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.catalogue import ClusterLink
from cluster.inventory import Accelerators, Inventory
from cluster.render import Kubernetes, Redis, grpc_environment, kubernetes_name, ray_service, serve_config, to_yaml
from tests.cluster.kuberay_schema import RayService

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


def manifest(
    devices: Mapping[str, Accelerators], redis: Redis | None = None, grpc_port: int | None = None
) -> dict[str, Any]:
    inventory = Inventory(devices=dict(devices), link=ClusterLink(bandwidth_bytes_per_s=1.0))
    return ray_service("My_Demo", config(grpc_port), inventory, replace(KUBERNETES, redis=redis))


MANIFESTS = {
    "types": manifest(OF_TYPES, grpc_port=9000),
    "redis": manifest({"cpu": Accelerators(count=3)}, Redis(address="redis:6379", secret="mine")),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_as_written_down_and_has_only_fields_that_kuberay_knows(name: str) -> None:
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


def test_a_redis_without_a_secret_is_asked_without_a_password() -> None:
    cluster = manifest(OF_TYPES, Redis(address="redis:6379"))["spec"]["rayClusterConfig"]
    assert cluster["gcsFaultToleranceOptions"] == {"redisAddress": "redis:6379"}


def test_texts_of_several_lines_are_blocks() -> None:
    assert to_yaml({"text": "a: 1\nb: 2\n", "rows": [[1.5, 1e-05]]}) == (
        "text: |\n  a: 1\n  b: 2\nrows:\n- [1.5, 1.0e-05]\n"
    )


def test_serves_messages_may_be_twice_as_large_as_the_services() -> None:
    assert set(grpc_environment(20_000).values()) == {str(4 * 2**20)}
    assert set(grpc_environment(3_000_000).values()) == {"6000000"}


def test_names_become_those_that_kubernetes_takes() -> None:
    assert kubernetes_name("emulated:V100_x.") == "emulated-v100-x"
