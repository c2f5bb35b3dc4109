"""llama.cpp's own server, as the wheel xllamacpp has it, in a process of its own; ends when it is told to.

python -m experiments.streams.xllamacpp_server '{"model": FILE, "context": 4096, "parallel": 8, "threads": 1, ...}'
"""

from __future__ import annotations

import json
import signal
import sys
from importlib import import_module


def main() -> None:
    """Serve until SIGTERM."""
    xllamacpp = import_module("xllamacpp")  # without types
    told = json.loads(sys.argv[1])
    options = xllamacpp.CommonParams()
    options.model.path = told["model"]
    options.model_alias = {"smollm2"}
    options.n_ctx, options.n_parallel = told["context"], told["parallel"]
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = told["threads"]
    options.cache_type_k = options.cache_type_v = type(options.cache_type_k)(0)  # float32; its own default is float16
    options.cache_ram_mib = 0
    options.port = told["port"]
    server = xllamacpp.Server(options)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
