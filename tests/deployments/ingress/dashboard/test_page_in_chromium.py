"""The page in a real browser, with a fake service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from earlyexit.network.boundary import Split
from earlyexit.tasks.checks import colours
from optimizer.plans.plan import PlacedPlan, Stage
from tests.chromium import NARROW, WIDE, Opened, opened
from tests.deployments.ingress.api.dense import FILES, HEATMAPS, SKY, DenseBackend
from tests.deployments.ingress.dashboard.fake_service import NUM_BLOCKS, STAGES, FakeService, plan, served
from tests.earlyexit.tasks.maps import BODY
from tests.free_port import free_port
from tests.model_cards import a_card

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

PATIENCE_S = 15.0


@contextmanager
def looked_at(browser: Browser, service: FakeService, **options: Any) -> Iterator[Opened]:
    with served(service, free_port()) as url, opened(browser, f"{url}/dashboard", **options) as page:
        yield page


def soon(condition: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.05)
    return condition()


def test_the_page_updates_and_loads_only_from_the_service(browser: Browser) -> None:
    service = FakeService()
    with looked_at(browser, service) as page:
        page.wait_for_connection("live")
        page.wait_for_updates(2)
        assert 200 < float(page.figure("goodput")) < 400, "299 a second; the clock is the machine's, which may be late"
        assert page.figure("agreement") == "99.31"
        assert (page.figure("p99"), "beyond" in page.text("[data-figure=p99]")) == ("101", False)
        assert page.troubles == []
        origin = page.requested_urls[0].removesuffix("/dashboard")
        assert all(url.startswith(f"{origin}/dashboard") for url in page.requested_urls)


def test_the_figures_are_those_of_the_service(browser: Browser) -> None:
    with looked_at(browser, FakeService(held_s=100.0)) as page:
        page.wait_for_updates(2)
        assert page.figure("answered") == "30,000"
        assert "29,850 in time" in page.text("[data-figure=answered]")
        assert "320 so far" in page.text("[data-figure=dropped]")
        assert page.text("#drops tbody tr:first-child") == "admission\t0.0/s\t300"
        head = page.text("#plan .stage:first-child .stage-head").split("\n")
        assert head[:3] == ["Stage 0", "emulated:V100", "9 replicas"]
        changes = page.page.locator("#changes tbody tr")
        outcomes = [row.split("\t")[1] for row in changes.all_inner_texts()]
        assert outcomes == ["now period", "turned down period", "taken period"]
        assert "251/s of 290/s offered, 312 dropped" in changes.nth(2).inner_text()


def test_every_chart_has_its_figures_as_a_table(browser: Browser) -> None:
    with looked_at(browser, FakeService()) as page:
        page.wait_for_updates(2)
        rows = {}
        for name in ("plan", "batches", "exits", "survival", "rates", "latency", "queue"):
            page.page.locator(f"#{name}-table summary").click()
            page.page.wait_for_selector(f"#{name}-table tbody tr")
            rows[name] = page.page.locator(f"#{name}-table table").first.locator("tbody tr").count()
        assert (rows["plan"], rows["batches"], rows["exits"], rows["survival"]) == (3, 12, 12, 12)
        assert page.text("#batches-table tbody tr:nth-child(4)") == "block 3\t8\t4.3\t6.0"
        devices = page.page.locator("#plan-table tbody td:nth-child(2)").all_inner_texts()[:3]
        assert ["slower" in device for device in devices] == [True, True, False], "as far as `time_scale` is not 1"
        assert page.findings() == []


def test_marks_keep_the_keyboard_focus_while_figures_change(browser: Browser) -> None:
    with looked_at(browser, FakeService()) as page:
        page.wait_for_updates(2)
        page.page.locator("#survival .hit[tabindex='0']").focus()
        for _ in range(3):
            page.page.keyboard.press("ArrowLeft")
        page.wait_for_updates(2)
        label = page.page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert label.startswith("block 8: forecast 29.0 %, probes 30.2 %")
        assert page.text("#survival .tip").startswith("block 8")
        page.page.keyboard.press("Escape")
        assert page.page.locator("#survival .tip").count() == 0
        stops = page.page.locator("#plan .replica[tabindex='0']")
        assert stops.count() == len(STAGES)
        stops.first.press("End")
        assert page.page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("replica 3, ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_axe_finds_nothing_serious(browser: Browser, scheme: str, width: int) -> None:
    service = FakeService(suspended="too few accelerators", card=a_card(name="m" * 90, num_blocks=NUM_BLOCKS))
    with looked_at(browser, service, scheme=scheme, width=width) as page:
        page.wait_for_updates(2)
        assert page.findings() == []
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_batches_limited_by_tokens_are_shown_in_tokens(browser: Browser, width: int) -> None:
    with looked_at(browser, FakeService(followed=by_tokens(), length=300), width=width) as page:
        page.wait_for_updates(2)
        assert page.text("#plan .stage:first-child .split:first-child .batch:not(.tokens)") == "6.0 inputs"
        assert page.text("#plan .stage:first-child .split:first-child .batch.tokens") == "1,800 of 2,400 tokens 75 %"
        fill = page.page.locator("#plan .stage:first-child .split:first-child .fill i")
        assert fill.get_attribute("style") == "width: 75%;"
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        for box in page.page.locator("#plan .batch.tokens").all():
            assert box.evaluate("each => each.scrollWidth <= each.clientWidth"), "the words stay inside their split"
        assert page.findings() == []


def by_tokens() -> PlacedPlan:
    """Returns the fake service's plan with 2,400 tokens per batch."""
    plan = FakeService().followed.plan
    stages = tuple(
        replace(stage, splits=tuple(replace(split, tokens=2400) for split in stage.splits)) for stage in plan.stages
    )
    return PlacedPlan(plan=replace(plan, stages=stages))


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_stages_and_batches_are_shown_by_chain(browser: Browser, width: int) -> None:
    whole = Stage(device="emulated:K80", replicas=66, splits=(Split(first=0, end=NUM_BLOCKS, batch=4, ramps=(6,)),))
    both = PlacedPlan(plan=replace(plan(4).plan, stages=(*STAGES, whole), shares=(0.75, 0.25)))
    with looked_at(browser, FakeService(followed=both), width=width) as page:
        page.wait_for_updates(2)
        head = "Chain 1: 25 % of the inputs (planned 25 %) · 20 unanswered, 25 % of the admission limit"
        assert page.text("#plan .chain:nth-child(2)").split("\n")[:2] == [head, "Stage 2"]
        assert page.text("#batches .legend") == "chain 0\nchain 1"
        assert page.text("#plan .more") == "and 2 more"
        page.page.locator("#batches-table summary").click()
        assert page.text("#batches-table tbody tr:nth-child(13)") == "chain 1, block 0\t4\t3.0\t3.0"
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.findings() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_an_empty_page(browser: Browser, scheme: str) -> None:
    with looked_at(browser, FakeService(idle=True, has_controller=False), scheme=scheme) as page:
        page.wait_for_updates(2)
        assert page.findings() == []
        assert all("No answers in the last 60 s" in page.text(chart) for chart in ("#exits", "#batches"))
        assert "This service has no controller" in page.text("#changes")
        assert "no forecast without a controller" in page.text("#survival-of")
        assert page.text("#drops") == "None of 0 inputs."
        assert page.figure("p99") == "\N{EN DASH}"
        assert page.troubles == []


