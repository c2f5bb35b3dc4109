from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.render import BUILDER, application_config
from deployments.api.bodies import Canary, LoadParameters
from deployments.local_ray.start import THROUGHPUT
from deployments.settings import RepositorySettings, ServeSettings
from deployments.versions.repository import Repository
from deployments.versions.store import IndexRow, Listed
from deployments.versions.versions import Versions
from earlyexit.clock import ManualClock
from earlyexit.errors import ControlRefusedError, InputError, ModelFolderError, PlanError, UnknownModelError
from tests.deployments.ingress.versions.version_fakes import FakeCluster, FakeLink, FakeServed, FakeStore, card

PLAN = {
    "schema_version": 1,
    "stages": [{"device": "cpu", "replicas": 2, "splits": [{"first": 0, "end": 2, "batch": 8}]}],
}


class Scene:
    """Version 1 of `intents` runs as application `one`; a folder holds the model."""

    def __init__(self, folder: Path, *, control: str = "explicit") -> None:
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "model.json").write_text(card().model_dump_json(), encoding="utf-8")
        self.folder = folder / "repository"
        self.store = FakeStore()
        self.cluster = FakeCluster()
        self.run("one", "1", "/")
        settings = self.settings("one", "1", "/", repository=RepositorySettings.model_validate({"control": control}))
        links = {"one": FakeLink(), "two": FakeLink(served=FakeServed(version="2"))}
        self.versions = Versions(FakeServed(), settings, self.store, links.__getitem__, ManualClock(), print)
        self.repository = Repository(self.versions, self.store, self.cluster, str(self.folder))

    def settings(self, app: str, version: str, route_prefix: str, **others: Any) -> ServeSettings:
        fields = {"model": str(self.model), "plan": PLAN, "app": app, "version": version, "route_prefix": route_prefix}
        return ServeSettings.model_validate(fields | others)

    def second(self, **others: Any) -> ServeSettings:
        return self.settings(**{"app": "two", "version": "2", "route_prefix": "/v2/models/intents/versions/2"} | others)

    def run(self, app: str, version: str, route_prefix: str) -> None:
        args = json.loads(self.settings(app, version, route_prefix).model_dump_json())
        self.cluster.configs[app] = application_config(args, name=app, environment=THROUGHPUT)
        self.store.add(app, version)

    def put_in_folder(self, settings: ServeSettings) -> None:
        path = self.folder / "intents" / settings.version / "settings.json"
        path.parent.mkdir(parents=True)
        path.write_text(settings.model_dump_json(), encoding="utf-8")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def config(settings: ServeSettings) -> LoadParameters:
    return LoadParameters(config=settings.model_dump_json())


async def test_a_loaded_version_is_put_beside_the_others_and_listed(scene: Scene) -> None:
    before = scene.cluster.configs["one"]
    await scene.repository.load("intents", config(scene.second()))
    assert scene.cluster.put_last is not None
    first, second = scene.cluster.put_last["applications"]
    assert first == before
    assert (second["name"], second["route_prefix"], second["import_path"]) == (
        "two",
        "/v2/models/intents/versions/2",
        BUILDER,
    )
    assert ServeSettings.model_validate(second["args"]) == scene.second()
    assert scene.store.of_apps["two"] == Listed(app="two", model="intents", version="2")


async def test_a_version_of_the_folder_is_listed_and_loaded_by_its_name(scene: Scene) -> None:
    scene.put_in_folder(scene.second())
    row = IndexRow(name="intents", version="2", state="UNAVAILABLE", reason="not loaded")
    assert (await scene.repository.index())[1:] == [row]
    assert [each.version for each in await scene.repository.index(ready_only=True)] == ["1"]
    await scene.repository.load("intents", LoadParameters())
    assert set(scene.cluster.configs) == {"one", "two"}


async def test_of_several_versions_in_the_folder_one_must_be_named(scene: Scene) -> None:
    scene.put_in_folder(scene.second())
    scene.put_in_folder(scene.second(app="three", version="3", route_prefix="/v2/models/intents/versions/3"))
    with pytest.raises(
        InputError, match=r"parameters\.version is needed: the repository has 'intents' as versions '2', '3'"
    ):
        await scene.repository.load("intents", LoadParameters())
    await scene.repository.load("intents", LoadParameters(version="3"))
    assert set(scene.cluster.configs) == {"one", "three"}


