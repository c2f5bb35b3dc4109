"""The life of requests at one core, as literal logs of its actions."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable
from typing import Any

import pytest

from deployments.ingress.core.calls import LONGEST_RETRY_S
from deployments.ingress.core.ingress_core import SUSPENDED_RETRY_S
from deployments.ingress.core.inputs import CALL_GRACE_S
from deployments.ingress.core.routes import SMOOTHING, KVPlacement, StageReplicas, sequence_numbers
from earlyexit.engine.engine import Dispatch
from earlyexit.errors import (
    AdmissionError,
    DeadlineError,
    ExecutionError,
    InputError,
    OverloadedError,
    PlanError,
    SequenceLostError,
    StageUnavailableError,
)
from earlyexit.network.boundary import AfterAnswer
from earlyexit.network.chain import ModelChain
from optimizer.plans.plan import PlacedPlan
from tests.deployments.ingress.core.core_world import (
    NAMES,
    CoreWorld,
    Up,
    chains,
    observed_plan,
    placed,
    plan,
    side_by_side,
    split,
    stage,
    staying,
)

TOKENS = 100


def test_inputs_are_answered_at_the_stage_where_they_leave() -> None:
    world = CoreWorld()
    world.submit("ab")
    world.now_s = 1.0
    world.answer(0, "a", block=1)
    world.go_on(0, "b")
    world.now_s = 2.0
    world.answer(1, "b")
    assert world.log == [
        "0 send 0: ab to first for block 0",
        "1 answer a is a after block 1",
        "1 send 1: (b) to second for block 2",
        "2 answer b is b after block 3",
    ]
    assert world.core.num_unanswered == 0


# Plans


def test_a_plan_that_cannot_be_followed_changes_nothing() -> None:
    world = CoreWorld()
    with pytest.raises(PlanError, match="a plan of 5 blocks cannot follow one of 4"):
        world.follow(placed(stage(split(0, 5)), epoch=2))
    world.follow(plan(epoch=0, cut=3))  # ignored, because it is older than the current plan
    world.submit("a")
    world.go_on(0, "a")
    assert (world.core.placed, world.log[1]) == (plan(), "0 send 1: (a) to second for block 2")


def test_exits_are_counted_under_all_plans() -> None:
    world = CoreWorld()
    world.submit("ab")
    world.submit("d")
    world.answer(0, "a", block=1)
    world.follow(plan(epoch=2))
    world.submit("c")
    world.answer(0, "b", block=1)
    assert world.core.oldest_epoch == 1  # the second call is still open
    world.answer(1, "d", block=1)
    world.answer(2, "c", block=2)
    assert (world.core.counts.exits, world.core.counts.answered, world.core.oldest_epoch) == ({1: 3, 2: 1}, 4, 2)


def test_without_a_plan_requests_are_refused_with_the_reason() -> None:
    world = CoreWorld(calls_per_replica=1)
    world.submit("abcde")
    world.fail(0)
    world.suspend()
    asks: list[Callable[[], None]] = [lambda: world.submit("f"), lambda: world.core.check_admission(1, 1.0, 0.0)]
    for ask in asks:
        with pytest.raises(StageUnavailableError, match="no plan: nothing is left") as caught:
            ask()
        assert (caught.value.retry_after_s, world.core.peek().suspended) == (SUSPENDED_RETRY_S, True)
    world.until(1.0)
    why = "the service has no plan: nothing is left"
    assert world.log[-2:] == ["0.05 again 4 of first", f"0.05 drop abcd: {why}"]
    world.answer(1, "e")  # inputs in flight may still be answered
    world.follow(plan())
    world.submit("g")
    assert world.log[-2:] == ["1 answer e is e after block 3", "1 send 2: g to first for block 0"]


# The reserve for later stages


def test_the_mean_time_of_later_stages_is_reserved() -> None:
    world = CoreWorld()
    world.submit("a")
    world.now_s = 2.0
    world.go_on(0, "a")
    world.now_s = 4.0
    world.answer(1, "a")
    world.submit("b")
    world.go_on(2, "b")
    world.now_s += 1.0
    world.lose(3, "b")
    world.submit("c")
    assert [call.reserve_s for call in world.calls] == [0.0, 0.0, 2.0, 0.0, 2.0]
    world.go_on(4, "c")
    world.now_s += 4.0
    world.answer(5, "c")
    world.follow(plan(epoch=2, cut=3))
    world.submit("d")
    assert world.calls[6].reserve_s == pytest.approx((2.0 + SMOOTHING * (4.0 - 2.0)) / 2)  # for block 3 alone


@pytest.mark.parametrize(
    ("rules", "reserved_s"),
    [
        pytest.param({"slo_s": 10.0, "admits": False}, [10.0, 2.5, 3.5], id="of the SLO"),
        pytest.param({}, [10.0, 2.5, 3.0], id="without an SLO, of the time until the deadline"),
    ],
)
def test_a_deferred_stage_reserves_slack_or_everything_while_later_times_are_unknown(
    rules: dict[str, Any], reserved_s: list[float]
) -> None:
    world = CoreWorld(plan(dispatch="deferred"), slack=0.25, **rules)
    world.submit("a")
    world.now_s = 1.0
    world.go_on(0, "a")
    world.now_s = 2.0
    world.answer(1, "a")
    world.submit("b", deadline_s=10.0)
    assert [call.reserve_s for call in world.calls] == reserved_s


# Retries and deadlines


def test_an_input_fails_after_its_own_number_of_attempts() -> None:
    world = CoreWorld(max_attempts=2, calls_per_replica=1)
    world.submit("a")
    world.submit("b")
    world.fail(0)
    world.until(1.0)
    world.fail(1)
    world.until(2.0)
    world.fail(2)
    assert world.log[1:] == [
        "0 send 1: b to first for block 0",
        "0.05 again 1 of first",
        "1 send 2: a to first for block 0",
        "1.05 again 1 of first",
        "2 drop a: split-cpu-0 failed 2 times on this input",
        "2 send 3: b to first for block 0",
    ]


def test_a_call_that_hangs_is_aborted_after_the_last_deadline_of_its_inputs() -> None:
    world = CoreWorld(calls_per_replica=1)
    for letter, deadline_s in zip("xab", (1.0, 2.0, 5.0), strict=True):
        world.submit(letter, deadline_s=deadline_s)
    world.answer(0, "x")  # its deadline no longer matters
    world.until(4.0)
    world.answer(1, "b")
    world.until(9.0)
    answered = ["2 drop a: no answer within 2 s", "4 answer b is b after block 3"]
    assert world.log[3:] == [*answered, f"{5 + CALL_GRACE_S:g} hang up 1"]
    assert world.core.wake_s == math.inf


def test_an_input_that_is_cancelled_before_its_retry_leaves_no_timer() -> None:
    world = CoreWorld()
    world.submit("a")
    world.fail(0)
    world.give_up("a")
    world.until(1.0)
    assert (world.core.wake_s, len(world.calls)) == (math.inf, 1)


# Malformed replies, which cost their own inputs at most an attempt


def test_an_input_that_a_reply_names_twice_has_one_outcome() -> None:
    world = CoreWorld()
    world.submit("abcd")
    world.follow(plan(epoch=2))
    world.answer(0, "aa", block=1)
    world.answer_early(0, "bb", block=1)
    world.lose(0, "cc")
    world.go_on(0, "dd")
    assert (world.calls[0].num_remaining, world.calls[1].num_remaining, world.core.counts.answered) == (1, 1, 2)
    world.fail(1)
    world.until(1.0)
    world.answer(2, "dd")
    assert world.outcomes == dict(zip("abcd", ("answered", "answered", "execution", "answered"), strict=True))
    world.answer(0, "b")
    assert (world.core.num_unanswered, world.core.oldest_epoch, world.core.counts.drops["execution"]) == (0, 2, 1)


@pytest.mark.parametrize("block", [-1, 4, 99])
def test_a_reply_with_an_unknown_block_changes_nothing(block: int) -> None:
    world = CoreWorld()
    world.submit("ab")
    for reply in (world.answer, world.answer_early, world.go_on):
        with pytest.raises(ExecutionError, match=f"names block {block}; the model has blocks 0 to 3"):
            reply(0, "a", block=block)
    assert (world.calls[0].num_remaining, world.core.num_unanswered) == (2, 2)


# Admission


def test_the_retry_after_of_a_full_ingress_is_the_longest_wait() -> None:
    world = CoreWorld(max_queued=40, calls_per_replica=1)
    world.now_s = 5.0
    world.submit("AB", deadline_s=9999.0)
    world.submit(string.printable[:36], deadline_s=9999.0)
    for waited_s, retry_after_s in ((0.5, 1.0), (18.0, 18.0), (3600.0, LONGEST_RETRY_S)):
        world.now_s = 5.0 + waited_s
        with pytest.raises(OverloadedError, match="this ingress holds at most 40") as caught:
            world.submit("vwxyz")
        assert caught.value.retry_after_s == retry_after_s
        with pytest.raises(InputError, match="a request has 41 inputs; this ingress holds at most 40 at a time"):
            world.submit("!" * 41)
    assert world.core.counts.drops == {"overloaded": 15}
    world.submit("!?")
    with pytest.raises(OverloadedError):
        world.submit("v")


def test_a_request_that_would_be_late_is_refused_until_it_would_be_in_time() -> None:
    world = CoreWorld(slo_s=1.0)
    world.submit("abcd")
    world.lose(0, "abcd", DeadlineError("late"))  # within the deadline of 10 s, but later than the SLO
    world.submit("efgh")
    with pytest.raises(AdmissionError):
        world.core.check_admission(1, 1.0, 0.0)
    world.until(10.0)  # these took longer than the SLO
    world.core.check_admission(1, 11.0, 10.0)
    with pytest.raises(AdmissionError):
        world.core.check_admission(1, 11.0, 10.0, num_coming=9)
    world.submit("i")
    waits_s = []
    for number in (9, 18, 9000):
        with pytest.raises(AdmissionError, match=r"within 1 s is not possible now") as caught:
            world.core.check_admission(number, 11.0, 10.0)
        waits_s.append(caught.value.retry_after_s)
    assert 0 < waits_s[0] < waits_s[1] < waits_s[2] == LONGEST_RETRY_S
    assert world.core.counts.drops == {"deadline": 8, "admission": 1 + 1 + 9 + 18 + 9000}


# Tokens: a batch is four inputs or a hundred tokens


def test_a_long_request_is_refused_by_its_tokens_but_not_the_short_one_behind_it() -> None:
    predicted = {"rate_per_s": 10.0, "tokens_per_input": 50.0}  # a second has room for 350 tokens
    world = CoreWorld(plan(tokens=TOKENS, predicted=predicted), slo_s=1.0, calls_per_replica=9)
    world.submit("a", 250, deadline_s=1.0)
    with pytest.raises(AdmissionError, match=r"it would be 0\.571 s late") as refused:
        world.submit("b", 300, deadline_s=1.0)
    assert refused.value.retry_after_s == pytest.approx(200 / 350)
    world.submit("c", 100, deadline_s=1.0)
    with pytest.raises(AdmissionError):  # refused before it is encoded, with one token per input
        world.core.check_admission(1, 1.0, 0.0)
    world.answer(0, "a")
    world.core.check_admission(1, 1.0, 0.0, num_coming=1)  # with 175 tokens, the mean so far
    with pytest.raises(AdmissionError):
        world.core.check_admission(1, 1.0, 0.0, num_coming=2)
    assert (world.core.counts.arrived, world.core.counts.drops) == (5, {"admission": 3})
    world.follow(plan(epoch=2))  # which counts inputs, and predicts nothing
    assert world.core.chains.active[0].admission.limit == 350 / 175


def test_a_long_input_goes_to_a_chain_that_has_room_for_its_tokens() -> None:
    predicted = {"rate_per_s": 20.0, "tokens_per_input": 50.0}  # each of two chains has room for 350 tokens
    whole = stage(split(0, 4, tokens=TOKENS))
    world = CoreWorld(placed(whole, whole, shares=(0.5, 0.5), predicted=predicted), slo_s=1.0)
    for letter, tokens in (("a", 250), ("b", 50), ("c", 300)):  # the first chain is drawn for c
        world.submit(letter, tokens, deadline_s=1.0)
    assert [world.core.chains.active.index(each.chain) for each in world.named("abc")] == [0, 1, 1]
    with pytest.raises(AdmissionError, match=r"late"):
        world.submit("d", 300, deadline_s=1.0)


def test_each_plan_forms_batches_of_waiting_inputs_in_its_own_unit() -> None:
    world = CoreWorld(plan(), calls_per_replica=1)
    world.submit("a", 10)
    world.submit("bcdefghi", *[40] * 8)
    world.follow(plan(epoch=2, tokens=TOKENS))
    world.answer(0, "a")
    world.follow(plan(epoch=3))
    world.answer(1, "b")
    assert [words.split()[3] for words in world.log if "send" in words] == ["a", "bc", "defg"]
    world.follow(placed(stage(split(0, 2, tokens=8), split(2, 4, tokens=5)), epoch=4))
    first_stage = world.core.chains.active[0].first_stage
    assert [first_stage.budget(block).tokens for block in range(4)] == [8, 8, 5, 5]


def test_the_longest_wait_is_reported_by_length() -> None:
    world = CoreWorld(plan(tokens=TOKENS), calls_per_replica=1)
    world.submit("a", 1)
    for second, length in enumerate((3, 4, 90, 65, 1)):
        world.now_s = float(second)
        world.submit("bcdef"[second], length, deadline_s=20.0)
    world.give_up("b")
    assert world.core.chains.oldest_s(10.0) == {1: 6.0, 4: 9.0, 128: 8.0}


# Replicas that share processors


def test_a_second_replica_gets_inputs_only_when_the_first_has_a_full_batch() -> None:
    sizes = {}
    for dispatch in ("filling", "work-conserving"):
        world = CoreWorld(placed(stage(split(0, 4), replicas=2), dispatch=dispatch))
        for letter in "abcdefgh":
            world.submit(letter)
        sizes[dispatch] = ["".join(each.key for each in call.inputs) for call in world.calls]
    assert sizes == {"filling": ["a", "bcde"], "work-conserving": ["a", "b", "cdef"]}


def test_under_a_low_limit_a_second_replica_gets_inputs_before_a_batch_is_full() -> None:
    # Admission control begins with a limit of 7.7 inputs; a running and a waiting call of two replicas share it.
    world = CoreWorld(plan(replicas=2, dispatch="filling", predicted={"rate_per_s": 11.0}), slo_s=1.0)
    for letter in "abcdefg":
        world.submit(letter, deadline_s=1.0)
    assert ["".join(each.key for each in call.inputs) for call in world.calls] == ["a", "bc"]  # none at a busy replica
    world.go_on(0, "a")
    world.go_on(1, "bc")
    r0, r1 = Up("r0"), Up("r1")
    for first, expected in ((0, [(False, r0), (True, r1)]), (2, [(False, r0), (False, r0)])):  # survivors fill r0 first
        replicas = StageReplicas[Up](phase=0.0)
        replicas.set_replicas([r0, r1])
        calls = [call for call in world.calls if call.stage.first == first][:2]
        assert [(call.counts_as_full, call.choose_replica(replicas, first)) for call in calls] == expected


def test_calls_are_sent_for_the_second_batch_of_a_replica() -> None:
    def sizes(below: int | None, dispatch: Dispatch) -> str:
        world = CoreWorld(placed(stage(split(0, 4, overlap_below=below)), dispatch=dispatch))
        for letter in "abcdefghijklmnop":
            world.submit(letter)
        return " ".join("".join(each.key for each in call.inputs) for call in world.calls)

    assert sizes(None, "work-conserving") == sizes(4, "work-conserving") == "a bcde"
    assert sizes(5, "work-conserving") == "a b cdef ghij"
    assert sizes(5, "filling") == "a bcde"
    world = CoreWorld(placed(stage(split(0, 4, overlap_below=3))), calls_per_replica=1)
    world.submit("abcdefgh")
    for letter in "ab":  # only the second answer leaves fewer than three inputs
        world.answer(0, letter, block=1)
    assert world.log[2:] == ["0 answer b is b after block 1", "0 send 1: efgh to first for block 0"]


# Several chains


def test_inputs_are_divided_between_the_chains_by_their_shares() -> None:
    world = CoreWorld(side_by_side(), calls_per_replica=1)
    for letter in "abcdef":  # c belongs to the second chain; the first chain waits for the reply about a
        world.submit(letter)
    assert world.core.num_waiting == 4
    world.answer(0, "a")
    world.go_on(1, "c")
    world.fail(3)
    world.until(0.05)
    assert world.log == [
        "0 send 0: a to first for block 0",
        "0 send 1: c to second for block 0",
        "0 answer a is a after block 3",
        "0 send 2: bdef to first for block 0",
        "0 send 3: (c) to third for block 2",
        "0.05 again 1 of third",
        "0.05 send 4: c to second for block 0",
    ]


def test_every_chain_admits_its_share_of_the_rate() -> None:
    world = CoreWorld(side_by_side(rate_per_s=16.0), slo_s=1.0)  # limits of 0.7 * 12 = 8.4 and 0.7 * 4 = 2.8 inputs
    world.core.check_admission(1, 1.0, 0.0, num_coming=9)  # a quarter of these will go to the other chain
    world.submit("abcdefghijkl", deadline_s=1.0)
    assert [each.ahead for each in world.named("lk")] == [8, 2], "inputs ahead are those of the same chain"
    with pytest.raises(AdmissionError):
        world.core.check_admission(1, 1.0, 0.0)
    world.answer(2, "cgk")
    for letter in "mn":  # the second chain is empty, and takes all that the first one refuses
        world.core.check_admission(1, 1.0, 0.0)
        world.submit(letter, deadline_s=1.0)
        assert world.named(letter)[0].chain is world.core.chains.active[1]
    with pytest.raises(AdmissionError):
        world.core.check_admission(8, 1.0, 0.0)
    assert world.core.counts.drops == {"admission": 1 + 8}


def test_a_full_chain_is_skipped_only_while_it_is_full() -> None:
    world = CoreWorld(side_by_side(rate_per_s=16.0), slo_s=1.0)  # limits of 8.4 and 2.8 inputs
    world.submit("abcdefgh", deadline_s=1.0)  # c and g are of the second chain
    world.answer(0, "abde")
    world.core.check_admission(3, 1.0, 0.0)
    world.submit("ijk", deadline_s=1.0)
    world.answer(1, "cg")
    world.submit("lmn", deadline_s=1.0)
    assert [world.core.chains.active.index(each.chain) for each in world.named("ijklmn")] == [0, 0, 0, 0, 0, 1]


def test_inputs_of_a_chain_without_replicas_move_to_other_chains() -> None:
    world = CoreWorld(side_by_side(rate_per_s=32.0), slo_s=1.0)  # limits of 16.8 and 5.6 inputs
    slots = "split-cpu-0", "split-cpu-1", "split-cpu-2"
    world.set_available(*slots)
    world.submit("abcdefgh", deadline_s=1.0)  # c and g are of the second chain
    world.set_available(*slots[1:])
    world.fail(0)
    world.until(0.1)
    assert world.log[2:] == ["0.05 again 4 of first", "0.05 send 2: abde to second for block 0"]
    assert [len(each.queue.inputs) for each in world.core.chains.active] == [0, 2]
    with pytest.raises(AdmissionError):  # the first chain has room but cannot run
        world.core.check_admission(1, 1.1, 0.1)
    world.set_available(*slots[:2])
    with pytest.raises(AdmissionError):  # all new inputs go to the first chain, which now has f and h
        world.core.check_admission(1, 1.1, 0.1, num_coming=14)
    world.submit("ij", deadline_s=1.1)
    world.answer(1, "cg")
    world.answer(2, "abde")
    for up in (slots, ()):
        world.set_available(*up)
        world.submit("klmn" if up else "opqr", deadline_s=1.1)
    of_chains = [world.core.chains.active.index(each.chain) for each in world.named("fhijklmnopqr")]
    assert of_chains == [0, 0, 0, 0, *[0, 0, 1, 0] * 2]  # with all replicas, or with none, by the plan's shares


def test_a_plan_with_its_chains_in_another_order_keeps_their_limits_and_inputs() -> None:
    large, small = stage(split(0, 4), device="V100"), stage(split(0, 4))
    world = CoreWorld(placed(large, small, shares=(0.9, 0.1), predicted={"rate_per_s": 100.0}), slo_s=1.0)

    def state() -> list[tuple[float, int, int]]:
        chains = world.core.chains.active
        return [(round(each.admission.limit, 6), each.num_unanswered, len(each.queue.inputs)) for each in chains]

    world.submit(string.printable[:20], deadline_s=1.0)
    assert state() == [(63.0, 18, 10), (7.0, 2, 0)]
    world.follow(placed(small, large, shares=(0.1, 0.9), predicted={"rate_per_s": 100.0}, epoch=2))
    assert state() == [(7.0, 2, 0), (63.0, 18, 10)]
    world.follow(placed(large, predicted={"rate_per_s": 90.0}, epoch=3))
    assert state() == [(63.0, 20, 10)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own settings, when it is imported
def test_metrics_of_a_chain_that_the_plan_no_longer_has_are_zero() -> None:
    from deployments.ingress_deployment import IngressMetrics

    world = CoreWorld(side_by_side(rate_per_s=100.0), slo_s=1.0)
    metrics = IngressMetrics(ModelChain(names=("m",), lengths=(4,)))

    def exported() -> list[float]:
        """Returns two chains' unanswered inputs, their tokens, the admission limit, and the inputs that have ended."""
        metrics.export(world.core, world.now_s, {})
        return [each.value for each in metrics.samples() if "chain" in each.labels]

    world.submit("abcdefgh", *[5] * 8, deadline_s=1.0)
    assert exported() == [6, 2, 30, 10, 52.5, 17.5]
    world.set_available(world.core.chains.active[0].first_stage.slot)
    assert exported()[-2:] == [52.5, 0]
    world.answer(0, "ab")
    world.answer(1, "c")
    world.fail(1)  # g moves to the first chain
    world.until(0.1)
    world.answer(2, "fh")
    world.answer(3, "g")
    world.follow(plan(epoch=2, predicted={"rate_per_s": 100.0}))
    world.submit("ij", deadline_s=1.0)
    assert exported() == [4, 0, 12, 0, 70.0, 0, 5, 1]


