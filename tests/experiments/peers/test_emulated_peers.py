from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earlyexit.network.checkpoint import random_model
from earlyexit.network.store import save_model
from earlyexit.tasks.label import LabelTask
from experiments.peers.emulated import table
from experiments.peers.emulated_model import EmulatedModel
from experiments.peers.options import ServerOptions
from tests.experiments.peers.test_peer_workloads import SIZES


class Clock:
    now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += max(0.0, seconds)


def test_a_batch_takes_the_time_of_the_profile_whatever_the_process_needs_between_two(tmp_path: Path) -> None:
    save_model(random_model(SIZES, task=LabelTask(("no", "yes"))), tmp_path)
    clock = Clock()
    options = ServerOptions(model=tmp_path, batch_s=(1.0, 1.5))
    model = EmulatedModel(options, now_s=lambda: clock.now_s, sleep=clock.sleep)
    ended_s = []
    for texts in (["a"], ["a", "b"], ["a", "b", "c"]):
        answers = model.predict(texts)
        assert [(each.label, each.exit) for each in answers] == [("no", 1)] * len(texts)
        ended_s.append(clock.now_s)
    assert ended_s == pytest.approx([101.0, 102.5, 102.5 + 1.5 * 3 / 2])


def side(goodput_per_s: float) -> dict[str, Any]:
    return {"goodput_per_s": goodput_per_s, "p50_s": 2.0, "p99_s": 4.0, "cpu_s": {"server": 0.003}}


def test_a_row_is_in_emulated_seconds_beside_stock_the_best_peer_and_what_accelerators_could_do() -> None:
    rounds = [
        {"offramp": side(20), "stock": side(10), "mosec": side(8), "litserve": side(4)},
        {"offramp": side(24), "stock": side(10), "mosec": side(10), "litserve": side(4)},
    ]
    rows = table(rounds, {"offramp": 25.0, "stock": 10.0}, scale=40.0)
    assert rows[0] == ("offramp", 880.0, "2.2 (2 to 2.4)", "2.45 (2.4 to 2.5)", "0.88", 50.0, 100.0, 3.0)
    assert [row[0] for row in rows] == ["offramp", "stock", "litserve", "mosec"]
    assert rows[3][2:5] == ("0.9 (0.8 to 1)", "1 (1 to 1)", "0.90")
