"""The servers that are compared: how each is started, and what its requests say beside prompt and length.

Every answer has as many tokens as were asked for: no end token ends it, on any side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from earlyexit.boundary import FloatName
from experiments.peers.processes import Server, running, wait_until_ready

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same for all sides."""

    ours: Path
    """Offramp's folder of the model."""
    folder: Path
    """`transformers`'."""
    gguf: Path
    dtype: FloatName
    threads: int
    most: int
    """Sequences under way at most, where a server can be told."""
    context: int
    """Tokens of prompt and answer, at most."""
    port: int
    logs: Path
    llama_server: Path | None = None
    """The binary of llama.cpp's own server."""

    def tokens_of(self, answer: int) -> dict[str, Any]:
        """What `transformers serve` is told: without it, an end token ends an answer, and lengths differ."""
        config = {"max_new_tokens": answer, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        return {"generation_config": json.dumps(config)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A server."""

    name: str
    command: Callable[[Setting], Sequence[str]]
    model: Callable[[Setting], str]
    more: Callable[[Setting, int], Mapping[str, Any]]
    """What a request says besides, by the tokens of its answer."""
    needs: Callable[[Setting], str | None] = lambda _: None
    """What is missing here, if anything is."""
    ready: str = "/v1/models"
    """What answers 200 once it is up."""
    note: str = ""


def _offramp(plan: str) -> Callable[[Setting], Sequence[str]]:
    def command(setting: Setting) -> Sequence[str]:
        return (
            *(sys.executable, "-m", "offramp", "serve", str(setting.ours)),
            *("--plan", plan, "--batch", str(setting.most), "--dtype", setting.dtype),
            *("--threads", str(setting.threads), "--port", str(setting.port), "--timeout-s", "120"),
        )

    return command


def _transformers(setting: Setting) -> Sequence[str]:
    pages = setting.most * (setting.context // 16 + 2)
    return (
        *(sys.executable, "-m", "transformers.cli.transformers", "serve", str(setting.folder)),
        *("--continuous-batching", "--device", "cpu", "--dtype", setting.dtype, "--port", str(setting.port)),
        *("--cb-block-size", "16", "--cb-num-blocks", str(pages), "--cb-max-batch-tokens", "256", "--host", HOST),
    )


def _llama_cpp_python(setting: Setting) -> Sequence[str]:
    options = {
        "model": str(setting.gguf),
        "model_alias": "smollm2",
        "n_ctx": setting.context,
        "n_threads": setting.threads,
        "n_threads_batch": setting.threads,
        "logits_all": False,
        "interrupt_requests": False,
        "use_mlock": False,
        "host": HOST,
        "port": setting.port,
        "verbose": False,
        "type_k": 0,  # float32; its own default is float16
        "type_v": 0,
    }
    said = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return (sys.executable, "-m", "llama_cpp.server", *said)


def _llama_server(setting: Setting) -> Sequence[str]:
    slots, threads = str(setting.most), str(setting.threads)
    return (
        *(str(setting.llama_server), "--model", str(setting.gguf), "--alias", "smollm2"),
        *("--ctx-size", str(setting.context * setting.most), "--parallel", slots, "--cont-batching"),
        *("--threads", threads, "--threads-batch", threads, "--threads-http", "2"),
        *(
            "--cache-type-k",
            "f32",
            "--cache-type-v",
            "f32",
            "--cache-ram",
            "0",
            "--host",
            HOST,
            "--port",
            str(setting.port),
        ),
    )


def _xllamacpp(setting: Setting) -> Sequence[str]:
    return (sys.executable, "-m", "experiments.streams.xllamacpp_server", json.dumps(_xllamacpp_options(setting)))


def _xllamacpp_options(setting: Setting) -> dict[str, Any]:
    return {
        "model": str(setting.gguf),
        "context": setting.context * setting.most,
        "parallel": setting.most,
        "threads": setting.threads,
        "port": setting.port,
    }


def _missing(module: str) -> Callable[[Setting], str | None]:
    return lambda _: None if find_spec(module) else f"{module} is not installed"


def _no_end(_: Setting, __: int) -> Mapping[str, Any]:
    return {"ignore_eos": True, "stream_options": {"include_usage": True}}


def _ours(plan: str) -> Side:
    name = f"offramp {plan}"
    return Side(name=name, command=_offramp(plan), model=lambda _: "smollm2", more=_no_end, ready="/v2/health/ready")


SIDES: tuple[Side, ...] = (
    *map(_ours, ("stock", "early-exit")),
    Side(
        name="transformers serve",
        command=_transformers,
        model=lambda setting: str(setting.folder),
        more=lambda setting, tokens: setting.tokens_of(tokens),
        ready="/health",
        note="continuous batching",
    ),
    Side(
        name="llama.cpp server",
        command=_llama_server,
        model=lambda _: "smollm2",
        more=lambda *_: {"ignore_eos": True, "stream_options": {"include_usage": True}, "cache_prompt": False},
        needs=lambda setting: None if setting.llama_server else "no --llama-server",
        note="continuous batching",
    ),
    Side(
        name="xllamacpp",
        command=_xllamacpp,
        model=lambda _: "smollm2",
        more=lambda *_: {"ignore_eos": True, "stream_options": {"include_usage": True}, "cache_prompt": False},
        needs=_missing("xllamacpp"),
        note="llama.cpp's own server in a wheel for any x86-64",
    ),
    Side(
        name="llama-cpp-python",
        command=_llama_cpp_python,
        model=lambda _: "smollm2",
        more=lambda *_: {"logit_bias": {"0": -100, "2": -100}},
        needs=_missing("llama_cpp"),
        note="one sequence at a time",
    ),
)


_ALONE = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@contextmanager
def serving(side: Side, setting: Setting) -> Iterator[Server]:
    """The server, once it says that it is up; afterwards none of its processes is left."""
    threads = {name: str(setting.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    log = setting.logs / f"{side.name.replace(' ', '-')}.log"
    url = f"http://{HOST}:{setting.port}"
    with running(list(side.command(setting)), url, log, {**threads, **_ALONE}) as server:
        wait_until_ready(server, side.name, ask=lambda url: httpx.get(url + side.ready, timeout=5.0))
        yield server
