"""A tuner that says what the test tells it to, in a scene of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from optimizer.live.exit_times import ExitTimes
from optimizer.live.tuning.base import Question, Tuned, Tuner, TunerState, Why, never, no_input_leaves
from optimizer.pame.on_batches import Batching
from optimizer.pame.times import seconds_of
from optimizer.risk import Guarantee
from profiles.stream import Observations
from profiles.table import LatencyTable
from tests.deployments.control.control_fakes import EASY, RAMPS, Scene, begun, halves

SAFE = never("confidence", RAMPS)
LOWER = dict.fromkeys(RAMPS, 0.25)
TABLE = LatencyTable.of_rows((1, 8), [[0.01, 0.01]] * 4, [[0.0, 0.0]] * len(RAMPS))
QUESTION = Question(
    score="confidence",
    guarantee=Guarantee(),
    times=ExitTimes.of(TABLE, RAMPS, 1),
    batching=Batching(seconds=seconds_of(TABLE, tuple(RAMPS)), size=8),
)


class ToldTuner(Tuner):
    """Says what the test tells it to."""

    name: ClassVar[str] = "told"

    def __init__(self) -> None:
        super().__init__(QUESTION)
        self.followed: list[Mapping[int, float]] = []
        self.served: list[int] = []
        """Inputs of a batch."""
        self.observed = 0
        self.next: Tuned | None = None

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        self.followed.append(dict(thresholds))

    def serve(self, batching: Batching) -> None:
        self.served.append(batching.size)

    def observe(self, seen: Observations) -> Tuned | None:
        assert (np.diff(seen.times_s_N) >= 0).all()
        self.observed += len(seen)
        said, self.next = self.next, None
        return said

    def says(self, thresholds: Mapping[int, float], why: Why) -> None:
        """At its next look."""
        self.next = Tuned(thresholds=thresholds, why=why, words=f"{why}!", at_s=0.0)

    @property
    def state(self) -> TunerState:
        safe = no_input_leaves("confidence", self.followed[-1])
        return TunerState(
            evidence=1.0, limit=10.0, watched=self.observed, watched_loss=None, rows=0, next_test=None, safe=safe
        )


async def tuned(path: Path, inputs: tuple[int, int] = EASY, **settings: Any) -> tuple[Scene, ToldTuner]:
    """A scene after its first period."""
    tuner = ToldTuner()
    scene = await begun(
        path, inputs, looks=6, first=halves(3, 1), best=halves(3, 1), make_tuner=lambda _: tuner, settings=settings
    )
    scene.fleet.log.clear()
    scene.asked.clear()
    return scene, tuner


async def alarm_while_replicas_start(
    scene: Scene, tuner: ToldTuner, *, broken: str | None = None, come: bool = False
) -> None:
    """One look with a change-over to halves(2, 2), whose replicas come late or not at all.

    `broken`: what fails of the fleet at the alarm.
    """
    scene.best = halves(2, 2)
    scene.fleet.stuck.add("split-cpu-1")
    tries = 0

    def meanwhile() -> None:
        nonlocal tries
        tries += 1
        if tries == 10:
            tuner.says(SAFE, "alarm")
            scene.fleet.broken |= {broken} if broken else set()
        if tries == 60 and come:
            scene.fleet.replicas["split-cpu-1"] = 2
        scene.inputs(10, 90)

    scene.meanwhile = meanwhile
    await scene.ticks(1, (10, 90))


def thresholds_of(scene: Scene) -> Any:
    policy = scene.fleet.followed.plan.policy
    assert policy is not None
    return policy.thresholds


def on_trial(scene: Scene) -> bool:
    return scene.loop.state.trial is not None
