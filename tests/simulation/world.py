"""A whole service on a seeded virtual clock: ingresses, replicas, controller and callers, with faults."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from deployments.controller.act import ControlLoop
from deployments.controller.observe import ServiceFleet
from deployments.controller.remember import History
from deployments.settings import ControlSettings, ServeSettings
from deployments.wire.directory import ReplicaDirectory
from deployments.wire.messages import Address, Frames, IngressReport, ReplicaReport
from earlyexit.engine.engine import Dispatch
from earlyexit.engine.queue import OrderSpec
from earlyexit.errors import OfframpError
from earlyexit.network.boundary import Split
from optimizer.cost.evaluate import evaluate
from optimizer.live.tuning.base import NewThresholds
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage
from optimizer.plans.plan_file import parse_placed, placed_document, plan_document
from optimizer.problems.problem import PlanProblem, Slo, Supply
from optimizer.search.decision import Decision, NoPlan, Planned, Strategy
from profiles.table import LatencyTable
from simulator.events import CONTROLS, Events
from tests.deployments.control.control_fakes import ToldTuner
from tests.experiments.controlled.troubles import LosablePool
from tests.optimizer.plain_problem import plain_problem
from tests.simulation.model import NETWORKS, NUM_BLOCKS, POISON, RAMPS
from tests.simulation.network import Network, VirtualLoop, Weather
from tests.simulation.processes import CALIBRATED, Ingress, Replica, VirtualDriver, Watcher, ask, generate

FAULTS_S = 6.0
"""Seconds in which faults happen."""
FINISH_S = 240.0
"""Limit for the end of all work after the faults. A change of plan may wait 120 s for replicas first."""
LAST_TIMEOUT_S = 20.0
"""Timeout of the requests after the faults."""
COMES_AGAIN = ("overloaded", "admission", "stage_unavailable", "deadline", "cut_short")
"""Outcomes after which a request that was sent after the faults is sent again."""
PATIENT: tuple[Dispatch, ...] = ("filling", "work-conserving", "work-conserving")
NUM_INGRESSES = 2
DEVICES = {"emulated:A": 3, "emulated:B": 2}
POLICY = PolicySpec(name="confidence", thresholds=CALIBRATED)


class Tuner(ToldTuner):
    """Changes to stricter thresholds now and then."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def observe(self, seen: Any) -> NewThresholds | None:
        if self._rng.random() < 0.3:
            stricter = {ramp: least + self._rng.choice((0.0, 0.1, 0.3)) for ramp, least in CALIBRATED.items()}
            self.says(stricter, self._rng.choice(("alarm", "tested")))
        return super().observe(seen)


def random_stages(
    rng: random.Random,
    counts: Mapping[str, int],
    tokens: int | None = None,
    *,
    sequences: bool,
    networks: tuple[int, ...] = (),
) -> tuple[Stage, ...]:
    """Returns random cuts and ramps on existing accelerators, with the last network and each needed type."""
    left = {device: count for device, count in counts.items() if count}
    number = min(rng.choice((1, 2, 2, 3)), sum(left.values()))
    entry = rng.choice((0, 0, *networks[:-1])) if networks else 0
    bounds = [entry, *sorted(rng.sample(range(entry + 1, NUM_BLOCKS), number - 1)), NUM_BLOCKS]
    after_answer = "stop" if sequences else rng.choice(("stop", "stop", "stay"))
    overlap = None if sequences else rng.choice((None, None, 2))
    stages = []
    for k, (first, end) in enumerate(pairwise(bounds)):
        device = rng.choice([device for device, count in left.items() if count])
        others = number - k - 1
        replicas = rng.randint(1, max(1, left[device] - others))
        left[device] -= replicas
        cuts = {first, end, *rng.sample(range(first + 1, end), min(end - first - 1, rng.choice((0, 0, 1))))}
        cuts.update(each for each in networks if first < each < end)
        with_ramps = number == 1 or not sequences
        splits = tuple(
            Split(
                first=start,
                end=until,
                batch=rng.randint(1, 4),
                ramps=tuple(r for r in RAMPS if with_ramps and start <= r < until and rng.random() < 0.7),
                after_answer=after_answer,  # type: ignore[arg-type] # mypy widens the chosen value
                overlap_below=overlap,
                tokens=tokens,
            )
            for start, until in pairwise(sorted(cuts))
        )
        stages.append(Stage(device=device, replicas=replicas, splits=splits))
    return tuple(stages)


