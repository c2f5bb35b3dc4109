from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.core.routes import (
    MOST_BATCHES,
    PARTS,
    ReplicaLoad,
    StageReplicas,
    min_to_send,
    rank,
    weight_of,
)
from deployments.wire.messages import assignments_on
from earlyexit.network.boundary import Budget, Split
from optimizer.plans.plan import PlacedPlan, Plan, Stage
from tests.deployments.ingress.core.core_world import Up

BATCH = 16


RANKED = {
    "no-replica": ([], 4, []),
    "only-replica": ([100], 4, [0]),
    "all-idle": ([0, 0, 0], 4, [0, 1, 2]),
    "idle-before-the-fullest": ([4, 0, 12], 4, [1, 2, 0]),
    "fullest-with-room": ([4, 12, 8], 4, [1, 2, 0]),
    "one-input-too-many": ([4, 13, 8], 4, [2, 0, 1]),
    "open-batch-before-a-full-one": ([16, 4], 4, [1, 0]),
    "fewest-full-batches": ([16, 32], 4, [0, 1]),
    "whole-batches-before-fullness": ([31, 17, 1], 4, [2, 1, 0]),
    "neither-fits-the-first-batch": ([14, 16], 4, [0, 1]),
    "none-fits-least-load": ([15, 14], 4, [1, 0]),
    "second-batch-begun-before-one-to-begin": ([14, 20], 4, [1, 0]),
    "tie": ([8, 8], 4, [0, 1]),
    "piece-larger-than-a-batch": ([4, 4, 0], 40, [2, 0, 1]),
}
"""Loads of replicas, the weight of a call, and the ranking of the replicas."""


def ranked(loads: list[int], weight: int, batch: int, *, fills: bool = False) -> list[int]:
    """Returns the indices of replicas, best first."""
    return sorted(range(len(loads)), key=lambda index: rank(loads[index], weight, batch, fills))


FILLED = {
    "all-idle": ([0, 0], 4, [0, 1]),
    "room-before-idle": ([0, 4, 12], 4, [2, 1, 0]),
    "idle-where-none-has-room": ([13, 0], 4, [1, 0]),
    "idle-before-a-full-one": ([16, 0], 4, [1, 0]),
    "fullest-with-room": ([17, 4, 31], 1, [1, 2, 0]),
}
"""The same for replicas that share processors and are filled one after the other."""


def test_replicas_are_ranked_by_the_start_and_the_fill_of_the_next_batch() -> None:
    for cases, fills in ((RANKED, False), (FILLED, True)):
        for name, (loads, weight, order) in cases.items():
            assert ranked(loads, weight, BATCH, fills=fills) == order, name


def test_new_inputs_are_sent_where_a_replica_can_start_or_a_full_batch_can_queue() -> None:
    def least(budget: Budget, *, fills: bool = False) -> list[tuple[float, float]]:
        return [
            min_to_send(budget, pending_calls=pending_calls, batches=3, calls_per_batch=2, fills=fills)
            for pending_calls in range(8)
        ]

    any_one, none = (1, math.inf), (math.inf, math.inf)
    full, full_of_tokens = (BATCH, math.inf), (BATCH, 512)
    assert least(Budget(inputs=BATCH)) == [any_one] * 3 + [full] * 3 + [none] * 2
    assert least(Budget(inputs=BATCH, tokens=512)) == [any_one] * 3 + [full_of_tokens] * 3 + [none] * 2
    assert least(Budget(inputs=BATCH), fills=True) == [any_one] + [full] * 2 + [none] * 5


def test_under_a_low_limit_of_unanswered_inputs_a_call_is_sent_with_its_share_of_the_limit() -> None:
    def least(limit: float, pending_calls: int, tokens: int | None = None) -> tuple[float, float]:
        budget = Budget(inputs=BATCH, tokens=tokens)
        return min_to_send(budget, pending_calls=pending_calls, batches=2, calls_per_batch=2, fills=True, limit=limit)

    assert [least(20.0, calls) for calls in range(4)] == [(1, math.inf), (5.0, math.inf), *[(math.inf, math.inf)] * 2]
    assert (least(1.0, 1), least(4.0 * BATCH, 1)) == ((1, math.inf), (BATCH, math.inf))
    assert (least(800.0, 1, 512), least(9999.0, 1, 512)) == ((BATCH, 200.0), (BATCH, 512))


