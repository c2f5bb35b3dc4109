"""Versions without Ray: a store in memory, links that answer or are gone, and a cluster that keeps what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.catalogue import ClusterLink
from cluster.inventory import Accelerators, Inventory
from deployments.api.bodies import Canary, InferRequest, LoadParameters
from deployments.api.endpoint import VersionFacts
from deployments.versions.choice import Tally, Traffic
from deployments.versions.repository import RayCluster
from deployments.versions.store import AppStatus, IndexRow, Listed, RayStore
from earlyexit.errors import OfframpError
from earlyexit.network.store import ModelCard
from earlyexit.network.wire import Answer
from tests.deployments.ingress.api.signatures import Described
from tests.model_cards import a_card

RUNNING = AppStatus(status="RUNNING")


def card(name: str = "intents", labels: tuple[str, ...] = ("bill", "card")) -> ModelCard:
    return a_card(labels, name=name)


def a_request(request_id: str = "r-1", *texts: str) -> InferRequest:
    texts = texts or ("pay",)
    return InferRequest(rows=texts, ids=("",) * len(texts), truncate=False, timeout_s=None, request_id=request_id)


@dataclass
class FakeServed(Described):
    """A version that gives every input one label, or fails."""

    version: str = "1"
    label: int = 0
    exit: int = 1
    card: ModelCard = field(default_factory=card)
    failure: Exception | None = None
    asked: list[str] = field(default_factory=list)

    async def infer(self, request: InferRequest) -> list[Answer]:
        self.asked.append(request.request_id)
        if self.failure is not None:
            raise self.failure
        return [Answer(sample_id="", value=self.label, score=0.75, exit=self.exit) for _ in request.rows]


@dataclass
class FakeLink:
    """The ingresses of an application."""

    served: FakeServed = field(default_factory=FakeServed)
    agreements: tuple[float | None, ...] = (None,)
    counted: tuple[Tally, ...] = ()
    gone: Exception | None = None

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        self._check()
        try:
            return await self.served.infer(request)
        except OfframpError as error:
            return error

    async def facts(self) -> list[VersionFacts]:
        self._check()
        return [
            VersionFacts(card=self.served.card, version=self.served.version, agreement=each) for each in self.agreements
        ]

    async def tallies(self) -> list[Tally]:
        self._check()
        return list(self.counted)

    def _check(self) -> None:
        if self.gone is not None:
            raise self.gone


@dataclass
class SilentLink(FakeLink):
    """Knows its facts, and answers nobody."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False

    async def answer(self, request: InferRequest) -> list[Answer] | OfframpError:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        raise AssertionError


@dataclass
class Held:
    """A read of the store whose answer is on its way for a while."""

    began: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FakeStore(RayStore):
    """What Ray and Serve would know."""

    of_models: dict[str, Traffic] = field(default_factory=dict)
    of_apps: dict[str, Listed] = field(default_factory=dict)
    serving: dict[str, AppStatus] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    """Raised one after the other, before anything is found again."""
    held: Held | None = None
    """Of the next who asks for the traffic."""

    async def traffic(self, model: str) -> Traffic:
        self._fail()
        found = self.of_models.get(model, Traffic())
        held, self.held = self.held, None
        if held is not None:
            held.began.set()
            await held.may_end.wait()
        return found

    async def put_traffic(self, model: str, traffic: Traffic) -> None:
        self.of_models[model] = traffic

    async def listed(self) -> list[Listed]:
        self._fail()
        return list(self.of_apps.values())

    async def put_listed(self, listed: Listed) -> None:
        self._fail()
        self.of_apps[listed.app] = listed

    async def statuses(self) -> Mapping[str, AppStatus]:
        return self.serving

    def add(self, app: str, version: str, status: AppStatus = RUNNING, model: str = "intents") -> None:
        """An application that runs."""
        self.of_apps[app] = Listed(app=app, model=model, version=version)
        self.serving[app] = status

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


@dataclass
class FakeCluster(RayCluster):
    """A Serve that runs what it was put, on so many cores."""

    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    cores: int = 8
    put_last: Mapping[str, Any] | None = None

    async def applications(self) -> dict[str, Any]:
        return {
            "applications": {
                name: {"route_prefix": config["route_prefix"], "deployed_app_config": config}
                for name, config in self.configs.items()
            }
        }

    async def put(self, config: Mapping[str, Any]) -> None:
        self.put_last = config
        self.configs = {each["name"]: each for each in config["applications"]}

    async def inventory(self) -> Inventory:
        return Inventory(devices={"cpu": Accelerators(count=self.cores)}, link=ClusterLink(bandwidth_bytes_per_s=1.0))


@dataclass
class FakeDesk:
    """What an operator's orders come to; takes all of them, or fails."""

    failure: Exception | None = None
    orders: list[object] = field(default_factory=list)

    async def names(self) -> list[str]:
        return ["1"]

    async def index(self, *, ready_only: bool = False) -> list[IndexRow]:
        self._take(("index", ready_only))
        return [IndexRow(name="intents", version="1", state="READY", reason="")]

    async def load(self, model: str, parameters: LoadParameters) -> None:
        self._take(("load", model, parameters))

    async def unload(self, model: str, parameters: LoadParameters) -> None:
        self._take(("unload", model, parameters))

    async def side_by_side(self) -> dict[str, Any]:
        return {"model": "intents", "default": "1", "canary": None}

    async def set_canary(self, canary: Canary) -> None:
        self._take(canary)

    async def end_canary(self) -> None:
        self._take("end")

    async def set_default(self, version: str) -> None:
        self._take(("default", version))

    def _take(self, order: object) -> None:
        if self.failure is not None:
            raise self.failure
        self.orders.append(order)
