"""The simulated service: slots with replicas, ingresses before them, and what both need to know."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from cluster.emulated import Pace
from deployments.wire.messages import Assignment
from earlyexit.engine.queue import SplitCounts
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.generation.seconds import DecoderSeconds
from optimizer.placement import PlacedPlan
from optimizer.plan import PolicySpec
from optimizer.tokens import bytes_length
from simulator.events import Events
from simulator.ingress import SimulatedIngress
from simulator.inputs import Decisions, IntArray, Probing, pruned_table
from simulator.outcome import Ledger
from simulator.replica import SimulatedReplica, Slot, StepWork, Work, Works
from simulator.scenario import Scenario
from simulator.sequences import GeneratingIngress

ProbingOf = Callable[[int], Probing | None]
Decide = Callable[[PolicySpec | None], Decisions]


def no_probing(index: int) -> None:
    """Returns that there are no probes."""


class SimulatedService:
    """One simulated application."""

    def __init__(
        self,
        scenario: Scenario,
        events: Events,
        placed: PlacedPlan,
        slots: Mapping[str, str],
        probing: ProbingOf = no_probing,
        decide: Decide | None = None,
    ) -> None:
        """`slots`: the accelerator type of every slot that any plan will use; `probing`: by an ingress's index.

        `decide`: where inputs leave under a policy; None: as the scenario says, whatever the policy.
        """
        self.scenario = scenario
        self.events = events
        self.ledger = Ledger(scenario.arrivals_s, scenario.inputs_per_request)
        self.slots = {name: Slot(name, device, scenario.num_ingresses) for name, device in slots.items()}
        self.placed = placed
        self.counts: dict[Split, SplitCounts] = {}
        """The batches that ran, by split."""
        self.took_s: dict[Split, array[float]] = {}
        """The seconds of every batch by split, where inputs have lengths."""
        self.cycle = len(scenario.rows_N)
        """Inputs whose numbers are that far apart are the same."""
        self._per_request = scenario.inputs_per_request
        self._rows_N: IntArray = scenario.rows_N
        self._decide = decide
        self._decisions = scenario.decisions
        self._leaves: dict[tuple[int, ...], array[int]] = {}
        self._works: dict[tuple[str, float], Works] = {}
        make = SimulatedIngress if scenario.sequences is None else GeneratingIngress
        self.ingresses = [
            make(index, scenario, events, self.ledger, placed, self.slots, probing(index))
            for index in range(scenario.num_ingresses)
        ]

    def replicas(self) -> Iterator[SimulatedReplica]:
        """Yields the replicas that take calls, and those that end."""
        for slot in self.slots.values():
            yield from slot.replicas.values()
            yield from slot.retired

    @property
    def door(self) -> Callable[[int], None]:
        """Returns what takes requests, by their number."""
        alone = len(self.ingresses) == 1 and self._per_request == 1
        return self.ingresses[0].arrive if alone else self.arrive

    def arrive(self, number: int) -> None:
        """Take a request; ingresses take turns."""
        ingresses = self.ingresses
        ingresses[number % len(ingresses)].arrive(number * self._per_request)

    def boot(self) -> None:
        """Start the plan's replicas, ready for work."""
        stages = {stage.slot: stage for stage in self.ingresses[0].core.route.stages}
        for stage in stages.values():
            for _ in range(stage.planned.replicas):
                self.start(stage.slot, stage.assignment)

    def start(self, slot_name: str, assignment: Assignment | None = None) -> SimulatedReplica:
        """Starts a replica that takes calls; without an assignment its first call brings one."""
        slot = self.slots[slot_name]
        index, slot.num_ever = slot.num_ever, slot.num_ever + 1
        name, works = f"{slot_name}#{index}", self._works_of(slot.device, 1.0)
        starts = (0, *self.placed.plan.networks[:-1])
        replica = SimulatedReplica(name, index, slot.device, works, self.scenario.problem, self.events, starts)
        if assignment is not None:
            replica.prepare(assignment)
        slot.add(replica)
        pending, slot.pending = slot.pending, []
        for trip, block, delay_s in pending:
            self.ingresses[trip.ingress.index].go(trip, block, delay_s)
        return replica

    def slow(self, replica: SimulatedReplica, slowness: float) -> None:
        """Have a replica's batches take so many times as long as the profile says."""
        replica.become(self._works_of(replica.device, slowness))

    def stop(self, replica: SimulatedReplica) -> None:
        """Have a replica take no more calls; it ends those that it has."""
        self._slot_of(replica).remove(replica, self.events.time_s)

    def kill(self, replica: SimulatedReplica) -> None:
        """End a replica at once; its inputs start again elsewhere."""
        slot = self._slot_of(replica)
        if replica.index in slot.replicas:
            slot.remove(replica, self.events.time_s)
        for trip in replica.die():
            self.ingresses[trip.ingress.index].restart(trip)

    def follow(self, placed: PlacedPlan) -> None:
        """Have all ingresses follow a plan; raises PlanError for one that needs other slots."""
        missing = sorted(set(placed.slots) - set(self.slots))
        if missing:
            raise PlanError(f"the plan needs slots {missing}; there are {sorted(self.slots)}")
        plan, before = placed.plan, self.placed.plan
        if self._decide is not None and plan.policy != before.policy:
            self._decisions = self._decide(plan.policy)
        self.placed = placed
        if (plan.ramps, plan.policy, plan.used) != (before.ramps, before.policy, before.used):
            self._leaves = {}
            for (device, slowness), works in self._works.items():
                works.forget(self._pace_of(device, slowness))
        for slot in self.slots.values():
            slot.avoid(placed.avoided_ids)
        for ingress in self.ingresses:
            ingress.follow(placed)

    def _slot_of(self, replica: SimulatedReplica) -> Slot:
        return self.slots[replica.name.rpartition("#")[0]]

    def _works_of(self, device: str, slowness: float) -> Works:
        works = self._works.get((device, slowness))
        if works is None:
            by_tokens = self.scenario.counts_tokens
            hop_length = bytes_length(self.scenario.problem) if by_tokens else None
            make = self._work if self.scenario.sequences is None else self._work_of_steps(device, slowness)
            works = self._works[device, slowness] = Works(self._pace_of(device, slowness), make, hop_length)
        return works

    def _pace_of(self, device: str, slowness: float) -> Pace:
        """Returns the pace under the present plan; where inputs cost alike, those that lose words cost less."""
        problem, used = self.scenario.problem, self.placed.plan.used
        table, by_tokens = problem.latency[device], self.scenario.counts_tokens
        if problem.crossing_tokens and not by_tokens:
            table = pruned_table(problem, table, used)
        return Pace(table, problem.ramps, slowness, length=table.length if by_tokens else None)

    def _work(self, split: Split, pace: Pace) -> Work:
        counts = self.counts.setdefault(split, SplitCounts(split.budget))
        took_s = None if pace.length is None else self.took_s.setdefault(split, array("d"))
        return Work(split, self._leaves_of(split), pace, counts, took_s)

    def _work_of_steps(self, device: str, slowness: float) -> Callable[[Split, Pace], Work]:
        """Returns what makes the work of a split of a decoder on an accelerator type."""
        problem, generation = self.scenario.problem, self.scenario.problem.generation
        prefill = None if generation is None or generation.prefill is None else generation.prefill[device]
        seconds = DecoderSeconds(problem.latency[device], prefill, slowness)
        fill = 1.0 if generation is None or generation.fill == "compute" else generation.copy_share

        def make(split: Split, pace: Pace) -> Work:
            return StepWork(
                split,
                self._leaves_of(split),
                pace,
                self.counts.setdefault(split, SplitCounts(split.budget)),
                self.took_s.setdefault(split, array("d")),
                seconds=seconds,
                ramps=problem.ramps,
                num_blocks=problem.num_blocks,
                fill=fill,
                policy=self.placed.plan.policy,
            )

        return make

    def _leaves_of(self, split: Split) -> array[int]:
        leaves = self._leaves.get(split.ramps)
        if leaves is None:
            leaves_N = self._decisions.leaves_N(split.ramps, self.placed.plan.ramps)[self._rows_N]
            leaves = self._leaves[split.ramps] = array("h", leaves_N.astype(np.int16).tobytes())
        return leaves
