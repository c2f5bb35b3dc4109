"""Refusals, one case per rule; `refusals.txt` beside this file has every message, word for word.

`refusals.yaml` has what is given in cases that need no code.

`python -m tests.refusals earlyexit` writes that file anew.
"""

from __future__ import annotations

import math
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from earlyexit.codecs import find_codec
from earlyexit.codecs.image import ImageCodec, ImageSize
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.codecs.text import TextCodec
from earlyexit.data.images import open_images
from earlyexit.data.rows import LabelledRows, objects, read_arrays, read_classes, read_labelled, write_labelled
from earlyexit.data.source_file import read_source
from earlyexit.data.strict import StrictDocument
from earlyexit.engine.queue import OrderSpec, first_fit_decreasing
from earlyexit.errors import DataError
from earlyexit.named import make_named
from earlyexit.network.boundary import Split, cast_column, parse_numbers
from earlyexit.network.checkpoint import RampOptions, load_pretrained, random_model
from earlyexit.network.model import Cut, EarlyExitModel
from earlyexit.policies import make_policy
from earlyexit.policies.base import ExitOutput
from earlyexit.policies.counting import TabiPolicy
from earlyexit.policies.ensemble import EnsemblePolicy, RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy, SharePolicy, SimilarPolicy
from earlyexit.policies.wrapper import exit_wrapper
from earlyexit.ramps import build_ramp
from earlyexit.ramps.pooling import pooled_size
from earlyexit.sequences.sequence import Sampling, TokenSequence
from earlyexit.tasks import find_task
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.segmentation import SegmentationTask
from earlyexit.training.augmentation import Augmentation
from earlyexit.training.joint import JointOptions, train_jointly
from earlyexit.training.ramps import importance_of
from earlyexit.words import Words, alpha_for, check_prune, kept_texts
from tests.chained_texts import chain_spec, chained
from tests.earlyexit.codecs.pictures import file_of, noise, png_chunks
from tests.earlyexit.codecs.prompts import TEMPLATE, prompt_codec, prompt_folder
from tests.earlyexit.data.dense_data import CLASSES, write_image, write_poses, write_scenes, write_turned
from tests.earlyexit.families.refusals import REFUSED as CHECKPOINTS
from tests.earlyexit.families.vision import small_layout
from tests.earlyexit.foreign.refusals import HAS_ONNX
from tests.earlyexit.foreign.refusals import REFUSED as FOREIGN
from tests.earlyexit.network.models import small
from tests.earlyexit.network.refusals import REFUSED as CARDS
from tests.earlyexit.tasks.maps import BODY, STREET, png_with_large_text
from tests.refusals import Case, FileCase, Refusals

LABELS, STARS = LabelTask(("no", "yes")), RegressionTask(scale=4.0)
SPECTRUM = TensorCodec([{"name": "spectrum", "datatype": "FP32", "shape": [2, 3]}])
ROW = TensorCodec([{"name": "age", "datatype": "INT8", "shape": []}, {"name": "w", "datatype": "FP64", "shape": [2]}])
IMAGES = ImageCodec(height=4, width=6)
MASK, SKY = np.zeros((4, 6), np.uint8), np.zeros((24, 32), np.uint8)
FULL = ImageCodec(height=24, width=32)
NONE, PATCHED = np.zeros(0, np.int64), JointOptions(augmentation=Augmentation(patch=0.5))
SCENES = SegmentationTask(("road", "sky"), height=24, width=32)
RECORDS = RecordedAnswers(
    row_of={"x": 0}, ramps=(2, 5), scores_NR=np.zeros((1, 2), np.float32), answers_NE=np.zeros((1, 3))
)
TABLE = {"circle": f"{__name__}:circle", "lost": "no_such_module:Circle", "gone": f"{__name__}:Square"}
NO_NUMBERS: list[tuple[object, str]] = [
    *((value, "FP32") for value in ([True, 2.5], [1, None], [1, {}], "1", [1, [2]], [[1, 2], [3]], [[[1]], [2]])),
    *((value, "INT32") for value in ([True, 2], [1.0])),
    ([1, 0], "BOOL"),
    ([-1, 2**63], "UINT64"),
]
UNFIT = [
    (np.array([3, 256], dtype=np.uint16), "UINT8"),
    (np.array([2**31]), "INT32"),
    (np.array([-1, 5], dtype=np.int8), "UINT64"),
    (np.array([2**64 - 1], dtype=np.uint64), "INT64"),
    (np.array([0.5]), "INT32"),
    (np.array(["a"]), "FP32"),
]
CLINC = '{"train": [["pay", "bills"]], "test": []}'


