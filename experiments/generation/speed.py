"""Measures the engine of a decoder with sequences that begin and end: stock, shrinking and constant batches.

    python -m experiments.generation.speed SmolLM2-135M-Instruct.Q4_1.gguf --data $OFFRAMP_DATA/ag_news/test.csv

Runs one thread in one process without Ray and HTTP, on encoded inputs. `--concurrency` sequences run at once; when one
ends, the next begins (continuous batching). Exits are scripted: `--share` of the tokens, drawn at random, leave after
block `--ramp`, and prompts run all blocks. The ramp is a norm and the full model's head, computed for leaving tokens.
So costs are real but texts are not, and all variants generate the same number of tokens. Variants take turns within
each round; figures are medians. Minutes: about 15 for `--rounds 1 --tokens 16`.
"""

from __future__ import annotations

import time
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
import torch
from tokenizers import Tokenizer

from earlyexit.backends import open_segments
from earlyexit.clock import Clock, MonotonicClock
from earlyexit.engine.device import Answered, Device, Release
from earlyexit.engine.engine import BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.named import Fill
from earlyexit.network.boundary import FloatName, PackedArray, Split, entry_piece
from earlyexit.network.checkpoint import RampOptions, add_ramps, copy_tokenizer, load_pretrained
from earlyexit.network.cut import TorchRunner
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece
from earlyexit.policies.base import Decision, ExitOutput, ExitPolicy
from earlyexit.sequences.sequence import PAGE_TOKENS, Sampling, TextStream, TokenSequence
from earlyexit.tasks.token import TokenTask
from experiments.turns import Figures, in_turns, print_figures


@dataclass(frozen=True, slots=True)
class Job:
    """A sequence to generate."""

    prompt: tuple[int, ...]
    tokens: int


@dataclass(slots=True)
class TokenTimes:
    """The due time of a sequence, and the time of each of its tokens, in seconds on one clock."""

    due_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)


# The engine under one plan.

PROMPT = "prompt"
"""Prefix of the sample ids of steps that run a prompt."""


class ScriptedPolicy(ExitPolicy):
    """A share of all tokens leaves, drawn by their sample ids."""

    name = "scripted"
    foresees = "classifier"

    def __init__(self, share: float) -> None:
        self._share = share

    def decide(self, ramp: int, output: ExitOutput, state_BS: torch.Tensor, sample_ids: Sequence[str]) -> Decision:
        leave = [not each.startswith(PROMPT) and _drawn(each) < self._share for each in sample_ids]
        return Decision(leave_B=torch.tensor(leave), value_B=None, score_B=torch.ones(len(leave)), state_BS=state_BS)


def _drawn(sample_id: str) -> float:
    return zlib.crc32(sample_id.encode()) / 2**32


