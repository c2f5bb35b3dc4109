from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from deployments.ingress.api.bodies import InferRequest
from deployments.ingress.api.http import build_app
from deployments.ingress.dashboard.feed import Viewer
from deployments.ingress.versions.choice import Chosen
from deployments.ingress.versions.http import version_paths
from deployments.ingress.versions.tally import Tally
from earlyexit.clock import ManualClock
from earlyexit.errors import (
    AdmissionError,
    ControllerUnavailableError,
    DeadlineError,
    ExecutionError,
    InputError,
    OverloadedError,
    StageUnavailableError,
    UnprocessableInputError,
)
from earlyexit.store import ModelCard
from earlyexit.wire import Answer
from tests.deployments.ingress.api.signatures import Described
from tests.deployments.ingress.versions.version_fakes import FakeDesk, FakeServed
from tests.model_cards import a_card

CARD = a_card()
MAX_BODY_BYTES = 2000
V2_INFER = "/v2/models/intents/infer"
V2_BODY: dict[str, Any] = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["pay"]}]}
ROUTES = [
    ("POST", "/predict"),
    ("POST", "/v2/models/{model}/infer"),
    ("POST", "/v2/models/{model}/versions/{version}/infer"),
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/{model}"),
    ("GET", "/v2/models/{model}/ready"),
    ("GET", "/v2/models/{model}/versions/{version}"),
    ("GET", "/v2/models/{model}/versions/{version}/ready"),
    ("GET", "/stats"),
    ("GET", "/plan"),
    ("GET", "/plan/history"),
    ("GET", "/dashboard"),
    ("GET", "/dashboard/events"),
    ("GET", "/dashboard/{asset}"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/{model}/load"),
    ("POST", "/v2/repository/models/{model}/unload"),
    ("GET", "/v2/models/{model}/canary"),
    ("PUT", "/v2/models/{model}/canary"),
    ("DELETE", "/v2/models/{model}/canary"),
    ("PUT", "/v2/models/{model}/default"),
]
ORDERS: dict[str, dict[str, Any]] = {
    "/v2/repository/index": {},
    "/v2/repository/models/{model}/load": {},
    "/v2/repository/models/{model}/unload": {},
    "/v2/models/{model}/canary": {"version": "2", "share": 0.1},
    "/v2/models/{model}/default": {"version": "2"},
}

MEDIA_TYPES = {
    "/docs": "text/html",
    "/dashboard": "text/html",
    "/dashboard/events": "text/event-stream",
    "/dashboard/{asset}": "text/javascript",
}
"""Of what is not JSON."""


@dataclass
class FakeBackend(Described):
    """Answers label 0 for texts of even length and 1 for the others, unless it is told to fail."""

    card: ModelCard = CARD
    version: str = "1"
    versions: FakeDesk = field(default_factory=FakeDesk)
    chosen: Chosen | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    ready: bool = True
    failure: Exception | None = None
    requests: list[InferRequest] = field(default_factory=list)
    counted: list[tuple[str, int]] = field(default_factory=list)

    async def infer(self, request: InferRequest) -> list[Answer]:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        return [Answer(sample_id="", value=len(text) % 2, score=0.75, exit=1) for text in request.rows]

    def choose(self, request_id: str) -> Chosen | None:
        return self.chosen

    def is_ready(self) -> bool:
        return self.ready

    async def stats(self) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        return {"unanswered": 0}

    async def plan(self) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        return {"epoch": 3}

    async def plan_history(self, limit: int) -> list[dict[str, Any]]:
        return [{"epoch": epoch} for epoch in range(5, 0, -1)][:limit]

    def watch(self) -> Viewer:
        """One that has nothing to see."""
        viewer = Viewer(0.0, lambda _: None)
        viewer.end()
        return viewer

    def count_request(self, route: str, status: int) -> None:
        self.counted.append((route, status))


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    paths = version_paths(backend.versions, backend.versions, CARD.name, MAX_BODY_BYTES)
    transport = httpx.ASGITransport(build_app(backend, more=paths))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def path_of(route: str) -> str:
    return route.replace("{model}", "intents").replace("{version}", "1").replace("{asset}", "page.js")


async def call(client: httpx.AsyncClient, method: str, route: str) -> httpx.Response:
    """A good request to any route."""
    body = {"inputs": "pay"} if route == "/predict" else ORDERS.get(route, V2_BODY)
    return await client.request(method, path_of(route), json=body if method in ("POST", "PUT") else None)


# Plans


async def test_the_plan_and_its_history_are_the_backends(client: httpx.AsyncClient) -> None:
    assert (await client.get("/plan")).json() == {"epoch": 3}
    assert len((await client.get("/plan/history")).json()) == 5
    assert (await client.get("/plan/history?limit=2")).json() == [{"epoch": 5}, {"epoch": 4}]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "many", "", "9" * 5000], ids=lambda limit: limit[:5])
