"""A service under a control loop, with a fake clock, fleet and planner, and with the exits of its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from deployments.controller.act import ControlLoop
from deployments.controller.observe import Forecast, MakeTuner, ServiceFleet
from deployments.controller.remember import History
from deployments.settings import ControlSettings
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.engine.engine import TimesRun
from earlyexit.network.boundary import Split
from optimizer.calibration.thresholds import Guarantee
from optimizer.cost.batching import Batching
from optimizer.cost.evaluate import evaluate
from optimizer.live.tuning.base import NewThresholds, Reason, Tuner, TunerSettings, TunerState, never
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage
from optimizer.problems.problem import Link, PlanProblem, Supply
from optimizer.search.decision import Decision, NoPlan, Planned, Strategy
from profiles.stream import Observations, StreamShape
from profiles.table import LatencyTable
from tests.clock import ManualClock
from tests.optimizer.plain_problem import plain_problem

RAMPS = (0, 1, 2)
SHAPE = StreamShape(score="confidence", num_blocks=4, ramps=RAMPS)
POLICY = PolicySpec(name="confidence", thresholds=dict.fromkeys(RAMPS, 0.5))
START_S = 1200.0
"""The start of a window."""
EASY = (60, 40)
"""Inputs between two ticks: those that leave at ramp 1, and those that do not."""


def problem(
    *, count: int = 4, survival: tuple[float, ...] = (1.0, 1.0, 0.4, 0.4), ramps: tuple[int, ...] = RAMPS
) -> PlanProblem:
    """Returns a problem in which a block takes 10 ms for one to four inputs, and a ramp takes no time."""
    table = LatencyTable(batches=(1, 4), block_s_NB=np.full((4, 2), 0.01), ramp_s_EB=np.zeros((len(ramps), 2)))
    return plain_problem(
        ramps=ramps,
        survival_N=survival,
        latency={"cpu": table},
        devices={"cpu": Supply(count=count, usd_per_hour=1.0)},
        link=Link(bandwidth_bytes_per_s=1e12),
        bytes_per_sample_N=(1.0,) * 4,
    )


def whole(replicas: int) -> tuple[Stage, ...]:
    """Returns one split without ramps: 4 inputs in 40 ms, so 100/s per replica."""
    return (Stage(device="cpu", replicas=replicas, splits=(Split(first=0, end=4, batch=4),)),)


def halves(first: int, second: int) -> tuple[Stage, ...]:
    """Returns two stages, cut after ramp 1. A replica of either serves 200/s of the inputs that reach it."""
    return (
        Stage(device="cpu", replicas=first, splits=(Split(first=0, end=2, batch=4, ramps=(1,)),)),
        Stage(device="cpu", replicas=second, splits=(Split(first=2, end=4, batch=4),)),
    )


def probes(times_s: Sequence[float], leaving: Sequence[bool], plan: Plan) -> Observations:
    """Returns complete records of inputs that leave at ramp 1 or at the end."""
    num = len(times_s)
    leaves_N = np.array(leaving, dtype=bool)
    active_NR = np.tile([ramp in plan.ramps for ramp in RAMPS], (num, 1))
    scores_NR = np.zeros((num, 3), dtype=np.float32)
    scores_NR[leaves_N, 1] = 1.0
    return Observations(
        shape=SHAPE,
        times_s_N=np.array(times_s, dtype=np.float64),
        probe_N=np.ones(num, dtype=bool),
        stayed_N=np.zeros(num, dtype=bool),
        active_NR=active_NR,
        exits_N=np.where(leaves_N & (1 in plan.ramps), 1, 3).astype(np.int16),
        scores_NR=scores_NR,
        losses_NR=np.zeros((num, 3), dtype=np.float32),
    )


GROWING: dict[str, Any] = {"count": 5, "problem": problem(count=5), "best": halves(3, 2)}
"""One more accelerator than the first plan uses, and a plan that needs it."""


def ingress(name: str = "i", *, epoch: int = 0, arrived: int = 0, **others: Any) -> IngressReport:
    fields: dict[str, Any] = {"oldest_epoch": epoch, "answered": arrived, "in_slo": arrived} | others
    return IngressReport(name=name, epoch=epoch, unanswered=0, waiting=0, arrived=arrived, **fields)


def replica(times: tuple[TimesRun, ...], *, name: str, slot: str = "split-cpu-0", epoch: int = 0) -> ReplicaReport:
    others: dict[str, Any] = {"node": "n", "pid": 1, "device": "cpu", "waiting": 0}
    return ReplicaReport(replica=name, slot=slot, epoch=epoch, times=times, **others)


class FakeFleet(ServiceFleet):
    """A fleet whose replicas start and stop at once. It logs every change."""

    def __init__(self, first: PlacedPlan, clock: ManualClock, count: int) -> None:
        self.clock = clock
        self.log: list[str] = []
        self.followed = first
        self.replicas = Counter(first.occupied)
        self.alive = {"cpu": count}
        self.arrived = self.answered = self.in_slo = self.refused = 0
        self.exits: Counter[int] = Counter()
        self.pending: list[Observations] = []
        self.times: dict[str, tuple[TimesRun, ...]] = {}
        """The batches that each replica has run since its start."""
        self.hands_over = 1_000_000
        """The largest number of probes in a report."""
        self.is_suspended = False
        self.broken: set[str] = set()
        """Methods that fail. With `reports`, one more ingress does not report."""
        self.is_stuck = False
        """Whether no replica starts or stops."""
        self.behind: set[str] = set()
        """Ingresses that always have an input of the first plan in flight."""
        self.oldest = 1_000_000
        """The highest epoch of any input in flight."""
        self.silent = False
        """Whether replicas accept calls but are too busy to report."""
        self.loses = 0
        """Accelerators that are lost when the controller waits for replicas."""

    async def scale(self, device: str, replicas: int) -> None:
        self._do("scale", f"{device} to {replicas}")
        if not self.is_stuck:
            self.replicas[device] = replicas

    async def running(self) -> dict[str, int]:
        if any(line.startswith("scale") for line in self.log):
            self.alive, self.loses = {"cpu": self.alive["cpu"] - self.loses}, 0
        return dict(self.replicas)

    async def prepare(self, placed: PlacedPlan) -> None:
        self._do("prepare", str(placed.epoch))

    async def follow(self, placed: PlacedPlan) -> None:
        self._do("follow", str(placed.epoch))
        self.followed = placed
        self.is_suspended = False

    async def suspend(self, reason: str) -> None:
        self._do("suspend", "")
        self.is_suspended = True

    async def ingress_reports(self) -> list[IngressReport | None]:
        return [self._ingress_report(), *([None] if "reports" in self.broken else [])]

    def _ingress_report(self) -> IngressReport:
        joined = Observations.join(SHAPE, self.pending)
        handed = joined.take(np.arange(len(joined))[-self.hands_over :]) if len(joined) else None
        self.pending = []
        epoch = self.followed.epoch
        counts: dict[str, Any] = {"answered": self.answered, "in_slo": self.in_slo, "exits": dict(self.exits)}
        oldest = 0 if "i" in self.behind else min(self.oldest, epoch)
        state: dict[str, Any] = {"oldest_epoch": oldest, "suspended": self.is_suspended, "probes": handed}
        return ingress(epoch=epoch, arrived=self.arrived, drops={"admission": self.refused}, **counts, **state)

    async def replica_reports(self) -> list[ReplicaReport]:
        names = [f"cpu#{rank}" for rank in range(0 if self.silent else self.replicas["cpu"])]
        roles = self.followed.roles({"cpu": names})["cpu"]
        epoch = self.followed.epoch
        return [replica(self.times.get(name, ()), name=name, slot=roles.get(name, ""), epoch=epoch) for name in names]

    async def capacity(self) -> dict[str, int]:
        return dict(self.alive)

    def _do(self, method: str, words: str) -> None:
        if method in self.broken:
            raise ConnectionError(f"{method} found a dying replica")
        self.log.append(f"{method} {words}".strip())


@dataclass
class Scene:
    """A control loop over a fake fleet. The test sets the planner's result and the exits of inputs."""

    path: Path
    best: tuple[Stage, ...] | None = None
    """The planner's result; None: no plan meets the problem."""
    first: tuple[Stage, ...] = field(default_factory=lambda: whole(4))
    shares: tuple[float, ...] = (1.0,)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    count: int = 4
    problem: PlanProblem = field(default_factory=problem)
    policy: PolicySpec = POLICY
    solve_as: Callable[[PlanProblem], Decision] | None = None
    make_tuner: MakeTuner | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from those of all scenes."""
    meanwhile: Callable[[], None] = lambda: None
    """Called whenever the loop waits."""
    clock: ManualClock = field(default_factory=lambda: ManualClock(START_S))
    asked: list[PlanProblem] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.placed = PlacedPlan(
            plan=Plan(stages=self.first, shares=self.shares, policy=POLICY, predicted=self.predicted)
        )
        self.fleet = FakeFleet(self.placed, self.clock, self.count)
        self.start()

    def start(self) -> None:
        """Starts a controller, in place of one that was killed."""
        self.history = History.open(self.path / "control.db", "app")
        self.loop = ControlLoop(
            self.fleet,
            self.history,
            ControlSettings.model_validate(
                {"problem": self.problem, "policy": self.policy, "state": "unused", "period_s": 120.0, "watch_s": 5.0}
                | dict(self.settings)
            ),
            first=self.placed,
            clock=self.clock,
            sleep=self.sleep,
            solve=self.solve,
            off_loop=_at_once,
            make_tuner=self.make_tuner,
        )
        self.loop.restore()

    def restart(self) -> None:
        """Ends the controller, and starts another one."""
        self.history.close()
        self.start()

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.meanwhile()

    async def solve(self, asked: PlanProblem, strategy: Strategy, time_limit_s: float) -> Decision:
        self.asked.append(asked)
        self.limits_s.append(time_limit_s)
        if self.solve_as is not None:
            return self.solve_as(asked)
        return no_plan() if self.best is None else planned(asked, self.best)

    def inputs(self, leaving: int, staying: int, *, in_slo: bool = True) -> None:
        """Adds inputs that are answered now, all of them probes. Those that leave do so at ramp 1, if it is active."""
        num = leaving + staying
        plan = self.fleet.followed.plan
        self.fleet.arrived += num
        self.fleet.answered += num
        self.fleet.in_slo += num if in_slo else 0
        self.fleet.exits.update({1: leaving, 3: staying} if 1 in plan.ramps else {3: num})
        self.fleet.pending.append(probes([self.clock.now_s() - 1.0] * num, [True] * leaving + [False] * staying, plan))

    async def ticks(self, num: int, inputs: tuple[int, int] = (0, 0), *, in_slo: bool = True) -> None:
        """Runs ticks, five seconds apart, with inputs between them."""
        for _ in range(num):
            self.clock.advance(5.0)
            if any(inputs):
                self.inputs(*inputs, in_slo=in_slo)
            await self.loop.tick()

    async def plans_again(self) -> None:
        """Ends the hold. The next tick plans as if the forecast were lost."""
        self.loop.update_state(hold=False, planned_s=-1.0)
        await self.ticks(1, EASY)

    def said(self, *kinds: str) -> list[str]:
        """Returns the events of some kinds, oldest first."""
        return [event["words"] for event in reversed(self.history.events(1000)) if event["kind"] in kinds]


async def begun(path: Path, inputs: tuple[int, int] = EASY, *, ticks: int = 0, **fields: Any) -> Scene:
    """Returns a scene five seconds before the end of its first period, with an empty log, after further ticks."""
    scene = Scene(path, **fields)
    await scene.loop.tick()
    await scene.ticks(23, inputs)
    scene.fleet.log.clear()
    await scene.ticks(ticks, inputs)
    return scene


def planned(asked: PlanProblem, stages: tuple[Stage, ...]) -> Planned:
    """Returns a decision as if the planner had proven the plan optimal."""
    figures = evaluate(asked, stages)
    return Planned(strategy="best", stages=stages, figures=figures, bound=figures.rate_per_s, gap=0.0)


def no_plan() -> NoPlan:
    return NoPlan(strategy="best", binding="devices")


async def _at_once(call: Callable[..., Forecast], *arguments: Any) -> Forecast:
    return call(*arguments)


def as_many_as_there_are(asked: PlanProblem) -> Planned:
    return planned(asked, whole(asked.devices["cpu"].count))


def one_is_slow(scene: Scene, replicas: int, *, slow: int = 2) -> None:
    """Adds twenty batches of four to each replica; those of one take twice as long as the profile."""
    for rank in range(replicas):
        batches_run(scene, 20, 0.08 if rank == slow else 0.04, ranks=[rank])


def batches_run(
    scene: Scene, number: int, each_s: float, *, ranks: Sequence[int] = range(4), first: int = 0, end: int = 4
) -> None:
    """Adds batches of four to replicas with one split each. `each_s`: seconds of a batch."""
    none = TimesRun(first=first, end=end, ramps=(), size=4, batches=0, tokens=0, seconds=0.0)
    for name in (f"cpu#{rank}" for rank in ranks):
        (ran,) = scene.fleet.times.get(name, (none,))
        more = replace(ran, batches=ran.batches + number, seconds=ran.seconds + number * each_s)
        scene.fleet.times[name] = (more,)


SAFE = never("confidence", RAMPS)
LOWER = dict.fromkeys(RAMPS, 0.25)
TABLE = LatencyTable.of_rows((1, 8), [[0.01, 0.01]] * 4, [[0.0, 0.0]] * len(RAMPS))
QUESTION = TunerSettings(
    score="confidence",
    guarantee=Guarantee(),
    batching=Batching(table=TABLE, ramps=tuple(RAMPS), size=8),
)


class ToldTuner(Tuner):
    """A tuner that returns what the test sets."""

    name: ClassVar[str] = "told"

    def __init__(self) -> None:
        super().__init__(QUESTION)
        self.followed: list[Mapping[int, float]] = []
        self.served: list[int] = []
        """The batch sizes that it was given."""
        self.observed = 0
        self.next: NewThresholds | None = None

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        self.followed.append(dict(thresholds))

    def set_batching(self, batching: Batching) -> None:
        self.served.append(batching.size)

    def observe(self, seen: Observations) -> NewThresholds | None:
        assert (np.diff(seen.times_s_N) >= 0).all()
        self.observed += len(seen)
        said, self.next = self.next, None
        return said

    def says(self, thresholds: Mapping[int, float], why: Reason) -> None:
        """Sets the result of its next observation."""
        self.next = NewThresholds(thresholds=thresholds, why=why, words=f"{why}!", at_s=0.0)

    @property
    def state(self) -> TunerState:
        return TunerState(evidence=0.1, watched=self.observed, rows=0, next_test=None)


async def tuned(path: Path, inputs: tuple[int, int] = EASY, **settings: Any) -> tuple[Scene, ToldTuner]:
    """Returns a scene with a tuner after its first period."""
    tuner = ToldTuner()
    growing = GROWING | {"best": halves(3, 1)}
    scene = await begun(
        path, inputs, ticks=6, first=halves(3, 1), **growing, make_tuner=lambda _: tuner, settings=settings
    )
    scene.fleet.log.clear()
    scene.asked.clear()
    return scene, tuner


async def alarm_while_replicas_start(
    scene: Scene, tuner: ToldTuner, *, broken: str | None = None, come: bool = False
) -> None:
    """One tick with a change-over to halves(3, 2), whose replicas come late or not at all.

    `broken`: what fails of the fleet at the alarm.
    """
    scene.best = halves(3, 2)
    scene.fleet.is_stuck = True
    tries = 0

    def meanwhile() -> None:
        nonlocal tries
        tries += 1
        if tries == 10:
            tuner.says(SAFE, "alarm")
            scene.fleet.broken |= {broken} if broken else set()
        if tries == 60 and come:
            scene.fleet.replicas["cpu"] = 5
        scene.inputs(10, 90)

    scene.meanwhile = meanwhile
    await scene.ticks(1, (10, 90))


def thresholds_of(scene: Scene) -> Any:
    policy = scene.fleet.followed.plan.policy
    assert policy is not None
    return policy.thresholds
