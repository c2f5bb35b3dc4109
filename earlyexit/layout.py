"""Where every token of a packed set of inputs is.

Tensor legend, used in the whole folder: B inputs, N tokens of all inputs one after the other (packed, no padding),
T tokens of the longest input, D hidden, H heads, C classes, E exits, S width of the exit policy's state.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.wire import Lengths


class Layout:
    """Index tensors derived from the lengths of a packed set of inputs; each is computed once, when first used."""

    def __init__(self, lengths_B: Lengths, device: torch.device | str = "cpu") -> None:
        self.lengths_B = lengths_B
        self.device = torch.device(device)
        self.num_inputs = len(lengths_B)
        self.num_tokens = int(lengths_B.sum())
        self.longest = int(lengths_B.max(initial=0))

    @property
    def uniform(self) -> bool:
        """Whether all inputs have the same length, so that packed and padded are the same."""
        return self.num_tokens == self.num_inputs * self.longest

    def per_input(self, values: Tensor) -> bool:
        """Whether values have a row per input; where every input is one token, that is also one per token."""
        return len(values) == self.num_inputs

    @cached_property
    def first_token_B(self) -> Tensor:
        """Index of every input's first token, int64."""
        return self._tensor(np.cumsum(self.lengths_B) - self.lengths_B)

    @cached_property
    def position_N(self) -> Tensor:
        """The place of every token within its input, int64."""
        return self._tensor(self._positions())

    @cached_property
    def slot_N(self) -> Tensor:
        """The place of every token in the padded form flattened to B * T, int64."""
        return self._tensor(self._samples() * self.longest + self._positions())

    @cached_property
    def mask_BT(self) -> Tensor:
        """True where the padded form holds a token."""
        return self._tensor(np.arange(self.longest)[None, :] < self.lengths_B[:, None])

    @cached_property
    def lengths_B1(self) -> Tensor:
        """Lengths as float32, to divide sums by."""
        return self._tensor(self.lengths_B.astype(np.float32)[:, None])

    def pad(self, values_ND: Tensor) -> Tensor:
        """Packed to padded, (B, T, D), zeros behind every input's last token."""
        width = values_ND.shape[1:]
        if self.uniform:
            return values_ND.reshape(self.num_inputs, self.longest, *width)
        padded = values_ND.new_zeros(self.num_inputs * self.longest, *width)
        padded[self.slot_N] = values_ND
        return padded.view(self.num_inputs, self.longest, *width)

    def unpad(self, values_BTD: Tensor) -> Tensor:
        """Padded to packed, (N, D)."""
        flat = values_BTD.reshape(self.num_inputs * self.longest, *values_BTD.shape[2:])
        return flat if self.uniform else flat[self.slot_N]

    def _samples(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(self.num_inputs), self.lengths_B)

    def _positions(self) -> npt.NDArray[np.int64]:
        starts = np.cumsum(self.lengths_B) - self.lengths_B
        return np.arange(self.num_tokens) - np.repeat(starts, self.lengths_B)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)
