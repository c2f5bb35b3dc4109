"""Exits of decoders: a head over the vocabulary, which all exits share.

In SmolLM2 that layer has a fifth of all weights and costs as much as eight blocks, so ramps have no such layer of their
own. A small classifier, trained to predict whether the ramp's answer equals the full model's, decides before the layer
is computed whether it is worth it (Schuster et al. 2022, CALM, section 3.4). Legend: B inputs, D hidden size, V tokens,
R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.ramps.heads import Ramp, flat_outputs
from earlyexit.ramps.pooling import Pooling, pooled_size

RANK = 64
"""Rank of an adapter: a ninth of SmolLM2's hidden size of 576, 74,000 weights."""
HIDDEN = 64
"""Width of the classifier."""
NORM_EPS = 1e-5


class VocabularyHead(Ramp):
    """A linear layer without a bias, to the logits of all tokens; it may share its weights with the embedding."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape), bias=False)

    def classify(self, gathered: Tensor) -> Tensor:
        outputs_BV: Tensor = self.classifier(gathered)
        return outputs_BV


class BiasedVocabularyHead(VocabularyHead):
    """A vocabulary head with a bias per token, as in Marian: minus infinity for tokens that are never generated."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        self.bias_V = nn.Parameter(torch.zeros(flat_outputs(output_shape)))

    def classify(self, gathered: Tensor) -> Tensor:
        return super().classify(gathered) + self.bias_V


class NormedRamp(Ramp):
    """A norm and the full model's head, as in CALM. It learns the norm's weights and the classifier."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        flat_outputs(output_shape)
        self.norm = nn.RMSNorm(size, eps=NORM_EPS)
        self.sureness = nn.Sequential(
            nn.RMSNorm(size, eps=NORM_EPS), nn.Linear(size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )
        self._shared: tuple[VocabularyHead, ...] = ()  # in a tuple, so that its weights do not count as the ramp's own

    def share(self, head: VocabularyHead) -> None:
        """Use this head for answers from now on."""
        self._shared = (head,)

    def adapted(self, gathered: Tensor) -> Tensor:
        """Returns the state adapted to the shared head, before the norm; here the state itself."""
        return gathered

    def prepared(self, gathered: Tensor) -> Tensor:
        """Returns the input of the shared head."""
        rows_BD: Tensor = self.norm(self.adapted(gathered))
        return rows_BD

    def classify(self, gathered: Tensor) -> Tensor:
        assert self._shared, "a ramp that shares the full model's head was not given it"
        return self._shared[0].classify(self.prepared(gathered))

    def foresee(self, gathered: Tensor) -> Tensor:
        """Returns the log-odds that its answer is the full model's, (B,), from what `gather` returns."""
        log_odds_B: Tensor = self.sureness(gathered).squeeze(-1)
        return log_odds_B


class AdaptedRamp(NormedRamp):
    """A normed ramp behind an adapter: two thin layers whose result is added to the state (Hu et al. 2021, LoRA)."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        size = pooled_size(row, pooling)
        self.narrow = nn.Linear(size, RANK, bias=False)
        self.widen = nn.Linear(RANK, size, bias=False)

    def adapted(self, gathered: Tensor) -> Tensor:
        # In the state's own scale, which grows from block to block; the norm behind it removes the scale again.
        scale_B1 = gathered.square().mean(-1, keepdim=True).sqrt()
        change_BD: Tensor = self.widen(F.silu(self.narrow(F.rms_norm(gathered, gathered.shape[-1:], eps=NORM_EPS))))
        return torch.addcmul(gathered, scale_B1, change_BD)
