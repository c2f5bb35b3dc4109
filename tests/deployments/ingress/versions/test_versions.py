from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from deployments.api.bodies import Canary
from deployments.settings import RepositorySettings, ServeSettings
from deployments.versions.choice import Tally, Traffic
from deployments.versions.other import IngressLink
from deployments.versions.store import AppStatus
from deployments.versions.versions import LOOK_S, Versions
from earlyexit.clock import ManualClock
from earlyexit.errors import ControlRefusedError, InputError, UnknownModelError, VersionUnavailableError
from earlyexit.network.chain_card import ModelFolder, chain_card
from earlyexit.network.store import WEIGHTS_FILE
from optimizer.plan import stock_plan
from tests.deployments.ingress.completions.generating import tales
from tests.deployments.ingress.versions.version_fakes import (
    FakeLink,
    FakeServed,
    FakeStore,
    Held,
    SilentLink,
    a_request,
)
from tests.model_cards import a_card

CANARY = Canary(version="2", share=1.0)


class Scene:
    """Application `one` is ours and serves version 1, `two` serves version 2."""

    def __init__(self, *, control: str = "explicit", route_prefix: str = "/") -> None:
        self.store = FakeStore()
        self.store.add("one", "1")
        self.store.add("two", "2")
        self.own = FakeServed(version="1")
        self.links = {
            "one": FakeLink(served=self.own),
            "two": FakeLink(served=FakeServed(version="2")),
            "three": FakeLink(served=FakeServed(version="2")),
        }
        settings = ServeSettings(
            model="/nowhere",
            plan=stock_plan(1, batch=1),
            app="one",
            route_prefix=route_prefix,
            repository=RepositorySettings.model_validate({"control": control}),
        )
        self.slept: list[float] = []
        self.shown: list[Tally] = []
        self.versions = Versions(self.own, settings, self.store, self.link_to, ManualClock(), self.shown.append)

    def link_to(self, app: str) -> IngressLink:
        return self.links[app]

    async def run(self, looks: int) -> None:
        """Until it has looked so often."""

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            if len(self.slept) >= looks:
                raise asyncio.CancelledError

        with suppress(asyncio.CancelledError):
            await self.versions.run(sleep)

    async def answered_by(self) -> str:
        chosen = self.versions.choose("r-1")
        if chosen is None:
            return "1"
        served, _ = await chosen.answer(a_request())
        return served.version


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_an_ingress_says_what_it_serves_and_follows_what_is_stored(scene: Scene) -> None:
    scene.store.of_apps.clear()
    scene.store.of_models["intents"] = Traffic(canary=CANARY)
    scene.store.add("two", "2")
    await scene.run(looks=1)
    assert scene.store.of_apps["one"].version == "1"
    assert await scene.answered_by() == "2"
    scene.store.of_models["intents"] = Traffic()
    scene.slept.clear()
    await scene.run(looks=1)
    assert await scene.answered_by() == "1"


async def test_what_was_counted_is_shown_while_there_is_a_canary_and_only_then(scene: Scene) -> None:
    await scene.run(looks=1)
    assert scene.shown == []
    await scene.versions.set_canary(CANARY)
    scene.slept.clear()
    await scene.run(looks=2)
    assert scene.shown == [scene.versions.tally] * 2


async def test_while_ray_is_away_it_goes_on_as_it_was_and_asks_again(scene: Scene) -> None:
    await scene.versions.set_canary(CANARY)
    scene.store.failures = [ConnectionError("no GCS")] * 2
    await scene.run(looks=2)
    assert (scene.slept, await scene.answered_by()) == ([LOOK_S] * 2, "2")


async def test_who_is_asked_by_version_only_never_looks() -> None:
    scene = Scene(route_prefix="/v2/models/intents/versions/1")
    scene.store.of_models["intents"] = Traffic(canary=CANARY)
    await scene.run(looks=1)
    assert (scene.slept, scene.versions.choose("r-1")) == ([], None)


async def test_an_order_is_stored_for_all_and_followed_here_at_once(scene: Scene) -> None:
    await scene.versions.set_canary(CANARY)
    assert (scene.store.of_models["intents"].canary, await scene.answered_by()) == (CANARY, "2")
    await scene.versions.end_canary()
    assert (scene.store.of_models["intents"], await scene.answered_by()) == (Traffic(), "1")