async def test_a_limit_that_is_no_number_of_plans_is_refused(client: httpx.AsyncClient, limit: str) -> None:
    response = await client.get("/plan/history", params={"limit": limit})
    assert response.status_code == 400
    assert "a number from 1 to 1000 is needed" in response.json()["error"]["message"]


async def test_without_its_controller_a_service_says_503_to_who_asks_for_the_plan(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.failure = ControllerUnavailableError("gone", retry_after_s=5.0)
    response = await client.get("/plan")
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json()["error"] == {"kind": "controller_unavailable", "message": "gone"}


# Answers


@pytest.mark.parametrize(("method", "route"), ROUTES)
async def test_every_route_answers_and_is_counted(
    client: httpx.AsyncClient, backend: FakeBackend, method: str, route: str
) -> None:
    response = await call(client, method, route)
    assert response.status_code == 200
    assert backend.counted == [(route, 200)]
    assert response.headers["content-type"].startswith(MEDIA_TYPES.get(route, "application/json"))


async def test_a_text_gets_its_answer(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    response = await client.post("/predict", json={"inputs": "pay"}, headers={"x-request-id": "r-1"})
    assert response.json() == {"label": "card", "score": 0.75, "exit": 1, "request_id": "r-1"}
    assert [request.rows for request in backend.requests] == [("pay",)]


async def test_a_list_gets_a_list(client: httpx.AsyncClient) -> None:
    response = await client.post("/predict", json={"inputs": ["pay", "bill"]})
    assert [output["label"] for output in response.json()["outputs"]] == ["card", "bill"]


async def test_a_request_without_an_id_gets_one_of_its_own(client: httpx.AsyncClient) -> None:
    first, second = [await client.post("/predict", json={"inputs": "pay"}) for _ in range(2)]
    assert len({first.json()["request_id"], second.json()["request_id"], ""}) == 3


async def test_the_request_ids_header_is_left_to_serve_which_sends_it_back_itself(client: httpx.AsyncClient) -> None:
    client.headers["x-request-id"] = "r-1"
    for response in [await client.post("/predict", json={"inputs": "pay"}), await client.get("/nothing")]:
        assert response.json()["request_id"] == "r-1"
        assert "x-request-id" not in response.headers  # with Serve's own it would be there twice


async def test_v2_answers_in_json(client: httpx.AsyncClient) -> None:
    response = await client.post(V2_INFER, json=V2_BODY | {"id": "r7", "outputs": [{"name": "label"}]})
    assert response.json() == {
        "model_name": "intents",
        "model_version": "1",
        "id": "r7",
        "outputs": [{"name": "label", "datatype": "BYTES", "shape": [1], "data": ["card"]}],
    }


async def test_v2_takes_and_gives_tensors_in_bytes(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 7}}
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "exit", "parameters": {"binary_data": True}}]}).encode()
    response = await client.post(
        V2_INFER,
        content=head + b"\x03\0\0\0pay",
        headers={"Inference-Header-Content-Length": str(len(head))},
    )
    json_length = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.content[json_length:] == b"\x01\0\0\0"
    assert backend.requests[0].rows == ("pay",)


