from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest

from experiments.peers.processes import PEERS, serving
from experiments.peers.stock import ServerOptions, StockModel
from tests.end_to_end.tiny_service import make_model, some_texts
from tests.free_port import free_port

TEXTS = some_texts(50)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PEERS))
async def test_a_peer_answers_texts_lists_and_bursts_as_the_stock_model_does(name: str, tmp_path: Path) -> None:
    if name != "ray-serve":
        pytest.importorskip(name)
    make_model(tmp_path)
    options = ServerOptions(model=tmp_path, workers=2, batch=8, wait_s=0.002, port=free_port())
    expected = [asdict(each) for each in StockModel.load(options).predict(TEXTS)]
    with serving(name, options, logs=tmp_path) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
            alone = await client.post("/predict", json={"inputs": TEXTS[0], "ids": "a", "timeout_s": 9.0})
            listed = await client.post("/predict", json={"inputs": TEXTS[:20], "ids": ["a"]})
            list_of_one = await client.post("/predict", json={"inputs": TEXTS[:1]})
            burst = await asyncio.gather(*(client.post("/predict", json={"inputs": text}) for text in TEXTS))
            wrong = await client.post("/predict", json={"inputs": 3})
        assert server.memory_bytes() > 100_000_000  # torch, at least
        assert server.cpu_s() > 0
    check(alone.json(), expected[0])
    check(listed.json(), {"outputs": expected[:20]})
    check(list_of_one.json(), {"outputs": expected[:1]})
    for answer, each in zip(burst, expected, strict=True):
        check(answer.json(), each)
    assert wrong.is_client_error
    assert server.processes() == []


def check(document: object, expected: object) -> None:
    """Checks equality, except for a score's last digits, which depend on its batch."""
    labels, scores = split(document)
    expected_labels, expected_scores = split(expected)
    assert labels == expected_labels
    assert scores == pytest.approx(expected_scores, abs=1e-5)


def split(document: object) -> tuple[list[str], list[float]]:
    assert isinstance(document, dict)
    answers = document.get("outputs", [document])
    return [each["label"] for each in answers], [each["score"] for each in answers]
