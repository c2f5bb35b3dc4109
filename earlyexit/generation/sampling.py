"""Which of an answer's tokens comes next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from earlyexit.errors import InputError

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; raises InputError for what means nothing."""

    temperature: float = 0.0
    """0: always the likeliest (greedy)."""
    top_p: float = 1.0
    """Of the likeliest tokens that come to this probability together (Holtzman et al. 2020, nucleus sampling)."""
    top_k: int | None = None
    """Of this many likeliest tokens; None, and more than an answer holds: of all that it holds."""
    seed: int = 0
    """The same seed draws the same tokens, whatever the batch-mates, and whoever answers."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise InputError(f"temperature must be from 0 to 2, not {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p:g}")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, not {self.top_k}")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise InputError(f"seed must be from 0 to {LARGEST_SEED}, not {self.seed}")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and how likely the model thought it, temperature aside."""

    token: int
    log_probability: float


def choose(answer_2k: npt.NDArray[np.floating], sampling: Sampling, place: int) -> Chosen:
    """The token at `place` of a sequence, of an answer of `TokenTask`."""
    tokens_k, log_probabilities_k = answer_2k
    drawn = 0 if sampling.temperature == 0 else _drawn(log_probabilities_k, sampling, place)
    return Chosen(int(tokens_k[drawn]), float(log_probabilities_k[drawn]))


def _drawn(log_probabilities_k: npt.NDArray[np.floating], sampling: Sampling, place: int) -> int:
    logits_k = log_probabilities_k[: sampling.top_k].astype(np.float64) / sampling.temperature
    weights_k = np.exp(logits_k - logits_k[0])
    cumulative_k = np.cumsum(weights_k)
    # The nucleus: all before the share is reached, and the one that reaches it.
    kept = 1 + int(np.searchsorted(cumulative_k, sampling.top_p * cumulative_k[-1] * (1 - 1e-12)))
    cumulative_k = cumulative_k[:kept]
    # A generator of its own for every place: a sequence that begins anew elsewhere goes on as it would have.
    number = np.random.Generator(np.random.Philox(key=[sampling.seed, place])).random()
    return int(np.searchsorted(cumulative_k, number * cumulative_k[-1], side="right"))
