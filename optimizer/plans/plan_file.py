"""Plans as YAML or JSON. Errors name the file and the line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, field_validator

from earlyexit.data.images import check_file
from earlyexit.data.source_file import Source, StrictDocument, adapter_of, read_source
from earlyexit.engine.engine import Dispatch
from earlyexit.engine.queue import DEFAULT, OrderSpec
from earlyexit.errors import PlanError, raising, within
from earlyexit.network.boundary import AfterAnswer, Split
from earlyexit.network.store import ModelCard
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, RampKey, Stage, chains_of, with_splits

MOST_CHAINS = 3
"""Largest number of parallel chains in a plan."""
OF_PLAN = ("policy", "dispatch", "order", "epoch", "predicted", "networks", "prune")
"""Fields that a plan and its file have in common."""
Order = Annotated[OrderSpec, BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)]
"""The order of waiting inputs: its name, or a mapping with its name and settings."""


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

    def check(self, plan: Plan) -> None:
        """Raises PlanError, with the path of the wrong value, unless the plan can serve the model.

        The records of a `recorded` policy must exist.
        """
        self._check_networks(plan.networks)
        if self.generates and plan.after_answer == "stay":
            why = "the next step waits for the token"
            raise PlanError(f"after_answer: stay is not possible for generation: {why}", at=("after_answer",))
        for at, split in plan.located_splits():
            self._check_split(split, at)
        if plan.num_blocks != self.num_blocks:
            message = f"the last split ends at block {plan.num_blocks}, the model has {self.num_blocks} blocks"
            raise PlanError(message, at=at)
        if len(plan.shares) > MOST_CHAINS:
            raise PlanError(
                f"{len(plan.shares)} chains side by side; at most {MOST_CHAINS} are allowed", at=("chains",)
            )
        if plan.policy is not None:
            with within("policy"):
                self._check_policy(plan.policy)

    def _check_networks(self, networks: tuple[int, ...]) -> None:
        if networks == self.networks:
            return
        found = f"the plan has {list(networks)}" if networks else "the plan has no `networks`"
        message = f"the model is a chain, whose networks end at blocks {list(self.networks)}; {found}"
        if not self.networks:
            message = f"networks {list(networks)}: the model is a single network; leave out `networks`"
        raise PlanError(message, at=("networks",))

    def _check_split(self, split: Split, at: tuple[str | int, ...]) -> None:
        if unknown := sorted(set(split.ramps) - set(self.ramps)):
            raise PlanError(f"the model has no ramps {unknown}; its ramps are {list(self.ramps)}", at=at)
        if split.tokens is not None and not self.has_tokens:
            message = f"tokens: {split.tokens}: the model's inputs have no tokens; `batch` alone counts them"
            raise PlanError(message, at=at)

    def _check_policy(self, policy: PolicySpec) -> None:
        for name in ("thresholds", "confidences", "weights"):
            by_ramp = getattr(policy, name)
            unknown = sorted(set(by_ramp) - set(self.ramps)) if isinstance(by_ramp, Mapping) else []
            if unknown:
                message = f"{name} for ramps {unknown}; the model's ramps are {list(self.ramps)}"
                raise PlanError(message, at=(name, unknown[0]))
        if policy.records is not None:
            with within("records"):
                check_file(Path(policy.records), PlanError, hint=" of exit records")


class ChainDocument(StrictDocument):
    """One chain."""

    share: float = Field(default=1.0, gt=0, le=1)
    stages: list[Stage] = Field(min_length=1)


class PlanDocument(StrictDocument):
    """A whole plan: `chains` or, in schema 1, the `stages` of a single chain."""

    schema_version: Literal[1, 2] = 2
    chains: list[ChainDocument] | None = Field(default=None, min_length=1)
    stages: list[Stage] | None = Field(default=None, min_length=1)
    policy: PolicySpec | None = None
    dispatch: Dispatch = "work-conserving"
    after_answer: AfterAnswer = "stop"
    overlap_below: int | None = Field(default=None, ge=1)
    networks: tuple[int, ...] = Field(default=(), strict=False)
    prune: dict[RampKey, float] = Field(default_factory=dict)
    order: Order = DEFAULT
    epoch: int = Field(default=0, ge=0)
    predicted: dict[str, Any] = Field(default_factory=dict)

    @field_validator("predicted")
    @classmethod
    def _check_predicted(cls, predicted: dict[str, Any]) -> dict[str, Any]:
        """Checks that all predictions are valid JSON, and that those which a service uses are numbers, if present."""
        for name, value in predicted.items():
            is_used = name in ("rate_per_s", "latency_s", "tokens_per_input") and value is not None
            if is_used and not (isinstance(value, (int, float)) and 0 <= value <= sys.float_info.max):
                raise PlanError(f"{name} must be a number, at least 0, not {value!r}", at=("predicted", name))
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                message = f"{name} must be valid JSON, which has no infinity and no NaN, not {value!r}"
                raise PlanError(message, at=("predicted", name)) from error
        return predicted

    def plan(self, shape: ModelShape | None) -> Plan:
        """Returns the plan; raises PlanError, with the path of the wrong value, also if it does not fit the shape."""
        if (self.chains is None) == (self.stages is None):
            raise PlanError(
                "a plan needs either `chains`, each with `share` and `stages`, or the `stages` of one chain"
            )
        chains = self.chains or [ChainDocument(stages=self.stages or [])]
        try:
            plan = Plan(
                stages=self._stages(chains),
                shares=tuple(chain.share for chain in chains),
                **{name: getattr(self, name) for name in OF_PLAN},
            )
            if shape is not None:
                shape.check(plan)
        except PlanError as error:
            match error.at:
                case "stages", int(stage), *inside if self.chains is not None:
                    places = [(chain, index) for chain, each in enumerate(chains) for index in range(len(each.stages))]
                    error.at = ("chains", places[stage][0], "stages", places[stage][1], *inside)
            raise
        return plan

    def _stages(self, chains: Sequence[ChainDocument]) -> tuple[Stage, ...]:
        """Returns the stages of all chains; raises PlanError for chains that end at different blocks."""
        stages: list[Stage] = []
        for chain in chains:
            end, before = chain.stages[-1].end, stages[-1].end if stages else None
            stages += chain.stages
            if before not in (None, end):
                at = ("stages", len(stages) - 1, "splits", len(stages[-1].splits) - 1)
                raise PlanError(f"the chain ends at block {end}, the one before it at block {before}", at=at)
        shared: dict[str, Any] = {"after_answer": self.after_answer, "overlap_below": self.overlap_below}
        return with_splits(stages, lambda _, split: replace(split, **shared))


def read_plan(path: Path, shape: ModelShape | None = None) -> Plan:
    """Reads a plan file, and checks that it fits a model's shape if one is given; raises the errors of `build_plan`."""
    return build_plan(read_source(path, PlanError), shape)


