"""Default version and canary over HTTP, links to other versions, and the comparison of answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.api.operations import Canary
from deployments.versions.traffic import MAX_COMPARISONS, Tally, Traffic, hashed_draws, losses_between
from deployments.versions.versions import REFRESH_S, OtherVersion
from earlyexit.errors import AdmissionError, DeadlineError, InputError, VersionUnavailableError
from earlyexit.network.boundary import Answer, Value, values_of
from earlyexit.network.store import WEIGHTS_FILE, ModelFolder, chain_card
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.segmentation import SegmentationTask
from tests.deployments.ingress.completions.generating import tales
from tests.deployments.ingress.versions.version_world import (
    CANARY,
    ORDERS,
    FakeLink,
    FakeServed,
    Held,
    World,
    a_request,
    refused,
)
from tests.model_cards import a_card

SHARE = 0.3
IDS = [f"request-{number}" for number in range(200)]
OURS = next(each for each in IDS if hashed_draws(each)[0] >= SHARE)
THEIRS = next(each for each in IDS if hashed_draws(each)[0] < SHARE)
GONE = VersionUnavailableError("gone", retry_after_s=1.0)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# Orders


async def test_the_default_version_answers_when_a_canary_has_ended(world: World) -> None:
    said = await world.set_canary(share=1.0, compare_share=0.01)
    assert (said.status_code, said.json()["canary"]) == (200, {"version": "2", "share": 1.0, "compare_share": 0.01})
    assert await world.answered_by() == "2"
    assert (await world.http.delete(CANARY)).json()["canary"] is None
    assert await world.answered_by() == "1"
    assert (await world.set_default("2")).json()["default"] == "2"
    assert await world.answered_by() == "2"
    assert await world.cluster.traffic() == Traffic(default="2", changes=3, since=3)


async def test_a_canary_ends_without_a_share_or_when_it_becomes_the_default(world: World) -> None:
    await world.set_canary()
    await world.set_canary(share=0.0)
    assert await world.cluster.traffic() == Traffic(changes=2, since=2)
    await world.set_canary()
    await world.set_default("2")
    assert await world.cluster.traffic() == Traffic(default="2", changes=4, since=4)


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
async def test_without_explicit_control_every_change_is_a_403(tmp_path: Path, order: Any) -> None:
    world = World(tmp_path, control="none")
    status, message = refused(await order(world))
    assert (status, "repository: {control: explicit}" in message) == (403, True)
    assert (await world.cluster.traffic(), world.cluster.put_last) == (Traffic(), None)


async def test_invalid_canaries_and_defaults_are_refused(world: World) -> None:
    unknown = "unknown version '9' of 'intents'; there are '1', '2', '3'"
    assert refused(await world.set_canary("9")) == (404, unknown)
    assert refused(await world.set_canary("1")) == (400, "version '1' is the default version, and cannot be the canary")
    assert (await world.set_canary("2", share=2.0)).status_code == 400
    world.links["two"].gone = RuntimeError("no replica")
    not_ready = "no ingress of 'fake' is ready; see POST /v2/repository/index"
    assert refused(await world.set_default("2")) == (503, not_ready)
    world.links["one"].gone = RuntimeError("it hangs")
    assert (await world.http.get(CANARY)).status_code == 503
    world.own.card = tales()
    for fields in ({"canary": Canary(version="2", share=1.0)}, {"default": "2"}):
        with pytest.raises(InputError, match="models that generate have no canary and no other default"):
            await world.versions.change("2", **fields)
    assert await world.cluster.traffic() == Traffic()


async def test_at_the_address_of_a_version_the_default_is_the_version_of_the_root(tmp_path: Path) -> None:
    world = World(tmp_path, route_prefix="/v2/models/intents/versions/1")
    assert (await world.figures())["default"] == "1", "there is no root"
    world.run_on_cluster("two", "2", "/")
    world.run_on_cluster("three", "3", "/v2/models/intents/versions/3")
    assert refused(await world.set_canary("2")) == (400, "version '2' is the default version, and cannot be the canary")
    counted = Tally(since=1)
    counted.versions["1"].requests["answered"] = 7
    world.links["two"].counted = lambda: counted
    said = (await world.set_canary("1")).json()
    assert (said["default"], said["canary"]["version"], said["versions"]["1"]["requests"]) == ("2", "1", 7)
    unloaded = await world.http.post("/v2/repository/models/intents/unload", json={"parameters": {"version": "2"}})
    assert refused(unloaded) == (400, "version '2' answers requests that name none; it cannot be unloaded")
    status, message = refused(await ORDERS["load"](world))
    assert (status, message) == (403, "versions are loaded by the service at /, not at the address of a version")
    assert (await world.set_default("1")).json()["canary"] is None
    assert refused(await world.set_canary("1"))[0] == 400
    assert (await world.set_canary("2")).json()["canary"]["version"] == "2"


async def test_another_models_canary_is_a_404_and_a_wrong_method_a_405(world: World) -> None:
    for method, path in (("GET", "canary"), ("PUT", "canary"), ("DELETE", "canary"), ("PUT", "default")):
        response = await world.http.request(method, f"/v2/models/other/{path}")
        assert refused(response) == (404, "unknown model 'other'; served is 'intents'")
    response = await world.http.post(CANARY)
    assert (response.status_code, response.headers["allow"]) == (405, "GET, PUT, DELETE, HEAD")


def spectrum(size: int) -> dict[str, Any]:
    return {"name": "tensor", "columns": [{"name": "spectrum", "datatype": "FP32", "shape": [size]}]}


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (spectrum(4), "'2' takes 'tensor' inputs, spectrum FP32 [4], version '1' 'tensor' inputs, spectrum FP32 [3]"),
        ({"name": "text", "max_length": 8}, "'2' takes 'text' inputs, text BYTES [], version '1' 'tensor' inputs"),
    ],
    ids=["another size", "another codec"],
)
async def test_a_version_with_other_inputs_is_refused(world: World, codec: dict[str, Any], said: str) -> None:
    world.own.card = a_card(codec=spectrum(3))
    world.others["2"].card = a_card(codec=codec)
    status, message = refused(await world.set_canary())
    assert (status, said in message, await world.cluster.traffic()) == (400, True, Traffic())


async def test_versions_may_encode_the_same_rows_differently_and_be_cascades(world: World, tmp_path: Path) -> None:
    world.others["2"].card = a_card(codec={"name": "text", "max_length": 99})
    await world.set_canary()
    assert await world.answered_by() == "2"
    members = [ModelFolder(folder=tmp_path / name, card=a_card(name=name)) for name in ("small", "intents")]
    for member in members:
        member.folder.mkdir()
        (member.folder / WEIGHTS_FILE).write_bytes(b"")
    world.others["3"].card = chain_card("intents", tmp_path / "cascade", members, provenance={})
    await world.set_canary("3")
    assert await world.answered_by() == "3"


# Shares


async def test_a_canary_gets_the_requests_whose_draw_is_below_its_share(world: World) -> None:
    await world.set_canary(share=SHARE)
    found = [await world.answered_by(each) for each in IDS]
    assert found == ["2" if hashed_draws(each)[0] < SHARE else "1" for each in IDS]
    named = await world.http.post("/predict", json={"inputs": "pay"}, headers={"x-request-id": THEIRS})
    assert named.status_code == 200
    assert world.others["2"].asked[-1] == THEIRS


async def test_another_default_gets_all_requests_that_the_canary_does_not_get(world: World) -> None:
    for canary in ("3", "1"):
        await world.cluster.put_traffic("intents", Traffic(default="2", canary=Canary(version=canary, share=SHARE)))
        await world.look()
        assert (await world.answered_by(OURS), await world.answered_by(THEIRS)) == ("2", canary)


def test_hashed_draws_are_the_first_and_second_word_of_the_ids_hash() -> None:
    # printf r-1 | b2sum -l 64: 7d99a80e 76bbad0e, little-endian
    assert hashed_draws("r-1") == (0x0EA8997D / 2**32, 0x0EADBB76 / 2**32)
    drawn = [hashed_draws(f"request-{number}") for number in range(10_000)]
    assert sum(first < 0.1 for first, _ in drawn) == pytest.approx(1000, abs=100)  # 3.3 standard deviations
    assert sum(first < 0.1 and second < 0.1 for first, second in drawn) == pytest.approx(100, abs=33)


# Figures


async def test_requests_are_timed_and_counted_by_version_until_the_versions_change(world: World) -> None:
    await world.set_canary(share=SHARE)
    for each in (OURS, THEIRS, THEIRS):
        await world.answered_by(each)
    world.others["2"].failure = DeadlineError("late")
    assert (await world.ask(THEIRS)).status_code == 504
    sides = (await world.figures())["versions"]
    assert (sides["1"]["requests"], sides["2"]["requests"], sides["2"]["errors"]) == (1, 3, {"deadline": 1})
    assert (sides["2"]["exits"], sides["2"]["p50_s"] is None, sides["2"]["agreement"]) == ({"1": 2}, False, None)
    await world.set_canary(share=1.0)
    assert (await world.figures())["versions"]["2"]["requests"] == 3
    await world.set_canary("3")
    assert (await world.figures())["versions"]["3"]["requests"] == 0
    world.links["one"].agreements, world.links["three"].gone = (0.98, None, 1.0), RuntimeError("gone")
    sides = (await world.figures())["versions"]
    assert (sides["1"]["agreement"], sides["3"]["agreement"]) == (0.99, None)


async def test_each_trial_is_counted_by_itself_also_if_its_begin_was_not_polled(world: World) -> None:
    other = world.beside()
    await world.set_canary()
    await other.look()
    for each in (world, other):
        assert await each.answered_by() == "2"
    await world.http.delete(CANARY)
    await world.set_canary()
    for each in (world, other):
        assert (await each.figures())["versions"]["2"]["requests"] == 0, "also before the next poll"
    await other.look()
    assert await other.answered_by() == "2"
    other.links["two"].gone = RuntimeError("no replica for a moment")
    await other.look()
    assert (await other.figures())["versions"]["2"]["requests"] == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own settings, when it is imported
def test_metrics_keep_the_requests_of_ended_comparisons_but_not_their_latencies() -> None:
    from deployments.ingress_deployment import IngressMetrics

    metrics, tally = IngressMetrics(a_card().chain), Tally(since=1)
    tally.versions["2"].latencies[3] = tally.versions["2"].requests["answered"] = 1
    for each in (tally, Tally(since=2)):
        metrics.export_versions(each)
    assert [each.value for each in metrics.samples() if "version" in each.labels] == [1, 0, 0]


async def test_our_version_answers_if_another_one_is_gone(world: World) -> None:
    await world.set_canary(share=1.0, compare_share=1.0)
    world.others["2"].failure = GONE
    assert await world.answered_by() == "1"
    assert world.own.requests[-1].arrived_s == world.clock.now_s()
    seen = await world.figures()
    assert seen["versions"]["2"]["errors"] == {"version_unavailable": 1}
    assert (seen["compared"]["inputs"], seen["compared"]["requests_failed"]) == (0, 0)


@pytest.mark.parametrize("request_id", [OURS, THEIRS])
async def test_compared_requests_are_sent_to_both_versions_and_answered_by_one(world: World, request_id: str) -> None:
    world.others["2"].card, world.others["2"].label = a_card(("card", "bill")), 0  # ours has "card" as number 1
    await world.set_canary(share=SHARE, compare_share=1.0)
    assert await world.answered_by(request_id) == ("1" if request_id == OURS else "2")
    compared = (await world.figures())["compared"]
    assert (len(world.own.requests), world.others["2"].asked) == (1, [request_id])
    assert (compared["inputs"], compared["agreement"]) == (1, 1.0)


async def test_a_failed_comparison_fails_no_request(world: World) -> None:
    await world.set_canary(share=0.0, compare_share=0.2)
    for each in IDS:
        assert await world.answered_by(each) == "1"
        await world.figures()
    assert world.others["2"].asked == [each for each in IDS if hashed_draws(each)[1] < 0.2]
    world.others["2"].failure = DeadlineError("late")
    await world.set_canary(share=0.0, compare_share=1.0)
    assert await world.answered_by() == "1"
    seen = await world.figures()
    assert (seen["compared"]["requests_failed"], seen["versions"]["2"]["errors"]) == (1, {})


async def test_the_number_of_comparisons_is_limited(world: World) -> None:
    world.links["two"].is_silent = True
    await world.set_canary(share=0.0, compare_share=1.0)
    for each in IDS[: MAX_COMPARISONS + 3]:
        await world.answered_by(each)
    assert (len(world.versions.comparing), world.versions.tally.compared["skipped"]) == (MAX_COMPARISONS, 3)
    for task in world.versions.comparing:
        task.cancel()


# What an ingress does by itself


async def test_an_ingress_announces_itself_and_follows_what_is_stored(world: World) -> None:
    del world.cluster.store["listed/one"]
    await world.look()
    assert ("listed/one" in world.cluster.store, world.versions.default) == (True, None)
    await world.cluster.put_traffic("intents", Traffic(canary=Canary(version="2", share=1.0)))
    await world.look(2)
    assert (await world.answered_by(), world.versions.default) == ("2", world.own)
    world.cluster.failures = [ConnectionError("no GCS")] * 2
    await world.look(2)
    assert (world.slept[-2:], await world.answered_by()) == ([REFRESH_S] * 2, "2")
    await world.cluster.put_traffic("intents", Traffic())
    await world.look()
    assert await world.answered_by() == "1"


async def test_an_ingress_of_one_version_does_not_read_the_store(tmp_path: Path) -> None:
    world = World(tmp_path, route_prefix="/v2/models/intents/versions/1")
    await world.cluster.put_traffic("intents", Traffic(canary=Canary(version="2", share=1.0)))
    await world.look()
    assert (world.slept, await world.answered_by()) == ([], "1")


async def test_an_unreachable_version_is_not_used(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.set_canary()
    world.links["two"].gone = RuntimeError("no replica")
    await world.look(3)
    assert await world.answered_by() == "1"
    assert caplog.text.count("version 2 is not used") == 1, "not at every look"
    world.links["two"].gone = None
    await world.cluster.put_traffic("intents", Traffic(default="9", canary=Canary(version="2", share=SHARE)))
    await world.look()
    assert (await world.answered_by(OURS), await world.answered_by(THEIRS)) == ("1", "2")


@pytest.mark.parametrize("ended", [False, True], ids=["a canary", "a canary that was ended"])
async def test_requests_that_wait_for_an_application_that_is_gone_are_answered_by_ours(
    world: World, ended: bool
) -> None:
    silent = world.links["two"]
    silent.is_silent = True
    await world.set_canary()
    waiting = asyncio.create_task(world.answered_by())
    await silent.asked.wait()
    if ended:
        silent.one_hangs = True
        await world.http.delete(CANARY)
        await world.look()
        assert not silent.was_cancelled, "it is there, and may answer yet"
    silent.gone = RuntimeError("deleted")
    del world.cluster.serving["two"]
    await world.look()
    assert (await waiting, await world.answered_by()) == ("1", "1")


@pytest.mark.parametrize("read", [World.look, lambda world: world.http.delete(CANARY)], ids=["a look", "a change"])
async def test_an_old_read_of_the_store_does_not_undo_a_change(world: World, read: Any) -> None:
    await world.set_canary()
    held = world.cluster.held = Held()
    reading = asyncio.create_task(read(world))
    await held.began.wait()
    promoting = asyncio.create_task(world.set_default("2"))
    await asyncio.sleep(0.05)
    held.may_end.set()
    await asyncio.gather(reading, promoting)
    traffic = await world.cluster.traffic()
    assert (traffic.default, traffic.canary, await world.answered_by()) == ("2", None, "2")


async def test_simultaneous_changes_at_two_ingresses_do_not_undo_each_other(world: World) -> None:
    other, world.cluster.store["turn/0"] = world.beside(), b"0"  # of an ingress that died
    await world.set_canary()
    held = world.cluster.held = Held()
    ending = asyncio.create_task(world.http.delete(CANARY))
    await held.began.wait()
    promoting = asyncio.create_task(other.set_default("3"))
    await asyncio.sleep(0.05)
    held.may_end.set()
    assert [each.status_code for each in await asyncio.gather(promoting, ending)] == [200, 200]
    assert "turn/1" not in world.cluster.store
    await world.look()
    traffic = await world.cluster.traffic()
    assert (traffic.default, traffic.canary, await world.answered_by()) == ("3", None, "3")


async def test_metadata_names_the_versions_of_the_model_or_at_least_ours(world: World) -> None:
    world.cluster.add("b", "7", model="other")
    assert (await world.http.get("/v2/models/intents")).json()["versions"] == ["1", "2", "3"]
    world.cluster.failures = [ConnectionError("no GCS")]
    assert (await world.http.get("/v2/models/intents")).json()["versions"] == ["1"]


async def test_the_other_versions_answers_and_errors_are_returned_within_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = FakeServed(version="2", label=1)
    [facts] = await FakeLink(served=served).facts()
    version = OtherVersion(facts, FakeLink(served=served), default_timeout_s=30.0)
    answers = await version.infer(a_request("r-7", "pay", "my bill"))
    assert (version.version, [answer.value for answer in answers], served.asked) == ("2", [1, 1], ["r-7"])
    served.failure = AdmissionError("late", retry_after_s=3.0)
    with pytest.raises(AdmissionError, match="late") as caught:
        await version.infer(a_request())
    assert caught.value.retry_after_s == 3.0
    monkeypatch.setattr("deployments.versions.versions.GRACE_S", 0.0)
    link = FakeLink(served=served, is_silent=True)
    with pytest.raises(DeadlineError, match=r"no answer within 0.01 s"):
        await OtherVersion(facts, link, default_timeout_s=0.01).infer(a_request())


async def test_an_application_with_another_version_is_not_connected(world: World) -> None:
    world.others["2"].version = "3"
    assert refused(await world.set_canary()) == (503, "two serves version '3' now")


def answers(*values: Value) -> list[Answer]:
    return [Answer(sample_id="", value=value, score=0.5, exit=0) for value in values]


STREET = SegmentationTask(("road", "sky"), height=2, width=2, stride=1)
BODY = PoseTask(("head", "foot"), heatmap_side=4, image_side=8, tolerance=1.0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (STREET, SegmentationTask(("road", "sky"), height=2, width=2, stride=2)),
        (STREET, SegmentationTask(("road", "sky"), height=2, width=2, ignored=("sky",))),
        (BODY, PoseTask(("head", "foot"), heatmap_side=2, image_side=8, tolerance=3.0, sigma=1.5, highest=1)),
        (RegressionTask(scale=2.0), RegressionTask(scale=3.0, offset=1.0)),
    ],
    ids=["stride", "ignored", "pose", "regression"],
)
def test_versions_with_comparable_answers_differ_by_the_loss(ours: Task, theirs: Task) -> None:
    one, another = {
        "segmentation": ([[0, 0], [0, 1]], [[0, 0], [0, 0]]),
        "pose": ([[1, 1, 0.5], [5, 5, 0.5]], [[1, 1, 0.25], [5, 7, 0.5]]),
        "regression": (1.0, 2.0),
    }[ours.name]
    dtype = np.uint8 if ours.name == "segmentation" else np.float32
    early, full = ([each] if isinstance(each, float) else values_of(np.array([each], dtype)) for each in (one, another))
    expected = 0.25 if ours.name == "segmentation" else 0.5
    assert losses_between(answers(*early), ours, answers(*full), theirs) == [expected]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (STREET, SegmentationTask(("sky", "road"), height=2, width=2)),
        (STREET, SegmentationTask(("road", "sky"), height=4, width=2)),
        (BODY, PoseTask(("foot", "head"), heatmap_side=4, image_side=8, tolerance=1.0)),
        (BODY, PoseTask(("head", "foot"), heatmap_side=4, image_side=16, tolerance=1.0)),
        (STREET, BODY),
        (BODY, STREET),
        (RegressionTask(scale=2.0), LabelTask(("a", "b"))),
    ],
)
def test_versions_with_different_labels_are_compared_by_their_json(ours: Task, theirs: Task) -> None:
    assert not ours.compares(theirs)
    assert ours.compares(ours)