async def test_the_server_names_its_models_and_extensions(client: httpx.AsyncClient) -> None:
    server = (await client.get("/v2")).json()
    assert (server["name"], server["models"]) == ("offramp", ["intents"])
    assert server["extensions"] == ["binary_tensor_data", "parameters", "model_repository"]


@pytest.mark.parametrize("path", ["/v2/models/intents", "/v2/models/intents/versions/1"])
async def test_the_model_names_its_tensors(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).json() == {
        "name": "intents",
        "versions": ["1"],
        "platform": "offramp",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            {"name": "score", "datatype": "FP32", "shape": [-1]},
            {"name": "exit", "datatype": "INT32", "shape": [-1]},
        ],
    }


@pytest.mark.parametrize(
    "path", ["/v2/health/ready", "/v2/models/intents/ready", "/v2/models/intents/versions/1/ready"]
)
async def test_before_its_stages_are_warm_a_service_is_live_but_not_ready(
    client: httpx.AsyncClient, backend: FakeBackend, path: str
) -> None:
    backend.ready = False
    assert (await client.get("/v2/health/live")).status_code == 200
    response = await client.get(path)
    assert (response.status_code, response.json()) == (503, {"ready": False})


# Refusals


def predict_error(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    assert set(body) == {"error", "request_id"}
    assert body["request_id"]
    return response.status_code, body["error"]["kind"], body["error"]["message"]


def v2_error(response: httpx.Response) -> tuple[int, str]:
    body = response.json()
    assert list(body) == ["error"]
    assert isinstance(body["error"], str)
    return response.status_code, body["error"]


async def test_a_bad_predict_body_is_a_400_that_says_why(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    response = await client.post("/predict", json={"inputs": []})
    expected = (400, "input", "inputs: a text or a list of texts is needed")
    assert predict_error(response) == expected
    assert (backend.requests, backend.counted) == ([], [("/predict", 400)])


async def test_a_bad_v2_body_is_a_400_in_the_protocols_form(client: httpx.AsyncClient) -> None:
    response = await client.post(V2_INFER, content=b"{")
    status, message = v2_error(response)
    assert (status, message[:30]) == (400, "the body is not valid JSON: EO")


@pytest.mark.parametrize("size", [MAX_BODY_BYTES, MAX_BODY_BYTES + 1], ids=["just-fits", "one-byte-more"])
async def test_a_body_above_the_limit_is_a_413(client: httpx.AsyncClient, size: int) -> None:
    frame = b'{"inputs": ""}'
    body = frame[:-2] + b"x" * (size - len(frame)) + frame[-2:]
    response = await client.post("/predict", content=body)
    if size == MAX_BODY_BYTES:
        assert response.status_code == 200
    else:
        assert predict_error(response) == (413, "payload_too_large", "the body is larger than 2000 bytes")


async def test_an_endless_body_is_refused_without_being_read_to_its_end(client: httpx.AsyncClient) -> None:
    parts_taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal parts_taken
        while True:
            parts_taken += 1
            yield b"x" * 100

    response = await client.post("/predict", content=endless())
    assert response.status_code == 413
    assert parts_taken <= 30


@pytest.mark.parametrize("path", ["/predict", V2_INFER])
async def test_a_compressed_body_is_refused_by_name(client: httpx.AsyncClient, path: str) -> None:
    body = gzip.compress(b'{"inputs": "pay"}')
    response = await client.post(path, content=body, headers={"content-encoding": "gzip"})
    assert response.status_code == 400
    assert "content-encoding 'gzip'; only plain bodies are taken" in response.text


@pytest.mark.parametrize(
    "length", ["-1", "ten", "1.5", "٣", "9" * 30], ids=["negative", "word", "float", "arabic", "huge"]
)
async def test_a_senseless_header_length_is_a_400(client: httpx.AsyncClient, length: str) -> None:
    headers = {"inference-header-content-length": length.encode()}
    response = await client.post(V2_INFER, json=V2_BODY, headers=headers)  # type: ignore[arg-type] # bytes are taken
    status, message = v2_error(response)
    assert status == 400
    assert message.startswith("Inference-Header-Content-Length is ")


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        pytest.param("GET", "/v2/models/other", "unknown model 'other'; served is 'intents'", id="metadata"),
        pytest.param("GET", "/v2/models/other/ready", "unknown model 'other'; served is 'intents'", id="ready"),
        pytest.param("POST", "/v2/models/other/infer", "unknown model 'other'; served is 'intents'", id="infer"),
        pytest.param(
            "POST",
            "/v2/models/intents/versions/2/infer",
            "unknown version '2' of 'intents'; served is '1'",
            id="version",
        ),
        pytest.param(
            "GET",
            "/v2/models/intents/versions/v1",
            "unknown version 'v1' of 'intents'; served is '1'",
            id="version-name",
        ),
        pytest.param(
            "GET", "/v2/models/%00%ff", "unknown model '\\x00\ufffd'; served is 'intents'", id="no-name-at-all"
        ),
    ],
)
async def test_an_unknown_model_or_version_is_a_404_that_names_the_known_one(
    client: httpx.AsyncClient, method: str, path: str, message: str
) -> None:
    assert v2_error(await client.request(method, path, json=V2_BODY)) == (404, message)


