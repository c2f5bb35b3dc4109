"""Exits of decoders: a head of every token of a vocabulary, which all of them share.

Of SmolLM2 that layer is a fifth of all weights and costs what eight blocks do, so a ramp has none of its own, and a
small classifier, trained to know when the ramp says what the full model would, can tell before it is computed whether
it is worth it (Schuster et al. 2022, CALM, section 3.4). Legend: B inputs, D hidden size, V tokens, R rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.ramps.heads import Ramp, flat_outputs
from earlyexit.ramps.pooling import Pooling, pooled_size

RANK = 64
"""Of an adapter: of SmolLM2's 576 numbers a ninth, 74,000 weights."""
HIDDEN = 64
"""Of the classifier."""
NORM_EPS = 1e-5


class VocabularyHead(Ramp):
    """A linear layer without a bias, to every token's logit; its weights may be those of the embedding."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape), bias=False)

    def classify(self, gathered: Tensor) -> Tensor:
        outputs_BV: Tensor = self.classifier(gathered)
        return outputs_BV


class BiasedVocabularyHead(VocabularyHead):
    """With a bias of every token, as Marian has it; of those that are never said minus infinity."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        self.bias_V = nn.Parameter(torch.zeros(flat_outputs(output_shape)))

    def classify(self, gathered: Tensor) -> Tensor:
        return super().classify(gathered) + self.bias_V


class ForeseeingRamp(Ramp):
    """One that says how sure it is before it says of what."""

    @abstractmethod
    def foresee(self, gathered: Tensor) -> Tensor:
        """How likely its answer is the full model's, by what `gather` gives; log-odds, (B,)."""


class NormedRamp(ForeseeingRamp):
    """A norm, and the full model's head, as CALM has it: what it learns is a norm's weights and the classifier."""

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
        """Answer by this head from now on."""
        self._shared = (head,)

    def adapted(self, gathered: Tensor) -> Tensor:
        """The state made more like one that has run all blocks, before the norm: here as it is."""
        return gathered

    def prepared(self, gathered: Tensor) -> Tensor:
        """What the shared head looks at."""
        rows_BD: Tensor = self.norm(self.adapted(gathered))
        return rows_BD

    def classify(self, gathered: Tensor) -> Tensor:
        assert self._shared, "a ramp that shares the full model's head was not given it"
        return self._shared[0].classify(self.prepared(gathered))

    def foresee(self, gathered: Tensor) -> Tensor:
        log_odds_B: Tensor = self.sureness(gathered).squeeze(-1)
        return log_odds_B


class AdaptedRamp(NormedRamp):
    """The same behind two thin layers that are added to the state, as adapters are (Hu et al. 2021, LoRA)."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        size = pooled_size(row, pooling)
        self.narrow = nn.Linear(size, RANK, bias=False)
        self.widen = nn.Linear(RANK, size, bias=False)

    def adapted(self, gathered: Tensor) -> Tensor:
        # Of the state's own scale, which grows from block to block: the norm behind it takes out what is too much.
        scale_B1 = gathered.square().mean(-1, keepdim=True).sqrt()
        change_BD: Tensor = self.widen(F.silu(self.narrow(F.rms_norm(gathered, gathered.shape[-1:], eps=NORM_EPS))))
        return torch.addcmul(gathered, scale_B1, change_BD)
