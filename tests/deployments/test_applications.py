from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.catalogue import ClusterLink
from cluster.inventory import Accelerators, Inventory
from cluster.render import BUILDER, serve_config
from deployments.controller.observe import room
from deployments.local_ray.applications import check_devices, claimed, with_application, without_application
from deployments.local_ray.private import find_applications, put_applications, scale_deployment
from deployments.settings import ServeSettings
from earlyexit.errors import InputError, OfframpError
from tests.deployments.ingress.versions.version_world import PLAN
from tests.deployments.serve_status import application, serving
from tests.deployments.wire_fakes import Method


def config(**args: Any) -> dict[str, Any]:
    return serve_config(args, name="demo", environment={"A": "1"}, host="0.0.0.0", port=9000)


def test_an_application_is_added_to_the_running_ones() -> None:
    before = serving(application("other"))
    put = with_application(before, config(x=1))
    kept = before["applications"]["other"]["deployed_app_config"]
    assert put["applications"] == [kept, *config(x=1)["applications"]]
    assert put["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert "grpc_options" not in put
    assert with_application({"proxy_location": None, "http_options": None, "applications": {}}, config()) == config()


def test_a_service_with_grpc_is_refused_if_serve_runs_without_grpc() -> None:
    wanted = serve_config({}, name="demo", environment={}, host="0.0.0.0", port=8000, grpc_port=9000)
    without = serving() | {"grpc_options": {"port": 9000, "grpc_servicer_functions": []}}
    with pytest.raises(InputError, match="Serve runs without gRPC at port 9000, which it can open only when it starts"):
        with_application(without, wanted)
    running = serving() | {"grpc_options": wanted["grpc_options"]}
    assert with_application(running, wanted)["grpc_options"]["port"] == 9000
    assert with_application(serving(), wanted)["grpc_options"] == wanted["grpc_options"]


def test_only_an_application_of_the_same_name_is_replaced() -> None:
    by_hand = application("hand") | {"deployed_app_config": None}
    put = with_application(serving(application("demo", route="/"), by_hand), config(x=2))
    assert [each["args"] for each in put["applications"]] == [{"x": 2}]


def test_a_route_and_a_name_of_different_applications_are_refused() -> None:
    for built in ({}, {"route_prefix": None}):  # None while Serve builds it
        other = application("other", route="/") | built
        with pytest.raises(InputError, match=r"'other' has route /; first: offramp delete other, .* ingress"):
            with_application(serving(other), config())
    with pytest.raises(InputError, match=r"'demo' has route /v2; first: offramp delete demo, or .* another name"):
        with_application(serving(application("demo", route="/v2")), config())


@pytest.mark.parametrize(
    ("serve", "words"),
    [
        pytest.param(serving(application("a")), "no application 'demo'; there are: a", id="another"),
        pytest.param(serving(), "no application 'demo'; there are: none", id="none"),
        pytest.param(
            serving(application("demo") | {"deployed_app_config": None}), "was not deployed by a config", id="by hand"
        ),
    ],
)
def test_one_application_can_be_deleted(serve: dict[str, Any], words: str) -> None:
    put = without_application(serving(application("a"), application("b")), "a")
    assert [each["name"] for each in put["applications"]] == ["b"]
    with pytest.raises(InputError, match=words):
        without_application(serve, "demo")


def test_missing_accelerators_are_refused_with_the_available_ones() -> None:
    devices = {"V100": Accelerators(count=4), "cpu": Accelerators(count=4)}
    there = Inventory(devices=devices, link=ClusterLink(bandwidth_bytes_per_s=1.0))
    check_devices({"V100": 4}, there, {})
    check_devices({"cpu": 2}, there, {"cpu": 2})
    check_devices({"cpu": 2}, there, {"V100": 5})  # a lack of accelerators of other services does not matter
    with pytest.raises(InputError, match=r"\(cpu: 3 needed, 2 of other services, 4 there\)$"):
        check_devices({"cpu": 3}, there, {"cpu": 2})
    with pytest.raises(InputError, match=r"lacks accelerators \(V100: 6 needed, 4 there; T4: 1 needed, 0 there\)$"):
        check_devices({"V100": 6, "T4": 1}, there, {})
    with pytest.raises(InputError, match="ray start --resources"):
        check_devices({"emulated:V100": 1}, there, {})


def ours(name: str, **args: Any) -> dict[str, Any]:
    """Returns an application of Offramp that uses two cores."""
    found = application(name)
    settings = {"model": "/m", "plan": PLAN} | args
    return found | {"deployed_app_config": found["deployed_app_config"] | {"import_path": BUILDER, "args": settings}}


def test_accelerators_of_other_applications_are_claimed() -> None:
    by_hand = ours("hand") | {"deployed_app_config": None}
    serve = serving(ours("a"), ours("b"), ours("demo"), application("strange"), by_hand)
    assert claimed(serve, but="demo") == {"cpu": 2 + 2}
    assert claimed(serving(), but="demo") == {}
    with pytest.raises(InputError, match="application 'new' is of another release"):
        claimed(serving(ours("new", later=1)), but="demo")


# Serve's controller


class Serve:
    """A controller that answers every call with the same value."""

    def __init__(self, answer: Any) -> None:
        self.update_deployment_replicas = self.get_serve_instance_details = self.apply_config = Method(answer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own settings, when it is imported
async def test_errors_of_serves_controller_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"SERVE_CONTROLLER_ACTOR": Serve({"applications": {}})}
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: there[name])
    await put_applications({"applications": []})
    await scale_deployment("app", "split-cpu", 0)
    there["SERVE_CONTROLLER_ACTOR"] = Serve(ValueError("application 'app' not found"))
    with pytest.raises(OfframpError, match=r"Serve's controller does not answer: .*'app' not found"):
        await scale_deployment("app", "split-cpu", 0)
    there.clear()
    with pytest.raises(OfframpError, match="Serve's controller does not answer: KeyError"):
        await find_applications()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("other", ["STARTING", "RUNNING", "PENDING_MIGRATION", "STOPPING", ""])
