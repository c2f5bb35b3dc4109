"""A foreign model, an ONNX file or a torch module: where it can be cut, and its blocks as a backbone.

One pipeline serves both kinds: choose the output that is the answer, find and time the sites on the way to it, leave
out sites whose tensors cannot cross, cut, and try the blocks beside the uncut model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.foreign.dataflow import Dataflow, Site, find_sites, with_cut_sets
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, Encoded, TensorSpec, why_no_exit

if TYPE_CHECKING:
    from earlyexit.families.base import Backbone, FinalHead, Pretrained

TEXT_LENGTH = 512
"""Tokens, where a model does not say how long its inputs may be."""
Looked = TypeVar("Looked")
SURE = 1e-3
"""How far from 1 the sum of probabilities may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOptions:
    """What a user says of a foreign model."""

    output: str | None = None
    """The output that is the answer; None for the only one that can be."""
    columns: tuple[str, ...] = ()
    """The data's kind, as `LabelledRows.kind` has it."""
    image_size: tuple[int, int] | None = None
    """Height and width; None for those of an ONNX file."""
    pixels: Mapping[str, Any] = field(default_factory=dict)
    """How an ONNX file takes pixels: settings of `Pixels` beside their size and layout."""


@dataclass(frozen=True, kw_only=True)
class ForeignModel(ABC):
    """A model that was read. Raises GraphError, or ModelFolderError, for what cannot be done with it."""

    family: ClassVar[str]
    name: str
    """`module:function`, or the file's path."""
    flow: Dataflow
    asked: ForeignOptions = ForeignOptions()

    @property
    @abstractmethod
    def inputs(self) -> Boundary:
        """What a codec is to give."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """The longest input in tokens; 1 where inputs have none."""

    @abstractmethod
    def with_answer(self, codec: NamedSpec) -> Self:
        """Returns the model with its answer as the only output."""

    @abstractmethod
    def timed(self, sites: Sequence[Site]) -> tuple[Site, ...]:
        """Returns sites with their shares of the model's seconds, on one thread of this CPU."""

    @abstractmethod
    def specs(self, cuts: Sequence[Sequence[str]], codec: NamedSpec) -> list[list[TensorSpec] | str]:
        """Returns what crosses at each of these cuts, or why nothing can."""

    @abstractmethod
    def take(
        self, cuts: Sequence[Sequence[str]], codec: NamedSpec, folder: Path, rows: Sequence[Encoded] = ()
    ) -> Pretrained:
        """Returns its backbone in blocks, for a model's folder, tried with rows of the data where it rounds."""

    def sites(self, *, sets: bool, measure: bool = True) -> tuple[Site, ...]:
        """Returns where the model can be cut on the way to its outputs; `sets`: with sets of two or three tensors."""
        sites = find_sites(self.flow)
        sites = self.timed(sites) if sites and measure else sites
        found = with_cut_sets(self.flow, sites) if sets else sites
        return self.timed(found) if measure and len(found) > len(sites) else found

    def refused(self, cuts: Sequence[Sequence[str]], codec: NamedSpec) -> dict[tuple[str, ...], str]:
        """Returns the cuts at which the model cannot be cut, or no exit can look, and why."""
        found = zip(map(tuple, cuts), self.specs(cuts, codec), strict=True)
        return {cut: why for cut, specs in found if (why := specs if isinstance(specs, str) else why_no_exit(specs))}

    def with_outputs(self, *outputs: str) -> Self:
        """Returns the model with only some of its outputs, by name."""
        unknown = [name for name in outputs if name not in self.flow.outputs]
        if unknown:
            raise GraphError(f"{self.name} has no output {unknown[0]!r}; it has {', '.join(self.flow.outputs)}")
        return replace(self, flow=replace(self.flow, outputs=outputs))


def the_answer(name: str, outputs: Mapping[str, Sequence[int]], can_be: Callable[[str], bool], batch: int) -> str:
    """Returns the output that can be the answer; raises GraphError unless there is one. `outputs`: their shapes."""
    found = [each for each in outputs if can_be(each)]
    if len(found) == 1:
        return found[0]
    described = ", ".join(f"{each!r} {list(shape)}" for each, shape in outputs.items())
    hint = "; several can be the answer, --output names it" if found else ""
    raise GraphError(
        f"{name} is no classifier: of {batch} inputs it gives {described}; one output of two or more numbers for each "
        f"input is needed{hint}"
    )


def longest_taken(name: str, most: int, runs: Callable[[int], bool], *, least: int = 1, must: bool) -> int:
    """Returns the longest input that a model runs, at most `most` tokens; raises GraphError where `must` it run `most`.

    Positions are looked up in a table: an input that is too long for it fails, and so does any longer one.
    """
    if runs(most):
        return most
    longest = bisect_left(range(least, most), True, key=lambda tokens: not runs(tokens)) + least - 1
    if must or not longest:
        raise GraphError(f"{name} takes inputs of at most {longest} tokens, not {most}: --max-length {longest}")
    return longest


def given_head(backbone: Backbone) -> FinalHead:
    """Returns the head of a model whose last block gives the outputs."""
    from earlyexit.families.base import FinalHead

    [last] = backbone.boundary(backbone.num_blocks - 1)
    return FinalHead(style="given", pooling="mean", num_outputs=last.shape[0], weights={})


def or_why(look: Callable[..., Looked], *given: Any) -> Looked | str:
    """Returns what is seen, or the message of the error that a model raises."""
    try:
        return look(*given)
    except (GraphError, ModelFolderError) as error:
        return str(error)
