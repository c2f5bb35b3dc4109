"""From an ONNX file anywhere to that in a model's folder: checked, open to any batch, tried, its weights beside it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, get_args

import numpy as np

from earlyexit.errors import GraphError
from earlyexit.families.base import FinalHead, Pretrained
from earlyexit.families.trial import Tolerance, TrialError, beyond, check_alone, examples, layout_of
from earlyexit.foreign.onnx_backbone import Array, OnnxBackbone, enter, fed, layout_feeds, open_graph
from earlyexit.foreign.onnx_config import DTYPES, Axes, Crossing, GraphConfig, Outputs, Size
from earlyexit.foreign.onnx_inputs import Entry, describe_inputs, free_sizes
from earlyexit.foreign.onnx_parts import (
    WEIGHTS_SUFFIX,
    GraphParts,
    check_cuts,
    fingerprint,
    in_plain_words,
    read_graph,
    read_source,
    sizes_needed,
    write_graph,
)
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import why_no_exit
from earlyexit.network.layout import Layout
from earlyexit.network.piece import Tensors
from earlyexit.network.wire import Encoded

SHAPES = ((2, 3), (3, 3), (2, 5))
"""Inputs and tokens of the trials from which sizes follow: of any two, one number is the same."""
BATCHES = (1, 2, 7)
"""Of the trials of blocks."""
LENGTHS = (5, 1, 9, 3, 5, 7, 2)
"""Of their inputs, in tokens, as far as the graph takes them."""
TOLERANCE_OF_CUTS = 1e-4
"""Between blocks and the uncut graph, as a share of the range of the answers."""
TOLERANCE_ALONE = Tolerance(answer=1e-3, inside=1e-2, least_range=0.1)
"""Between an input alone and in a batch: a graph that mixes inputs misses both by far."""


class Whole:
    """The uncut graph; any of its tensors can be looked at."""

    def __init__(self, model: Any, folder: Path, entry: Entry, names: Sequence[str]) -> None:
        """Raises GraphError for operators that ONNX Runtime does not have."""
        import onnx

        looked_at = onnx.ModelProto()
        looked_at.CopyFrom(model)
        del looked_at.graph.output[:]
        looked_at.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names))
        self._session = open_graph(looked_at, folder, quiet=True)
        self._entry = entry
        self._names = list(dict.fromkeys(names))

    def run(self, values: Tensors, layout: Layout) -> dict[str, Array]:
        """The tensors of inputs as the codec gives them; raises GraphError where the graph does not take them."""
        codec = [each for each in self._entry.inputs if each.source == "codec"]
        entered = enter(values, self._entry.pixels)
        feeds = {each.name: fed(each, rows, layout) for each, rows in zip(codec, entered, strict=True)}
        feeds |= layout_feeds([each for each in self._entry.inputs if each.source != "codec"], layout)
        try:
            results = self._session.run(self._names, feeds)
        except Exception as error:  # ONNX Runtime's have no base of their own
            raise GraphError(
                f"the graph does not take {layout.num_inputs} inputs"
                f"{'' if layout.longest == 1 else f' of {layout.longest} tokens'}: {in_plain_words(error)}"
            ) from error
        return dict(zip(self._names, results, strict=True))

    def check_longest(self) -> None:
        """Raise GraphError, with the length that the graph does take, where inputs may be longer."""
        try:
            self._run_one(self._entry.max_length)
        except GraphError as error:
            lengths = range(SHAPES[0][1], self._entry.max_length)
            longest = bisect_left(lengths, True, key=self._is_too_long) + lengths.start - 1
            raise GraphError(
                f"the graph takes at most {longest} tokens, not {self._entry.max_length}: --max-length {longest}"
            ) from error

    def _is_too_long(self, length: int) -> bool:
        try:
            self._run_one(length)
        except GraphError:
            return True
        return False

    def _run_one(self, length: int) -> None:
        layout = layout_of([length])
        self.run(examples(self._entry.boundary, layout), layout)

    def measured(self) -> list[dict[str, Array]]:
        """The tensors in each of `SHAPES`."""
        shapes = SHAPES if self._entry.max_length > 1 else [(inputs, 1) for inputs, _ in SHAPES[:2]]
        layouts = [layout_of([tokens] * inputs) for inputs, tokens in shapes]
        return [self.run(examples(self._entry.boundary, layout), layout) for layout in layouts]


def crossing(name: str, trials: Sequence[Array]) -> Crossing:
    """How a tensor crosses, by its shapes in `SHAPES`; raises GraphError where it has no row per input."""
    dtype = str(trials[0].dtype)
    if dtype not in DTYPES:
        raise GraphError(f"the graph's tensor {name!r} is {dtype}; what crosses is {', '.join(DTYPES)}")
    for axes in get_args(Axes):
        found = [_row(trial.shape, axes, *shape) for trial, shape in zip(trials, SHAPES, strict=False)]
        if found[0] is not None and all(row == found[0] for row in found):
            return Crossing(name=name, axes=axes, shape=found[0], dtype=dtype)
    raise GraphError(
        f"the graph's tensor {name!r}, {list(trials[0].shape)} for {SHAPES[0][0]} inputs, has a row neither per input "
        "nor per token: it cannot cross"
    )


def _row(shape: tuple[int, ...], axes: Axes, num_inputs: int, longest: int) -> tuple[int, ...] | None:
    """The shape of a row, if these are the first axes; the trials of one length alone have no tokens."""
    leading = {"BT": (num_inputs, longest), "TB": (longest, num_inputs), "B*T": (num_inputs * longest,)}
    leading |= {"B": (num_inputs,)}
    if axes in leading:
        first = leading[axes]
        return shape[len(first) :] if shape[: len(first)] == first else None
    if not shape or shape[0] % num_inputs:
        return None
    return (shape[0] // num_inputs, *shape[1:])


def sizes_of(name: str, trials: Sequence[Array]) -> Size | tuple[Size, ...]:
    """The numbers of a `Shape` or `Size`, by those of the trials; raises GraphError where they do not follow."""
    if trials[0].ndim == 0:
        return _size(name, [int(trial) for trial in trials])
    return tuple(_size(name, [int(number) for number in numbers]) for numbers in zip(*trials, strict=True))


def _size(name: str, numbers: Sequence[int]) -> Size:
    shapes = [(inputs, tokens if len(numbers) == len(SHAPES) else 1) for inputs, tokens in SHAPES[: len(numbers)]]
    for inputs in range(3):
        for tokens in range(3 if len(numbers) == len(SHAPES) else 1):
            factor, rest = divmod(numbers[0], shapes[0][0] ** inputs * shapes[0][1] ** tokens)
            size = Size(factor=factor, inputs=inputs, tokens=tokens)
            if not rest and all(size.of(*shape) == number for shape, number in zip(shapes, numbers, strict=True)):
                return size
    raise GraphError(f"the size {name!r} in the graph does not follow from the numbers of inputs and tokens")


def check_blocks(backbone: OnnxBackbone, whole: Whole, config: GraphConfig, rows: Sequence[Encoded] = ()) -> None:
    """Raise GraphError unless blocks give what the uncut graph does, and an input the same alone and together.

    `rows`: inputs of the user, as in `trial.check_alone`.
    """
    try:
        trials = check_alone(backbone, [LENGTHS[:count] for count in BATCHES], TOLERANCE_ALONE, rows)
    except TrialError as error:
        raise GraphError(str(error)) from error
    [last] = config.cuts[-1]
    for trial in trials:
        uncut = whole.run(examples(backbone.inputs, trial.layout), trial.layout)[last.name]
        expected = backbone.answer_of(uncut, trial.layout)
        said = beyond(trial.after[-1][0], expected, TOLERANCE_OF_CUTS, TOLERANCE_ALONE.least_range)
        if said is not None:
            count = trial.layout.num_inputs
            raise GraphError(f"the blocks give {count} inputs other values than the uncut graph {said}")


FILE = "graph.onnx"
Tried = TypeVar("Tried")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How a graph becomes a backbone."""

    cuts: Sequence[Sequence[str]]
    """Between its blocks, in order: the tensors of each, those that exits look at first."""
    codec: NamedSpec
    pixels: Mapping[str, Any] = field(default_factory=dict)
    """Of a codec of images: settings of `Pixels` beside its size and layout."""
    output: str | None = None
    """The tensor that is the answer; None for the only output that can be it."""
    hidden: bool = False
    """Whether that is a hidden state, which a head of our own classifies."""


