from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deployments.ops.dashboard.state import observed_survival, page_state
from deployments.ops.prometheus import metrics_text
from deployments.wire.messages import BUCKET
from earlyexit.network.chain import Chain
from earlyexit.network.split import Split
from optimizer.placement import initial_placement
from optimizer.plan import Plan, Stage
from tests.deployments.ingress.dashboard.dashboard_scene import FACTS, FIRST, ingress, placed, ran, replica, snapshot


def test_a_single_look_has_totals_but_no_rates() -> None:
    state = page_state(FACTS, [snapshot(5.0, ingress(answered=10, in_slo=9, unanswered=3, waiting=1))])
    assert state["totals"] == {"arrived": 10, "answered": 10, "in_slo": 9}
    assert state["now"] == {
        "seconds": None,
        "arrived_per_s": None,
        "answered_per_s": None,
        "goodput_per_s": None,
        "p50_s": None,
        "p90_s": None,
        "p99_s": None,
        "unanswered": 3,
        "waiting": 1,
        "waiting_in_stages": 0,
    }


def test_rates_are_differences_over_all_ingresses() -> None:
    state = page_state(
        FACTS,
        [
            snapshot(5.0, ingress("a", answered=10), ingress("b", answered=100)),
            snapshot(7.0, ingress("a", answered=14, in_slo=13, arrived=16), ingress("b", answered=106)),
        ],
    )
    assert state["now"]["answered_per_s"] == (4 + 6) / 2
    assert state["now"]["goodput_per_s"] == (3 + 6) / 2
    assert state["now"]["arrived_per_s"] == (6 + 6) / 2
    assert state["totals"] == {"arrived": 122, "answered": 120, "in_slo": 119}
    assert state["service"]["ingresses"] == 2


def test_rates_are_those_of_the_last_ten_seconds() -> None:
    looks = [snapshot(float(second), ingress(answered=0 if second < 20 else 50)) for second in range(31)]
    assert page_state(FACTS, looks)["now"]["seconds"] == 10.0
    assert page_state(FACTS, looks)["now"]["answered_per_s"] == 0.0


def test_percentiles_are_the_upper_ends_of_the_buckets_that_were_added() -> None:
    before = snapshot(0.0, ingress(answered=1000, latencies={0: 1000}))
    after = snapshot(1.0, ingress(answered=1100, latencies={0: 1000, -60: 80, -40: 15, -20: 5}))
    now = page_state(FACTS, [before, after])["now"]
    assert [now["p50_s"], now["p90_s"], now["p99_s"]] == [BUCKET**-59, BUCKET**-39, BUCKET**-19]


def test_where_no_ingress_answers_there_are_no_figures() -> None:
    state = page_state(FACTS, [snapshot(0.0, ingress(answered=5)), snapshot(1.0)])
    assert (state["service"]["ingresses"], state["now"]["goodput_per_s"]) == (0, None)
    assert state["totals"]["answered"] == 0


def test_drops_are_listed_by_reason_most_frequent_first() -> None:
    before = snapshot(0.0, ingress("a", drops={"deadline": 2}))
    after = snapshot(2.0, ingress("a", drops={"deadline": 3}), ingress("b", drops={"admission": 8}))
    assert page_state(FACTS, [before, after])["drops"] == [
        {"reason": "admission", "total": 8, "per_s": 4.0},
        {"reason": "deadline", "total": 3, "per_s": 0.5},
    ]


def test_exits_are_listed_for_every_active_ramp_and_the_end() -> None:
    before = snapshot(0.0, ingress(answered=4, exits={0: 4}))
    after = snapshot(1.0, ingress(answered=14, exits={0: 10, 3: 4}))
    assert page_state(FACTS, [before, after])["exits"] == [
        {"block": 0, "kind": "ramp", "network": "intents", "answers": 6, "share": 0.6},
        {"block": 1, "kind": "ramp", "network": "intents", "answers": 0, "share": 0.0},
        {"block": 3, "kind": "end", "network": "intents", "answers": 4, "share": 0.4},
    ]


