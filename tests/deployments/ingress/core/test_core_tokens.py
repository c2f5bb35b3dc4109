"""Inputs of different lengths, under plans whose batches tokens bound: four inputs or a hundred tokens."""

from __future__ import annotations

import pytest

from deployments.ingress.core.calls import weigh
from deployments.ingress.core.ingress_core import RETRY_PAUSE_S
from deployments.ingress.core.routes import PARTS
from earlyexit.errors import AdmissionError
from tests.deployments.ingress.core.core_scene import CoreScene, plan

TOKENS = 100


def test_a_call_that_queues_behind_another_leaves_once_a_batchs_tokens_wait_and_holds_no_more() -> None:
    scene = CoreScene(plan(tokens=TOKENS))
    scene.submit("a", 30)
    scene.submit("b", 60)
    scene.submit("c", 30)
    assert scene.log == ["0 send 0: a to first for block 0"]  # 90 tokens wait
    scene.submit("d", 20)
    assert scene.log[1:] == ["0 send 1: bc to first for block 0"]
    scene.answer(0, "a")
    scene.answer(1, "b")
    assert scene.log[2:] == [
        "0 answer a is a after block 3",
        "0 answer b is b after block 3",
        "0 send 2: d to first for block 0",
    ]


def test_or_once_a_batchs_inputs_wait_however_short() -> None:
    scene = CoreScene(plan(tokens=TOKENS))
    for letter in "abcdef":
        scene.submit(letter, 2)
    assert scene.log == ["0 send 0: a to first for block 0", "0 send 1: bcde to first for block 0"]


def test_an_input_larger_than_a_batch_goes_alone() -> None:
    scene = CoreScene(plan(tokens=TOKENS, replicas=3))
    scene.submit("abc", 60, 101, 40)
    assert scene.log == [
        "0 send 0: a to first for block 0",
        "0 send 1: b to first for block 0",
        "0 send 2: c to first for block 0",
    ]
    scene.answer(1, "b")
    assert scene.outcomes["b"] == "answered"


def test_one_that_waits_alone_and_is_larger_than_a_batch_waits_for_nobody_else() -> None:
    scene = CoreScene(plan(tokens=TOKENS))
    scene.submit("a", 1)
    scene.submit("b", 5_000)
    assert scene.log == ["0 send 0: a to first for block 0", "0 send 1: b to first for block 0"]


def test_what_starts_again_waits_with_its_tokens_before_all_others() -> None:
    scene = CoreScene(plan(tokens=TOKENS))
    scene.submit("ab", 70, 20)
    scene.submit("cd", 20, 60)
    scene.fail(0)
    scene.until(2 * RETRY_PAUSE_S)
    scene.submit("e", 15)
    assert scene.log == [
        "0 send 0: ab to first for block 0",
        "0 send 1: cd to first for block 0",
        "0.05 again 2 of first",  # 90 tokens
        "0.1 send 2: ab to first for block 0",
    ]


def test_a_plan_that_counts_tokens_takes_what_waits_by_them_and_one_that_does_not_by_number() -> None:
    scene = CoreScene(plan(), calls_per_replica=1)
    scene.submit("a", 10)
    scene.submit("bcdefghi", *[40] * 8)
    scene.follow(plan(epoch=2, tokens=TOKENS))
    scene.answer(0, "a")
    scene.follow(plan(epoch=3))
    scene.answer(1, "b")
    assert [words for words in scene.log if "send" in words] == [
        "0 send 0: a to first for block 0",
        "0 send 1: bc to first for block 0",
        "0 send 2: defg to first for block 0",
    ]


def test_probes_leave_by_tokens_as_others_do() -> None:
    scene = CoreScene(plan(tokens=TOKENS), probe_share=1.0)
    scene.submit("abc", 60, 60, 60)
    assert [len(call.inputs) for call in scene.calls] == [1, 1]


def test_a_piece_weighs_its_tokens_at_every_stage() -> None:
    scene = CoreScene(plan(tokens=TOKENS))
    scene.submit("abc", 25, 25, 50)
    scene.go_on(0, "bc")
    first, later = scene.calls
    assert weigh(first.stage, 0, first.inputs) == (PARTS, PARTS)
    assert weigh(later.stage, 2, later.inputs) == (3 * PARTS // 4, PARTS)
    assert weigh(CoreScene(plan()).core.route.stages[0], 0, first.inputs) == (3, 4)


# Admission: what is inside is counted by what it costs

PREDICTED = {"rate_per_s": 10.0, "tokens_per_input": 50.0}
"""An SLO of a second has room for 350 tokens: a burst's share is left."""


def scene_with_slo() -> CoreScene:
    return CoreScene(plan(tokens=TOKENS, predicted=PREDICTED), slo_s=1.0, calls_per_replica=9)


def test_a_long_request_is_refused_by_its_own_tokens_and_the_short_one_behind_it_is_not() -> None:
    scene = scene_with_slo()
    scene.submit("a", 250, deadline_s=1.0)
    with pytest.raises(AdmissionError, match=r"within 1 s now, but 0\.571 s later") as refused:
        scene.submit("b", 300, deadline_s=1.0)
    assert refused.value.retry_after_s == pytest.approx(200 / 350)
    scene.submit("c", 100, deadline_s=1.0)
    assert (scene.core.num_unanswered, scene.core.counts.drops) == (2, {"admission": 1})
    with pytest.raises(AdmissionError):  # nothing is shorter than a token: refused before it is encoded
        scene.core.check(1, 1.0, 0.0)
    scene.answer(0, "a")
    scene.core.check(1, 1.0, 0.0)
    scene.submit("d", 250, deadline_s=1.0)
    assert scene.core.counts.arrived == 5


def test_what_is_still_to_be_submitted_counts_as_inputs_were_so_far() -> None:
    scene = scene_with_slo()
    scene.submit("a", 50, deadline_s=1.0)
    scene.core.check(1, 1.0, 0.0, num_coming=5)
    with pytest.raises(AdmissionError):
        scene.core.check(1, 1.0, 0.0, num_coming=6)


def test_how_long_the_oldest_have_waited_is_told_by_length() -> None:
    scene = CoreScene(plan(tokens=TOKENS), calls_per_replica=1)
    scene.submit("a", 1)
    for second, length in enumerate((3, 4, 90, 65, 1)):
        scene.now_s = float(second)
        scene.submit("bcdef"[second], length, deadline_s=20.0)
    scene.give_up("b")
    assert scene.core.peek(10.0, 0.0).oldest_s == {1: 6.0, 4: 9.0, 128: 8.0}