def take_graph(path: Path, folder: Path, options: GraphOptions, rows: Sequence[Encoded] = ()) -> Pretrained:
    """Put a file's graph into a model's folder, and make a backbone of it, which is tried with `rows` where it rounds.

    A number of inputs that the graph was made for is taken out of it. Raises GraphError for what cannot be cut,
    run, or classify; for inputs that no codec gives; and where blocks do not compute what the uncut graph does.
    """
    model = read_source(path)
    entry = describe_inputs(model.graph, options.codec, options.pixels)
    made_for = free_sizes(model.graph, entry)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as trial:  # what is refused leaves a folder as it was
        write_graph(model, Path(trial), FILE)
        config = _in_any_batch(lambda: _tried(Path(trial), entry, options, rows), Path(trial), entry, path, made_for)
        for name in (FILE, FILE + WEIGHTS_SUFFIX):
            (Path(trial) / name).replace(folder / name)
    return Pretrained(backbone=OnnxBackbone(config, folder), head=_head(config), label_names=None, codec=options.codec)


def answer_of_graph(path: Path, options: GraphOptions) -> str:
    """The tensor that is the answer; raises GraphError for what cannot be run, or classify, or where none is named."""
    return _opened(path, options, lambda graph: graph.output)


def why_not_at(path: Path, options: GraphOptions) -> Mapping[tuple[str, ...], str]:
    """Those of the cuts, each for itself, at which a graph cannot be cut, and why.

    Raises GraphError for what cannot be run, or classify, and for inputs that no codec gives.
    """
    return _opened(path, options, lambda graph: graph.why_not_at(options.cuts))