async def test_an_unknown_path_is_a_404_that_points_to_the_description(client: httpx.AsyncClient) -> None:
    expected = (404, "unknown_path", "GET /nothing: there is no such path; see /openapi.json")
    assert predict_error(await client.get("/nothing")) == expected


@pytest.mark.parametrize("path", ["/v2/nothing", "/v2/models/intents/", "/v2/models/intents/infer/", "/v2/"])
async def test_an_unknown_v2_path_is_a_404_in_the_protocols_form(client: httpx.AsyncClient, path: str) -> None:
    assert v2_error(await client.get(path)) == (404, f"GET {path}: there is no such path; see /openapi.json")


async def test_a_wrong_method_is_a_405_that_names_the_right_one(client: httpx.AsyncClient) -> None:
    response = await client.get("/predict")
    expected = "GET /predict: only POST is allowed; see /openapi.json"
    assert predict_error(response) == (405, "method_not_allowed", expected)
    assert response.headers["allow"] == "POST"


# Failures


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        pytest.param(InputError("300 inputs; at most 256"), 400, "input", id="limit"),
        pytest.param(UnprocessableInputError("too long"), 422, "unprocessable_input", id="too-long"),
        pytest.param(OverloadedError("full", retry_after_s=3.0), 503, "overloaded", id="overloaded"),
        pytest.param(AdmissionError("late", retry_after_s=3.0), 503, "admission", id="admission"),
        pytest.param(StageUnavailableError("gone", retry_after_s=1.0), 503, "stage_unavailable", id="unavailable"),
        pytest.param(DeadlineError("no answer within 1 s"), 504, "deadline", id="deadline"),
        pytest.param(ExecutionError("the model failed"), 500, "execution", id="execution"),
    ],
)
async def test_an_error_behind_the_routes_has_its_status_and_kind(
    client: httpx.AsyncClient, backend: FakeBackend, failure: Exception, status: int, kind: str
) -> None:
    backend.failure = failure
    response = await client.post("/predict", json={"inputs": "pay"})
    assert predict_error(response) == (status, kind, str(failure))
    assert backend.counted == [("/predict", status)]
    assert v2_error(await client.post(V2_INFER, json=V2_BODY)) == (status, str(failure))


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.01, "1"), (1.0, "1"), (1.2, "2"), (2.5, "3"), (30.0, "30")])
async def test_retry_after_is_in_whole_seconds_and_never_too_soon(
    client: httpx.AsyncClient, backend: FakeBackend, retry_after_s: float, header: str
) -> None:
    backend.failure = OverloadedError("full", retry_after_s=retry_after_s)
    response = await client.post("/predict", json={"inputs": "pay"})
    assert response.headers["retry-after"] == header


