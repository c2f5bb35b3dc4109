"""Times the operators of an ONNX model by ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from earlyexit.errors import GraphError
from earlyexit.graph.onnx_file import OnnxFile, dataflow_of
from earlyexit.graph.shares import REPEATS, with_shares
from earlyexit.graph.sites import Site

FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's option: where weights lie of a model that it is given as bytes."""


def time_onnx(file: OnnxFile, sites: Sequence[Site], *, repeats: int = REPEATS) -> tuple[Site, ...]:
    """The sites with shares of seconds, on one thread of this CPU, and with bytes where the file does not tell them.

    Operators are fused as they are where the model is served. The sites' tensors are outputs of the graph that is
    timed, so that nothing is fused across them: no cut could either. Raises GraphError for what cannot be run.
    """
    if find_spec("onnxruntime") is None:
        raise GraphError("sites are timed with ONNX Runtime: install offramp[onnx] or offramp[gpu]")
    import onnx

    missing = [path for path in file.beside if not path.is_file()]
    if missing:
        raise GraphError(f"{file.path}: its weights are not there: {missing[0]}")
    with tempfile.TemporaryDirectory() as folder:
        seconds, given = _profiled(file, sites, repeats, Path(folder))
        fused = onnx.load(Path(folder) / "fused.onnx", load_external_data=False)
    flow = dataflow_of(fused.graph, fused.graph)
    return tuple(
        site
        if site.bytes_per_input is not None
        else replace(site, bytes_per_input=_bytes(site, given, file.flow.batch))
        for site in with_shares(sites, flow, file.flow.outputs, seconds)
    )


def _profiled(
    file: OnnxFile, sites: Sequence[Site], repeats: int, folder: Path
) -> tuple[Mapping[str, float], Mapping[str, Any]]:
    """Seconds of every fused operator by its name, and what the sites' tensors held."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails is told below, and that the fused graph suits this machine is known
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.optimized_model_filepath = str(folder / "fused.onnx")
    options.add_session_config_entry(FOLDER_OF_WEIGHTS, str(file.path.resolve().parent))
    model = with_outputs(file, [*file.flow.outputs, *(name for site in sites for name in site.tensors)])
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for _ in range(repeats):
            values = session.run(None, _drawn_inputs(file))
    except Exception as error:  # ONNX Runtime has no class of its own that all of its errors are of
        reason = str(error).strip().splitlines()[0]
        raise GraphError(f"ONNX Runtime cannot run {file.path} on inputs of {_said(file)}: {reason}") from error
    names = [each.name for each in session.get_outputs()]
    return _least(Path(session.end_profiling())), dict(zip(names, values, strict=True))


def with_outputs(file: OnnxFile, tensors: Sequence[str]) -> Any:
    """The model with more outputs: these tensors, where they are none yet."""
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(file.proto)
    there = {each.name for each in model.graph.output} | {*file.flow.inputs}
    for name in dict.fromkeys(tensors):
        if name not in there:
            model.graph.output.append(onnx.ValueInfoProto(name=name))
    return model


def _drawn_inputs(file: OnnxFile) -> dict[str, Any]:
    """Inputs of the shapes that were read: normal numbers, and ones where whole numbers are taken."""
    import onnx

    generator, drawn = np.random.default_rng(0), {}
    types = {each.name: each.type.tensor_type.elem_type for each in file.proto.graph.input}
    for name in file.flow.inputs:
        if name not in file.flow.shapes:
            raise GraphError(f"{file.path}: its input {name!r} has no shape")
        dtype = onnx.helper.tensor_dtype_to_np_dtype(types[name])
        shape = file.flow.shapes[name]
        floats = np.issubdtype(dtype, np.floating)
        drawn[name] = (generator.standard_normal(shape) if floats else np.ones(shape)).astype(dtype)
    return drawn


def _said(file: OnnxFile) -> str:
    return ", ".join(f"{name} {list(file.flow.shapes[name])}" for name in file.flow.inputs)


def _least(profile: Path) -> Mapping[str, float]:
    """Seconds by operator, of all runs the shortest."""
    runs: defaultdict[str, float] = defaultdict(lambda: math.inf)
    for event in json.loads(profile.read_text(encoding="utf-8")):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            name = name.removesuffix("_kernel_time")
            runs[name] = min(runs[name], event["dur"] / 1e6)
    return runs


def _bytes(site: Site, given: Mapping[str, Any], batch: int) -> int | None:
    """Of one input; what was read where a tensor is an input of the model."""
    values = [given[name] for name in site.tensors if name in given]
    if len(values) < len(site.tensors):
        return site.bytes_per_input
    return sum(int(each.nbytes) for each in values) // batch