# Sequences


def test_sequences_stay_on_their_replicas_under_a_plan_with_the_same_layout() -> None:
    """Sequence x has r1 at both stages, and y has r1 at the first and r2 at the second stage."""
    world = CoreWorld(plan(replicas=2))
    world.begin("x", "a")
    world.begin("y", "b")
    world.do()
    world.go_on(0, "a")
    world.room = "r2"
    world.go_on(0, "b")
    world.answer(1, "a")
    world.answer(2, "b")
    world.room = "r9"
    world.log.clear()
    world.step("x", "c")
    world.do()
    world.follow(plan(epoch=2, replicas=1, dispatch="deferred"))
    world.go_on(3, "c")
    world.step("y", "d")
    world.do()
    assert world.log[1:] == ["0 send 4: (c) to second for block 2 at r1", "0 send 5: d to first for block 0 at r1"]
    world.follow(plan(epoch=3, cut=1))
    with pytest.raises(SequenceLostError):
        world.step("x", "e")


def test_running_steps_are_lost_if_the_new_plan_runs_their_next_block_elsewhere() -> None:
    world = CoreWorld()
    world.begin("x", "a")
    world.do()
    world.follow(plan(epoch=2, cut=1))
    world.go_on(0, "a")
    assert world.log[1:] == ["0 drop a: the sequence is lost: the current plan runs its blocks on other slots"]
    assert (world.core.num_unanswered, world.core.oldest_epoch) == (0, 2)