def parse_plan(document: object, shape: ModelShape | None = None) -> Plan:
    """Returns the plan from plain data (parsed YAML or JSON); raises PlanError.

    If a shape is given, the records of a `recorded` policy must exist. A shape is given where the service is started.
    """
    return build_plan(Source(document=document, where="plan", raises=PlanError), shape)


def build_plan(source: Source, shape: ModelShape | None) -> Plan:
    """Returns the plan of a file; raises PlanError with the file, the line, the error and the allowed values."""
    document = source.parse(PlanDocument, called="the plan")
    with source.errors_at():
        return document.plan(shape)


def parse_placed(document: Mapping[str, Any]) -> PlacedPlan:
    """Returns the placed plan from the data of `placed_document`; raises PlanError."""
    replicas = {name: dict(document[name]) for name in ("avoided", "hosted")}
    return PlacedPlan(plan=parse_plan(document["plan"]), **replicas)


def parse_policy(document: object, *, where: str = "policy") -> PolicySpec:
    """Returns the exit policy from plain data; raises PlanError."""
    return Source(document=document, where=where, raises=PlanError).parse(PolicySpec, called="the policy")


def plan_document(plan: Plan) -> dict[str, Any]:
    """Returns plain data that `parse_plan` reads."""
    return {
        "schema_version": 2,
        "dispatch": plan.dispatch,
        **batches_document(plan.stages),
        **order_document(plan.order),
        "epoch": plan.epoch,
        "policy": None if plan.policy is None else policy_document(plan.policy),
        **({"networks": list(plan.networks)} if plan.networks else {}),
        **({"prune": dict(plan.prune)} if plan.prune else {}),
        "chains": chains_document(plan.stages, plan.shares),
        # JSON has no infinity, which is the latency if no input reaches a later split, whose batch never fills.
        "predicted": {name: None if value == math.inf else value for name, value in plan.predicted.items()},
    }


def placed_document(placed: PlacedPlan) -> dict[str, Any]:
    """Returns plain data that `parse_placed` reads. The slots are included for readers; they follow from the plan."""
    return {
        "plan": plan_document(placed.plan),
        "slots": list(placed.stage_of),
        "avoided": dict(sorted(placed.avoided.items())),
        "hosted": dict(sorted(placed.hosted.items())),
    }


def chains_document(stages: Sequence[Stage], shares: Sequence[float]) -> list[dict[str, Any]]:
    """Returns the chains of a plan as plain data."""
    pairs = zip(shares, chains_of(stages), strict=True)
    return [{"share": share, "stages": stages_document(chain)} for share, chain in pairs]


def stages_document(stages: Iterable[Stage]) -> list[dict[str, Any]]:
    """Returns the stages of a plan as plain data."""
    document: list[dict[str, Any]] = adapter_of(list[Stage]).dump_python(list(stages), mode="json", exclude_none=True)
    return document


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


def policy_document(policy: PolicySpec) -> dict[str, Any]:
    """Returns plain data that `parse_policy` reads, without unused settings."""
    settings = {name: dict(value) if isinstance(value, Mapping) else value for name, value in policy.settings.items()}
    return {"name": policy.name, **settings}


def write_plan(plan: Plan, path: Path) -> None:
    """Writes a plan as YAML; raises PlanError if the file cannot be written."""
    with raising(PlanError, f"{path}: cannot be written", OSError):
        path.write_text(yaml.safe_dump(plan_document(plan), sort_keys=False), encoding="utf-8")
