from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deployments.controller.intake import IngressIntake, Interval, ReplicaIntake, latency_s, total
from deployments.wire.messages import BUCKET, IngressReport, ReplicaReport
from earlyexit.engine.times import TimesRun


def ingress(name: str = "i", *, epoch: int = 0, arrived: int = 0, **counts: Any) -> IngressReport:
    fields: dict[str, Any] = {"answered": arrived, "in_slo": arrived, "exits": {}, "drops": {}} | counts
    return IngressReport(
        name=name, epoch=epoch, oldest_epoch=epoch, at_s=0.0, unanswered=0, waiting=0, arrived=arrived, **fields
    )


def replica(*times: tuple[int, float], name: str = "r") -> ReplicaReport:
    return ReplicaReport(
        slot="split-cpu-0",
        replica=name,
        node="n",
        pid=1,
        device="cpu",
        epoch=0,
        waiting=0,
        times=tuple(
            TimesRun(first=0, end=4, ramps=(), size=size, batches=batches, tokens=size * batches, seconds=seconds)
            for size, (batches, seconds) in enumerate(times, start=1)
        ),
    )


def test_the_first_look_only_sets_the_mark() -> None:
    assert IngressIntake().take([ingress(arrived=1000)], 5.0) is None


def test_counts_are_those_since_the_last_look_over_all_ingresses() -> None:
    intake = IngressIntake()
    intake.take([ingress("a", arrived=10), ingress("b", arrived=20)], 5.0)
    interval = intake.take([ingress("a", arrived=13), ingress("b", arrived=24)], 10.0)
    assert interval == Interval(since_s=5.0, at_s=10.0, arrived=7, answered=7, in_slo=7)


def test_an_ingress_that_comes_later_began_at_zero() -> None:
    intake = IngressIntake()
    intake.take([ingress("a", arrived=10)], 5.0)
    interval = intake.take([ingress("a", arrived=10), ingress("b", arrived=4)], 10.0)
    assert interval is not None
    assert interval.arrived == 4


def test_a_report_that_is_lost_loses_nothing() -> None:
    intake = IngressIntake()
    intake.take([ingress(arrived=10)], 5.0)
    assert intake.take([], 10.0) is None
    interval = intake.take([ingress(arrived=16)], 15.0)
    assert interval == Interval(since_s=5.0, at_s=15.0, arrived=6, answered=6, in_slo=6)


def test_a_first_report_that_is_lost_does_not_make_an_old_ingress_a_new_one() -> None:
    intake = IngressIntake()
    intake.take([], 5.0)
    assert intake.take([ingress(arrived=1000)], 10.0) is None


def test_exits_are_counted_anew_under_every_plan() -> None:
    intake = IngressIntake()
    intake.take([ingress(epoch=1, exits={1: 50}, drops={"deadline": 2})], 5.0)
    same = intake.take([ingress(epoch=1, exits={1: 53, 3: 1}, drops={"deadline": 2})], 10.0)
    other = intake.take([ingress(epoch=2, exits={1: 4}, drops={"deadline": 3})], 15.0)
    assert same is not None
    assert other is not None
    assert (same.exits, same.drops) == ({1: 3, 3: 1}, {})
    assert (other.exits, other.drops) == ({1: 4}, {"deadline": 1})


def test_several_intervals_are_one() -> None:
    parts = [Interval(since_s=0.0, at_s=5.0, exits={1: 2}), Interval(since_s=5.0, at_s=9.0, exits={1: 1, 3: 4})]
    assert total(parts) == Interval(since_s=0.0, at_s=9.0, exits={1: 3, 3: 4})
    assert total([]) is None


def test_a_quantile_is_the_upper_end_of_its_bucket() -> None:
    assert latency_s({0: 98, 10: 2}, 0.5) == pytest.approx(BUCKET)
    assert latency_s({0: 98, 10: 2}, 0.99) == pytest.approx(BUCKET**11)
    assert latency_s({}, 0.5) is None


def test_replicas_are_counted_since_the_mark() -> None:
    intake = ReplicaIntake()
    intake.mark([replica((10, 1.0), (4, 2.0))])
    (ran,) = intake.since_mark(replica((15, 1.75), (4, 2.0)))
    assert (ran.size, ran.batches, ran.seconds) == (1, 5, 0.75)


def test_batches_that_shared_the_device_are_counted_apart() -> None:
    intake = ReplicaIntake()
    before = replica((10, 1.0))
    intake.mark([before])
    shared = replace(before.times[0], batches=3, seconds=0.5, shared=True)
    ran = intake.since_mark(replace(before, times=(*before.times, shared)))
    assert [(each.batches, each.seconds, each.shared) for each in ran] == [(3, 0.5, True)]


def test_a_replica_newer_than_the_mark_began_at_zero() -> None:
    intake = ReplicaIntake()
    intake.mark([replica((10, 1.0))])
    (ran,) = intake.since_mark(replica((3, 0.5), name="new"))
    assert ran.batches == 3


def test_crossings_are_those_since_the_last_look() -> None:
    intake = IngressIntake()
    intake.take([ingress(crossings={6: 10}, crossing_s={6: 1.0}, words={6: 100}, pruned_words={6: 14})], 5.0)
    now = ingress(crossings={6: 14, 18: 2}, crossing_s={6: 1.5, 18: 0.5}, words={6: 150}, pruned_words={6: 20})
    interval = intake.take([now], 10.0)
    assert interval is not None
    assert (interval.crossings, interval.crossing_s) == ({6: 4, 18: 2}, {6: 0.5, 18: 0.5})
    assert (interval.words, interval.pruned_words) == ({6: 50}, {6: 6})
