"""Python runs this module when a process of the service starts.

`deployments/local_ray/cluster.py` adds this folder to PYTHONPATH.

ray.serve imports pandas if it is installed, to recognize tables that a deployment returns. Our deployments return none,
and pandas would cost every process 30 MB and a third of its start time. Other imports of pandas still work.

Ray's agents are killed with their raylet. Otherwise they would first inform the head, which may have ended, and would
wait for it forever.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

IMPORTER, BLOCKED_MODULE = "ray.serve._private.utils", "pandas"

AGENTS = ("ray/dashboard/agent.py", "ray/_private/runtime_env/agent/main.py")
"""Scripts of a raylet's agents. Its workers need no help, because they end with it."""
RAYLET_PID = "RAY_RAYLET_PID"
PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""


class PandasBlocker:
    """An import hook that hides `BLOCKED_MODULE` from the module `IMPORTER`, which handles its absence."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns None, so that other hooks find the module; raises ModuleNotFoundError for the hidden one."""
        if name == BLOCKED_MODULE:
            frame = sys._getframe().f_back
            while frame is not None and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None and frame.f_globals.get("__name__") == IMPORTER:  # it runs the import
                raise ModuleNotFoundError(f"{BLOCKED_MODULE} is hidden from {IMPORTER}", name=BLOCKED_MODULE)
        return None


def block_pandas() -> None:
    """Installs the hook in this process."""
    if not any(type(finder).__name__ == PandasBlocker.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, PandasBlocker())


def prepare_agent() -> None:
    """Sets up one of Ray's agents, on Linux: the kernel kills it with its raylet, and it logs less."""
    raylet = os.environ.get(RAYLET_PID)
    if raylet is None or sys.platform != "linux" or not any(each.endswith(AGENTS) for each in sys.orig_argv):
        return
    import ctypes
    import logging

    # A service has no dashboard, for whose address this module would log an error with a traceback every second.
    logging.getLogger("ray.dashboard.modules.event.event_agent").setLevel(logging.CRITICAL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(raylet):  # the raylet has already ended
        os._exit(1)


def run_next_sitecustomize() -> None:
    """Runs the environment's own sitecustomize, if there is one."""
    folder = str(Path(__file__).parent)
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    block_pandas()
    prepare_agent()
    run_next_sitecustomize()
