"""Sites: where ramps can go, since some tensors carry all that a model knows of its inputs (Apparate, section 3.1).

Apparate takes operators that are cut vertices of the graph. Ramps read tensors, and tensors cross between blocks, so
tensors are the vertices here. Only paths from the inputs to the outputs count: with the edges of `Shape`, which reads
how large a tensor is, hardly any vertex would cut a transformer.

Beyond Apparate, sets of two or three tensors are sites where no single tensor carries everything. A mask that the model
computes and reads in every layer runs beside the hidden state, so no vertex cuts it; both together do. A cut is a set
of operators that have run, with everything that they need; the tensors that other operators read cross it. The
cheapest cut is a minimum cut, with the bytes of tensors as capacities and edges of unlimited capacity back from every
operator to its inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from math import inf
from typing import Literal

from earlyexit.errors import GraphError

OperatorKind = Literal["work", "light", "sizes", "random"]
"""`work`: products with weights, attention, recurrence, and every unknown operator. `light`: element by element, norms,
activations, pooling, other shapes of the same values. `sizes`: it reads how large its inputs are, not what they hold.
`random`: it draws numbers, so two runs give two results."""
_ACTIVATIONS = """relu relu6 leakyrelu prelu elu selu celu gelu silu mish sigmoid tanh softplus softsign hardtanh
    hardswish hardsigmoid logsigmoid softmax logsoftmax glu dropout dropout1d dropout2d alphadropout thresholdedrelu
    fastgelu quickgelu biasgelu swish clip erf hardmax shrink"""
_ARITHMETIC = """add sub rsub mul div pow sqrt rsqrt neg abs exp log log1p expm1 sin cos reciprocal floor ceil round
    sign clamp clampmin clampmax minimum maximum where maskedfill eq ne gt ge lt le and or not xor logicaland logicalor
    logicalnot bitwiseand bitwiseor bitwisenot isnan isinf sumtosize square lerp addcmul addcdiv truediv floordiv iadd
    imul sum mean max min mod equal greater less greaterorequal lessorequal"""
_NORMS = """batchnorm batchnorm1d batchnorm2d batchnorm3d nativebatchnorm nativebatchnormlegitnotraining layernorm
    nativelayernorm groupnorm nativegroupnorm instancenorm instancenorm2d rmsnorm normalize localresponsenorm
    batchnormalization layernormalization instancenormalization groupnormalization rmsnormalization lrn lpnormalization
    meanvariancenormalization simplifiedlayernormalization skiplayernormalization"""
_SHAPES = """view reshape flatten unflatten transpose permute t unsqueeze squeeze expand expandas repeat
    repeatinterleave cat concat concatenate stack split splitwithsizes chunk unbind slice select index indexselect
    gather narrow unfold pad constantpadnd zeropad2d contiguous clone detach alias to typeas tocopy float half bool int
    long identity pixelshuffle pixelunshuffle channelshuffle upsample interpolate upsamplenearest2d upsamplebilinear2d
    roll flip tril triu movedim swapaxes getitem liftfreshcopy unsafeview cast castlike tile gatherelements gathernd
    depthtospace spacetodepth resize quantizelinear dequantizelinear dynamicquantizelinear"""
_POOLING = """maxpool maxpool1d maxpool2d maxpool3d maxpool2dwithindices avgpool1d avgpool2d avgpool3d averagepool
    lppool adaptiveavgpool1d adaptiveavgpool2d adaptivemaxpool2d globalaveragepool globalmaxpool globallppool amax amin
    argmax argmin topk cumsum var std varmean any all norm vectornorm reducemean reducemax reducemin reducesum
    reducesumsquare reducel1 reducel2 reducelogsum reducelogsumexp reduceprod"""
_SIZES = """shape size numel dim getattr eye eyelike symsize symnumel symstride newzeros newones newfull newempty
    newemptystrided zeroslike oneslike fulllike emptylike"""
_RANDOM = """rand randn randint normal bernoulli multinomial randlike randnlike randintlike randomnormal randomuniform
    randomnormallike randomuniformlike"""
_BRANCHING = "cond whileloop scan mapimpl associativescan if loop sequencemap"
_KINDS: Mapping[str, OperatorKind] = {
    **dict.fromkeys(" ".join((_ACTIVATIONS, _ARITHMETIC, _NORMS, _SHAPES, _POOLING)).split(), "light"),
    **dict.fromkeys(_SIZES.split(), "sizes"),
    **dict.fromkeys(_RANDOM.split(), "random"),
}
"""By the name of an operator or layer of torch or ONNX, in lower case and without underscores."""


def kind_of(op: str) -> OperatorKind:
    """Returns the kind of an operator or layer with this name, such as `Relu`, `_softmax` or `BatchNorm2d`."""
    return _KINDS.get(_plain(op), "work")


def check_operator(model: str, op: str, node: str, *, has_graph: bool = False) -> None:
    """Raise GraphError for an operator that runs graphs of its own, depending on what the inputs hold."""
    if has_graph or _plain(op) in _BRANCHING.split():
        raise GraphError(
            f"{model}: {op} ({node}) runs a graph of its own, by what inputs hold: such models cannot be cut"
        )


def _plain(op: str) -> str:
    return op.lower().replace("_", "")


LayoutRole = Literal["mask", "zeros", "positions"]
"""Content of an input (B, T) that follows from the lengths alone: where tokens are, 0 for each token (its type, where
all are of a first text), or each token's position."""
ROLES: Mapping[str, LayoutRole] = {"mask": "mask", "type": "zeros", "segment": "zeros", "position": "positions"}
"""The part of an input's name that tells its role, with all exporters."""


