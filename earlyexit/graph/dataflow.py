"""A model as operators that read and give named tensors, whatever it is written in. Without torch and onnx."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

OperatorKind = Literal["work", "light", "sizes", "random"]
"""`work`: products with weights, attention, recurrence, and everything unknown. `light`: what only continues what was
before it (element by element, norms, activations, pooling, other shapes of the same values). `sizes`: it reads how
large its inputs are, not what they hold. `random`: it draws, so that running it twice gives two results."""

LayoutRole = Literal["mask", "zeros", "positions"]
"""What an input (B, T) holds that follows from how long each input is: where there are tokens, 0 for each (types of
tokens, where all are of a first text), each token's place."""
ROLES: Mapping[str, LayoutRole] = {"mask": "mask", "type": "zeros", "segment": "zeros", "position": "positions"}
"""By what such an input's name has in it, whoever exported it."""


def layout_role(name: str) -> LayoutRole | None:
    """None for what holds the tokens themselves, or anything else."""
    return next((role for part, role in ROLES.items() if part in name.lower()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node of a model's graph."""

    name: str
    """Unique in its model."""
    op: str
    """What it computes, as the model names that: `Conv`, `aten.conv2d.default`."""
    kind: OperatorKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """Operators in an order in which they can run."""

    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    """Without weights."""
    outputs: tuple[str, ...]
    weights: frozenset[str]
    """Tensors that are stored in the model."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the tensors where they are known, with the batch axis, for a batch of `batch`; axes that a model leaves open
    have the size that the reader was told."""
    bytes_per_input: Mapping[str, int]
    """Where shapes are known. Bytes of one input, of its padded tokens all."""
    batch: int = 1

    @cached_property
    def layout(self) -> frozenset[str]:
        """Of the inputs, those that say how long each input is and nothing else (`Layout`): masks, and positions.

        Types of tokens are none: of pairs of texts they say more.
        """
        roles = {name: layout_role(name) for name in self.inputs if len(self.shapes.get(name, (0, 0))) == 2}
        return frozenset(name for name, role in roles.items() if role in ("mask", "positions"))

    @cached_property
    def free(self) -> frozenset[str]:
        """Tensors that need not cross a cut, since every block can make them anew.

        Weights, constants, how large a tensor is, which inputs are how long, and what is computed from these alone.
        """
        free = set(self.weights) | self.layout
        for operator in self.operators:
            if operator.kind == "sizes" or (operator.kind != "random" and free.issuperset(operator.inputs)):
                free.update(operator.outputs)
        return frozenset(free)

    @cached_property
    def live(self) -> tuple[Operator, ...]:
        """Operators that what the inputs hold passes on its way to the outputs: no constants, no dead ends."""
        wanted = set(self.outputs) - self.free
        found = []
        for operator in reversed(self.operators):
            if wanted.intersection(operator.outputs):
                wanted.update(set(operator.inputs) - self.free)
                found.append(operator)
        return tuple(reversed(found))

    @cached_property
    def maker(self) -> Mapping[str, Operator]:
        """The operator that gives a tensor; none for inputs and weights."""
        return {tensor: operator for operator in self.operators for tensor in operator.outputs}

    def before(self, tensors: Iterable[str]) -> frozenset[str]:
        """Names of the operators that run before some tensors are there, free ones among them."""
        wanted = set(tensors)
        found = set()
        for operator in reversed(self.operators):
            if wanted.intersection(operator.outputs):
                wanted.update(operator.inputs)
                found.add(operator.name)
        return frozenset(found)
