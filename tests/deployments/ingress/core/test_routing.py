from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.core.routes import (
    MOST_BATCHES,
    PARTS,
    KVPlacement,
    ReplicaLoad,
    StageReplicas,
    filling_rank,
    min_to_send,
    weight_of,
)
from deployments.wire.messages import assignments_on
from earlyexit.network.boundary import Budget
from tests.deployments.ingress.core.core_world import Up, plan

BATCH = 16


RANKED = {
    "no-replica": ([], 4, []),
    "only-replica": ([100], 4, [0]),
    "all-idle": ([0, 0, 0], 4, [0, 1, 2]),
    "room-before-idle": ([0, 4, 12], 4, [2, 1, 0]),
    "fullest-with-room": ([4, 12, 8], 4, [1, 2, 0]),
    "one-input-too-many": ([4, 13, 8], 4, [2, 0, 1]),
    "idle-where-none-has-room": ([13, 0], 4, [1, 0]),
    "idle-before-a-full-one": ([16, 0], 4, [1, 0]),
    "open-batch-before-a-full-one": ([16, 4], 4, [1, 0]),
    "fullest-with-room-in-the-second": ([17, 4, 31], 1, [1, 2, 0]),
    "fewest-full-batches": ([16, 32], 4, [0, 1]),
    "whole-batches-before-fullness": ([31, 17, 1], 4, [2, 1, 0]),
    "neither-fits-the-first-batch": ([14, 16], 4, [0, 1]),
    "none-fits-least-load": ([15, 14], 4, [1, 0]),
    "second-batch-begun-before-one-to-begin": ([14, 20], 4, [1, 0]),
    "tie": ([8, 8], 4, [0, 1]),
    "piece-larger-than-a-batch": ([4, 4, 0], 40, [2, 0, 1]),
}
"""Loads of replicas that share processors, the weight of a call, and the ranking of the replicas."""


def ranked(loads: list[int], weight: int, batch: int) -> list[int]:
    """Returns the indices of replicas, best first."""
    return sorted(range(len(loads)), key=lambda index: filling_rank(loads[index], weight, batch))


def test_replicas_that_share_processors_are_filled_one_after_the_other() -> None:
    for name, (loads, weight, order) in RANKED.items():
        assert ranked(loads, weight, BATCH) == order, name


FREE_FIRST = {
    "an-idle-one": ([4, 0], [9.9, 0.0], 1),
    "the-first-idle-one": ([4, 0, 0], [0.0, 0.0, 9.0], 1),
    "whose-batch-ends-first": ([4, 4, 4], [9.6, 9.2, 9.4], 1),
    "fewest-inputs-if-both-began-together": ([9, 8], [9.5, 9.5], 1),
    "a-quarter-of-a-batch-is-a-quarter-of-its-time": ([4, 8], [9.7, 9.4], 1),
    "or-a-little-less": ([4, 8], [9.7, 9.5], 0),
    "a-batch-that-takes-too-long-ends-soon": ([12, 4], [3.0, 9.6], 0),
    "but-its-inputs-count": ([12, 4], [3.0, 9.4], 1),
    "tie": ([8, 8], [9.5, 9.5], 0),
}
"""Loads of replicas, when their batches began, and the replica that gets a call at 10 s if batches of 16 take 1 s."""


def test_calls_go_to_the_replica_that_is_free_first() -> None:
    for name, (loads, since_s, best) in FREE_FIRST.items():
        stage = StageReplicas[Up](0.0)
        stage.set_replicas([Up(str(index)) for index in range(len(loads))])
        for known, load, began_s in zip(stage._known.values(), loads, since_s, strict=True):
            known.load, known.since_s = load, began_s
        chosen = stage.assign(4, BATCH, 1.0, 10.0, fills=False)
        expected = str(best), loads[best] + 4, since_s[best] if loads[best] else 10.0
        assert (chosen.replica.name, chosen.load, chosen.since_s) == expected, name


