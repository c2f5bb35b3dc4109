"""The fields of KubeRay's RayService that a manifest of ours may use, with their types.

From ray-project/kuberay, ray-operator/apis/ray/v1: rayservice_types.go @ 834fe3a876c5b5631ffc2e33f82dca3a6f31137d and
raycluster_types.go @ 3275ee09f6a6c899c37e82ea6349785536de6bd4; `labels` of a worker group from KubeRay 1.5
(ray-cluster-label-selector.yaml among its samples). Pods are Kubernetes' core/v1.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Port(Strict):
    containerPort: int
    name: Annotated[str, Field(max_length=15)]


class EnvironmentVariable(Strict):
    name: str
    value: str


class Resources(Strict):
    limits: dict[str, int | str]
    requests: dict[str, int | str]


class VolumeMount(Strict):
    name: str
    mountPath: str


class Container(Strict):
    name: str
    image: str
    env: list[EnvironmentVariable] = []
    ports: list[Port] = []
    resources: Resources
    volumeMounts: list[VolumeMount] = []


class Claim(Strict):
    claimName: str


class Volume(Strict):
    name: str
    persistentVolumeClaim: Claim


class PodSpec(Strict):
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume] = []
    nodeSelector: dict[str, str] = {}


class PodTemplate(Strict):
    spec: PodSpec


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroup(Strict):
    groupName: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    replicas: int
    minReplicas: int
    maxReplicas: int
    rayStartParams: dict[str, str]
    template: PodTemplate
    labels: dict[str, str] = {}


class SecretKey(Strict):
    name: str
    key: str


class ValueSource(Strict):
    secretKeyRef: SecretKey


class RedisCredential(Strict):
    valueFrom: ValueSource


class FaultTolerance(Strict):
    redisAddress: str
    redisPassword: RedisCredential | None = None


class RayClusterSpec(Strict):
    rayVersion: str
    gcsFaultToleranceOptions: FaultTolerance | None = None
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayServiceSpec(Strict):
    serveConfigV2: str
    rayClusterConfig: RayClusterSpec


class Metadata(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class RayService(Strict):
    apiVersion: Annotated[str, Field(pattern="^ray.io/v1$")]
    kind: Annotated[str, Field(pattern="^RayService$")]
    metadata: Metadata
    spec: RayServiceSpec
