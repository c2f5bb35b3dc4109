"""Inputs that cross from one network to the next, as stages receive them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deployments.ingress.core.inputs import PendingInput
from deployments.wire.messages import Chunk
from earlyexit.codecs.chain import ChainCodec
from earlyexit.network.boundary import Encoded, Split, WirePiece
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage
from profiles.stream import StreamShape
from tests.chained_texts import chained
from tests.deployments.ingress.dispatch.dispatcher_scene import TIMING, Scene, StageCallLog, survivors
from tests.deployments.wire_fakes import turns

SURE = PolicySpec(name="confidence", thresholds=0.9)
SMALL, LARGE = Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=2, end=4, batch=4, tokens=12)


def plan_of(*splits: Split, epoch: int = 1) -> Plan:
    stages = tuple(Stage(device="cpu", replicas=1, splits=(split,)) for split in splits)
    return Plan(stages=stages, policy=SURE, networks=(2, 4), epoch=epoch)


CASCADE, ALONE = plan_of(SMALL, LARGE), plan_of(LARGE, epoch=2)


class ChainScene(Scene):
    """A scene in which texts are their own ids."""

    def __init__(self, codec: ChainCodec, plan: Plan = CASCADE, shape: StreamShape | None = None) -> None:
        super().__init__(plan=plan, chain_codec=codec, shape=shape)
        self.chain = codec

    def submit_texts(self, *texts: str, truncate: bool = False) -> list[PendingInput]:
        encoded = self.chain.encode_for(texts, self.core.placed.plan.used, truncate=truncate)
        return self.dispatcher.submit(list(zip(texts, encoded, strict=True)), 10.0, self._settle)

    def follow(self, plan: Plan) -> None:
        self.dispatcher.follow(PlacedPlan(plan=plan))


def cross(call: StageCallLog, texts: Sequence[str], states: Sequence[int] | None = None, block: int = 2) -> None:
    """Replies with survivors of a network, which have states of the policy but no hidden states."""
    state_BS = None if states is None else np.array(states)[:, None]
    piece = replace(survivors([call.id_of(text) for text in texts], block), tensors=(), state_BS=state_BS)
    call.say(Chunk(survivors=piece, survivor_timings=(TIMING,) * len(texts)))


def ids(piece: WirePiece) -> list[int]:
    [token_ids] = piece.tensors
    return [int(each) for each in token_ids]


async def test_survivors_that_cross_are_encoded_again_and_keep_their_policy_state(tmp_path: Path) -> None:
    scene = ChainScene(chained(tmp_path))
    flights = scene.submit_texts("ab", "b", "c")
    await turns()
    [call] = scene.stages[0].calls
    assert (ids(call.call.piece), call.call.piece.next_block) == ([1, 3, 2, 1, 5, 2, 1, 6, 2], 0)
    call.answer("b", exit_block=1)
    cross(call, ["c", "ab"], states=[7, 9])
    await turns()
    [crossed] = scene.stages[1].calls
    piece = crossed.call.piece
    assert (ids(piece), piece.next_block, piece.lengths_B.tolist()) == ([1, 16, 2, 1, 14, 15, 2], 2, [3, 4])
    np.testing.assert_array_equal(piece.state_BS, [[7], [9]])
    assert [flight.tokens for flight in flights] == [4, 3, 3]
    assert [flight.cost for flight in flights] == [3, 3, 3]
    assert crossed.sent.weight == 7  # tokens of the network that they enter
    crossed.answer("c", exit_block=3)
    crossed.answer(["ab"], exit_block=3)
    await turns()
    assert [name for name, _ in scene.outcomes] == ["b", "c", "ab"]
    assert scene.core.counts.crossings == {2: 2}


class Moody(ChainCodec):
    """A codec that fails on some rows when they cross."""

    def encoded(self, rows: Sequence[object], network: int, *, truncate: bool) -> list[Encoded]:
        if network == 1 and any("x" in str(row) for row in rows):
            raise RuntimeError("not this one")
        return super().encoded(rows, network, truncate=truncate)


async def test_an_input_that_the_next_codec_refuses_fails_alone(tmp_path: Path) -> None:
    codec = chained(tmp_path)
    codec.__class__ = Moody
    scene = ChainScene(codec)
    scene.submit_texts("a", "x", "b")
    await turns()
    cross(scene.stages[0].calls[0], ["a", "x", "b"], states=[1, 2, 3])
    await turns()
    [crossed] = scene.stages[1].calls
    assert crossed.names == "ab"
    np.testing.assert_array_equal(crossed.call.piece.state_BS, [[1], [3]])
    assert scene.errors == [("x", "execution")]
    crossed.answer("a", exit_block=3)
    crossed.answer("b", exit_block=3)
    await turns()
    assert scene.answered == "ab"
    assert scene.core.num_unanswered == 0


async def test_long_texts_are_encoded_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, begun = asyncio.get_running_loop(), list[tuple[Callable[[], None], asyncio.Future[None]]]()

    def aside(_: object, function: Callable[[], None]) -> asyncio.Future[None]:
        begun.append((function, loop.create_future()))
        return begun[-1][1]

    monkeypatch.setattr(loop, "run_in_executor", aside)
    codec = chained(tmp_path, max_lengths=(9000, 9000))
    codec.__class__ = Moody
    scene, text, wrong = ChainScene(codec), "a" * 2001, "x" * 2001
    flight, _ = scene.submit_texts(text, wrong)
    await turns()
    for each in (text, wrong):
        cross(scene.stages[0].calls[0], [each])
    await turns()
    assert len(begun) == 2
    assert scene.stages[1].calls == []
    scene.submit_texts("b")  # meanwhile other inputs are sent
    await turns()
    assert scene.stages[0].calls[-1].names == "b"
    for function, done in begun:
        function()
        done.set_result(None)
    await turns()
    assert scene.stages[1].calls[0].call.piece.lengths_B.tolist() == [2003]
    assert (flight.tokens, len(scene.stages[1].calls)) == (2003, 1)
    assert scene.errors == [(wrong, "execution")]
    scene.stages[1].calls[0].answer([text], exit_block=3)
    scene.stages[1].calls[0].end()
    scene.stages[0].calls[-1].answer("b")
    await turns()
    assert scene.core.num_unanswered == 0
    assert not scene.dispatcher._sent, "a crossing that is over is kept nowhere"


PRUNES = replace(CASCADE, prune={1: 0.8})


def cross_with(call: StageCallLog, texts: Sequence[str], importance: Sequence[float], lengths: Sequence[int]) -> None:
    """Like `cross`, with the attention that every token received."""
    importance_M, lengths_B = np.array(importance, dtype=np.float16), np.array(lengths, dtype=np.int32)
    piece = replace(survivors([call.id_of(text) for text in texts], 2), lengths_B=lengths_B, tensors=(importance_M,))
    call.say(Chunk(survivors=piece, survivor_timings=(TIMING,) * len(texts)))


async def test_words_that_got_little_attention_do_not_cross(tmp_path: Path) -> None:
    scene = ChainScene(chained(tmp_path), PRUNES)
    flights = scene.submit_texts("a b c", "b c")
    await turns()
    [call] = scene.stages[0].calls
    token_ids, zeros = call.call.piece.tensors
    assert (token_ids.tolist(), zeros.tolist()) == ([1, 4, 5, 6, 2, 1, 5, 6, 2], [0.0] * 9), "it is measured from here"
    cross_with(call, ["b c", "a b c"], [9, 3, 3, 9, 9, 1, 4, 4, 9], [4, 5])
    await turns()
    [crossed] = scene.stages[1].calls
    assert ids(crossed.call.piece) == [1, 15, 16, 2, 1, 15, 16, 2], "and the last network measures nothing"
    assert [flight.tokens for flight in flights] == [4, 4]
    counts = scene.core.counts
    assert (counts.crossings, counts.words, counts.pruned_words) == ({2: 2}, {2: 5}, {2: 1})


async def test_a_text_without_its_attention_or_with_other_tokens_than_were_measured_loses_no_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = ChainScene(chained(tmp_path), PRUNES)
    scene.submit_texts("a b c", "b c", "a b c b")
    await turns()
    call = scene.stages[0].calls[0]
    cross(call, ["a b c"])
    await turns()
    cross_with(call, ["b c"], [np.nan] * 4, [4])
    await turns()
    cross_with(call, ["a b c b"], [9, 1, 9], [3])
    await turns()
    crossed = [ids(each.call.piece) for each in scene.stages[1].calls]
    assert crossed == [[1, 14, 15, 16, 2], [1, 15, 16, 2], [1, 14, 15, 16, 15, 2]]
    assert scene.core.counts.pruned_words.get(2, 0) == 0
    assert "could not be pruned: ValueError('3 importances for 6 tokens')" in caplog.text


async def test_an_attempt_begins_with_the_whole_text(tmp_path: Path) -> None:
    scene = ChainScene(chained(tmp_path), PRUNES)
    scene.submit_texts("a b c")
    await turns()
    cross_with(scene.stages[0].calls[0], ["a b c"], [9, 1, 4, 4, 9], [5])
    await turns()
    scene.stages[1].calls[0].fail()
    await turns()
    again = scene.stages[0].calls[-1]
    assert again.call.piece.tensors[0].tolist() == [1, 4, 5, 6, 2]
    scene.follow(replace(CASCADE, epoch=2))
    cross_with(again, ["a b c"], [9, 1, 4, 4, 9], [5])
    await turns()
    assert ids(scene.stages[1].calls[-1].call.piece) == [1, 14, 15, 16, 2], "the present plan prunes nothing"
