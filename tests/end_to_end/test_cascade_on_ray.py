"""Tests of a cascade on Ray Serve under load: replicas are killed, networks are added and removed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from optimizer.plans.plan import Plan
from optimizer.plans.plan_file import plan_document
from tests.end_to_end.load import PATIENCE_S, Answers, Load, under_load
from tests.end_to_end.one_ray import URL, OneRay
from tests.end_to_end.tiny_cascade import NETWORKS, TIMEOUT_S, TinyCascade, make_cascade

pytestmark = pytest.mark.ray

CLIENTS = 4
SOME = 30
"""Number of answers that show the effect of a plan."""


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> TinyCascade:
    return make_cascade(tmp_path_factory.mktemp("cascade"))


def kill_all(http: httpx.Client) -> list[int]:
    """Kills every stage's replicas with the inputs inside, by kill -9."""
    pids = [replica["pid"] for replicas in http.get("/stats").json()["stages"] for replica in replicas]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


def apply(one_ray: OneRay, plan: Plan) -> None:
    one_ray.order("apply", {"app": "cascade", "plan": plan_document(plan)})


def check(cascade: TinyCascade, seen: dict[str, Answers]) -> None:
    """Checks answers against the networks of the current plan."""
    for networks, answers in seen.items():
        for index, answer in answers:
            cascade.check(index, answer, networks.split(",")[0].split()[0])


@contextmanager
def under_requests(one_ray: OneRay, cascade: TinyCascade) -> Iterator[tuple[httpx.Client, Load]]:
    """Serves the cascade under load; every answer must be right for some of its networks."""
    one_ray.serve(cascade.settings())
    with (
        httpx.Client(base_url=URL, timeout=PATIENCE_S) as http,
        under_load(cascade.texts, clients=CLIENTS, timeout_s=TIMEOUT_S) as load,
    ):
        yield http, load


def test_networks_change_and_no_input_is_lost_or_answered_wrongly(one_ray: OneRay, cascade: TinyCascade) -> None:
    seen: dict[str, Answers] = {}
    with under_requests(one_ray, cascade) as (_, load):
        seen["both"] = load.more(SOME)
        for networks, plan in (
            ("alone", cascade.single),
            ("both, on one device", cascade.together),
            ("both again", cascade.cascade),
        ):
            apply(one_ray, plan)
            seen[networks] = load.more(SOME)
    for index, answer in load.answers:
        cascade.check(index, answer)
    check(cascade, seen)
    exits = {answer["exit"] for _, answer in seen["both"]}
    assert min(exits) < NETWORKS[0] <= max(exits), "some cross, some do not"


def test_networks_die_and_no_input_is_lost_or_answered_wrongly(one_ray: OneRay, cascade: TinyCascade) -> None:
    """Also with plans in which both networks answer together."""
    seen: dict[str, Answers] = {}
    with under_requests(one_ray, cascade) as (http, load):
        assert len(kill_all(http)) == 2
        seen["both, after their death"] = load.more(SOME)
        unmixed = len(load.answers)
        apply(one_ray, cascade.ensemble)
        seen["mixed"] = load.more(SOME)
        assert len(kill_all(http)) == 2
        seen["mixed, after their death"] = load.more(SOME)
    for index, answer in load.answers[:unmixed]:
        cascade.check(index, answer)
    check(cascade, seen)
