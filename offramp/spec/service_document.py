"""The fields of a service file: an application's, and how plans are made for it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.inventory_file import InventoryDocument
from deployments.settings import PlanningSettings
from earlyexit.data.source_file import StrictDocument
from earlyexit.named import NAME_PATTERN
from offramp.spec.documents import ApplicationDocument, PartDocument, ServedModelDocument
from optimizer.dispatch import PlanDispatch
from optimizer.plan_file import OrderDocument
from optimizer.problem_shape import (
    BudgetDocument,
    LatencyDocument,
    LengthsDocument,
    ObjectiveDocument,
    SloDocument,
    ThresholdsDocument,
)


class ModelDocument(ServedModelDocument):
    """What is served, and what is known of it."""

    models: list[str] | None = Field(default=None, min_length=2)
    """The models that the folder's chain must consist of, smallest first; relative to the service file's folder. None:
    whatever it consists of."""
    latency: dict[str, LatencyDocument] = Field(min_length=1)
    """Per accelerator type of the cluster: a table, a published profile or a profile's file."""
    slower: float = Field(default=1.0, gt=0)
    """Every latency times this, where all accelerators are emulated: E3's V100 takes 6.5 times what is published."""
    decisions: Literal["recorded", "computed"] = "recorded"
    """Of emulated accelerators: taken from exit records, or by really running the model."""
    bytes_per_sample: float | None = Field(default=None, ge=0)
    """What one input carries over a hop; None: what crosses after each block, of the latency's tokens or the longest
    input's, in `hop_dtype`."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """What a replica needs of its accelerator; None: the parameters, in `dtype`."""


class AccuracyDocument(StrictDocument):
    """When inputs may leave."""

    budget: float | None = Field(default=None, ge=0, lt=1)
    """Share of answers that may differ from the full model's; None: the calibration's."""
    policy: Literal["entropy", "confidence", "share", "foreseen", "similar", "recorded"] | None = None
    """None: the calibration's; where emulated accelerators decide from records, recorded."""
    thresholds: ThresholdsDocument | None = None
    """One for all ramps, or one per ramp, of which only those are used; None: the calibration's."""
    records: str | None = None
    """Exit records: survival before anything was seen. None: those of the model's calibration."""
    prune: bool | None = None
    """Of a chain that was calibrated with `--prune`: whether words are pruned at its crossings. None: where plans are
    worth more for it."""


class PlannerDocument(PartDocument, PlanningSettings):
    """How plans are made."""

    nullable = frozenset(PlanningSettings.model_fields) - {"strategy"}

    objective: ObjectiveDocument = Field(default_factory=lambda: ObjectiveDocument(maximize="rate"))
    budget: BudgetDocument | None = None
    control: bool = True
    """False: no controller; the first plan stays."""
    plan: str | None = None
    """Plan file to begin with; None: the planner's, by the exit records."""
    order: OrderDocument | None = None
    """Which of the inputs that wait go first, as plan files say it; None: as the plan file says, else by deadline."""
    dispatch: PlanDispatch | None = None
    """When a batch that is not full begins, as plan files say it; None: as the plan file says, else at once."""
    batch_limit: int | None = Field(default=None, ge=1)
    """Largest batch size that a plan may use; None: the largest with a latency."""
    max_stages: int = Field(default=3, ge=1)
    """Slots per accelerator type, at most: stages that a plan may have on it."""
    state: str | None = None
    """SQLite file with what the controller remembers; None: the service's name, beside the service file."""
    probe_share: float = Field(default=0.02, ge=0, le=1)


class ServiceDocument(ApplicationDocument):
    """A whole service."""

    schema_version: Literal[1]
    name: str = Field(pattern=NAME_PATTERN)
    model: ModelDocument
    slo: SloDocument
    """In emulated seconds, where the cluster is emulated."""
    accuracy: AccuracyDocument = Field(default_factory=AccuracyDocument)
    cluster: str | InventoryDocument
    """Inline, or a file relative to the service file's folder."""
    planner: PlannerDocument = Field(default_factory=PlannerDocument)
    lengths: LengthsDocument | None = None
    """Tokens of inputs, before any were seen: then plans have token budgets. None: batches are counted in inputs."""