async def test_only_errors_worth_a_second_try_carry_retry_after(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.failure = DeadlineError("late")
    assert "retry-after" not in (await client.post("/predict", json={"inputs": "pay"})).headers


@pytest.mark.parametrize(("method", "route"), [("POST", "/predict"), ("POST", V2_INFER), ("GET", "/stats")])
async def test_an_unexpected_exception_is_logged_and_a_json_500_without_internals(
    client: httpx.AsyncClient, backend: FakeBackend, caplog: pytest.LogCaptureFixture, method: str, route: str
) -> None:
    backend.failure = RuntimeError("secret/path.py: boom")
    client.headers["x-request-id"] = "r-1"
    with caplog.at_level(logging.ERROR, logger="deployments.ingress.api.endpoint"):
        response = await call(client, method, route)
    assert response.status_code == 500
    assert "boom" not in response.text
    if route == V2_INFER:
        assert "the server failed on this request" in v2_error(response)[1]
    else:
        assert predict_error(response)[1] == "internal"
    assert backend.counted == [(route.replace("intents", "{model}"), 500)]
    [record] = caplog.records
    assert record.getMessage() == f"request r-1: {method} {route}"
    assert record.exc_info is not None
    assert record.exc_info[1] is backend.failure


async def test_a_caller_that_goes_away_while_it_sends_is_no_failure(backend: FakeBackend) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/predict",
        "headers": [],
        "query_string": b"",
        "root_path": "",
    }
    await asyncio.wait_for(build_app(backend)(scope, receive, send), timeout=5)
    assert (backend.counted, backend.requests) == ([("/predict", 499)], [])


# The description


@pytest.fixture
async def document(client: httpx.AsyncClient) -> dict[str, Any]:
    document: dict[str, Any] = (await client.get("/openapi.json")).json()
    return document


def references(node: object) -> list[str]:
    """Every `$ref` in a document."""
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [each for value in node.values() for each in references(value)]
    return [each for value in node for each in references(value)] if isinstance(node, list) else []


async def test_the_description_names_every_route_and_no_other(document: dict[str, Any]) -> None:
    described = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    described = [(method, path) for method, path in described if method != "PARAMETERS"]
    assert sorted(described) == sorted(ROUTES)


async def test_the_description_is_whole(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    assert {"title", "version"} <= set(document["info"])
    for reference in references(document):
        node: Any = document
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]


