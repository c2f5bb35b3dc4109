"""Sites: places in a graph where the model can be cut and a ramp can be added (Apparate, section 3.1).

At a site, one or a few tensors carry all information from the inputs to the outputs. Apparate uses operators that are
cut vertices of the graph. Here the vertices are tensors, because ramps read tensors and tensors pass between blocks.
Operators such as `Shape`, which only read sizes, are ignored: else hardly any vertex would cut a transformer.

Beyond Apparate, two or three tensors are a site where no single tensor is. For example, a mask that every layer reads
cuts the graph only together with the hidden state. A cut is defined by the operators that have run; the tensors that
other operators read cross it. The cheapest cut is a minimum cut of a flow network with the bytes of tensors as
capacities, and with edges of infinite capacity from every operator back to its inputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
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


def kind_of(op: str) -> OperatorKind:
    """Returns the kind of an operator or layer with a name such as `Relu`, `_softmax` or `BatchNorm2d`."""
    name = _normalized(op)
    return _KINDS.get(name, "work" if _WORK.search(name) else "light")


def check_operator(model: str, op: str, node: str, *, has_graph: bool = False) -> None:
    """Raises GraphError for an operator that runs a subgraph depending on the contents of inputs."""
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


SIZE_OPERATORS = ("Shape", "Size")
"""ONNX operators that read only the size of a tensor. A part without the tensor can be fed with their results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A subgraph that computes some tensors."""

    operators: tuple[int, ...]
    """The indices of its operators in `Dataflow.operators`, ascending."""
    inputs: tuple[str, ...]
    """The tensors and weights that it reads."""
    sizes: tuple[str, ...]
    """Results of `SIZE_OPERATORS` that it must be fed, because it does not have the tensors themselves."""


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
        """The inputs that follow from the lengths of inputs: masks and positions.

        Token types are not among them, because they also distinguish the texts of a pair.
        """
        roles = {name: layout_role(name) for name in self.inputs if len(self.shapes.get(name, (0, 0))) == 2}
        return frozenset(name for name, role in roles.items() if role in ("mask", "positions"))

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
            if each.op not in SIZE_OPERATORS and not reached.isdisjoint(each.inputs):
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
            if maker.op in SIZE_OPERATORS and maker.inputs[0] not in known:
                sizes[name] = None
            elif makers[name] not in operators:
                operators.add(makers[name])
                needed += maker.inputs
        return Part(operators=tuple(sorted(operators)), inputs=tuple(inputs), sizes=tuple(sizes))

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

    Every live operator is on such a path. So a tensor is on all paths if no other tensor passes from operators before
    it to later ones, and no later operator draws random numbers.
    """
    read = {name: place for place, each in enumerate(flow.live) for name in each.inputs}  # the last place
    read = {name: place for name, place in read.items() if name not in flow.free}
    read |= dict.fromkeys(set(flow.outputs) - flow.free, len(flow.live))
    last_random = max((place for place, each in enumerate(flow.live) if each.kind == "random"), default=-1)
    waiting = set(flow.inputs) & read.keys()
    cuts: list[str] = []
    for place, each in enumerate(flow.live):
        waiting = {name for name in waiting.union(each.outputs) if read.get(name, -1) > place}
        if len(waiting) == 1 and place >= last_random:
            cuts += waiting - {*flow.inputs, *cuts}
    return tuple(cuts)


def find_sites(flow: Dataflow) -> tuple[Site, ...]:
    """Returns one site per run of light operators, because a cut costs the same anywhere between two work operators.

    The site is the last cut tensor of the run, such as the output of ReLU after Conv-BN-ReLU. If the run pools each
    input to a vector, it is the last cut tensor before the pooling, because ramps have their own pooling. There is no
    site before the first work operator, or after the last one, which is the classifier.
    """
    tensors = cut_tensors(flow)
    regions = regions_of(flow, tensors)
    has_work = [any(operator.kind == "work" for operator in operators) for operators in regions]
    sites = []
    for run in _runs(tensors, has_work):
        before_pooling = [name for name in run if not _is_vector(flow, name)]
        sites.append(Site(tensors=((before_pooling or run)[-1],)))
    return tuple(sites)


