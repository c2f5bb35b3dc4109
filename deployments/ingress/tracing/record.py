"""What is noted of a sampled request while it is under way. All times are the ingress's clock's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deployments.messages import SplitRun, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """An input on its way through a stage."""

    slot: str
    replica: str
    epoch: int
    attempt: int
    """Counts from 0."""
    block: int
    """Where it stands in the model."""
    call_inputs: int
    """Inputs of the call that it went with."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A way through a stage, with its end."""

    sent: Sent
    ended_s: float
    timing: Timing | None = None
    """Where the time inside the stage went; None where it did not come back."""
    runs: tuple[SplitRun, ...] = ()
    exit: int | None = None
    """The block that the input left after; None where it goes on or was lost."""
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class InputRecord:
    """One input of a sampled request."""

    submitted_s: float
    visits: list[Visit] = field(default_factory=list)
    under_way: Sent | None = None

    def end(self, visit: Visit) -> None:
        """It came back, or will not."""
        self.visits.append(visit)
        self.under_way = None

    @property
    def answered(self) -> bool:
        return bool(self.visits) and self.visits[-1].exit is not None

    def ended_s(self, request_ended_s: float) -> float:
        """When it got its answer, else when nobody waited any more."""
        return self.visits[-1].ended_s if self.answered else request_ended_s


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A sampled request."""

    root: Any
    """What the exporter made of its begin."""
    began_s: float
    serials: list[int] = field(default_factory=list)
    inputs: list[InputRecord] = field(default_factory=list)
