"""Sites: places in a graph where the model can be cut and a ramp can be added (Apparate, section 3.1).

At a site, one or a few tensors carry all information from the inputs to the outputs. Apparate uses operators that are
cut vertices of the graph. Here the vertices are tensors, because ramps read tensors and tensors pass between blocks.
Operators such as `Shape`, which only read sizes, are ignored: else hardly any vertex would cut a transformer.

Beyond Apparate, two or three tensors are a site where no single tensor is. For example, a mask that every layer reads
cuts the graph only together with the hidden state. A cut is a place in the order of the operators; the tensors that
operators behind it read cross it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import inf
from typing import Any, Literal

from earlyexit.errors import GraphError

OperatorKind = Literal["work", "light", "sizes", "random"]
"""`work`: products with weights, attention, recurrence, and operators of unknown domains. `light`: all others, such as
elementwise operators, norms, activations, pooling, and changes of shape. `sizes`: operators that read only the sizes of
their inputs. `random`: operators that draw random numbers, so that two runs give different results."""
_WORK = re.compile(
    r"conv(?!ert)|matmul|(?<![auy])mm|gemm|(?<!quantize)(?<!upsamplebi)linear|attention|einsum|tensordot|embed"
    r"|lstm|gru|rnn|fft|dft|stft|linalg|cdist|gridsampl|ensemble|svm|\."
)
"""Parts of the names of `work` operators and layers of torch and ONNX, in lower case and without underscores."""
_SIZES = """shape size numel dim eye eyelike symsize symnumel symstride newzeros newones newfull newempty
    newemptystrided zeroslike oneslike fulllike emptylike"""
_RANDOM = """rand randn randint normal bernoulli multinomial randlike randnlike randintlike randomnormal randomuniform
    randomnormallike randomuniformlike"""
_BRANCHING = "cond whileloop scan mapimpl associativescan if loop sequencemap"
_KINDS: Mapping[str, OperatorKind] = {
    **dict.fromkeys(_SIZES.split(), "sizes"),
    **dict.fromkeys(_RANDOM.split(), "random"),
}

LOOKUPS = {"Gather", "aten.embedding.default", "aten.index.Tensor", "aten.index_select.default"}
"""Operators whose second input has the numbers of rows of the first, a table."""
SAME_VALUES = {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "aten._to_copy.default"}
"""Operators that may be between token ids and the table."""


def kind_of(op: str) -> OperatorKind:
    """Returns the kind of an operator or layer with a name such as `Relu`, `_softmax` or `BatchNorm2d`."""
    name = _normalized(op)
    return _KINDS.get(name, "work" if _WORK.search(name) else "light")


def check_operator(model: str, op: str, node: str, *, has_graph: bool = False) -> None:
    """Raises GraphError for an operator that runs a subgraph depending on inputs, or quantizes a batch as a whole."""
    if _normalized(op).startswith("dynamicquantize"):
        raise GraphError(f"{model}: {op} ({node}) mixes the inputs of a batch; use the float32 file")
    if has_graph or _normalized(op) in _BRANCHING.split():
        raise GraphError(f"{model}: {op} ({node}) is control flow that depends on inputs: such models cannot be cut")


def _normalized(op: str) -> str:
    return op.lower().replace("_", "")


LayoutRole = Literal["mask", "zeros", "positions"]
"""The role of an input (B, T) that follows from the lengths alone: the mask of tokens, token types (zeros, if there is
a single text), or the positions of tokens."""
ROLES: Mapping[str, LayoutRole] = {"mask": "mask", "type": "zeros", "segment": "zeros", "position": "positions"}
"""Roles by a part of the input's name, as all exporters choose it."""


