"""BLEU of the trained model's greedy answers to the 1,000 pictures of the test part.

    OFFRAMP_DATA=... python -m experiments.translation.score [--direction de-en]

By `transformers`, whose tokens ours are (`experiments.generation.same_tokens translation`). One thread, about a minute.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from experiments.data import RUNS
from experiments.translation.bleu import bleu
from experiments.translation.multi30k import TEST, Pairs, directed, pairs_of

BATCH = 64
LONGEST = 80
"""Tokens of an answer."""


def folder_of(direction: str) -> Path:
    """Where the model stays."""
    return RUNS / "translation" / direction


def scored(model: Any, pairs: Pairs, tokenizer: Tokenizer) -> float:
    """In percent."""
    return bleu(translated(model, [source for source, _ in pairs], tokenizer), [target for _, target in pairs])


def translated(model: Any, texts: list[str], tokenizer: Tokenizer) -> list[str]:
    """Greedy answers of `transformers`, in batches of about equal length."""
    from transformers import DynamicCache, EncoderDecoderCache

    sources = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
    pad = model.config.pad_token_id
    found: dict[int, str] = {}
    for first in range(0, len(order), BATCH):
        rows = order[first : first + BATCH]
        longest = max(len(sources[row]) for row in rows)
        source = torch.tensor([sources[row] + [pad] * (longest - len(sources[row])) for row in rows])
        with torch.inference_mode():
            said = model.generate(
                input_ids=source,
                attention_mask=(source != pad).long(),
                max_new_tokens=LONGEST,
                do_sample=False,
                num_beams=1,
                # The one it makes itself has as many layers as the encoder.
                past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
            )
        found |= dict(zip(rows, (text.strip() for text in tokenizer.decode_batch(said.tolist())), strict=True))
    return [found[row] for row in range(len(sources))]


def main() -> None:
    """Load, translate, tell BLEU."""
    from transformers import AutoModelForSeq2SeqLM

    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--direction", choices=("en-de", "de-en"), default="en-de")
    direction = parser.parse_args().direction
    torch.set_num_threads(1)
    folder = folder_of(direction)
    if not (folder / "config.json").is_file():
        raise SystemExit("skipped: python -m experiments.translation.train comes first")
    model = AutoModelForSeq2SeqLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pairs = directed(pairs_of(TEST), direction)
    print(f"BLEU {scored(model, pairs, tokenizer):.1f} on {TEST}, greedy")


if __name__ == "__main__":
    main()
