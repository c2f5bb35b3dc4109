from __future__ import annotations

import asyncio

import pytest

from deployments.versions.other import OtherVersion, PatientLink, connected
from earlyexit.errors import AdmissionError, DeadlineError, VersionUnavailableError
from tests.deployments.ingress.versions.version_fakes import FakeLink, FakeServed, SilentLink, a_request


async def other(link: FakeLink) -> OtherVersion:
    return await connected("two", "2", link, default_timeout_s=0.0)


async def test_answers_are_those_of_the_other_side() -> None:
    link = FakeLink(served=FakeServed(version="2", label=1))
    version = await other(link)
    answers = await version.infer(a_request("r-7", "pay", "my bill"))
    assert (version.version, [answer.value for answer in answers]) == ("2", [1, 1])
    assert link.served.asked == ["r-7"]


async def test_errors_of_the_other_side_are_the_same_here() -> None:
    link = FakeLink(served=FakeServed(version="2"))
    version = await other(link)
    link.served.failure = AdmissionError("late", retry_after_s=3.0)
    with pytest.raises(AdmissionError, match="late") as caught:
        await version.infer(a_request())
    assert caught.value.retry_after_s == 3.0


async def test_whatever_ray_says_of_what_is_gone_is_one_error() -> None:
    link = FakeLink(served=FakeServed(version="2"))
    version = await other(link)
    link.gone = RuntimeError("actor died")
    with pytest.raises(VersionUnavailableError, match="version '2' cannot be reached"):
        await version.infer(a_request())


async def test_requests_that_wait_for_what_is_gone_are_given_up_together() -> None:
    silent = SilentLink(served=FakeServed(version="2"))
    link = PatientLink(silent)
    [facts] = await link.facts()
    version = OtherVersion(facts, link, default_timeout_s=30.0)
    waiting = [asyncio.create_task(version.infer(a_request(each))) for each in ("r-1", "r-2")]
    await silent.asked.wait()
    link.give_up()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in outcomes] == [VersionUnavailableError] * 2


async def test_who_is_cancelled_takes_what_it_waits_for_along() -> None:
    silent = SilentLink(served=FakeServed(version="2"))
    waiting = asyncio.create_task(PatientLink(silent).answer(a_request()))
    await silent.asked.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert silent.was_cancelled


async def test_a_side_that_hangs_is_given_up_after_the_timeout() -> None:
    link = SilentLink(served=FakeServed(version="2"))
    [facts] = await link.facts()
    version = OtherVersion(facts, link, default_timeout_s=0.01, grace_s=0.0)
    with pytest.raises(DeadlineError, match=r"no answer within 0.01 s"):
        await version.infer(a_request())


@pytest.mark.parametrize(
    ("link", "words"),
    [
        pytest.param(FakeLink(gone=RuntimeError("no replica")), "does not answer: RuntimeError", id="gone"),
        pytest.param(FakeLink(served=FakeServed(version="2"), agreements=()), "does not answer", id="none"),
        pytest.param(FakeLink(served=FakeServed(version="3")), "two serves version '3' now", id="another"),
    ],
)
async def test_an_application_that_is_not_that_version_is_not_connected(link: FakeLink, words: str) -> None:
    with pytest.raises(VersionUnavailableError, match=words):
        await other(link)
