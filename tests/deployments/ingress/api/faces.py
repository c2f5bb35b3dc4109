"""A fake ingress, and requests to it over REST and over gRPC, as Serve passes them on."""

from __future__ import annotations

import json
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any

import grpc
import httpx

from deployments.api.access import Gate
from deployments.api.endpoint import ModelVersion
from deployments.api.exchange import HttpRequest, RequestBodies
from deployments.api.generation import GenerateRequest, Stream
from deployments.api.grpc.server import Rpcs, message_class
from deployments.api.http import HEADER_LENGTH, build_api
from deployments.api.operations import InferRequest
from deployments.api.state import LivePage, StateRoutes
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import IngressOptions
from deployments.keys import AccessSettings
from deployments.ops.dashboard import ServiceFacts
from deployments.settings import ServeSettings
from deployments.versions.repository import VersionRoutes
from deployments.versions.traffic import TrafficSplitter
from deployments.versions.versions import Versions
from deployments.wire.controller_link import ControllerLink
from earlyexit.network.boundary import Answer
from earlyexit.network.store import ModelCard
from optimizer.plans.plan import NO_RAMPS, PlacedPlan, early_exit_plan
from tests.clock import ManualClock
from tests.deployments.ingress.api.signatures import Described
from tests.model_cards import a_card

MAX_BODY_BYTES = 2000
V2_INFER = "/v2/models/intents/infer"
V2_BODY: dict[str, Any] = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["pay"]}]}
KEY, OTHER_KEY = "alice-0123456789", "bob-012345678901"
BEARER = {"authorization": f"Bearer {KEY}"}


class FakeDesk(Versions):
    """Versions of which only the backend answers; accepts every change."""

    splitter: TrafficSplitter | None = None

    def __init__(self) -> None: ...
    async def answer(self, request: InferRequest) -> tuple[ModelVersion, list[Answer]]:
        if self.splitter is None:
            return self.own, await self.own.infer(request)
        return await self.splitter.answer(request)

    async def names(self) -> list[str]:
        return ["1"]

    async def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        return [{"name": "intents", "version": "1", "state": "READY", "reason": ""}]

    async def canary_report(self) -> dict[str, Any]:
        return {"model": "intents", "default": "1", "canary": None}

    async def change(self, version: str, **fields: Any) -> dict[str, Any]:
        return await self.canary_report()

    def check_control(self) -> None: ...


class FakeController(ControllerLink):
    """A controller whose predictions are not finite."""

    async def ask(self, method: str, *arguments: Any, timeout_s: float = 5.0) -> Any:
        if method == "describe":
            return {"epoch": 3, "predicted": {"latency_s": float("inf")}}
        return [{"epoch": epoch} for epoch in range(5, 0, -1)][: arguments[0]]


class FakeRoutes(VersionRoutes):
    """A cluster that loads and unloads nothing."""

    async def load(self, request: HttpRequest) -> dict[str, Any]:
        await self._parsed(request)
        return {}

    unload = load


@dataclass
class FakeBackend(Described):
    """Answers label 0 for texts of even length and 1 for others, or fails with `failure`; `endless` scores infinity."""

    card: ModelCard = field(default_factory=a_card)
    version: str = "1"
    versions: Versions = field(default_factory=FakeDesk)
    bodies: RequestBodies = field(default_factory=lambda: RequestBodies(MAX_BODY_BYTES, 10 * MAX_BODY_BYTES))
    max_timeout_s: float = 60.0
    is_ready: bool = True
    failure: BaseException | None = None
    requests: list[InferRequest] = field(default_factory=list)
    counted: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.versions, FakeDesk):
            self.versions.own = self

    async def infer(self, request: InferRequest) -> list[Answer]:
        self.requests.append(request)
        self._fail()
        score_of = {"endless": float("inf")}
        return [Answer(sample_id="", value=len(x) % 2, score=score_of.get(x, 0.75), exit=1) for x in request.rows]

    async def generate(self, request: GenerateRequest) -> Stream:
        raise AssertionError("this model answers each input at once")

    def count_request(self, route: str, status: int) -> None:
        self.counted.append((route, status))

    async def ask_all(self, deployment: str, method: str) -> list[Any]:
        self._fail()
        return []

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


@dataclass
class FakeContext:
    """Serve's context of an RPC, with the trailing metadata."""

    metadata: list[tuple[str, Any]] = field(default_factory=list)
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    trailing: list[tuple[str, str]] = field(default_factory=list)

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        return self.metadata

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        self.trailing = trailing_metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


def gate(
    rate_per_s: float | None = None, burst: float | None = None, *, keys: bool = True, clock: ManualClock | None = None
) -> Gate:
    """Returns a gate with the keys of alice and bob."""
    access = AccessSettings(keys_env="KEYS" if keys else None, rate_per_s=rate_per_s, burst=burst)
    return Gate(access, clock or ManualClock(), environment={"KEYS": f"alice:{KEY},bob:{OTHER_KEY}"})


