"""Sessions of ONNX Runtime: how one is opened, and which are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from earlyexit.errors import PlanError

Key = TypeVar("Key", bound=Hashable)

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's name for where the weights are that lie beside a graph."""

CUDA = "CUDAExecutionProvider"
FATAL = 4
"""ONNX Runtime's number of the least that is logged when nearly nothing is."""


class Sessions(Generic[Key]):
    """Sessions by what they compute, each opened when it is first prepared or asked for.

    Every session holds weights, so a new set that is prepared closes all but it, the set before (a plan's that is still
    in force while the next is made ready), and the `spare` others that were asked for last.
    """

    def __init__(self, open_one: Callable[[Key], Any], *, spare: int = 0) -> None:
        self._open_one = open_one
        self._spare = spare
        self._sessions: dict[Key, Any] = {}
        """The one asked for last is the last."""
        self._lock = Lock()
        """One thread runs sessions while another prepares some."""
        self._prepared: frozenset[Key] = frozenset()

    def get(self, key: Key) -> Any:
        """The session of a key; raises what opening it raises."""
        with self._lock:
            session = self._sessions.pop(key, None)
            if session is not None:
                self._sessions[key] = session
        if session is None:
            session = self._open_one(key)
            with self._lock:
                self._sessions[key] = session
        return session

    def is_ready(self, key: Key) -> bool:
        """Whether it is open."""
        with self._lock:
            return key in self._sessions

    def prepare(self, keys: Collection[Key]) -> None:
        """Open these; others may be used at the same time."""
        for key in keys:
            self.get(key)
        wanted = frozenset(keys)
        if wanted != self._prepared:
            kept = wanted | self._prepared
            with self._lock:
                others = [key for key in self._sessions if key not in kept]
                for key in others[: max(0, len(others) - self._spare)]:
                    del self._sessions[key]
            self._prepared = wanted


def load_runtime(providers: Sequence[str], *, needs: Sequence[str] = ("onnx", "onnxruntime")) -> Any:
    """ONNX Runtime's module; raises PlanError without it, without a package it needs here, or without a provider."""
    if any(find_spec(name) is None for name in needs):
        raise PlanError("ONNX Runtime is not installed: install offramp[onnx] or offramp[gpu]")
    runtime = import_module("onnxruntime")
    available = runtime.get_available_providers()
    unknown = [name for name in providers if name not in available]
    if unknown:
        instead = "; install offramp[gpu] in the place of offramp[onnx]" if CUDA in unknown else ""
        raise PlanError(f"this ONNX Runtime has no {', '.join(unknown)}; it has {', '.join(available)}{instead}")
    return runtime


def provider_of(device_type: str) -> str:
    """What computes on a torch device of this type."""
    return CUDA if device_type == "cuda" else "CPUExecutionProvider"


def open_session(
    runtime: Any,
    graph: Path | bytes,
    *,
    providers: Sequence[str],
    num_threads: int | None = None,
    weights: Path | None = None,
    quiet: bool = False,
) -> Any:
    """A session of a file, or of a graph in memory whose weights lie in the folder `weights`.

    `num_threads` None leaves the choice to ONNX Runtime. `quiet`: what fails is raised, and not logged too.
    Raises PlanError for a provider that does not start, and what ONNX Runtime raises.
    """
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = num_threads or 0  # ONNX Runtime's word for its own choice
    if quiet:
        options.log_severity_level = FATAL
    if weights is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
    session = runtime.InferenceSession(graph, options, providers=list(providers))
    # A provider whose libraries do not load is left out with a line on stderr, and the CPU takes its place.
    missing = sorted(set(providers) - set(session.get_providers()))
    if missing:
        raise PlanError(f"ONNX Runtime could not start {', '.join(missing)}; its own log line says why")
    return session
