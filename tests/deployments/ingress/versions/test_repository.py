"""Triton's repository extension over HTTP: the index, loading and unloading."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.render import BUILDER
from deployments.keys import AccessSettings
from deployments.settings import ServeSettings
from deployments.versions.versions import AnnouncedApp
from tests.deployments.ingress.versions.version_world import World, refused

SECOND = "/v2/models/intents/versions/2"


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Only version 1 runs."""
    world = World(tmp_path)
    for app in ("two", "three"):
        del world.cluster.store[f"listed/{app}"], world.cluster.serving[app]
    world.run_on_cluster("one", "1", "/")
    return world


def second(world: World, **others: Any) -> ServeSettings:
    return world.settings(**{"app": "two", "version": "2", "route_prefix": SECOND} | others)


def put_in_folder(world: World, settings: ServeSettings) -> None:
    path = world.folder / "intents" / settings.version / "settings.json"
    path.parent.mkdir(parents=True)
    path.write_text(settings.model_dump_json(), encoding="utf-8")


async def order(world: World, what: str, model: str = "intents", **parameters: Any) -> httpx.Response:
    return await world.http.post(f"/v2/repository/models/{model}/{what}", json={"parameters": parameters})


async def load(world: World, settings: ServeSettings) -> httpx.Response:
    return await order(world, "load", config=settings.model_dump_json())


async def index(world: World, body: bytes = b"") -> Any:
    return (await world.http.post("/v2/repository/index", content=body)).json()


async def test_the_index_has_serves_applications_with_tritons_states(world: World) -> None:
    statuses = {"two": "DEPLOYING", "three": "DEPLOY_FAILED", "four": "DELETING"}
    for version, (app, status) in enumerate(statuses.items(), start=2):
        world.cluster.add(app, str(version), status, message="why" if app == "three" else "")
    world.cluster.add("gone", "9")
    del world.cluster.serving["gone"]
    assert await index(world, b"{}") == [
        {"name": "intents", "version": "1", "state": "READY", "reason": ""},
        {"name": "intents", "version": "2", "state": "LOADING", "reason": "two is DEPLOYING"},
        {"name": "intents", "version": "3", "state": "UNAVAILABLE", "reason": "three is DEPLOY_FAILED: why"},
        {"name": "intents", "version": "4", "state": "UNLOADING", "reason": "four is DELETING"},
    ]
    assert [row["version"] for row in await index(world, b'{"ready": true}')] == ["1"]


async def test_the_running_application_of_a_version_is_preferred(world: World) -> None:
    world.cluster.add("two", "2", "DEPLOYING")
    world.cluster.add("three", "2")
    world.others["3"].version = "2"
    await world.set_canary()
    await world.answered_by()
    assert (world.others["2"].asked, world.others["3"].asked) == ([], ["r-1"])


async def test_loaded_versions_are_added_also_if_two_ingresses_load_at_the_same_time(world: World) -> None:
    before = world.cluster.serving["one"]["deployed_app_config"]
    assert (await load(world, second(world))).json() == {}
    assert world.cluster.put_last is not None
    first, loaded = world.cluster.put_last["applications"]
    assert first == before
    assert (loaded["name"], loaded["route_prefix"], loaded["import_path"]) == ("two", SECOND, BUILDER)
    assert ServeSettings.model_validate(loaded["args"]) == second(world)
    access = AccessSettings(keys_env="KEYS")
    world.versions.settings = world.versions.settings.model_copy(update={"access": access})
    await load(world, second(world))
    assert world.cluster.serving["two"]["deployed_app_config"]["args"]["access"] == access.model_dump(mode="json")
    assert AnnouncedApp(app="two", model="intents", version="2") in await world.cluster.announced()
    settings = (second(world, app=each, version=each, route_prefix=f"/{each}") for each in ("3", "4"))
    world.cluster.read_s = 0.1
    loads = map(load, (world, world.beside()), settings)
    assert [each.status_code for each in await asyncio.gather(*loads)] == [200, 200]
    assert set(world.cluster.serving) == {"one", "two", "3", "4"}


async def test_a_version_of_the_folder_is_listed_and_loaded_by_name(world: World) -> None:
    missing = "the repository has no version '2' of 'intents'; it has none"
    assert refused(await order(world, "load", version="2")) == (404, missing)
    put_in_folder(world, second(world))
    row = {"name": "intents", "version": "2", "state": "UNAVAILABLE", "reason": "not loaded"}
    assert (await index(world))[1:] == [row]
    assert [row["version"] for row in await index(world, b'{"ready": true}')] == ["1"]
    put_in_folder(world, second(world, app="three", version="3", route_prefix="/three"))
    several = "parameters.version is needed: the repository has 'intents' as versions '2', '3'"
    assert refused(await order(world, "load")) == (400, several)
    await order(world, "load", version="3", unload_dependents=False)
    assert set(world.cluster.serving) == {"one", "three"}
    unknown = "the repository has no version of 'other'; it has none"
    assert refused(await order(world, "load", model="other")) == (404, unknown)
    (world.folder / "intents" / "3" / "settings.json").write_text("{", encoding="utf-8")
    assert "3/settings.json: the body is not valid JSON" in refused(await order(world, "load", version="3"))[1]