def test_a_full_ingress_refuses_only_new_sequences() -> None:
    world = CoreWorld(max_queued=1)
    world.begin("x", "a")
    world.do()
    with pytest.raises(OverloadedError):
        world.begin("y", "b")
    world.begin("z", "c", again=True)
    world.do()
    world.answer(0, "a", block=1)
    world.step("x", "d")
    world.do()
    assert world.core.num_unanswered == 2
    world.step("x", "e")
    world.suspend()
    assert world.log[-1] == "0 drop e: the service has no plan: nothing is left"


def test_a_sequence_stays_in_its_chain_until_the_plan_has_its_blocks_elsewhere() -> None:
    world = CoreWorld(side_by_side())
    for name, letter in zip("xyz", "abc", strict=True):
        world.begin(name, letter)
    world.do()
    world.go_on(1, "c")
    world.answer(0, "ab")
    world.answer(2, "c")
    world.log.clear()
    world.follow(chains((2,), (), shares=(0.5, 0.5), epoch=2))  # the first chain's slot is part of another chain now
    with pytest.raises(SequenceLostError):
        world.step("x", "d")
    world.follow(side_by_side(epoch=3))
    world.step("y", "e")
    world.step("z", "f")
    world.do()
    assert world.log == ["0 send 3: e to first for block 0 at r1", "0 send 4: f to second for block 0 at r1"]
    assert [each.chain.layout for each in world.named("ef")] == [world.placements[name].layout for name in "yz"]