class Engine:
    """A device under one plan that generates a number of sequences at once."""

    def __init__(
        self,
        model: EarlyExitModel,
        splits: Sequence[Split],
        policy: ExitPolicy,
        text: Tokenizer,
        clock: Clock | None = None,
        fill: Fill | None = None,
    ) -> None:
        """Builds the device; `clock` None: the machine's clock, `fill` None: the backbone's."""
        assert isinstance(model.backbone, DecoderBackbone)
        assert isinstance(model.task, TokenTask)
        self.backbone, self._task = model.backbone, model.task
        self._fill = fill or self.backbone.fill
        self._text = text
        self._clock = MonotonicClock() if clock is None else clock
        self._runner = TorchRunner(model, policy, open_segments("torch", model, Path(), 1))
        engine: BatchEngine[Piece] = BatchEngine(splits, ObservedTimes())
        self.device = Device(engine, self._runner, self._clock, self._deliver)
        self._serial = 0
        self.under_way: dict[int, tuple[TokenSequence, TokenTimes]] = {}

    def run(self, jobs: Sequence[Job], concurrency: int, chunk: int) -> list[TokenTimes]:
        """Generates all sequences; `chunk` is the largest number of prompt tokens in one step."""
        self.backbone.fill = self._fill
        self.reset(jobs, chunk)
        for _ in range(min(concurrency, len(jobs))):
            self.begin(self._jobs.pop(), self._clock.now_s())
        self.device.run_until_idle()
        assert len(self.finished) == len(jobs)
        assert not self.backbone.memory.kv.sequences
        return self.finished

    def reset(self, waiting: Sequence[Job], chunk: int) -> None:
        """Clears earlier runs; one of `waiting` begins whenever a sequence ends."""
        self._jobs, self._chunk, self.finished = list(waiting)[::-1], chunk, list[TokenTimes]()

    def begin(self, job: Job, due_s: float) -> None:
        """Queues the first step of a sequence that was due at `due_s`."""
        self._serial += 1
        sequence = TokenSequence(
            job.prompt,
            TextStream(self._text, job.prompt),
            max_tokens=job.tokens,
            max_length=self.backbone.max_length,
            ends=self._task.ends,
            sampling=Sampling(),
            chunk=self._chunk,
            start=self._task.start,
        )
        sequence.begin(self._serial)
        self.under_way[self._serial] = sequence, TokenTimes(due_s)
        self._submit(self._serial, sequence)

    def _submit(self, number: int, sequence: TokenSequence) -> None:
        step = sequence.step()
        kind = "step" if sequence.num_generated else PROMPT
        sample_id = f"{kind}:{len(sequence.tokens)}:{int(step.tensors[1][0, 2])}:{number}"
        (piece,) = self._runner.from_wire(entry_piece([sample_id], [step])).singles()
        member = Member(sample_id=sample_id, payload=piece, tokens=step.length)
        self.device.engine.submit(0, [member], self._clock.now_s())

    def _deliver(self, releases: list[Release[Piece]]) -> None:
        now_s = self._clock.now_s()
        for release in releases:
            assert isinstance(release, Answered), release
            number = int(release.answer.sample_id.rpartition(":")[2])
            sequence, times = self.under_way[number]
            assert isinstance(release.answer.value, PackedArray)
            if sequence.answered(release.answer.value.numpy(), release.answer.exit) is not None:
                times.token_s.append(now_s)
            if sequence.ended is None:
                self._submit(number, sequence)
                continue
            self.backbone.memory.end(number)
            del self.under_way[number]
            self.finished.append(times)
            if self._jobs:
                self.begin(self._jobs.pop(), self._clock.now_s())


SPENT = "ms of processor time per token"


