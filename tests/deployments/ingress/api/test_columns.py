from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.http import InferenceServerClient, InferInput

from deployments.api.bodies import V2Reply
from deployments.api.grpc.calls import CONTENTS, parse_infer
from deployments.api.grpc.messages import message_class
from deployments.api.parsing import GivenTensor, Signature, packed, parse_v2, read_columns, unpacked
from deployments.api.responses import v2_response
from earlyexit.errors import InputError
from earlyexit.network.wire import DATATYPES
from tests.deployments.ingress.api.signatures import IMAGE, NUMBERS, PAIR, TEXT, tensor, tensors
from tests.deployments.ingress.api.v2_requests import check_refused, refusal
from tests.earlyexit.codecs.pictures import file_of, noise


def numbers(datatype: str) -> npt.NDArray[Any]:
    """Two rows of (2, 3), the datatype's smallest and largest among them."""
    dtype: np.dtype[Any] = DATATYPES[datatype]
    if dtype.kind == "b":
        return np.array([False, True] * 6).reshape(2, 2, 3)
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    values = np.arange(12).astype(dtype)
    values[-1], values[-2] = limits.max, limits.min
    values.shape = (2, 2, 3)
    return values


def json_body(datatype: str, shape: list[int], data: object, name: str = "x") -> bytes:
    given = {"name": name, "datatype": datatype, "shape": shape, "data": data}
    return json.dumps({"inputs": [given]}).encode()


def message(signature: Signature, datatype: str, array: npt.NDArray[Any], *, raw: bool) -> Any:
    request = message_class("ModelInferRequest")(model_name="m")
    request.inputs.add(name=signature.inputs[0].name, datatype=datatype, shape=array.shape)
    if raw:
        request.raw_input_contents.append(packed(datatype, array))
    else:
        getattr(request.inputs[0].contents, CONTENTS[datatype]).extend(array.ravel().tolist())
    return request


def rows_of(signature: Signature, body: bytes, json_length: int | None = None) -> npt.NDArray[Any]:
    request, _ = parse_v2(body, json_length, signature)
    return np.stack([row[0] for row in request.rows])


@pytest.mark.parametrize("datatype", NUMBERS)
def test_every_datatype_is_the_same_by_every_way(datatype: str) -> None:
    sent, signature = numbers(datatype), tensor(datatype, 2, 3)
    triton = InferInput("x", list(sent.shape), datatype).set_data_from_numpy(sent)
    binary, length = InferenceServerClient.generate_request_body([triton])
    ways = {
        "REST, nested JSON": rows_of(signature, json_body(datatype, [2, 2, 3], sent.tolist())),
        "REST, flat JSON": rows_of(signature, json_body(datatype, [2, 2, 3], sent.ravel().tolist())),
        "REST, bytes": rows_of(signature, binary, length),
        "gRPC, raw": np.stack(
            [row[0] for row in parse_infer(message(signature, datatype, sent, raw=True), signature)[0].rows]
        ),
    }
    if datatype in CONTENTS:
        request, _ = parse_infer(message(signature, datatype, sent, raw=False), signature)
        ways["gRPC, typed"] = np.stack([row[0] for row in request.rows])
    for way, received in ways.items():
        assert received.dtype == DATATYPES[datatype], way
        np.testing.assert_array_equal(received, sent, err_msg=way)


def test_every_datatype_survives_its_bytes() -> None:
    for datatype in NUMBERS:
        sent = numbers(datatype)
        np.testing.assert_array_equal(unpacked(datatype, packed(datatype, sent), "x"), sent.ravel())
    assert unpacked("BYTES", packed("BYTES", ["café", b"\xff", ""]), "x") == ["café".encode(), b"\xff", b""]


def test_two_texts_are_a_pair() -> None:
    inputs = [GivenTensor("text_pair", "BYTES", [2, 1], ["b", "d"]), GivenTensor("text", "BYTES", [2], ["a", "c"])]
    assert PAIR.codec.from_columns(read_columns(inputs, PAIR.inputs)) == [("a", "b"), ("c", "d")]


def test_several_tensors_follow_the_json_in_their_order() -> None:
    triton = [
        InferInput(name, [1], "BYTES").set_data_from_numpy(np.array([name[:5]], dtype=object))
        for name in ("text_pair", "text")
    ]
    body, length = InferenceServerClient.generate_request_body(triton)
    request, _ = parse_v2(body, length, PAIR)
    assert request.rows == (("text", "text_"),)


def test_an_image_is_a_file_or_pixels() -> None:
    pixels = noise(2, 3)
    files = np.array([file_of(pixels), file_of(pixels, "WEBP", lossless=True)], dtype=object)
    shares = (pixels / np.float32(255)).astype(np.float32)
    given = {
        "files": ("BYTES", files),
        "pixels": ("UINT8", pixels[None]),
        "shares": ("FP32", shares[None]),
        "half": ("FP16", shares[None].astype(np.float16)),
    }
    for datatype, array in given.values():
        triton = InferInput("image", list(array.shape), datatype).set_data_from_numpy(array)
        body, length = InferenceServerClient.generate_request_body([triton])
        request, _ = parse_v2(body, length, IMAGE)
        for encoded in IMAGE.codec.encode(request.rows):
            np.testing.assert_array_equal(encoded.tensors[0], pixels[None])


