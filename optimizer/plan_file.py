"""Plans as YAML or JSON; whatever is wrong with one is said with its file and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.devices import find_device
from earlyexit.engine import Dispatch
from earlyexit.errors import PlanError
from earlyexit.split import Split
from optimizer.plan import Plan, PolicyName, PolicySpec, Stage, check_own

RampKey = Annotated[int, Field(strict=False)]
"""JSON has string keys only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a plan must fit."""

    num_blocks: int
    ramps: tuple[int, ...]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SplitDocument(_Document):
    """One split."""

    first: int
    end: int
    batch: int = Field(ge=1)
    ramps: list[int] = []


class StageDocument(_Document):
    """One stage."""

    device: str = "cpu"
    replicas: int = Field(default=1, ge=1)
    splits: list[SplitDocument] = Field(min_length=1)


class PolicyDocument(_Document):
    """The exit policy."""

    name: PolicyName = "entropy"
    thresholds: float | dict[RampKey, float] | None = None
    patience: int | None = Field(default=None, ge=1)
    votes: int | None = Field(default=None, ge=1)
    records: str | None = None
    own: str | None = None


class PlanDocument(_Document):
    """A whole plan."""

    schema_version: Literal[1] = 1
    stages: list[StageDocument] = Field(min_length=1)
    policy: PolicyDocument | None = None
    dispatch: Dispatch = "work-conserving"
    epoch: int = Field(default=0, ge=0)
    predicted: dict[str, Any] = {}


class _Lines:
    """Where in the file every value stands."""

    def __init__(self, root: yaml.Node | None) -> None:
        self._lines: dict[tuple[str, ...], int] = {}
        if root is not None:
            self._walk(root, (), ())

    def of(self, path: Sequence[str | int]) -> int:
        """Line, from 1, of the value at `path` or of the nearest one above it."""
        for length in range(len(path), -1, -1):
            line = self._lines.get(tuple(map(str, path[:length])))
            if line is not None:
                return line
        return 1

    def _walk(self, node: yaml.Node, path: tuple[str, ...], above: tuple[yaml.Node, ...]) -> None:
        if any(node is each for each in above):
            raise yaml.MarkedYAMLError(problem="an alias stands inside what it names", problem_mark=node.start_mark)
        self._lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            # A key that is no scalar is refused when the file is loaded.
            inside = [(str(key.value), value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            inside = [(str(index), value) for index, value in enumerate(node.value)]
        else:
            return
        for name, value in inside:
            self._walk(value, (*path, name), (*above, node))


def read_plan(path: Path, shape: ModelShape | None = None) -> Plan:
    """Read a plan file and, given a model's shape, check that it fits.

    Raises PlanError naming file, line, what is wrong and what is allowed.
    """
    if not path.is_file():
        raise PlanError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8")
        lines = _Lines(yaml.compose(text, Loader=yaml.SafeLoader))
        document = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not UTF-8 at byte {error.start}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PlanError(f"{path}:{line}: not YAML: {error.reason}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PlanError(f"{path}:{line}: not YAML: {error.problem}") from error
    except ValueError as error:  # a date that is none
        raise PlanError(f"{path}: not YAML: {error}") from error
    except RecursionError as error:
        raise PlanError(f"{path}: nested too deeply") from error
    return parse_plan(document, shape, where=str(path), lines=lines)


def parse_plan(
    document: object, shape: ModelShape | None = None, *, where: str = "plan", lines: _Lines | None = None
) -> Plan:
    """A plan from plain data (what YAML or JSON gave); raises PlanError.

    Given the model's shape, on the machine that starts the service, a recorded policy's file must exist as well.
    """
    lines = lines or _Lines(None)
    try:
        parsed = PlanDocument.model_validate(document)
    except ValidationError as error:
        at, message = _first_mistake(error)
        name = ".".join(at) or "the plan"
        raise PlanError(f"{where}:{lines.of(at)}: {name}: {message}") from error
    return _build(parsed, shape, where, lines)


def _first_mistake(error: ValidationError) -> tuple[list[str], str]:
    """Path and message; of a value that may be a number or a mapping, what is wrong deepest inside."""
    mistakes = [
        ([str(part) for part in each["loc"] if part not in ("float", "dict[int,float]", "[key]")], each["msg"])
        for each in error.errors()
    ]
    at, _ = mistakes[0]
    return max((each for each in mistakes if each[0][: len(at)] == at), key=lambda each: len(each[0]))


def plan_document(plan: Plan) -> dict[str, Any]:
    """Plain data that `parse_plan` reads back."""
    policy = plan.policy
    return {
        "schema_version": 1,
        "dispatch": plan.dispatch,
        "epoch": plan.epoch,
        "policy": None if policy is None else _policy_document(policy),
        "stages": [
            {
                "device": stage.device,
                "replicas": stage.replicas,
                "splits": [
                    {"first": split.first, "end": split.end, "batch": split.batch, "ramps": list(split.ramps)}
                    for split in stage.splits
                ],
            }
            for stage in plan.stages
        ],
        "predicted": dict(plan.predicted),
    }


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as YAML."""
    path.write_text(yaml.safe_dump(plan_document(plan), sort_keys=False), encoding="utf-8")