def _opened(path: Path, options: GraphOptions, look: Callable[[_Graph], Tried]) -> Tried:
    model = read_source(path)
    entry = describe_inputs(model.graph, options.codec, options.pixels)
    made_for = free_sizes(model.graph, entry)
    with TemporaryDirectory() as made:
        folder = Path(made)
        write_graph(model, folder, FILE)
        return _in_any_batch(lambda: look(_Graph.opened(folder, entry, options)), folder, entry, path, made_for)


def _in_any_batch(tried: Callable[[], Tried], folder: Path, entry: Entry, path: Path, made_for: int | None) -> Tried:
    try:
        return tried()
    except GraphError as error:
        if made_for is None or not _reshape_any_batch(folder, entry, made_for):
            raise
        try:
            return tried()
        except GraphError:
            raise GraphError(
                f"{path} was made for batches of {made_for} and cannot be run in others: {error}"
            ) from error


def _tried(folder: Path, entry: Entry, options: GraphOptions, rows: Sequence[Encoded]) -> GraphConfig:
    graph = _Graph.opened(folder, entry, options)
    whole, crossings, sizes = graph.cut([*options.cuts, [graph.output]])
    config = GraphConfig(
        file=FILE,
        sha256=fingerprint(folder, FILE),
        inputs=entry.inputs,
        cuts=crossings,
        outputs="hidden" if options.hidden else _kind(graph.answers),
        sizes=sizes,
        max_length=entry.max_length,
        pixels=entry.pixels,
    )
    whole.check_longest()
    check_blocks(OnnxBackbone(config, folder), whole, config, rows)
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """A graph in a folder, ready to be tried."""

    model: Any
    folder: Path
    entry: Entry
    parts: GraphParts
    output: str
    """The tensor that is the answer."""
    answers: Array
    """Of the first trial."""

    @classmethod
    def opened(cls, folder: Path, entry: Entry, options: GraphOptions) -> _Graph:
        """Raises GraphError where it cannot be run, or gives no classification."""
        model = read_graph(folder, FILE)
        parts = GraphParts(model.graph)
        answers = [options.output] if options.output is not None else [each.name for each in model.graph.output]
        unknown = [name for name in answers if not parts.has(name)]
        if unknown:
            raise GraphError(f"the graph has no tensor {unknown[0]!r}; its outputs are {_outputs(model)}")
        trials = Whole(model, folder, entry, answers).measured()
        output = _answer(answers, trials, hidden=options.hidden)
        return cls(model=model, folder=folder, entry=entry, parts=parts, output=output, answers=trials[0][output])

    def cut(
        self, cuts: Sequence[Sequence[str]]
    ) -> tuple[Whole, tuple[tuple[Crossing, ...], ...], dict[str, Size | tuple[Size, ...]]]:
        """What crosses at each, the last the answer, and the sizes that blocks are fed; raises GraphError."""
        sizes = self._sizes(cuts)
        whole, of_name = self._measured([*(name for cut in cuts for name in cut), *sizes])
        crossings = tuple(tuple(crossing(name, of_name[name]) for name in cut) for cut in cuts)
        return whole, crossings, {name: sizes_of(name, of_name[name]) for name in sizes}

    def why_not_at(self, cuts: Sequence[Sequence[str]]) -> dict[tuple[str, ...], str]:
        """The cuts that `cut` does not take, each for itself, or no exit can look at, and why; measured at once."""
        refused: dict[tuple[str, ...], str] = {}
        sizes: dict[tuple[str, ...], list[str]] = {}
        for cut in map(tuple, cuts):
            try:
                sizes[cut] = self._sizes([cut, [self.output]])
            except GraphError as error:
                refused[cut] = str(error)
        _, of_name = self._measured([name for cut, read in sizes.items() for name in (*cut, *read)] or [self.output])
        for cut, read in sizes.items():
            try:
                crossings = [crossing(name, of_name[name]) for name in cut]
                for name in read:
                    sizes_of(name, of_name[name])
                if why := why_no_exit([each.spec() for each in crossings]):
                    refused[cut] = why
            except GraphError as error:
                refused[cut] = str(error)
        return refused

    def _sizes(self, cuts: Sequence[Sequence[str]]) -> list[str]:
        """That its blocks are fed; raises GraphError where the cuts do not part it."""
        codec = [each.name for each in self.entry.inputs if each.source == "codec"]
        layout = {each.name for each in self.entry.inputs if each.source != "codec"}
        check_cuts(self.parts, cuts, codec, layout)
        return sizes_needed(self.parts, cuts, codec, layout)

    def _measured(self, names: Sequence[str]) -> tuple[Whole, dict[str, list[Array]]]:
        """Tensors in the trials."""
        whole = Whole(self.model, self.folder, self.entry, names)
        trials = whole.measured()
        return whole, {name: [trial[name] for trial in trials] for name in names}