def layout_role(name: str) -> LayoutRole | None:
    """Returns an input's role by its name; None for an input that holds tokens, or anything else."""
    return next((role for part, role in ROLES.items() if part in name.lower()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node of a model's graph."""

    name: str
    """Unique in its model."""
    op: str
    """The operator's name in the model: `Conv`, `aten.conv2d.default`."""
    kind: OperatorKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


SIZE_OPERATORS = ("Shape", "Size")
"""ONNX operators that read only how large a tensor is; their results can be fed to a part that lacks the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What computes some tensors of a graph."""

    operators: tuple[int, ...]
    """Positions in `Dataflow.operators`, ascending."""
    inputs: tuple[str, ...]
    """The given and free tensors, and the weights, that it reads."""
    sizes: tuple[str, ...]
    """Results of `SIZE_OPERATORS` on tensors that it does not have; they are fed."""


class UncutError(GraphError):
    """A cut does not part the graph: something else goes past it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the graph's tensor {name!r} goes past the cut")
        self.name = name


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """Operators in an order in which they can run."""

    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    """The model's inputs without weights."""
    outputs: tuple[str, ...]
    weights: frozenset[str]
    """Tensors that are stored in the model."""
    shapes: Mapping[str, tuple[int, ...]]
    """Known shapes, with the batch axis, for a batch of `batch`. Axes that a model leaves open have the size that its
    reader was given."""
    bytes_per_input: Mapping[str, int]
    """Bytes of one input, with all its padded tokens, where the shape is known."""
    batch: int = 1

    @cached_property
    def layout(self) -> frozenset[str]:
        """The inputs that follow from the lengths of inputs (`Layout`): masks and positions.

        Token types are not among them, since they also tell the texts of a pair apart.
        """
        roles = {name: layout_role(name) for name in self.inputs if len(self.shapes.get(name, (0, 0))) == 2}
        return frozenset(name for name, role in roles.items() if role in ("mask", "positions"))

    @cached_property
    def free(self) -> frozenset[str]:
        """Tensors that need not cross a cut, since every block can compute them.

        These are weights, constants, sizes of tensors, lengths of inputs, and what is computed from these alone.
        """
        return self.known(self.layout)

    def known(self, given: Iterable[str]) -> frozenset[str]:
        """Returns the tensors that can be computed from these, from weights, and from sizes of tensors."""
        known = {*given, *self.weights}
        for operator in self.operators:
            if operator.kind == "sizes" or (operator.kind != "random" and known.issuperset(operator.inputs)):
                known.update(operator.outputs)
        return frozenset(known)

    def part(self, given: Collection[str], free: Collection[str], wanted: Sequence[str]) -> Part:
        """Returns what computes `wanted` of the tensors in `given`, and of the inputs in `free`, which can be read too.

        Raises UncutError naming what it needs besides.
        """
        known, reached = self.known({*given, *free}), set(given)
        for each in self.operators:
            if each.op not in SIZE_OPERATORS and not reached.isdisjoint(each.inputs):
                reached.update(each.outputs)
        makers = {name: k for k, each in enumerate(self.operators) for name in each.outputs}
        operators: set[int] = set()
        read: dict[str, None] = {}
        sizes: dict[str, None] = {}
        todo = [name for name in reversed(wanted) if name not in given]
        while todo:
            name = todo.pop()
            if name in given or name in free or name in self.weights:
                read[name] = None
                continue
            if name not in makers or (name not in known and name not in reached):
                raise UncutError(name)
            maker = self.operators[makers[name]]
            if maker.op in SIZE_OPERATORS and maker.inputs[0] not in known:
                sizes[name] = None
            elif makers[name] not in operators:
                operators.add(makers[name])
                todo += maker.inputs
        return Part(operators=tuple(sorted(operators)), inputs=tuple(read), sizes=tuple(sizes))

    @cached_property
    def live(self) -> tuple[Operator, ...]:
        """Operators on a path from the inputs' content to the outputs, without constants and dead ends."""
        return self._leading_to(self.outputs, self.free)

    @cached_property
    def maker(self) -> Mapping[str, Operator]:
        """The operator that computes each tensor; inputs and weights have none."""
        return {tensor: operator for operator in self.operators for tensor in operator.outputs}

    def before(self, tensors: Iterable[str]) -> frozenset[str]:
        """Returns the names of the operators, free ones included, that some tensors depend on."""
        return frozenset(each.name for each in self._leading_to(tensors, frozenset()))

    def _leading_to(self, tensors: Iterable[str], but: frozenset[str]) -> tuple[Operator, ...]:
        """Returns the operators that some tensors depend on, but not through these."""
        wanted, found = set(tensors) - but, []
        for operator in reversed(self.operators):
            if wanted.intersection(operator.outputs):
                wanted.update(set(operator.inputs) - but)
                found.append(operator)
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place where a model can be cut, and a ramp can look."""

    tensors: tuple[str, ...]
    """What crosses: one tensor, or several of a cut set. Ramps look at the first, which depends on the most work."""
    after: str
    """The name of the operator that computes the first of them."""
    bytes_per_input: int | None
    """Bytes of all of them together; None where a shape is not known."""
    seconds_share: float | None = None
    """The share of the model's time that has passed here; None where it was not measured."""


def cut_tensors(flow: Dataflow) -> tuple[str, ...]:
    """Returns the tensors that every path from an input to an output passes, in order, without the inputs."""
    import networkx as nx

    source, sink = ("end", "inputs"), ("end", "outputs")
    graph = nx.DiGraph()  # of the operators and tensors that are not free
    for name in set(flow.inputs) - flow.free:
        graph.add_edge(source, ("tensor", name))
    for operator in flow.live:
        if operator.kind == "random":
            graph.add_edge(source, ("operator", operator.name))
        for name in set(operator.inputs) - flow.free:
            graph.add_edge(("tensor", name), ("operator", operator.name))
        for name in operator.outputs:
            graph.add_edge(("operator", operator.name), ("tensor", name))
    for name in set(flow.outputs) - flow.free:
        graph.add_edge(("tensor", name), sink)
    if sink not in graph or source not in graph or not nx.has_path(graph, source, sink):
        return ()
    dominator = nx.immediate_dominators(graph, source)
    found = []
    vertex = dominator[sink]
    while vertex != source:
        found.append(vertex)
        vertex = dominator[vertex]
    return tuple(name for kind, name in reversed(found) if kind == "tensor" and name not in flow.inputs)


def find_sites(flow: Dataflow) -> tuple[Site, ...]:
    """Returns one site per run of light operators: between operators that work, all carriers cost the same.

    The site is the last carrier of the run (after Conv-BN-ReLU the ReLU's). Where a pooling leaves one vector of an
    input, it is the last carrier before the pooling, since ramps pool by themselves. No site is before the first
    operator that works, or after the last one, the classifier.
    """
    found = cut_tensors(flow)
    regions = regions_of(flow, found)
    works = [any(operator.kind == "work" for operator in operators) for operators in regions]
    sites = []
    for run in _runs(found, works):
        wide = [name for name in run if not _is_vector(flow, name)]
        sites.append(site_of(flow, ((wide or run)[-1],)))
    return tuple(sites)


def regions_of(flow: Dataflow, chain: Iterable[str]) -> tuple[tuple[Operator, ...], ...]:
    """Returns the live operators before the first of a chain of carriers, between two, and behind the last."""
    place = {name: index for index, name in enumerate(chain)}
    region_of: dict[str, int] = {}
    regions: list[list[Operator]] = [[] for _ in range(len(place) + 1)]
    for operator in flow.live:
        region = max((region_of.get(name, 0) for name in operator.inputs if name not in flow.free), default=0)
        regions[region].append(operator)
        region_of.update({name: place[name] + 1 if name in place else region for name in operator.outputs})
    return tuple(map(tuple, regions))


def _runs(found: tuple[str, ...], works: list[bool]) -> list[list[str]]:
    """Returns carriers in groups without work between them, from the first work to the last."""
    runs: list[list[str]] = []
    for index, name in enumerate(found):
        if not any(works[: index + 1]) or not any(works[index + 1 :]):
            continue
        if works[index] or not runs:
            runs.append([])
        runs[-1].append(name)
    return runs


def _is_vector(flow: Dataflow, tensor: str) -> bool:
    """Whether a tensor holds one vector per input: all axes but one have size 1."""
    shape = flow.shapes.get(tensor)
    return shape is not None and sum(size > 1 for size in shape[1:]) <= 1


def site_of(flow: Dataflow, tensors: tuple[str, ...]) -> Site:
    """Returns the site at which these tensors cross."""
    known = [flow.bytes_per_input.get(name) for name in tensors]
    return Site(
        tensors=tensors,
        after=flow.maker[tensors[0]].name,
        bytes_per_input=None if None in known else sum(each for each in known if each is not None),
    )


REPEATS = 10
"""Runs by which an operator is timed. The shortest counts, since other processes only add time; a scheduler that takes
turns may add to the same operator in most runs, so a median would keep that."""


def with_shares(
    sites: Sequence[Site], flow: Dataflow, outputs: Sequence[str], seconds: Mapping[str, float]
) -> tuple[Site, ...]:
    """Returns the sites with the share of a model's seconds that has passed there.

    `flow`: the graph that was timed, which has the sites' tensors; only operators that lead to `outputs` count.
    `seconds`: by an operator's name; operators without seconds take none.
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
"""The least share of the model's time between two sites for which cut sets are sought."""
MOST_TRIED = 200
"""The most operators of a stretch behind which a set is sought, evenly spaced. Each needs a minimum cut."""
_START, _END = ("start", ""), ("end", "")


def with_cut_sets(flow: Dataflow, sites: Sequence[Site], *, long: float = LONG) -> tuple[Site, ...]:
    """Returns the sites, and sets of two or three tensors in the long stretches between them.

    The sites' shares say how long a stretch is; where a site has none, the number of operators that work does.
    """
    counted = sites
    if any(site.seconds_share is None for site in sites):
        counted = with_shares(sites, flow, flow.outputs, {each.name: 1.0 for each in flow.live if each.kind == "work"})
    ends = [0.0, *(site.seconds_share or 0.0 for site in counted), 1.0]
    regions = regions_of(flow, [site.tensors[0] for site in sites])
    found: list[Site] = []
    for (begin, end), region, site in zip(pairwise(ends), regions, [*sites, None], strict=True):
        if end - begin > long:
            found += cut_sets_in(flow, region)
        if site is not None:
            found.append(site)
    return tuple(found)


def cut_sets_in(flow: Dataflow, region: Sequence[Operator]) -> Iterator[Site]:
    """Yields sets that cut a stretch, each behind the one before it.

    The cheapest set behind every operator that works is found; those are kept whose neighbours are dearer.
    """
    works = [each for each in region if each.kind == "work"]
    tried = works[:: max(1, -(-len(works) // MOST_TRIED))]
    cuts = [cheapest_cut(flow, region, last) for last in tried]
    passed: frozenset[str] = frozenset()
    for ran, lowest in zip(cuts, _lowest(_costs(flow, region, tried, cuts)), strict=True):
        if ran is None or not lowest or not passed < ran:
            continue
        crossing = crossing_tensors(flow, region, ran)
        if len(crossing) > 1:
            passed = ran
            yield site_of(flow, _most_work_first(flow, crossing))


def _costs(
    flow: Dataflow, region: Sequence[Operator], tried: Sequence[Operator], cuts: Sequence[frozenset[str] | None]
) -> list[float]:
    """Returns the bytes that cross before the stretch, at each cut in it, and behind it; inputs are no cut."""

    def cost(ran: frozenset[str]) -> float:
        return sum(flow.bytes_per_input.get(name, inf) for name in crossing_tensors(flow, region, ran))

    nothing, everything = frozenset[str](), frozenset(each.name for each in region)
    begins = not set(crossing_tensors(flow, region, nothing)).isdisjoint(flow.inputs)
    inside = [
        cost(ran) if ran is not None else inf if _behind(region, last) else cost(everything)
        for last, ran in zip(tried, cuts, strict=True)
    ]
    return [inf if begins else cost(nothing), *inside, cost(everything)]


def _lowest(costs: Sequence[float]) -> Iterator[bool]:
    """Yields, for all costs but the first and the last, whether the next other cost on both sides is higher."""
    levels = [(cost, len(list(group))) for cost, group in groupby(costs)]
    flat = [
        lower
        for (before, _), (cost, count), (after, _) in zip(
            [(inf, 0), *levels], levels, [*levels[1:], (inf, 0)], strict=False
        )
        for lower in [before > cost < after] * count
    ]
    yield from flat[1:-1]


def crossing_tensors(flow: Dataflow, region: Sequence[Operator], ran: frozenset[str]) -> frozenset[str]:
    """Returns the tensors that operators of a stretch which have not run, and all behind it, read."""
    waiting = [each for each in region if each.name not in ran]
    made = {name for each in region if each.name in ran for name in each.outputs}
    later = {name for each in waiting for name in each.outputs}
    read = {name for each in waiting for name in each.inputs} - flow.free
    return frozenset((read | (made & _left(flow, region))) - later)


def _most_work_first(flow: Dataflow, tensors: Iterable[str]) -> tuple[str, ...]:
    """Returns tensors by the work that they depend on, so that ramps look at a hidden state before a mask."""
    places = {name: place for place, each in enumerate(flow.live) for name in each.outputs}

    def work(name: str) -> tuple[int, int]:
        before = flow.before((name,))
        return sum(each.kind == "work" and each.name in before for each in flow.live), places.get(name, -1)

    return tuple(sorted(tensors, key=work, reverse=True))


def _left(flow: Dataflow, region: Sequence[Operator]) -> frozenset[str]:
    """Returns the tensors of a stretch that are read behind it, or are outputs."""
    inside = {each.name for each in region}
    read = {name for each in flow.live if each.name not in inside for name in each.inputs}
    return frozenset(name for each in region for name in each.outputs if name in read or name in flow.outputs)


def cheapest_cut(flow: Dataflow, region: Sequence[Operator], last: Operator) -> frozenset[str] | None:
    """Returns the operators that have run at the cheapest cut right behind one; None where no work is behind it.

    The cheapest cut has the fewest bytes; where it has too many tensors, the cut with the fewest tensors is taken.
    """
    behind = _behind(region, last)
    if not behind:
        return None
    for count_first in (False, True):
        ran = _minimum_cut(flow, region, last, behind, count_first=count_first)
        if len(crossing_tensors(flow, region, ran)) <= MOST_TENSORS:
            return ran
    return None


def _behind(region: Sequence[Operator], last: Operator) -> list[Operator]:
    """Returns the operators that work on outputs of `last`."""
    reached = set(last.outputs)
    found = []
    for each in region:
        if reached.intersection(each.inputs):
            reached.update(each.outputs)
            if each.kind == "work":
                found.append(each)
    return found


def _minimum_cut(
    flow: Dataflow, region: Sequence[Operator], last: Operator, behind: Sequence[Operator], *, count_first: bool
) -> frozenset[str]:
    import networkx as nx

    graph = nx.DiGraph()
    endless = sum(flow.bytes_per_input.values()) + 1
    left = _left(flow, region)

    def capacity(name: str) -> int:
        return flow.bytes_per_input.get(name, endless) + (endless if count_first else 0)

    def read(name: str, reader: tuple[str, str]) -> None:
        graph.add_edge(("tensor", name), reader)  # without a capacity: endless
        maker = ("operator", flow.maker[name].name) if name in inside else _START
        graph.add_edge(maker, ("tensor", name), capacity=capacity(name))
        if maker != _START:
            graph.add_edge(reader, maker)

    inside = {name for each in region for name in each.outputs}
    for each in region:
        for name in set(each.inputs) - flow.free:
            read(name, ("operator", each.name))
    for name in left:
        read(name, _END)
    graph.add_edge(_START, ("operator", last.name))
    for each in behind:
        graph.add_edge(("operator", each.name), _END)
    _, (ran, _) = nx.minimum_cut(graph, _START, _END)
    return frozenset(name for kind, name in ran if kind == "operator")