def layout_role(name: str) -> LayoutRole | None:
    """Returns an input's role by its name; None for tokens and all other inputs."""
    return next((role for part, role in ROLES.items() if part in name.lower()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node of a model's graph."""

    name: str
    """The unique name of the node."""
    op: str
    """The name of the operator, such as `Conv` or `aten.conv2d.default`."""
    kind: OperatorKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


SHAPE = "Shape"
"""The ONNX operator that reads the shape of a tensor. A part without the tensor can be fed with its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A subgraph that computes some tensors."""

    operators: tuple[int, ...]
    """The indices of its operators in `Dataflow.operators`, ascending."""
    inputs: tuple[str, ...]
    """The tensors and weights that it reads."""
    sizes: tuple[str, ...]
    """Results of `SHAPE` that it must be fed, because it does not have the tensors themselves."""


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """The graph of a model. Its operators are in an order in which they can run."""

    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    """The model's inputs, without weights."""
    outputs: tuple[str, ...]
    weights: frozenset[str]
    """Tensors that are stored in the model."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The known shapes of tensors for `batch` inputs, including the batch axis."""
    bytes_per_input: Mapping[str, int] = field(default_factory=dict)
    """The bytes of one input, including padding, for tensors with a known shape."""
    batch: int = 1
    arrays: bool = False
    """Whether inputs are arrays of the data, none of which follows from lengths."""

    def measured(self, values: Mapping[str, Any]) -> Dataflow:
        """Returns the graph with the shapes and bytes of tensors, whose values for a batch are given."""
        batch = next((len(values[name]) for name in self.inputs if values[name].ndim), 1)
        return replace(
            self,
            shapes={name: tuple(each.shape) for name, each in values.items()},
            bytes_per_input={name: each.nbytes // batch for name, each in values.items()},
            batch=batch,
        )

    def bytes_of(self, tensors: Iterable[str]) -> int | None:
        """Returns the bytes of one input in all of these tensors; None if a shape is unknown."""
        sizes = [self.bytes_per_input.get(name) for name in tensors]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @cached_property
    def layout(self) -> frozenset[str]:
        """The inputs that follow from the lengths of inputs: masks and positions with the shape of another input.

        Token types are not among them, because they also distinguish the texts of a pair.
        """
        shapes = {} if self.arrays else {name: self.shapes.get(name, (0, 0)) for name in self.inputs}
        named = {name for name in shapes if layout_role(name) in ("mask", "positions")}
        tokens = {shapes[name] for name in shapes.keys() - named}
        return frozenset(name for name in named if len(shapes[name]) == 2 and shapes[name] in tokens)

    @cached_property
    def free(self) -> frozenset[str]:
        """The tensors that need not cross a cut, because every block can compute them.

        These are weights, constants, sizes of tensors, lengths of inputs, and all results of these alone.
        """
        return self.known(self.layout)

    def known(self, given: Iterable[str]) -> frozenset[str]:
        """Returns the tensors that can be computed from `given`, from weights, and from sizes of tensors."""
        known = {*given, *self.weights}
        for operator in self.operators:
            if operator.kind == "sizes" or (operator.kind != "random" and known.issuperset(operator.inputs)):
                known.update(operator.outputs)
        return frozenset(known)

    def part(self, given: Collection[str], free: Collection[str], wanted: Sequence[str]) -> Part:
        """Returns the part that computes the tensors `wanted` from the tensors `given` and the inputs `free`.

        Raises KeyError with the name of a tensor that is needed in addition.
        """
        known, reached = self.known({*given, *free}), set(given)
        for each in self.operators:
            if each.op != SHAPE and not reached.isdisjoint(each.inputs):
                reached.update(each.outputs)
        makers = {name: k for k, each in enumerate(self.operators) for name in each.outputs}
        operators: set[int] = set()
        inputs: dict[str, None] = {}
        sizes: dict[str, None] = {}
        needed = [name for name in reversed(wanted) if name not in given]
        while needed:
            name = needed.pop()
            if name in given or name in free or name in self.weights:
                inputs[name] = None
                continue
            if name not in makers or (name not in known and name not in reached):
                raise KeyError(name)
            maker = self.operators[makers[name]]
            if maker.op == SHAPE and maker.inputs[0] not in known:
                sizes[name] = None
            elif makers[name] not in operators:
                operators.add(makers[name])
                needed += maker.inputs
        return Part(operators=tuple(sorted(operators)), inputs=tuple(inputs), sizes=tuple(sizes))

    def tables(self, name: str) -> list[str]:
        """Returns the weights of which rows are looked up by the values of an input."""
        same_values, tables = {name}, list[str]()
        for each in self.operators:
            if each.op in LOOKUPS and each.inputs[0] in self.weights and same_values.intersection(each.inputs[1:2]):
                tables.append(each.inputs[0])
            elif each.op in SAME_VALUES and each.inputs[0] in same_values:
                same_values.update(each.outputs)
        return tables

    @cached_property
    def live(self) -> tuple[Operator, ...]:
        """The operators on a path from the contents of inputs to the outputs."""
        return self._leading_to(self.outputs, self.free)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The tensors on a path from the contents of inputs to the outputs, without the inputs."""
        read = {name for each in self.live for name in each.inputs}.union(self.outputs) - self.free
        return tuple(name for each in self.live for name in each.outputs if name in read)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The index in `live` of the operator that computes each tensor."""
        return {name: place for place, each in enumerate(self.live) for name in each.outputs}

    @cached_property
    def crossings(self) -> Mapping[int, frozenset[str]]:
        """The tensors that cross a cut after each operator, by the operator's index in `live`.

        These are the inputs and results so far that later operators read or that are outputs. A cut before an operator
        that draws random numbers is not among them.
        """
        last_read = {name: place for place, each in enumerate(self.live) for name in each.inputs}
        last_read |= dict.fromkeys(self.outputs, len(self.live))
        last_random = max((place for place, each in enumerate(self.live) if each.kind == "random"), default=0)
        waiting, crossings = set(self.inputs), dict[int, frozenset[str]]()
        for place, each in enumerate(self.live):
            waiting = {name for name in waiting.union(each.outputs) - self.free if last_read.get(name, -1) > place}
            if place >= last_random:
                crossings[place] = frozenset(waiting)
        return crossings

    @cached_property
    def maker(self) -> Mapping[str, Operator]:
        """The operator that computes each tensor. Inputs and weights have no operator."""
        return {tensor: operator for operator in self.operators for tensor in operator.outputs}

    def before(self, tensors: Iterable[str]) -> frozenset[str]:
        """Returns the names of all operators on which some tensors depend."""
        return frozenset(each.name for each in self._leading_to(tensors, frozenset()))

    def _leading_to(self, tensors: Iterable[str], excluded: frozenset[str]) -> tuple[Operator, ...]:
        """Returns the operators on which some tensors depend, ignoring paths through the tensors `excluded`."""
        wanted, operators = set(tensors) - excluded, []
        for operator in reversed(self.operators):
            if wanted.intersection(operator.outputs):
                wanted.update(set(operator.inputs) - excluded)
                operators.append(operator)
        return tuple(reversed(operators))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place where a model can be cut and a ramp can be added."""

    tensors: tuple[str, ...]
    """The tensors that cross the cut. Ramps read the first one, which depends on the most work."""
    seconds_share: float | None = None
    """The share of the model's time that is spent before the site; None if it was not measured."""


def cut_tensors(flow: Dataflow) -> tuple[str, ...]:
    """Returns the tensors, except the inputs, that are on every path from an input to an output, in their order.

    Every live operator is on such a path. So a tensor is on all paths if no other tensor crosses with it.
    """
    alone = [name for crossing in flow.crossings.values() if len(crossing) == 1 for name in crossing]
    return tuple(name for name in dict.fromkeys(alone) if name not in flow.inputs)


def find_sites(flow: Dataflow) -> tuple[Site, ...]:
    """Returns one site per run of light operators, because a cut costs the same anywhere between two work operators.

    The site is the last cut tensor of the run, such as the output of ReLU after Conv-BN-ReLU. If the run pools each
    input to a vector, it is the last cut tensor before the pooling, because ramps have their own pooling. There is no
    site before the first work operator, or after the last one, which is the classifier.
    """
    num_work = list(accumulate(each.kind == "work" for each in flow.live))
    sites = []
    for count, names in groupby(cut_tensors(flow), key=lambda name: num_work[flow.places[name]]):
        run = list(names)
        before_pooling = [name for name in run if not _is_vector(flow, name)]
        if 0 < count < num_work[-1]:
            sites.append(Site(tensors=((before_pooling or run)[-1],)))
    return tuple(sites)


def _is_vector(flow: Dataflow, tensor: str) -> bool:
    """Whether a tensor has one vector per input: all axes but one have size 1."""
    shape = flow.shapes.get(tensor)
    return shape is not None and sum(size > 1 for size in shape[1:]) <= 1


REPEATS = 10
"""How often an operator is timed. The shortest run counts, because other processes can only add time, and may delay the
same operator in most runs."""


def with_shares(
    sites: Sequence[Site], flow: Dataflow, outputs: Sequence[str], seconds: Mapping[str, float]
) -> tuple[Site, ...]:
    """Returns the sites with `seconds_share`.

    `flow`: the timed graph. Only operators on which `outputs` depend count. `seconds`: the time of each operator by its
    name; 0 for others.
    """
    model = flow.before(outputs)
    total = sum(seconds.get(name, 0.0) for name in model)
    if not total:
        return tuple(sites)

    def share(site: Site) -> float:
        return sum(seconds.get(name, 0.0) for name in flow.before(site.tensors) & model) / total

    return tuple(replace(site, seconds_share=share(site)) for site in sites)


MOST_TENSORS = 3
LONG = 0.1
"""Cut sets are sought between two sites with more than this share of the model's time between them."""


def with_cut_sets(flow: Dataflow, sites: Sequence[Site], *, long: float = LONG) -> tuple[Site, ...]:
    """Returns the sites, and in the long regions between them also sets of two or three tensors.

    The length of a region is its share of the seconds or, if these were not measured, of the work operators.
    """
    measured = sites
    if any(site.seconds_share is None for site in sites):
        measured = with_shares(sites, flow, flow.outputs, {each.name: 1.0 for each in flow.live if each.kind == "work"})
    ends = [0.0, *(site.seconds_share or 0.0 for site in measured), 1.0]
    places = [-1, *(flow.places[site.tensors[0]] for site in sites), len(flow.live) - 1]
    result: list[Site] = []
    for (begin, end), (before, last), site in zip(pairwise(ends), pairwise(places), [*sites, None], strict=True):
        if end - begin > long:
            result += cut_sets_between(flow, before, last)
        if site is not None:
            result.append(site)
    return tuple(result)


def cut_sets_between(flow: Dataflow, before: int, last: int) -> Iterator[Site]:
    """Yields sets of tensors that cut the graph between two places in `flow.live`, in their order.

    A candidate is the cheapest cut between two successive work operators; of equally cheap ones, the last. The sets are
    those of the candidates that are cheaper than their neighbours.
    """
    runs: list[list[int]] = []
    for place in range(before + 1, last + 1):
        if flow.live[place].kind == "work":
            runs.append([])
        if runs:
            runs[-1].append(place)

    def cost(place: int) -> float:
        """Returns the bytes that cross after a place; infinite for too many tensors, and before the first operator."""
        crossing = flow.crossings.get(place, ())
        num_bytes = flow.bytes_of(crossing) if 0 < len(crossing) <= MOST_TENSORS else None
        return inf if num_bytes is None else num_bytes

    candidates = [min(reversed(run), key=cost) for run in runs[:-1]]
    costs = [cost(before), *map(cost, candidates), cost(last)]
    for place, is_minimum in zip(candidates, _local_minima(costs), strict=True):
        if is_minimum and len(flow.crossings[place]) > 1:
            yield Site(tensors=_most_work_first(flow, flow.crossings[place]))


def _local_minima(costs: Sequence[float]) -> Iterator[bool]:
    """Yields for all costs but the first and the last whether the next different cost on either side is higher."""
    levels = [(cost, len(list(group))) for cost, group in groupby(costs)]
    is_minimum: list[bool] = []
    for k, (cost, count) in enumerate(levels):
        before = levels[k - 1][0] if k else inf
        after = levels[k + 1][0] if k + 1 < len(levels) else inf
        is_minimum += [before > cost < after] * count
    yield from is_minimum[1:-1]


def _most_work_first(flow: Dataflow, tensors: Iterable[str]) -> tuple[str, ...]:
    """Returns tensors by the amount of work on which they depend, so that a ramp reads a hidden state, not a mask."""

    def work(name: str) -> tuple[int, int]:
        before = flow.before((name,))
        return sum(each.kind == "work" and each.name in before for each in flow.live), flow.places.get(name, -1)

    return tuple(sorted(tensors, key=work, reverse=True))
