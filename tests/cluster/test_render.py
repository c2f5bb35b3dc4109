from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import yaml

from cluster.catalogue import ClusterLink
from cluster.inventory import Accelerators, Inventory
from cluster.render import (
    Kubernetes,
    Redis,
    grpc_environment,
    kubernetes_name,
    ray_service,
    serve_config,
    to_yaml,
)
from tests.cluster.kuberay_schema import RayService

ARGS = {"model": "/offramp/model", "plan": {"stages": []}}
SWITCHES = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
KUBERNETES = Kubernetes(image="registry/offramp:1", ray_version="2.60.0", environment={"B": "2", "A": "1"})


def config() -> dict[str, Any]:
    return serve_config(ARGS, name="demo", environment=SWITCHES, host="0.0.0.0", port=9000, proxy_location="EveryNode")


def manifest(**devices: Accelerators) -> dict[str, Any]:
    named = {name.replace("__", ":"): each for name, each in devices.items()}
    return ray_service("My_Demo", config(), inventory(named), KUBERNETES)


def manifest_with(redis: Redis) -> dict[str, Any]:
    """Of three CPUs."""
    return ray_service("My_Demo", config(), inventory({"cpu": Accelerators(count=3)}), replace(KUBERNETES, redis=redis))


def inventory(devices: dict[str, Accelerators]) -> Inventory:
    return Inventory(devices=devices, link=ClusterLink(bandwidth_bytes_per_s=1.0))