BAD_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str], int, str]] = {
    "the name is another's": ({"app": "one"}, {}, 400, "'one' serves version '1' of 'intents'"),
    "the version is there": ({"version": "1"}, {}, 400, "'one' serves version '1'"),
    "the route is taken": ({"route_prefix": "/"}, {}, 400, "application 'one' has route /"),
    "no field": ({"x": 1}, {}, 400, "parameters.config: x: unknown field"),
    "no model": ({"model": "n" * 300}, {}, 422, "not a model folder"),
    "no plan": ({"plan": {"schema_version": 1}}, {}, 422, "`chains`"),
    "another model": ({}, {"model": "other"}, 400, "the settings are of model 'intents', not of 'other'"),
    "another version": ({}, {"version": "3"}, 400, "the settings are of version '2', not of '3'"),
}


@pytest.mark.parametrize(("others", "asked", "status", "words"), BAD_SETTINGS.values(), ids=list(BAD_SETTINGS))
async def test_settings_that_cannot_run_beside_the_others_are_refused(
    world: World, others: dict[str, Any], asked: dict[str, str], status: int, words: str
) -> None:
    config = second(world).model_dump(mode="json") | others
    found, message = refused(await order(world, "load", **{"config": json.dumps(config)} | asked))
    assert (found, words in message) == (status, True), message
    assert (world.cluster.put_last, len(await world.cluster.announced())) == (None, 1)


async def test_a_page_of_another_site_loads_nothing(world: World) -> None:
    for origin, status in (("https://page.example", 403), ("null", 403), ("http://test", 200)):
        world.http.headers["origin"] = origin
        assert (await load(world, second(world))).status_code == status, origin


async def test_accelerators_of_other_versions_are_not_available(world: World) -> None:
    world.cluster.cores = 3
    status, message = refused(await load(world, second(world)))
    assert (status, "cpu: 2 needed, 2 of other services, 3 there" in message) == (400, True)
    world.cluster.serving["one"]["deployed_app_config"] = None  # `offramp serve` started it
    assert refused(await load(world, second(world))) == (400, message)
    world.cluster.cores = 4
    await load(world, second(world, node_labels={"cpu": {"tier": "fast"}}))
    assert world.cluster.serving["two"]["deployed_app_config"]["args"]["node_labels"] == {}, "one machine has none"
    world.run_on_cluster("one", "1", "/")
    await load(world, second(world, max_queued=7))  # its own are not another's
    assert world.cluster.serving["two"]["deployed_app_config"]["args"]["max_queued"] == 7


async def test_an_unloaded_version_is_removed_from_serve(world: World) -> None:
    unknown = "the cluster has no version '2' of 'intents'; it has '1'"
    assert refused(await order(world, "unload", version="2")) == (404, unknown)
    world.run_on_cluster("two", "2", SECOND)
    world.cluster.add("two", "2")
    several = "parameters.version is needed: the cluster has 'intents' as versions '1', '2'"
    assert refused(await order(world, "unload")) == (400, several)
    assert (await order(world, "unload", version="2")).json() == {}
    assert set(world.cluster.serving) == {"one"}


async def test_a_version_that_answers_requests_is_not_unloaded(world: World) -> None:
    world.run_on_cluster("two", "2", SECOND)
    world.cluster.add("two", "2")
    await world.set_canary(share=0.1)
    canary = refused(await order(world, "unload", version="2"))
    assert canary == (400, "version '2' is the canary; end that first")
    await world.set_default("2")
    for version, end in (("1", "unloaded"), ("2", "unloaded until another one is the default")):
        message = f"version '{version}' answers requests that name none; it cannot be {end}"
        assert refused(await order(world, "unload", version=version)) == (400, message)
    assert set(world.cluster.serving) == {"one", "two"}
    for app, version, route in (("pics", "1", "/pics"), ("pics-2", "2", "/v2/models/pics/versions/2")):
        world.run_on_cluster(app, version, route)
        world.cluster.add(app, version, model="pics")
    message = "version '1' answers requests that name none; it cannot be unloaded"
    assert refused(await order(world, "unload", "pics", version="1")) == (400, message), "at another model's root"
    assert (await order(world, "unload", "pics", version="2")).json() == {}
    assert set(world.cluster.serving) == {"one", "two", "pics"}
