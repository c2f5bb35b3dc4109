"""`offramp simulate` of a problem of generation: sequences instead of inputs, and what became of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deployments.settings import ServeSettings
from earlyexit.errors import InputError
from offramp.commands.simulated_inputs import Inputs, PlayedPlan
from offramp.load.report import percentile
from optimizer.evaluate import Evaluation, step_figures
from optimizer.generation.figures import SequenceFigures, sequence_figures
from profiles.lengths import Lengths
from simulator.scenario import Scenario, SequenceLengths
from simulator.simulate import PlayedSequences, generate

if TYPE_CHECKING:
    from offramp.commands.options import SimulateJob
    from optimizer.generation.demand import Generation
    from optimizer.problem import PlanProblem
    from simulator.inputs import IntArray
    from simulator.simulate import Progress

STREAM = 3
"""Of the seed."""
NUM_DRAWN = 20_000
"""Sequences whose lengths are drawn; then they come again in the same order."""
CHUNK: int = ServeSettings.model_fields["prompt_chunk"].default
TIMEOUT_S: float = ServeSettings.model_fields["max_timeout_s"].default


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """All that is needed to run, read and checked."""

    job: SimulateJob
    scenario: Scenario
    played: PlayedPlan
    predicted: Evaluation
    """By the cost model, with the problem's survival."""
    inputs: Inputs
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedFigures:
    """Of the sequences that arrived after the warm-up; seconds are None where there are none."""

    sequences: int
    whole: int
    """That came to their end."""
    in_slo: int
    """Of these, within both SLOs."""
    refused: int
    seconds: float
    """From the end of the warm-up until the last of all tokens."""
    tokens_per_s: float
    goodput_per_s: float
    """Sequences within both SLOs."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedSequences:
    """What became of them."""

    simulation: Simulation
    figures: PlayedFigures
    expected: SequenceFigures
    """By the cost model."""
    exits: dict[int, int]
    """Tokens, by the block that they left after."""
    interrupted: bool

    @property
    def notes(self) -> tuple[str, ...]:
        return self.simulation.notes


def check_sequences(job: SimulateJob, problem: PlanProblem) -> None:
    """Raise InputError for options that say what the problem's sequences say, or mean nothing of them."""
    if problem.generation is None:
        return
    if job.lengths is not None:
        raise InputError("--lengths: the problem's generation says how long prompts and answers are")
    if job.inputs_per_request != 1:
        raise InputError("--inputs-per-request: a request of a model that generates is one sequence")
    for device, table in problem.latency.items():
        if table.length not in (None, 1):
            raise InputError(f"latency of {device}: measured with {table.length} tokens an input; steps have 1")


def in_sequences(scenario: Scenario, problem: PlanProblem, job: SimulateJob) -> Scenario:
    """The scenario, whose requests are the problem's sequences where it has any."""
    generation = problem.generation
    if generation is None:
        return scenario
    rng = np.random.default_rng([job.seed, STREAM])
    prompt_K, answer_K = _lengths(generation, rng)
    lengths = SequenceLengths(
        prompt_K=prompt_K,
        answer_K=answer_K,
        chunk=generation.chunk or CHUNK,
        ttft_slo_s=generation.ttft_s if job.admission else None,
        tpot_slo_s=problem.slo.latency_s if job.admission else None,
        timeout_s=TIMEOUT_S,
    )
    latency = {device: replace(table, length=1) for device, table in problem.latency.items()}
    return replace(scenario, problem=replace(problem, latency=latency), sequences=lengths, slo_s=math.inf)


def _lengths(generation: Generation, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """As recorded, in turn; else drawn."""
    if generation.recorded is not None:
        pairs_K2 = np.array(generation.recorded, dtype=np.int64)
        return pairs_K2[:, 0], pairs_K2[:, 1]
    return _drawn(generation.prompt, rng), _drawn(generation.output, rng)


def _drawn(lengths: Lengths, rng: np.random.Generator) -> IntArray:
    if lengths.shares is None:
        return np.full(1, max(1, round(lengths.mean)))
    kinds, shares = zip(*lengths.shares, strict=True)
    return rng.choice(kinds, NUM_DRAWN, p=np.array(shares) / sum(shares)).astype(np.int64)


def play_sequences(simulation: Simulation, progress: Progress | None = None) -> SimulatedSequences | None:
    """Play a scenario of sequences; interrupted (Ctrl-C), what there is of it, None where that is no token."""
    scenario, problem = simulation.scenario, simulation.scenario.problem
    found = generate(scenario, progress=progress)
    if not found.said_K.any():
        return None
    stages = simulation.played.plan.stages
    return SimulatedSequences(
        simulation=simulation,
        figures=figures_of(found, scenario, problem),
        expected=sequence_figures(problem, stages, **step_figures(simulation.predicted)),
        exits=dict(found.exits),
        interrupted=found.interrupted,
    )


def figures_of(found: PlayedSequences, scenario: Scenario, problem: PlanProblem) -> PlayedFigures:
    """Of what arrived after the warm-up."""
    lengths, generation = scenario.sequences, problem.generation
    assert lengths is not None
    assert generation is not None
    counted_K = scenario.arrivals_s >= scenario.warm_up_s
    wanted_K = np.resize(lengths.answer_K, len(counted_K))
    whole_K = counted_K & (found.said_K == wanted_K)
    ttft_slo_s = math.inf if generation.ttft_s is None else generation.ttft_s
    in_time_K = (found.ttft_s_K <= ttft_slo_s) & ~(found.tpot_s_K > problem.slo.latency_s)  # NaN: one token alone
    seconds = found.ended_s - scenario.warm_up_s
    return PlayedFigures(
        sequences=int(counted_K.sum()),
        whole=int(whole_K.sum()),
        in_slo=int((whole_K & in_time_K).sum()),
        refused=int((counted_K & (found.said_K == 0)).sum()),
        seconds=seconds,
        tokens_per_s=float(found.said_K[counted_K].sum()) / seconds,
        goodput_per_s=float((whole_K & in_time_K).sum()) / seconds,
        ttft_p50_s=percentile(found.ttft_s_K[counted_K], 50),
        ttft_p99_s=percentile(found.ttft_s_K[counted_K], 99),
        tpot_p50_s=percentile(found.tpot_s_K[counted_K], 50),
        tpot_p99_s=percentile(found.tpot_s_K[counted_K], 99),
    )


def sequences_document(simulated: SimulatedSequences) -> dict[str, Any]:
    """As plain JSON data, in the place of figures of inputs."""
    return {
        "predicted_sequences": asdict(simulated.expected),
        "simulated": {
            **asdict(simulated.figures),
            "exits": {str(block): tokens for block, tokens in simulated.exits.items()},
        },
    }