def test_new_sequences_go_to_the_replica_with_the_fewest_or_fill_those_that_share_processors() -> None:
    for fills, expected in ((False, ["0", "1", "2", "0", "1"]), (True, ["0", "0", "0", "0", "1"])):
        stage = StageReplicas[Up](0.0)
        stage.set_replicas([Up(str(index)) for index in range(3)])
        found = [stage.replica_for("a", [KVPlacement(number)], 4, fills=fills) for number in range(1, 6)]
        assert [each.replica.name for each in found] == expected


def least(tokens: int | None = None, *, fills: bool = False, limit: float = math.inf) -> list[tuple[float, float]]:
    """Returns how many inputs or tokens must wait, for 0 to 7 pending calls."""
    budget = Budget(inputs=BATCH, tokens=tokens)
    return [
        min_to_send(budget, pending_calls=calls, batches=3, calls_per_batch=2, fills=fills, limit=limit)
        for calls in range(8)
    ]


def test_new_inputs_are_sent_where_a_replica_can_start_or_a_full_batch_can_queue() -> None:
    any_one, full, none = (1, math.inf), (BATCH, math.inf), (math.inf, math.inf)
    assert least() == [any_one] * 3 + [full] * 3 + [none] * 2
    assert least(512) == [any_one] * 3 + [(BATCH, 512)] * 3 + [none] * 2
    # Batches that share processors: behind the first call, a full batch or its share of a low limit of admission.
    for limit, share in ((math.inf, full), (6.0 * BATCH, full), (30.0, (5.0, math.inf)), (1.0, any_one)):
        assert least(fills=True, limit=limit) == [any_one] + [share] * 2 + [none] * 5
    for limit, share in ((1200.0, (BATCH, 200.0)), (9999.0, (BATCH, 512))):
        assert least(512, fills=True, limit=limit) == [any_one] + [share] * 2 + [none] * 5


def test_a_call_weighs_its_inputs_or_under_a_token_budget_its_share_of_a_batch() -> None:
    budget = Budget(inputs=32, tokens=512)
    assert weight_of(budget, 1, 16) == (1, PARTS)  # the least weight
    assert weight_of(budget, 3, 256) == (PARTS // 2, PARTS)  # its share of the tokens
    assert weight_of(budget, 12, 60) == (12, PARTS)  # its share of the inputs, which is larger
    assert weight_of(budget, 5, 17 * 16) == (17, PARTS)  # a part that it begins counts in full
    assert weight_of(budget, 1, 600) == (38, PARTS)  # an input that is larger than a batch
    assert weight_of(budget, 1, 100_000) == (MOST_BATCHES * PARTS, PARTS)
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
    busy_s = [ReplicaLoad(Up("a"), load).busy_s(weighed[1], 1.0, 0.0) for load in parts]
    assert busy_s == [ReplicaLoad(Up("a"), load).busy_s(batch, 1.0, 0.0) for load in loads]


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
    """Without times of batches, the replica with the least load is free first."""
    stage, calls = StageReplicas[Up](phase), list[tuple[ReplicaLoad[Up], int]]()
    ring = replicas = [Up(str(index)) for index in range(num_replicas)]
    for what, which, weight, batch in [("offer", 0, 1, 1), *steps]:
        if what == "send":
            loads = [sum(weight for hosting, weight in calls if hosting.replica is each) for each in ring]
            found = stage.assign(weight, batch, 0.0, 0.0, fills=fills)
            best = ranked(loads, weight, batch)[0] if fills else loads.index(min(loads))
            assert found.replica is ring[best]
            calls.append((found, weight))
        elif what == "end" and calls:
            ended, its_weight = calls.pop(which % len(calls))
            ended.load -= its_weight
        elif what == "offer":
            offered = replicas[which % num_replicas :]
            ring = offered[int(phase * len(offered)) :] + offered[: int(phase * len(offered))]
            stage.set_replicas(offered)


def test_a_replica_that_starts_during_a_change_prepares_the_stages_of_the_new_plan_first() -> None:
    followed, coming = plan(), plan(epoch=2, first="V100")
    made = [(each.epoch, each.stage.splits[0].first) for each in assignments_on("cpu", [coming, followed])]
    assert made == [(2, 2), (1, 0)]
