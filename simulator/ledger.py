"""What became of every input, in flat arrays: ten million of them take 130 MB."""

from __future__ import annotations

import math
from array import array
from typing import Final

from simulator.scenario import FloatArray

NOT_DROPPED: Final = -1
DROPS: Final = ("admission", "overloaded", "deadline", "stage_unavailable", "unanswered")
"""Reasons, as the ingress counts them; *unanswered* is what was under way when a simulation was interrupted."""
UNANSWERED: Final = len(DROPS) - 1
REASONS: Final = {reason: code for code, reason in enumerate(DROPS)}
NO_EXIT: Final = -1


class Ledger:
    """By an input's number: when its request arrived, and how it ended."""

    __slots__ = ("arrived_s", "drop", "exit", "inputs_per_request", "latency_s", "num_inputs")

    def __init__(self, arrivals_s: FloatArray, inputs_per_request: int) -> None:
        self.inputs_per_request = inputs_per_request
        self.num_inputs = len(arrivals_s) * inputs_per_request
        self.arrived_s = array("d")
        """By request."""
        self.arrived_s.frombytes(arrivals_s.tobytes())
        self.latency_s = array("d", [math.nan]) * self.num_inputs
        """NaN without an answer."""
        self.exit = array("h", [NO_EXIT]) * self.num_inputs
        """The block it left after."""
        self.drop = array("b", [NOT_DROPPED]) * self.num_inputs
        """A position in DROPS."""