def client_of(backend: FakeBackend, gate: Gate | None = None, *, root_path: str = "", **options: Any) -> Any:
    """Returns an HTTP client of the whole application, including the routes of versions."""
    assert isinstance(backend.versions, FakeDesk)
    placed = PlacedPlan(plan=early_exit_plan(2, (), NO_RAMPS, batch=4, device="cpu"))
    core = IngressCore("a", placed, IngressOptions(), Random(0))
    settings = ServeSettings.model_validate({"model": "none", "plan": placed.plan})
    facts = ServiceFacts(card=backend.card, settings=settings)
    state = StateRoutes(facts, core, backend.ask_all, FakeController("offramp"), ManualClock())
    routes = (FakeRoutes(backend.versions, None), state, LivePage(state.event, ManualClock(), max_connected_s=0.0))
    app = build_api(backend, *routes, gate=gate, **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=root_path), base_url="http://test")


def packed(*texts: bytes) -> bytes:
    """Returns texts as the bytes of a BYTES tensor."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def infer_bytes(
    *texts: str,
    tensor: Mapping[str, Any] | None = None,
    raw: bool = False,
    model: str = "intents",
    version: str = "",
    **asked: Any,
) -> bytes:
    """Returns a ModelInferRequest; `tensor` changes its input, `asked` has `id`, `parameters` and `outputs`."""
    given = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts} | dict(tensor or {})
    message = message_class("ModelInferRequest")(model_name=model, model_version=version, id=asked.get("id", "7"))
    message.inputs.add(name=given["name"], datatype=given["datatype"], shape=given["shape"])
    _set(message.inputs[0].parameters, given.get("parameters", {}))
    data = [each.encode() if isinstance(each, str) else each for each in given["data"]]
    if raw:
        message.raw_input_contents.append(packed(*data))
    else:
        message.inputs[0].contents.bytes_contents.extend(data)
    _set(message.parameters, asked.get("parameters", {}))
    for output in asked.get("outputs", ()):
        _set(message.outputs.add(name=output["name"]).parameters, output.get("parameters", {}))
    return bytes(message.SerializeToString())


def infer_json(
    *texts: str, tensor: Mapping[str, Any] | None = None, binary: bool = False, **asked: Any
) -> tuple[bytes, dict[str, str]]:
    """Returns the same request as a REST body with headers; `binary`: the texts follow the JSON."""
    given = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)} | dict(tensor or {})
    if not binary:
        return json.dumps({"inputs": [given], **asked}).encode(), {}
    data = [each.encode() if isinstance(each, str) else each for each in given.pop("data")]
    tail = packed(*data)
    given["parameters"] = {**given.get("parameters", {}), "binary_data_size": len(tail)}
    head = json.dumps({"inputs": [given], **asked}).encode()
    return head + tail, {HEADER_LENGTH: str(len(head))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The result of a v2 request for its caller, and what the ingress counted."""

    status: int
    """The HTTP status that is counted."""
    code: str
    """The gRPC status; empty over REST."""
    message: str = ""
    labels: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    id: str = ""
    version: str = ""
    retry_after: str | None = None


Ask = Callable[..., Awaitable[Said]]
"""`ask(backend, *texts, gate=None, model="intents", version="", headers={}, tensor=None, **id_parameters_outputs)`"""


async def by_rest(
    backend: FakeBackend,
    *texts: str,
    gate: Gate | None = None,
    model: str = "intents",
    version: str = "",
    headers: Mapping[str, str] = MappingProxyType({}),
    binary: bool = False,
    **asked: Any,
) -> Said:
    path = f"/v2/models/{model}/versions/{version}/infer" if version else f"/v2/models/{model}/infer"
    content, more = infer_json(*texts, binary=binary, **asked)
    async with client_of(backend, gate) as client:
        response = await client.post(path, content=content, headers={**headers, **more})
    length = int(response.headers.get(HEADER_LENGTH, len(response.content)))
    said = json.loads(response.content[:length])
    assert backend.counted[-1][1] == response.status_code
    outputs = said.get("outputs", [{"name": "", "data": []}])
    return Said(
        status=response.status_code,
        code="",
        message=said.get("error", ""),
        labels=tuple(outputs[0].get("data", ())),
        outputs=tuple(each["name"] for each in outputs),
        id=said.get("id", ""),
        version=said.get("model_version", ""),
        retry_after=response.headers.get("retry-after"),
    )


async def by_grpc(
    backend: FakeBackend,
    *texts: str,
    gate: Gate | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
    **asked: Any,
) -> Said:
    context = FakeContext(metadata=list(headers.items()))
    response = await Rpcs(backend, gate).call("ModelInfer", infer_bytes(*texts, **asked), context)
    raw = list(response.raw_output_contents)[:1]
    return Said(
        status=backend.counted[-1][1],
        code=context.code.name,
        message=context.details,
        labels=tuple(_texts(raw[0])) if raw else (),
        outputs=tuple(each.name for each in response.outputs),
        id=response.id,
        version=response.model_version,
        retry_after=dict(context.trailing).get("retry-after"),
    )


FACES: dict[str, Ask] = {"REST": by_rest, "gRPC": by_grpc}
WAYS: dict[str, Ask] = FACES | {"bytes": partial(by_rest, binary=True), "gRPC, raw": partial(by_grpc, raw=True)}


def _texts(data: bytes) -> Sequence[str]:
    found = []
    while data:
        end = 4 + int.from_bytes(data[:4], "little")
        found.append(data[4:end].decode())
        data = data[end:]
    return found


def _set(parameters: Any, values: Mapping[str, Any]) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in values.items():
        said = json.dumps(value) if isinstance(value, list) else value  # gRPC parameters cannot be lists
        setattr(parameters[name], kinds[type(said)], said)
