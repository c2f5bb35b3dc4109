from __future__ import annotations

from typing import Any

from experiments.peers.table import best_peer, ratio, render


def result() -> dict[str, Any]:
    """Two rounds: Offramp 200 and 240 requests/s, mosec 100 and 150, LitServe 90 and none."""

    def round_of(index: int, side: str, goodput: float | None) -> dict[str, Any]:
        return {"round_index": index, "side": side, "goodput_per_s": goodput}

    def spread(median: float, low: float, high: float) -> dict[str, float]:
        return {"median": median, "low": low, "high": high}

    return {
        "workload": "clinc150",
        "dtype": "bfloat16",
        "inputs_per_request": 8,
        "machine": {"workers": 2, "threads": 1, "batch_limit": 32},
        "provenance": {"commit": "0123456789abcdef"},
        "stock_s": 0.004,
        "slo_s": 0.05,
        "limit_per_s": {"offramp": 2200.0},
        "memory_bytes": {"offramp": 3 * 2**30, "mosec": 2**30},
        "goodput": {
            "goodput_per_s": {
                "offramp": spread(220, 200, 240),
                "mosec": spread(125, 100, 150),
                "litserve": spread(90, 90, 90),
            },
            "rounds": [
                round_of(0, "offramp", 200.0),
                round_of(0, "mosec", 100.0),
                round_of(0, "litserve", 90.0),
                round_of(1, "offramp", 240.0),
                round_of(1, "mosec", 150.0),
                round_of(1, "litserve", None),
            ],
        },
        "light_load": {"latency": {"offramp": {"p50_s": spread(0.0052, 0, 1), "p99_s": spread(0.02, 0, 1)}}},
        "costs": {
            "steps_s": {"tokenize": 2e-5},
            "offramp": {"ingress": 3e-5, "client": 1e-5},
            "mosec": {"server": 4e-4},
        },
        "answers": {"offramp": {"accuracy": 0.9561, "as_recorded": None}},
    }


def test_the_best_peer_is_the_one_with_the_highest_median_and_never_a_side_of_ours() -> None:
    assert best_peer(result()) == "mosec"


def test_ratios_are_taken_within_a_round_and_then_their_median() -> None:
    assert ratio(result(), "offramp", "mosec") == (2.0 + 1.6) / 2
    assert ratio(result(), "offramp", "litserve") == 200 / 90, "the round that LitServe failed in does not count"
    assert ratio(result(), "offramp", "bentoml") is None


def test_a_row_holds_inputs_per_second_ratios_the_share_of_the_limit_latency_memory_and_accuracy() -> None:
    rows = [line for line in render(result()).splitlines() if line.startswith("| **offramp**")]
    assert rows == ["| **offramp** | 1760 | 1600-1920 | 1.80 | - | 80.0% | 5.2 / 20.0 | 3072 | 95.6% |  |"]


def test_processor_time_stands_by_part_in_microseconds_per_input() -> None:
    lines = render(result()).splitlines()
    assert "| processor time per input, us | client | ingress | server |" in lines
    assert "| offramp | 10 | 30 |  |" in lines
    assert "| mosec |  |  | 400 |" in lines
    assert lines[-1] == "Of the ingress, each step alone, us per request: tokenize 20."
