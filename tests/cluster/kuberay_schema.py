"""The fields of KubeRay's RayService that our manifests may use, with their types.

From ray-project/kuberay, ray-operator/apis/ray/v1: rayservice_types.go @ 834fe3a876c5b5631ffc2e33f82dca3a6f31137d and
raycluster_types.go @ 3275ee09f6a6c899c37e82ea6349785536de6bd4; `labels` of a worker group from KubeRay 1.5
(ray-cluster-label-selector.yaml among its samples). Pods are Kubernetes' core/v1.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, create_model


def strict(**fields: Any) -> Any:
    """Returns a model of exactly these fields: each a type, or a type and its default."""
    return create_model("Strict", __config__=ConfigDict(extra="forbid", strict=True), **fields)


def many(kind: Any) -> Any:
    """Returns the type of lists of a model."""
    return list.__class_getitem__(kind)


NAMES = dict[str, str]
NAME = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
AMOUNTS = dict[str, int | str]
CONTAINER = strict(
    name=str,
    image=str,
    env=(many(strict(name=str, value=str)), []),
    ports=(many(strict(containerPort=int, name=Annotated[str, Field(max_length=15)])), []),
    resources=strict(limits=AMOUNTS, requests=AMOUNTS),
    volumeMounts=(many(strict(name=str, mountPath=str)), []),
)
POD = strict(
    containers=Annotated[many(CONTAINER), Field(min_length=1)],
    volumes=(many(strict(name=str, persistentVolumeClaim=strict(claimName=str))), []),
    nodeSelector=(NAMES, {}),
)
HEAD = strict(rayStartParams=NAMES, template=strict(spec=POD))
COUNTS = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), int)
WORKERS = strict(groupName=NAME, rayStartParams=NAMES, template=strict(spec=POD), labels=(NAMES, {}), **COUNTS)
SECRET = strict(valueFrom=strict(secretKeyRef=strict(name=str, key=str)))
FAULT_TOLERANCE = strict(redisAddress=str, redisPassword=(SECRET | None, None))
CLUSTER = strict(
    rayVersion=str,
    gcsFaultToleranceOptions=(FAULT_TOLERANCE | None, None),
    headGroupSpec=HEAD,
    workerGroupSpecs=many(WORKERS),
)
RayService = strict(
    apiVersion=Annotated[str, Field(pattern="^ray.io/v1$")],
    kind=Annotated[str, Field(pattern="^RayService$")],
    metadata=strict(name=NAME),
    spec=strict(serveConfigV2=str, rayClusterConfig=CLUSTER),
)
