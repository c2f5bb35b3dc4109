"""Plans as YAML or JSON. Errors name the file and the line."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Discriminator, Field, Tag

from cluster.devices import find_device
from earlyexit.data.images import check_file
from earlyexit.data.source_file import Source, StrictDocument, read_source
from earlyexit.engine.engine import Dispatch
from earlyexit.engine.queue import DEFAULT, OrderName, OrderSpec
from earlyexit.errors import PlanError
from earlyexit.network.boundary import AfterAnswer, Split
from earlyexit.network.chain import check_networks
from earlyexit.network.store import ModelCard
from earlyexit.policies import PolicyName
from optimizer.plans.plan import (
    PlacedPlan,
    Plan,
    PolicySpec,
    Stage,
    chains_of,
    check_end,
    check_own,
    check_shares,
    check_split,
)

DocumentPath = tuple[str | int, ...]
MOST_CHAINS = 3
"""Largest number of parallel chains in a plan."""
RampKey = Annotated[int, Field(strict=False)]
"""Not strict, because JSON has string keys only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The properties of a model that a plan must fit."""

    num_blocks: int
    ramps: tuple[int, ...]
    has_tokens: bool = True
    """Whether inputs have lengths in tokens; images have none."""
    networks: tuple[int, ...] = ()
    """One past the last block of each network of a cascade; empty for a single network."""
    generates: bool = False
    """Whether the model's answers are the next tokens of sequences."""

    @classmethod
    def of(cls, card: ModelCard) -> ModelShape:
        """Returns the shape of the model that a card describes."""
        return cls(
            num_blocks=card.num_blocks,
            ramps=card.ramps,
            has_tokens=card.has_tokens,
            networks=card.chain.networks,
            generates=card.generates,
        )


class SplitDocument(StrictDocument):
    """One split."""

    first: int
    end: int
    batch: int = Field(ge=1)
    tokens: int | None = Field(default=None, ge=1)
    ramps: list[int] = Field(default_factory=list)


class StageDocument(StrictDocument):
    """One stage."""

    device: str = "cpu"
    replicas: int = Field(default=1, ge=1)
    splits: list[SplitDocument] = Field(min_length=1)


class ChainDocument(StrictDocument):
    """One chain."""

    share: float = Field(default=1.0, gt=0, le=1)
    stages: list[StageDocument] = Field(min_length=1)


class PolicyDocument(StrictDocument):
    """The exit policy."""

    name: PolicyName = "entropy"
    thresholds: float | dict[RampKey, float] | None = None
    confidences: float | dict[RampKey, float] | None = None
    c: float | None = None
    k: float | None = None
    patience: int | None = Field(default=None, ge=1)
    votes: int | None = Field(default=None, ge=1)
    records: str | None = None
    own: str | None = None
    weights: dict[RampKey, float] | None = None
    decay: float | None = None


class OrderDetails(StrictDocument):
    """An order of waiting inputs and its settings."""

    name: OrderName = "deadline"
    eta: float | None = None
    overdue_s: float | None = None


def _order_tag(value: Any) -> str:
    return "<mapping>" if isinstance(value, Mapping | OrderDetails) else "<name>"


# Tags are in angle brackets because they are not part of the format; error messages leave them out.
OrderDocument = Annotated[
    Annotated[OrderName, Tag("<name>")] | Annotated[OrderDetails, Tag("<mapping>")], Discriminator(_order_tag)
]
"""The name of an order, or a mapping with its name and settings."""


class PlanDocument(StrictDocument):
    """A whole plan: `chains` or, in schema 1, the `stages` of a single chain."""

    schema_version: Literal[1, 2] = 2
    chains: list[ChainDocument] | None = Field(default=None, min_length=1)
    stages: list[StageDocument] | None = Field(default=None, min_length=1)
    policy: PolicyDocument | None = None
    dispatch: Dispatch = "work-conserving"
    after_answer: AfterAnswer = "stop"
    overlap_below: int | None = Field(default=None, ge=1)
    networks: list[int] = Field(default_factory=list)
    prune: dict[RampKey, float] = Field(default_factory=dict)
    order: OrderDocument = Field(default_factory=OrderDetails)
    epoch: int = Field(default=0, ge=0)
    predicted: dict[str, Any] = Field(default_factory=dict)

    @property
    def located_chains(self) -> list[tuple[DocumentPath, ChainDocument]]:
        """Each chain with the path of its stages in the file; raises PlanError for both or neither form."""
        if (self.chains is None) == (self.stages is None):
            raise PlanError(
                "a plan needs either `chains`, each with `share` and `stages`, or the `stages` of one chain"
            )
        if self.stages is not None:
            return [(("stages",), ChainDocument(stages=self.stages))]
        return [(("chains", index, "stages"), chain) for index, chain in enumerate(self.chains or ())]


def read_plan(path: Path, shape: ModelShape | None = None) -> Plan:
    """Reads a plan file, and checks that it fits a model's shape if one is given.

    Raises PlanError with the file, the line, the error and the allowed values.
    """
    return _build(read_source(path, PlanError), shape)


