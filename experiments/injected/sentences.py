"""A text classifier of packages' own code and weights: `transformers`' BERT around the packaged MiniLM.

Packages bring no classifier of texts, so its last layer is fitted here, once, to AG News (four subjects), and kept
beside the other runs. `classifier` is what `offramp inject` is given.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.dataset import LabelledRows
from experiments.data import RUNS, require_data
from offramp.jobs.packaged import resolve_backbone

TEXTS = "ag_news/test.csv"
SUBJECTS = ("World", "Sports", "Business", "Sci/Tech")
HEAD = RUNS / "injected" / "sentences-head.safetensors"
FITTED = 1500
MAX_LENGTH = 64


def news(first: int, end: int) -> LabelledRows:
    """Some of AG News' test part: headline and beginning, and the subject."""
    with require_data(TEXTS).open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    order = np.random.default_rng(0).permutation(len(rows))[first:end]
    texts = [f"{rows[k][1]}. {rows[k][2]}" for k in order]
    return LabelledRows.of_texts(texts, [SUBJECTS[int(rows[k][0]) - 1] for k in order])


class Classifier(nn.Module):
    """BertForSequenceClassification, its answer alone."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertForSequenceClassification

        place = resolve_backbone("minilm")
        self.bert = BertForSequenceClassification.from_pretrained(place, num_labels=len(SUBJECTS), dtype=torch.float32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def classifier() -> tuple[nn.Module, dict[str, Tensor]]:
    """With its last layer as it was fitted."""
    from safetensors.torch import load_file

    network = Classifier().eval()
    network.bert.classifier.load_state_dict(load_file(fitted_head()))
    ids = torch.randint(1000, 2000, (2, 9), generator=torch.Generator().manual_seed(0))
    return network, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def fitted_head() -> Path:
    """The file of the last layer; fitted where it is missing."""
    if HEAD.is_file():
        return HEAD
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    network, rows = Classifier().eval(), news(0, FITTED)
    tokenizer = AutoTokenizer.from_pretrained(resolve_backbone("minilm"))
    pooled = []
    for start in range(0, len(rows), 50):
        texts = list(rows.texts[start : start + 50])
        batch = tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        with torch.no_grad():
            pooled.append(network.bert.bert(batch["input_ids"], batch["attention_mask"]).pooler_output)
    targets = torch.tensor([SUBJECTS.index(label) for label in rows.labels])
    save_file(_fit(network.bert.classifier, torch.cat(pooled), targets), _made(HEAD))
    return HEAD


def _fit(layer: nn.Linear, pooled_ND: Tensor, target_N: Tensor) -> dict[str, Tensor]:
    """Logistic regression with a little weight decay."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(pooled_ND), target_N).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