async def test_a_model_that_generates_has_no_canary(scene: Scene) -> None:
    scene.own.card = tales()
    with pytest.raises(InputError, match=r"a stream has no canary: .* 'name:version'"):
        await scene.versions.set_canary(CANARY)


async def test_a_canary_without_any_share_is_the_end_of_it(scene: Scene) -> None:
    await scene.versions.set_canary(CANARY)
    await scene.versions.set_canary(Canary(version="2"))
    assert scene.store.of_models["intents"] == Traffic()


async def test_a_promoted_canary_is_the_default_and_no_canary_any_more(scene: Scene) -> None:
    await scene.versions.set_canary(CANARY)
    await scene.versions.set_default("2")
    assert scene.store.of_models["intents"] == Traffic(default="2")
    assert await scene.answered_by() == "2"
    await scene.versions.set_default("1")
    assert await scene.answered_by() == "1"


async def test_another_default_leaves_the_canary_where_it_is(scene: Scene) -> None:
    scene.store.of_models["intents"] = Traffic(default="2", canary=Canary(version="3", share=0.1))
    await scene.versions.set_default("1")
    assert scene.store.of_models["intents"] == Traffic(default="1", canary=Canary(version="3", share=0.1))


Order = Callable[[Versions], Awaitable[None]]


@pytest.mark.parametrize(
    "order",
    [
        lambda versions: versions.set_canary(CANARY),
        lambda versions: versions.end_canary(),
        lambda versions: versions.set_default("2"),
    ],
)
async def test_without_explicit_control_every_order_is_refused(order: Order) -> None:
    scene = Scene(control="none")
    with pytest.raises(ControlRefusedError, match=r"repository\.control: explicit"):
        await order(scene.versions)
    assert scene.store.of_models == {}


async def test_versions_that_are_not_there_or_already_the_default_are_refused(scene: Scene) -> None:
    with pytest.raises(UnknownModelError, match="unknown version '3' of 'intents'; there are '1', '2'"):
        await scene.versions.set_canary(Canary(version="3", share=0.1))
    with pytest.raises(InputError, match="version '1' is the default; a canary is another"):
        await scene.versions.set_canary(Canary(version="1", share=0.1))
    scene.links["two"].gone = RuntimeError("no replica")
    with pytest.raises(VersionUnavailableError, match="does not answer"):
        await scene.versions.set_default("2")
    assert scene.store.of_models == {}


def spectrum(size: int) -> dict[str, Any]:
    return {"name": "tensor", "columns": [{"name": "spectrum", "datatype": "FP32", "shape": [size]}]}


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (
            spectrum(4),
            r"'2' takes 'tensor' inputs, spectrum FP32 \[4\], version '1' 'tensor' inputs, spectrum FP32 \[3\]",
        ),
        ({"name": "text", "max_length": 8}, r"'2' takes 'text' inputs, text BYTES \[\], version '1' 'tensor' inputs"),
    ],
    ids=["another size", "another codec"],
)
async def test_a_version_that_takes_other_rows_is_refused(scene: Scene, codec: dict[str, Any], said: str) -> None:
    scene.own.card = a_card(codec=spectrum(3))
    scene.links["two"].served.card = a_card(codec=codec)
    with pytest.raises(InputError, match=said):
        await scene.versions.set_canary(CANARY)
    assert scene.store.of_models == {}


async def test_versions_may_encode_the_same_rows_differently(scene: Scene) -> None:
    scene.links["two"].served.card = a_card(codec={"name": "text", "max_length": 99})
    await scene.versions.set_canary(CANARY)
    assert await scene.answered_by() == "2"


async def test_a_version_that_moved_to_another_application_is_found_there(scene: Scene) -> None:
    await scene.versions.set_canary(CANARY)
    scene.links["two"].gone = RuntimeError("deleted")
    del scene.store.serving["two"]
    scene.store.add("three", "2")
    await scene.run(looks=1)
    assert await scene.answered_by() == "2"
    assert scene.links["three"].served.asked == ["r-1"]


async def test_requests_that_wait_for_an_application_that_is_gone_are_answered_by_ours(scene: Scene) -> None:
    silent = scene.links["two"] = SilentLink(served=FakeServed(version="2"))
    await scene.versions.set_canary(CANARY)
    waiting = asyncio.create_task(scene.answered_by())
    await silent.asked.wait()
    silent.gone = RuntimeError("deleted")
    del scene.store.serving["two"]
    await scene.run(looks=1)
    assert await waiting == "1"
    assert scene.versions.choose("r-1") is None