FLOATS = tensor("FP32", 2)
UNFIT: dict[str, tuple[tuple[Signature, GivenTensor], str]] = {
    "datatype": ((FLOATS, GivenTensor("x", "FP64", [1, 2], [1, 2])), "inputs.0.datatype: 'FP64'; 'x' is FP32"),
    "no rows": ((FLOATS, GivenTensor("x", "FP32", [0, 2], [])), "inputs.0: no elements; at least one row"),
    "no batch": (
        (FLOATS, GivenTensor("x", "FP32", [2], [1, 2])),
        "inputs.0.shape: [2]; 'x' is [rows, 2] in FP32",
    ),
    "wrong size": (
        (IMAGE, GivenTensor("image", "UINT8", [1, 3, 2, 3], [0] * 18)),
        "inputs.0.shape: [1, 3, 2, 3]; 'image' is [rows, 2, 3, 3] in UINT8",
    ),
    "negative size": (
        (tensor("FP32", 1), GivenTensor("x", "FP32", [-1, 1], [1])),
        "inputs.0.shape: [-1, 1]; 'x' is",
    ),
    "too few": (
        (FLOATS, GivenTensor("x", "FP32", [2, 2], [1, 2, 3])),
        "inputs.0.shape: [2, 2] holds 4 elements, 3 were sent",
    ),
    "half an element": (
        (FLOATS, GivenTensor("x", "FP32", [1, 2], bytes(7))),
        "inputs.0: 7 bytes; an element of FP32 has 4",
    ),
    "no truth": (
        (tensor("BOOL", 2), GivenTensor("x", "BOOL", [1, 2], b"\1\2")),
        "inputs.0: bytes other than 0 and 1",
    ),
    "words": ((FLOATS, GivenTensor("x", "FP32", [1, 2], ["a", "b"])), "inputs.0.data: not all FP32"),
    "ragged": ((FLOATS, GivenTensor("x", "FP32", [2, 2], [[1, 2], [3]])), "inputs.0.data: not an array"),
    "nested otherwise": (
        (FLOATS, GivenTensor("x", "FP32", [1, 2], [[1], [2]])),
        "inputs.0.data: its nesting does not fit the shape [1, 2]",
    ),
    "too large": (
        (tensor("INT8", 2), GivenTensor("x", "INT8", [1, 2], [1, 128])),
        "inputs.0.data: not all INT8",
    ),
    "text to an image model": (
        (IMAGE, GivenTensor("text", "BYTES", [1], ["a"])),
        "inputs.0.name: unknown input 'text'; the model takes 'image'",
    ),
    "numbers as an image": (
        (IMAGE, GivenTensor("image", "FP64", [1, 2, 3, 3], [0] * 18)),
        "inputs.0.datatype: 'FP64'; 'image' is BYTES, UINT8, FP32, FP16",
    ),
    "one side": (
        (PAIR, GivenTensor("text", "BYTES", [1], ["a"])),
        "inputs: 'text_pair' missing; the model takes 'text', 'te",
    ),
}


def test_a_tensor_that_does_not_fit_is_refused_with_what_would() -> None:
    check_refused(UNFIT, lambda given: read_columns([given[1]], given[0].inputs))


def test_a_name_given_twice_and_unequal_rows_are_refused() -> None:
    one, two = (GivenTensor("text", "BYTES", [n], ["a"] * n) for n in (1, 2))
    with pytest.raises(InputError, match=r"inputs\.1\.name: 'text' is there twice"):
        read_columns([one, two], PAIR.inputs)
    with pytest.raises(InputError, match="as many of each are needed"):
        read_columns([GivenTensor("text_pair", "BYTES", [1], ["a"]), two], PAIR.inputs)


def test_values_in_another_datatypes_place_are_refused_and_half_precision_has_none() -> None:
    for datatype, place, taken in (("FP16", "fp32", "raw_input_contents alone"), ("FP32", "fp64", "fp32_contents")):
        request = message_class("ModelInferRequest")(model_name="m")
        request.inputs.add(name="x", datatype=datatype, shape=[1, 2])
        getattr(request.inputs[0].contents, f"{place}_contents").extend([1, 2])
        said = refusal(lambda request=request, datatype=datatype: parse_infer(request, tensor(datatype, 2)))  # type: ignore[misc] # binds the values
        assert said == f"inputs.0.contents: {place}_contents; {datatype} is taken from {taken}"


def test_metadata_says_the_form_that_is_preferred() -> None:
    assert TEXT.input_tensors == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert [each["name"] for each in PAIR.input_tensors] == ["text", "text_pair"]
    assert IMAGE.input_tensors == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    several = tensors(
        {"name": "a", "datatype": "FP32", "shape": [2, 3]}, {"name": "b", "datatype": "INT8", "shape": []}
    )
    assert [(each["name"], each["shape"]) for each in several.input_tensors] == [("a", [-1, 2, 3]), ("b", [-1])]
    assert [(each["name"], each["datatype"]) for each in TEXT.output_tensors] == [
        ("label", "BYTES"),
        ("score", "FP32"),
        ("exit", "INT32"),
    ]


def test_bytes_of_a_reply_are_little_endian() -> None:
    assert packed("INT32", [1]) == struct.pack("<i", 1)
    assert v2_response([], TEXT.task, V2Reply(id=None, outputs=("exit",), binary=frozenset()), "m")[1] is None
