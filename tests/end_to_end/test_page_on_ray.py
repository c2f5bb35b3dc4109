"""Tests of the live page in a real browser: under load, when the service ends, and after its restart."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from typing import TYPE_CHECKING

import httpx
import pytest

from optimizer.plans.plan_file import plan_document
from tests.chromium import Opened, opened
from tests.end_to_end.one_ray import URL, OneRay
from tests.end_to_end.tiny_service import Tiny, controlled_service, text_service, two_stages

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.ray, pytest.mark.browser]

LOAD_S = 4.0
SOON_MS = 60_000
START_MS = 180_000


def load(texts: tuple[str, ...], seconds: float) -> Counter[int]:
    """Sends requests one at a time for this time; returns the number of answers by block."""
    exits: Counter[int] = Counter()
    until_s = time.monotonic() + seconds
    with httpx.Client(base_url=URL, timeout=20.0) as client:
        for text in itertools.cycle(texts):
            if time.monotonic() > until_s:
                return exits
            exits[client.post("/predict", json={"inputs": text}).raise_for_status().json()["exit"]] += 1
    return exits


def in_time(page: Opened) -> int:
    [number] = re.findall(r"([\d,]+) in time", page.text("[data-figure=answered]"))
    return int(number.replace(",", ""))


def exits_in_table(page: Opened) -> dict[str, int]:
    rows = [row.split("\t") for row in page.page.locator("#exits-table tbody tr").all_inner_texts()]
    return {name: int(answers.replace(",", "")) for name, answers, _ in rows}


def test_the_page_follows_the_service_through_load_a_plan_change_and_a_restart(
    browser: Browser, one_ray: OneRay, tiny: Tiny
) -> None:
    settings = controlled_service(tiny)
    with opened(browser, "about:blank") as page:
        one_ray.serve(settings)
        page.page.goto(f"{URL}/dashboard")
        page.wait_for_connection("live")
        page.page.locator("#exits-table summary").click()
        began, answered, left = page.serial(), int(page.figure("answered").replace(",", "")), exits_in_table(page)
        before = in_time(page)  # requests during deaths and plan changes may be late
        exits = load(tiny.texts, LOAD_S)
        assert page.serial() - began >= LOAD_S - 2, "about one update a second"
        page.wait_for_updates(2)
        answered += exits.total()
        assert page.figure("answered") == f"{answered:,}"
        assert in_time(page) == before + exits.total()
        names = {0: "ramp 0", 1: "ramp 1", 2: "ramp 2", 3: "the model's end"}
        assert exits_in_table(page) == {name: left.get(name, 0) + exits[block] for block, name in names.items()}
        plan = plan_document(two_stages(tiny.thresholds))
        check_change(page, one_ray.order("apply", {"app": settings.app, "plan": plan}))
        assert page.troubles == []
        one_ray.stop()
        page.wait("document.body.dataset.connection === 'lost'", START_MS)
        assert page.text("#connection").startswith("Disconnected since ")
        one_ray.serve(text_service(tiny))
        page.wait("document.body.dataset.connection === 'live'", START_MS)
        page.wait("document.querySelector('[data-figure=answered] b').textContent === '0'", SOON_MS)
        assert "This service has no controller" in page.text("#changes")


def check_change(page: Opened, epoch: int) -> None:
    """The page shows the requested plan, also as the last of its changes."""
    page.wait(f"document.getElementById('plan-of').textContent.includes('epoch {epoch} ')", SOON_MS)
    page.wait(f"document.querySelector('#changes tbody tr')?.textContent.includes('epoch {epoch}')", SOON_MS)
    assert "now asked" in page.text("#changes tbody tr:first-child")