async def test_so_are_those_of_a_canary_that_was_ended_before_it_was_unloaded(scene: Scene) -> None:
    silent = scene.links["two"] = SilentLink(served=FakeServed(version="2"))
    await scene.versions.set_canary(CANARY)
    waiting = asyncio.create_task(scene.answered_by())
    await silent.asked.wait()
    await scene.versions.end_canary()
    await scene.run(looks=1)
    assert not silent.was_cancelled, "it is there, and may answer yet"
    silent.gone = RuntimeError("deleted")
    del scene.store.serving["two"]
    scene.slept.clear()
    await scene.run(looks=1)
    assert await waiting == "1"


async def test_a_look_that_began_before_an_order_does_not_undo_it(scene: Scene) -> None:
    await scene.versions.set_canary(CANARY)
    held = scene.store.held = Held()
    looking = asyncio.create_task(scene.run(looks=1))
    await held.began.wait()
    ending = asyncio.create_task(scene.versions.end_canary())
    await asyncio.sleep(0)
    held.may_end.set()
    await asyncio.gather(looking, ending)
    assert await scene.answered_by() == "1"


async def test_the_index_can_be_of_ready_versions_only(scene: Scene) -> None:
    scene.store.add("three", "3", AppStatus(status="DEPLOYING"))
    assert [row.version for row in await scene.versions.index()] == ["1", "2", "3"]
    assert [row.version for row in await scene.versions.index(ready_only=True)] == ["1", "2"]


async def test_the_versions_of_a_model_are_its_own_or_at_least_ours(scene: Scene) -> None:
    scene.store.add("b", "7", model="other")
    assert await scene.versions.names() == ["1", "2"]
    scene.store.failures = [ConnectionError("no GCS")]
    assert await scene.versions.names() == ["1"]


async def test_side_by_side_are_the_counts_of_all_our_ingresses_and_each_sides_probes(scene: Scene) -> None:
    await scene.versions.set_canary(CANARY)
    one, two = Tally(same=3, other=1), Tally()
    one.of("1").answered, two.of("1").answered, two.of("2").answered = 4, 5, 1
    scene.links["one"].counted, scene.links["one"].agreements = (one, two), (0.98, None, 1.0)
    seen = await scene.versions.side_by_side()
    assert (seen["default"], seen["canary"]) == ("1", {"version": "2", "share": 1.0, "compare_share": 0.0})
    found = {name: (each["requests"], each["agreement"]) for name, each in seen["versions"].items()}
    assert found == {"1": (9, 0.99), "2": (1, None)}
    assert seen["compared"]["agreement"] == 0.75


async def test_a_side_that_is_gone_has_figures_all_the_same(scene: Scene) -> None:
    await scene.versions.set_canary(CANARY)
    scene.links["two"].gone = RuntimeError("gone")
    seen = await scene.versions.side_by_side()
    assert seen["versions"]["2"]["agreement"] is None


async def test_versions_that_requests_are_sent_to_are_not_free(scene: Scene) -> None:
    await scene.versions.set_canary(Canary(version="2", share=0.1))
    with pytest.raises(InputError, match="'2' is the canary"):
        await scene.versions.check_free("intents", "2")
    await scene.versions.set_default("2")
    for version in ("1", "2"):
        with pytest.raises(InputError, match="answers requests that name none"):
            await scene.versions.check_free("intents", version)
    await scene.versions.check_free("intents", "3")
    await scene.versions.check_free("other", "1")


async def test_a_cascade_is_a_version_of_its_large_model(scene: Scene, tmp_path: Path) -> None:
    scene.own.card = a_card()
    members = [ModelFolder(folder=tmp_path / name, card=a_card(name=name)) for name in ("small", "intents")]
    for member in members:
        member.folder.mkdir()
        (member.folder / WEIGHTS_FILE).write_bytes(b"")
    cascade = chain_card("intents", tmp_path / "cascade", members, provenance={})
    scene.links["two"].served.card = cascade
    await scene.versions.set_canary(CANARY)
    assert (cascade.name, cascade.chain.names) == ("intents", ("small", "intents"))
    assert await scene.answered_by() == "2"
