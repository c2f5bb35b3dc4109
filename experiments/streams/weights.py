"""One decoder's weights in the forms that servers read: a folder of `transformers`, a GGUF file of floats."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from earlyexit.boundary import FloatName

SKIPPED = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")
"""What a writer of GGUF writes itself."""


def transformers_folder(source: Path, folder: Path) -> Path:
    """The weights of a GGUF file multiplied out to float32, saved as `transformers` saves them; kept if it is there."""
    if not (folder / "config.json").is_file():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        told: Any = {"gguf_file": source.name}
        quantized = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype="float32", **told)
        config = copy(quantized.config)
        del config.quantization_config  # the weights are floats by now, but such a model is not saved
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(quantized.state_dict())
        model.generation_config = quantized.generation_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(source.parent), **told).save_pretrained(folder)
    return folder


def float_gguf(source: Path, target: Path, dtype: FloatName) -> Path:
    """The same file with its matrices in `dtype`, and all else as it is; kept if it is there."""
    if target.is_file():
        return target
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    kinds = {
        "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
        "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    }
    kind, file_type = kinds[dtype]
    architecture = str(reader.fields["general.architecture"].contents())
    partial = target.with_suffix(".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(partial, architecture)
    writer.add_file_type(file_type)
    for name, field in reader.fields.items():
        if name not in SKIPPED:
            inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(tensor.shape[::-1].tolist())
        if values.ndim > 1 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target