async def test_every_operation_has_a_summary_answers_and_its_paths_parameters(document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        declared = [parameter["name"] for parameter in item.get("parameters", [])]
        assert declared == re.findall(r"{(\w+)}", path)
        for method in set(item) - {"parameters"}:
            operation = item[method]
            assert operation["summary"]
            assert all(response["description"] for response in operation["responses"].values())
            assert ("requestBody" in operation) == (method in ("post", "put"))


async def test_errors_are_described_in_the_form_that_they_have(document: dict[str, Any]) -> None:
    for path, schema in [("/predict", "ErrorBody"), ("/v2/models/{model}/infer", "V2Error")]:
        responses = document["paths"][path]["post"]["responses"]
        assert {"400", "404", "413", "422", "500", "503", "504"} <= set(responses)
        content = responses["503"]["content"]["application/json"]
        assert content["schema"]["$ref"].endswith(f"/{schema}")


# Other versions


async def test_a_chosen_version_answers_by_its_own_labels_and_says_which_it_is(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    other = FakeServed(version="2", label=1, card=a_card(("a", "b")))
    backend.chosen = Chosen(other, backend, Tally(), ManualClock())
    predicted = (await client.post("/predict", json={"inputs": "pay"}, headers={"x-request-id": "r-1"})).json()
    assert predicted == {"label": "b", "score": 0.75, "exit": 1, "request_id": "r-1"}
    answer = (await client.post(V2_INFER, json=V2_BODY)).json()
    assert (answer["model_version"], answer["outputs"][0]["data"]) == ("2", ["b"])
    assert backend.requests == []


async def test_a_version_in_the_path_is_never_chosen_otherwise(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.chosen = Chosen(FakeServed(version="2"), backend, Tally(), ManualClock())
    answer = (await client.post("/v2/models/intents/versions/1/infer", json=V2_BODY)).json()
    assert (answer["model_version"], len(backend.requests)) == ("1", 1)


@pytest.mark.parametrize(
    ("method", "below", "route"),
    [
        ("POST", "/infer", "/v2/models/{model}/versions/{version}/infer"),
        ("GET", "", "/v2/models/{model}/versions/{version}"),
        ("GET", "/ready", "/v2/models/{model}/versions/{version}/ready"),
        ("POST", "/predict", "/predict"),
        ("GET", "/plan", "/plan"),
    ],
)
async def test_below_a_route_prefix_paths_are_relative_or_the_versions_own(
    backend: FakeBackend, method: str, below: str, route: str
) -> None:
    prefix = "/v2/models/intents/versions/7"
    backend.version = "7"
    transport = httpx.ASGITransport(build_app(backend), root_path=prefix)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"inputs": "pay"} if below == "/predict" else V2_BODY
        response = await client.request(method, prefix + below, json=body if method == "POST" else None)
    assert response.status_code == 200
    assert backend.counted == [(route, 200)]


async def test_below_a_route_prefix_an_unknown_path_is_still_unknown(backend: FakeBackend) -> None:
    transport = httpx.ASGITransport(build_app(backend), root_path="/other")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/other/nothing")
    assert (response.status_code, response.json()["error"]["kind"]) == (404, "unknown_path")


async def test_a_page_to_read_the_description_points_to_it(client: httpx.AsyncClient) -> None:
    assert "openapi.json" in (await client.get("/docs")).text


@pytest.mark.parametrize(
    ("failure", "num_records"),
    [
        pytest.param(AdmissionError("late", retry_after_s=1.0), 0, id="admission"),
        pytest.param(StageUnavailableError("gone", retry_after_s=1.0), 1, id="stage-unavailable"),
    ],
)
async def test_refusals_that_come_by_the_thousand_are_counted_and_not_logged(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    num_records: int,
) -> None:
    backend.failure = failure
    with caplog.at_level(logging.WARNING, logger="ray.serve.deployments.ingress.api.endpoint"):
        await client.post("/predict", json={"inputs": "pay"})
    assert len(caplog.records) == num_records
    assert backend.counted == [("/predict", 503)]


# What is refused unread


@pytest.mark.parametrize("length", [str(MAX_BODY_BYTES + 1), "9" * 5000], ids=["one-more", "huge"])
async def test_a_body_that_says_it_is_too_large_is_refused_unread(backend: FakeBackend, length: str) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("it was read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", length.encode())]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}
    await asyncio.wait_for(build_app(backend)(scope | {"root_path": ""}, receive, send), timeout=5)
    assert sent[0]["status"] == 413
    assert backend.counted == [("/predict", 413)]


async def test_what_an_unexpected_error_says_is_not_in_the_log(
    client: httpx.AsyncClient, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.failure = ValueError("the caller's own text")
    await client.post("/predict", json={"inputs": "pay"})
    assert "the caller's own text" not in caplog.text
    assert "ValueError (its message is left out: it may quote the request)" in caplog.text


async def test_what_the_model_says_of_an_input_goes_to_its_caller_and_not_into_the_log(
    client: httpx.AsyncClient, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.failure = ExecutionError("the model failed on this input: KeyError: 'my name'")
    response = await client.post("/predict", json={"inputs": "pay"}, headers={"x-request-id": "r-1"})
    assert predict_error(response)[2] == "the model failed on this input: KeyError: 'my name'"
    [record] = caplog.records
    assert record.getMessage() == "request r-1: execution: the model failed on this input: KeyError"
