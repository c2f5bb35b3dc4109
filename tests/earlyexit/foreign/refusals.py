"""Torch modules and ONNX files that are refused. `refusals.txt` has the messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from earlyexit.data.rows import IMAGE
from earlyexit.families import find_family
from earlyexit.foreign import open_foreign
from earlyexit.foreign.onnx_model import read_onnx
from earlyexit.foreign.torch_module import TorchModel
from earlyexit.network.checkpoint import random_model
from tests.earlyexit.foreign.modules import traced

Read = Callable[[Path], object]
HAS_ONNX = find_spec("onnx") is not None and find_spec("onnxruntime") is not None
NUMBERS = {"name": "tensor", "columns": [{"name": "x", "datatype": "FP32", "shape": [4]}]}
CARD = {"sha256": "", "inputs": [{"name": "x"}], "cuts": [[{"name": "y"}]], "outputs": "logits"}


def module(name: str) -> Read:
    return lambda _: traced(name)


def node_of(model: TorchModel, part: str) -> str:
    """Returns the first node whose name contains a text."""
    return next(str(each.name) for each in model.module.graph.nodes if part in each.name)


def cut_inside_a_block() -> object:
    model = traced("pictures")
    return model.blocks([(node_of(model, "batch_norm"),)])


def cut_at_a_weight() -> object:
    model = traced("texts")
    return model.spec(node_of(model, "transpose"))


def taken_module(name: str, **codec: int) -> Read:
    return lambda folder: open_foreign(traced(name), codec, folder).build(())


def modules() -> dict[str, Read]:
    names = ["fixed", "branches", "alone", "empty_examples", "fails", "nothing", "windows", "by_sizes", "random"]
    return {
        **{f"module: {name}": module(name) for name in names},
        "module: a cut that forgets a tensor": lambda _: cut_inside_a_block(),
        "module: a cut at a weight": lambda _: cut_at_a_weight(),
        "module: mixes": taken_module("mixes"),
        "module: longer inputs": taken_module("texts", max_length=30),
        "module: other positions": taken_module("placed_from_2"),
        "module: other types of tokens": taken_module("placed_second_texts"),
        "module: another mask": taken_module("placed_left"),
    }


def graph_card(**changes: Any) -> Read:
    return lambda folder: find_family("onnx").build(CARD | changes, folder)


def onnx_files() -> dict[str, Read]:
    """Returns no cases if onnx is not installed."""
    if not HAS_ONNX:
        return {}
    from tests.earlyexit.foreign import onnx_graphs, tiny
    from tests.earlyexit.foreign.onnx_graphs import pictures_graph, words_graph

    def taken(
        make: Callable[[], Any], cuts: Sequence[Sequence[str]] = (), codec: dict[str, Any] = NUMBERS, **asked: Any
    ) -> Read:
        def read(folder: Path) -> object:
            graph = onnx_graphs.read_graph(onnx_graphs.saved(make(), folder / "from"), **asked)
            return open_foreign(graph, codec, folder).build(cuts)

        return read

    def numbers(body: str, *, inputs: str = "float[B, 4] x", gives: str = "float[B, 4] logits", **options: Any) -> Read:
        text = f"numbers ({inputs}) => ({gives}) {{ {body} }}"
        return taken(lambda: onnx_graphs.small_graph(text, w=(4, 4), b=(4,)), **options)

    def pictures(*cuts: str, **options: Any) -> Read:
        settings: dict[str, Any] = {"codec": onnx_graphs.CODEC, "pixels": onnx_graphs.PIXELS} | options
        return taken(pictures_graph, [[each] for each in cuts], **settings)

    def words(*cuts: Sequence[str], codec: dict[str, Any] = onnx_graphs.TEXT) -> Read:
        return taken(words_graph, cuts, codec)

    def small(nodes: Sequence[Any]) -> Read:
        return lambda folder: read_onnx(tiny.saved(folder, tiny.graph_of(nodes, ["x"], ["y"])))

    def written(content: bytes) -> Read:
        def read(folder: Path) -> object:
            (folder / "model.onnx").write_bytes(content)
            return read_onnx(folder / "model.onnx")

        return read

    def outside(place: str) -> Read:
        return lambda folder: read_onnx(tiny.saved(folder, tiny.two_layers(tiny.beside(tiny.weight("w", 4, 6), place))))

    def grey(folder: Path) -> object:
        text = "grey (float[B, 1, 8, 8] x) => (float[B, 1, 8, 8] logits) { logits = Relu(x) }"
        path = onnx_graphs.saved(onnx_graphs.small_graph(text), folder / "from")
        return onnx_graphs.read_graph(path, columns=(IMAGE,)).inputs

    def damaged(folder: Path) -> object:
        path = onnx_graphs.saved(pictures_graph(), folder / "from")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return onnx_graphs.pictures_taken(path, folder)

    two = "other = Relu(x) logits = Gemm(other, w, b)"
    both = "float[B, 4] logits, float[B, 4] other"
    return {
        "onnx: empty": written(b""),
        "onnx: a text": written(b"hello, I am a text"),
        "onnx: zeros": written(bytes(100)),
        "onnx: no message": written(b"\xff" * 50),
        "onnx: damaged": damaged,
        "onnx: no file": lambda folder: read_onnx(folder / "model.onnx"),
        "onnx: a folder": read_onnx,
        "onnx: nothing gives it": small([("Add", "x b", "y"), ("Relu", "y", "b")]),
        **{f"onnx: {op}": small([tiny.branching(op)]) for op in ("If", "Loop", "Scan")},
        **{
            f"onnx: weights at {place!r}": outside(place)
            for place in ("../w.bin", "/etc/passwd", "a/../../w.bin", "", ".")
        },
        "onnx: a skip that was forgotten": pictures("c1"),
        "onnx: cuts out of order": pictures("r1", "r0"),
        "onnx: two cuts at one place": pictures("r1", "r1"),
        "onnx: a cut at no tensor": pictures("r9"),
        "onnx: a cut at the layout": words(["h0", "bias_B1T"]),
        "onnx: no row per input": numbers(
            "t = Transpose(x) r = Relu(t) s = Transpose(r) logits = Gemm(s, w, b)", cuts=[["r"]]
        ),
        "onnx: rows that do not divide": numbers(
            "zero = Constant <value_ints = [0]> () last = Constant <value_ints = [-1]> () "
            "two = Constant <value_ints = [2]> () sum = ReduceSum(x, zero) r = Concat <axis = 0> (x, x, sum) "
            "s = Slice(r, zero, last, zero, two) logits = Gemm(s, w, b)",
            cuts=[["r"]],
        ),
        "onnx: unknown operator": numbers("hidden = odd.ops.Fold(x) logits = Gemm(hidden, w, b)"),
        "onnx: one number": numbers(
            "one = Constant <value_ints = [1]> () logits = ReduceSum(x, one)", gives="float[B, 1] logits"
        ),
        "onnx: a map": numbers(
            "two = Constant <value_ints = [2]> () logits = Unsqueeze(x, two)", gives="float[B, 4, 1] logits"
        ),
        "onnx: its size": numbers("logits = Shape(x)", gives="int64[2] logits"),
        "onnx: whole numbers": numbers("logits = Cast <to = 7> (x)", gives="int64[B, 4] logits"),
        "onnx: two outputs": numbers(two, gives=both),
        "onnx: no such output": numbers(two, gives=both, output="answer"),
        "onnx: images of another size": pictures(codec=onnx_graphs.CODEC | {"height": 16}),
        "onnx: grey images": grey,
        "onnx: texts": pictures(codec=onnx_graphs.TEXT),
        "onnx: one mean": pictures(pixels={"mean": [0.5]}),
        "onnx: another order": pictures(pixels={"order": "GRB"}),
        "onnx: whole numbers scaled": taken(
            lambda: onnx_graphs.bytes_graph("NCHW"), codec=onnx_graphs.CODEC, pixels={"std": (0.2, 0.2, 0.2)}
        ),
        "onnx: an open size": numbers("r = Relu(x) logits = Gemm(r, w, b)", inputs="float[B, N] x"),
        "onnx: a scalar": numbers("r = Mul(x, k) logits = Gemm(r, w, b)", inputs="float[B, 4] x, float k"),
        "onnx: a sequence is fed": numbers(
            "zero = Constant <value_int = 0> () x = SequenceAt(s, zero) logits = Gemm(x, w, b)", inputs="seq(float) s"
        ),
        "onnx: quantized by the batch": numbers("q, scale, zero = DynamicQuantizeLinear(x) logits = Relu(x)"),
        "onnx: int8 crosses": numbers("q = Cast <to = 3> (x) logits = Cast <to = 1> (q)", cuts=[["q"]]),
        "onnx: a map is returned": numbers(
            "logits = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2, 3]> (x)", gives="seq(map(int64, float)) logits"
        ),
        "onnx: a sequence is returned": numbers("logits = SequenceConstruct(x, x)", gives="seq(float) logits"),
        "onnx: three rows before the inputs": numbers(
            "t = Transpose <perm = [1, 0, 2]> (x) r = Relu(t) zero = Constant <value_ints = [0]> () "
            "s = ReduceSum <keepdims = 0> (r, zero) logits = Gemm(s, w, b)",
            inputs="float[B, 3, 4] x",
            cuts=[["r"]],
        ),
        "onnx: doubles": numbers("r = Relu(x) logits = Gemm(r, w, b)", inputs="double[B, 4] x"),
        "onnx: pairs": words(codec={"name": "text_pair", "max_length": 16}),
        "onnx: longer": words(codec={"name": "text", "max_length": 64}),
        "onnx: sizes alone": lambda _: random_model(CARD, family="onnx"),
        "onnx: an empty card": lambda folder: find_family("onnx").build({}, folder),
        "onnx: a cut of nothing": graph_card(cuts=[[]]),
        "onnx: no input": graph_card(inputs=[]),
        "onnx: another folder": graph_card(file="../graph.onnx"),
    }


REFUSED = modules() | onnx_files()
