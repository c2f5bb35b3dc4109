"""Small ONNX graphs with random weights, as other tools write them, and their uncut answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import numpy_helper, parser

from earlyexit.families.base import Pretrained
from earlyexit.foreign import open_foreign, read_foreign
from earlyexit.foreign.model import ForeignModel, ForeignOptions
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import RampOptions, add_ramps
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.label import LabelTask

Array = npt.NDArray[Any]
SIDE = 8
CODEC = {"name": "image", "height": SIDE, "width": SIDE}
PIXELS = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}
TEXT = {"name": "text", "max_length": 16}
WORDS = 50
ABC = LabelTask(("a", "b", "c"))

PICTURES = """
pictures (float[BATCH, 3, 8, 8] x) => (float[BATCH, 3] LAST) {
    c0 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w0)
    r0 = Relu(c0)
    c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r0, w1)
    a1 = Add(c1, r0)
    r1 = Relu(a1)
    c2 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (r1, w2)
    r2 = Relu(c2)
    pooled = GlobalAveragePool(r2)
    END
}
"""
ENDS = {
    "flat": "flat = Flatten(pooled) logits = Gemm(flat, head, bias)",
    "probabilities": "flat = Flatten(pooled) sums = Gemm(flat, head, bias) answers = Softmax <axis = 1> (sums)",
    "separate": "flat = Flatten(pooled) sums = Gemm(flat, head, bias) answers = Sigmoid(sums)",
    "reshaped": "rows = Constant <value_ints = [1, 8]> () flat = Reshape(pooled, rows) logits = Gemm(flat, head, bias)",
}
BLOCK = """
    q{k} = MatMul({before}, w{k})
    t{k} = Transpose <perm = [0, 2, 1]> ({before})
    s{k} = MatMul(q{k}, t{k})
    b{k} = Add(s{k}, bias_B1T)
    p{k} = Softmax <axis = -1> (b{k})
    m{k} = MatMul(p{k}, {before})
    size{k} = Shape({sized})
    e{k} = Reshape(m{k}, size{k})
    a{k} = Add(e{k}, {before})
    h{k} = Tanh(a{k})
