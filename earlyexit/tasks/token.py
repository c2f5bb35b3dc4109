"""Generation: the next token of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.errors import DataError
from earlyexit.network.boundary import Column, Value, array_of
from earlyexit.tasks.base import FloatArray, Task, ValueArray
from earlyexit.tasks.label import label_loss

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 64
"""Number of tokens in an answer, from which one is sampled. Finding them takes 3 % of the vocabulary layer's time."""


class TokenTask(Task):
    """An answer is the most probable tokens, in order, with their log-probabilities. Outputs are logits, (B, V).

    Of equally probable tokens, which are common in bfloat16, the smallest is first, as in `argmax`. The ingress samples
    a token, so that the device's work does not depend on the request's temperature. Two answers agree if their first
    tokens are equal.
    """

    name = "token"
    zero_one = True
    columns = (Column(name="token", datatypes=("INT64",)), Column(name="score", datatypes=("FP32",)))

    def __init__(self, vocab_size: int, ends: Sequence[int] = (), start: int | None = None) -> None:
        """`ends`: tokens that end a sequence. `start`: the first decoder token of an encoder-decoder.

        Raises ValueError for a vocabulary of fewer than two tokens, and for tokens outside the vocabulary.
        """
        if vocab_size < 2:
            raise ValueError(f"vocab_size must be at least 2, not {vocab_size}")
        if any(not 0 <= end < vocab_size for end in ends):
            raise ValueError(f"ends {list(ends)} are not all tokens of a vocabulary of {vocab_size}")
        if start is not None and not 0 <= start < vocab_size:
            raise ValueError(f"start {start} is not a token of a vocabulary of {vocab_size}")
        self.vocab_size = self.num_outputs = vocab_size
        self.start = start
        self.ends = tuple(ends)

    def answer(self, outputs_BC: Tensor) -> Tensor:
        """Returns tokens and their log-probabilities, float32 (B, 2, K). float32 is exact for tokens up to 2**24."""
        import torch

        best = outputs_BC.topk(min(CANDIDATES, self.vocab_size), sorted=False)
        token_BK, by_token_BK = best.indices.sort()
        logit_BK, order_BK = best.values.gather(1, by_token_BK).sort(descending=True, stable=True)
        log_total_B1 = outputs_BC.logsumexp(-1, keepdim=True)
        return torch.stack([token_BK.gather(1, order_BK).float(), logit_BK - log_total_B1], dim=1)

    def score(self, outputs_BC: Tensor) -> Tensor:
        """Returns the probability of the first token minus the second's (softmax response, Schuster et al. 2022)."""
        first_B, second_B = outputs_BC.softmax(-1).topk(2).values.unbind(-1)
        return first_B - second_B

    def loss(self, early: ValueArray, full: ValueArray) -> FloatArray:
        return label_loss(early[:, 0, 0], full[:, 0, 0])

    @property
    def json_schema(self) -> Mapping[str, Any]:
        return {
            "token": {"type": "integer", "description": "The most probable next token."},
            "score": {"type": "number", "description": "Its probability minus that of the second token."},
        }

    def targets(self, labels: Sequence[Any]) -> ValueArray:
        if any(type(label) is not int or not 0 <= label < self.vocab_size for label in labels):
            raise DataError(f"labels must be token ids, whole numbers from 0 to {self.vocab_size - 1}")
        return np.array(labels, dtype=np.int64)

    def training_loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs_BC.float(), targets_B)


def first_token(value: Value) -> int:
    """Returns the most probable token of an answer."""
    return int(array_of(value)[0, 0])