def problem(networks: tuple[int, ...]) -> PlanProblem:
    table = LatencyTable.of_rows((1, 2, 3, 4), [[0.003, 0.004, 0.004, 0.005]] * NUM_BLOCKS, [[0.0] * 4] * len(RAMPS))
    return plain_problem(
        survival_N=(1.0, 0.8, 0.8, 0.6, 0.5, 0.5),
        ramps=RAMPS,
        latency=dict.fromkeys(DEVICES, table),
        devices={device: Supply(count=count, usd_per_hour=1.0) for device, count in DEVICES.items()},
        bytes_per_sample_N=(8.0,) * NUM_BLOCKS,
        slo=Slo(latency_s=5.0),
        networks=networks,
    )


@dataclass(frozen=True, slots=True)
class Trouble:
    """The faults of a seed and their frequencies. Each seed has only some of them, so that rare ones are not hidden."""

    kills: int
    cuts: int
    stalls: int
    flickers: int
    losses: int
    orders: int
    broken_calls: float
    leaving: float
    poison: float
    stale: float

    @classmethod
    def of(cls, rng: random.Random) -> Trouble:
        def often(most: int) -> int:
            return rng.choice((0, 0, rng.randint(1, most)))

        def share(most: float) -> float:
            return rng.choice((0.0, 0.0, rng.random() * most))

        kills, cuts, stalls, flickers, losses = often(5), often(5), often(4), often(2), often(2)
        orders = rng.randint(0, 6)
        return cls(kills, cuts, stalls, flickers, losses, orders, share(0.2), share(0.5), share(0.2), share(1.0))


