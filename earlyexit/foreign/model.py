"""Foreign models, which are ONNX files or torch modules: the sites where one can be cut, and its blocks as a backbone.

The steps are the same for both kinds: choose the output that is the answer, find and time the sites before it, leave
out sites whose tensors cannot cross, cut the model, and compare the blocks with the uncut model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from earlyexit.errors import GraphError, ModelFolderError
from earlyexit.foreign.dataflow import Dataflow, Site, find_sites, with_cut_sets
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, Encoded, TensorSpec, why_no_exit

if TYPE_CHECKING:
    from earlyexit.families.base import Backbone, Pretrained

TEXT_LENGTH = 512
"""The assumed longest input in tokens, if the model does not define it."""
SURE = 1e-3
"""How far the sum of probabilities may be from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOptions:
    """The user's settings for a foreign model."""

    output: str | None = None
    """The output that is the answer. None: the only output that can be."""
    columns: tuple[str, ...] = ()
    """The kind of the data: see `LabelledRows.kind`."""
    arrays: bool = False
    """Whether rows are arrays for the network. Integers (B, F) are then features, and not tokens of any number."""
    image_size: tuple[int, int] | None = None
    """Height and width. None: the size in the ONNX file."""
    pixels: Mapping[str, Any] = field(default_factory=dict)
    """How an ONNX file takes pixels: settings of `Pixels` except size and layout."""


@dataclass(frozen=True, kw_only=True)
class ForeignModel(ABC):
    """A foreign model. Its methods raise GraphError or ModelFolderError if the model does not support an operation."""

    family: ClassVar[str]
    name: str
    """`module:function`, or the path of the file."""
    flow: Dataflow
    options: ForeignOptions = ForeignOptions()

    @property
    @abstractmethod
    def inputs(self) -> Boundary:
        """The tensors that a codec must return."""

    @property
    def longest(self) -> int:
        """The longest input in tokens, as far as the model defines it; 1 if inputs have no tokens."""
        return TEXT_LENGTH

    @abstractmethod
    def timed(self, sites: Sequence[Site]) -> tuple[Site, ...]:
        """Returns the sites with `seconds_share`, measured with one thread of this CPU."""

    def sites(self, *, sets: bool, measure: bool = True) -> tuple[Site, ...]:
        """Returns the model's sites; `sets`: including sets of two or three tensors."""
        sites = find_sites(self.flow)
        sites = self.timed(sites) if sites and measure else sites
        with_sets = with_cut_sets(self.flow, sites) if sets else sites
        return self.timed(with_sets) if measure and len(with_sets) > len(sites) else with_sets

    def with_outputs(self, *outputs: str) -> Self:
        """Returns the model with only these outputs."""
        if unknown := [name for name in outputs if name not in self.flow.outputs]:
            raise GraphError(f"{self.name} has no output {unknown[0]!r}; it has {', '.join(self.flow.outputs)}")
        return replace(self, flow=replace(self.flow, outputs=outputs))


@dataclass(frozen=True, kw_only=True)
class Divisible(ForeignModel):
    """A foreign model that can be cut into blocks. Its only output is the answer."""

    codec: NamedSpec = field(default_factory=dict)
    """The codec of its inputs."""

    @abstractmethod
    def specs(self, cut: Sequence[str]) -> list[TensorSpec]:
        """Returns the tensors that cross a cut. Raises GraphError or ModelFolderError if they cannot cross."""

    @abstractmethod
    def blocks(self, cuts: Sequence[Sequence[str]]) -> Backbone:
        """Returns the blocks between the cuts."""

    @abstractmethod
    def compare(self, backbone: Backbone, rows: Sequence[Encoded]) -> None:
        """Raises GraphError unless blocks agree with the uncut model, and inputs alone with inputs in a batch."""

    def refused(self, cuts: Sequence[Sequence[str]]) -> dict[tuple[str, ...], str]:
        """Returns the cuts at which the model cannot be cut or cannot have an exit, and the reasons."""
        reasons: dict[tuple[str, ...], str] = {}
        for cut in map(tuple, cuts):
            try:
                reason = why_no_exit(self.specs(cut))
            except (GraphError, ModelFolderError) as error:
                reason = str(error)
            if reason is not None:
                reasons[cut] = reason
        return reasons

    def build(self, cuts: Sequence[Sequence[str]], rows: Sequence[Encoded] = ()) -> Pretrained:
        """Cuts the model, and compares the blocks with the uncut model (if it rounds, on `rows`)."""
        from earlyexit.families.base import FinalHead, Pretrained

        backbone = self.blocks(cuts)
        if backbone.inputs[0].per_token:
            backbone.max_length = self._longest_of(backbone)
        self.compare(backbone, rows)
        [last] = backbone.boundary(backbone.num_blocks - 1)
        head = FinalHead(style="given", pooling="mean", num_outputs=last.shape[0], weights={})
        return Pretrained(backbone=backbone, head=head, label_names=None, codec=self.codec)

    def _longest_of(self, backbone: Backbone) -> int:
        """Returns the length up to which the model runs all inputs. Raises GraphError if it is below the codec's."""
        asked = self.codec.get("max_length")
        most = asked or min(self.longest, TEXT_LENGTH)
        if _runs(backbone, most):
            return most
        longest = bisect_left(range(1, most), True, key=lambda tokens: not _runs(backbone, tokens))
        if asked or not longest:
            raise GraphError(f"{self.name} takes at most {longest} tokens, not {most}: use --max-length {longest}")
        return longest

    def answer_among(self, trials: Mapping[str, Sequence[Any]], batches: Sequence[int]) -> str:
        """Returns the only output that can be the answer: it has two or more numbers for each input.

        `trials`: the values of each output for `batches` inputs. Raises GraphError if there is not exactly one.
        """
        candidates = [
            name
            for name, values in trials.items()
            if all("float" in str(each.dtype) and each.ndim == 2 and each.shape[1] > 1 for each in values)
            and [each.shape for each in values] == [(batch, values[0].shape[1]) for batch in batches]
        ]
        if len(candidates) == 1:
            return candidates[0]
        described = ", ".join(f"{name!r} {list(values[0].shape)}" for name, values in trials.items()) or "no tensor"
        hint = "; several can be the answer, choose one with --output" if candidates else ""
        if any(each.op.endswith("ZipMap") for each in self.flow.operators):
            hint += "; ZipMap returns no tensor: convert the model with options={'zipmap': False}"
        raise GraphError(
            f"{self.name} is no classifier: for {batches[0]} inputs it returns {described}; one output of two or "
            f"more numbers for each input is needed{hint}"
        )


def _runs(backbone: Backbone, tokens: int) -> bool:
    """Whether a backbone runs an input of that many tokens."""
    import torch

    from earlyexit.families.own import examples, layout_of

    layout = layout_of([tokens])
    zeros = tuple(map(torch.zeros_like, examples(backbone.inputs, layout)))
    try:
        with torch.inference_mode():
            backbone.run_blocks(0, backbone.num_blocks, backbone.embed(zeros, layout), layout)
    except Exception:  # the errors of ONNX Runtime have no common base class
        return False
    return True