def test_how_many_answers_were_early_is_told_and_how_deep_an_answer_is_on_average() -> None:
    before = snapshot(0.0, ingress())
    after = snapshot(1.0, ingress(answered=10, exits={0: 5, 1: 3, 3: 2}))
    assert page_state(FACTS, [before, after])["early"] == pytest.approx({"share": 0.8, "mean_blocks": 1.9})
    assert page_state(FACTS, [before])["early"] == {"share": None, "mean_blocks": None}


def test_an_answer_from_a_ramp_that_the_plan_no_longer_has_is_shown_as_such() -> None:
    after = snapshot(1.0, ingress(answered=1, exits={2: 1}))
    kinds = {exit_["block"]: exit_["kind"] for exit_ in page_state(FACTS, [snapshot(0.0, ingress()), after])["exits"]}
    assert kinds == {0: "ramp", 1: "ramp", 2: "inactive ramp", 3: "end"}


def test_exits_of_the_plan_before_do_not_count() -> None:
    looks = [
        snapshot(0.0, ingress(answered=0, exits={})),
        snapshot(1.0, ingress(answered=50, exits={0: 50})),
        snapshot(2.0, ingress(answered=52, epoch=1, exits={3: 2}), placed=placed(1)),
        snapshot(3.0, ingress(answered=56, epoch=1, exits={3: 6}), placed=placed(1)),
    ]
    exits = page_state(FACTS, looks)["exits"]
    assert [(exit_["block"], exit_["answers"]) for exit_ in exits] == [(0, 0), (1, 0), (3, 4)]


def test_survival_is_the_share_of_answers_that_went_into_a_block() -> None:
    before = snapshot(0.0, ingress())
    after = snapshot(1.0, ingress(answered=10, exits={0: 5, 1: 3, 3: 2}))
    assert page_state(FACTS, [before, after])["survival"]["answers"] == [1.0, 0.5, 0.2, 0.2]
    assert observed_survival(None, 4) is None


DESCRIBED: dict[str, Any] = {
    "epoch": 0,
    "forecast": {
        "survival": [1, 0.5, 0.25, 0.1],
        "survival_low": [1, 0.4, 0.2, 0.0],
        "survival_high": [1, 0.6, 0.3, 0.2],
    }
    | {"how": "last window"},
    "observed": {
        "survival": [1, 0.55, 0.3, 0.1],
        "agreement": 0.995,
        "accuracy_budget": 0.01,
        "within_budget": True,
        "inputs_seen": 400,
        "pruned_agreement": 0.97,
        "drops": {},
    },
}


def test_forecast_and_agreement_are_what_the_controller_says() -> None:
    state = page_state(FACTS, [snapshot(0.0, ingress(), described=DESCRIBED)])
    assert state["survival"] == {
        "forecast": [1, 0.5, 0.25, 0.1],
        "low": [1, 0.4, 0.2, 0.0],
        "high": [1, 0.6, 0.3, 0.2],
        "how": "last window",
        "probes": [1, 0.55, 0.3, 0.1],
        "answers": None,
    }
    assert state["agreement"] == {"value": 0.995, "budget": 0.01, "within": True, "inputs_seen": 400, "pruned": 0.97}


def test_without_a_controller_agreement_is_that_of_the_ingress_that_looks() -> None:
    state = page_state(FACTS, [snapshot(0.0, ingress(), agreement=0.98)])
    assert state["agreement"] == {"value": 0.98, "budget": None, "within": None, "inputs_seen": None, "pruned": None}
    assert (state["survival"]["forecast"], state["service"]["controller"]) == (None, "none")


@pytest.mark.parametrize("missing", ["forecast", "observed"])
def test_a_controller_that_has_seen_nothing_yet_leaves_figures_out(missing: str) -> None:
    described = DESCRIBED | {missing: None}
    state = page_state(FACTS, [snapshot(0.0, ingress(), described=described)])
    assert state["survival"]["probes" if missing == "observed" else "forecast"] is None


def test_what_waits_in_stages_is_added_up() -> None:
    replicas = [replica("r", "split-cpu-0", waiting=3), replica("s", "split-cpu-0", waiting=4)]
    assert page_state(FACTS, [snapshot(0.0, ingress(), replicas=replicas)])["now"]["waiting_in_stages"] == 7


