"""What a class map costs on its way from a replica to its caller, in processor time, and what compressing it saves.

    OFFRAMP_DATA=... python -m experiments.costs.dense_answers          # label maps of CamVid, 180 x 240 (20 seconds)

In one process, without the network's own time: a replica's part of a reply is written into a frame, sent over a pair of
sockets, put together and read as an ingress does it; then the answers become what each way to ask gets. Times are those
of one thread, per answer, medians of rounds, of a network that draws its edges as people do: maps with more of them
compress less (`--noise 0.05` gives every twentieth pixel another class).
"""

from __future__ import annotations

import gzip
import io
import json
import socket
import time
import zipfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from deployments.encoding import Part, encode, from_replica
from deployments.frames import LENGTH_BYTES, Frames
from deployments.ingress.api.answers import predict_response, v2_response
from deployments.ingress.api.bodies import V2Reply
from deployments.ingress.rpc.conversion import infer_response
from deployments.messages import Chunk, Timing
from earlyexit.tasks.segmentation import PNG, SegmentationTask
from earlyexit.wire import Answer, values_of
from experiments.data import require_data
from experiments.kit import show

BATCH = 8
"""Answers of a part, and of a request of several."""
LEVELS = (1, 2, 3, 4, 6, 9)
OUTPUTS = ("class_map", "score", "exit")
TIMING = Timing(queue_s=0.0, compute_s=0.0)


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(
        prog="python -m experiments.costs.dense_answers",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--noise", type=float, default=0.0, help="share of the pixels that get any class")
    options = parser.parse_args()
    names, maps = camvid(options.noise)
    task = SegmentationTask(names, height=maps.shape[1], width=maps.shape[2])
    answers = [
        Answer(sample_id=f"i{k}", value=value, score=0.9, exit=3) for k, value in enumerate(values_of(maps[:BATCH]))
    ]
    show("From replica to ingress", ("step", "us per answer"), hop_rows(maps[:BATCH], options.rounds))
    forms = forms_of(answers, task)
    rows = [
        (name, 1e6 * timed(make, options.rounds) / BATCH, len(make()) / BATCH / 1000) for name, make in forms.items()
    ]
    show(f"What a caller gets, {BATCH} maps a request", ("form", "us per answer", "kB per answer"), rows)
    bodies = {name: forms[name]() for name in ("v2, JSON", "v2, bytes behind JSON")}
    show("gzip", ("form", "level", "us per answer", "share of the size"), gzip_rows(bodies, options.rounds))


def camvid(noise: float) -> tuple[Sequence[str], npt.NDArray[np.uint8]]:
    """Names of the classes, and some maps (N, H, W)."""
    folder = require_data("camvid")
    names = [line.split(",")[1] for line in (folder / "classes.csv").read_text(encoding="utf-8").splitlines()[1:]]
    with zipfile.ZipFile(folder / "camvid_240x180.zip") as archive:
        files = [name for name in archive.namelist() if name.startswith("val/label/")][:: 101 // BATCH][:BATCH]
        maps = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(name)))) for name in files])
    rng = np.random.default_rng(0)
    any_class = rng.integers(0, len(names), maps.shape, dtype=np.uint8)
    return names, np.where(rng.random(maps.shape) < noise, any_class, maps)


def hop_rows(maps: npt.NDArray[np.uint8], rounds: int) -> list[tuple[str, float]]:
    """What each step of the hop costs, and all of them."""

    def answered() -> Part:
        values = values_of(maps)
        return Part(
            1,
            Chunk(
                answers=tuple(
                    (Answer(sample_id=f"i{k}", value=value, score=0.9, exit=3), TIMING)
                    for k, value in enumerate(values)
                )
            ),
        )

    part = answered()
    frame = encode(part)
    steps: Mapping[str, Callable[[], object]] = {
        "the batch's maps taken apart": answered,
        "written into a frame": lambda: encode(part),
        "through two sockets": lambda: received(frame),
        "read": lambda: from_replica(memoryview(frame)),
    }
    rows = [(name, 1e6 * timed(step, rounds) / BATCH) for name, step in steps.items()]
    return [*rows, ("together", sum(cost for _, cost in rows))]


def received(frame: bytes) -> memoryview:
    """A frame that was sent in the pieces that sockets take."""
    heard: list[memoryview] = []
    frames = Frames(heard.append, lambda: None)
    frames.connection_made(_Open())  # type: ignore[arg-type] # of a transport only this is asked
    here, there = socket.socketpair()
    with here, there:
        rest = memoryview(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
        here.setblocking(False)
        while not heard:
            with suppress(BlockingIOError):  # the socket is full: something is received first
                rest = rest[here.send(rest) :] if rest else rest
            frames.buffer_updated(there.recv_into(frames.get_buffer(-1)))
    return heard[0]


class _Open:
    def is_closing(self) -> bool:
        return False


def forms_of(answers: Sequence[Answer], task: SegmentationTask) -> Mapping[str, Callable[[], bytes]]:
    """By what asks, how the answers are written."""
    in_json = V2Reply(id=None, outputs=OUTPUTS, binary=frozenset())
    in_bytes = V2Reply(id=None, outputs=OUTPUTS, binary=frozenset(("class_map",)))

    def v2(reply: V2Reply) -> bytes:
        return v2_response(answers, task, reply, "m")[0]

    def grpc() -> bytes:
        content: bytes = infer_response(answers, task, in_bytes, "m", "1").SerializeToString()
        return content

    return {
        "v2, JSON": lambda: v2(in_json),
        "v2, bytes behind JSON": lambda: v2(in_bytes),
        "v2, gRPC": grpc,
        "/predict, JSON with PNG files": lambda: predict_response(answers, task, "r", many=True),
        "/predict, PNG files alone": lambda: b"".join(task.to_content(PNG, answer.value) for answer in answers),
        "as lists of numbers": lambda: json.dumps([_numbers(answer) for answer in answers]).encode(),
    }


def _numbers(answer: Answer) -> list[Any]:
    numbers: list[Any] = answer.value.numpy().tolist()  # type: ignore[union-attr] # a map
    return numbers


def gzip_rows(bodies: Mapping[str, bytes], rounds: int) -> list[tuple[str, int, float, float]]:
    """Of each body, what each of zlib's levels costs and leaves."""
    return [
        (
            name,
            level,
            1e6 * timed(lambda body=body, level=level: gzip.compress(body, level, mtime=0), rounds) / BATCH,  # type: ignore[misc] # defaults bind them
            len(gzip.compress(body, level)) / len(body),
        )
        for name, body in bodies.items()
        for level in LEVELS
    ]


def timed(work: Callable[[], object], rounds: int) -> float:
    """Seconds of this thread's processor time, the median of rounds after one that warms up."""
    found = []
    for _ in range(rounds + 1):
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return median(found[1:])


if __name__ == "__main__":
    main()
