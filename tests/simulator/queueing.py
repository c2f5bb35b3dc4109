"""Queues with known formulas, against which the simulator is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

NUM_STATES = 256
"""Queue lengths up to this are counted."""
TAIL = 1e-12
"""Upper bound of the probability of the longest."""


def fixed_service_wait_s(rate_per_s: float, service_s: float) -> float:
    """Returns the mean wait before a server with fixed service time (M/D/1, Pollaczek and Khinchine)."""
    load = rate_per_s * service_s
    return load * service_s / (2 * (1 - load))


def tandem_latency_s(rate_per_s: float, services_s: Sequence[float]) -> float:
    """Returns the mean time in a tandem of servers with fixed service times, under Poisson arrivals.

    All waits add up to the wait before the slowest server alone (Friedman, Operations Research 13(1), 1965).
    """
    return fixed_service_wait_s(rate_per_s, max(services_s)) + sum(services_s)


def batch_latency_s(rate_per_s: float, service_s: Sequence[float]) -> float:
    """Returns the mean time in a server that, when free, takes all waiting inputs up to a limit as one batch.

    `service_s`: seconds of a batch, by its size less 1. The numbers that remain after each batch form a Markov chain.
    Its stationary probabilities and the mean number between two ends (renewal reward) give the mean (Little's law).
    """
    left_S = _stationary(_transitions(rate_per_s, service_s))
    assert left_S[-1] < TAIL, "longer queues are likely"
    return _mean_number(rate_per_s, service_s, left_S) / rate_per_s


def _transitions(rate_per_s: float, service_s: Sequence[float]) -> FloatArray:
    """Returns the transition probabilities of the number that remains; the last state stands for all longer queues."""
    arrivals_BS = [_poisson(rate_per_s * seconds) for seconds in service_s]
    chances_SS = np.zeros((NUM_STATES, NUM_STATES))
    for left in range(NUM_STATES):
        size = min(max(left, 1), len(service_s))  # after an idle time a batch of one starts
        stay = max(left, 1) - size
        chances_SS[left, stay:] = arrivals_BS[size - 1][: NUM_STATES - stay]
        chances_SS[left, -1] += 1 - chances_SS[left].sum()
    return chances_SS


def _poisson(mean: float) -> FloatArray:
    counts = np.arange(NUM_STATES)
    log_factorials = np.array([math.lgamma(count + 1) for count in counts])
    return np.asarray(np.exp(counts * math.log(mean) - mean - log_factorials))


def _stationary(chances_SS: FloatArray) -> FloatArray:
    equations = chances_SS.T - np.eye(len(chances_SS))
    equations[-1] = 1.0  # replaces one of the equations, which are dependent: probabilities sum to 1
    return np.asarray(np.linalg.solve(equations, np.eye(len(chances_SS))[-1]))


def _mean_number(rate_per_s: float, service_s: Sequence[float], left_S: FloatArray) -> float:
    """Returns the mean number in the system: the number times its duration, between two ends of batches."""
    begins_S = np.maximum(np.arange(len(left_S)), 1)
    lasts_s_S = np.array(service_s)[np.minimum(begins_S, len(service_s)) - 1]
    present_S = begins_S * lasts_s_S + rate_per_s * lasts_s_S**2 / 2  # arrivals are spread evenly over it
    between_s = float(left_S @ lasts_s_S) + float(left_S[0]) / rate_per_s
    return float(left_S @ present_S) / between_s