async def test_what_is_not_in_the_folder_is_not_loaded(scene: Scene) -> None:
    with pytest.raises(UnknownModelError, match="the repository has no version '2' of 'intents'; it has none"):
        await scene.repository.load("intents", LoadParameters(version="2"))


@pytest.mark.parametrize(
    ("others", "error", "words"),
    [
        pytest.param({"app": "one"}, InputError, "'one' serves version '1' of 'intents'", id="the name is another's"),
        pytest.param({"version": "1"}, InputError, "'one' serves version '1'", id="the version is there"),
        pytest.param({"route_prefix": "/"}, InputError, "application 'one' has route /", id="the route is taken"),
        pytest.param({"model": "/nowhere"}, ModelFolderError, "not a model folder", id="no model"),
        pytest.param({"plan": {"schema_version": 1}}, PlanError, "`chains`", id="no plan"),
    ],
)
async def test_settings_that_cannot_run_beside_the_others_are_refused(
    scene: Scene, others: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await scene.repository.load("intents", config(scene.second(**others)))
    assert (scene.cluster.put_last, set(scene.store.of_apps)) == (None, {"one"})


async def test_settings_of_another_model_or_version_than_asked_for_are_refused(scene: Scene) -> None:
    with pytest.raises(InputError, match="the settings are of model 'intents', not of 'other'"):
        await scene.repository.load("other", config(scene.second()))
    parameters = LoadParameters(config=scene.second().model_dump_json(), version="3")
    with pytest.raises(InputError, match="the settings are of version '2', not of '3'"):
        await scene.repository.load("intents", parameters)
    with pytest.raises(InputError, match="max_queued"):
        await scene.repository.load("intents", config(scene.second().model_copy(update={"max_queued": 0})))


async def test_accelerators_of_the_others_are_taken(scene: Scene) -> None:
    scene.cluster.cores = 3
    with pytest.raises(InputError, match=r"cpu: 2 in the file, 2 of other services, 3 there"):
        await scene.repository.load("intents", config(scene.second()))
    scene.cluster.cores = 4
    await scene.repository.load("intents", config(scene.second()))
    await scene.repository.load("intents", config(scene.second(max_queued=7)))  # its own are not another's
    assert scene.cluster.configs["two"]["args"]["max_queued"] == 7


async def test_an_unloaded_version_is_left_out_of_what_serve_runs(scene: Scene) -> None:
    scene.run("two", "2", "/v2/models/intents/versions/2")
    await scene.repository.unload("intents", LoadParameters(version="2"))
    assert set(scene.cluster.configs) == {"one"}


async def test_a_version_that_answers_requests_is_not_unloaded(scene: Scene) -> None:
    scene.run("two", "2", "/v2/models/intents/versions/2")
    await scene.versions.set_canary(Canary(version="2", share=0.1))
    for version in ("1", "2"):
        with pytest.raises(InputError, match="version"):
            await scene.repository.unload("intents", LoadParameters(version=version))
    assert set(scene.cluster.configs) == {"one", "two"}


async def test_what_is_not_loaded_is_not_unloaded(scene: Scene) -> None:
    with pytest.raises(UnknownModelError, match="version '2' of 'intents' is not loaded; there are '1'"):
        await scene.repository.unload("intents", LoadParameters(version="2"))
    scene.run("two", "2", "/v2/models/intents/versions/2")
    with pytest.raises(InputError, match=r"parameters\.version is needed: 'intents' is loaded as versions '1', '2'"):
        await scene.repository.unload("intents", LoadParameters())


async def test_without_explicit_control_nothing_is_loaded_or_unloaded(tmp_path: Path) -> None:
    scene = Scene(tmp_path, control="none")
    with pytest.raises(ControlRefusedError):
        await scene.repository.load("intents", config(scene.second()))
    with pytest.raises(ControlRefusedError):
        await scene.repository.unload("intents", LoadParameters(version="1"))
    assert scene.cluster.put_last is None
