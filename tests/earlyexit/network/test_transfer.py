from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from earlyexit.network.piece import to_host, when_computed


class Told:
    """A device that logs what it is told, and who waits for it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def steps(self, *names: str) -> Iterator[str]:
        for name in names:
            self.log.append(f"tell {name}")
            yield name

    def mark(self) -> Callable[[], None]:
        last = self.log[-1].removeprefix("tell ")
        return lambda: self.log.append(f"wait for {last}")

    def take(self, *names: str) -> list[str]:
        for name in when_computed(self.steps(*names), self.mark):
            self.log.append(f"give {name}")
        return self.log


def test_the_next_step_is_told_before_the_last_is_waited_for() -> None:
    assert Told().take("a", "b", "c") == [
        "tell a",
        "tell b",
        "wait for a",
        "give a",
        "tell c",
        "wait for b",
        "give b",
        "wait for c",
        "give c",
    ]


def test_on_the_cpu_a_tensor_is_in_host_memory_already() -> None:
    tensor = torch.tensor([1.0])
    assert to_host(tensor) is tensor


@pytest.mark.gpu
def test_a_gpu_s_tensor_is_copied_when_it_is_computed() -> None:
    copy = to_host(torch.arange(1000, device="cuda").cumsum(0))
    assert (copy.device.type, copy[-1].item()) == ("cpu", 499500)