class Shape:
    """The kind of the named objects."""


def circle(radius: float = 1.0) -> float:
    if radius <= 0:
        raise ValueError(f"the radius must be positive, not {radius}")
    return radius


def nothing() -> str:
    return "nothing"


def of_images(width: int = 24, task: Task | None = None, side: tuple[int, int] = (24, 24)) -> EarlyExitModel:
    """A network of images of a size; `width`: of its codec's images, which are 24 high."""
    config = asdict(small_layout(*side, narrowest=4))
    codec = {"name": "image", "height": 24, "width": width}
    return random_model(
        config, family="resnet", codec=codec, task=task, ramps=RampOptions(style="maps" if task else "light")
    )


def named(spec: Mapping[str, Any]) -> object:
    return make_named(spec, TABLE, Shape)


def text_codec(name: str, max_length: int = 3) -> Any:
    """Returns a codec with a token for every word."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(f"{folder}/tokenizer.json")
        return text_codec_of(Path(folder), name, max_length)


def text_codec_of(folder: Path, name: str = "text", max_length: int = 3) -> Any:
    return find_codec({"name": name, "max_length": max_length}, folder)


def moving(form: str) -> bytes:
    """An image file of two frames."""
    frames = [Image.fromarray(noise(4, 6, seed)) for seed in range(2)]
    return file_of(frames[0], form, save_all=True, append_images=frames[1:])


def generated(prompt: list[int], *, max_tokens: int = 2, start: int | None = None) -> TokenSequence:
    greedy = Sampling()
    return TokenSequence(
        prompt, None, max_tokens=max_tokens, max_length=4, ends=(), sampling=greedy, chunk=8, start=start
    )


def pruned_words(importance: list[float], alpha: float) -> str:
    return kept_texts([Words.of("a", np.array([[0, 1]]))], np.array(importance), alpha)[0]


GOLDEN = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
TAKERS: dict[str, Callable[[Any], object]] = {
    "orders": lambda given: OrderSpec(**given),
    "parsed orders": OrderSpec.parse,
    "splits": lambda given: Split(**given),
    "policies": lambda given: make_policy(**given),
    "poses": lambda given: find_task({**BODY.spec(), **given}),
    "class maps": lambda given: find_task({**STREET.spec(), **given}),
    "tasks": find_task,
    "numbers": STARS.targets,
    "named": named,
    "sampling": lambda given: Sampling(**given),
    "sequences": lambda given: generated(**given),
    "tensors": TensorCodec,
    "spectra": SPECTRUM.from_json,
    "images": IMAGES.from_json,
    "image sizes": lambda given: ImageSize(**given),
    "texts": TextCodec(8).from_json,
    "pairs": lambda given: text_codec("text_pair").from_json(given),
}
"""Functions by group in refusals.yaml."""
CASES: dict[str, Case] = {
    **{name: partial(take, given) for group, take in TAKERS.items() for name, given in GOLDEN[group].items()},
    # Cuts and slots
    "cut: no blocks": lambda: Cut(small(), 2, 2, (), EntropyPolicy(0.4)),
    "cut: beyond the end": lambda: Cut(small(), 0, 5, (), EntropyPolicy(0.4)),
    "cut: no such ramp": lambda: Cut(small(), 0, 4, (3,), EntropyPolicy(0.4)),
    "cut: no threshold": lambda: Cut(small(), 0, 4, (0, 1), EntropyPolicy({0: 0.4})),
    "slot: too long": lambda: first_fit_decreasing([3, 11], 10),
    # Policies
    "policy: decay of labels": lambda: ConfidencePolicy(0.5, decay=8.0).check_task(LABELS),
    "policy: labels only": lambda: EntropyPolicy(0.4).check_task(STARS),
    "policy: ramps without a threshold": lambda: ConfidencePolicy({1: 0.5, 0: 0.5}).check_ramps([0, 2, 3]),
    "policy: ramps not recorded": lambda: RecordedPolicy(RECORDS, EntropyPolicy(0.5)).check_ramps([2, 3]),
    "policy: id not recorded": lambda: RecordedPolicy(RECORDS, EntropyPolicy(0.5)).full_answers(
        ExitOutput(LABELS, torch.zeros(1, 2)), ["y#1"]
    ),
    "policy: wrapper of nothing": lambda: exit_wrapper(),  # type: ignore[call-overload] # the point
    "policy: own is none": lambda: make_policy("own", own=f"{__name__}:circle"),
    "policy: share without a confidence": lambda: SharePolicy({0: 0.5, 1: 0.5}, {0: 0.9}).check_ramps([0, 1]),
    "policy: share without principal values": lambda: SharePolicy(0.5, 0.5).check_task(STARS),
    "policy: similar at block 0": lambda: SimilarPolicy(0.5).check_ramps((0, 1)),
    "policy: tabi, c out of range": lambda: TabiPolicy(math.nan, 1.0),
    "policy: tabi, k out of range": lambda: TabiPolicy(0.9, -1.0),
    "ensemble: no labels": lambda: EnsemblePolicy(ConfidencePolicy(0.5), {5: 0.2}).check_task(STARS),
    "ensemble: weight out of range": lambda: EnsemblePolicy(ConfidencePolicy(0.5), {5: 1.0}),
    # Tasks
    "task: none": lambda: find_task({"name": f"{__name__}:nothing"}),
    "task: principal values of numbers": lambda: STARS.principal_values(torch.zeros(1, 2)),
    "label: unknown": lambda: LABELS.targets(["yes", *"abcdef"]),
    "label: no token": lambda: find_task({"name": "token", "vocab_size": 5}).targets([5]),
    "joints: too few": lambda: BODY.targets([[[1, 1]] * 3, [[1, 1]] * 2]),
    "joints: outside": lambda: BODY.targets([[[1, 1], [40, 3], [1, 1]]]),
    "joints: half of a place": lambda: BODY.targets([[[1, 1], [1, math.nan], [1, 1]]]),
    "joints: never seen": lambda: BODY.check_coverage(BODY.targets([[[1, 1], [math.nan] * 2, [1, 1]]])),
    "segmentation: all ignored": lambda: find_task({**STREET.spec(), "ignored": list(STREET.class_names)}),
    "mask: size": lambda: STREET.targets([MASK, MASK[:3]]),
    "mask: size of a file": lambda: STREET.targets([file_of(MASK.T.copy())]),
    "mask: class id": lambda: STREET.targets([MASK + np.uint8(17)]),
    "mask: colours": lambda: STREET.targets([file_of(np.dstack([MASK] * 3))]),
    "mask: no PNG": lambda: STREET.targets([file_of(MASK, "BMP")]),
    "mask: fractions": lambda: STREET.targets([MASK.astype(np.float32)]),
    "mask: grey of four bits": lambda: STREET.targets([png_chunks((6, 4, 4, 0), [bytes(3)] * 4)]),
    "mask: a large text": lambda: STREET.targets([png_with_large_text()]),
    "mask: three axes": lambda: STREET.targets([MASK[None]]),
    "mask: a word": lambda: STREET.targets(["road"]),
    "mask: class never seen": lambda: STREET.check_coverage(MASK[None]),
    # Ramps
    "ramp: the first token of a map": lambda: pooled_size((6, 9, 9), "first"),
    "ramp: a map of four sides": lambda: pooled_size((6, 2, 2, 2, 2), "mean"),
    "ramp: a convolution over numbers": lambda: build_ramp("conv", (6,), (2,), "mean"),
    "ramp: numbers for maps": lambda: build_ramp("light", (8, 4, 4), (3, 4, 4), "mean"),
    "ramp: given maps of other sides": lambda: build_ramp("given", (3, 8, 8), (3, 4, 4), "mean"),
    "ramp: maps of numbers": lambda: build_ramp("maps", (32,), (3, 4, 4), "mean"),
    "ramp: numbers of a head of maps": lambda: build_ramp("deconv", (8, 4, 4), (3,), "mean"),
    "ramp: maps of other images than the codec's": lambda: of_images(24, task=SCENES, side=(24, 32)),
    "ramp: maps of other images than the network's": lambda: of_images(32, task=SCENES, side=(32, 32)),
    "ramp: no bridges": lambda: small(ramps=RampOptions(style="bridge")),
    "ramp: a head that is a bridge": lambda: RampOptions(head_style="bridge"),
    # Names
    "name: no function": lambda: named({"name": f"{__name__}:Square"}),
    "network: no module": lambda: load_pretrained("no_such_module:build"),
    "network: no function": lambda: load_pretrained(f"{__name__}:gone"),
    "network: none": lambda: load_pretrained(f"{__name__}:nothing"),
    # Words
    "words: share": lambda: alpha_for(1.0, np.ones(3)),
    "words: nothing known": lambda: alpha_for(0.5, np.zeros(0)),
    "words: no alpha": lambda: alpha_for(0.5, np.full(3, 3.0)),
    "words: alpha": lambda: pruned_words([1.0], 2.1),
    "words: importances": lambda: pruned_words([1.0, 1.0, 1.0], 0.5),
    "words: inside a network": lambda: check_prune({3: 0.7}, (6, 18)),
    "words: of a single model": lambda: check_prune({5: 0.7}, ()),
    "words: not of texts": lambda: SPECTRUM.pruned((np.zeros(2),), np.ones(1), 0.5),
    "words: no texts made": lambda: SPECTRUM.row_of(["a"]),
    # Sequences and training
    "training: no images": lambda: train_jointly(small(), [], NONE, JointOptions(augmentation=Augmentation())),
    "training: patches of right answers": lambda: train_jointly(of_images(), [], NONE, PATCHED),
    "training: no head to imitate": lambda: train_jointly(of_images(), [], NONE, JointOptions(imitate=True)),
    "training: attention of an image": lambda: importance_of(of_images(), []),
    # Codecs
    "codec: unknown": lambda: find_codec({"name": "sound"}, Path()),
    "codec: none": lambda: find_codec({"name": f"{__name__}:nothing"}, Path()),
    "codec: chain of one": lambda: find_codec({"name": "chain", "members": [SPECTRUM.spec()], "models": ["m"]}, Path()),
    "tensor: out of range": lambda: ROW.from_json({"age": 128, "w": [1, 2]}),
    "tensor: missing column": lambda: ROW.from_json([{"age": 1}]),
    "tensor: not finite": lambda: SPECTRUM.encode([(np.full((2, 3), np.nan, np.float32),)]),
    **{f"numbers: {value!r} as {dtype}": partial(parse_numbers, value, dtype) for value, dtype in NO_NUMBERS},
    **{f"column: {each!r} as {dtype}": partial(cast_column, each, dtype) for each, dtype in UNFIT},
    "image: broken": lambda: IMAGES.encode([b"nothing"]),
    "image: an animated WebP": lambda: IMAGES.encode([moving("WEBP")]),
    "image: an animated PNG": lambda: IMAGES.encode([moving("PNG")]),
    "image: not finite": lambda: IMAGES.encode([np.full((4, 6, 3), np.nan, np.float32)]),
    "text: too long": lambda: text_codec("text").encode(["a b", "a b c d"]),
    "text: far too long": lambda: text_codec("text").encode(["a b " * 20_000]),
    "text: not UTF-8": lambda: TextCodec(8).from_columns({"text": [b"a", b"\xff"]}),
    "text: empty element": lambda: TextCodec(8).from_columns({"text": [b""]}),
    "text: length": lambda: TextCodec(0),
    "text: no tokenizer": lambda: find_codec({"name": "text", "max_length": 8}, Path("/no/such")),
    "text: a body": lambda: TextCodec(8).from_content("text/plain", b"a"),
    "pair: too long": lambda: text_codec("text_pair").encode([("a b", "c d")]),
    "prompt: an input by itself": lambda: PromptCodec(8).encode(["a"]),
    "prompt: length": lambda: PromptCodec(1),
    "prompt: no template": lambda: PromptCodec(8).chat([{"role": "user", "content": "a"}]),
    # Rows
    "rows: other columns": lambda: LabelledRows(columns={"image": np.zeros(1)}, labels=("a",)).encode(SPECTRUM),
    "rows: shape": lambda: LabelledRows(columns={"spectrum": np.zeros((1, 4))}, labels=("a",)).encode(SPECTRUM),
    "rows: out of range": lambda: LabelledRows(columns={"image": np.full((1, 4, 6, 3), 256)}, labels=("a",)).encode(
        IMAGES
    ),
    "rows: no single texts": lambda: LabelledRows(columns={"image": objects([b""])}, labels=("a",)).texts,
    "rows: label is no folder": lambda: write_labelled(
        LabelledRows(columns={"image": objects([b"x"])}, labels=("../up",)), Path("/no/such"), "rows"
    ),
}


def chain_without_a_model(folder: Path) -> object:
    chained(folder)
    (folder / "m1" / "model.json").unlink()
    return find_codec(chain_spec((8, 8)), folder)


def chat_by(template: str | None, role: str = "user") -> Callable[[Path], object]:
    return lambda folder: prompt_codec(folder, template=template).chat([{"role": role, "content": "4"}])


def broken_configuration(folder: Path) -> object:
    (prompt_folder(folder) / "tokenizer_config.json").write_text("{", encoding="utf-8")
    return find_codec({"name": "prompt", "max_length": 16}, folder)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "chain: a model that is gone": chain_without_a_model,
    "prompt: what the template refuses": chat_by(TEMPLATE, role="tool"),
    "prompt: beyond the sandbox": chat_by("{{ messages.__class__.__mro__[1].__subclasses__() }}"),
    "prompt: a template that is none": chat_by("{% if %}"),
    "prompt: a broken configuration": broken_configuration,
    "prompt: no tokenizer": lambda folder: find_codec({"name": "prompt", "max_length": 16}, folder),
}


class Point(StrictDocument):
    x: float
    names: int | dict[str, int] = 0


class Versioned(StrictDocument):
    schema_version: Literal[1] = 1


def labelled(path: Path) -> object:
    return read_labelled(path)


def paired(path: Path) -> object:
    return read_labelled(path, text_column="a", pair_column="b")


def point(path: Path) -> object:
    return read_source(path, DataError).parse(Point, called="the point")


def versioned(path: Path) -> object:
    return read_source(path, DataError).parse(Versioned, called="it")


def joints(change: Callable[[Path], object] | list[Any]) -> Callable[[Path], object]:
    """Reads images with joints after a change of the folder, or with this line of the table replaced by a text."""

    def read(path: Path) -> object:
        table = write_poses(path.parent / "set")
        if isinstance(change, list):
            lines = table.read_text(encoding="utf-8").splitlines()
            lines[change[0] - 1] = change[1]
            table.write_text("\n".join(lines), encoding="utf-8")
        else:
            change(path.parent / "set/train")
        return read_labelled(path.parent / "set", joints=table)

    return read


def classes(change: Callable[[Path], object], codec: ImageCodec = FULL) -> Callable[[Path], object]:
    """Reads images with maps of classes after a change of the folder."""

    def read(path: Path) -> object:
        table = write_scenes(path.parent / "set")
        change(path.parent / "set/train")
        task = SegmentationTask(CLASSES, height=codec.size.height, width=codec.size.width)
        return read_labelled(path.parent / "set", classes=table, part="train").targets(task, codec)

    return read


def npz(**arrays: Any) -> bytes:
    file = BytesIO()
    np.savez(file, allow_pickle=True, **arrays)
    return file.getvalue()


def zipped(*names: str) -> bytes:
    """An archive of files, each of one byte."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return file.getvalue()


