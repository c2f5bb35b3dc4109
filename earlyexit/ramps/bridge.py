"""Ramps with a bridge before their head, as PAME builds them (ICS'22, section 5.1)."""

from __future__ import annotations

from torch import Tensor, nn

from earlyexit.ramps.heads import Ramp


class BridgeRamp(Ramp):
    """A bridge makes of an early hidden state one as the last block gives it; a head as the full model's answers.

    Training on a frozen backbone keeps whole hidden states, N * C * H * W * 4 bytes per ramp.
    """

    def __init__(self, bridge: nn.Module, head: Ramp) -> None:
        """`bridge` takes rows of whole inputs, (B, ...), and gives what `head` takes."""
        super().__init__(head.pooling)
        self.bridge = bridge
        self.head = head

    def gather_rows(self, rows: Tensor) -> Tensor:
        return rows

    def classify(self, gathered: Tensor) -> Tensor:
        return self.head.classify(self.head.gather_rows(self.bridge(gathered)))

    def transfer(self, bridge: nn.Module, head: Ramp) -> None:
        """Begin with the weights of these, which have the same structure (section 5.2, parameter transfer)."""
        self.bridge.load_state_dict(bridge.state_dict())
        self.head.load_state_dict(head.state_dict())
