from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from earlyexit.data.rows import read_labelled
from earlyexit.foreign import torch_module
from offramp.commands.jobs import TrainJob
from offramp.commands.train import train
from profiles.catalogue import published_profile
from profiles.latency import LatencyProfile
from profiles.table import LatencyTable
from tests.latency_profile import latency_profile
from tests.offramp.cli.runs import Always, serving, url_of
from tests.offramp.service.service_folders import write_chain, write_model

EXAMPLES = Path(__file__).parents[2] / "examples"

WORDS = ("[PAD]", "[UNK]", "pay", "my", "bill", "rain", "in", "town", "again")


@pytest.fixture(autouse=True, scope="session")
def traced_once() -> Iterator[None]:
    """Traces each torch module only once, because tracing takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_module, "read_torch", cache(torch_module.read_torch))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of `transformers`, three blocks, whose labels are not in alphabetical order."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        id2label={0: "weather", 1: "bill"},
        label2id={"weather": 0, "bill": 1},
    )
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def rows(num_rows: int) -> str:
    pairs = ("pay my bill,bill\n", "rain in town again,weather\n")
    return "text,label\n" + "".join(pairs[k % 2] for k in range(num_rows))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty texts of two labels."""
    path = tmp_path_factory.mktemp("data") / "data.csv"
    path.write_text(rows(40), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trained(checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "model"
    train(TrainJob(backbone=str(checkpoint), name="m", epochs=1), read_labelled(data), folder)
    return folder


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    """A trained model's folder, not calibrated; each test has its own."""
    return shutil.copytree(trained, tmp_path / "model")


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The examples in a repository in which their commands were run."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    write_model(tmp_path / "runs/demo/model", num_blocks=6)
    write_model(tmp_path / "runs/emulated/model", num_blocks=12)
    demo = tmp_path / "runs/demo"
    small, large = write_model(demo / "small", num_blocks=3, name="s"), write_model(demo / "large", num_blocks=6)
    write_chain(demo / "cascade", small, large)
    a_profile(6).save(demo / "latency-cpu.json")
    a_profile(9).save(demo / "latency-cascade.json")
    write_model(tmp_path / "runs/mine", num_blocks=6)
    a_profile(6).save(tmp_path / "runs/mine/edge-box.json")
    return tmp_path / "examples"


def a_profile(num_blocks: int) -> LatencyProfile:
    """Returns a profile with BERT-base's blocks, and a ramp after each but the last."""
    known = published_profile("bert-base", "V100").at(128)
    ramps = tuple(range(num_blocks - 1))
    table = LatencyTable(
        batches=(1, 2), block_s_NB=known.block_s_NB[:num_blocks, :2], ramp_s_EB=known.ramp_s_EB[: len(ramps), :2]
    )
    facts: dict[str, Any] = {"model": "demo", "device": "cpu", "dtype": "float32", "tables": {16: table}}
    return latency_profile(num_blocks=num_blocks, ramps=ramps, **facts)


@pytest.fixture
def answering_url() -> Iterator[str]:
    for server in serving(HTTPServer(("127.0.0.1", 0), Always)):
        yield url_of(server)
