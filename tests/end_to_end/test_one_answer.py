"""Tests that every interface returns the same answer to the same input, in one process without Ray."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image

from deployments.api.grpc.server import Rpcs, message_class
from deployments.api.operations import InferRequest, Signature
from deployments.api.v2 import pack_elements
from earlyexit.errors import InputError, UnprocessableInputError
from earlyexit.network.boundary import Answer
from offramp import Client
from offramp.load.generator import LoadConfig, run_load
from tests.deployments.ingress.api.faces import FakeBackend, FakeContext
from tests.deployments.ingress.api.signatures import IMAGE, tensors
from tests.deployments.ingress.dashboard.fake_service import served
from tests.earlyexit.codecs.pictures import Pixels, file_of, noise
from tests.free_port import free_port
from tests.offramp.cli.runs import run

PHOTO, OTHER = noise(2, 3), noise(2, 3, seed=1)
FILES = {
    "png": file_of(PHOTO),
    "webp": file_of(PHOTO, "WEBP", lossless=True, exact=True),
    "jpeg": file_of(PHOTO, "JPEG", quality=90),
}
ROW = tensors({"name": "age", "datatype": "INT8", "shape": []}, {"name": "w", "datatype": "FP32", "shape": [2]})


@dataclass
class Encoding(FakeBackend):
    """Answers with the numbers that reach the network: their sum, and the mean of the last tensor."""

    of: Signature = IMAGE
    max_body_bytes: int = 100_000
    max_timeout_s: float = 60.0

    @property
    def signature(self) -> Signature:
        return self.of

    async def infer(self, request: InferRequest) -> list[Answer]:
        self.requests.append(request)
        return [
            Answer(
                sample_id="",
                value=int(sum(array.sum() for array in encoded.tensors)) % 2,
                score=float(encoded.tensors[-1].mean()),
                exit=encoded.length,
            )
            for encoded in self.of.codec.encode(request.rows, truncate=request.truncate)
        ]


def expected(pixels: Pixels) -> tuple[str, Any, int]:
    return "bill" if pixels.sum() % 2 == 0 else "card", pytest.approx(float(pixels.mean()), abs=1e-4), 1


def pixels_of(content: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(content)))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(Encoding(), free_port()) as url:
        yield url


def answer_of(answer: Any) -> tuple[str, float, int]:
    return answer["label"], answer["score"], answer["exit"]


def by_predict_body(url: str, form: str) -> tuple[str, float, int]:
    answer = httpx.post(f"{url}/predict", content=FILES[form], headers={"Content-Type": f"image/{form}"})
    return answer_of(answer.raise_for_status().json())


def by_predict_json(url: str, form: str) -> tuple[str, float, int]:
    body = {"inputs": [base64.b64encode(FILES[form]).decode()]}
    return answer_of(httpx.post(f"{url}/predict", json=body).raise_for_status().json()["outputs"][0])


def by_triton(url: str, array: np.ndarray[Any, Any], datatype: str, *, binary: bool) -> tuple[str, float, int]:
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        tensor = triton.InferInput("image", list(array.shape), datatype)
        tensor.set_data_from_numpy(array, binary_data=binary)
        result = client.infer("intents", [tensor])
    label, score, left = (result.as_numpy(name)[0] for name in ("label", "score", "exit"))
    return label.decode() if isinstance(label, bytes) else str(label), float(score), int(left)


def by_grpc(array: np.ndarray[Any, Any], datatype: str) -> tuple[str, float, int]:
    message = message_class("ModelInferRequest")(model_name="intents")
    message.inputs.add(name="image", datatype=datatype, shape=array.shape)
    message.raw_input_contents.append(pack_elements(datatype, array))
    answer = asyncio.run(Rpcs(Encoding()).call("ModelInfer", message.SerializeToString(), FakeContext()))
    label, score, left = answer.raw_output_contents
    return label[4:].decode(), float(np.frombuffer(score, "<f4")[0]), int(np.frombuffer(left, "<i4")[0])


def by_client(url: str, inputs: Any) -> tuple[str, float, int]:
    with Client(url) as client:
        found = client.predict(inputs)
    return found.label, found.score, found.exit


def files(form: str) -> np.ndarray[Any, Any]:
    return np.array([FILES[form]], dtype=object)


@pytest.mark.parametrize("form", FILES)
def test_a_file_has_one_answer(url: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / f"photo.{form}"
    path.write_bytes(FILES[form])
    answers = {
        "/predict, the file": by_predict_body(url, form),
        "/predict, base64": by_predict_json(url, form),
        "v2": by_triton(url, files(form), "BYTES", binary=True),
        "gRPC": by_grpc(files(form), "BYTES"),
        "client, bytes": by_client(url, FILES[form]),
        "client, path": by_client(url, path),
    }
    pixels = pixels_of(FILES[form])
    assert answers == dict.fromkeys(answers, expected(pixels))


def test_pixels_have_the_answer_of_their_lossless_file(url: str) -> None:
    shares = (PHOTO / np.float32(255))[None].astype(np.float32)
    answers = {
        "file": by_predict_body(url, "png"),
        "v2, uint8 in bytes": by_triton(url, PHOTO[None], "UINT8", binary=True),
        "v2, uint8 in JSON": by_triton(url, PHOTO[None], "UINT8", binary=False),
        "v2, fp32 in bytes": by_triton(url, shares, "FP32", binary=True),
        "v2, fp32 in JSON": by_triton(url, shares, "FP32", binary=False),
        "v2, fp16": by_triton(url, shares.astype(np.float16), "FP16", binary=True),
        "gRPC, uint8": by_grpc(PHOTO[None], "UINT8"),
        "gRPC, fp32": by_grpc(shares, "FP32"),
        "client, uint8": by_client(url, PHOTO),
        "client, float64": by_client(url, PHOTO / 255),
    }
    assert answers == dict.fromkeys(answers, expected(PHOTO))


def test_a_folder_and_an_archive_are_answered_file_by_file(url: str, tmp_path: Path) -> None:
    (tmp_path / "images/cat").mkdir(parents=True)
    (tmp_path / "images/cat/1.png").write_bytes(file_of(PHOTO))
    (tmp_path / "images/cat/2.webp").write_bytes(file_of(OTHER, "WEBP", lossless=True))
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for path in sorted((tmp_path / "images").rglob("*.*")):
            archive.write(path, path.relative_to(tmp_path / "images"))
    for data in ("images", "images.zip"):
        out = tmp_path / "out.jsonl"
        assert run("predict", "--data", tmp_path / data, "--out", out, "--url", url) == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["image"] for row in rows] == ["cat/1.png", "cat/2.webp"]
        assert [answer_of(row) for row in rows] == [expected(PHOTO), expected(OTHER)]


def test_arrays_are_answered_row_by_row(url: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.stack([PHOTO, OTHER]))
    out = tmp_path / "out.csv"
    assert run("predict", "--data", tmp_path / "x.npy", "--out", out, "--url", url) == 0
    head, *rows = out.read_text().splitlines()
    assert (head, [row.split(",")[:2] for row in rows]) == (
        "row,label,score,exit,error",
        [["0", expected(PHOTO)[0]], ["1", expected(OTHER)[0]]],
    )


async def test_a_load_may_send_images() -> None:
    backend = Encoding()
    with served(backend, free_port()) as url:
        config = LoadConfig(url=url, inputs=[PHOTO, OTHER], num_requests=6, concurrency=2)
        records = await asyncio.to_thread(asyncio.run, run_load(config))
    assert [record.error for record in records] == [None] * 6
    assert sum(len(request.rows) for request in backend.requests) == 6


def test_arrays_by_name_are_one_answer(tmp_path: Path) -> None:
    with served(Encoding(of=ROW), free_port()) as url, Client(url) as client:
        by_name = client.predict({"age": np.array(3), "w": np.array([1.0, 3.0])})
        assert (by_name.label, by_name.score, by_name.exit) == ("card", 2.0, 1)
        body = {"inputs": {"age": 3, "w": [1, 3]}}
        assert answer_of(httpx.post(f"{url}/predict", json=body).json()) == ("card", 2.0, 1)
        np.savez(tmp_path / "x.npz", age=np.array([3, 4]), w=np.ones((2, 2)), labels=np.array(["a", "b"]))
        out = tmp_path / "o.jsonl"
        assert run("predict", "--data", tmp_path / "x.npz", "--out", out, "--url", url) == 0
    assert [json.loads(line)["label"] for line in out.read_text().splitlines()] == ["card", "bill"]


def test_what_is_no_image_is_refused_by_the_service_or_before_it_is_sent(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(UnprocessableInputError, match="JPEG, PNG and WebP files of one frame are supported"):
            client.predict(b"no image")
        with pytest.raises(UnprocessableInputError, match="floating point pixels must be from 0 to 1"):
            client.predict(PHOTO.astype(np.float32))
        with pytest.raises(InputError, match=r"gone.png: No such file"):
            client.predict(Path("gone.png"))
        with pytest.raises(InputError, match="an array of str96 cannot be sent"):
            client.predict(np.array("cat"))