@pytest.mark.parametrize(
    ("num_inputs", "num_tokens", "weight"),
    [
        pytest.param(1, 16, 1, id="no-piece-weighs-nothing"),
        pytest.param(3, 256, PARTS // 2, id="as-much-as-its-tokens-fill"),
        pytest.param(12, 60, 12, id="or-its-inputs-if-that-is-more"),
        pytest.param(5, 17 * 16, 17, id="what-begins-a-part-has-all-of-it"),
        pytest.param(1, 600, 38, id="one-larger-input-is-more-than-a-batch"),
        pytest.param(1, 100_000, MOST_BATCHES * PARTS, id="but-never-many-of-them"),
    ],
)
def test_under_a_token_budget_a_call_weighs_its_share_of_a_batch(num_inputs: int, num_tokens: int, weight: int) -> None:
    assert weight_of(Budget(inputs=32, tokens=512), num_inputs, num_tokens) == (weight, PARTS)


def test_without_a_token_budget_a_call_weighs_its_inputs() -> None:
    assert weight_of(Budget(inputs=24), 5, 10_000) == (5, 24)
    assert weight_of(Budget(inputs=24, tokens=7), 5, 5) == (5, 7)  # no part is smaller than a token


@given(
    loads=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    weight=st.integers(1, 20),
    length=st.integers(1, 500),
    batch=st.sampled_from([1, 2, 4, 8, 16, 32]),
)
def test_tokens_and_inputs_rank_replicas_equally_if_all_inputs_are_equally_long(
    loads: list[int], weight: int, length: int, batch: int
) -> None:
    budget = Budget(inputs=batch, tokens=batch * length)
    parts = [weight_of(budget, 1, length)[0] * load for load in loads]
    weighed = weight_of(budget, min(weight, batch), min(weight, batch) * length)
    assert ranked(parts, *weighed) == ranked(loads, min(weight, batch), batch)


WHAT = st.sampled_from(["send", "send", "send", "end", "offer"])


@settings(max_examples=200, deadline=None)
@given(
    num_replicas=st.integers(1, 9),
    phase=st.sampled_from([0.0, 0.2, 0.5, 0.875]),
    fills=st.booleans(),
    steps=st.lists(st.tuples(WHAT, st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([1, 3, 8])), max_size=120),
)
def test_calls_go_to_the_best_replica_from_the_phase_on(
    num_replicas: int, phase: float, fills: bool, steps: list[tuple[str, int, int, int]]
) -> None:
    stage, calls = StageReplicas[Up](phase), list[tuple[ReplicaLoad[Up], int]]()
    ring = replicas = [Up(str(index)) for index in range(num_replicas)]
    for what, which, weight, batch in [("offer", 0, 1, 1), *steps]:
        if what == "send":
            loads = [sum(weight for hosting, weight in calls if hosting.replica is each) for each in ring]
            found = stage.assign(weight, batch, fills=fills)
            assert found.replica is ring[ranked(loads, weight, batch, fills=fills)[0]]
            calls.append((found, weight))
        elif what == "end" and calls:
            ended, its_weight = calls.pop(which % len(calls))
            ended.load -= its_weight
        elif what == "offer":
            offered = replicas[which % num_replicas :]
            ring = offered[int(phase * len(offered)) :] + offered[: int(phase * len(offered))]
            stage.set_replicas(offered)


def test_a_replica_that_starts_during_a_change_prepares_the_stages_of_the_new_plan_first() -> None:
    def stage(device: str, first: int, end: int) -> Stage:
        return Stage(device=device, replicas=1, splits=(Split(first=first, end=end, batch=4),))

    followed = PlacedPlan(plan=Plan(stages=(stage("cpu", 0, 2), stage("cpu", 2, 4)), epoch=1))
    coming = PlacedPlan(plan=Plan(stages=(stage("V100", 0, 2), stage("cpu", 2, 4)), epoch=2))
    made = [(each.epoch, each.stage.splits[0].first) for each in assignments_on("cpu", [coming, followed])]
    assert made == [(2, 2), (1, 0)]
