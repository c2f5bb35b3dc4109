"""Tests of a service with a controller on Ray Serve: its plan changes under load.

The last changes are to and from a plan with token budgets, under which replicas die.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from earlyexit.network.boundary import Split
from optimizer.plans.plan import Plan, Stage
from optimizer.plans.plan_file import parse_plan, plan_document
from tests.end_to_end.load import under_load
from tests.end_to_end.one_ray import METRICS_PORT, OneRay
from tests.end_to_end.tiny_service import MAX_LENGTH, Tiny, controlled_service, two_stages
from tests.metrics_page import check_series, documented_series, labels_on_page, once_on_page

pytestmark = pytest.mark.ray

PROBES_S = 60.0
METRICS_S = 120.0
GENERATING = (
    "ray_offramp_sequences",
    "ray_offramp_kv_pages",
    "ray_offramp_prompt_tokens",
    "ray_offramp_generated_tokens",
    "ray_offramp_ttft",
    "ray_offramp_tpot",
)
"""Metrics of models that generate."""
OTHERS_SHOW = (
    "ray_offramp_retries",
    "ray_offramp_version",
    "ray_offramp_alarm_evidence",
    "ray_offramp_batch_token_fill",
    "ray_offramp_crossing",
    "ray_offramp_words",
    "ray_offramp_pruned_words",
    "ray_offramp_pruned_agreement",
    *GENERATING,
)
"""Metrics that tests of other services check: tuning, chains, and token budgets."""
TOKENS = 10
"""Fewer than the longest text has, so that some run alone."""


def plans(first: Plan) -> list[Plan]:
    """Returns plans with the same ramps, so that every input must get the same answer under each.

    In the first plan inputs stay over a hop. In the others they stop: in one stage with another cut, on two replicas,
    and with the first plan's cut.
    """
    cut_elsewhere = (Split(first=0, end=1, batch=2, ramps=(0,)), Split(first=1, end=4, batch=8, ramps=(1, 2)))
    one_stage = (Stage(device="cpu", replicas=2, splits=cut_elsewhere),)
    there, cut = (
        replace(first, stages=stages, predicted={"rate_per_s": 100.0}) for stages in (first.stages, one_stage)
    )
    return [there.with_splits(after_answer="stay"), cut, there]


def test_plans_change_under_load_and_answers_do_not(one_ray: OneRay, tiny: Tiny, http: httpx.Client) -> None:
    settings, first = controlled_service(tiny), two_stages(tiny.thresholds)
    one_ray.serve(settings)
    with under_load(tiny.texts, clients=1) as load:
        asked_before = num_asked(http.get("/plan/history").json())
        for plan in plans(first):
            epoch = one_ray.order("apply", {"app": settings.app, "plan": plan_document(plan)})
            now = http.get("/plan").json()
            assert now["epoch"] == now["followed_epoch"] == epoch
            load.more(1)  # a change may be over before the next request
        described, history = once_probes_are_seen(http), http.get("/plan/history").json()
        assert http.post("/predict", json={"inputs": "pay", "timeout_s": 1e-6}).status_code == 504
        # No replica has died, and there is one version.
        wanted = {name for name in documented_series() if not name.startswith(OTHERS_SHOW)}
        page, own_page = once_on_page(METRICS_PORT, wanted, METRICS_S, application=settings.app), http.get("/metrics")
    check_series(page, wanted)
    assert {name.removeprefix("ray_") for name in wanted} <= labels_on_page(own_page.text).keys()
    for index, answer in load.answers:
        tiny.check(index, answer)
    assert [stage["replicas"] for stage in described["plan"]["chains"][0]["stages"]] == [1, 1]
    assert described["observed"]["drops"] == {}
    assert described["observed"]["inputs_seen"] > 0
    assert 0.0 <= described["observed"]["agreement"] <= 1.0
    assert num_asked(history) - asked_before == len(plans(first))


def num_asked(history: list[dict[str, Any]]) -> int:
    """Returns the number of plans that an operator requested."""
    return len([row for row in history if row["reason"] == "asked"])


def once_probes_are_seen(http: httpx.Client) -> dict[str, Any]:
    """Returns the service's plan after the controller has observed probes under load."""
    until_s = time.monotonic() + PROBES_S
    while True:
        described: dict[str, Any] = http.get("/plan").json()
        if described["observed"]["inputs_seen"] or time.monotonic() > until_s:
            return described
        time.sleep(0.2)


def by_tokens(plan: Plan) -> Plan:
    stages = tuple(
        replace(stage, splits=tuple(replace(split, tokens=TOKENS) for split in stage.splits)) for stage in plan.stages
    )
    return replace(plan, stages=stages, predicted={"rate_per_s": 1000.0, "tokens_per_input": 6.0})


def test_inputs_of_all_lengths_are_answered_rightly_through_deaths_and_changes_of_token_budgets(
    one_ray: OneRay, tiny: Tiny, http: httpx.Client
) -> None:
    assert max(len(text.split()) for text in tiny.texts) > TOKENS
    settings = controlled_service(tiny)
    plan = by_tokens(two_stages(tiny.thresholds))
    one_ray.serve(settings)
    with under_load(tiny.texts, clients=6, per_request=5) as load:
        one_ray.order("apply", {"app": settings.app, "plan": plan_document(plan)})
        load.more(200)
        before = stages_of(http)
        for plan_now in (two_stages(tiny.thresholds), plan):
            document = plan_document(plan_now)
            assert parse_plan(document).splits == plan_now.splits
            one_ray.order("apply", {"app": settings.app, "plan": document})
            load.more(100)
        [[first], [second]] = stages_of(http)
        for replica in (first, second):
            os.kill(replica["pid"], signal.SIGKILL)
        load.more(100)
        described = http.get("/plan").json()
        too_long = http.post("/predict", json={"inputs": " ".join(["pay"] * (MAX_LENGTH + 5))})
        of_lengths = {name for name in documented_series() if "token" in name or "oldest" in name}
        wanted = {name for name in of_lengths if not name.startswith(GENERATING)}
        page = once_on_page(METRICS_PORT, wanted, METRICS_S, settings.app)
    assert too_long.status_code == 422, too_long.text
    for index, answer in load.answers:
        tiny.check(index, answer)
    check_series(page, wanted)
    check_fill(before)
    assert [split["tokens"] for stage in described["plan"]["chains"][0]["stages"] for split in stage["splits"]] == [
        TOKENS
    ] * 3


def check_fill(stages: list[list[dict[str, Any]]]) -> None:
    """Batches hold up to ten tokens, or one input of up to eleven."""
    for [replica] in stages:
        for split in replica["splits"]:
            assert split["inputs"] <= split["tokens"] <= split["batches"] * (MAX_LENGTH - 1)
            assert split["token_fill"] == pytest.approx(split["tokens"] / split["batches"] / TOKENS)
    [first] = stages[0][0]["splits"]
    assert first["inputs"] > first["batches"], "short ones ran together"


def stages_of(http: httpx.Client) -> list[list[dict[str, Any]]]:
    stages: list[list[dict[str, Any]]] = http.get("/stats").json()["stages"]
    return stages
