"""The scenario of a simulation: a problem, a plan, the inputs, and their arrivals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError, PlanError
from earlyexit.network.boundary import Split
from optimizer.plans.plan import PlacedPlan, Plan
from optimizer.problems.problem import PlanProblem
from simulator.inputs import Decisions, IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceLengths:
    """The lengths of requests that are sequences. They repeat if there are more requests. Raises DataError."""

    prompt_K: IntArray
    """Tokens of the prompt."""
    answer_K: IntArray
    """Generated tokens."""
    chunk: int = 256
    """The largest number of prompt tokens in one step."""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    timeout_s: float = math.inf
    """The timeout of each token, from the arrival or from the previous token. If more sequences run than a batch holds,
    steps with the earliest timeout go first, so that the sequences take turns."""

    def __post_init__(self) -> None:
        if len(self.prompt_K) != len(self.answer_K) or not len(self.prompt_K):
            raise DataError(f"{len(self.prompt_K)} prompts and {len(self.answer_K)} answers are no sequences")
        if min(self.prompt_K.min(), self.answer_K.min(), self.chunk) < 1:
            raise DataError("prompts, answers and chunks have at least one token")
        if not self.timeout_s > 0:
            raise DataError(f"timeout_s must be above 0, not {self.timeout_s}")

    def of(self, index: int) -> tuple[int, int]:
        """Returns the tokens of a sequence's prompt and its generated tokens."""
        place = index % len(self.prompt_K)
        return int(self.prompt_K[place]), int(self.answer_K[place])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    """A complete scenario. Raises PlanError if the plan does not fit, and DataError for invalid inputs and arrivals."""

    problem: PlanProblem
    """Latencies, link, hidden states and prices. Its survival is not used, because `decisions` define the exits."""
    plan: Plan
    decisions: Decisions
    rows_N: IntArray
    """The inputs as rows of the decisions. They repeat if there are more inputs."""
    lengths_R: IntArray | None = None
    """The tokens of every row of the decisions. Then a batch takes the profile's time for its tokens. None: inputs have
    no lengths."""
    sequences: SequenceLengths | None = None
    """For models that generate: every request is a sequence, and the steps are the inputs of `rows_N` in turn. None:
    requests consist of inputs."""
    arrivals_s: FloatArray
    """The arrivals of requests, ascending from 0 on."""
    duration_s: float
    """The time span for rates. It must not end before the last arrival."""
    inputs_per_request: int = 1
    slo_s: float = math.inf
    """The time from the arrival of an input to its deadline; infinite: no deadline, and nothing is dropped."""
    admission: bool = True
    """Whether requests that would be late are refused."""
    warm_up_s: float = 0.0
    """Requests that arrive earlier than this are simulated but left out of the figures."""
    num_ingresses: int = 1
    """Ingresses get requests in turn, and know only their own calls."""
    calls_per_replica: int = 2
    max_queued: int | None = None
    """The largest number of unanswered inputs per ingress; None: no limit."""

    def __post_init__(self) -> None:
        self._check_plan()
        self._check_inputs()
        _check_arrivals(self.arrivals_s, self.duration_s)
        for name in ("inputs_per_request", "num_ingresses", "calls_per_replica"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.warm_up_s < math.inf:
            raise DataError(f"warm_up_s must be a finite number of seconds from 0 on, not {self.warm_up_s}")
        if self.max_queued is not None and self.max_queued < self.inputs_per_request:
            raise DataError(f"no request of {self.inputs_per_request} inputs fits into {self.max_queued}")
        if self.warm_up_s >= self.duration_s:
            raise DataError(f"a warm-up of {self.warm_up_s:g} s leaves nothing of {self.duration_s:g} s")
        if not self.slo_s > 0:
            raise DataError(f"slo_s must be above 0, not {self.slo_s}")

    @property
    def counts_tokens(self) -> bool:
        """Whether the time of batches depends on their tokens."""
        return self.lengths_R is not None or self.sequences is not None

    def _check_plan(self) -> None:
        problem, plan = self.problem, self.plan
        if plan.num_blocks != problem.num_blocks:
            raise PlanError(f"the plan has {plan.num_blocks} blocks, the problem {problem.num_blocks}")
        if plan.networks != problem.networks:
            raise PlanError(
                f"the plan's networks end at {list(plan.networks)}, the problem's at {list(problem.networks)}"
            )
        unknown = sorted(set(plan.ramps) - set(problem.ramps))
        if unknown:
            raise PlanError(f"the plan has ramps {unknown}, the problem {list(problem.ramps)}")
        for stage in plan.stages:
            if stage.device not in problem.latency:
                raise PlanError(f"no latency of {stage.device!r}; the problem has that of {sorted(problem.latency)}")
            for split in stage.splits:
                self._check_batch(stage.device, split)
        for device, count in PlacedPlan(plan=plan).occupied.items():
            supply = problem.devices.get(device)
            if supply is None or supply.count < count:
                raise PlanError(f"the plan needs {count} {device}, the problem has {supply.count if supply else 0}")

    def _check_batch(self, device: str, split: Split) -> None:
        table, tokens = self.problem.latency[device], split.tokens
        largest = table.batches[-1]
        if tokens is None:
            if split.batch > largest and not self.counts_tokens:  # with tokens, a larger batch of short inputs is known
                raise PlanError(f"{device} was measured up to batches of {largest}, not {split.batch}")
            return
        if not self.counts_tokens:
            raise PlanError(f"the plan has batches of {tokens} tokens, and inputs have no lengths")
        if table.length is not None and tokens > largest * table.length:
            raise PlanError(f"{device} was measured up to batches of {largest * table.length} tokens, not {tokens}")

    def _check_inputs(self) -> None:
        if self.sequences is not None and (self.inputs_per_request > 1 or not math.isinf(self.slo_s)):
            raise DataError("a request is one sequence, and ends when it is over")
        stays_or_overlaps = self.plan.after_answer == "stay" or self.plan.overlap_below is not None
        if self.sequences is not None and stays_or_overlaps:
            raise PlanError("steps of sequences neither stay when they are answered nor run beside another batch")
        if self.counts_tokens:
            unknown = [stage.device for stage in self.plan.stages if self.problem.latency[stage.device].length is None]
            if unknown:
                raise DataError(f"the latency of {unknown[0]} does not say its length, so lengths tell nothing")
        lengths_R = self.lengths_R
        if lengths_R is not None and (len(lengths_R) != self.decisions.num_rows or lengths_R.min(initial=1) < 1):
            raise DataError(f"lengths need {self.decisions.num_rows} numbers, one per row, each at least 1")
        if not len(self.rows_N):
            raise DataError("at least one input is needed")
        if self.rows_N.min() < 0 or self.rows_N.max() >= self.decisions.num_rows:
            raise DataError(f"inputs are rows 0 to {self.decisions.num_rows - 1} of the decisions")


def _check_arrivals(arrivals_s: FloatArray, duration_s: float) -> None:
    if not 0 < duration_s < math.inf:
        raise DataError(f"duration_s must be a finite number above 0, not {duration_s}")
    if not len(arrivals_s):
        return
    if not np.isfinite(arrivals_s).all():
        raise DataError("arrivals must be finite numbers of seconds")
    if arrivals_s[0] < 0:
        raise DataError(f"arrivals must not be before 0 s, as {arrivals_s[0]:g} s is")
    later = np.flatnonzero(np.diff(arrivals_s) < 0)
    if len(later):
        at = int(later[0]) + 1
        raise DataError(
            f"arrivals must ascend: {arrivals_s[at]:g} s, the {at + 1}th, comes after {arrivals_s[at - 1]:g} s"
        )
    if arrivals_s[-1] > duration_s:
        raise DataError(f"the last arrival, at {arrivals_s[-1]:g} s, is after the end, at {duration_s:g} s")


def poisson_arrivals(rate_per_s: float, duration_s: float, seed: int) -> FloatArray:
    """Returns Poisson arrivals. With the same seed, another rate scales the times, and another duration cuts them."""
    expected = rate_per_s * duration_s
    rng = np.random.default_rng(seed)
    most = int(expected + 10 * expected**0.5 + 10)
    arrivals_s = rng.standard_exponential(most).cumsum() / rate_per_s
    return np.asarray(arrivals_s[: np.searchsorted(arrivals_s, duration_s)])