class World(ServiceFleet):
    """The state of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.events = Events()
        self.sequences = rng.random() < 0.4
        has_networks = not self.sequences and random.Random(f"{seed} networks").random() < 0.3
        self.networks = NETWORKS if has_networks else ()
        self.watch = Watcher(seed, self.sequences, self.networks, self.events)
        self.trouble = Trouble.of(rng)
        self.weather = Weather(
            delay_s=rng.choice((0.001, 0.01)),
            late=rng.choice((0.0, 0.0, 0.1)),
            late_s=rng.choice((0.5, 4.0)),
            lost=rng.choice((0.0, 0.0, 0.0, 0.05)),
            repeated=rng.choice((0.0, 0.0, 0.1)),
        )
        self.is_patient = not self.weather.lost and rng.random() < 0.5
        """Whether timeouts are so long that no deadline hides a lost input."""
        self.network = Network(seed, self.weather)
        self.loop = VirtualLoop(self.events, self.network)
        self.loop.set_exception_handler(self._complain)
        self.is_calm = False
        """Whether the faults have stopped."""
        self.stages = partial(random_stages, sequences=self.sequences, networks=self.networks)
        self.chains_rng = random.Random(f"{seed} chains")
        self.has_chains = not self.sequences and not self.networks and self.chains_rng.random() < 0.4
        """Whether plans of operators may have two chains."""
        self.first = PlacedPlan(plan=replace(self._random_plan(), epoch=1))
        self.settings = ServeSettings.model_validate(
            {
                "model": "",
                "plan": self.first.plan,
                "max_queued": rng.choice((8, 200)),
                "slo_s": rng.choice((None, 1.0)) if not self.sequences and not self.is_patient else None,
                "probe_share": rng.choice((0.0, 0.3)),
                "prompt_chunk": 4,
                "default_timeout_s": 600.0 if self.is_patient else 3.0,
                "token_timeout_s": 600.0 if self.is_patient else 2.0,
            }
        )
        self.boards = {device: ReplicaDirectory() for device in DEVICES}
        self.replicas: dict[str, Replica] = {}
        """Replicas that accept calls, or drain."""
        self.addresses: dict[str, dict[str, Address]] = {device: {} for device in DEVICES}
        self.told = dict.fromkeys(DEVICES, 0)
        self.starting: dict[str, str] = {}
        """Accelerator types of the replicas that are starting."""
        self.pools = {device: LosablePool(count) for device, count in DEVICES.items()}
        self.ingresses: list[Ingress] = []
        self.serial = 0
        self.tasks: set[asyncio.Task[Any]] = set()
        self.history = History.open(Path(":memory:"), "simulation")
        self.problem = problem(self.networks)
        self.controller: ControlLoop | None = None
        self.callers: dict[asyncio.Task[Any], Ingress] = {}
        self.outcomes: list[str] = []
        """Outcomes of the last callers."""
        self.epochs: dict[str, int] = {}
        """The newest epoch that each replica followed."""
        self.stages_of = {1: self.first.plan.stages}
        """Stages of every plan that ingresses received, by its epoch."""
        self.draining: set[str] = set()
        self.is_closed = False

    # Set-up and run

    def run(self) -> None:
        """Runs from the first plan to the end of all work; violations are in `watch.wrong`."""
        with self._patched():
            asyncio._set_running_loop(self.loop)  # for objects that are created outside of the loop's turns
            try:
                self._boot()
                self._schedule_faults()
                self._until(FAULTS_S)
                self._calm_down()
                self._finish()
            finally:
                self._close()
                asyncio._set_running_loop(None)

    def _boot(self) -> None:
        for device, replicas in self.first.occupied.items():
            self.told[device] = replicas
            self._reconcile(device, delay_s=0.0)
        for _ in range(NUM_INGRESSES):
            self._start_ingress()
        self._start_controller()
        number = self.rng.randint(10, 60) // (2 if self.sequences else 1)
        for _ in range(number):
            self._at(self.rng.random() * FAULTS_S, self._arrive)

    def _until(self, until_s: float, *, done: Callable[[], bool] = lambda: False) -> None:
        """Runs event by event, and checks the invariants after each."""
        events, watch = self.events, self.watch
        while events.next_s <= until_s and not watch.wrong and not done():
            events.run_arrivals([events.next_s], lambda _: None)
            self._check()
        if not watch.wrong and not done():
            events.run_arrivals([until_s], lambda _: None)

    def _check(self) -> None:
        for ingress in self.ingresses:
            if ingress.is_alive:
                ingress.check()
        for replica in self.replicas.values():
            epoch = replica.host.epoch
            before = self.epochs.get(replica.name, -1)
            if epoch != before:
                self.watch.expect(epoch > before, "a replica never goes back to an older plan")
                self.epochs[replica.name] = epoch

    def _finish(self) -> None:
        """Waits for the end of all work; then the service must answer as if there had been no faults."""
        limit_s = self.events.time_s + FINISH_S
        self._until(limit_s, done=lambda: not self.tasks)
        if self.watch.wrong:
            return
        self.watch.expect(not self.tasks, "every caller hears something once the faults have stopped")
        self._until(self.events.time_s + 10.0)
        self.outcomes.clear()
        for k in range(8):
            self._at(0.2 * k, partial(self._arrive, is_last=True))
        self._until(self.events.time_s + FINISH_S, done=lambda: len(self.outcomes) == 8)
        self.watch.expect(self.outcomes == ["answered"] * 8, "a service without faults answers")
        # An answered input that stays may wait for a full batch until its deadline.
        self._until(self.events.time_s + LAST_TIMEOUT_S + 5.0)
        if self.watch.wrong:
            return
        for ingress in self.ingresses:
            if ingress.is_alive:
                self.watch.expect(not ingress.core.num_unanswered, "no input is left at an ingress")
                self.watch.expect(ingress.core.oldest_epoch == ingress.core.placed.epoch, "no call is left open")
                self.watch.expect(not ingress.generation.loop.num_running, "no sequence is left at an ingress")
        self.watch.expect(not self.draining & self.replicas.keys(), "a replica that takes no more calls ends")
        for replica in self.replicas.values():
            self.watch.expect(not replica.num_kept, "no page is held at the end")
            self.watch.expect(not replica.host.device.engine.num_waiting, "no input is left at a replica")

    def _close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.is_closed = True
        self.loop._run_turn(None)
        self.loop.close()
        self.history.close()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Makes threads and sockets virtual; an error in the service's log is a violation."""
        handler = _Complaints(self)
        root = logging.getLogger("ray.serve")
        before = root.level, root.propagate
        root.addHandler(handler)
        root.propagate = False
        root.setLevel(logging.ERROR)
        with (
            mock.patch("deployments.replica.host.DeviceThreads", VirtualDriver),
            mock.patch("deployments.replica.host.DirectFrames", Frames),
        ):
            try:
                yield
            finally:
                root.removeHandler(handler)
                root.setLevel(before[0])
                root.propagate = before[1]

    def _complain(self, _: object, context: Mapping[str, Any]) -> None:
        if not self.is_closed:
            self.watch.wrong.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _at(self, delay_s: float, what: Callable[[], object]) -> None:
        self.events.at(self.events.time_s + delay_s, CONTROLS, lambda _: self.loop.run(what))

    # Callers

    def _arrive(self, *, is_last: bool = False) -> None:
        """Sends a request to some ingress."""
        rng = self.rng
        alive = [each for each in self.ingresses if each.is_alive]
        if not alive:
            return
        ingress = rng.choice(alive)
        timeout_s = LAST_TIMEOUT_S if is_last else None if self.is_patient else rng.choice((None, 0.05, 0.5, 2.0))
        if self.sequences:
            prompt = [rng.randint(1, 99) for _ in range(rng.randint(1, 12))]
            leaves = rng.randint(0, 4) if not is_last and rng.random() < self.trouble.leaving else None
            call = generate(ingress, prompt, rng.randint(1, 10), None if is_last else timeout_s, leaves)
        else:
            numbers = [rng.randrange(POISON) for _ in range(rng.randint(1, 5))]
            if not is_last and rng.random() < self.trouble.poison:
                numbers[0] = POISON
            call = ask(ingress, numbers, timeout_s)
        task = self.loop.create_task(self._hear(call, ingress, is_last=is_last))
        self.callers[task] = ingress
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda task: self.callers.pop(task, None))
        if not is_last and rng.random() < self.trouble.leaving:
            self._at(rng.random() * 0.2, task.cancel)

    async def _hear(self, call: Any, ingress: Ingress, *, is_last: bool) -> None:
        try:
            outcome = await call
        except asyncio.CancelledError:
            outcome = "left"
        except Exception as error:
            self.watch.wrong.append(f"a caller got {error!r}")
            return
        self.watch.say(f"{ingress.name}: {outcome}")
        if is_last and outcome in COMES_AGAIN:
            self._at(1.0, partial(self._arrive, is_last=True))
        elif is_last:
            self.outcomes.append(outcome)

    # Processes

    def _start_ingress(self) -> None:
        self.serial += 1
        ingress = Ingress(
            f"i{self.serial}", self.first, self.boards, self.loop, self.network, self.settings, self.watch
        )
        self.ingresses.append(ingress)
        if self.controller is not None and self.controller.state.followed is not None:
            ingress.follow(self.controller.state.followed)  # a starting ingress pulls the plan

    def _kill_ingress(self) -> None:
        alive = [each for each in self.ingresses if each.is_alive]
        if not alive:
            return
        ingress = self.rng.choice(alive)
        self.watch.say(f"{ingress.name} dies")
        ingress.is_alive = False
        self.network.vanish(ingress.name)
        for task, where in list(self.callers.items()):
            if where is ingress:
                task.cancel()
        self._at(0.3, self._start_ingress)

    def _start_controller(self) -> None:
        rng = random.Random(f"{self.watch.seed} controller {self.events.time_s}")
        self.controller = controller = ControlLoop(
            self,
            self.history,
            ControlSettings.model_validate(
                {"problem": self.problem, "policy": POLICY, "state": ":memory:", "period_s": 1000.0, "watch_s": 0.3}
            ),
            first=self.first,
            clock=self.events,
            sleep=self._sleep,
            solve=self._solve,
            off_loop=_at_once,
            make_tuner=lambda _: Tuner(rng),
        )
        self.controlling = [self.loop.create_task(controller.run())]

    def _kill_controller(self) -> None:
        self.watch.say("controller dies")
        for task in self.controlling:
            task.cancel()
        self.controller = None
        if random.Random(f"{self.watch.seed} disk {self.events.time_s}").random() < 0.5:
            self.watch.say("its disk is lost")
            self.history = History.open(Path(":memory:"), "simulation")
        self._at(0.5, self._start_controller)

    async def _sleep(self, seconds: float) -> None:
        """After the faults the controller ticks less often, because its ticks take most of a seed's time."""
        await asyncio.sleep(4 * seconds if self.is_calm else seconds)

    async def _solve(self, asked: PlanProblem, strategy: Strategy, _: float) -> Decision:
        counts = {device: supply.count for device, supply in asked.devices.items()}
        if not any(counts.values()) or (not self.is_calm and self.rng.random() < 0.1):
            return NoPlan(strategy=strategy, binding="devices")
        stages = self.stages(self.rng, counts)
        figures = evaluate(asked, stages)
        return Planned(strategy=strategy, stages=stages, figures=figures, bound=figures.rate_per_s, gap=0.0)

    def _random_plan(self) -> Plan:
        rng = self.rng
        stages = self.stages(rng, DEVICES, rng.choice((None, 12)))
        shares: tuple[float, ...] = (1.0,)
        if self.has_chains and self.chains_rng.random() < 0.5:
            stages, shares = self._two_chains(), self.chains_rng.choice(((0.5, 0.5), (0.7, 0.3)))
        return Plan(
            stages=stages,
            shares=shares,
            policy=POLICY,
            networks=self.networks,
            # Deferred batches wait as long as deadlines allow, and callers with long timeouts have none.
            dispatch=rng.choice(PATIENT if self.is_patient or self.sequences else get_args(Dispatch)),
            order=OrderSpec(name=rng.choice(("arrival", "deadline", "shortest", "das"))),
        )

    def _two_chains(self) -> tuple[Stage, ...]:
        """Returns a plan with a chain on each type of accelerator; `after_answer` is the same in both."""
        first, second = (self.stages(self.chains_rng, {device: count}) for device, count in DEVICES.items())
        like = first[0].splits[0]
        alike = partial(replace, after_answer=like.after_answer, overlap_below=like.overlap_below)
        return *first, *(replace(stage, splits=tuple(map(alike, stage.splits))) for stage in second)

    def _order(self) -> None:
        """Puts a random plan of an operator in force."""
        plan = self._random_plan()

        async def apply() -> None:
            try:
                if self.controller is not None:
                    await self.controller.apply(plan_document(plan), hold=self.rng.random() < 0.2)
            except (OfframpError, ConnectionError) as error:
                self.watch.say(f"an order is refused: {type(error).__name__}")

        self.controlling.append(self.loop.create_task(apply()))

    # Faults

    def _schedule_faults(self) -> None:
        trouble, rng = self.trouble, self.rng
        for times, fault in (
            (trouble.kills, self._kill),
            (trouble.cuts, self._cut),
            (trouble.stalls, self._stall),
            (trouble.flickers, self._flicker),
            (trouble.losses, self._lose_accelerator),
            (trouble.orders, self._order),
        ):
            for _ in range(times):
                self._at(rng.random() * FAULTS_S * 0.95, fault)

    def _kill(self) -> None:
        match self.rng.random():
            case x if x < 0.6 and self.replicas:
                self._kill_replica(self.rng.choice(list(self.replicas.values())))
            case x if x < 0.9:
                self._kill_ingress()
            case _ if self.controller is not None:
                self._kill_controller()

    def _kill_replica(self, replica: Replica) -> None:
        """Kills a replica's process; it is replaced when its death is noticed."""
        self.watch.say(f"{replica.name} dies")
        self._end_replica(replica)
        self._at(0.3, partial(self._reconcile, replica.device))

    def _end_replica(self, replica: Replica) -> None:
        replica.is_alive = False
        self.replicas.pop(replica.name, None)
        self.network.vanish(replica.name)
        self.pools[replica.device].hand_over(replica.name, None)
        self._at(0.2, partial(self._announce, replica.device, replica.name, None))

    def _cut(self) -> None:
        """Makes a process unreachable for a while."""
        names = [*self.replicas, *(each.name for each in self.ingresses if each.is_alive)]
        name, for_s = self.rng.choice(names), self.rng.choice((0.0, 0.2, 1.5))
        self.watch.say(f"{name} is cut off for {for_s} s")
        self.network.cut_off.add(name)
        self.network.cut(name)
        self._at(for_s, partial(self._heal, name))

    def _heal(self, name: str) -> None:
        if name in self.replicas or any(each.name == name and each.is_alive for each in self.ingresses):
            self.network.cut_off.discard(name)

    def _stall(self) -> None:
        """Slows or stops a device for a while."""
        if not self.replicas:
            return
        replica = self.rng.choice(list(self.replicas.values()))
        self.watch.say(f"{replica.name} is slow")
        replica.slowness = self.rng.choice((5.0, 50.0))
        replica.stuck_until_s = self.events.time_s + self.rng.choice((0.0, 2.0))

    def _flicker(self) -> None:
        """Breaks the connections of all replicas again and again."""
        self.watch.say("connections flicker")
        names = list(self.replicas)
        for k in range(10):
            for name in names:
                self._at(0.15 * k, partial(self.network.cut, name))

    def _lose_accelerator(self) -> None:
        device = self.rng.choice(list(DEVICES))
        number = self.rng.randrange(DEVICES[device])
        self.watch.say(f"{device} {number} is gone")
        for holder in self.pools[device].lose([number], self.events.time_s):
            if holder in self.replicas:
                self._kill_replica(self.replicas[str(holder)])
            else:
                self.starting.pop(str(holder), None)
        self._at(self.rng.uniform(0.5, 2.0), partial(self._bring_back, device, number))

    def _bring_back(self, device: str, number: int) -> None:
        self.pools[device].bring_back([number])
        self._reconcile(device)

    def _calm_down(self) -> None:
        self.watch.say("the faults stop")
        self.is_calm = True
        weather = self.weather
        weather.late = weather.lost = weather.repeated = 0.0
        for replica in self.replicas.values():
            replica.slowness, replica.stuck_until_s = 1.0, 0.0
            self._heal(replica.name)
        for ingress in self.ingresses:
            self._heal(ingress.name)
        for device, count in DEVICES.items():
            for number in range(count):
                self._bring_back(device, number)

    # Serve's behaviour

    def _announce(self, device: str, name: str, address: Address | None) -> None:
        addresses = self.addresses[device]
        if address is None:
            addresses.pop(name, None)
        else:
            addresses[name] = address
        self.boards[device].announce(dict(addresses))

    def _of(self, device: str) -> list[Replica]:
        """Returns the replicas of a type that accept calls, or will."""
        return [each for each in self.replicas.values() if each.device == device and each.name not in self.draining]

    def _reconcile(self, device: str, delay_s: float = 0.2) -> None:
        """Starts missing replicas of a type, and stops surplus ones, which Serve chooses."""
        starting = [name for name, where in self.starting.items() if where == device]
        there = self._of(device)
        for _ in range(self.told[device] - len(there) - len(starting)):
            self.serial += 1
            name = f"{device}#{self.serial}"
            if not self.pools[device].take(name):
                return
            self.starting[name] = device
            self._at(delay_s * (1 + self.rng.random()), partial(self._start_replica, name, device))
        too_many = len(there) + len(starting) - self.told[device]
        for name in starting[: max(0, too_many)]:
            del self.starting[name]
            self.pools[device].hand_over(name, None)
        for replica in self.rng.sample(there, max(0, too_many - len(starting))):
            self.draining.add(replica.name)
            self.loop.create_task(self._drain_replica(replica))

    def _start_replica(self, name: str, device: str) -> None:
        if self.starting.pop(name, None) is None:
            return
        replica = Replica(name, device, self.loop, self.settings, self.watch)
        self.replicas[name] = replica
        self.loop.create_task(self._become_ready(replica))

    async def _become_ready(self, replica: Replica) -> None:
        plans = [self.first]
        if self.controller is not None:
            state = self.controller.state
            plans = [state.placed, state.followed or state.placed]
        address = await replica.start(plans)
        if replica.is_alive:
            self.watch.say(f"{replica.name} runs")
            self._announce(replica.device, replica.name, address)

    async def _drain_replica(self, replica: Replica) -> None:
        self._announce(replica.device, replica.name, None)
        await replica.server.close()
        if replica.is_alive:
            self.watch.say(f"{replica.name} ends")
            self._end_replica(replica)
            self._reconcile(replica.device)

    # The controller's view

    async def _reach(self) -> None:
        await asyncio.sleep(self.rng.random() * 0.01)
        if not self.is_calm and self.rng.random() < self.trouble.broken_calls:
            raise ConnectionError("a process died at this moment")

    async def _tell(self, what: Callable[[Ingress], None]) -> None:
        """Calls every ingress in turn; a message may arrive a second time, later."""
        for ingress in list(self.ingresses):
            await self._reach()
            if ingress.is_alive:
                what(ingress)
                if not self.is_calm and self.rng.random() < self.trouble.stale:
                    self._at(self.rng.random() * 2.0, partial(self._tell_late, ingress, what))

    def _tell_late(self, ingress: Ingress, what: Callable[[Ingress], None]) -> None:
        if ingress.is_alive:
            what(ingress)

    async def scale(self, device: str, replicas: int) -> None:
        await self._reach()
        self.told[device] = replicas
        self._reconcile(device)

    async def running(self) -> dict[str, int]:
        await self._reach()
        return {device: sum(each.name in self.addresses[device] for each in self._of(device)) for device in DEVICES}

    async def prepare(self, placed: PlacedPlan) -> None:
        for device in placed.occupied:
            for replica in self._of(device):
                await self._reach()
                await replica.host.prepare([placed])

    async def follow(self, placed: PlacedPlan) -> None:
        self.watch.say(f"follow {placed.epoch}")
        read = parse_placed(placed_document(placed))  # in the form in which it is stored

        def follow(ingress: Ingress) -> None:  # without its disk, a controller cannot know plans that no ingress got
            same = self.stages_of.setdefault(placed.epoch, placed.plan.stages) == placed.plan.stages
            self.watch.expect(same, "an epoch is of one plan")
            ingress.follow(read)

        await self._tell(follow)

    async def suspend(self, reason: str) -> None:
        self.watch.say("suspend")
        await self._tell(lambda ingress: ingress.dispatcher.suspend(reason))

    async def ingress_reports(self) -> list[IngressReport]:
        await self._reach()
        now_s = self.events.time_s
        return [each.take_completed(now_s) for each in self.ingresses if each.is_alive]

    async def replica_reports(self) -> list[ReplicaReport]:
        await self._reach()
        return [each.host.report(replica=each.name, node="n") for each in self.replicas.values()]

    async def capacity(self) -> dict[str, int]:
        return {device: pool.counted(self.events.time_s) for device, pool in self.pools.items()}


class _Complaints(logging.Handler):
    """Records errors in the service's log as violations."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if not self._world.is_closed:
            error = record.exc_info[1] if record.exc_info else None
            self._world.watch.wrong.append(f"{record.getMessage()}: {error!r}")


async def _at_once(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


def check(seed: int) -> World:
    """Runs a seed; raises AssertionError with the violations and the command that replays it."""
    world = World(seed)
    world.run()
    assert not world.watch.wrong, f"{world.watch.wrong}; to replay it: python -m tests.simulation.world {seed}"
    return world


if __name__ == "__main__":
    for each in map(int, sys.argv[1:]):
        played = World(each)
        played.run()
        said = *played.watch.log, f"{played.trouble} {played.weather}", *played.watch.wrong
        sys.stdout.writelines(f"{line}\n" for line in said)