def draw_jobs(options: Namespace, text: Tokenizer, num_sequences: int) -> list[Job]:
    """Returns prompts cut from real texts, and lengths of answers from half to one and a half times the mean."""
    rng = np.random.default_rng(0)
    ids = text.encode(options.data.read_text(encoding="utf-8")[:400_000]).ids
    firsts = rng.integers(0, len(ids) - options.prompt, size=num_sequences)
    lengths = rng.integers(options.tokens // 2, options.tokens * 3 // 2 + 1, size=num_sequences)
    return [
        Job(tuple(ids[first : first + options.prompt]), int(length))
        for first, length in zip(firsts, lengths, strict=True)
    ]


def plans(last: int, ramps: tuple[int, ...], batch: int, fills: Sequence[Fill]) -> dict[str, tuple[list[Split], Fill]]:
    """Returns the compared plans by name, with the rule that gives skipped blocks their keys and values."""
    found: dict[str, tuple[list[Split], Fill]] = {"stock": ([Split(first=0, end=last, batch=batch)], "compute")}
    for fill in fills:
        found[f"shrinking, {fill}"] = [Split(first=0, end=last, batch=batch, ramps=ramps)], fill
        found[f"constant, {fill}"] = _cut(last, ramps, batch), fill
        if batch > 1:
            found[f"constant of half, {fill}"] = _cut(last, ramps, batch // 2), fill
    return found


def _cut(last: int, ramps: tuple[int, ...], batch: int) -> list[Split]:
    first, *others = ramps
    return [
        Split(first=0, end=first + 1, batch=batch, ramps=(first,)),
        Split(first=first + 1, end=last, batch=batch, ramps=tuple(others)),
    ]


def figures(side: Engine, jobs: Sequence[Job], concurrency: int, chunk: int) -> Figures:
    """Returns the figures of one run of all jobs."""
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    finished = side.run(jobs, concurrency, chunk)
    took_s, spent_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    num_tokens = sum(job.tokens for job in jobs)
    assert num_tokens == sum(len(each.token_s) for each in finished)
    return {
        "tokens/s": num_tokens / took_s,
        SPENT: 1e3 * spent_s / num_tokens,
        "ms to the first token, p50": 1e3 * median(each.ttft_s for each in finished),
        "ms per further token, p50": 1e3 * median(each.tpot_s for each in finished),
    }


def main() -> None:
    """Measures and prints."""
    parser = ArgumentParser(prog="python -m experiments.generation.speed", description=__doc__)
    parser.add_argument("model", type=Path, help="a decoder's .gguf, or its folder")
    parser.add_argument("--data", type=Path, required=True, help="text file from which prompts are cut")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="mean tokens of an answer")
    parser.add_argument("--ramp", type=int, default=14)
    parser.add_argument("--share", type=float, default=0.5, help="share of tokens that leave at the ramp")
    parser.add_argument("--dtype", choices=get_args(FloatName), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, help="default: twice the concurrency, at least four")
    parser.add_argument("--chunk", type=int, default=64, help="largest number of prompt tokens in one step")
    parser.add_argument("--fills", nargs="+", choices=get_args(Fill), default=get_args(Fill))
    parser.add_argument("--warm-ups", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--sides", nargs="+", default=[""], help="prefixes of the names of the compared variants")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text, model = loaded(options)
    policy, ramps = ScriptedPolicy(options.share), (options.ramp,)
    for concurrency in options.concurrency:
        jobs = draw_jobs(options, text, options.sequences or max(4, 2 * concurrency))
        engines = {
            name: Engine(model, splits, policy, text, fill=fill)
            for name, (splits, fill) in plans(model.num_blocks, ramps, concurrency, options.fills).items()
            if name.startswith(tuple(options.sides))
        }
        turns = {name: partial(figures, side, jobs, concurrency, options.chunk) for name, side in engines.items()}
        found = in_turns(turns, options.rounds, warm_ups=options.warm_ups)
        print_figures(f"{concurrency} at once, {len(jobs)} sequences, ramps after {ramps}, {options.dtype}", found)


def loaded(options: Namespace) -> tuple[Tokenizer, EarlyExitModel]:
    """Returns the tokenizer, and a model with a ramp and memory for its sequences."""
    with TemporaryDirectory() as folder:
        copy_tokenizer(str(options.model), Path(folder))
        text = Tokenizer.from_file(f"{folder}/tokenizer.json")
    pretrained, family = load_pretrained(str(options.model))
    backbone = pretrained.backbone.to(getattr(torch, options.dtype))
    assert isinstance(backbone, DecoderBackbone)
    model = add_ramps(
        pretrained,
        name="scripted",
        family=family,
        codec={"name": "prompt", "max_length": backbone.max_length},
        task=TokenTask(backbone.config.vocab_size),
        ramps=RampOptions(style="normed", at=(options.ramp,), pooling="last"),
    )
    model = model.to(getattr(torch, options.dtype)).eval().requires_grad_(False)
    tokens = options.prompt + 2 * options.tokens + PAGE_TOKENS
    backbone.open_store(max(options.concurrency) * (tokens // PAGE_TOKENS + 1))
    return text, model


if __name__ == "__main__":
    main()
