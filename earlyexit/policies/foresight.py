"""Policies that decide before an exit's outputs are computed: two of CALM's confidence measures (section 3.4).

The output layer of a large vocabulary costs as much as several blocks, so it is computed only for inputs that leave.
Source: Schuster et al. 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece, Tensors, to_device, to_host
from earlyexit.policies.base import ExitOutput
from earlyexit.policies.threshold import ThresholdPolicy
from earlyexit.ramps.heads import NormedRamp


class Foreseen(ExitOutput):
    """A ramp's scores, and its outputs, which are computed on first use and only for the requested inputs."""

    def __init__(self, network: EarlyExitModel, ramp: int, before: Piece, after: Tensors) -> None:
        """`before`, `after`: the hidden states before and after the segment that ends with the ramp."""
        self.task = network.task
        self._network, self._ramp = network, ramp
        self._before, self._after = before, after

    @cached_property
    def gathered(self) -> Tensor:
        """The input of the ramp's head, (B, ...), on the device where it was computed."""
        return self._network.gathered(self._ramp, self._after, self._before.lengths_B)

    @cached_property
    def score_B(self) -> Tensor:
        raise AssertionError("call by_classifier or by_states, which compute a score without the outputs")

    @cached_property
    def outputs_BC(self) -> Tensor:
        return self._network.outputs_of(self._ramp, self.gathered)

    def answers(self, rows: Sequence[int] | None = None) -> Tensor:
        if rows is None or len(rows) == len(self.gathered) or "value_B" in self.__dict__:
            return super().answers(rows)
        index_K = to_device(torch.tensor(rows), self.gathered.device)
        outputs_KC = self._network.outputs_of(self._ramp, self.gathered.index_select(0, index_K))
        return to_host(self.task.answer(outputs_KC))

    def before_head(self, rows: Sequence[int]) -> Tensor | None:
        """Returns the shared head's input for some inputs; None if the ramp has its own head."""
        index_K = to_device(torch.tensor(rows), self.gathered.device)
        return self._network.before_head(self._ramp, self.gathered.index_select(0, index_K))

    def by_classifier(self) -> Tensor:
        """Returns the predicted probability that the ramp's answer equals the full model's, (B,), in host memory."""
        head = self._network.exit_head(self._ramp)
        assert isinstance(head, NormedRamp)
        self.score_B = to_host(head.foresee(self.gathered).float().sigmoid())
        return self.score_B

    def by_states(self) -> Tensor:
        """Returns the cosine similarity of the states before and after the ramp's block, (B,), at least 0."""
        before = self._network.gathered(self._ramp, self._before.tensors, self._before.lengths_B)
        similarity_B = torch.cosine_similarity(before.flatten(1).float(), self.gathered.flatten(1).float())
        self.score_B = to_host(similarity_B.clamp(0, 1))
        return self.score_B


class ForeseenPolicy(ThresholdPolicy):
    """Inputs leave if the ramp's classifier predicts agreement with the full model with enough probability."""

    name = "foreseen"
    larger_is_surer = True
    foresees = "classifier"

    def score(self, ramp: int, output: ExitOutput) -> Tensor:
        assert isinstance(output, Foreseen)
        return output.by_classifier()


class SimilarPolicy(ThresholdPolicy):
    """Inputs leave if the block before the ramp hardly changed the hidden state (CALM's hidden-state saturation)."""

    name = "similar"
    larger_is_surer = True
    foresees = "states"

    def check_ramps(self, ramps: Sequence[int]) -> None:
        super().check_ramps(ramps)
        if 0 in ramps:
            raise PlanError("exit policy 'similar' compares the states of two blocks; the ramp after block 0 has one")

    def can_look(self, ramp: int) -> bool:
        return ramp > 0

    def score(self, ramp: int, output: ExitOutput) -> Tensor:
        assert isinstance(output, Foreseen)
        return output.by_states()
