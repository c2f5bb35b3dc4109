"""The simulated service: its ingresses, and its replicas by accelerator type."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from cluster.emulated import Pace
from deployments.wire.messages import assignments_of
from earlyexit.engine.queue import SplitCounts
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.generation.seconds import DecoderSeconds
from optimizer.plans.plan import PlacedPlan, PolicySpec, deployment_name
from optimizer.problems.networks import Used, pruned_table
from optimizer.problems.tokens import bytes_length
from simulator.events import Events
from simulator.inputs import Decisions, Probing
from simulator.outcome import Ledger
from simulator.processes import SimulatedIngress, SimulatedReplica, Slot
from simulator.scenario import Scenario
from simulator.sequences import GeneratingIngress
from simulator.work import StepWork, Work, Works

ProbingOf = Callable[[int], Probing | None]
Decide = Callable[[PolicySpec | None], Decisions]


class SimulatedService:
    """A simulated application."""

    def __init__(
        self,
        scenario: Scenario,
        events: Events,
        placed: PlacedPlan,
        probing: ProbingOf = lambda _: None,
        decide: Decide | None = None,
    ) -> None:
        """`placed`: the first plan. `probing`: returns the probing of an ingress, by index.

        `decide`: returns the exit decisions under a policy; None: the scenario's decisions under every policy.
        """
        self.scenario = scenario
        self.events = events
        self.ledger = Ledger(scenario.arrivals_s, scenario.inputs_per_request)
        self.running: dict[str, dict[int, SimulatedReplica]] = {device: {} for device in scenario.problem.devices}
        """The replicas that accept calls, by accelerator type and by an index that is never reused."""
        self.retired: list[SimulatedReplica] = []
        """The replicas that drain or are dead."""
        self.slots: dict[str, Slot] = {}
        """The slots of all plans so far."""
        self.counts: dict[tuple[str, Split], SplitCounts] = {}
        """The counts of batches, by accelerator type and split."""
        self.took_s: dict[tuple[str, Split], array[float]] = {}
        """The seconds of every batch, by accelerator type and split; empty if inputs have no lengths."""
        self._decide = decide
        self._decisions = scenario.decisions
        self._leaves: dict[tuple[tuple[int, ...], tuple[int, ...]], array[int]] = {}
        self._works: dict[tuple[str, float], Works] = {}
        self._num_ever = dict.fromkeys(self.running, 0)
        self._place(placed)
        make = SimulatedIngress if scenario.sequences is None else GeneratingIngress
        self.ingresses: list[SimulatedIngress] = [
            make(index, scenario, events, self.ledger, placed, self.slots, probing(index))
            for index in range(scenario.num_ingresses)
        ]

    def replicas(self) -> Iterator[SimulatedReplica]:
        """Yields all replicas, including those that drain or are dead."""
        for replicas in self.running.values():
            yield from replicas.values()
        yield from self.retired

    def arrive(self, number: int) -> None:
        """Submits a request to the next ingress."""
        self.ingresses[number % len(self.ingresses)].arrive(number * self.scenario.inputs_per_request)

    def boot(self) -> None:
        """Starts the plan's replicas, which are ready immediately."""
        for device, number in self.placed.occupied.items():
            for _ in range(number):
                self._new(device)
        self._assign_stages()
        self._update_ingresses()

    def start(self, device: str) -> SimulatedReplica:
        """Starts a replica, prepared for all stages of the plan on its accelerator type."""
        replica = self._new(device)
        self._assign_stages()
        self._update_ingresses()
        return replica

    def _new(self, device: str) -> SimulatedReplica:
        index = self._num_ever[device]
        self._num_ever[device] += 1
        name, works = f"{deployment_name(device)}#{index}", self._works_of(device, 1.0)
        starts = (0, *self.placed.plan.networks[:-1])
        replica = SimulatedReplica(name, index, device, works, self.scenario.problem, self.events, starts)
        replica.prepare(each for each in self._assignments.values() if each.stage.device == device)
        self.running[device][index] = replica
        return replica

    def slow(self, replica: SimulatedReplica, slowness: float) -> None:
        """Multiplies the times of a replica's batches by `slowness`."""
        replica.works = self._works_of(replica.device, slowness)

    def stop(self, replica: SimulatedReplica) -> None:
        """Stops new calls to a replica; it finishes those that it has."""
        replica.until_s = self.events.time_s
        if replica.period is not None:
            replica.period.until_s = self.events.time_s
        del self.running[replica.device][replica.index]
        self.retired.append(replica)
        self._assign_stages()
        self._update_ingresses()

    def follow(self, placed: PlacedPlan) -> None:
        """Makes all ingresses follow a plan. Raises PlanError for accelerators that the problem does not have."""
        missing = sorted(placed.occupied.keys() - self.running.keys())
        if missing:
            raise PlanError(f"the plan needs replicas on {missing}; the service has replicas on {sorted(self.running)}")
        plan, before = placed.plan, self.placed.plan
        if self._decide is not None and plan.policy != before.policy:
            self._decisions = self._decide(plan.policy)
        self._place(placed)
        if (plan.ramps, plan.policy, plan.used) != (before.ramps, before.policy, before.used):
            self._leaves = {}
            for (device, slowness), works in self._works.items():
                works.forget(self._pace_of(device, slowness))
        self._assign_stages()
        for ingress in self.ingresses:
            ingress.follow(placed)
        self._update_ingresses()

    def _update_ingresses(self) -> None:
        """Informs the ingresses of the replicas of all slots. Calls that other stages can answer wait no longer."""
        available = {slot.name: len(slot.replicas) for slot in self.slots.values()}
        for ingress in self.ingresses:
            can_run = ingress.set_available(available)  # the same for all
        for slot in self.slots.values():
            if can_run or slot.name not in self._assignments:
                pending, slot.pending = slot.pending, {}
                for call in pending:
                    call.ingress.restart(call)

    def _place(self, placed: PlacedPlan) -> None:
        self.placed = placed
        self._assignments = assignments_of(placed)
        for name, stage in placed.stage_of.items():
            if name not in self.slots:
                self.slots[name] = Slot(name, stage.device, self.scenario.num_ingresses)

    def _assign_stages(self) -> None:
        """Assigns the plan's stages to the replicas, as every ingress would."""
        by_name = {name: {each.name: each for each in own.values()} for name, own in self.running.items()}
        for device, hosts in self.placed.roles(by_name).items():
            for name, slot_name in hosts.items():
                by_name[device][name].follow(self._assignments[slot_name])
            for slot in [each for each in self.slots.values() if each.device == device]:
                own = [each for name, each in by_name[device].items() if hosts.get(name) == slot.name]
                slot.host(own, self.events.time_s)
                if own:
                    pending, slot.pending = slot.pending, {}
                    for call, (block, delay_s) in pending.items():
                        call.ingress.go(call, block, delay_s)

    def _works_of(self, device: str, slowness: float) -> Works:
        works = self._works.get((device, slowness))
        if works is None:
            hop_length = bytes_length(self.scenario.problem) if self.scenario.counts_tokens else None
            make = partial(self._work, device, slowness)
            works = self._works[device, slowness] = Works(self._pace_of(device, slowness), make, hop_length)
        return works

    def _pace_of(self, device: str, slowness: float, used: Used | None = None) -> Pace:
        """Returns the pace in chains of the current plan that use these networks (None: all of the plan's).

        Without lengths, pruning is a lower cost of all inputs.
        """
        problem, by_tokens = self.scenario.problem, self.scenario.counts_tokens
        table = problem.latency[device]
        if not by_tokens:
            table = pruned_table(problem, table, used or self.placed.plan.used)
        return Pace(table, problem.ramps, slowness, length=table.length if by_tokens else None)

    def _work(self, device: str, slowness: float, split: Split, pace: Pace) -> Work:
        plan = self.placed.plan  # an input passes the ramps and networks of one chain only
        chain = next((chain for chain in plan.chains if any(each is split for each in chain.splits)), plan)
        active = chain.ramps
        if chain.used != plan.used:
            pace = self._pace_of(device, slowness, chain.used)
        leaves = self._leaves.get((split.ramps, active))
        if leaves is None:
            leaves_N = self._decisions.leaves_N(split.ramps, active)[self.scenario.rows_N]
            leaves = self._leaves[split.ramps, active] = array("h", leaves_N.astype(np.int16).tobytes())
        counts = self.counts.setdefault((device, split), SplitCounts(split.budget))
        took_s = None if pace.length is None else self.took_s.setdefault((device, split), array("d"))
        if self.scenario.sequences is None:
            return Work(split, leaves, pace, counts, took_s)
        problem, generation = self.scenario.problem, self.scenario.problem.generation
        prefill = None if generation is None or generation.prefill is None else generation.prefill[device]
        return StepWork(
            split,
            leaves,
            pace,
            counts,
            took_s,
            seconds=DecoderSeconds(problem.latency[device], prefill, slowness),
            ramps=problem.ramps,
            num_blocks=problem.num_blocks,
            fill=1.0 if generation is None or generation.fill == "compute" else generation.copy_share,
            policy=self.placed.plan.policy,
        )