def groups(document: dict[str, Any]) -> dict[str, Any]:
    return {each["groupName"]: each for each in document["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


def container(group: dict[str, Any]) -> dict[str, Any]:
    [only] = group["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_a_serve_config_has_one_application_whose_arguments_are_the_settings() -> None:
    assert config() == {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 9000},
        "applications": [
            {
                "name": "demo",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": ARGS,
                "runtime_env": {"env_vars": SWITCHES},
                "external_scaler_enabled": True,
            }
        ],
    }


def test_a_manifest_has_only_fields_that_kuberay_knows() -> None:
    document = manifest(
        V100=Accelerators(count=6, labels={"tier": "fast"}),
        cpu=Accelerators(count=1),
        emulated__K80=Accelerators(count=15),
    )
    assert RayService.model_validate(document).metadata.name == "my-demo"


def test_a_manifests_serve_config_is_the_config_as_text() -> None:
    document = manifest(cpu=Accelerators(count=1))
    assert yaml.safe_load(document["spec"]["serveConfigV2"]) == config()


def test_a_manifest_is_yaml_that_people_can_read() -> None:
    text = to_yaml({"text": "a: 1\nb: 2\n", "numbers": [[1.5, 1e-05], [3.0, 4.0]]})
    assert text == "text: |\n  a: 1\n  b: 2\nnumbers:\n- [1.5, 1.0e-05]\n- [3.0, 4.0]\n"
    assert yaml.safe_load(to_yaml(manifest(cpu=Accelerators(count=1)))) == manifest(cpu=Accelerators(count=1))


def test_every_accelerator_type_has_a_worker_group_of_one_pod_each() -> None:
    found = groups(manifest(V100=Accelerators(count=6), cpu=Accelerators(count=2), T4=Accelerators(count=0)))
    assert {name: (each["minReplicas"], each["replicas"], each["maxReplicas"]) for name, each in found.items()} == {
        "v100": (6, 6, 6),
        "cpu": (2, 2, 2),
    }


def test_a_gpu_pod_takes_one_gpu_of_a_node_that_is_labelled_with_its_type() -> None:
    group = groups(manifest(V100=Accelerators(count=1)))["v100"]
    assert container(group)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert group["template"]["spec"]["nodeSelector"] == {"offramp/accelerator": "V100"}


def test_a_cluster_file_may_choose_its_own_node_labels() -> None:
    chosen = Accelerators(
        count=1, node_selector={"cloud.google.com/gke-accelerator": "nvidia-tesla-v100"}, labels={"a": "b"}
    )
    group = groups(manifest(V100=chosen))["v100"]
    assert group["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-tesla-v100"}
    assert group["labels"] == {"a": "b"}


@pytest.mark.parametrize(
    ("device", "resources"),
    [
        pytest.param("V100", {"accelerator_type:V100": 1}, id="a real one is told by its type"),
        pytest.param("emulated__V100", {"emulated:V100": 3}, id="emulated ones are counted"),
    ],
)
def test_custom_resources_reach_ray_as_json_through_a_shell(device: str, resources: dict[str, int]) -> None:
    [group] = groups(manifest(**{device: Accelerators(count=3)})).values()
    [word] = shlex.split(group["rayStartParams"]["resources"])
    assert json.loads(word) == resources


def test_emulated_accelerators_of_a_type_share_a_pod_that_holds_their_processes() -> None:
    group = groups(manifest(emulated__V100=Accelerators(count=16)))["emulated-v100"]
    assert group["replicas"] == 1
    assert container(group)["resources"]["limits"] == {"cpu": 2, "memory": f"{1024 + 16 * 256}Mi"}


def test_every_pod_has_the_image_the_switches_and_the_volume() -> None:
    document = manifest(cpu=Accelerators(count=1))
    cluster = document["spec"]["rayClusterConfig"]
    for pod in (cluster["headGroupSpec"]["template"], *(each["template"] for each in cluster["workerGroupSpecs"])):
        [only] = pod["spec"]["containers"]
        assert only["image"] == "registry/offramp:1"
        assert only["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
        assert only["volumeMounts"] == [{"name": "offramp", "mountPath": "/offramp"}]
        assert pod["spec"]["volumes"] == [{"name": "offramp", "persistentVolumeClaim": {"claimName": "offramp"}}]
    assert cluster["rayVersion"] == "2.60.0"


def test_with_redis_nothing_of_the_service_runs_on_the_head_and_there_is_room_for_it_elsewhere() -> None:
    document = manifest_with(Redis(address="redis:6379", secret="mine"))
    cluster = document["spec"]["rayClusterConfig"]
    assert RayService.model_validate(document).spec.rayClusterConfig.gcsFaultToleranceOptions is not None
    assert cluster["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "mine", "key": "password"}}},
    }
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    found = groups(document)
    assert (found["cpu"]["replicas"], found["front"]["replicas"]) == (3, 2)
    assert container(found["front"])["resources"]["limits"]["cpu"] == 2


def test_a_redis_without_a_secret_is_asked_without_a_password() -> None:
    cluster = manifest_with(Redis(address="redis:6379"))["spec"]["rayClusterConfig"]
    assert cluster["gcsFaultToleranceOptions"] == {"redisAddress": "redis:6379"}


def test_the_head_names_the_port_that_is_served() -> None:
    [head] = manifest(cpu=Accelerators(count=1))["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ]
    assert {each["name"]: each["containerPort"] for each in head["ports"]} == {
        "gcs": 6379,
        "dashboard": 8265,
        "serve": 9000,
    }


def test_a_grpc_port_is_in_the_config_and_beside_the_other_in_the_manifest() -> None:
    asked = serve_config(ARGS, name="demo", environment=SWITCHES, host="0.0.0.0", port=8000, grpc_port=9000)
    assert asked["grpc_options"]["port"] == 9000
    assert asked["grpc_options"]["grpc_servicer_functions"] == ["deployments.api.grpc.server:add_inference_service"]
    document = ray_service("demo", asked, inventory({"cpu": Accelerators(count=1)}), KUBERNETES)
    assert RayService.model_validate(document).metadata.name == "demo"
    ports = container(document["spec"]["rayClusterConfig"]["headGroupSpec"])["ports"]
    assert {each["name"]: each["containerPort"] for each in ports}.items() >= {("serve", 8000), ("serve-grpc", 9000)}


def test_serves_messages_may_be_twice_as_large_as_the_services() -> None:
    assert set(grpc_environment(20_000).values()) == {str(4 * 2**20)}
    assert set(grpc_environment(3_000_000).values()) == {"6000000"}


def test_names_become_those_that_kubernetes_takes() -> None:
    assert kubernetes_name("emulated:V100_x.") == "emulated-v100-x"
