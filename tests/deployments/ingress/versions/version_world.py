"""Versions of a model without Ray: an ingress of version 1, a store in memory, links to others, and a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cluster.catalogue import ClusterLink
from cluster.inventory import Accelerators, Inventory
from cluster.render import application_config
from deployments.api.endpoint import ModelVersion
from deployments.api.http import build_api
from deployments.api.operations import InferRequest
from deployments.local_ray.applications import THROUGHPUT
from deployments.settings import ServeSettings
from deployments.versions.repository import VersionRoutes
from deployments.versions.traffic import Tally, Traffic
from deployments.versions.versions import AnnouncedApp, IngressLink, RayCluster, VersionFacts, Versions
from earlyexit.errors import OfframpError
from earlyexit.network.boundary import Answer
from earlyexit.network.store import ModelCard
from tests.clock import ManualClock
from tests.deployments.ingress.api.faces import V2_BODY, FakeBackend
from tests.deployments.ingress.api.signatures import Described
from tests.model_cards import a_card

CANARY = "/v2/models/intents/canary"
DEFAULT = "/v2/models/intents/default"
PLAN = {
    "schema_version": 1,
    "stages": [{"device": "cpu", "replicas": 2, "splits": [{"first": 0, "end": 2, "batch": 8}]}],
}


def a_request(request_id: str = "r-1", *texts: str) -> InferRequest:
    texts = texts or ("pay",)
    return InferRequest(rows=texts, ids=("",) * len(texts), truncate=False, timeout_s=None, request_id=request_id)


@dataclass
class FakeServed(Described):
    """A version that answers every input with one label, or fails."""

    version: str = "1"
    label: int = 0
    exit: int = 1
    card: ModelCard = field(default_factory=a_card)
    failure: Exception | None = None
    asked: list[str] = field(default_factory=list)

    async def infer(self, request: InferRequest) -> list[Answer]:
        self.asked.append(request.request_id)
        if self.failure is not None:
            raise self.failure
        return [Answer(sample_id="", value=self.label, score=0.75, exit=self.exit) for _ in request.rows]


@dataclass(eq=False)
class FakeLink(IngressLink):
    """The ingresses of an application."""

    served: ModelVersion = field(default_factory=FakeServed)
    agreements: tuple[float | None, ...] = (None,)
    counted: Callable[[], Tally] = Tally
    gone: Exception | None = None
    one_hangs: bool = False
    """Whether one more ingress does not answer."""
    is_silent: bool = False
    """Whether it never answers a request."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False

    def __post_init__(self) -> None:
        super().__init__("fake")

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        if self.gone is not None:
            raise self.gone
        self.asked.set()
        try:
            if self.is_silent:
                await asyncio.Event().wait()
            return await self.served.infer(request)
        except OfframpError as error:
            return error
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    async def try_broadcast(self, deployment: str, method: str, *args: Any, timeout_s: float = 1.0) -> list[Any]:
        if self.gone is not None:
            return [None]
        tallies = [self.counted(), *(Tally() for _ in self.agreements[1:])]
        answered = [
            VersionFacts(card=self.served.card, version=self.served.version, agreement=each, tally=tally)
            for each, tally in zip(self.agreements, tallies, strict=True)
        ]
        return [None, *answered] if self.one_hangs else answered


@dataclass
class Held:
    """A read of the store whose answer is delayed."""

    began: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FakeCluster(RayCluster):
    """A store in memory, and a Serve that runs the applications of the last PUT, on a number of cores."""

    store: dict[str, bytes] = field(default_factory=dict)
    serving: dict[str, dict[str, Any]] = field(default_factory=dict)
    cores: int = 8
    read_s: float = 0.0  # in which another ingress may change the applications
    put_last: Mapping[str, Any] | None = None
    failures: list[Exception] = field(default_factory=list)
    """Errors that the next calls of the store raise, one after the other."""
    held: Held | None = None
    """Delays the next read of the traffic."""

    async def ask_store(self, operation: str, key: str, value: str = "", overwrite: bool = True) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        before = self.store.get(key)
        if operation == "put" and (overwrite or before is None):
            self.store[key] = value.encode()
        if operation == "del":
            del self.store[key]
        if operation == "list":
            return [each for each in self.store if each.startswith(key)]
        return before if operation == "get" else before is not None

    async def traffic(self, model: str = "intents") -> Traffic:
        found = await super().traffic(model)
        held, self.held = self.held, None
        if held is not None:
            held.began.set()
            await held.may_end.wait()
        return found

    async def applications(self) -> dict[str, Any]:
        serving = {"applications": self.serving}
        await asyncio.sleep(self.read_s)
        return serving

    async def put(self, config: Mapping[str, Any]) -> None:
        self.put_last, self.serving = config, {}
        for each in config["applications"]:
            self.run(each)

    async def inventory(self) -> Inventory:
        return Inventory(devices={"cpu": Accelerators(count=self.cores)}, link=ClusterLink(bandwidth_bytes_per_s=1.0))

    def run(self, config: Mapping[str, Any]) -> None:
        """Runs the application of a config."""
        details = {"route_prefix": config["route_prefix"], "deployed_app_config": config}
        self.serving[config["name"]] = {"status": "RUNNING", "message": "", **details}

    def add(self, app: str, version: str, status: str = "RUNNING", model: str = "intents", message: str = "") -> None:
        """Adds an application, which keeps its config if it has one."""
        self.store[f"listed/{app}"] = AnnouncedApp(app=app, model=model, version=version).model_dump_json().encode()
        self.serving[app] = self.serving.get(app, {}) | {"status": status, "message": message}


