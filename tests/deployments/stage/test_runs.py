from __future__ import annotations

from deployments.messages import SplitRun
from deployments.stage.runs import Begun, split_runs


def begun(first: int, end: int, queue_s: float, compute_s: float) -> Begun:
    return Begun(first=first, end=end, batch=3, target=4, queue_s=queue_s, compute_s=compute_s)


def run(first: int, end: int, queue_s: float, compute_s: float) -> SplitRun:
    return SplitRun(first=first, end=end, batch=3, target=4, queue_s=queue_s, compute_s=compute_s)


def test_every_batch_has_its_share_of_an_inputs_times() -> None:
    noted = [begun(0, 2, 1.0, 0.0), begun(2, 3, 1.5, 4.0), begun(3, 4, 3.5, 5.0)]
    assert split_runs(noted, 7.0) == (run(0, 2, 1.0, 4.0), run(2, 3, 0.5, 1.0), run(3, 4, 2.0, 2.0))


def test_a_batch_that_failed_and_ran_again_has_its_time_in_the_second_run() -> None:
    noted = [begun(0, 2, 1.0, 0.0), begun(0, 2, 1.0, 0.0)]
    assert split_runs(noted, 3.0) == (run(0, 2, 1.0, 0.0), run(0, 2, 0.0, 3.0))


def test_an_input_that_was_in_no_batch_has_no_runs() -> None:
    assert split_runs([], 0.0) == ()