"""
WORDS_GRAPH = """
words (int64[B, T] input_ids, int64[B, T] attention_mask) => (float[B, 3] logits) {{
    looked_up = Gather(table, input_ids)
    shape = Shape(input_ids)
    one = Constant <value_int = 1> ()
    zero = Constant <value_int = 0> ()
    length = Gather(shape, one)
    place = Range(zero, length, one)
    placed = Gather(places, place)
    start = Add(looked_up, placed)
    mask = Cast <to = 1> (attention_mask)
    axis1 = Constant <value_ints = [1]> ()
    axis2 = Constant <value_ints = [2]> ()
    mask_B1T = Unsqueeze(mask, axis1)
    mask_BT1 = Unsqueeze(mask, axis2)
    full = Constant <value_float = 1.0> ()
    lack = Sub(full, mask_B1T)
    far = Constant <value_float = -10000.0> ()
    bias_B1T = Mul(lack, far)
    {blocks}
    kept = Mul({last}, mask_BT1)
    sum = ReduceSum <keepdims = 0> (kept, axis1)
    count = ReduceSum <keepdims = 0> (mask, axis1)
    count_B1 = Unsqueeze(count, axis1)
    pooled = Div(sum, count_B1)
    logits = Gemm(pooled, head, bias)
}}
"""


def pictures_graph(*, end: str = "flat", batch: str = "B", seed: int = 0) -> onnx.ModelProto:
    """Three convolutions, the second with a skip connection; its cut tensors are r0, r1, r2."""
    text = PICTURES.replace("END", ENDS[end]).replace("BATCH", batch)
    text = text.replace("LAST", "answers" if end in ("probabilities", "separate") else "logits")
    shapes = {"w0": (6, 3, 3, 3), "w1": (6, 6, 3, 3), "w2": (8, 6, 3, 3), "head": (8, 3), "bias": (3,)}
    return _model(text, shapes, seed)


ROUNDING = """
rounding (int32[B, 128] bytes) => (float[B, 3] logits) {
    last = Constant <value_ints = [2]> ()
    column = Unsqueeze(bytes, last)
    equal = Equal(column, numbers)
    one_hot = Cast <to = 1> (equal)
    looked_up = MatMul(one_hot, table)
    axis = Constant <value_ints = [1]> ()
    sum = ReduceSum(looked_up, axis)
    squares = Mul(looked_up, looked_up)
    sum_of_squares = ReduceSum(squares, axis)
    mean = Mul(sum, share)
    mean_square = Mul(sum_of_squares, share)
    squared_mean = Mul(mean, mean)
    variance = Sub(mean_square, squared_mean)
    positive = Max(variance, tiny)
    deviation = Sqrt(positive)
    centred = Sub(looked_up, mean)
    normed = Div(centred, deviation)
    dense = MatMul(normed, w0)
    hidden = Relu(dense)
    pooled = ReduceMax <axes = [1], keepdims = 0> (hidden)
    logits = MatMul(pooled, head)
}
"""
LETTERS = 16


def rounding_graph(*, seed: int = 0) -> onnx.ModelProto:
    """A one-hot lookup and a norm whose variance, in one pass over the places, is rounded by the number of inputs.

    The first two of `LETTERS` letters look nearly alike, so rows of these alone have a variance of rounding errors.
    """
    model = _model(ROUNDING, {"table": (LETTERS, 8), "w0": (8, 16), "head": (16, 3)}, seed)
    [table] = [each for each in model.graph.initializer if each.name == "table"]
    rows = 3 + numpy_helper.to_array(table) * np.array([0.03] * 2 + [1] * (LETTERS - 2), np.float32)[:, None]
    table.CopyFrom(numpy_helper.from_array(rows.astype(np.float32), "table"))
    numbers = {"numbers": np.arange(LETTERS, dtype=np.int32), "share": np.float32(1 / 128), "tiny": np.float32(1e-9)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(each), name) for name, each in numbers.items())
    return model


ACROSS = """
across (float[BATCH, 3, 8, 8] x) => (float[BATCH, 3] logits) {
    c0 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w0)
    r0 = Relu(c0)
    c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r0, w1)
    pooled = GlobalAveragePool(c1)
    flat = Flatten(pooled)
    dense = MatMul(flat, w2)
    across = Transpose <perm = [1, 0]> (dense)
    mixed = MatMul(w3, across)
    back = Transpose <perm = [1, 0]> (mixed)
    logits = Gemm(back, head, bias)
}
"""


def across_graph(*, batch: str = "B", seed: int = 0) -> onnx.ModelProto:
    """The inputs are columns of the tensor `across`; it can be cut at r0, c1 and back."""
    shapes = {"w0": (6, 3, 3, 3), "w1": (8, 6, 3, 3), "w2": (8, 8), "w3": (8, 8), "head": (8, 3), "bias": (3,)}
    return _model(ACROSS.replace("BATCH", batch), shapes, seed)


BYTES = """
bytes (TYPE[B, SHAPE] x) => (float[B, 3] logits) {
    numbers = Cast <to = 1> (x)
    planes = Transpose <perm = [PERM]> (numbers)
    c0 = Conv <kernel_shape = [3, 3]> (planes, w0)
    r0 = Relu(c0)
    c1 = Conv <kernel_shape = [3, 3]> (r0, w1)
    pooled = GlobalAveragePool(c1)
    flat = Flatten(pooled)
    logits = Gemm(flat, head, bias)
}
"""
LAYOUTS = {"NCHW": ("3, 8, 8", "0, 1, 2, 3"), "NHWC": ("8, 8, 3", "0, 3, 1, 2")}


def bytes_graph(layout: str, *, dtype: str = "uint8") -> onnx.ModelProto:
    """Takes pixels as integers from 0 to 255; it can be cut at r0."""
    shape, perm = LAYOUTS[layout]
    text = BYTES.replace("TYPE", dtype).replace("SHAPE", shape).replace("PERM", perm)
    return _model(text, {"w0": (6, 3, 3, 3), "w1": (8, 6, 3, 3), "head": (8, 3), "bias": (3,)}, 0)


def words_graph(*, num_blocks: int = 3, seed: int = 0) -> onnx.ModelProto:
    """Attention over words. Every block reads the size of a tensor of the first. Its cut tensors: start, h0, h1, h2."""
    before = ["start", *(f"h{k}" for k in range(num_blocks))]
    blocks = "".join(BLOCK.format(k=k, before=before[k], sized="start") for k in range(num_blocks))
    shapes = {"table": (WORDS, 8), "places": (32, 8), "head": (8, 3), "bias": (3,)}
    shapes |= {f"w{k}": (8, 8) for k in range(num_blocks)}
    return _model(WORDS_GRAPH.format(blocks=blocks, last=before[-1]), shapes, seed)


TURNS = {
    "B*T": "rest = Constant <value_ints = [-1, 8]> () other = Reshape({0}, rest)",
    "TB": "other = Transpose <perm = [1, 0, 2]> ({0})",
}
BACK = {
    "B*T": "back_size = Shape({0}) back = Reshape(seen, back_size)",
    "TB": "back = Transpose <perm = [1, 0, 2]> (seen)",
}


def turned_words_graph(form: str) -> onnx.ModelProto:
    """`words_graph` of two blocks; `seen` between them has its tokens in another order."""
    first, second = (BLOCK.format(k=k, before=before, sized="start") for k, before in enumerate(("start", "back")))
    between = f"{TURNS[form].format('h0')} seen = Tanh(other) {BACK[form].format('h0')}"
    shapes = {"table": (WORDS, 8), "places": (32, 8), "head": (8, 3), "bias": (3,), "w0": (8, 8), "w1": (8, 8)}
    return _model(WORDS_GRAPH.format(blocks=first + between + second, last="h1"), shapes, 0)


def small_graph(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """Parses the text form of ONNX, and adds random weights of these shapes."""
    return _model(text, shapes, 0)


def saved(model: onnx.ModelProto, folder: Path, *, name: str = "theirs.onnx", beside: bool = False) -> Path:
    """Writes a graph to a file; if requested, its weights to another file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(model, folder / name, save_as_external_data=beside, location="theirs.bin", size_threshold=0)
    return folder / name


