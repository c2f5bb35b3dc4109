"""What a model card says of an ONNX graph: where it is cut, and how its tensors follow from ours. Without onnx.

Tensor legend: B inputs, T tokens of the longest, N tokens of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from earlyexit.errors import ModelFolderError
from earlyexit.network.boundary import Boundary, DType, TensorSpec

Axes = Literal["B", "B*n", "BT", "TB", "B*T"]
"""The first axes of a graph's tensor: inputs; inputs with n rows each, in one; inputs and tokens, in either order; all
inputs' tokens, in one."""
Source = Literal["codec", "mask", "zeros", "positions"]
"""What a graph's input is fed with. All but the codec's follow from the layout alone: where there are tokens, 0 for
each (types of tokens, where all are of the first), and each token's place."""
Outputs = Literal["logits", "probabilities", "hidden"]
"""What the graph ends in: its classifier's outputs, or a hidden state that has no classifier yet."""

# What crosses, by the graph's own type of number.
DTYPES: Mapping[str, DType] = {
    "float32": "float",
    "float16": "float",
    "int64": "int32",
    "int32": "int32",
    "uint8": "uint8",
    "bool": "uint8",
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Crossing(_Part):
    """One tensor of the graph that crosses between blocks."""

    name: str
    axes: Axes = "B"
    shape: tuple[int, ...] = ()
    """Of an input's row, or a token's; begins with n where inputs have n rows."""
    dtype: str = "float32"
    """The graph's, as numpy calls it."""

    @field_validator("dtype")
    @classmethod
    def _crosses(cls, dtype: str) -> str:
        if dtype not in DTYPES:
            raise ValueError(f"numbers that cross are {', '.join(DTYPES)}, not {dtype}")
        return dtype

    @property
    def per_token(self) -> bool:
        """Whether it has a row for every token."""
        return self.axes not in ("B", "B*n")

    def spec(self, below: int | None = None) -> TensorSpec:
        """What it is in a boundary."""
        return TensorSpec(
            name=self.name, shape=self.shape, dtype=DTYPES[self.dtype], per_token=self.per_token, below=below
        )


class GraphInput(Crossing):
    """One of the graph's inputs."""

    source: Source = "codec"
    below: int | None = None
    """Of whole numbers: the first that the graph does not take."""


class Pixels(_Part):
    """How pixels from 0 to 255, (height, width, 3), red first, become what the graph takes."""

    height: int = Field(gt=0)
    width: int = Field(gt=0)
    scale: float = 1 / 255
    """Multiplies them, before `mean` is taken away and `std` divides."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """`mean` and `std` list the channels in the order that `order` names."""
    order: Literal["RGB", "BGR"] = "RGB"
    layout: Literal["NCHW", "NHWC"] = "NCHW"


class Size(_Part):
    """A number of the graph that follows from how many inputs and tokens there are: factor * B^inputs * T^tokens."""

    factor: int
    inputs: int = 0
    tokens: int = 0

    def of(self, num_inputs: int, longest: int) -> int:
        """The number, for so many inputs of so many tokens."""
        return self.factor * int(num_inputs**self.inputs * longest**self.tokens)


class GraphConfig(_Part):
    """All that is needed to run a graph in blocks, beside its file."""

    file: str = "graph.onnx"
    sha256: str
    """Of the file and of the weights beside it."""
    inputs: tuple[GraphInput, ...]
    cuts: tuple[tuple[Crossing, ...], ...]
    """What crosses after every block; after the last, the graph's answer alone."""
    outputs: Outputs
    sizes: dict[str, tuple[Size, ...] | Size] = {}
    """Shapes that blocks read of tensors which they do not have; one number for the graph's `Size`."""
    max_length: int = Field(default=1, gt=0)
    """The longest input in tokens; 1 where inputs have none."""
    pixels: Pixels | None = None
    """None where the codec gives what the graph takes."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> GraphConfig:
        if not self.codec_inputs:
            raise ValueError("an input from the codec is needed")
        if not self.cuts or not all(self.cuts):
            raise ValueError("every block needs a tensor that crosses after it")
        if self.pixels is not None and len(self.codec_inputs) > 1:
            raise ValueError("pixels are the only input from the codec")
        return self

    @property
    def codec_inputs(self) -> tuple[GraphInput, ...]:
        """Those that the codec gives, in its order."""
        return tuple(each for each in self.inputs if each.source == "codec")

    @property
    def layout_inputs(self) -> dict[str, GraphInput]:
        """Those that follow from the layout, by name."""
        return {each.name: each for each in self.inputs if each.source != "codec"}

    def before(self, block: int) -> tuple[Crossing, ...]:
        """What crosses before a block: before the first, what the codec gives."""
        return self.codec_inputs if block == 0 else self.cuts[block - 1]

    def boundary(self, block: int) -> Boundary:
        """What crosses after a block; -1 for what the codec gives."""
        if block < 0:
            return entry_boundary(self.inputs, self.pixels)
        return tuple(each.spec() for each in self.cuts[block])


def entry_boundary(inputs: Sequence[GraphInput], pixels: Pixels | None) -> Boundary:
    """What the codec gives to a graph with these inputs."""
    if pixels is not None:
        return (TensorSpec(name="image", shape=(pixels.height, pixels.width, 3), dtype="uint8"),)
    return tuple(each.spec(below=each.below) for each in inputs if each.source == "codec")


def read_config(config: Mapping[str, Any]) -> GraphConfig:
    """As a card has it; raises ModelFolderError saying what is wrong."""
    try:
        return GraphConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the graph"
        raise ModelFolderError(f"no onnx backbone can be built: {where}: {first['msg']}") from error
