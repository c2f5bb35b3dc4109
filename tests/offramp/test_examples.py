"""The files in examples/ are read as a reader would have them read, with stand-ins for what their commands make."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.inventory_file import read_inventory
from cluster.render import Kubernetes, ray_service, serve_config
from deployments.api.parsing import parse_predict
from deployments.settings import ServeSettings
from offramp.spec.file import read_service
from optimizer.decision import Decision, Strategy
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from tests.cluster.kuberay_schema import RayService
from tests.deployments.ingress.api.signatures import TEXT

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNTS = {
    "laptop": {"cpu": 2},
    "cascade": {"cpu": 2},
    "v100_16": {"emulated:V100": 16},
    "e3_mixed": {"emulated:V100": 6, "emulated:P100": 8, "emulated:K80": 15},
}


def quickly(problem: PlanProblem, strategy: Strategy) -> Decision:
    """A plan of the smallest space: which one is best is the planner's own tests' to say."""
    return solve(problem, "serial")


def printed_by(script: Path, *arguments: object) -> str:
    """What a script of the examples prints, run from the repository as a reader runs it."""
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=EXAMPLES.parent,
        env={"PYTHONPATH": str(EXAMPLES.parent)},
    ).stdout


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_every_example_is_read_and_rendered(examples: Path, name: str) -> None:
    service = read_service(examples / f"{name}.yaml", quickly)
    assert service.inventory.counts == COUNTS[name]
    assert service.settings.control is not None
    assert service.settings.control.problem.devices.keys() == COUNTS[name].keys()
    config = serve_config(service.settings.model_dump(), name=name, environment={}, host="0.0.0.0", port=8000)
    kubernetes = Kubernetes(image="offramp", ray_version="2.60.0")
    assert RayService.model_validate(ray_service(name, config, service.inventory, kubernetes))


def test_every_service_is_read_above_and_the_manifest_is_of_the_mixed_cluster() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(COUNTS)
    manifest = RayService.model_validate(yaml.safe_load((EXAMPLES / "kuberay/rayservice.yaml").read_text("utf-8")))
    [application] = yaml.safe_load(manifest.spec.serveConfigV2)["applications"]
    settings = ServeSettings.model_validate(application["args"])
    assert settings.plan.num_blocks == 12
    assert settings.control is not None
    devices = settings.control.problem.devices
    assert {name: supply.count for name, supply in devices.items()} == COUNTS["e3_mixed"]
    groups = manifest.spec.rayClusterConfig.workerGroupSpecs
    assert {each.groupName for each in groups} == {"emulated-v100", "emulated-p100", "emulated-k80"}


@pytest.mark.parametrize("name", ["v100_16", "e3_mixed"])
def test_the_request_that_an_emulated_example_shows_is_accepted(name: str) -> None:
    [body] = re.findall(r"-d '(.*)'", (EXAMPLES / f"{name}.yaml").read_text("utf-8"))
    assert parse_predict(body.encode(), TEXT.codec)[0].ids == ("0", "1")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("clusters/*.yaml")), ids=lambda path: path.stem)
def test_every_cluster_among_the_examples_costs_what_e3s_did(path: Path) -> None:
    inventory = read_inventory(path)
    usd_per_hour = sum(each.count * (each.usd_per_hour or 0.0) for each in inventory.devices.values())
    assert usd_per_hour / 3600 == pytest.approx(0.013, abs=0.0005)
