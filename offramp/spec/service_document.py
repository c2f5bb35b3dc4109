"""The fields of a service file: an application's, and how plans are made for it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.inventory_file import InventoryDocument
from deployments.settings import PlanningSettings
from earlyexit.data.source_file import StrictDocument
from earlyexit.engine.engine import Dispatch
from earlyexit.named import NAME_PATTERN
from offramp.spec.documents import ApplicationDocument, PartDocument, ServedModelDocument
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
    """The served model, its latencies and its decisions."""

    models: list[str] | None = Field(default=None, min_length=2)
    """The models that the folder's chain must consist of, smallest first, relative to the service file's folder. None:
    any models."""
    latency: dict[str, LatencyDocument] = Field(min_length=1)
    """Per accelerator type of the cluster: a table, a published profile or a profile's file."""
    slower: float = Field(default=1.0, gt=0)
    """Factor on every latency, where all accelerators are emulated. E3's V100 takes 6.5 times the published seconds."""
    decisions: Literal["recorded", "computed"] = "recorded"
    """How emulated accelerators decide exits: from exit records, or by running the model."""
    bytes_per_sample: float | None = Field(default=None, ge=0)
    """Bytes of one input over a hop. None: the size of the hidden state after each block, at the latency's length or
    the longest input, in `hop_dtype`."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Memory that a replica needs on its accelerator. None: the size of the parameters, in `dtype`."""


class AccuracyDocument(StrictDocument):
    """When inputs may leave."""

    budget: float | None = Field(default=None, ge=0, lt=1)
    """Share of answers that may differ from the full model's; None: the calibration's."""
    policy: Literal["entropy", "confidence", "share", "foreseen", "similar", "recorded"] | None = None
    """None: the calibration's; where emulated accelerators decide from records, recorded."""
    thresholds: ThresholdsDocument | None = None
    """One threshold for all ramps, or one per ramp; then only the named ramps are used. None: the calibration's."""
    records: str | None = None
    """Exit records, which give the survival for the first plan. None: those of the model's calibration."""
    prune: bool | None = None
    """For a chain that was calibrated with `--prune`: whether words are pruned at its crossings. None: if plans gain
    from it."""


class PlannerDocument(PartDocument, PlanningSettings):
    """How plans are made."""

    nullable = frozenset(PlanningSettings.model_fields) - {"strategy"}

    objective: ObjectiveDocument = Field(default_factory=lambda: ObjectiveDocument(maximize="rate"))
    budget: BudgetDocument | None = None
    control: bool = True
    """Whether a controller makes new plans. False: the first plan stays."""
    plan: str | None = None
    """File of the first plan. None: the planner makes it from the exit records."""
    order: OrderDocument | None = None
    """Which waiting inputs form the next batch, as in plan files. None: the plan file's order, else by deadline."""
    dispatch: Dispatch | None = None
    """When a batch starts, as in plan files. None: the plan file's rule, else work-conserving."""
    batch_limit: int | None = Field(default=None, ge=1)
    """Largest batch size that a plan may use. None: the largest measured one."""
    state: str | None = None
    """SQLite file with the controller's observations and plans. None: the service's name, beside the service file."""
    probe_share: float = Field(default=0.02, ge=0, le=1)


class ServiceDocument(ApplicationDocument):
    """A whole service."""

    schema_version: Literal[1]
    name: str = Field(pattern=NAME_PATTERN)
    model: ModelDocument
    slo: SloDocument
    """The latency limit, in emulated seconds where the cluster is emulated."""
    accuracy: AccuracyDocument = Field(default_factory=AccuracyDocument)
    cluster: str | InventoryDocument
    """The accelerators: inline, or a file relative to the service file's folder."""
    planner: PlannerDocument = Field(default_factory=PlannerDocument)
    lengths: LengthsDocument | None = None
    """Tokens of inputs, for the first plans; plans then have token budgets. None: batches are counted in inputs."""
