"""Train a T5 of 2 encoder and 8 decoder blocks of 128 to translate English to German on Multi30k.

    OFFRAMP_DATA=... python -m experiments.translation.train [--minutes 17] [--direction de-en] [--go-on]

Decoder blocks are as many as in CALM's T5 (Schuster et al. 2022, section 5), whose exits E3 serves (figures 10 and 11).
`--minutes` is processor time, all threads together; the learning rate falls to nothing by then, however busy the
machine is. A joint byte-level BPE is trained first. The model stays in runs/translation/en-de as a `transformers`
folder with its tokenizer, written anew every tenth of the time; the last lines say BLEU of greedy answers to the 1,000
pictures of the test part, and where the folder is. One thread; seed 0, but how far it comes depends on the machine.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from experiments.translation.multi30k import TEST, TRAIN, VALIDATION, Pairs, directed, pairs_of
from experiments.translation.score import folder_of, scored

VOCABULARY = 3000
PAD, END = 0, 1
"""The decoder begins with the first, as every T5."""
SIZES = {"d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 8}
BATCH_TOKENS = 2048
RATE, EMBEDDING_RATE = 3e-3, 5e-3
"""Embeddings are born with deviation 1, other weights far smaller."""
WARMUP = 0.06
NOT_COUNTED = -100
TOLD = 10


def trained_tokenizer(pairs: Pairs) -> Tokenizer:
    """BPE of both languages' bytes; a text ends with the token that ends a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of sources and targets."""

    source: list[list[int]]
    target: list[list[int]]

    @classmethod
    def of(cls, pairs: Pairs, tokenizer: Tokenizer) -> Rows:
        """Encoded."""
        texts = zip(*pairs, strict=True)
        return cls(*([each.ids for each in tokenizer.encode_batch(list(side))] for side in texts))

    def batches(self, random: Random) -> Iterator[dict[str, Tensor]]:
        """All rows once, in batches of about equal length, in random order."""
        order = sorted(range(len(self.source)), key=lambda row: len(self.target[row]) + random.random() * 4)
        batches: list[list[int]] = [[]]
        for row in order:
            longest = max(len(self.source[each]) + len(self.target[each]) for each in (*batches[-1], row))
            if longest * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(row)
        random.shuffle(batches)
        for rows in batches:
            source = padded([self.source[row] for row in rows], PAD)
            labels = padded([self.target[row] for row in rows], NOT_COUNTED)
            yield {"input_ids": source, "attention_mask": (source != PAD).long(), "labels": labels}


def padded(rows: list[list[int]], filler: int) -> Tensor:
    """(B, T), the rows' ends filled up."""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def new_model() -> Any:
    """With random weights."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        **SIZES,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )
    # Torch's fused attention takes half of a step's time here, its backward in bfloat16 on a CPU most of that.
    return T5ForConditionalGeneration._from_config(config, attn_implementation="eager")


def _trained(folder: Path) -> Any:
    from transformers import T5ForConditionalGeneration

    return T5ForConditionalGeneration.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager")


def loss_of(model: Any, batch: dict[str, Tensor], smoothing: float) -> Tensor:
    """Per token of the targets."""
    labels_BT = batch["labels"]
    counted_BT = labels_BT != NOT_COUNTED
    before_BT = torch.nn.functional.pad(labels_BT[:, :-1].where(counted_BT[:, :-1], PAD), (1, 0), value=PAD)
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits_BTV = model(**source, decoder_input_ids=before_BT, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits_BTV[counted_BT].float(), labels_BT[counted_BT], label_smoothing=smoothing
    )


def train(model: Any, rows: Rows, validation: Rows, tokenizer: Tokenizer, folder: Path, *, minutes: float) -> None:
    """Until the time is up; every tenth of it a line, and the folder written."""
    shared = model.shared.weight
    others = [each for each in model.parameters() if each is not shared]
    groups = [{"params": others, "peak": RATE}, {"params": [shared], "peak": EMBEDDING_RATE}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    begun, losses, told = process_time(), list[float](), 0
    for batch in over_and_over(rows, Random(0)):
        done = min((process_time() - begun) / 60 / minutes, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min(done / WARMUP, (1 - done) / (1 - WARMUP))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch, smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if int(done * TOLD) == told:
            continue
        told = int(done * TOLD)
        validated = validation_loss(model, validation)
        model.save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        recent = losses[-200:]
        print(
            f"{done:4.0%}  steps {len(losses):6}  loss {sum(recent) / len(recent):6.3f}  validation {validated:6.3f}",
            flush=True,
        )
        if done == 1:
            return


def over_and_over(rows: Rows, random: Random) -> Iterator[dict[str, Tensor]]:
    """Epoch after epoch."""
    while True:
        yield from rows.batches(random)


def validation_loss(model: Any, rows: Rows) -> float:
    """Per token, the mean of batches."""
    model.eval()
    with torch.inference_mode():
        losses = [loss_of(model, batch, smoothing=0.0).item() for batch in rows.batches(Random(0))]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    """Train, translate the test part, tell BLEU."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=17.0)
    parser.add_argument("--direction", choices=("en-de", "de-en"), default="en-de")
    parser.add_argument("--go-on", action="store_true", help="from the folder's weights, rates from their top again")
    options = parser.parse_args()
    parts = {part: directed(pairs_of(part), options.direction) for part in (TRAIN, VALIDATION, TEST)}
    tokenizer = trained_tokenizer(parts[TRAIN])
    rows = {part: Rows.of(pairs, tokenizer) for part, pairs in parts.items()}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = folder_of(options.direction)
    folder.mkdir(parents=True, exist_ok=True)
    model = (_trained(folder) if options.go_on else new_model()).train()
    train(model, rows[TRAIN], rows[VALIDATION], tokenizer, folder, minutes=options.minutes)
    print(f"BLEU {scored(model.eval(), parts[TEST], tokenizer):.1f} on {TEST}, greedy")
    print(f"the model is in {folder}")


if __name__ == "__main__":
    main()
