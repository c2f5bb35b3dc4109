"""The refusals of jobs, one case per rule; `python -m tests.refusals offramp.jobs` writes `refusals.txt` anew.

Rows, models and networks are those of the modules that test the jobs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.network.checkpoint import load_pretrained
from earlyexit.network.store import load_model, load_network, read_card, save_model
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.training.augmentation import Augmentation
from offramp.commands.folders import read_calibration, unpack
from offramp.commands.forecast import read_series
from offramp.commands.inject import check_names, inject
from offramp.commands.jobs import CalibrateJob, ProfileJob, TrainJob, default_task
from offramp.commands.options import PredictJob
from offramp.commands.plan import serving_plan
from offramp.commands.predict import IMAGES, map_folder
from offramp.commands.profile import profile_model
from offramp.commands.thresholds import calibrate_records
from offramp.commands.train import chain_models, task_for, train
from optimizer.calibration.calibration_file import CALIBRATION_FILE
from optimizer.plans.plan import Stage
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.earlyexit.data.dense_data import write_poses, write_scenes
from tests.earlyexit.families.decoders import decoder, hf_decoder
from tests.earlyexit.families.encoder_decoders import hf_seq2seq
from tests.earlyexit.network.models import small
from tests.exit_records import calibration_card, exit_records
from tests.model_cards import change_card
from tests.offramp.jobs import test_injecting as injecting
from tests.offramp.jobs import test_kinds as kinds
from tests.offramp.jobs.test_calibration import PROMPTS
from tests.offramp.jobs.test_chaining import put
from tests.offramp.jobs.test_packaged import SHA256, pieces
from tests.offramp.jobs.test_planning import planned_answer
from tests.offramp.jobs.test_training import IMAGE, TOKENS, pairs_of
from tests.optimizer.plain_problem import BEST
from tests.refusals import Case, FileCase, Refusals

GOLDEN = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
Reader = Callable[[Path], object]
CARD = calibration_card({0: 0.4})


def models_in(folder: Path, **large: Any) -> list[Path]:
    """Two calibrated models for texts, the second with three blocks."""
    return [put(folder / "little", "small"), put(folder / "big", "large", **{"blocks": 3, "seed": 2} | large)]


def chained(
    spoil: Callable[[list[Path]], object] = list, of: Callable[[list[Path]], list[Path]] = list, **large: Any
) -> Reader:
    """Makes a chain of models, after changing them."""

    def read(folder: Path) -> object:
        models = models_in(folder, **large)
        spoil(models)
        return chain_models(of(models), folder / "both")

    return read


def after(change: Callable[[list[Path], Path], object], read: Reader) -> Reader:
    """Reads a chain whose models have changed."""

    def read_changed(folder: Path) -> object:
        models, out = models_in(folder), folder / "both"
        chain_models(models, out)
        change(models, out)
        return read(out)

    return read_changed


def turned(models: list[Path], _: Path) -> None:
    """Gives both models other labels."""
    for model, name, blocks in zip(models, ("small", "large"), (2, 3), strict=True):
        put(model, name, task=LabelTask(("c", "b", "a")), blocks=blocks)


def injected(options: dict[str, Any], rows: LabelledRows | None = None) -> Reader:
    """Injects into a network of pictures, or another one of the same module."""
    backbone = f"{injecting.HERE}:{options.get('backbone', 'pictures')}"
    job = injecting.job_of(**options | {"backbone": backbone})
    return lambda folder: inject(job, rows or injecting.rows_of(), folder / "out", times=injecting.quick_ramps)


def trained(rows: LabelledRows | None = None, **fields: Any) -> Reader:
    """Trains a network of spectra; without rows, on images."""
    given = {name: str(value).replace("HERE", kinds.__name__) for name, value in fields.items() if name != "max_length"}
    fields = {"backbone": f"{kinds.__name__}:network", "name": "m"} | fields | given

    def read(folder: Path) -> object:
        data = read_labelled(kinds.write_images(folder / "images")) if rows is None else rows
        return train(TrainJob(**fields), data, folder / "out")

    return read


def of_dense(task: str, inputs: Any, *, joints: bool) -> Reader:
    """Makes the task of a network with these inputs, for rows of joints or class maps."""

    def read(folder: Path) -> object:
        table = write_poses(folder / "set") if joints else write_scenes(folder / "set")
        tables: dict[str, Any] = {"joints": table} if joints else {"classes": table}
        rows = read_labelled(folder / "set", part="train", **tables)
        return task_for(TrainJob(backbone="b", name="m", task=task), rows, inputs)

    return read


def of_tokens(make: Callable[[], Any], **fields: Any) -> Reader:
    """Trains ramps of a network that generates."""

    def read(folder: Path) -> object:
        make().save_pretrained(folder / "checkpoint")
        byte_tokenizer().save(str(folder / "checkpoint" / "tokenizer.json"))
        job = TrainJob(backbone=str(folder / "checkpoint"), name="x", task="token", **fields)
        return train(job, PROMPTS, folder / "out")

    return read


def profiled(model: Any, **fields: Any) -> Reader:
    """Measures a model."""

    def read(folder: Path) -> object:
        save_model(model(), folder)
        return profile_model(folder, ProfileJob(**fields))

    return read


def mapped(given: str) -> Reader:
    """Writes class maps into a folder that contains an input."""

    def read(folder: Path) -> object:
        photos = folder / "photos"
        (photos / "inner").mkdir(parents=True)
        (photos / "a.png").write_bytes(b"a photo")
        return map_folder(PredictJob(maps=photos, data=photos / given), IMAGES)

    return read


def calibration(text: str) -> FileCase:
    return (lambda path: read_calibration(path.parent), CALIBRATION_FILE, text)


def on_abacus() -> object:
    stages = (Stage(device="abacus", replicas=1, splits=BEST[0].splits),)
    answer = planned_answer()
    return serving_plan(replace(answer, decision=replace(answer.planned, stages=stages)), 0.4)


SHARES = exit_records(np.ones((100, 1)), score="share", zero_one=False)
ABA = LabelledRows.of_texts("xyz", ("a", "b", "a"))
CASES: dict[str, Case] = {
    **{
        f"inject: names {names}": partial(check_names, injecting.job_of(names=names), ABA, ("0", "1", "2"))
        for names in (None, ("a", "b"), ("a", "c", "d"))
    },
    **{
        f"inject: a pickle .{ending}": partial(injecting.job_of, f"net.{ending}")
        for ending in ("pt", "pth", "pkl", "bin")
    },
    "train: joints without sides": lambda: pairs_of("0", "1", augmentation=Augmentation()),
    "calibrate: shares of unknown values": lambda: calibrate_records(SHARES, CalibrateJob(budget=0.05)),
    "plan: an unknown device": on_abacus,
}
FILES: dict[str, FileCase] = {
    "calibration: broken": calibration("{"),
    **{name: calibration(json.dumps(CARD.model_dump(mode="json") | each)) for name, each in GOLDEN["cards"].items()},
    **{name: (lambda path: load_pretrained(str(path)), "n.json", text) for name, text in GOLDEN["networks"].items()},
    "checkpoint: not JSON": (lambda path: default_task(str(path.parent)), "config.json", "{"),
    "series: absent": (read_series, "series.csv", None),
    "series: not UTF-8": (read_series, "series.csv", b"inputs,0\n\xff,1\n"),
    "series: rising survival": (read_series, "series.csv", "inputs,0,1,2\n\n9,1,.5,.6\n"),
    "packages: no zip": (lambda path: unpack([path], "net", SHA256, path.parent / "net"), "0", "no zip"),
}
FOLDERS: dict[str, Reader] = {
    "chain: labels in another order": chained(task=LabelTask(("a", "c", "b"))),
    "chain: other labels": chained(task=LabelTask(("a", "b", "d", "e"))),
    "chain: another task": chained(task=RegressionTask(offset=0.0, scale=1.0)),
    "chain: one model twice": chained(of=lambda models: [models[0], models[0]]),
    "chain: one name twice": chained(lambda models: change_card(models[0], name="large")),
    "chain: no calibration": chained(lambda models: (models[0] / CALIBRATION_FILE).unlink()),
    "chain: no tokenizer": chained(lambda models: (models[0] / "tokenizer.json").unlink()),
    "chain: no weights": chained(lambda models: (models[0] / "model.safetensors").unlink()),
    "chain: no card": chained(lambda models: (models[0] / "model.json").unlink()),
    "chain: other inputs": chained(lambda models: change_card(models[0], codec={"name": "text_pair", "max_length": 8})),
    "chain: one model": chained(of=lambda models: models[:1]),
    "chain: in a model's folder": lambda folder: chain_models(models := models_in(folder), models[1]),
    "chain: in another model's folder": lambda folder: chain_models(models_in(folder), put(folder / "other", "other")),
    "chain: of a chain": after(
        lambda models, out: change_card(out, name="both"),
        lambda out: chain_models([put(out.parent / "other", "other"), out], out.parent / "more"),
    ),
    "chain: a model moved": after(
        lambda models, out: models[0].rename(out.parent / "elsewhere"), lambda out: read_card(out).network_folders(out)
    ),
    "chain: a model of more blocks": after(lambda models, out: put(models[0], "small", blocks=4), load_network),
    "chain: models of other labels": after(turned, load_network),
    "chain: no single model": after(lambda models, out: None, load_model),
    **{
        name: after(partial(lambda backbone, models, out: change_card(out, backbone=backbone), backbone), read_card)
        for name, backbone in GOLDEN["chain cards"].items()
    },
    "inject: few rows": injected({}, injecting.rows_of(20)),
    "inject: one class": injected({}, injecting.rows_of(labels=("a",))),
    **{name: injected(options) for name, options in GOLDEN["injected"].items()},
    **{name: trained(kinds.AB, **fields) for name, fields in GOLDEN["trained"].items()},
    "train: one number": trained(kinds.spectra(["1", "1"]), task="regression"),
    "train: no number": trained(kinds.spectra(["1", "x"]), task="regression"),
    "train: other arrays": trained(kinds.ROW),
    "train: images for arrays": trained(),
    "train: coloured images for grey ones": trained(backbone="HERE:grey_network"),
    "train: poses of maps": of_dense("pose", IMAGE, joints=False),
    "train: poses of wide images": of_dense("pose", IMAGE, joints=True),
    "train: segmentation of joints": of_dense("segmentation", IMAGE, joints=True),
    "train: labels of joints": of_dense("label", IMAGE, joints=True),
    "train: poses of texts": of_dense("pose", TOKENS, joints=True),
    "train: no chat template": of_tokens(hf_decoder, chat=True, answers=2),
    "train: an encoder-decoder without answers": of_tokens(partial(hf_seq2seq, "t5")),
    "train: answers start with nothing": of_tokens(partial(hf_seq2seq, "t5", decoder_start_token_id=None), answers=2),
    "profile: ONNX in bfloat16": profiled(small, backend="onnx", dtype="bfloat16"),
    "profile: context of no decoder": profiled(small, lengths=(4,), context=20),
    "profile: a long prompt": profiled(lambda: decoder(hf_decoder())),
    "profile: a long context": profiled(lambda: decoder(hf_decoder()), batches=(1,), context=128),
    **{f"maps: beside {given or 'nothing'}": mapped(given) for given in ("a.png", "", "inner", "../photos")},
    "maps: of texts": lambda folder: map_folder(PredictJob(maps=folder / "maps", data=folder / "t.csv"), {"text": ""}),
    "maps: of an array": lambda folder: map_folder(PredictJob(maps=folder / "maps", data=folder / "x.npy"), IMAGES),
    "maps: of arrays": lambda folder: map_folder(PredictJob(maps=folder / "maps", data=folder / "x.npz"), IMAGES),
    "packages: other weights": lambda folder: unpack(pieces(folder, weights=b"others"), "net", SHA256, folder / "net"),
    "packages: another folder": lambda folder: unpack(pieces(folder, name="other"), "net", SHA256, folder / "net"),
}
REFUSALS = Refusals(module=Path(__file__), name=__name__, cases=CASES, files=FILES, folders=FOLDERS)
test_what_is_refused_is_told_in_the_recorded_words, test_no_other_case_is_recorded = REFUSALS.tests()
