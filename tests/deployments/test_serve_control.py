from __future__ import annotations

from typing import Any

import pytest

from deployments.local_ray.cluster import (
    HttpFront,
    LocalCluster,
    _check_resources,
    _dashboard_options,
    _labels,
    _resources_needed,
    _wanted_ports,
    _with_dashboard,
)
from deployments.settings import ServeSettings
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.plan import Plan, Stage
from optimizer.plan_file import plan_document
from optimizer.problem_file import problem_document
from tests.deployments.control.control_fakes import problem

HERE = "127.0.0.1"


def settings(device: str = "cpu", *, control: bool = False, **changes: Any) -> ServeSettings:
    stages = (Stage(device=device, replicas=2, splits=(Split(first=0, end=4, batch=4),)),)
    fields: dict[str, Any] = {"model": "m", "plan": plan_document(Plan(stages=stages))}
    if control:
        document = problem_document(problem())
        asked = document | {"devices": {device: {"count": 4}}, "latency": {device: document["latency"]["cpu"]}}
        fields["control"] = {"problem": asked, "policy": {"thresholds": 0.3}, "state": "control.db"}
    return ServeSettings.model_validate(fields | changes)


def test_without_a_controller_there_is_no_dashboard_and_a_core_for_every_process() -> None:
    plain = settings()
    assert _with_dashboard(plain, LocalCluster()) == plain
    assert _dashboard_options(plain) == {"include_dashboard": False}
    assert _resources_needed(plain)["CPU"] == 3  # two replicas and an ingress


def test_a_controller_is_told_where_its_dashboard_will_be() -> None:
    told = _with_dashboard(settings(control=True), LocalCluster(dashboard_port=8299))
    assert told.control is not None
    assert told.control.dashboard_url == "http://127.0.0.1:8299"
    assert _dashboard_options(told) == {
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": 8299,
    }


def test_a_service_that_may_load_versions_knows_a_dashboard_and_has_room_for_them() -> None:
    told = _with_dashboard(settings(repository={"control": "explicit"}), LocalCluster(dashboard_port=8299))
    assert (told.control, told.repository.dashboard_url) == (None, "http://127.0.0.1:8299")
    assert _dashboard_options(told)["dashboard_port"] == 8299
    assert _resources_needed(told)["CPU"] == 3 * (2 + 1)


def test_all_accelerators_of_the_problem_are_made_room_for() -> None:
    assert _resources_needed(settings(control=True))["CPU"] == 4 + 1 + 1
    needed = _resources_needed(settings("emulated:V100", control=True))
    assert (needed["CPU"], needed["emulated:V100"]) == (2, 4)


def test_accelerators_that_are_not_there_are_named() -> None:
    with pytest.raises(PlanError, match="the plan needs 2 GPUs, this machine has 0"):
        _check_resources(settings("cuda"), {"CPU": 4.0})
    with pytest.raises(PlanError, match="the plan needs V100, which this machine does not have"):
        _check_resources(settings("V100"), {"CPU": 4.0, "GPU": 2.0, "accelerator_type:T4": 1.0})


def test_one_machine_has_the_labels_of_all_nodes() -> None:
    several = settings(node_labels={"cpu": {"tier": "fast"}, "T4": {"tier": "fast", "zone": "a"}})
    assert _labels(several) == {"tier": "fast", "zone": "a"}
    with pytest.raises(PlanError, match="cannot have the label tier with 'fast' and with 'slow'"):
        _labels(settings(node_labels={"cpu": {"tier": "fast"}, "T4": {"tier": "slow"}}))


def test_the_ports_that_must_be_free_are_those_of_the_front_and_of_what_else_is_asked_for() -> None:
    for front in ("proxy", "direct"):
        assert _wanted_ports(LocalCluster(front=front)) == [(HERE, 8000)]
    assert _wanted_ports(LocalCluster(front="proxy", grpc_port=9000, host="::1")) == [("::1", 8000), ("::1", 9000)]
    assert _wanted_ports(LocalCluster(front="direct", metrics_port=8001)) == [(HERE, 8000), (HERE, 8001)]
    pages = [(HERE, 8404), (HERE, 9101)]
    assert _wanted_ports(LocalCluster(front="haproxy", host="10.1.2.3")) == [("10.1.2.3", 8000), *pages]
    wanted = _wanted_ports(LocalCluster(front="haproxy", grpc_port=9000))
    assert wanted == [(HERE, 8000), (HERE, 9000), *pages, (HERE, 9500)]


@pytest.mark.parametrize(
    ("host", "metrics_port", "front", "ray_address", "serve_host"),
    [
        (HERE, 8001, "haproxy", HERE, HERE),
        ("10.1.2.3", 8001, "haproxy", HERE, HERE),
        ("10.1.2.3", None, "proxy", HERE, "10.1.2.3"),
        ("0.0.0.0", None, "haproxy", HERE, HERE),
        ("0.0.0.0", 8001, "haproxy", None, "0.0.0.0"),  # all that reach the service read the metrics too
    ],
)
def test_what_is_for_the_service_alone_listens_on_loopback(
    host: str, metrics_port: int | None, front: HttpFront, ray_address: str | None, serve_host: str
) -> None:
    cluster = LocalCluster(host=host, metrics_port=metrics_port, front=front)
    assert (cluster.ray_address, cluster.serve_host) == (ray_address, serve_host)
