from __future__ import annotations

from deployments.versions.store import AppStatus, IndexRow, Listed, app_of, index_rows

LISTED = [
    Listed(app="two", model="intents", version="2"),
    Listed(app="one", model="intents", version="1"),
    Listed(app="gone", model="intents", version="0"),
]


def statuses(**words: str) -> dict[str, AppStatus]:
    said = {"DEPLOY_FAILED": "why"}
    return {name: AppStatus(status=word, message=said.get(word, "")) for name, word in words.items()}


def row(version: str, state: str, reason: str = "") -> IndexRow:
    return IndexRow(name="intents", version=version, state=state, reason=reason)


def test_the_index_is_what_serve_has_in_order_of_the_versions() -> None:
    assert index_rows(LISTED, statuses(one="RUNNING", two="RUNNING", other="RUNNING")) == [
        row("1", "READY"),
        row("2", "READY"),
    ]


def test_serves_words_are_tritons_and_what_fails_says_why() -> None:
    assert index_rows(LISTED, statuses(one="DEPLOYING", two="DEPLOY_FAILED", gone="DELETING")) == [
        row("0", "UNLOADING", "gone is DELETING"),
        row("1", "LOADING", "one is DEPLOYING"),
        row("2", "UNAVAILABLE", "two is DEPLOY_FAILED: why"),
    ]


def test_of_two_applications_with_a_version_the_running_one_serves_it() -> None:
    listed = [*LISTED, Listed(app="again", model="intents", version="2")]
    assert app_of(listed, statuses(two="RUNNING", again="DEPLOYING"), "intents", "2") == "two"
    assert app_of(listed, statuses(two="RUNNING"), "intents", "0") is None
    assert app_of(listed, statuses(two="RUNNING"), "other", "2") is None
