"""The live page's state for given snapshots, recomputed by hand, and the times of polling."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.api.state import CONTROLLER_S, MAX_MISSED, StateRoutes
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ops.dashboard import MOST_REPLICAS, Snapshot, blocks_state, page_state, plan_state
from deployments.ops.prometheus import Sample, metrics_text
from deployments.wire.controller_link import ControllerLink
from deployments.wire.messages import BUCKET, ChainLoad
from earlyexit.errors import ControllerUnavailableError
from earlyexit.network.boundary import Split
from optimizer.plans.plan import PlacedPlan, Plan, Stage
from optimizer.plans.plan_file import parse_placed
from tests.clock import ManualClock
from tests.deployments.ingress.completions.generating import tales
from tests.deployments.ingress.dashboard.dashboard_scene import (
    FACTS,
    FIRST,
    REST,
    ingress,
    placed,
    ran,
    replica,
    snapshot,
)
from tests.model_cards import a_card

# Rates and shares


def test_figures_are_differences_over_all_ingresses() -> None:
    before = snapshot(5.0, ingress("a", answered=10, exits={0: 4}, drops={"deadline": 2}), ingress("b", answered=100))
    after = snapshot(
        7.0,
        ingress("a", answered=14, in_slo=13, arrived=16, exits={0: 9, 1: 3, 3: 2}, drops={"deadline": 3}),
        ingress("b", answered=106, drops={"admission": 8}),
        replicas=[replica("r", "split-cpu-0", waiting=3), replica("s", "split-cpu-0", waiting=4)],
    )
    state = page_state(FACTS, [before, after])
    assert state["now"]["arrived_per_s"] == (6 + 6) / 2
    assert state["now"]["answered_per_s"] == (4 + 6) / 2
    assert state["now"]["goodput_per_s"] == (3 + 6) / 2
    assert state["now"]["waiting_in_stages"] == 7
    assert state["totals"] == {"arrived": 122, "answered": 120, "in_slo": 119}
    assert (state["service"]["ingresses"], state["service"]["generates"]) == (2, False)
    assert page_state(replace(FACTS, card=tales()), [after])["service"]["generates"]
    assert state["drops"] == [
        {"reason": "admission", "total": 8, "per_s": 4.0},
        {"reason": "deadline", "total": 3, "per_s": 0.5},
    ]
    assert state["exits"] == [
        {"block": 0, "kind": "ramp", "network": "intents", "answers": 5, "share": 0.5},
        {"block": 1, "kind": "ramp", "network": "intents", "answers": 3, "share": 0.3},
        {"block": 3, "kind": "end", "network": "intents", "answers": 2, "share": 0.2},
    ]
    assert state["survival"] == [1.0, 0.5, 0.2, 0.2]
    assert state["early"] == pytest.approx({"share": 0.8, "mean_blocks": 1.9})


def test_rates_are_those_of_the_last_ten_seconds_of_ingresses_that_answer() -> None:
    looks = [snapshot(float(second), ingress(answered=0 if second < 20 else 50)) for second in range(31)]
    now = page_state(FACTS, looks)["now"]
    assert (now["seconds"], now["answered_per_s"]) == (10.0, 0.0)
    state = page_state(FACTS, [*looks, snapshot(31.0)])
    assert (state["service"]["ingresses"], state["now"]["goodput_per_s"], state["totals"]["answered"]) == (0, None, 0)


def test_percentiles_are_the_upper_ends_of_the_buckets_that_were_added() -> None:
    before = snapshot(0.0, ingress(answered=1000, latencies={0: 1000}))
    after = snapshot(1.0, ingress(answered=1100, latencies={0: 1000, -60: 80, -40: 15, -20: 5}))
    now = page_state(FACTS, [before, after])["now"]
    assert [now["p50_s"], now["p90_s"], now["p99_s"]] == [BUCKET**-59, BUCKET**-39, BUCKET**-19]


def test_answers_may_be_at_ramps_that_the_current_plan_does_not_have() -> None:
    looks = [
        snapshot(1.0, ingress(answered=50, exits={0: 50})),
        snapshot(2.0, ingress(answered=52, epoch=1, exits={0: 50, 3: 2}), placed=placed(1)),
        snapshot(3.0, ingress(answered=56, epoch=1, exits={0: 50, 2: 1, 3: 5}), placed=placed(1)),
    ]
    exits = page_state(FACTS, looks)["exits"]
    assert [(exit_["block"], exit_["answers"]) for exit_ in exits] == [(0, 0), (1, 0), (2, 1), (3, 3)]
    assert [exit_["kind"] for exit_ in exits] == ["ramp", "ramp", "inactive ramp", "end"]


# The controller's reports


def test_the_controllers_description_and_history_are_passed_on_without_the_plans_of_the_history() -> None:
    described = {"epoch": 3, "reason": "period", "forecast": {"survival": [1, 0.5, 0.25, 0.1]}}
    row = {"epoch": 2, "outcome": "in force", "reason": "period", "gained": None}
    rows = [row | {"placed": {"plan": {"predicted": {"rate_per_s": 125.0}}}}, row | {"placed": {}}]
    now = snapshot(
        0.0, ingress(), described=described, history=rows, agreement=0.98, placed=placed(3, predicted={"x": 1.0})
    )
    state = page_state(FACTS, [now])
    assert (state["described"], state["agreement"], state["service"]["controller"]) == (described, 0.98, "answers")
    assert state["history"] == [row | {"placed": None, "predicted": each} for each in ({"rate_per_s": 125.0}, {})]
    assert (state["plan"]["epoch"], state["plan"]["predicted"]) == (3, {"x": 1.0})
    state = page_state(FACTS, [snapshot(0.0, ingress())])
    assert (state["described"], state["history"], state["service"]["controller"]) == (None, [], "none")


# Stages and batches

CPU, P100 = "split-cpu-0", "split-emulated-P100-0"


def looks() -> list[Snapshot]:
    """Two seconds: 3 batches of 8 and 1 of 4 in the first stage, 2 of 3 in the second; earlier ones do not count."""
    before = [
        replica("r", CPU, ran(FIRST, 8, 100, 50.0)),
        replica("new", CPU),
        replica("s", P100, ran(REST, 1, 10, 1.0)),
    ]
    after = [
        replica("r", CPU, ran(FIRST, 8, 102, 51.0), waiting=5),
        replica("new", CPU, ran(FIRST, 8, 1), ran(FIRST, 4, 1)),
        replica("s", P100, ran(REST, 1, 10, 1.0), ran(REST, 3, 2, 1.5)),
    ]
    return [snapshot(10.0, ingress(), replicas=before), snapshot(12.0, ingress(), replicas=after)]


def test_stages_have_their_device_and_splits_their_mean_batch() -> None:
    before, after = looks()
    first, rest = plan_state(FACTS, [before, after])["stages"]
    assert (first["device"], first["time_scale"], first["wanted"], first["running"]) == ("cpu", None, 2, 2)
    assert (rest["device"], rest["time_scale"], rest["wanted"], rest["running"]) == ("emulated:P100", 2.0, 1, 1)
    assert (plan_state(FACTS, [before])["stages"][0]["running"], first["waiting"]) == (2, 5)
    silent = replace(before, replicas=before.replicas[1:])  # `r` was too busy to report
    assert plan_state(FACTS, [silent, before, after])["stages"][0]["splits"] == first["splits"]
    shared = {"network": "intents", "tokens": None, "token_fill": None}
    assert first["splits"] == [
        {"first": 0, "end": 2, "batch": 8, "ramps": [0, 1], "size": 7.0, "size_tokens": 7.0, "fill": 7 / 8}
        | {"batches_per_s": 2.0, **shared}
    ]
    assert rest["splits"] == [
        {"first": 2, "end": 4, "batch": 4, "ramps": [], "size": 3.0, "size_tokens": 3.0, "fill": 3 / 4}
        | {"batches_per_s": 1.0, **shared}
    ]


def test_a_stage_lists_a_limited_number_of_replicas_with_their_utilization() -> None:
    before, after = looks()
    resting = PlacedPlan(plan=placed().plan, avoided={"new": "cpu"})
    now = snapshot(12.0, ingress(), replicas=after.replicas, placed=resting)
    replicas = plan_state(FACTS, [before, now])["stages"][0]["replicas"]
    assert [(one["name"], one["busy"], one["rests"]) for one in replicas] == [("new", 0.0, True), ("r", 0.5, False)]
    many = [replica(f"{index:03}", CPU) for index in range(MOST_REPLICAS + 5)]
    [first, _] = plan_state(FACTS, [snapshot(0.0, ingress(), replicas=many)])["stages"]
    assert (len(first["replicas"]), first["running"]) == (MOST_REPLICAS, MOST_REPLICAS + 5)


def test_measured_fused_batches_are_shown_beside_unfused_ones_by_survival() -> None:
    blocks = blocks_state(plan_state(FACTS, looks()), [1.0, 0.5, 0.25, 0.25])
    assert [block["fused"] for block in blocks] == [7.0, 3.5, 3.0, 3.0]
    assert [block["unfused"] for block in blocks] == [7.0, 3.5, 1.75, 1.75]
    assert [block["target"] for block in blocks] == [8, 8, 4, 4]
    assert [block["is_first"] for block in blocks] == [True, False, True, False]
    for survival in (None, [0.0, 0.0, 0.0, 0.0]):
        assert {block["fused"] for block in blocks_state(plan_state(FACTS, looks()), survival)} == {None}
    at_once = blocks_state(plan_state(FACTS, looks()[:1]), [1.0, 0.5, 0.25, 0.25])
    assert {block["unfused"] for block in at_once} == {None}


def test_batches_do_not_shrink_if_answered_inputs_continue() -> None:
    stays = PlacedPlan(plan=placed().plan.with_splits(after_answer="stay"))
    first, rest = stays.plan.splits
    now = [replica("r", CPU, ran(first, 4, 10), ran(FIRST, 8, 10)), replica("s", P100, ran(rest, 3, 10))]
    before = [replica("r", CPU), replica("s", P100)]
    both = [snapshot(at_s, ingress(), placed=stays, replicas=each) for at_s, each in ((0.0, before), (2.0, now))]
    assert plan_state(FACTS, both)["after_answer"] == "stay"
    shown = blocks_state(plan_state(FACTS, both), [1.0, 0.5, 0.25, 0.25])
    assert [(block["fused"], block["unfused"]) for block in shown] == [(4.0, 4.0), (4.0, 4.0), (3.0, 4.0), (3.0, 4.0)]


def test_each_chain_has_its_stages_batches_share_and_load() -> None:
    whole = Stage(device="cpu", replicas=1, splits=(Split(first=0, end=4, batch=2, ramps=(0,)),))
    both = PlacedPlan(plan=replace(placed().plan, stages=(*placed().plan.stages, whole), shares=(0.75, 0.25)))
    loads = ChainLoad(unanswered=3, cost=30, limit=60.0), ChainLoad(unanswered=1, cost=10, limit=20.0)
    times = {CPU: ran(FIRST, 8, 1), P100: ran(REST, 3, 1), "split-cpu-1": ran(whole.splits[0], 2, 4)}
    before = snapshot(0.0, ingress(assigned={0: 10}), placed=both, replicas=[replica(slot, slot) for slot in times])
    ran_now = [replica(slot, slot, each) for slot, each in times.items()]
    reports = ingress(assigned={0: 16, 1: 2}, chains=loads, exits={0: 2, 3: 2}), ingress("b", epoch=-1, chains=loads)
    state = page_state(FACTS, [before, snapshot(2.0, *reports, placed=both, replicas=ran_now)])
    first, second = state["plan"]["chains"]  # the ingress `b` follows another plan
    assert first == {"planned": 0.75, "share": 0.75, "unanswered": 3, "cost": 30, "limit": 60.0}
    assert (second["share"], second["limit"]) == (0.25, 20.0)
    assert [stage["chain"] for stage in state["plan"]["stages"]] == [0, 0, 1]
    rows = [(row["chain"], row["block"], row["fused"], row["unfused"]) for row in state["blocks"]]
    assert rows[:4] == [(0, 0, 8, 8), (0, 1, 4, 4), (0, 2, 3, 4), (0, 3, 3, 4)]
    assert rows[4:] == [(1, 0, 2, 2), (1, 1, 1, 1), (1, 2, 1, 1), (1, 3, 1, 1)]
    assert state["early"] == {"share": 0.5, "mean_blocks": 2.5}


# Cascades

BACKBONE = {"models": ["../small", "../large"], "names": ["small", "large"], "blocks": [2, 2]}
CASCADE = replace(FACTS, card=a_card(family="chain", backbone=BACKBONE, num_blocks=4, ramps=(0, 1)))


def test_networks_of_a_chain_have_their_answers_and_crossing_times() -> None:
    both = placed(networks=(2, 4))
    crossed: dict[str, Any] = {"crossings": {2: 4}, "crossing_s": {2: 0.002}, "words": {2: 50}, "pruned_words": {2: 7}}
    after = snapshot(2.0, ingress(answered=10, exits={0: 2, 1: 6, 3: 2}, **crossed), placed=both)
    small, large = page_state(CASCADE, [snapshot(0.0, ingress(), placed=both), after])["networks"]
    assert [small[key] for key in ("name", "used", "answers", "share", "returned")] == ["small", True, 8, 0.8, 0.8]
    assert (small["crossing_s"], small["crossings_per_s"], small["pruned_words"]) == (None, 0.0, None)
    assert [large[key] for key in ("name", "first", "end", "answers", "returned")] == ["large", 2, 4, 2, 1.0]
    assert (large["crossings_per_s"], large["crossing_s"]) == (2.0, pytest.approx(0.0005))
    assert large["pruned_words"] == pytest.approx(0.14)


def test_a_skipped_network_has_no_answers_and_no_blocks() -> None:
    split = Split(first=2, end=4, batch=4)
    alone = PlacedPlan(plan=Plan(stages=(Stage(device="cpu", replicas=1, splits=(split,)),), networks=(2, 4)))
    after = snapshot(1.0, ingress(answered=5, exits={3: 5}), placed=alone)
    state = page_state(CASCADE, [snapshot(0.0, ingress(), placed=alone), after])
    small, large = state["networks"]
    assert (small["used"], small["share"], small["returned"]) == (False, 0.0, None)
    assert (large["used"], large["share"], large["returned"]) == (True, 1.0, 1.0)
    assert [row["block"] for row in state["blocks"]] == [2, 3]
    assert state["early"] == {"share": 0.0, "mean_blocks": 2.0}


INPUTS, WAITING = ("offramp_inputs_total", "Inputs that arrived"), ("offramp_waiting", "Inputs that wait")


def test_a_scrape_returns_the_metrics_of_all_processes_by_name() -> None:
    first = [Sample(*INPUTS, {"ingress": "a"}, 10), Sample(*WAITING, {"ingress": "a"}, 2)]
    page = metrics_text([*first, Sample(*INPUTS, {"ingress": 'b"\\', "exit": "1"}, 0.5)])
    assert page.splitlines() == [
        "# HELP offramp_inputs_total Inputs that arrived",
        "# TYPE offramp_inputs_total counter",
        'offramp_inputs_total{ingress="a"} 10',
        'offramp_inputs_total{ingress="b\\"\\\\",exit="1"} 0.5',
        "# HELP offramp_waiting Inputs that wait",
        "# TYPE offramp_waiting gauge",
        'offramp_waiting{ingress="a"} 2',
    ]


class Scene(IngressCore, ControllerLink):
    """An ingress `a` that polls. Its calls are logged, and the answers can be changed."""

    suspended = None
    observations: Any = SimpleNamespace(agreement=None)

    def __init__(self, *, has_controller: bool = True) -> None:
        self.name = "a"
        self.now_placed: PlacedPlan = placed()
        self.clock = ManualClock(100.0)
        self.asked: list[str] = []
        self.ingresses: list[Any] = [ingress("a", answered=7)]
        self.of_slots: list[Any] = []
        self.controller_fails = False
        self.poller = StateRoutes(FACTS, self, self.ask_all, self if has_controller else None, self.clock)

    @property
    def placed(self) -> PlacedPlan:
        return self.now_placed

    async def ask_all(self, deployment: str, method: str) -> list[Any]:
        self.asked.append(f"{deployment} {method}")
        return self.ingresses if deployment == "ingress" else self.of_slots

    async def ask(self, method: str, *_: object, timeout_s: float = 5.0) -> Any:
        self.asked.append(method)
        if self.controller_fails:
            raise ControllerUnavailableError("gone", retry_after_s=5.0)
        return {"epoch": 0, "reason": "period"} if method == "describe" else []

    async def state(self) -> dict[str, Any]:
        event = await self.poller.event()
        assert event is not None
        retry, kind, data, *end = event.decode().split("\n")
        assert (retry, kind, end) == ("retry: 2000", "event: state", ["", ""])
        state: dict[str, Any] = json.loads(data.removeprefix("data: "))
        return state


async def test_each_event_polls_all_ingresses_and_replicas() -> None:
    scene = Scene(has_controller=False)
    state = await scene.state()
    assert scene.asked == ["ingress peek", "split-cpu report", "split-emulated-P100 report"]
    assert (state["schema"], state["service"]["controller"], state["history"]) == (6, "none", [])
    plan = scene.now_placed
    scene.now_placed = PlacedPlan(plan=plan.plan, avoided={"slow": "V100"})
    await scene.state()
    assert scene.asked[4:] == ["split-V100 report", "split-cpu report", "split-emulated-P100 report"]


async def test_the_controllers_last_report_is_cached() -> None:
    scene = Scene()
    for _ in range(int(CONTROLLER_S) + 1):
        assert (await scene.state())["described"]["reason"] == "period"
        scene.clock.advance(1.0)
    assert scene.asked.count("describe") == scene.asked.count("history") == 2
    scene.controller_fails = True
    scene.clock.advance(CONTROLLER_S)
    state = await scene.state()
    assert (state["service"]["controller"], state["described"]["reason"]) == ("silent", "period")


async def test_rates_start_at_the_second_event_also_if_the_clock_is_set_back() -> None:
    scene, states = Scene(), []
    for at_s, answered in ((100.0, 7), (102.0, 17), (3702.0, 17), (50.0, 17), (52.0, 27)):  # the clock is set back
        scene.clock._now_s, scene.ingresses = at_s, [ingress("a", answered=answered)]
        states.append(await scene.state())
    assert [each["serial"] for each in states] == [1, 2, 3, 4, 5]
    assert [each["at_s"] for each in states] == [100.0, 102.0, 3702.0, 50.0, 52.0]
    assert [each["now"]["answered_per_s"] for each in states] == [None, 5.0, None, None, 5.0]
    assert scene.asked.count("describe") == 3


async def test_only_replicas_that_answered_are_shown() -> None:
    scene = Scene()
    scene.of_slots = [None, replica("r", "split-cpu-0")]  # a report names its slot
    assert [stage["running"] for stage in (await scene.state())["plan"]["stages"]] == [2, 0]
    scene.ingresses, scene.of_slots = [None, ingress("a")], [None]
    state = await scene.state()
    assert (state["service"]["ingresses"], [stage["running"] for stage in state["plan"]["stages"]]) == (0, [0, 0])


async def test_without_a_controller_the_plan_says_in_what_hidden_states_travel() -> None:
    scene = Scene(has_controller=False)
    scene.poller.facts = replace(FACTS, settings=FACTS.settings.model_copy(update={"hop_dtype": "float16"}))
    request: Any = None
    said: Any = await scene.poller.plan(request)
    assert said["hops"] == {"dtype": "float16"}
    assert parse_placed(said) == placed()


async def test_an_ingress_that_serve_no_longer_lists_ends_its_stream() -> None:
    a, b = ingress("a"), ingress("b")
    for ingresses, ends in (
        ([[b]] * MAX_MISSED, True),
        ([[b], [a, b], [b]], False),
        ([[b, None]] * 3 * MAX_MISSED, False),  # unknown which ingresses run
    ):
        scene, events = Scene(), []
        for each in ingresses:
            scene.ingresses = each
            events.append(await scene.poller.event())
        assert [event is None for event in events] == [False] * (len(events) - 1) + [ends]