def _policy_document(policy: PolicySpec) -> dict[str, Any]:
    thresholds = dict(policy.thresholds) if isinstance(policy.thresholds, Mapping) else policy.thresholds
    fields = {
        "name": policy.name,
        "thresholds": thresholds,
        "patience": policy.patience,
        "votes": policy.votes,
        "records": policy.records,
        "own": policy.own,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _build(document: PlanDocument, shape: ModelShape | None, where: str, lines: _Lines) -> Plan:
    stages: list[Stage] = []
    end = 0
    for index, stage in enumerate(document.stages):
        splits: list[Split] = []
        for position, split in enumerate(stage.splits):
            with _said_at(where, lines, ("stages", index, "splits", position)):
                splits.append(_build_split(split, end, shape))
            end = split.end
        with _said_at(where, lines, ("stages", index, "device")):
            find_device(stage.device)
        stages.append(Stage(device=stage.device, replicas=stage.replicas, splits=tuple(splits)))
    if shape is not None and end != shape.num_blocks:
        with _said_at(where, lines, ("stages", len(stages) - 1, "splits", len(document.stages[-1].splits) - 1)):
            raise PlanError(f"the last split ends at block {end}, the model has {shape.num_blocks} blocks")
    policy = None if document.policy is None else _build_policy(document.policy, shape, where, lines)
    with _said_at(where, lines, ("policy",)):
        return Plan(
            stages=tuple(stages),
            policy=policy,
            dispatch=document.dispatch,
            epoch=document.epoch,
            predicted=document.predicted,
        )


def _build_split(document: SplitDocument, end_before: int, shape: ModelShape | None) -> Split:
    split = Split(first=document.first, end=document.end, batch=document.batch, ramps=tuple(document.ramps))
    if split.first > end_before:
        raise PlanError(f"gap: no split runs blocks {end_before} to {split.first - 1}")
    if split.first < end_before:
        raise PlanError(f"overlap: block {split.first} is in an earlier split already")
    if shape is not None:
        unknown = sorted(set(split.ramps) - set(shape.ramps))
        if unknown:
            raise PlanError(f"the model has no ramps {unknown}; its ramps are {list(shape.ramps)}")
    return split


def _build_policy(document: PolicyDocument, shape: ModelShape | None, where: str, lines: _Lines) -> PolicySpec:
    if document.own is not None:
        with _said_at(where, lines, ("policy", "own")):
            check_own(document.own)
    with _said_at(where, lines, ("policy",)):
        policy = PolicySpec(**document.model_dump())
    if shape is not None:
        _check_policy_fits(policy, shape, where, lines)
    return policy


def _check_policy_fits(policy: PolicySpec, shape: ModelShape, where: str, lines: _Lines) -> None:
    named = policy.thresholds if isinstance(policy.thresholds, Mapping) else {}
    unknown = sorted(set(named) - set(shape.ramps))
    if unknown:
        with _said_at(where, lines, ("policy", "thresholds", str(unknown[0]))):
            raise PlanError(f"thresholds for ramps {unknown}; the model's ramps are {list(shape.ramps)}")
    if policy.records is not None and not Path(policy.records).is_file():
        with _said_at(where, lines, ("policy", "records")):
            raise PlanError(f"{policy.records}: no such file of exit records")


@contextmanager
def _said_at(where: str, lines: _Lines, path: Sequence[str | int]) -> Iterator[None]:
    """Put file and line before the message of a PlanError raised inside."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{where}:{lines.of(path)}: {error}") from error
