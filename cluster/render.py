"""Documents that other systems read: Serve's config and KubeRay's manifest. Nothing is asked, nothing is written."""

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
"""Ray Serve's own limit between its processes; what it also sends there is small."""
ProxyLocation = Literal["HeadOnly", "EveryNode"]
NODE_LABEL = "offramp/accelerator"
"""Kubernetes' label of a node with accelerators of a type, where the cluster file names no other."""
VOLUME = "offramp"
MOUNT = "/offramp"
"""Where all pods find the model, and the controller what it remembers."""
GIBIBYTE = 2**30
EMULATED_BYTES = 256 * 2**20
"""Of one emulated replica: a process that computes nothing."""
FRONT, FRONT_PODS, FRONT_CPUS = "front", 2, 2
"""Where a lost head must not take ingresses and controller along: as many cores more as they, and what they break up of
other pods' cores, can need."""
PASSWORD_KEY = "password"
"""Of the secret with Redis' password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redis:
    """Where Ray keeps what would be lost with its head."""

    address: str
    """`host:port`, or a URL of Redis'."""
    secret: str | None = None
    """A secret of Kubernetes whose `password` it asks for; None: it asks for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubernetes:
    """What a RayService needs beside the service."""

    image: str
    """With this repository, its model runtime and Ray installed."""
    ray_version: str
    """That of the image."""
    claim: str = "offramp"
    """A volume claim that all pods mount (ReadWriteMany): the model and what the controller remembers."""
    mount: str = MOUNT
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every container: Serve's switches are read when Ray starts."""
    pod_memory_bytes: int = 4 * GIBIBYTE
    """Of the head, and of a worker with one accelerator."""
    redis: Redis | None = None
    """With one the service outlives the head: nothing of it runs there."""


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
    """What `serve deploy` takes, for one application; `args` are its settings as plain data."""
    return {
        "proxy_location": proxy_location,
        "http_options": {"host": host, "port": port},
        **({} if grpc_port is None else {"grpc_options": grpc_options(grpc_port)}),
        "applications": [application_config(args, name=name, environment=environment)],
    }


def grpc_options(port: int) -> dict[str, Any]:
    """The gRPC port, as Serve takes it."""
    # Reflection would only give names: the messages are in a descriptor pool of their own.
    return {"port": port, "grpc_servicer_functions": [GRPC_SERVICE], "enable_reflection": False}


def grpc_environment(max_body_bytes: int) -> dict[str, str]:
    """How large a message Serve takes: somewhat more than the service, so that mostly the service says no."""
    most = str(max(LEAST_MESSAGE_BYTES, 2 * max_body_bytes))
    return {"RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": most, "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": most}


def application_config(args: Mapping[str, Any], *, name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The application's part of Serve's config."""
    return {
        "name": name,
        "route_prefix": args.get("route_prefix", "/"),
        "import_path": BUILDER,
        "args": dict(args),
        "runtime_env": {"env_vars": dict(environment)},
        "external_scaler_enabled": True,  # the controller scales slots; Serve's own autoscaling never does
    }


def ray_service(name: str, config: Mapping[str, Any], inventory: Inventory, kubernetes: Kubernetes) -> dict[str, Any]:
    """A KubeRay manifest: one worker group per accelerator type, one pod per accelerator.

    Emulated accelerators of a type share one pod. With Redis there are pods without accelerators besides, and the head
    has no cores for replicas.
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
                **_fault_tolerance(kubernetes.redis),
                "headGroupSpec": _head_group(kubernetes, _served_ports(config)),
                "workerGroupSpecs": groups,
            },
        },
    }


def to_yaml(document: Mapping[str, Any]) -> str:
    """YAML for people: rows of numbers on one line, texts of several lines as they are."""
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=118)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand in a block of their own."""

    def ignore_aliases(self, data: Any) -> bool:
        """A second copy is easier to read, and to change, than a reference."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def kubernetes_name(name: str) -> str:
    """A name as Kubernetes takes it: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _served_ports(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By these names KubeRay puts them into the service; one of before March 2026 only the first."""
    ports = [{"containerPort": config["http_options"]["port"], "name": "serve"}]
    if "grpc_options" in config:
        ports.append({"containerPort": config["grpc_options"]["port"], "name": "serve-grpc"})
    return ports


def _head_group(kubernetes: Kubernetes, served_ports: list[dict[str, Any]]) -> dict[str, Any]:
    container = _container("ray-head", kubernetes, cpus=2, memory_bytes=kubernetes.pod_memory_bytes)
    container["ports"] = [
        {"containerPort": 6379, "name": "gcs"},
        {"containerPort": 8265, "name": "dashboard"},
        *served_ports,
    ]
    params = {"dashboard-host": "0.0.0.0"} | ({} if kubernetes.redis is None else {"num-cpus": "0"})
    return {"rayStartParams": params, "template": _pod(container, kubernetes, {})}


def _fault_tolerance(redis: Redis | None) -> dict[str, Any]:
    """What KubeRay makes Ray's own variables of; the nodes then wait ten minutes for a new head."""
    if redis is None:
        return {}
    options: dict[str, Any] = {"redisAddress": redis.address}
    if redis.secret is not None:
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": {"name": redis.secret, "key": PASSWORD_KEY}}}
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
    # Beside a model on a GPU there is room for an ingress: one that Ray puts there must not take the model's core.
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
    """Custom resources only: KubeRay reads CPUs, memory and GPUs off the container's limits.

    `ray start` takes them as JSON, and KubeRay passes it through a shell: quoted twice.
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