async def test_usable_replicas_are_counted_by_one_controller(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.controller.controller import RayFleet

    def replicas(name: str, *states: str) -> dict[str, Any]:
        return {name: {"replicas": [{"replica_id": f"{name}-{k}", "state": each} for k, each in enumerate(states)]}}

    stages = replicas("split-cpu", "RUNNING", "PENDING_MIGRATION", "RECOVERING", "STARTING")
    found = {"offramp": {"deployments": stages | replicas("controller", "RUNNING", other) if other else {}}}
    monkeypatch.setattr(ray, "get_actor", lambda *_: Serve({"applications": found}))
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="controller-0"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    with nullcontext() if other == "STARTING" else pytest.raises(OfframpError, match=r"another controller|anew"):
        assert await RayFleet(ServeSettings.model_validate({"model": "/m", "plan": PLAN})).running() == {"cpu": 3}


@pytest.mark.parametrize(
    ("device", "resources", "replicas"),
    [
        ("cpu", {"CPU": 3.9}, 3),
        ("cuda", {"CPU": 8.0, "GPU": 2.0}, 2),
        ("V100", {"CPU": 8.0, "GPU": 2.0, "accelerator_type:V100": 1.0}, 2),
        ("V100", {"CPU": 8.0, "GPU": 2.0, "accelerator_type:T4": 1.0}, 0),
        ("emulated:V100", {"CPU": 2.0, "emulated:V100": 5.0}, 5),
        ("emulated:V100", {"CPU": 2.0}, 0),
    ],
    ids=["cpu", "cuda", "its GPUs", "other GPUs", "emulated", "none"],
)
def test_a_node_needs_resources_for_all_its_processes(device: str, resources: dict[str, float], replicas: int) -> None:
    assert room(resources, device) == replicas