def regions_of(flow: Dataflow, tensors: Iterable[str]) -> tuple[tuple[Operator, ...], ...]:
    """Returns the live operators before the first of these cut tensors, between each two, and after the last."""
    index_of = {name: index for index, name in enumerate(tensors)}
    region_of: dict[str, int] = {}
    regions: list[list[Operator]] = [[] for _ in range(len(index_of) + 1)]
    for operator in flow.live:
        region = max((region_of.get(name, 0) for name in operator.inputs if name not in flow.free), default=0)
        regions[region].append(operator)
        region_of.update({name: index_of[name] + 1 if name in index_of else region for name in operator.outputs})
    return tuple(map(tuple, regions))


def _runs(tensors: tuple[str, ...], has_work: list[bool]) -> list[list[str]]:
    """Returns groups of cut tensors with only light operators between them, from the first work to the last."""
    runs: list[list[str]] = []
    for index, name in enumerate(tensors):
        if not any(has_work[: index + 1]) or not any(has_work[index + 1 :]):
            continue
        if has_work[index] or not runs:
            runs.append([])
        runs[-1].append(name)
    return runs


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
MOST_TRIED = 200
"""The most operators of a region after which a cut set is sought. Each needs a minimum cut."""
_START, _END = ("start", ""), ("end", "")


def with_cut_sets(flow: Dataflow, sites: Sequence[Site], *, long: float = LONG) -> tuple[Site, ...]:
    """Returns the sites, and in the long regions between them also sets of two or three tensors.

    The length of a region is its share of the seconds or, if these were not measured, of the work operators.
    """
    measured = sites
    if any(site.seconds_share is None for site in sites):
        measured = with_shares(sites, flow, flow.outputs, {each.name: 1.0 for each in flow.live if each.kind == "work"})
    ends = [0.0, *(site.seconds_share or 0.0 for site in measured), 1.0]
    regions = regions_of(flow, [site.tensors[0] for site in sites])
    result: list[Site] = []
    for (begin, end), region, site in zip(pairwise(ends), regions, [*sites, None], strict=True):
        if end - begin > long:
            result += cut_sets_in(flow, region)
        if site is not None:
            result.append(site)
    return tuple(result)