def parse_plan(document: object, shape: ModelShape | None = None, *, where: str = "plan") -> Plan:
    """Returns the plan from plain data (parsed YAML or JSON); raises PlanError.

    If a shape is given, the records of a `recorded` policy must exist. A shape is given where the service is started.
    """
    return _build(Source(document=document, where=where, raises=PlanError), shape)


def parse_placed(document: Mapping[str, Any]) -> PlacedPlan:
    """Returns the placed plan from the data of `placed_document`; raises PlanError."""
    return PlacedPlan(
        plan=parse_plan(document["plan"]), avoided=dict(document["avoided"]), hosted=dict(document.get("hosted", {}))
    )


def parse_policy(document: object, *, where: str = "policy") -> PolicySpec:
    """Returns the exit policy from plain data; raises PlanError."""
    source = Source(document=document, where=where, raises=PlanError)
    return PolicySpec(**source.parse(PolicyDocument, called="the policy").model_dump())


def plan_document(plan: Plan) -> dict[str, Any]:
    """Returns plain data that `parse_plan` reads."""
    policy = plan.policy
    return {
        "schema_version": 2,
        "dispatch": plan.dispatch,
        **batches_document(plan.stages),
        **order_document(plan.order),
        "epoch": plan.epoch,
        "policy": None if policy is None else policy_document(policy),
        **({"networks": list(plan.networks)} if plan.networks else {}),
        **({"prune": dict(plan.prune)} if plan.prune else {}),
        "chains": chains_document(plan.stages, plan.shares),
        "predicted": dict(plan.predicted),
    }


def placed_document(placed: PlacedPlan) -> dict[str, Any]:
    """Returns plain data that `parse_placed` reads. The slots are included for readers; they follow from the plan."""
    return {
        "plan": plan_document(placed.plan),
        "slots": list(placed.slots),
        "avoided": dict(sorted(placed.avoided.items())),
        "hosted": dict(sorted(placed.hosted.items())),
    }


def chains_document(stages: Sequence[Stage], shares: Sequence[float]) -> list[dict[str, Any]]:
    """Returns the chains of a plan as plain data."""
    chains = chains_of(stages, stages[-1].end)
    return [{"share": share, "stages": stages_document(chain)} for share, chain in zip(shares, chains, strict=True)]


def stages_document(stages: Iterable[Stage]) -> list[dict[str, Any]]:
    """Returns the stages of a plan as plain data."""
    return [
        {
            "device": stage.device,
            "replicas": stage.replicas,
            "splits": [_split_document(split) for split in stage.splits],
        }
        for stage in stages
    ]


def _split_document(split: Split) -> dict[str, Any]:
    tokens = {} if split.tokens is None else {"tokens": split.tokens}
    return {"first": split.first, "end": split.end, "batch": split.batch, **tokens, "ramps": list(split.ramps)}


def batches_document(stages: Sequence[Stage]) -> dict[str, Any]:
    """Returns the settings that all splits share, `after_answer` and `overlap_below`, without default values."""
    split = stages[0].splits[0]
    after_answer = {} if split.after_answer == "stop" else {"after_answer": split.after_answer}
    overlap = {} if split.overlap_below is None else {"overlap_below": split.overlap_below}
    return {**after_answer, **overlap}


def order_document(order: OrderSpec) -> dict[str, Any]:
    """Returns an order as plain data: nothing for the default, and the name alone for an order without settings."""
    if order == DEFAULT:
        return {}
    numbers = {name: value for name, value in asdict(order).items() if value is not None}
    return {"order": order.name if len(numbers) == 1 else numbers}


def order_of(document: OrderName | OrderDetails) -> OrderSpec:
    """Returns the order of a document; raises PlanError for contradictory settings."""
    return OrderSpec(name=document) if isinstance(document, str) else OrderSpec(**document.model_dump())