@dataclass
class ImageService(FakeService, DenseBackend):
    """A fake service of a model that segments images, or finds joints in them."""


def test_the_class_map_of_an_image_is_drawn_next_to_it(browser: Browser) -> None:
    with looked_at(browser, ImageService()) as page:
        page.wait_for_updates(1)
        page.page.set_input_files("#try-file", {"name": "a.png", "mimeType": "image/png", "buffer": FILES[0]})
        page.wait("!document.getElementById('try-pictures').hidden")
        assert page.text("#try-said").startswith("Left after block 1, score 0.9")
        classes = page.page.locator("#try-table tbody tr").all_inner_texts()
        assert {row.split("\t")[0] for row in classes} == {"road", "car", "sky"}
        canvas = page.page.locator("#try-answer")
        corner = canvas.evaluate("each => [...each.getContext('2d').getImageData(0, 0, 1, 1).data.slice(0, 3)]")
        assert tuple(corner) == tuple(colours(4)[SKY])
        assert page.troubles == []
        assert page.findings() == []


def test_the_page_shows_joints_in_the_image_or_the_refusal(browser: Browser) -> None:
    with looked_at(browser, ImageService(dense=BODY, outputs=HEATMAPS)) as page:
        page.wait_for_updates(1)
        page.page.set_input_files("#try-file", {"name": "a.png", "mimeType": "image/png", "buffer": FILES[0]})
        page.wait("!document.getElementById('try-pictures').hidden")
        assert page.text("#try-table tbody tr:first-child") == "head\t5.5\t9.5\t50.0 %"
        assert page.troubles == []
        page.page.set_input_files("#try-file", {"name": "a.txt", "mimeType": "image/gif", "buffer": b"GIF89a"})
        page.wait("document.getElementById('try-said').textContent.includes('this model takes')")
        assert "content-type 'image/gif'; this model takes application/json, image/jpeg" in page.text("#try-said")