DEEP = "\n" + "[" * 100_000 + "]" * 100_000
READERS: list[Callable[[Path], object]] = [labelled, paired, read_classes, point, versioned]
FILES: dict[str, FileCase] = {
    **{
        name: (read, file, content)
        for read in READERS
        for file, cases in GOLDEN["files"][read.__name__].items()
        for name, content in cases.items()
    },
    **{name: (joints(line), "j", None) for name, line in GOLDEN["joints"].items()},
    "table: not UTF-8": (labelled, "d.csv", b"text,label\n" + b"a,x\n" * 9999 + b"\xff,y\n"),
    "table: endless field": (labelled, "d.csv", f"text,label\na,x\n{'b' * 11_000_000},y\n"),
    "table: absent": (labelled, "d.csv", None),
    "table: pairs of clinc": (paired, "d.json", CLINC),
    "jsonl: too many digits": (labelled, "d.jsonl", '{"text": "a", "label": ' + "9" * 5000 + "}"),
    "jsonl: too deep": (labelled, "d.jsonl", "[" * 100_000),
    "clinc: not UTF-8": (labelled, "d.json", b'{"train": [["\xff", "x"]]}'),
    "clinc: no list": (lambda path: read_labelled(path, part="oos"), "d.json", CLINC),
    "texts: blank": (partial(read_labelled, label_column=None), "t.txt", "\n \n"),
    "texts: not UTF-8": (partial(read_labelled, label_column=None), "t.txt", b"a\n\xff"),
    "arrays: none": (read_arrays, "a.npz", "PK"),
    "arrays: no labels": (labelled, "a.npz", npz(x=np.zeros((2, 3)))),
    "tokenizer: broken": (lambda path: text_codec_of(path.parent), "tokenizer.json", '{"version": "1.0"'),
    "tokenizer: absent": (lambda path: text_codec_of(path.parent), "tokenizer.json", None),
    "arrays: no inputs": (labelled, "a.npz", npz(labels=np.zeros(2))),
    "arrays: rows": (labelled, "a.npz", npz(x=np.zeros((3, 1)), labels=np.zeros(2))),
    "arrays: no rows": (labelled, "a.npz", npz(x=np.zeros((0, 1)), labels=np.zeros(0))),
    "arrays: objects": (labelled, "a.npz", npz(x=np.array([{}]), labels=np.zeros(1))),
    "arrays: cut": (read_arrays, "a.npz", npz(x=np.zeros(99))[:-40]),
    "arrays: a folder": (lambda path: read_arrays(path.parent), "a.npz", None),
    "images: no archive": (lambda path: open_images(path).__enter__(), "i.zip", "no zip"),
    "images: no class folder": (labelled, "i.zip", zipped("1.png")),
    "images: several parts": (labelled, "i.zip", zipped("train/cat/1.png", "test/cat/2.png")),
    "images: no such part": (lambda path: read_labelled(path, part="val"), "i.zip", zipped("cat/1.png")),
    "images: nothing": (lambda path: open_images(path).__enter__(), "i.zip", None),
    "images: joints of a table": (lambda path: read_labelled(path, joints=path), "j.csv", "image,joint\n"),
    "images: joints and classes": (lambda path: read_labelled(path, joints=path, classes=path), "i.zip", ""),
    "joints: image without lines": (joints(lambda at: write_image(at / "im9.png", MASK)), "j", None),
    "joints: no image": (joints(lambda at: (at / "im0.png").write_bytes(b"x")), "j", None),
    "joints: a large text": (joints(lambda at: (at / "im0.png").write_bytes(png_with_large_text())), "j", None),
    "maps: another size": (classes(lambda at: write_image(at / "label/im2.png", MASK)), "m", None),
    "maps: another class": (classes(lambda at: write_image(at / "label/im2.png", SKY + np.uint8(3))), "m", None),
    "maps: colours": (classes(lambda at: write_image(at / "label/im2.png", np.dstack([SKY] * 3))), "m", None),
    "maps: none": (classes(lambda at: (at / "label/im3.png").unlink()), "m", None),
    "maps: two": (classes(lambda at: write_image(at / "label/im1.jpg", SKY)), "m", None),
    "maps: turned": (classes(lambda at: write_turned(at / "image/im2.png", np.dstack([SKY] * 3))), "m", None),
    "maps: another size than a cut image": (
        classes(lambda at: write_image(at / "label/im2.png", MASK), ImageCodec(16, 24, shortest_edge=30)),
        "m",
        None,
    ),
    "file: absent": (point, "a.yaml", None),
    "file: a folder": (lambda path: point(path.parent), "a.yaml", None),
    "file: not UTF-8": (point, "a.yaml", b"# x\nx: \xff\n"),
    "yaml: too deep": (point, "a.yaml", DEEP),
    "yaml: too long": (point, "a.yaml", "x: " + "9" * 5000),
    "json: too long": (point, "a.json", '{"x": ' + "9" * 5000 + "}"),
    "json: too deep": (point, "a.json", DEEP),
    "value: a long word": (point, "a.yaml", f"x: {'a' * 99}"),
    "value: a long integer": (point, "a.yaml", f"x: 0x1{'0' * 5000}"),
}


REFUSALS = Refusals(
    module=Path(__file__), name=__name__, cases=CASES, files=FILES, folders=FOLDERS | CARDS | CHECKPOINTS | FOREIGN
)
test_what_is_refused_is_told_in_the_recorded_words, test_no_other_case_is_recorded = REFUSALS.tests(
    but_for=None if HAS_ONNX else "onnx: "
)
