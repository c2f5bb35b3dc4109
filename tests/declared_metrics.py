"""Prints name, kind and labels of every instrument that some process of a service makes, as JSON.

A process of its own, because Serve cannot be imported where warnings are errors.
"""

from __future__ import annotations

import json

from ray.util.metrics import Metric

from deployments.controller.controller import ControlMetrics
from deployments.ingress_deployment import GenerationMetrics, IngressMetrics
from deployments.replica.replica import StageMetrics
from deployments.versions.metrics import VersionMetrics
from earlyexit.network.chain import Chain


def main() -> list[tuple[str, str, tuple[str, ...]]]:
    stage, chain = StageMetrics("cpu"), Chain(names=("model",), lengths=(1,))
    owners = [IngressMetrics(chain), stage, ControlMetrics(), VersionMetrics(), GenerationMetrics()]
    instruments = [each for owner in owners for each in vars(owner).values() if isinstance(each, Metric)]
    return [(each.info["name"], type(each).__name__.lower(), each.info["tag_keys"]) for each in instruments]


if __name__ == "__main__":
    print(json.dumps(main()))  # noqa: T201 # the test reads it
