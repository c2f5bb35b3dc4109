"""Tests of two versions of a small model on one Ray: side by side, a canary, a promotion, and an end under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from deployments.choices import VersionSettings
from deployments.settings import ServeSettings
from deployments.versions.traffic import hashed_draws
from offramp import Client
from tests.end_to_end.one_ray import METRICS_PORT, OneRay
from tests.end_to_end.tiny_service import Tiny, make_tiny, one_stage, text_service
from tests.metrics_page import check_series, documented_series, once_on_page

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("versions")]

SHARE = 0.25
SOON_S = 120.0
METRICS_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Versions:
    """A root service of version 1, the settings of version 2, and the expected answers of each."""

    url: str
    texts: tuple[str, ...]
    second: ServeSettings
    answers: dict[str, Tiny]


@pytest.fixture(scope="module")
def versions(one_ray: OneRay, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    other = make_tiny(tmp_path_factory.mktemp("two"), seed=4)
    assert all(one.score != two.score for one, two in zip(tiny.answers, other.answers, strict=True))
    second = ServeSettings(
        model=str(other.folder),
        plan=one_stage(other.thresholds),
        app="two",
        version="2",
        route_prefix="/v2/models/tiny/versions/2",
        repository=VersionSettings(control="explicit"),
    )
    url = one_ray.serve(text_service(tiny))
    return Versions(url=url, texts=tiny.texts, second=second, answers={"1": tiny, "2": other})


def test_a_version_is_loaded_beside_the_other_and_listed(versions: Versions, http: httpx.Client) -> None:
    assert states(http) == {"1": "READY"}
    parameters = {"config": versions.second.model_dump_json()}
    http.post("/v2/repository/models/tiny/load", json={"parameters": parameters}).raise_for_status()
    assert http.put("/v2/models/tiny/canary", json={"version": "2", "share": 1.0}).status_code == 503, "not ready yet"
    with Client(versions.url) as client:
        client.load("tiny", "2", settings=parameters["config"], timeout_s=SOON_S)
    assert states(http) == {"1": "READY", "2": "READY"}
    assert http.get("/v2/models/tiny").json()["versions"] == ["1", "2"]
    assert http.get("/v2/models/tiny/versions/2/ready").status_code == 200


def test_every_version_answers_by_its_own_model_under_its_own_path(versions: Versions, http: httpx.Client) -> None:
    for version, tiny in versions.answers.items():
        for index, text in enumerate(versions.texts):
            answer = infer(http, f"/v2/models/tiny/versions/{version}/infer", text)
            assert answer["model_version"] == version
            tiny.check(index, answer)
    with Client(f"{versions.url}/v2/models/tiny/versions/2") as client:
        one = client.predict(versions.texts[0])
    versions.answers["2"].check(0, {"label": one.label, "score": one.score, "exit": one.exit})


def test_a_canary_answers_its_share_and_both_are_compared(versions: Versions, http: httpx.Client) -> None:
    order = {"version": "2", "share": SHARE, "compare_share": 1.0}
    http.put("/v2/models/tiny/canary", json=order).raise_for_status()
    ids = [f"request-{number}" for number in range(96)]
    wanted = ["2" if hashed_draws(each)[0] < SHARE else "1" for each in ids]
    found = []
    for number, request_id in enumerate(ids):
        index = number % len(versions.texts)
        answer = infer(http, "/v2/models/tiny/infer", versions.texts[index], request_id)
        versions.answers[answer["model_version"]].check(index, answer)
        found.append(answer["model_version"])
    assert found == wanted
    wait_until(lambda: figures(http)["compared"]["inputs"] + figures(http)["compared"]["requests_skipped"] == 96)
    seen = figures(http)
    assert {version: each["requests"] for version, each in seen["versions"].items()} == {
        "1": wanted.count("1"),
        "2": wanted.count("2"),
    }
    assert all(each["errors"] == {} and each["p50_s"] <= each["p99_s"] for each in seen["versions"].values())
    labels = [[answer.label for answer in versions.answers[version].answers] for version in ("1", "2")]
    if seen["compared"]["requests_skipped"] == 0:
        assert seen["compared"]["same"] == 4 * sum(one == two for one, two in zip(*labels, strict=True))


def test_prometheus_gets_the_figures_by_version() -> None:
    wanted = {name for name in documented_series() if name.startswith("ray_offramp_version")}
    check_series(once_on_page(METRICS_PORT, wanted, METRICS_S), wanted)


def test_the_promoted_version_answers_requests_without_a_version(versions: Versions, http: httpx.Client) -> None:
    http.put("/v2/models/tiny/default", json={"version": "2"}).raise_for_status()
    for index, text in enumerate(versions.texts):
        answer = infer(http, "/v2/models/tiny/infer", text)
        assert answer["model_version"] == "2"
        versions.answers["2"].check(index, answer)
    assert figures(http)["canary"] is None


def test_a_version_ends_under_load_without_a_lost_request(versions: Versions, http: httpx.Client) -> None:
    """Last in the file, because it ends version 2."""
    http.put("/v2/models/tiny/default", json={"version": "1"}).raise_for_status()
    http.put("/v2/models/tiny/canary", json={"version": "2", "share": 0.5}).raise_for_status()
    over = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        load = [pool.submit(ask_until, over, versions, worker) for worker in range(4)]
        wait_until(lambda: figures(http)["versions"]["2"]["requests"] > 10)
        try:
            with Client(versions.url) as client:
                client.end_canary()
                client.unload("tiny", "2", timeout_s=SOON_S)
        finally:
            over.set()
    assert states(http) == {"1": "READY"}
    assert all(each.result() > 10 for each in load)
    gone = http.put("/v2/models/tiny/canary", json={"version": "2", "share": 0.5})
    assert (gone.status_code, gone.json()["error"]) == (404, "unknown version '2' of 'tiny'; there are '1'")


def ask_until(over: threading.Event, versions: Versions, worker: int) -> int:
    """Returns the number of right answers; every other outcome is a failure."""
    count = 0
    with httpx.Client(base_url=versions.url, timeout=20.0) as http:
        while not over.is_set():
            index = (worker + count) % len(versions.texts)
            answer = infer(http, "/v2/models/tiny/infer", versions.texts[index], f"{worker}-{count}")
            versions.answers[answer["model_version"]].check(index, answer)
            count += 1
    return count


def infer(http: httpx.Client, path: str, text: str, request_id: str = "r-1") -> dict[str, Any]:
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [text]}]}
    response = http.post(path, json=body, headers={"X-Request-ID": request_id})
    assert response.status_code == 200, response.text
    answer = response.json()
    return {each["name"]: each["data"][0] for each in answer["outputs"]} | {"model_version": answer["model_version"]}


def figures(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/v2/models/tiny/canary").json()
    return found


def states(http: httpx.Client) -> dict[str, str]:
    return {row["version"]: row["state"] for row in http.post("/v2/repository/index").json()}


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s, "it did not become so"
        time.sleep(0.2)
