from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from experiments.peers.client import ClientOptions, LoadResult
from experiments.peers.turns import Rates, Turn, per_answer, take_turn
from experiments.peers.workloads import Workload
from offramp.load.sustained import Sustaining
from tests.experiments.peers.results import load_result

ANSWER = json.dumps({"input": 0, "label": "yes", "exit": 1}) + "\n"


@dataclass
class FakeServer:
    spent_s: dict[str, float] = field(default_factory=lambda: {"ingress": 0.0, "stages": 0.0})

    def cpu_s_by_part(self) -> dict[str, float]:
        return dict(self.spent_s)


@dataclass
class FakeSide:
    """Sustains 100 requests/s, spends 1 ms of a stage on each; of its hundred requests it answers `answered`."""

    load: ClientOptions
    is_ours: bool = True
    answered: int = 100
    name: str = "offramp"
    server: FakeServer = field(default_factory=FakeServer)
    asked: list[tuple[float, int]] = field(default_factory=list)

    def begin(self) -> None:
        """Nothing to do."""

    def measure(self, rate_per_s: float, seed: int) -> LoadResult:
        self.asked.append((round(rate_per_s, 1), seed))
        self.server.spent_s["stages"] += 0.1
        if self.load.answers is not None:
            self.load.answers.write_text(ANSWER)
        return load_result(0.05 if rate_per_s <= 100 else 0.2).model_copy(update={"num_answered": self.answered})


def taken(tmp_path: Path, *, is_known: bool = False, **changes: Any) -> tuple[FakeSide, dict[str, Any]]:
    load = ClientOptions(url="", inputs=tmp_path / "inputs.jsonl", concurrency=1, duration_s=1.0, slo_s=0.1)
    side = FakeSide(load=load, **changes)
    workload = Workload(
        name="two",
        folder=tmp_path,
        texts=("a",),
        labels=("yes",),
        keys=None,
        policy=cast(Any, None),
        records=cast(Any, None),
    )
    turn = Turn(
        workload=workload,
        drawn=[0],
        rates=Rates(light_per_s=30.0, heavy_per_s=70.0),
        start_per_s=80.0,
        is_known=is_known,
        target=Sustaining(slo_s=0.1),
        index=2,
    )
    return side, take_turn(cast(Any, side), turn)


def test_a_turn_is_a_light_rate_a_heavier_one_and_a_search_for_the_sustained_rate(tmp_path: Path) -> None:
    side, found = taken(tmp_path)
    # 80 passes; 80 x 1.15 passes; then its square above, which fails; then the mean of both, and so on to within 5 %.
    assert side.asked[:4] == [(30.0, 2000), (70.0, 2001), (80.0, 2002), (92.0, 2003)]
    assert 95 < found["sustained_per_s"] <= 100
    assert found["answers"] == {"num_inputs": 1, "accuracy": 1.0, "as_recorded": None}
    assert (found["light"]["cpu_s"], found["heavy"]["p99_s"]) == ({"ingress": 0.0, "stages": pytest.approx(1e-3)}, 0.05)


def test_from_where_the_round_before_ended_a_search_takes_small_steps(tmp_path: Path) -> None:
    side, _ = taken(tmp_path, is_known=True)
    assert side.asked[3] == (84.8, 2003)


def test_of_a_peer_processor_time_is_told_as_a_whole(tmp_path: Path) -> None:
    _, found = taken(tmp_path, is_ours=False)
    assert found["heavy"]["cpu_s"] == {"server": pytest.approx(1e-3)}


def test_who_refuses_pays_for_it_with_what_is_answered(tmp_path: Path) -> None:
    _, found = taken(tmp_path, answered=50)
    assert found["heavy"]["cpu_s"]["stages"] == pytest.approx(2e-3)
    result = load_result().model_copy(update={"num_answered": 50, "num_sent": 120})
    assert per_answer({}, {"stages": 6.0}, result, inputs_per_request=2) == {"stages": pytest.approx(0.05)}
