"""The blocks at which foreign models are cut, and the outputs that are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from earlyexit.data.rows import LabelledRows
from earlyexit.errors import GraphError, InputError
from earlyexit.foreign import open_foreign
from earlyexit.network.store import load_model
from offramp.commands.inject import crossing_sites, read_model
from tests.earlyexit.foreign.modules import VOCABULARY, two_answers
from tests.offramp.jobs.test_injecting import HERE, ROWS, full_outputs, injected_into, job_of, rows_of, uncut_answers


def with_outputs(path: Path, *names: str) -> Path:
    """A file with `pictures_graph` and further floating-point outputs."""
    import onnx

    model = onnx.load(path)
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    onnx.save(model, path)
    return path


def test_an_onnx_file_is_cut_for_its_answer_despite_other_outputs(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from tests.earlyexit.foreign.onnx_graphs import PIXELS, pictures_graph, saved

    path = with_outputs(saved(pictures_graph(seed=5), tmp_path / "theirs"), "r0", "flat")
    with pytest.raises(GraphError, match=r"theirs\S+ is no classifier: .*; several can be the answer, choose one"):
        injected_into(tmp_path / "model", rows_of(), backbone=str(path), **PIXELS)
    assert not (tmp_path / "model").exists()
    done = injected_into(tmp_path / "model", rows_of(), backbone=str(path), **PIXELS, output="logits")
    assert done.model.info.provenance["cuts"] == [["r0"], ["r1"], ["r2"]], "as where it gives nothing else"
    with pytest.raises(GraphError, match="has no output 'logit'; it has logits, r0, flat"):
        injected_into(tmp_path / "model", rows_of(), backbone=str(path), **PIXELS, output="logit")


def test_a_module_with_several_answers_needs_an_output_name(tmp_path: Path) -> None:
    backbone = f"{HERE}:two_answers"
    first, second = read_model(job_of(backbone), rows_of()).flow.outputs
    with pytest.raises(GraphError, match="; several can be the answer, choose one"):
        injected_into(tmp_path, rows_of(), backbone=backbone)
    with pytest.raises(GraphError, match=rf"has no output 'third'; it has {first}, {second}"):
        injected_into(tmp_path, rows_of(), backbone=backbone, output="third")
    done = injected_into(tmp_path, rows_of(), backbone=backbone, output=second)
    encoded, outputs = full_outputs(tmp_path, rows_of(20))
    assert outputs.equal(uncut_answers(two_answers()[0], encoded)[1])
    assert done.model.num_blocks == load_model(tmp_path).num_blocks > 2


def test_sites_with_an_unsupported_type_are_reported_with_their_type(tmp_path: Path) -> None:
    found = read_model(job_of(f"{HERE}:doubled"), rows_of())
    with pytest.raises(GraphError, match=r"cannot be cut at any site; not at .*is torch\.float64, but must be"):
        crossing_sites(job_of(f"{HERE}:doubled"), open_foreign(found, {"name": "image"}, tmp_path))


def test_all_candidates_of_an_onnx_file_share_one_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    from earlyexit.backends.onnx import open_session
    from tests.earlyexit.foreign.onnx_graphs import CODEC, PIXELS, across_graph, read_graph, saved

    path, opened = saved(across_graph(seed=3), tmp_path), list[object]()

    def counted(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return open_session(*arguments, **options)

    monkeypatch.setattr("earlyexit.foreign.onnx_cut.open_session", counted)
    cuts = [("r0",), ("c1",), ("across",), ("mixed",), ("back",), ("nowhere",)]
    refused = open_foreign(read_graph(path, pixels=PIXELS), CODEC, tmp_path / "model").refused(cuts)
    assert list(refused) == [("across",), ("mixed",), ("nowhere",)]
    assert "has no tensor 'nowhere'" in refused["nowhere",]
    assert len(opened) == 1


@pytest.mark.parametrize("written", ["onnx", "torch"])
def test_a_tokenizer_with_more_words_than_the_lookup_table_is_refused(tmp_path: Path, written: str) -> None:
    pytest.importorskip("onnxruntime")
    from tests.earlyexit.foreign.onnx_graphs import WORDS, saved, words_graph

    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{k}": k for k in range(200)}, "unk_token": "w0"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = {"onnx": WORDS, "torch": VOCABULARY}[written]
    backbone = f"{HERE}:texts" if written == "torch" else str(saved(words_graph(), tmp_path / "theirs"))
    texts = LabelledRows.of_texts([f"w{k % 7} w{k % 200}" for k in range(ROWS)], [""] * ROWS)
    with pytest.raises(InputError, match=rf"has the value {rows}; .* has {rows} rows; --tokenizer .* is another"):
        injected_into(
            tmp_path / "out", texts, backbone=backbone, tokenizer=str(tmp_path / "tokenizer.json"), max_length=6
        )