def read_graph(path: Path, **asked: Any) -> ForeignModel:
    """Reads a file."""
    return read_foreign(str(path), ForeignOptions(**asked), open_size=8)


def pictures_taken(path: Path, folder: Path, cuts: Sequence[Sequence[str]] = (("r0",), ("r1",))) -> Pretrained:
    """Cuts the file of a `pictures_graph` into a model folder."""
    return open_foreign(read_graph(path, pixels=PIXELS), CODEC, folder).build(cuts)


def words_taken(path: Path, folder: Path, cuts: Sequence[Sequence[str]] = (("h0",), ("h1",))) -> Pretrained:
    """Cuts the file of a `words_graph` into a model folder."""
    return open_foreign(read_graph(path), TEXT, folder).build(cuts)


def with_ramps(pretrained: Pretrained) -> EarlyExitModel:
    """Adds untrained ramps with large weights after every block but the last, so that some inputs leave at each."""
    import torch

    assert pretrained.codec is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = add_ramps(
            pretrained, name="theirs", family="onnx", codec=pretrained.codec, task=ABC, ramps=RampOptions()
        )
        for parameter in model.ramps.parameters():
            torch.nn.init.normal_(parameter, std=2.0)
    return model.requires_grad_(False)


def random_pictures(count: int, *, seed: int = 0) -> list[Encoded]:
    """Returns pixels from the codec."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 1, SIDE, SIDE, 3), dtype=np.uint8)
    return [Encoded(1, (each,)) for each in pixels]


def random_words(lengths: Sequence[int], *, seed: int = 0) -> list[Encoded]:
    """Returns texts of these lengths from the codec."""
    rng = np.random.default_rng(seed)
    return [Encoded(n, (rng.integers(0, WORDS, size=n, dtype=np.int32),)) for n in lengths]


def uncut(path: Path) -> Callable[[Mapping[str, Array]], Array]:
    """Returns the answers of the uncut file, by ONNX Runtime alone."""
    session = onnxruntime.InferenceSession(path)
    return lambda feeds: np.asarray(session.run(None, dict(feeds))[0])


def picture_feeds(encoded: Encoded) -> dict[str, Array]:
    """Returns one picture in the graph's form."""
    scaled = encoded.tensors[0].astype(np.float32) / 255
    normal = (scaled - np.array(PIXELS["mean"], np.float32)) / np.array(PIXELS["std"], np.float32)
    return {"x": normal.transpose(0, 3, 1, 2)}


def words_feeds(encoded: Encoded) -> dict[str, Array]:
    """Returns one text alone, without padding."""
    ids = encoded.tensors[0].astype(np.int64)[None]
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _model(text: str, shapes: Mapping[str, tuple[int, ...]], seed: int) -> onnx.ModelProto:
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17, "odd.ops" : 1]>' + text)
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) / np.sqrt(np.prod(shape[1:]) or 1)
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    return model
