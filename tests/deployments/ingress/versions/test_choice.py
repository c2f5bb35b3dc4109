from __future__ import annotations

import pytest
from pydantic import ValidationError

from deployments.api.bodies import Canary, InferRequest
from deployments.api.endpoint import Served
from deployments.versions.choice import MOST_COMPARED, Chosen, Compared, Traffic, VersionChoice, draws
from earlyexit.clock import ManualClock
from earlyexit.errors import DeadlineError, UnknownModelError, VersionUnavailableError
from earlyexit.network.wire import Answer
from tests.deployments.ingress.versions.version_fakes import FakeServed, a_request, card

SHARE = 0.3
IDS = [f"request-{number}" for number in range(200)]
OURS = next(each for each in IDS if draws(each)[0] >= SHARE)
THEIRS = next(each for each in IDS if draws(each)[0] < SHARE)


class Scene:
    """Version 1 is ours; 2 and 3 are elsewhere, unless they are away."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.own = FakeServed(version="1")
        self.others = {version: FakeServed(version=version, label=1) for version in ("2", "3")}
        self.choice = VersionChoice(self.own, self.connect, self.clock)

    async def connect(self, version: str) -> Served:
        if version not in self.others:
            raise UnknownModelError(f"no {version}")
        return self.others[version]

    def chosen(self, request_id: str) -> Chosen | Compared:
        assert self.choice.fork is not None
        return self.choice.fork.choose(request_id)

    async def answered_by(self, request_id: str) -> str:
        served, _ = await self.chosen(request_id).answer(a_request(request_id))
        return served.version


@pytest.fixture
def scene() -> Scene:
    return Scene()


def canary(version: str = "2", share: float = SHARE, compare_share: float = 0.0) -> Traffic:
    return Traffic(canary=Canary(version=version, share=share, compare_share=compare_share))


async def test_without_another_version_nothing_is_chosen(scene: Scene) -> None:
    assert scene.choice.fork is None
    await scene.choice.follow(Traffic(default="1"))
    assert scene.choice.fork is None


async def test_a_canary_gets_the_requests_whose_draw_is_below_its_share(scene: Scene) -> None:
    await scene.choice.follow(canary())
    found = [await scene.answered_by(each) for each in IDS]
    assert found == ["2" if draws(each)[0] < SHARE else "1" for each in IDS]


async def test_what_a_small_share_sends_there_a_larger_one_does_too(scene: Scene) -> None:
    await scene.choice.follow(canary(share=0.1))
    small = {each for each in IDS if await scene.answered_by(each) == "2"}
    await scene.choice.follow(canary(share=0.5))
    large = {each for each in IDS if await scene.answered_by(each) == "2"}
    assert small < large


async def test_another_default_gets_all_that_the_canary_does_not(scene: Scene) -> None:
    await scene.choice.follow(Traffic(default="2"))
    assert {await scene.answered_by(each) for each in IDS} == {"2"}
    await scene.choice.follow(Traffic(default="2", canary=Canary(version="3", share=SHARE)))
    assert (await scene.answered_by(OURS), await scene.answered_by(THEIRS)) == ("2", "3")
    await scene.choice.follow(Traffic(default="2", canary=Canary(version="1", share=SHARE)))
    assert (await scene.answered_by(OURS), await scene.answered_by(THEIRS)) == ("2", "1")


async def test_requests_are_timed_and_counted_by_version(scene: Scene) -> None:
    await scene.choice.follow(canary())
    for each in (OURS, THEIRS, THEIRS):
        await scene.answered_by(each)
    scene.others["2"].failure = DeadlineError("late")
    with pytest.raises(DeadlineError, match="late"):
        await scene.answered_by(THEIRS)
    tally = scene.choice.tally
    assert (tally.of("1").answered, tally.of("2").answered) == (1, 2)
    assert (tally.of("2").errors, tally.of("2").exits) == ({"deadline": 1}, {1: 2})
    assert sum(tally.of("2").latencies.values()) == 2


async def test_a_version_that_is_gone_costs_nobody_an_answer(scene: Scene) -> None:
    await scene.choice.follow(canary())
    scene.others["2"].failure = VersionUnavailableError("gone", retry_after_s=1.0)
    assert await scene.answered_by(THEIRS) == "1"
    assert scene.choice.tally.of("2").errors == {"version_unavailable": 1}


async def test_a_version_that_cannot_be_reached_is_left_out(scene: Scene) -> None:
    await scene.choice.follow(canary(version="4"))
    assert scene.choice.fork is None
    await scene.choice.follow(Traffic(default="4", canary=Canary(version="2", share=SHARE)))
    assert (await scene.answered_by(OURS), await scene.answered_by(THEIRS)) == ("1", "2")


async def test_figures_begin_anew_with_other_versions_and_not_with_another_share(scene: Scene) -> None:
    await scene.choice.follow(canary())
    await scene.answered_by(THEIRS)
    await scene.choice.follow(canary(share=1.0))
    assert scene.choice.tally.of("2").answered == 1
    await scene.choice.follow(canary(version="3"))
    assert scene.choice.tally.versions["3"].answered == 0
    assert "2" not in scene.choice.tally.versions


@pytest.mark.parametrize("request_id", [OURS, THEIRS])
async def test_compared_requests_are_asked_of_both_and_answered_by_one(scene: Scene, request_id: str) -> None:
    scene.others["2"].card = card(labels=("other", "bill"))
    await scene.choice.follow(canary(compare_share=1.0))
    assert await scene.answered_by(request_id) == ("1" if request_id == OURS else "2")
    await scene.choice.comparisons.done()
    assert (scene.own.asked, scene.others["2"].asked) == ([request_id], [request_id])
    assert (scene.choice.tally.same, scene.choice.tally.other) == (1, 0)  # both say "bill", under different numbers


async def test_only_the_share_is_compared(scene: Scene) -> None:
    await scene.choice.follow(canary(share=0.0, compare_share=0.2))
    for each in IDS:
        await scene.answered_by(each)
        await scene.choice.comparisons.done()
    assert scene.others["2"].asked == [each for each in IDS if draws(each)[1] < 0.2]
    assert scene.choice.tally.of("2").answered == 0


async def test_a_comparison_that_fails_is_nobodys_failure(scene: Scene) -> None:
    await scene.choice.follow(canary(share=0.0, compare_share=1.0))
    scene.others["2"].failure = DeadlineError("late")
    assert await scene.answered_by(OURS) == "1"
    await scene.choice.comparisons.done()
    assert (scene.choice.tally.failed, scene.choice.tally.of("2").errors) == (1, {})


async def test_where_the_other_version_answered_instead_nothing_is_compared(scene: Scene) -> None:
    await scene.choice.follow(canary(share=1.0, compare_share=1.0))
    scene.others["2"].failure = VersionUnavailableError("gone", retry_after_s=1.0)
    assert await scene.answered_by(OURS) == "1"
    await scene.choice.comparisons.done()
    assert (len(scene.own.asked), scene.choice.tally.failed) == (1, 0)


async def test_comparisons_do_not_pile_up(scene: Scene) -> None:
    await scene.choice.follow(canary(share=0.0, compare_share=1.0))
    for each in IDS[: MOST_COMPARED + 3]:  # no task of ours runs before we wait
        served, answers = await answer_at_once(scene, a_request(each))
        scene.choice.comparisons.begin(a_request(each), served, answers, scene.others["2"])
    await scene.choice.comparisons.done()
    assert (scene.choice.tally.other, scene.choice.tally.skipped) == (MOST_COMPARED, 3)


async def answer_at_once(scene: Scene, request: InferRequest) -> tuple[Served, list[Answer]]:
    return scene.own, await scene.own.infer(request)


# Draws


def test_a_requests_draws_are_the_first_and_second_word_of_its_ids_hash() -> None:
    # printf r-1 | b2sum -l 64: 7d99a80e 76bbad0e, little-endian
    assert draws("r-1") == (0x0EA8997D / 2**32, 0x0EADBB76 / 2**32)
    for any_id in ("", "ä", "x" * 10_000):
        assert all(0 <= drawn < 1 for drawn in draws(any_id))


def test_the_share_of_many_ids_is_about_the_one_asked_for_and_the_draws_are_not_alike() -> None:
    drawn = [draws(f"request-{number}") for number in range(10_000)]
    assert sum(first < 0.1 for first, _ in drawn) == pytest.approx(1000, abs=100)  # 3.3 standard deviations
    assert sum(first < 0.1 and second < 0.1 for first, second in drawn) == pytest.approx(100, abs=33)


def test_a_canary_that_contradicts_itself_is_refused() -> None:
    wrong: list[dict[str, object]] = [
        {"share": 1.1},
        {"share": -0.1},
        {"compare_share": 2},
        {"shares": 0},
        {"version": ""},
        {"share": "0.1"},
    ]
    for fields in wrong:
        with pytest.raises(ValidationError):
            Canary.model_validate({"version": "2"} | fields)