def _answer(names: Sequence[str], trials: Sequence[Mapping[str, Array]], *, hidden: bool) -> str:
    """Which tensor is the answer; raises GraphError where that is none, or not said."""

    def can_be(name: str) -> bool:
        first, other = trials[0][name], trials[1][name]
        if first.dtype.kind != "f":
            return False
        if hidden:
            return first.ndim >= 2
        inputs = len(first), len(other)
        return first.ndim == 2 and inputs == (2, 3) and first.shape[1] >= 2 and first.shape[1] == other.shape[1]

    found = [name for name in names if can_be(name)]
    if len(found) == 1:
        return found[0]
    described = ", ".join(f"{name!r} {list(trials[0][name].shape)}" for name in names)
    if not found:
        raise GraphError(
            f"the graph's answer is no classification: of two inputs it gives {described}; two or more numbers for "
            "each input are needed"
        )
    raise GraphError(f"several of the graph's outputs can be the answer, name one (--output): {described}")


def _kind(answers: Array) -> Outputs:
    """Whether answers (B, C) are probabilities."""
    sums = np.abs(answers.sum(1) - 1)
    return "probabilities" if (answers >= 0).all() and (sums < 1e-3).all() else "logits"


def _head(config: GraphConfig) -> FinalHead | None:
    if config.outputs == "hidden":
        return None
    [last] = config.cuts[-1]
    return FinalHead(style="given", pooling="mean", num_outputs=last.shape[0], weights={})


def _reshape_any_batch(folder: Path, entry: Entry, made_for: int) -> bool:
    """Let every `Reshape` that names the number of inputs take any; says whether there was one."""
    import onnx
    from onnx import numpy_helper

    model = read_graph(folder, FILE)
    graph, parts = model.graph, GraphParts(model.graph)
    free = parts.free({each.name for each in entry.inputs if each.source != "codec"})
    changed = False
    for index, node in enumerate(graph.node):
        if node.op_type != "Reshape" or node.input[0] in free:
            continue
        shape = _constant(parts, node.input[1])
        if shape is None or shape.ndim != 1 or not len(shape) or shape[0] != made_for:
            continue
        opened = graph.initializer.add()
        opened.CopyFrom(numpy_helper.from_array(np.array([0, *shape[1:]], dtype=np.int64), f"any_batch_{index}"))
        node.input[1] = opened.name
        changed = True
    if changed:
        onnx.save_model(model, folder / FILE)
    return changed


def _constant(parts: GraphParts, name: str) -> Array | None:
    from onnx import numpy_helper

    node = parts.node_of(name)
    tensor = parts.weights.get(name)
    if node is not None and node.op_type == "Constant":
        [value] = node.attribute
        if value.name == "value_ints":
            return np.array(value.ints)
        tensor = value.t if value.name == "value" else None
    return None if tensor is None else np.asarray(numpy_helper.to_array(tensor))


def _outputs(model: Any) -> str:
    return ", ".join(each.name for each in model.graph.output)
