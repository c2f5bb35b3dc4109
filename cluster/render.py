"""Renders the configuration of Ray Serve and the manifest of KubeRay. All functions are pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from cluster.devices import find_device
from cluster.inventory import Accelerators, Inventory

BUILDER = "deployments.app:build"
GRPC_SERVICE = "deployments.api.grpc.server:add_inference_service"
LEAST_MESSAGE_BYTES = 4 * 2**20
"""Lower bound of the gRPC message limit between Serve's processes."""
ProxyLocation = Literal["HeadOnly", "EveryNode"]
NODE_LABEL = "offramp/accelerator"
"""Kubernetes label of nodes with accelerators of a type, unless the cluster file has a `node_selector`."""
VOLUME = "offramp"
MOUNT = "/offramp"
"""Mount path of the volume with the model and the controller's state."""
GIBIBYTE = 2**30
EMULATED_BYTES = 256 * 2**20
"""Memory of one replica on an emulated accelerator. It loads no model."""
FRONT, FRONT_PODS, FRONT_CPUS = "front", 2, 2
"""Group name, number and cores of the pods for ingresses and controller, if these must survive the loss of the head.
The cores include spare ones, because placement by whole actors leaves fragments."""
PASSWORD_KEY = "password"
"""The key of the password in the Redis secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubernetes:
    """Settings of a RayService besides the application."""

    image: str
    """Container image with this repository, its model runtime and Ray."""
    ray_version: str
    """The Ray version in the image."""
    claim: str = "offramp"
    """PersistentVolumeClaim (ReadWriteMany) with the model and the controller's state, which all pods mount."""
    mount: str = MOUNT
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all containers, because Ray reads Serve's variables when it starts."""
    pod_memory_bytes: int = 4 * GIBIBYTE
    """Memory of the head pod, and of a worker pod with one accelerator."""
    redis: str | None = None
    """Address (`host:port` or a URL) of the Redis in which Ray keeps the state of its head. If set, the service
    survives the loss of the head, and no part of the service runs on the head."""
    redis_secret: str | None = None
    """The Kubernetes secret that has the `password` of the Redis; None for no password."""


def serve_config(
    args: Mapping[str, Any],
    *,
    name: str,
    environment: Mapping[str, str],
    host: str,
    port: int,
    grpc_port: int | None = None,
    proxy_location: ProxyLocation = "HeadOnly",
) -> dict[str, Any]:
    """Returns the config for `serve deploy` with one application. `args`: the application's settings as plain data."""
    return {
        "proxy_location": proxy_location,
        "http_options": {"host": host, "port": port},
        **({} if grpc_port is None else {"grpc_options": grpc_options(grpc_port)}),
        "applications": [application_config(args, name=name, environment=environment)],
    }


def grpc_options(port: int) -> dict[str, Any]:
    """Returns Serve's options for a gRPC port."""
    # Reflection could list names only, because the messages are in a separate descriptor pool.
    return {"port": port, "grpc_servicer_functions": [GRPC_SERVICE], "enable_reflection": False}


def grpc_environment(max_body_bytes: int) -> dict[str, str]:
    """Returns the variables for Serve's message limits, above the service's own limit so that the service refuses."""
    limit = str(max(LEAST_MESSAGE_BYTES, 2 * max_body_bytes))
    return {"RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": limit, "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": limit}


