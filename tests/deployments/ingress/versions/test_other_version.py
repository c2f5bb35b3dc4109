from __future__ import annotations

import pytest

from deployments.versions.versions import OtherVersion, connected
from earlyexit.errors import AdmissionError, DeadlineError, VersionUnavailableError
from tests.deployments.ingress.versions.version_world import FakeLink, FakeServed, a_request


async def other(link: FakeLink, timeout_s: float = 30.0) -> OtherVersion:
    return await connected("two", "2", link, default_timeout_s=timeout_s)


async def test_answers_and_errors_are_those_of_the_other_side() -> None:
    served = FakeServed(version="2", label=1)
    version = await other(FakeLink(served=served))
    answers = await version.infer(a_request("r-7", "pay", "my bill"))
    assert (version.version, [answer.value for answer in answers], served.asked) == ("2", [1, 1], ["r-7"])
    served.failure = AdmissionError("late", retry_after_s=3.0)
    with pytest.raises(AdmissionError, match="late") as caught:
        await version.infer(a_request())
    assert caught.value.retry_after_s == 3.0


async def test_a_side_that_hangs_is_given_up_after_the_timeout() -> None:
    link = FakeLink(served=FakeServed(version="2"), is_silent=True)
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