def write_plan(plan: Plan, path: Path) -> None:
    """Writes a plan as YAML; raises PlanError if the file cannot be written."""
    try:
        path.write_text(yaml.safe_dump(plan_document(plan), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from error


def policy_document(policy: PolicySpec) -> dict[str, Any]:
    """Returns plain data that `parse_policy` reads, without unused settings."""
    settings = {name: dict(value) if isinstance(value, Mapping) else value for name, value in policy.settings.items()}
    return {"name": policy.name, **settings}


def _build(source: Source, shape: ModelShape | None) -> Plan:
    document = source.parse(PlanDocument, called="the plan")
    _check_predicted(document.predicted, source)
    networks = tuple(document.networks)
    with source.errors_at(("networks",)):
        check_networks(networks)
        if shape is not None:
            _check_chain(networks, shape)
    with source.errors_at(("after_answer",)):
        if document.after_answer == "stay" and shape is not None and shape.generates:
            raise PlanError("after_answer: stay is not possible for generation: the next step waits for the token")
    stages, shares = _build_chains(document, shape, source)
    policy = None if document.policy is None else _build_policy(document.policy, shape, source)
    with source.errors_at(("order",)):
        order = order_of(document.order)
    with source.errors_at(("policy",)):
        plan = Plan(
            stages=stages,
            shares=shares,
            policy=policy,
            dispatch=document.dispatch,
            order=order,
            epoch=document.epoch,
            predicted=document.predicted,
            networks=networks,
        )
    with source.errors_at(("prune",)):
        return replace(plan, prune=document.prune)


def _build_chains(
    document: PlanDocument, shape: ModelShape | None, source: Source
) -> tuple[tuple[Stage, ...], tuple[float, ...]]:
    """Returns the stages of all chains, and the share of each chain."""
    with source.errors_at(()):
        chains = document.located_chains
    stages: list[Stage] = []
    num_blocks = None if shape is None else shape.num_blocks
    for at, chain in chains:
        stages += _build_chain(chain, at, document, shape, source)
        end, last = stages[-1].end, (*at, len(chain.stages) - 1, "splits", len(chain.stages[-1].splits) - 1)
        with source.errors_at(last):
            check_end(end, tuple(document.networks))
            if shape is not None and end != num_blocks:
                raise PlanError(f"the last split ends at block {end}, the model has {num_blocks} blocks")
            if num_blocks not in (None, end):
                raise PlanError(f"the chain ends at block {end}, the one before it at block {num_blocks}")
        num_blocks = end
    shares = tuple(chain.share for _, chain in chains)
    with source.errors_at(("chains",)):
        if shape is not None and len(chains) > MOST_CHAINS:
            raise PlanError(f"{len(chains)} chains side by side; at most {MOST_CHAINS} are allowed")
        check_shares(shares, len(chains))
    return tuple(stages), shares


def _build_chain(
    chain: ChainDocument, at: DocumentPath, document: PlanDocument, shape: ModelShape | None, source: Source
) -> list[Stage]:
    stages: list[Stage] = []
    end: int | None = None
    for index, stage in enumerate(chain.stages):
        splits: list[Split] = []
        for position, split in enumerate(stage.splits):
            with source.errors_at((*at, index, "splits", position)):
                splits.append(_build_split(split, document, end, shape))
                end = split.end
        with source.errors_at((*at, index, "device")):
            find_device(stage.device)
        stages.append(Stage(device=stage.device, replicas=stage.replicas, splits=tuple(splits)))
    return stages


def _check_chain(networks: tuple[int, ...], shape: ModelShape) -> None:
    if networks == shape.networks:
        return
    if not shape.networks:
        raise PlanError(f"networks {list(networks)}: the model is a single network; leave out `networks`")
    found = f"the plan has {list(networks)}" if networks else "the plan has no `networks`"
    raise PlanError(f"the model is a chain, whose networks end at blocks {list(shape.networks)}; {found}")


def _check_predicted(predicted: Mapping[str, Any], source: Source) -> None:
    """Raises PlanError for invalid predictions that admission control starts with. They may be missing."""
    for name, limit in (("rate_per_s", math.inf), ("tokens_per_input", sys.float_info.max)):
        value = predicted.get(name)
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= limit):
            with source.errors_at(("predicted", name)):
                raise PlanError(f"{name} must be a number, at least 0, not {value!r}")


def _build_split(
    document: SplitDocument, plan: PlanDocument, end_before: int | None, shape: ModelShape | None
) -> Split:
    split = Split(
        first=document.first,
        end=document.end,
        batch=document.batch,
        tokens=document.tokens,
        ramps=tuple(document.ramps),
        after_answer=plan.after_answer,
        overlap_below=plan.overlap_below,
    )
    check_split(split, end_before, tuple(plan.networks))
    if shape is not None:
        unknown = sorted(set(split.ramps) - set(shape.ramps))
        if unknown:
            raise PlanError(f"the model has no ramps {unknown}; its ramps are {list(shape.ramps)}")
        if split.tokens is not None and not shape.has_tokens:
            raise PlanError(f"tokens: {split.tokens}: the model's inputs have no tokens; `batch` alone counts them")
    return split


def _build_policy(document: PolicyDocument, shape: ModelShape | None, source: Source) -> PolicySpec:
    if document.own is not None:
        with source.errors_at(("policy", "own")):
            check_own(document.own)
    with source.errors_at(("policy",)):
        policy = PolicySpec(**document.model_dump())
    if shape is not None:
        _check_policy_fits(policy, shape, source)
    return policy


def _check_policy_fits(policy: PolicySpec, shape: ModelShape, source: Source) -> None:
    numbers = {"thresholds": policy.thresholds, "confidences": policy.confidences, "weights": policy.weights}
    for name, by_ramp in numbers.items():
        unknown = sorted(set(by_ramp) - set(shape.ramps)) if isinstance(by_ramp, Mapping) else []
        if unknown:
            with source.errors_at(("policy", name, str(unknown[0]))):
                raise PlanError(f"{name} for ramps {unknown}; the model's ramps are {list(shape.ramps)}")
    if policy.records is not None:
        with source.errors_at(("policy", "records")):
            check_file(Path(policy.records), PlanError, hint=" of exit records")
