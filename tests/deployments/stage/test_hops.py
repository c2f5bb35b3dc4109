"""Images through two replicas, their hidden states over real connections: everything but Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from deployments.ingress.link import ReplicaLink
from deployments.replica.build import build_runner
from deployments.replica.call_server import CallServer
from deployments.replica.host import StageHost
from deployments.settings import ServeSettings
from deployments.wire.messages import Assignment, Chunk, StageCall
from earlyexit.clock import MonotonicClock
from earlyexit.named import HopDtype
from earlyexit.network.boundary import Answer, Encoded, Split, WirePiece, entering
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.store import load_model, save_model
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import exit_outputs
from optimizer.plan import Plan, Stage
from tests.deployments.wire_fakes import LOOPBACK, soon
from tests.earlyexit.codecs.pictures import noise

SIDE, NUM_IMAGES, CUT, NUM_BLOCKS = 24, 10, 1, 3
PLAN = Plan(
    stages=tuple(
        Stage(device="cpu", replicas=1, splits=(Split(first=first, end=end, batch=4),))
        for first, end in ((0, CUT), (CUT, NUM_BLOCKS))
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet of three blocks; 36.9 kB of an image cross after the first."""
    folder = tmp_path_factory.mktemp("images")
    model = random_model(
        {"depth": 8, "side": SIDE},
        family="resnet",
        name="hops",
        codec={"name": "image", "height": SIDE, "width": SIDE},
        task=LabelTask(tuple("abcd")),
        ramps=RampOptions(style="mlp", pooling="grid"),
    )
    save_model(model, folder)
    return folder


@asynccontextmanager
async def replica(folder: Path, hop_dtype: HopDtype) -> AsyncIterator[ReplicaLink]:
    """One that runs, and an ingress's connection to it."""
    settings = ServeSettings(model=str(folder), plan=PLAN, hop_dtype=hop_dtype)
    server, clock = CallServer(asyncio.get_running_loop(), settings.hop_dtype), MonotonicClock()
    runner = build_runner(settings, "cpu", None, clock=clock)
    host = StageHost(settings, "cpu", "split-cpu-0", runner, clock, server.deliver)
    up = asyncio.Event()
    host.start()
    link = ReplicaLink("r", await server.listen(host, LOOPBACK), up.set)
    await soon(up.wait())
    yield link
    link.leave()
    await soon(server.close())
    await asyncio.to_thread(host.stop)


async def said(link: ReplicaLink, piece: WirePiece, stage: Stage) -> list[Chunk]:
    """All parts of the reply to a call."""
    assignment = Assignment(epoch=1, stage=stage, policy=None, dispatch="work-conserving")
    remaining_s = (60.0,) * len(piece.sample_ids)
    call, parts = StageCall(piece=piece, remaining_s=remaining_s, reserve_s=0.0, assignment=assignment), list[Chunk]()
    await asyncio.wait_for(link.call(call, parts.append), 60)
    return parts


async def answers(folder: Path, images: Sequence[Encoded], hops: Sequence[HopDtype]) -> dict[str, Answer]:
    """Of the images, through two replicas whose settings have these types of hops."""
    async with replica(folder, hops[0]) as first, replica(folder, hops[1]) as second:
        piece = entering([str(k) for k in range(len(images))], images)
        pieces = [part.going_on.piece for part in await said(first, piece, PLAN.stages[0]) if part.going_on]
        wanted = np.float16 if hops[0] == "float16" else np.float32
        assert {values.dtype for each in pieces for values in each.tensors} == {np.dtype(wanted)}
        parts = [part for each in pieces for part in await said(second, each, PLAN.stages[1])]
    told = [answer for part in parts for answer, _ in part.answers]
    assert sorted(answer.sample_id for answer in told) == sorted(piece.sample_ids), "every image once"
    return {answer.sample_id: answer for answer in told}


@pytest.mark.parametrize(
    ("hops", "within"),
    [
        (("same", "same"), 1e-5),
        (("float16", "float16"), 1e-2),
        (("same", "float16"), 1e-5),
        (("float16", "same"), 1e-2),
    ],
    ids=["same", "float16", "the next one halves", "the next one does not"],
)
async def test_images_are_answered_once_as_by_the_uncut_model_whatever_hops_are_in(
    hops: Sequence[HopDtype], within: float, folder: Path
) -> None:
    images = [Encoded(1, (noise(SIDE, SIDE, seed=seed)[None],)) for seed in range(NUM_IMAGES)]
    found = await answers(folder, images, hops)
    model = load_model(folder)
    scores_N = model.task.score(exit_outputs(model, images)[NUM_BLOCKS - 1]).numpy()
    apart = max(abs(found[str(k)].score - score) for k, score in enumerate(scores_N))
    assert apart < within
    assert (apart > 1e-6) == (hops[0] == "float16"), "what is halved is seen"
