"""Sentence pairs: RTE and QNLI on MiniLM-L6 with token types, beside `transformers`, and served.

    OFFRAMP_DATA=... python -m experiments.trained.sentence_pairs [--task rte] [--limit 500] [--no-serve]

First the logits of a BertForSequenceClassification around MiniLM, its classifier random, against ours on packed pairs,
uncut and cut after every block. Then the whole way: joint training, calibration, test pairs, and the same pairs sent to
a running service. RTE trains on its train part; of QNLI only the dev part is at hand, which is divided 3:1:1.
The models stay in runs/. Minutes: about 12 on two cores. Seed 0.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.checkpoint import RampOptions, add_ramps, load_pretrained
from earlyexit.codecs import find_codec
from earlyexit.dataset import LabelledRows, read_labelled
from earlyexit.model import EarlyExitModel
from earlyexit.signature import Encoded
from earlyexit.store import read_card
from earlyexit.tasks.label import LabelTask
from earlyexit.train import pack
from experiments.data import RUNS, require_data
from experiments.models import finished
from offramp.client.client import Client
from offramp.jobs.calibration import CalibrateJob
from offramp.jobs.packaged import resolve_backbone
from offramp.jobs.train_job import TrainJob
from optimizer.plan import PolicySpec, serial_plan
from optimizer.risk import Guarantee

MAX_LENGTH = 256
BATCH = 32
GUARANTEE = Guarantee(budget=0.05, confidence=0.90)
"""Few pairs are left to calibrate with, and a small model is unsure of them."""


def read_task(name: str) -> tuple[LabelledRows, LabelledRows, LabelledRows]:
    """Pairs to learn from, to calibrate with, and to report on."""
    if name == "rte":
        known, test = (
            read_labelled(require_data(f"glue_pairs/RTE_{part}.tsv"), text_column="sentence1", pair_column="sentence2")
            for part in ("train", "dev")
        )
        learn, validate = known.divide(0.3, seed=0)
        return learn, validate, test
    known = read_labelled(require_data("glue_pairs/QNLI_dev.tsv"), text_column="question", pair_column="sentence")
    learn, rest = known.divide(0.4, seed=0)
    validate, test = rest.divide(0.5, seed=0)
    return learn, validate, test


@torch.inference_mode()
def logits_apart(pairs: LabelledRows) -> float:
    """The largest difference of a logit between `transformers` and us, over all pairs and cuts."""
    from transformers import AutoTokenizer, BertForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()  # that the classifier is new is known
    logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        theirs = BertForSequenceClassification.from_pretrained(resolve_backbone("minilm"), num_labels=2).eval()
        tokenizer = AutoTokenizer.from_pretrained(resolve_backbone("minilm"))
        theirs.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ours = _model(folder)
        encoded = pairs.encode(find_codec(ours.info.codec, Path(folder)))
    apart = 0.0
    for start in range(0, len(encoded), BATCH):
        rows = slice(start, start + BATCH)
        texts = [list(column[rows]) for column in pairs.columns.values()]
        padded = tokenizer(*texts, padding=True, truncation="longest_first", max_length=MAX_LENGTH, return_tensors="pt")
        wanted_BC = theirs(**padded).logits
        for cut in range(ours.num_blocks):
            apart = max(apart, float((_logits(ours, encoded[rows], cut) - wanted_BC).abs().max()))
    return apart


def run(name: str, *, serve: bool) -> None:
    """Train unless it was, calibrate, report, serve; prints its figures."""
    folder = RUNS / f"pairs-{name}"
    learn, validate, test = read_task(name)
    minilm = resolve_backbone("minilm")
    job = TrainJob(backbone=minilm, name=f"pairs-{name}", joint=True, max_length=MAX_LENGTH, source=name)
    calibration = CalibrateJob(guarantee=GUARANTEE, source=name)
    card, outcome = finished(folder, job, calibration, (learn, validate, test))
    print(
        f"{name}: {len(learn)} pairs to learn from, {len(validate)} to calibrate with, {len(test)} unseen: agreement "
        f"{outcome.agreement:.2%}, accuracy {outcome.accuracy:.2%} (full model {outcome.full_accuracy:.2%}), "
        f"{outcome.mean_blocks:.2f} of {outcome.num_blocks} blocks",
        flush=True,
    )
    if serve:
        answered = served_exits(folder, card.policy_spec(), test)
        same = sum(one == another for one, another in zip(answered, outcome.exits_N.tolist(), strict=True))
        print(
            f"{name}: served {len(answered)} pairs, {same} of them left by the exit they were recorded at", flush=True
        )


def served_exits(folder: Path, policy: PolicySpec, pairs: LabelledRows) -> list[int]:
    """The exits by which a running service answers the pairs."""
    ramps = tuple(sorted(policy.thresholds)) if isinstance(policy.thresholds, dict) else ()
    plan = serial_plan(read_card(folder).num_blocks, ramps, policy, batch=BATCH)
    rows = list(zip(*(column.tolist() for column in pairs.columns.values()), strict=True))
    settings = ServeSettings(model=str(folder), plan=plan)
    with serving(settings, LocalCluster()) as url, Client(url, timeout_s=60.0) as client:
        client.wait_until_ready(timeout_s=120.0)
        answers = [
            answer for start in range(0, len(rows), 64) for answer in client.predict_many(rows[start : start + 64])
        ]
    return [answer.exit for answer in answers]


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(prog="python -m experiments.trained.sentence_pairs", description=__doc__)
    parser.add_argument("--task", choices=("rte", "qnli"), action="append")
    parser.add_argument("--limit", type=int, default=500, help="pairs whose logits are compared")
    parser.add_argument("--no-serve", dest="serve", action="store_false")
    options = parser.parse_args()
    for name in options.task or ("rte", "qnli"):
        test = read_task(name)[2]
        some = test.select(range(min(options.limit, len(test))))
        print(
            f"{name}: logits of {len(some)} pairs differ by at most {logits_apart(some):.1e}, for every cut", flush=True
        )
        run(name, serve=options.serve)


def _model(folder: str) -> EarlyExitModel:
    pretrained, family = load_pretrained(folder, pairs=True)
    assert pretrained.label_names is not None
    return add_ramps(
        pretrained,
        name="pairs",
        family=family,
        codec={"name": "text_pair", "max_length": MAX_LENGTH},
        task=LabelTask(pretrained.label_names),
        ramps=RampOptions(),
    )


def _logits(model: EarlyExitModel, encoded: Sequence[Encoded], cut: int) -> Tensor:
    values, layout = pack(encoded, model.device)
    if cut:
        values = model.run_blocks(0, cut, values, layout)
    hidden = model.run_blocks(cut, model.num_blocks, values, layout)
    return model.exit_outputs(model.num_blocks - 1, hidden, layout)


if __name__ == "__main__":
    main()