def application_config(args: Mapping[str, Any], *, name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the application's part of Serve's config."""
    return {
        "name": name,
        "route_prefix": args.get("route_prefix", "/"),
        "import_path": BUILDER,
        "args": dict(args),
        "runtime_env": {"env_vars": dict(environment)},
        "external_scaler_enabled": True,  # the controller scales the deployments; Serve's own autoscaler is off
    }


def ray_service(name: str, config: Mapping[str, Any], inventory: Inventory, kubernetes: Kubernetes) -> dict[str, Any]:
    """Returns a KubeRay manifest: one worker group per accelerator type, one pod per accelerator.

    All emulated accelerators of a type share one pod. With Redis, a further group has pods without accelerators, and
    the head offers no cores to actors.
    """
    groups = [_worker_group(device, each, kubernetes) for device, each in inventory.devices.items() if each.count]
    if kubernetes.redis is not None:
        groups.append(_front_group(kubernetes))
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": kubernetes_name(name)},
        "spec": {
            "serveConfigV2": to_yaml(config),
            "rayClusterConfig": {
                "rayVersion": kubernetes.ray_version,
                **_fault_tolerance(kubernetes),
                "headGroupSpec": _head_group(kubernetes, _served_ports(config)),
                "workerGroupSpecs": groups,
            },
        },
    }


def to_yaml(document: Mapping[str, Any]) -> str:
    """Returns readable YAML: lists of numbers on one line, and texts of several lines as blocks."""
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=118)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as YAML blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """Returns True, because a second copy is easier to read and to edit than a YAML alias."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def kubernetes_name(name: str) -> str:
    """Returns a valid Kubernetes name: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _served_ports(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the ports under the names that KubeRay expects. Versions before March 2026 use the first one only."""
    listening = {"serve": config["http_options"], "serve-grpc": config.get("grpc_options")}
    return [{"containerPort": options["port"], "name": name} for name, options in listening.items() if options]


def _head_group(kubernetes: Kubernetes, served_ports: list[dict[str, Any]]) -> dict[str, Any]:
    container = _container("ray-head", kubernetes, cpus=2, memory_bytes=kubernetes.pod_memory_bytes)
    container["ports"] = [
        {"containerPort": 6379, "name": "gcs"},
        {"containerPort": 8265, "name": "dashboard"},
        *served_ports,
    ]
    params = {"dashboard-host": "0.0.0.0"} | ({} if kubernetes.redis is None else {"num-cpus": "0"})
    return {"rayStartParams": params, "template": _pod(container, kubernetes, {})}


def _fault_tolerance(kubernetes: Kubernetes) -> dict[str, Any]:
    """Returns KubeRay's options for GCS fault tolerance, with which nodes wait ten minutes for a new head."""
    if kubernetes.redis is None:
        return {}
    options: dict[str, Any] = {"redisAddress": kubernetes.redis}
    if kubernetes.redis_secret is not None:
        secret = {"name": kubernetes.redis_secret, "key": PASSWORD_KEY}
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": secret}}
    return {"gcsFaultToleranceOptions": options}


def _front_group(kubernetes: Kubernetes) -> dict[str, Any]:
    container = _container("ray-worker", kubernetes, cpus=FRONT_CPUS, memory_bytes=kubernetes.pod_memory_bytes)
    template = _pod(container, kubernetes, {})
    return {"groupName": FRONT, **_pods(FRONT_PODS), "rayStartParams": {}, "template": template}


def _worker_group(device: str, accelerators: Accelerators, kubernetes: Kubernetes) -> dict[str, Any]:
    options = find_device(device).actor_options
    on_gpu = "num_gpus" in options
    emulated = find_device(device).emulated
    pods, memory_bytes = accelerators.count, kubernetes.pod_memory_bytes
    if emulated:
        pods, memory_bytes = 1, GIBIBYTE + accelerators.count * EMULATED_BYTES
    # A pod with a GPU has a second core, because Ray may place an ingress there, which must not take the model's core.
    container = _container("ray-worker", kubernetes, cpus=2 if emulated or on_gpu else 1, memory_bytes=memory_bytes)
    if on_gpu:
        container["resources"]["limits"]["nvidia.com/gpu"] = 1
    group: dict[str, Any] = {
        "groupName": kubernetes_name(device),
        **_pods(pods),
        "rayStartParams": _start_params(device, accelerators.count if emulated else None),
        "template": _pod(container, kubernetes, _selector(device, accelerators, on_gpu=on_gpu)),
    }
    if accelerators.labels:
        group["labels"] = dict(accelerators.labels)
    return group


def _pods(count: int) -> dict[str, int]:
    return {"replicas": count, "minReplicas": count, "maxReplicas": count}


def _start_params(device: str, num_emulated: int | None) -> dict[str, str]:
    """Returns the `ray start` parameters with a pod's custom resources. KubeRay derives CPUs, memory and GPUs itself.

    The resources are JSON that is quoted twice, because KubeRay passes it through a shell.
    """
    options = find_device(device).actor_options
    resources = {device: num_emulated} if num_emulated is not None else {}
    if "accelerator_type" in options:
        resources = {f"accelerator_type:{options['accelerator_type']}": 1}
    return {"resources": json.dumps(json.dumps(resources))} if resources else {}


def _selector(device: str, accelerators: Accelerators, *, on_gpu: bool) -> dict[str, str]:
    if accelerators.node_selector or not on_gpu:
        return dict(accelerators.node_selector)
    return {NODE_LABEL: device}


def _container(name: str, kubernetes: Kubernetes, *, cpus: int, memory_bytes: int) -> dict[str, Any]:
    amounts = {"cpu": cpus, "memory": f"{-(-memory_bytes // 2**20)}Mi"}
    return {
        "name": name,
        "image": kubernetes.image,
        "env": [{"name": key, "value": value} for key, value in sorted(kubernetes.environment.items())],
        "resources": {"limits": dict(amounts), "requests": dict(amounts)},
        "volumeMounts": [{"name": VOLUME, "mountPath": kubernetes.mount}],
    }


def _pod(container: dict[str, Any], kubernetes: Kubernetes, selector: dict[str, str]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "containers": [container],
        "volumes": [{"name": VOLUME, "persistentVolumeClaim": {"claimName": kubernetes.claim}}],
    }
    if selector:
        spec["nodeSelector"] = selector
    return {"spec": spec}
