"""The live page of a real service, in a real browser: under load, when the service ends, and when it is back."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from optimizer.plan_file import plan_document, write_plan
from tests.chromium import Opened, chromium, opened
from tests.end_to_end.tiny_service import make_model, median_entropies, running, some_texts, two_stages

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.ray, pytest.mark.browser]

PORT = 8143
LOAD_S = 6.0
SOON_MS = 10_000
START_MS = 90_000
CHANGE_S = 90.0
STREAM_S = 20.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def load(url: str, texts: tuple[str, ...], seconds: float) -> Counter[int]:
    """Ask for so long, one at a time; how many answers left after each block."""
    exits: Counter[int] = Counter()
    until_s = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=20.0) as client:
        for text in itertools.cycle(texts):
            if time.monotonic() > until_s:
                return exits
            exits[client.post("/predict", json={"inputs": text}).raise_for_status().json()["exit"]] += 1
    return exits


def states(url: str) -> Iterator[dict[str, Any]]:
    """What a viewer of its own gets."""
    with httpx.stream("GET", f"{url}/dashboard/events", timeout=STREAM_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def first_state(url: str) -> dict[str, Any]:
    stream = states(url)
    state = next(stream)
    stream.close()  # type: ignore[attr-defined] # a generator
    return state


def exits_in_table(page: Opened) -> dict[str, int]:
    rows = [row.split("\t") for row in page.page.locator("#exits-table tbody tr").all_inner_texts()]
    return {name: int(answers.replace(",", "")) for name, answers, _ in rows}


def test_the_page_follows_the_service_through_load_a_change_an_end_and_a_new_beginning(
    browser: Browser, tmp_path: Path
) -> None:
    texts = some_texts(24)
    model, tokenizer = make_model(tmp_path)
    plan = two_stages(median_entropies(model, tokenizer, texts))
    write_plan(plan, tmp_path / "plan.yaml")
    with opened(browser, "about:blank") as page:
        with running(tmp_path, script="serve_controlled.py", port=PORT) as service:
            page.page.goto(f"{service.url}/dashboard")
            page.wait_for_connection("live")
            assert page.figure("answered") == "0"
            began = page.serial()
            exits = load(service.url, texts, LOAD_S)
            assert page.serial() - began >= LOAD_S - 2, "about one update a second"
            page.wait_for_updates(2)
            assert page.figure("answered") == f"{exits.total():,}"
            assert f"{exits.total():,} in time" in page.text("[data-figure=answered]")
            page.page.locator("#exits-table summary").click()
            names = {0: "ramp 0", 1: "ramp 1", 2: "ramp 2", 3: "the model's end"}
            assert exits_in_table(page) == {name: exits[block] for block, name in names.items()}
            check_change(page, service.ask(json.dumps(plan_document(plan)), tmp_path / "service.log", CHANGE_S))
            check_that_it_rests(service.url, page)
            page.page.goto(f"{service.url}/dashboard")
            page.wait_for_connection("live")
            assert page.troubles == []
        page.wait_for_connection("lost")
        assert page.text("#connection").startswith("Disconnected since ")
        with running(tmp_path, script="serve_folder.py", port=PORT):
            page.wait("document.body.dataset.connection === 'live'", START_MS)
            page.wait("document.querySelector('[data-figure=answered] b').textContent === '0'", SOON_MS)
            assert "This service has no controller" in page.text("#changes")


def check_change(page: Opened, verdict: str) -> None:
    """The plan that was asked for is the one that the page shows, and the last of its changes."""
    epoch = json.loads(verdict)["epoch"]
    page.wait(f"document.getElementById('plan-of').textContent.includes('epoch {epoch} ')", SOON_MS)
    page.wait(f"document.querySelector('#changes tbody tr')?.textContent.includes('epoch {epoch}')", SOON_MS)
    assert "now asked" in page.text("#changes tbody tr:first-child")


def check_that_it_rests(url: str, page: Opened) -> None:
    """Nobody looks for a while: whoever looks next finds that hardly any look was taken meanwhile."""
    page.page.goto("about:blank")
    before = first_state(url)
    time.sleep(4.0)  # nothing may happen: there is nothing to poll
    after = first_state(url)
    assert after["at_s"] - before["at_s"] >= 4.0
    assert after["serial"] - before["serial"] <= 2
