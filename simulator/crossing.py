"""How long inputs of a chain are in each of its networks: by tokenizer, and by what was pruned on the way."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

from deployments.ingress.core.flights import Flight
from optimizer.networks import scaled
from optimizer.problem import PlanProblem
from profiles.table import LatencyTable


class NetworkTokens:
    """By network, of inputs in the order in which they come, which goes round."""

    def __init__(self, problem: PlanProblem, tokens_C: array[int]) -> None:
        """`tokens_C`: as the problem's lengths count them."""
        num_networks = max(1, len(problem.networks))
        self._shares = problem.network_tokens or (1.0,) * num_networks
        self._left = problem.crossing_tokens or (1.0,) * num_networks
        self._tokens_C = tokens_C

    def of(self, number: int, network: int, *, crossed: bool = False) -> int:
        """Of an input that entered a network at once, or crossed into it, its words pruned."""
        tokens = self._tokens_C[number % len(self._tokens_C)]
        share = self._shares[network] * (self._left[network] if crossed else 1.0)
        return tokens if share == 1 else max(1, round(tokens * share))

    def enter(self, flights: Sequence[Flight[int]], network: int, *, crossed: bool) -> None:
        """Flights have the tokens of the network from now on."""
        for flight in flights:
            flight.tokens = self.of(flight.input, network, crossed=crossed)


def pruned_table(problem: PlanProblem, table: LatencyTable, used: Sequence[int]) -> LatencyTable:
    """Seconds of batches of inputs that cost alike, shorter in networks that they cross into; rows of the chain."""
    share_of = {
        block: problem.crossing_tokens[network] if network in used[1:] else 1.0
        for network, (start, end) in enumerate(pairwise((0, *problem.networks)))
        for block in range(start, end)
    }
    return scaled(table, list(share_of.values()), [share_of[ramp] for ramp in problem.ramps])