CASCADE = replace(FACTS, chain=Chain(names=("small", "large"), lengths=(2, 2), ramps=(0, 1)))


def test_networks_of_a_chain_have_what_they_returned_and_what_going_on_to_them_took() -> None:
    both = placed(networks=(2, 4))
    before = snapshot(0.0, ingress(), placed=both)
    after = snapshot(
        2.0,
        ingress(
            answered=10,
            exits={0: 2, 1: 6, 3: 2},
            crossings={2: 4},
            crossing_s={2: 0.002},
            words={2: 50},
            pruned_words={2: 7},
        ),
        placed=both,
    )
    small, large = page_state(CASCADE, [before, after])["networks"]
    assert [small[key] for key in ("name", "used", "answers", "share", "returned")] == ["small", True, 8, 0.8, 0.8]
    assert (small["crossing_s"], small["crossings_per_s"], small["pruned_words"]) == (None, 0.0, None)
    assert [large[key] for key in ("name", "first", "end", "answers", "returned")] == ["large", 2, 4, 2, 1.0]
    assert (large["crossings_per_s"], large["crossing_s"]) == (2.0, pytest.approx(0.0005))
    assert large["pruned_words"] == pytest.approx(0.14)


def test_a_network_that_the_plan_leaves_out_returned_nothing_and_its_blocks_are_no_ones() -> None:
    split = Split(first=2, end=4, batch=4)
    alone = initial_placement(Plan(stages=(Stage(device="cpu", replicas=1, splits=(split,)),), networks=(2, 4)))
    before = snapshot(0.0, ingress(), placed=alone)
    after = snapshot(1.0, ingress(answered=5, exits={3: 5}), placed=alone)
    state = page_state(CASCADE, [before, after])
    small, large = state["networks"]
    assert (small["used"], small["share"], small["returned"]) == (False, 0.0, None)
    assert (large["used"], large["share"], large["returned"]) == (True, 1.0, 1.0)
    assert [row["block"] for row in state["blocks"]] == [2, 3]
    assert state["early"] == {"share": 0.0, "mean_blocks": 2.0}


def test_one_network_has_no_rows_of_networks() -> None:
    assert page_state(FACTS, [snapshot(0.0, ingress())])["networks"] == []


def test_answers_of_a_model_that_generates_are_told_as_steps() -> None:
    looks = [snapshot(0.0, ingress(answered=10))]
    assert not page_state(FACTS, looks)["service"]["generates"]
    assert page_state(replace(FACTS, generates=True), looks)["service"]["generates"]


def test_a_scrape_finds_what_every_ingress_and_replica_counts() -> None:
    first = ingress("a", answered=9, arrived=10, exits={1: 5, 3: 4}, drops={"deadline": 1}, waiting=2)
    second = ingress('b"\\', answered=3, unanswered=7)
    times = ran(FIRST, 4, 10, 0.5), ran(FIRST, 8, 5, 0.25)
    page = metrics_text([first, second], [replica("r1", "split-0", *times, waiting=6)], FACTS.chain)
    lines = page.splitlines()
    assert "# TYPE offramp_inputs_total counter" in lines
    assert "# TYPE offramp_waiting gauge" in lines
    assert {
        'offramp_inputs_total{ingress="a"} 10',
        'offramp_answers_total{ingress="a",exit="1",network="intents"} 5',
        'offramp_drops_total{ingress="a",reason="deadline"} 1',
        'offramp_unanswered{ingress="b\\"\\\\"} 7',
        'offramp_stage_waiting{slot="split-0",replica="r1",device="cpu"} 6',
        'offramp_batches_total{slot="split-0",replica="r1",device="cpu",split="0"} 15',
        'offramp_batch_inputs_total{slot="split-0",replica="r1",device="cpu",split="0"} 80',
        'offramp_busy_seconds_total{slot="split-0",replica="r1",device="cpu",split="0"} 0.75',
    } <= set(lines)
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)), "samples of one metric stand together"