def test_new_sequences_that_exclude_different_replicas_are_sent_apart() -> None:
    world = CoreWorld()
    for letter, excluded in (("a", set()), ("b", {"r1"}), ("c", {"r1"})):
        world.placements[letter] = KVPlacement(len(world.placements) + 1, excluded=frozenset(excluded))
        world.step(letter, letter)
    world.do()
    assert world.log == ["0 send 0: a to first for block 0 at any", "0 send 1: bc to first for block 0 at any"]


def test_sequence_numbers_of_two_ingresses_differ() -> None:
    several = [sequence_numbers(random.Random(seed)) for seed in range(3)]
    numbers = [next(each) for each in several for _ in range(4)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 < number < 2**62 for number in numbers)


# Random events


def two_stages(rng: random.Random, epoch: int) -> PlacedPlan:
    return plan(epoch=epoch, replicas=rng.randint(1, 3), cut=rng.randint(1, 3))


def some_chains(rng: random.Random, epoch: int) -> PlacedPlan:
    """Draws one to three chains on up to three slots."""
    number = rng.randint(1, 3)
    cuts: list[list[int]] = [[] for _ in range(number)]
    for _ in range(rng.randint(0, 3 - number)):
        cut, chosen = rng.randint(1, 3), rng.choice(cuts)
        if cut not in chosen:
            chosen.append(cut)
    weights = [rng.uniform(0.1, 1.0) for _ in cuts]
    return chains(*map(sorted, cuts), shares=tuple(weight / sum(weights) for weight in weights), epoch=epoch)