def test_a_suspended_service_and_silent_processes_are_shown(browser: Browser) -> None:
    service = FakeService(suspended="too few accelerators", controller_answers=False)
    with looked_at(browser, service) as page:
        page.wait_for_updates(1)
        assert page.page.locator(".notice").all_inner_texts() == [
            "Nothing is served: too few accelerators",
            "The controller does not answer. Serving continues. Plan, forecast and agreement are from its last report.",
        ]
        assert page.text("#changes") == "No plan was made yet."
        assert page.text("#survival-of") == "no forecast yet"
        service.ingresses_answer = False
        page.wait_for_connection("silent")
        assert page.text("#connection") == "No ingress answers"


def test_a_viewer_beyond_the_limit_sees_a_message(browser: Browser) -> None:
    service = FakeService(max_viewers=1)
    with served(service, free_port()) as url, opened(browser, f"{url}/dashboard") as first:
        first.wait_for_connection("live")
        with opened(browser, f"{url}/dashboard") as second:
            second.wait_for_connection("lost")
            assert second.text("#connection") == "No connection, or too many viewers; trying again"
        assert len(service.page.viewers) == 1


def test_a_closed_or_hidden_page_requests_nothing(browser: Browser) -> None:
    service = FakeService()
    with looked_at(browser, service) as page:
        page.wait_for_connection("live")
        page.page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
        page.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        assert soon(lambda: not service.page.viewers)
        looks = service.num_looks
        page.page.evaluate("delete document.hidden")
        page.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.wait_for_updates(1)
        assert soon(lambda: service.num_looks > looks)  # the first update may repeat the last look
    assert soon(lambda: len(service.page.viewers) == 0)


def test_colours_are_the_systems_until_others_are_chosen(browser: Browser) -> None:
    dark, light = "rgb(15, 18, 22)", "rgb(246, 247, 248)"
    with looked_at(browser, FakeService(), scheme="dark") as page:
        background = "getComputedStyle(document.body).backgroundColor"
        assert page.page.evaluate(background) == dark
        page.page.get_by_role("button", name="Colours: auto").click()
        assert page.page.evaluate(background) == light
        page.page.reload()
        assert page.text("#theme") == "Colours: light"
        assert page.page.evaluate(background) == light
        page.page.get_by_role("button", name="Colours: light").click()
        assert page.page.evaluate(background) == dark