def cut_sets_in(flow: Dataflow, region: Sequence[Operator]) -> Iterator[Site]:
    """Yields sets of tensors that cut a region, in their order.

    Of the cheapest cuts after each work operator, these are the ones that are cheaper than their neighbours.
    """
    work = [each for each in region if each.kind == "work"]
    tried = work[:: max(1, -(-len(work) // MOST_TRIED))]
    cuts = [cheapest_cut(flow, region, last) for last in tried]
    latest: frozenset[str] = frozenset()
    for ran, is_minimum in zip(cuts, _local_minima(_costs(flow, region, tried, cuts)), strict=True):
        if ran is None or not is_minimum or not latest < ran:
            continue
        crossing = crossing_tensors(flow, region, ran)
        if len(crossing) > 1:
            latest = ran
            yield Site(tensors=_most_work_first(flow, crossing))


def _costs(
    flow: Dataflow, region: Sequence[Operator], tried: Sequence[Operator], cuts: Sequence[frozenset[str] | None]
) -> list[float]:
    """Returns the bytes that cross before the region, at each cut, and after it; infinite at the model's inputs."""

    def cost(ran: frozenset[str]) -> float:
        return sum(flow.bytes_per_input.get(name, inf) for name in crossing_tensors(flow, region, ran))

    nothing, everything = frozenset[str](), frozenset(each.name for each in region)
    at_inputs = not crossing_tensors(flow, region, nothing).isdisjoint(flow.inputs)
    costs = [inf if at_inputs else cost(nothing)]
    for last, ran in zip(tried, cuts, strict=True):
        no_cut = inf if _work_after(region, last) else cost(everything)
        costs.append(no_cut if ran is None else cost(ran))
    return [*costs, cost(everything)]


def _local_minima(costs: Sequence[float]) -> Iterator[bool]:
    """Yields for all costs but the first and the last whether the next different cost on either side is higher."""
    levels = [(cost, len(list(group))) for cost, group in groupby(costs)]
    is_minimum: list[bool] = []
    for k, (cost, count) in enumerate(levels):
        before = levels[k - 1][0] if k else inf
        after = levels[k + 1][0] if k + 1 < len(levels) else inf
        is_minimum += [before > cost < after] * count
    yield from is_minimum[1:-1]


def crossing_tensors(flow: Dataflow, region: Sequence[Operator], ran: frozenset[str]) -> frozenset[str]:
    """Returns the tensors that are read by operators which have not run, in the region or after it."""
    waiting = [each for each in region if each.name not in ran]
    computed = {name for each in region if each.name in ran for name in each.outputs}
    later = {name for each in waiting for name in each.outputs}
    read = {name for each in waiting for name in each.inputs} - flow.free
    return frozenset((read | (computed & _outgoing(flow, region))) - later)


def _most_work_first(flow: Dataflow, tensors: Iterable[str]) -> tuple[str, ...]:
    """Returns tensors by the amount of work on which they depend, so that a ramp reads a hidden state, not a mask."""
    places = {name: place for place, each in enumerate(flow.live) for name in each.outputs}

    def work(name: str) -> tuple[int, int]:
        before = flow.before((name,))
        return sum(each.kind == "work" and each.name in before for each in flow.live), places.get(name, -1)

    return tuple(sorted(tensors, key=work, reverse=True))


def _outgoing(flow: Dataflow, region: Sequence[Operator]) -> frozenset[str]:
    """Returns the tensors of a region that are outputs of the model or are read after the region."""
    inside = {each.name for each in region}
    read = {name for each in flow.live if each.name not in inside for name in each.inputs}
    return frozenset(name for each in region for name in each.outputs if name in read or name in flow.outputs)


def cheapest_cut(flow: Dataflow, region: Sequence[Operator], last: Operator) -> frozenset[str] | None:
    """Returns the operators that have run at the cheapest cut after `last`; None if there is no work after it.

    The cheapest cut has the fewest bytes. If it has too many tensors, the cut with the fewest tensors is returned.
    """
    work_after = _work_after(region, last)
    if not work_after:
        return None
    for count_first in (False, True):
        ran = _minimum_cut(flow, region, last, work_after, count_first=count_first)
        if len(crossing_tensors(flow, region, ran)) <= MOST_TENSORS:
            return ran
    return None


def _work_after(region: Sequence[Operator], last: Operator) -> list[Operator]:
    """Returns the work operators that depend on outputs of `last`."""
    reached = set(last.outputs)
    work = []
    for each in region:
        if reached.intersection(each.inputs):
            reached.update(each.outputs)
            if each.kind == "work":
                work.append(each)
    return work


def _minimum_cut(
    flow: Dataflow, region: Sequence[Operator], last: Operator, work_after: Sequence[Operator], *, count_first: bool
) -> frozenset[str]:
    """Returns the operators before the minimum cut; `count_first`: of the fewest tensors, rather than bytes."""
    import networkx as nx

    graph = nx.DiGraph()
    infinite = sum(flow.bytes_per_input.values()) + 1

    def capacity(name: str) -> int:
        return flow.bytes_per_input.get(name, infinite) + (infinite if count_first else 0)

    def add_read(name: str, reader: tuple[str, str]) -> None:
        graph.add_edge(("tensor", name), reader)  # no capacity means infinite
        maker = ("operator", flow.maker[name].name) if name in inside else _START
        graph.add_edge(maker, ("tensor", name), capacity=capacity(name))
        if maker != _START:
            graph.add_edge(reader, maker)

    inside = {name for each in region for name in each.outputs}
    for each in region:
        for name in set(each.inputs) - flow.free:
            add_read(name, ("operator", each.name))
    for name in _outgoing(flow, region):
        add_read(name, _END)
    graph.add_edge(_START, ("operator", last.name))
    for each in work_after:
        graph.add_edge(("operator", each.name), _END)
    _, (ran, _) = nx.minimum_cut(graph, _START, _END)
    return frozenset(name for kind, name in ran if kind == "operator")