def stop_or_stay(rng: random.Random, epoch: int) -> PlacedPlan:
    ramps = rng.choice(((1,), (1, 2), (2,)))
    after: AfterAnswer = "stop" if rng.random() < 0.5 else "stay"
    return observed_plan(epoch=epoch, ramps=ramps, cut=rng.randint(1, 3), after=after)


def some_tokens(rng: random.Random, epoch: int) -> PlacedPlan:
    return plan(epoch=epoch, cut=rng.randint(1, 3), tokens=rng.choice((None, 3, 5)))


@pytest.mark.parametrize(
    "any_plan", [two_stages, some_chains, stop_or_stay, some_tokens], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("seed", range(30))
def test_every_input_has_exactly_one_outcome_whatever_comes_back(
    seed: int, any_plan: Callable[[random.Random, int], PlacedPlan]
) -> None:
    """Random replies, failures, plans, deadlines and cancellations. The world refuses a second outcome."""
    rng = random.Random(seed)
    world = staying(any_plan(rng, 1), max_attempts=4, max_queued=30, probe_share=0.2)
    names, submitted = list(string.printable[:90]), ""
    while names or world.core.num_unanswered:
        if names and world.core.num_unanswered < 25:
            letters = "".join(names.pop() for _ in range(min(len(names), rng.randint(1, 5))))
            world.submit(letters, *[rng.randint(1, 3) for _ in letters], deadline_s=world.now_s + rng.uniform(0.1, 6))
            submitted += letters
        for call in range(len(world.calls)):
            reply_at_random(world, rng, call)
        if rng.random() < 0.1:
            world.give_up("".join(rng.sample(submitted, min(3, len(submitted)))))
        if rng.random() < 0.1:
            world.follow(any_plan(rng, world.core.placed.epoch + rng.randint(0, 1)))
        if rng.random() < 0.2:
            world.set_available(*rng.sample(list(NAMES), 2))
        world.until(world.now_s + rng.uniform(0, 0.5))
    assert world.outcomes.keys() == set(submitted)
    world.until(world.now_s + 10 + CALL_GRACE_S)
    report = world.core.report(0.0, 0.0)
    assert (report.waiting, report.unanswered) == (0, 0)
    assert not any(chain.unanswered_tokens or chain.queue.tokens for chain in world.core.chains.active)
    assert report.oldest_epoch == report.epoch
    assert report.arrived == report.answered + sum(report.drops.values()) == len(submitted)
    assert not any(call.num_remaining for call in world.calls)
    seen = [] if report.probes is None else report.probes.times_s_N.tolist()
    assert len(seen) <= len(submitted)
    assert set(seen) <= {each.arrived_s for each in world.inputs.values()}
    world.submit("\x00")
    assert world.log[-1].startswith(f"{world.now_s:g} send"), "nothing that has ended is still waited for"


def reply_at_random(world: CoreWorld, rng: random.Random, call: int) -> None:
    some = "".join(each.key for each in world.calls[call].inputs if rng.random() < 0.5)
    match rng.randint(0, 13):
        case 0 | 1 | 2:
            world.see(call, some, 1, 2, 3)
            world.answer(call, some)
        case 3 | 4:
            world.go_on(call, some, block=rng.randint(1, 3))
        case 5:
            world.lose(call, some)
        case 6:
            world.fail(call)
        case 7:
            world.answer_early(call, some, block=rng.choice((1, 2)))
        case 8:
            world.see(call, some, rng.choice((1, 2, 3)), label=rng.randint(0, 1))
