"""Runs a scenario."""

from __future__ import annotations

import gc
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from deployments.ingress.core.generation import GenerationCounts
from earlyexit.engine.queue import SplitCounts
from earlyexit.network.boundary import Split
from optimizer.plans.plan import PlacedPlan
from simulator.events import Events
from simulator.inputs import IntArray
from simulator.outcome import NOT_DROPPED, UNANSWERED, LengthUse, Outcome, SlotUse, SplitUse
from simulator.scenario import FloatArray, Scenario
from simulator.sequences import GeneratingIngress
from simulator.service import SimulatedService

Progress = Callable[[float], None]
"""Called with the share of the requests that have arrived."""
CHUNK = 1 << 13
"""The number of arrivals between two reports of progress."""


def simulate(scenario: Scenario, *, progress: Progress | None = None) -> Outcome:
    """Simulates a scenario until the last request is answered or dropped. Equal scenarios give equal outcomes.

    After an interrupt (Ctrl-C) it returns the results so far; inputs without an outcome count as unanswered.
    """
    return play(booted(scenario), progress=progress)


def booted(scenario: Scenario) -> SimulatedService:
    """Returns the scenario's service, ready for the first request."""
    service = SimulatedService(scenario, Events(), PlacedPlan(plan=scenario.plan))
    service.boot()
    return service


def play(service: SimulatedService, *, progress: Progress | None = None) -> Outcome:
    """Runs all requests of a service to their end."""
    events, arrivals_s, ingresses = service.events, service.scenario.arrivals_s, service.ingresses
    is_simple = len(ingresses) == 1 and service.scenario.inputs_per_request == 1
    arrive = ingresses[0].arrive if is_simple else service.arrive
    interrupted, was_enabled = False, gc.isenabled()
    gc.disable()  # collections would take a third of the time, and a simulation creates no reference cycles
    try:
        for first in range(0, len(arrivals_s), CHUNK):
            events.run_arrivals(arrivals_s[first : first + CHUNK].tolist(), arrive, first)
            if progress is not None:
                progress(service.events.time_s / service.scenario.duration_s)
        events.run_out()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if was_enabled:
            gc.enable()
    return gather(service, interrupted=interrupted)


def gather(service: SimulatedService, *, interrupted: bool, ended_s: float | None = None) -> Outcome:
    """Returns the outcome so far. `ended_s`: when the work ended, if only timers ran after it."""
    scenario, ledger, now_s = service.scenario, service.ledger, service.events.time_s
    latency_s_N = np.frombuffer(ledger.latency_s, dtype=np.float64)
    drop_N = np.frombuffer(ledger.drop, dtype=np.int8).copy()
    drop_N[np.isnan(latency_s_N) & (drop_N == NOT_DROPPED)] = UNANSWERED
    if ended_s is None:
        ended_s = now_s if interrupted else max(now_s, scenario.duration_s)
    slots = []
    for slot in service.slots.values():
        held_s = sum(min(period.until_s, ended_s) - period.since_s for period in slot.periods)
        busy_s = sum(period.busy_s for period in slot.periods)
        utilisation = busy_s / held_s if held_s else 0.0
        slots.append(SlotUse(slot=slot.name, device=slot.device, replica_s=held_s, utilisation=utilisation))
    prices = {device: supply.usd_per_hour for device, supply in scenario.problem.devices.items()}
    return Outcome(
        duration_s=scenario.duration_s,
        warm_up_s=scenario.warm_up_s,
        slo_s=scenario.slo_s,
        inputs_per_request=scenario.inputs_per_request,
        arrived_s_R=scenario.arrivals_s,
        latency_s_N=latency_s_N,
        exit_N=np.frombuffer(ledger.exit, dtype=np.int16),
        drop_N=drop_N,
        splits=_split_figures(service),
        slots=tuple(slots),
        usd=sum(
            prices[each.device] * (min(each.until_s, ended_s) - each.since_s) / 3600 for each in service.replicas()
        ),
        ended_s=ended_s,
        interrupted=interrupted,
    )


def _split_figures(service: SimulatedService) -> tuple[SplitUse, ...]:
    ordered = sorted(service.counts.items(), key=lambda each: (each[0][1].first, each[0][1].end, each[0][1].batch))
    return tuple(
        SplitUse(
            device=device,
            first=split.first,
            end=split.end,
            batch=split.batch,
            ramps=split.ramps,
            batches=counts.batches,
            inputs=counts.inputs,
            fill=counts.inputs / (counts.batches * split.batch),
            busy_s=counts.busy_s,
            lengths=_length_use(split, counts, service.took_s.get((device, split))),
        )
        for (device, split), counts in ordered
        if counts.batches  # a split has no batches if its replicas died or the simulation was interrupted before
    )


def _length_use(split: Split, counts: SplitCounts, took_s: array[float] | None) -> LengthUse | None:
    if not took_s:
        return None
    p50_s, p99_s = np.percentile(np.frombuffer(took_s), (50, 99)).tolist()
    return LengthUse(budget=split.tokens, tokens=counts.tokens, fill=counts.token_fill, p50_s=p50_s, p99_s=p99_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedSequences:
    """The result of a simulation of sequences."""

    ended_s: float
    """When the last token came."""
    tokens_K: IntArray
    """The tokens of each sequence."""
    ttft_s_K: FloatArray
    """NaN for sequences without a token."""
    tpot_s_K: FloatArray
    """NaN for sequences without a second token."""
    counts: tuple[GenerationCounts, ...]
    """The counts of every ingress."""
    interrupted: bool = False
    """Whether the simulation was interrupted before the end of the last sequence."""

    @property
    def exits(self) -> Mapping[int, int]:
        """Tokens, by the block after which they left."""
        return dict(sorted(sum((each.exits for each in self.counts), Counter[int]()).items()))


def generate(scenario: Scenario, *, progress: Progress | None = None) -> PlayedSequences:
    """Simulates a scenario of sequences until the last one ends. Equal scenarios give equal outcomes.

    After an interrupt (Ctrl-C) it returns the results so far.
    """
    service = booted(scenario)
    interrupted = play(service, progress=progress).interrupted
    ingresses = [each for each in service.ingresses if isinstance(each, GeneratingIngress)]
    assert len(ingresses) == len(service.ingresses), "a scenario of sequences"
    # In the arrays of the other ingresses, a sequence has no tokens and no times.
    return PlayedSequences(
        ended_s=service.events.time_s if interrupted else max(each.ended_s for each in ingresses),
        tokens_K=np.sum([each.num_tokens for each in ingresses], axis=0),
        ttft_s_K=np.fmax.reduce([each.ttft_s for each in ingresses]),
        tpot_s_K=np.fmax.reduce([each.tpot_s for each in ingresses]),
        counts=tuple(each.loop.counts for each in ingresses),
        interrupted=interrupted,
    )
