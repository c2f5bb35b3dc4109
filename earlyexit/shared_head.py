"""A dear head that all exits share, asked once of everybody who leaves a batch.

Of SmolLM2 it has a fifth of all weights, and a CPU reads these anew however few rows they are multiplied with. So who
leaves early waits for the end of the batch; no sequence's next token comes later for it, since the device is busy with
the batch until then.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from earlyexit.network import LateOutputs
from earlyexit.piece import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Inputs that leave at a ramp, and are not answered yet."""

    piece: Piece
    positions: list[int]
    """Of the piece's inputs, who leaves."""
    score_B: Tensor
    """Of all of the piece's inputs."""
    ramp: int
    rows_KD: Tensor
    """What the shared head looks at, of those who leave."""


class SharedHead:
    """Who waits for it, of one running batch."""

    def __init__(self, network: LateOutputs) -> None:
        self._network = network
        self._leaving: list[Leaving] = []

    def __bool__(self) -> bool:
        """Whether somebody waits."""
        return bool(self._leaving)

    def wait(self, leaving: Leaving) -> None:
        """Until it is asked."""
        self._leaving.append(leaving)

    def ask(self, last_BD: Tensor | None = None) -> tuple[list[tuple[Leaving, Tensor]], Tensor | None]:
        """Outputs of all who wait, and of those at the model's end, where it is reached; nobody waits afterwards."""
        leaving, self._leaving = self._leaving, []
        rows = [(each.ramp, each.rows_KD) for each in leaving]
        if last_BD is not None:
            rows.append((self._network.num_blocks - 1, last_BD))
        outputs = self._network.outputs_together(rows)
        return list(zip(leaving, outputs, strict=False)), None if last_BD is None else outputs[-1]
