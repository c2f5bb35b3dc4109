"""What ingresses and replicas tell the controller, when it asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from earlyexit.counts import TimesRun
from earlyexit.memory import MemoryUse
from profiles.stream import Observations


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressReport:
    """Counts since the ingress started, and what was seen of probes, and of inputs that stayed, since the last report.

    Counts only grow: a report that is lost loses nothing but time. What was seen is handed over once.
    """

    name: str
    """Unique per ingress process: another name means that the counts begin at zero."""
    epoch: int
    """The plan it follows."""
    suspended: bool = False
    """Whether it refuses everything, as it was told."""
    oldest_epoch: int
    """Of the plan by which its oldest call under way was sent; its own where none is."""
    at_s: float
    """Wall clock."""
    unanswered: int
    """Inputs that wait here or are under way, now."""
    unanswered_tokens: int = 0
    """Of these."""
    waiting: int
    """Of these, the inputs that no stage has been sent yet."""
    oldest_s: dict[int, float] = field(default_factory=dict)
    """How long the first of these have waited, by the longest that inputs of their class are, in tokens."""
    arrived: int
    """Inputs of well-formed requests, refused ones too."""
    answered: int
    answered_tokens: int = 0
    """Of these inputs; as many where inputs have no tokens."""
    in_slo: int
    """Answers that came within the SLO; all of them where there is none."""
    exits: dict[int, int]
    """Answers by the block they left after, under the present epoch."""
    drops: dict[str, int]
    """Inputs without an answer, by reason."""
    latencies: dict[int, int] = field(default_factory=dict)
    """Answers by latency: bucket k holds those from `BUCKET ** k` to `BUCKET ** (k + 1)` seconds."""
    crossings: dict[int, int] = field(default_factory=dict)
    """Inputs that went on to another network of the chain, by its first block; as are the next three."""
    crossing_s: dict[int, float] = field(default_factory=dict)
    """What they waited for it here, encoding anew included: their seconds together."""
    words: dict[int, int] = field(default_factory=dict)
    """Of the texts that words could be pruned of."""
    pruned_words: dict[int, int] = field(default_factory=dict)
    """Of these, the pruned ones."""
    probes: Observations | None = None
    """Records of probes, and of inputs that stayed, at wall-clock times; None where there were none."""


BUCKET = 1.05
"""Ratio of a latency bucket's ends: a quantile read from buckets is at most 5 % off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a stage's replica has done since its start; counts only grow."""

    slot: str
    replica: str
    """Serve's unique id of it."""
    node: str
    """Ray's id of the node it runs on."""
    pid: int
    device: str
    epoch: int
    waiting: int
    """Inputs queued in its engine, now."""
    times: tuple[TimesRun, ...]
    """Probes left out: they do more work than others."""
    memory: MemoryUse | None = None
    """What sequences have of it; None where the network keeps nothing of any."""