class World:
    """Application `one` gets the requests and serves version 1; `two` and `three` serve versions 2 and 3."""

    def __init__(self, folder: Path, *, control: str = "explicit", route_prefix: str = "/") -> None:
        self.folder = folder / "repository"
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "model.json").write_text(a_card().model_dump_json(), encoding="utf-8")
        self.own = FakeBackend()
        self.others = {version: FakeServed(version=version, label=1) for version in ("2", "3")}
        self.links = {
            "one": FakeLink(served=self.own, counted=lambda: self.versions.tally),
            "two": FakeLink(served=self.others["2"]),
            "three": FakeLink(served=self.others["3"]),
        }
        self.cluster, self.clock = FakeCluster(), ManualClock()
        self.slept: list[float] = []
        settings = self.settings("one", "1", route_prefix, repository={"control": control})
        link_to = self.links.__getitem__
        self.versions = Versions(self.own, self.clock, settings, self.cluster, link_to)
        self.own.versions = self.versions
        routes = VersionRoutes(self.versions, str(self.folder))
        app = build_api(self.own, routes)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        for app_name, version in (("one", "1"), ("two", "2"), ("three", "3")):
            self.cluster.add(app_name, version)

    def beside(self) -> World:
        """Returns another ingress of the cluster, which has a repository and a model of its own."""
        (folder := self.model / "beside").mkdir()
        other = World(folder)
        other.versions.cluster = self.cluster
        return other

    def settings(self, app: str, version: str, route_prefix: str, **others: Any) -> ServeSettings:
        fields = {"model": str(self.model), "plan": PLAN, "app": app, "version": version, "route_prefix": route_prefix}
        return ServeSettings.model_validate(fields | others)

    def run_on_cluster(self, app: str, version: str, route_prefix: str) -> None:
        args = json.loads(self.settings(app, version, route_prefix).model_dump_json())
        self.cluster.run(application_config(args, name=app, environment=THROUGHPUT))

    async def look(self, times: int = 1) -> None:
        """Runs the ingress's background work until it has read the store so many times."""
        until = len(self.slept) + times

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            if len(self.slept) >= until:
                raise asyncio.CancelledError

        with suppress(asyncio.CancelledError):
            await self.versions.run(sleep)

    async def ask(self, request_id: str = "r-1") -> httpx.Response:
        """Sends a request that names no version."""
        headers = {"x-request-id": request_id}
        return await self.http.post("/v2/models/intents/infer", json=V2_BODY, headers=headers)

    async def answered_by(self, request_id: str = "r-1") -> str:
        response = await self.ask(request_id)
        assert response.status_code == 200, response.text
        version: str = response.json()["model_version"]
        return version

    async def set_canary(self, version: str = "2", **shares: float) -> httpx.Response:
        return await self.http.put(CANARY, json={"version": version} | (shares or {"share": 1.0}))

    async def set_default(self, version: str) -> httpx.Response:
        return await self.http.put(DEFAULT, json={"version": version})

    async def figures(self) -> dict[str, Any]:
        """Returns what `GET .../canary` reports, once comparisons have ended."""
        await asyncio.gather(*self.versions.comparing)
        found: dict[str, Any] = (await self.http.get(CANARY)).json()
        return found


Order = Callable[[World], Awaitable[httpx.Response]]
ORDERS: dict[str, Order] = {
    "a canary": lambda world: world.set_canary(),
    "its end": lambda world: world.http.delete(CANARY),
    "a default": lambda world: world.set_default("2"),
    "load": lambda world: world.http.post("/v2/repository/models/intents/load", json={}),
    "unload": lambda world: world.http.post("/v2/repository/models/intents/unload", json={}),
}


def refused(response: httpx.Response) -> tuple[int, str]:
    """Returns the status and the message of a refusal."""
    return response.status_code, response.json()["error"]
