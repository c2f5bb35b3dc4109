"""What replicas know of the model and of the links between them."""

from __future__ import annotations

from optimizer.problem import PlanProblem


class Facts:
    """Of one problem."""

    __slots__ = ("_delay_s", "_hop_s_N", "num_blocks", "ramps")

    def __init__(self, problem: PlanProblem) -> None:
        self.num_blocks = problem.num_blocks
        self.ramps = problem.ramps
        """All of the model, active or not."""
        self._delay_s = problem.link.delay_s
        self._hop_s_N = [num_bytes / problem.link.bandwidth_bytes_per_s for num_bytes in problem.bytes_per_sample_N]
        """What one input more takes on its way, by the block it comes from."""

    def hop_s(self, block: int, num_inputs: int) -> float:
        """E3's T_x: sending the survivors that wait for a block (section 3.2.1)."""
        return self._delay_s + num_inputs * self._hop_s_N[block - 1]
