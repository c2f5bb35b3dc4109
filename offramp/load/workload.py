"""What a load run sends, where to, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from earlyexit.errors import InputError
from offramp.client.inputs import Input


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """One load run; exactly one of `rate_rps`, `send_times_s` and `concurrency` is set."""

    url: str
    inputs: Sequence[Input]
    """Of one kind, sent in turn, from the first again after the last."""
    labels: Sequence[str] | None = None
    """The right label per input; None where it is not known."""
    keys: Sequence[str] | None = None
    """An id per input, sent along as `ids`; None sends none."""
    num_requests: int
    rate_rps: float | None = None
    """Requests per second, open loop."""
    arrivals: Literal["poisson", "constant"] = "poisson"
    """At `rate_rps`."""
    send_times_s: Sequence[float] | None = None
    """Open loop too: when each request is sent, ascending from the start; `Arrivals.draw` gives such."""
    concurrency: int | None = None
    """Workers, closed loop."""
    inputs_per_request: int = 1
    truncate: bool = False
    """Whether texts may be cut to what the model takes."""
    timeout_s: float = 30.0
    """For a whole request, from when it was scheduled, repetitions included."""
    slo_s: float
    seed: int = 0
    warmup_requests: int = 0
    """Sent before the measurement, in the same manner, and left out of the report."""
    retries: int = 0
    """Repetitions of a request that met a broken connection, a 502 or a 503."""

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.rate_rps, self.send_times_s, self.concurrency)) != 1:
            raise InputError("set one of rate_rps and send_times_s (open loop) and concurrency (closed loop)")
        loop = [each for each in (self.rate_rps, self.concurrency) if each is not None]
        if min(self.num_requests, self.inputs_per_request, *loop) <= 0:
            raise InputError("num_requests, inputs_per_request and the rate or concurrency must be positive")
        if self.send_times_s is not None and not (
            len(self.send_times_s) == self.num_requests and self.send_times_s[-1] > 0
        ):
            raise InputError(f"{self.num_requests} send times are needed, one a request, the last above 0")
        if min(self.retries, self.warmup_requests) < 0 or min(self.timeout_s, self.slo_s) <= 0:
            raise InputError("retries and warmup_requests must not be negative; timeout_s and slo_s must be positive")
        if not self.inputs:
            raise InputError("inputs is empty: there is nothing to send")
        for name, values in (("labels", self.labels), ("keys", self.keys)):
            if values is not None and len(values) != len(self.inputs):
                raise InputError(f"{name} has {len(values)} entries for {len(self.inputs)} inputs")

    @property
    def offered_rps(self) -> float | None:
        """Inputs per second of an open loop; with send times, up to the last of them."""
        if self.send_times_s is not None:
            return self.num_requests * self.inputs_per_request / self.send_times_s[-1]
        return None if self.rate_rps is None else self.rate_rps * self.inputs_per_request

    def input_indices(self, request_index: int) -> tuple[int, ...]:
        """Which inputs the request carries."""
        first = request_index * self.inputs_per_request
        return tuple(index % len(self.inputs) for index in range(first, first + self.inputs_per_request))
