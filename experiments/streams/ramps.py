"""SmolLM2's folder with ramps that learned of the prompts that streams are measured with, and thresholds of others.

    OFFRAMP_DATA=... python -m experiments.streams.ramps [--budget 0.2] [--out runs/streams/ramps]

Ramps learn of what the full model says within the beginnings of 400 news (AG News, the part for learning), and of its
own answers to them with `--said`, in bfloat16 where this processor multiplies that faster; thresholds are those of
`offramp calibrate`, on beginnings of the part for tests that nobody else is given, in float32. Minutes of two cores: 4.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from earlyexit.checkpoint import RampOptions, add_ramps, copy_tokenizer, ends_of, load_pretrained
from earlyexit.codecs import find_codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.cpu import has_bfloat16
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.model import EarlyExitModel
from earlyexit.offline import Asked, generate
from earlyexit.store import save_model
from earlyexit.tasks.token import TokenTask
from earlyexit.training.tokens import TOKEN_OPTIONS, token_states, train_token_ramps
from experiments.data import RUNS
from experiments.generation.demo import weights
from experiments.streams.news import to_calibrate, to_learn
from experiments.streams.weights import transformers_folder

RAMPS = (11, 17, 22, 26)
BATCH = 64
CLOCK = time.perf_counter


def main() -> None:
    """Learn, calibrate."""
    options = _options()
    torch.set_num_threads(options.threads)
    out: Path = options.out
    if not (out / "model.json").is_file():
        out.mkdir(parents=True, exist_ok=True)
        learn(out, to_learn()[: options.learned], options)
    rows = _written(out / "others.csv", to_calibrate()[: options.calibrated])
    asked = ("--answers", str(options.tokens), "--budget", str(options.budget))
    calibrate = (sys.executable, "-m", "offramp", "calibrate", str(out), "--data", str(rows), *asked)
    subprocess.run(calibrate, check=True)


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m experiments.streams.ramps", description=__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "streams" / "ramps")
    parser.add_argument("--learned", type=int, default=400, help="beginnings that ramps learn of")
    parser.add_argument("--said", type=int, default=0, help="tokens of the model's answers to them, learned of as well")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--calibrated", type=int, default=240, help="beginnings that thresholds are found by")
    parser.add_argument("--tokens", type=int, default=16, help="of these answers")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def learn(out: Path, texts: Sequence[str], options: Namespace) -> None:
    """Save a model whose ramps learned of what it says within these beginnings, and behind them where it was asked."""
    source = transformers_folder(weights(), RUNS / "streams" / "smollm2")
    fast = torch.bfloat16 if has_bfloat16() else torch.float32
    model, teacher = (_untrained(source, texts, options) for _ in range(2))
    for part in (teacher.backbone, teacher.ramps, teacher.head):
        part.to(fast)
    copy_tokenizer(str(source), out)
    codec = find_codec(model.info.codec, out)
    assert isinstance(codec, PromptCodec)
    assert isinstance(model.task, TokenTask)
    tokens: Sequence[Sequence[int]] = [codec.tokens(text) for text in texts]
    if options.said:
        asked = Asked(max_tokens=options.said, ends=frozenset(model.task.ends), batch=BATCH)
        tokens = [each.tokens for each in generate(teacher, tokens, asked, _told)]
    training = replace(TOKEN_OPTIONS, epochs=options.epochs, seed=0, progress=_told)
    # Without a cache, for it would keep what the first step made of the weights.
    with torch.autocast("cpu", torch.bfloat16, enabled=fast is torch.bfloat16, cache_enabled=False):
        learned = token_states(teacher, tokens, [1] * len(tokens), training)
        train_token_ramps(model, learned, training)
    save_model(model, out)


def _untrained(source: Path, texts: Sequence[str], options: Namespace) -> EarlyExitModel:
    pretrained, family = load_pretrained(str(source))
    assert isinstance(pretrained.backbone, DecoderBackbone)
    model = add_ramps(
        pretrained,
        name="smollm2",
        family=family,
        codec={"name": PromptCodec.name, "max_length": 1024},
        task=TokenTask(pretrained.backbone.config.vocab_size, ends_of(str(source))),
        ramps=RampOptions(style="adapted", pooling="last", at=RAMPS),
        provenance={
            "data": "AG News, the part for learning",
            "rows": len(texts),
            "answers": options.said or None,
            "chat": False,
        },
    )
    return model.eval().requires_grad_(False)


def _told(what: str, done: int, total: int) -> None:
    print(f"{CLOCK():.0f} s, {what}: {done} of {total}", file=sys.stderr, flush=True)


def _written(path: Path, texts: Sequence[str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    return path


if __name__ == "__main__":
    main()
