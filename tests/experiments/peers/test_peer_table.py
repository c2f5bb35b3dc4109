from __future__ import annotations

from typing import Any

from experiments.peers.table import best_peer, heavy_s, ratio, render
from experiments.peers.turns import sustained

MIB = 2**20


def turn(cpu_ms: dict[str, float], sustained_per_s: float, p50_ms: float = 10.0) -> dict[str, Any]:
    load = {"num_answered": 100, "num_counted": 100, "duration_s": 0.5, "p50_s": p50_ms / 1e3, "p99_s": 0.04}
    cpu_s = {part: ms / 1e3 for part, ms in cpu_ms.items()}
    return {
        "light": load | {"cpu_s": cpu_s},
        "heavy": load | {"duration_s": 0.25, "cpu_s": cpu_s},
        "sustained_per_s": sustained_per_s,
        "answers": {"accuracy": 0.9561, "as_recorded": None},
    }


def result() -> dict[str, Any]:
    """Offramp 2 and 1 ms, 200 and 240 requests/s; mosec 4 ms, 100 and 150; LitServe 3 ms, 90, then nothing."""
    servers = {
        "offramp": {"idle_cores": 0.1, "memory_bytes": 3072 * MIB},
        "mosec": {"idle_cores": 0.0, "memory_bytes": 1024 * MIB},
    }
    return {
        "workload": "clinc150",
        "dtype": "bfloat16",
        "inputs_per_request": 8,
        "machine": {"workers": 2, "threads": 1, "batch_limit": 32},
        "provenance": {"commit": "0123456789abcdef"},
        "stock_s": 0.004,
        "slo_s": 0.05,
        "predicted_per_s": {"offramp": 2200.0},
        "rounds": [
            {
                "sides": {
                    "litserve": turn({"server": 3.0}, 90.0),
                    "mosec": turn({"server": 4.0}, 100.0),
                    "offramp": turn({"stages": 1.5, "ingress": 0.5}, 200.0),
                },
                "servers": servers,
            },
            {
                "sides": {
                    "litserve": turn({"server": 3.0}, 0.0),
                    "mosec": turn({"server": 4.0}, 150.0),
                    "offramp": turn({"stages": 0.7, "ingress": 0.3}, 240.0),
                },
                "servers": servers,
            },
        ],
    }


def test_the_best_peer_has_the_highest_median_or_the_least_and_is_never_a_side_of_ours() -> None:
    assert best_peer(result(), sustained) == "mosec"
    assert best_peer(result(), heavy_s, least=True) == "litserve"
    assert best_peer(result() | {"rounds": []}, sustained) is None


def test_results_that_call_the_sustained_rate_goodput_are_read_too() -> None:
    assert [sustained(each) for each in ({"goodput_per_s": 90.0}, {"sustained_per_s": 80.0})] == [90.0, 80.0]


def test_ratios_are_taken_within_a_round_and_then_their_median() -> None:
    assert ratio(result(), "offramp", "mosec", sustained) == ((2.0 + 1.6) / 2, 1.6, 2.0)
    assert ratio(result(), "offramp", "litserve", sustained) == (200 / 90,) * 3, (
        "a round that sustained nothing does not count"
    )
    assert ratio(result(), "offramp", "bentoml", sustained) is None


def test_a_row_holds_processor_time_the_sustained_rate_ratios_the_share_of_the_limit_latency_memory_and_accuracy() -> (
    None
):
    (row,) = (line for line in render(result()).splitlines() if line.startswith("| **offramp**"))
    assert row == (
        "| **offramp** | 1.50 (1.00 to 2.00) | 0.50 (0.33 to 0.67) | 1.50 (1.00 to 2.00) | 220 (200 to 240) "
        "| 1.80 (1.60 to 2.00) |  | 80% | 10.0 / 40.0 | 3072 | 0.10 | 95.6% |  |"
    )


def test_of_our_sides_processor_time_stands_by_part() -> None:
    lines = render(result()).splitlines()
    assert lines[-3] == "| CPU ms per answer | HAProxy | ingress | stages | controller | Ray itself |"
    assert lines[-1] == "| offramp | 0.00 | 0.40 | 1.10 | 0.00 | 0.00 |"


def test_the_rates_that_all_sides_got_are_told() -> None:
    assert "light load is 200 requests/s, processor time is that of 400/s; medians of 2 rounds" in render(result())
