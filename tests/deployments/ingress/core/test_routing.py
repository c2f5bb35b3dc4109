from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.core.routing import FillFirst, fill_first, least_to_call

BATCH = 16


@pytest.mark.parametrize(
    ("loads", "weight", "order"),
    [
        pytest.param([], 4, [], id="no-replica"),
        pytest.param([100], 4, [0], id="only-replica"),
        pytest.param([0, 0, 0], 4, [0, 1, 2], id="all-idle"),
        pytest.param([4, 0, 12], 4, [1, 2, 0], id="idle-before-the-fullest"),
        pytest.param([4, 12, 8], 4, [1, 2, 0], id="fullest-with-room"),
        pytest.param([4, 13, 8], 4, [2, 0, 1], id="one-input-too-many"),
        pytest.param([16, 4], 4, [1, 0], id="open-batch-before-a-full-one"),
        pytest.param([16, 32], 4, [0, 1], id="fewest-full-batches"),
        pytest.param([31, 17, 1], 4, [2, 1, 0], id="whole-batches-before-fullness"),
        pytest.param([14, 16], 4, [0, 1], id="neither-fits-the-first-batch"),
        pytest.param([15, 14], 4, [1, 0], id="none-fits-least-load"),
        pytest.param([14, 20], 4, [1, 0], id="second-batch-begun-before-one-to-begin"),
        pytest.param([8, 8], 4, [0, 1], id="tie"),
        pytest.param([4, 4, 0], 40, [2, 0, 1], id="piece-larger-than-a-batch"),
    ],
)
def test_replicas_are_ranked_by_when_and_how_full_the_pieces_batch_would_run(
    loads: list[int], weight: int, order: list[int]
) -> None:
    assert fill_first(loads, weight, BATCH) == order


def test_pieces_fill_one_batch_after_the_other_once_nobody_is_idle() -> None:
    loads = [1, 1, 1]
    for _ in range(9):
        loads[fill_first(loads, 5, BATCH)[0]] += 5
    assert loads == [16, 16, 16]


@pytest.mark.parametrize(
    ("waiting", "unheard", "called"),
    [
        pytest.param(0, 0, False, id="nobody-waits"),
        pytest.param(1, 0, True, id="all-replicas-free"),
        pytest.param(1, 2, True, id="one-replica-free"),
        pytest.param(1, 3, False, id="behind-others-a-full-batch-only"),
        pytest.param(16, 3, True, id="full-batch"),
        pytest.param(17, 5, True, id="more-than-a-batch"),
        pytest.param(500, 6, False, id="two-calls-for-every-replica"),
    ],
)
def test_new_inputs_are_sent_where_a_replica_can_start_or_a_full_batch_can_queue(
    waiting: int, unheard: int, called: bool
) -> None:
    least = least_to_call(BATCH, unheard=unheard, replicas=3, calls_per_replica=2)
    assert (waiting >= least) == called


Step = tuple[str, int, int, int]
"""What is done, to which replica, with which weight, at which batch."""
STEPS = st.tuples(
    st.sampled_from(["send", "send", "send", "end", "leave", "come back"]),
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.sampled_from([1, 3, 4, 8]),
)


@settings(max_examples=200, deadline=None)
@given(
    num_replicas=st.integers(1, 9),
    phase=st.sampled_from([0.0, 0.2, 0.5, 0.875]),
    steps=st.lists(STEPS, max_size=120),
)
def test_one_choice_at_a_time_is_the_first_of_the_whole_ranking(
    num_replicas: int, phase: float, steps: list[Step]
) -> None:
    router, loads, calls = FillFirst(phase), dict[int, int](), list[tuple[int, int]]()
    for index in range(num_replicas):
        router.add(index)
        loads[index] = 0
    for what, which, weight, batch in steps:
        running = sorted(loads)
        if what == "send" and running:
            best = fill_first([loads[index] for index in running], weight, batch, phase)[0]
            assert router.choose(weight, batch) == running[best]
            assert router.take(weight, batch) == running[best]
            loads[running[best]] += weight
            calls.append((running[best], weight))
        elif what == "end" and calls:
            index, weight = calls.pop(which % len(calls))
            router.load(index, -weight)
            loads[index] -= weight
        elif what == "leave" and running:
            index = running[which % len(running)]
            router.discard(index)
            del loads[index]
            calls = [call for call in calls if call[0] != index]
        elif what == "come back" and (away := sorted(set(range(num_replicas)) - set(loads))):
            index = away[which % len(away)]
            router.add(index)
            loads[index] = 0
        assert len(router) == len(loads)


def test_unknown_replicas_have_no_load_and_nobody_is_chosen_from_none() -> None:
    router = FillFirst()
    router.load(3, 5)
    router.discard(3)
    with pytest.raises(LookupError, match="no replica to choose from"):
        router.choose(1, BATCH)
    router.add(3)
    router.load(2, 5)
    assert router.choose(1, BATCH) == 3
