"""Python runs this when a process of the service starts.

`deployments/local_ray/cluster.py` puts the folder into PYTHONPATH.

ray.serve imports pandas if it is installed, to recognize tables that a deployment returns. Ours return none, and pandas
would cost every process 30 MB, and a third of its time to start. Other imports of pandas work.

Ray's agents are made to end with their raylet: without that they first inform the head, which may have ended, and wait
for it forever.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

ASKING, LEFT_OUT = "ray.serve._private.utils", "pandas"

AGENTS = ("ray/dashboard/agent.py", "ray/_private/runtime_env/agent/main.py")
"""Scripts that a raylet starts; its workers end by themselves."""
RAYLET_PID = "RAY_RAYLET_PID"
PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""


class LeaveOut:
    """An import hook: for the module `ASKING` there is no `LEFT_OUT`, which it handles."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns None, so that other hooks find the module; raises ModuleNotFoundError for the one left out."""
        if name == LEFT_OUT:
            frame = sys._getframe().f_back
            while frame is not None and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None and frame.f_globals.get("__name__") == ASKING:  # its import statement is running
                raise ModuleNotFoundError(f"{ASKING} is to do without {LEFT_OUT}", name=LEFT_OUT)
        return None


def leave_out() -> None:
    """Installs the hook in this process."""
    if not any(type(finder).__name__ == LeaveOut.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, LeaveOut())


def end_with_raylet() -> None:
    """Makes the kernel end this process with its raylet, if it is one of Ray's agents; on Linux."""
    raylet = os.environ.get(RAYLET_PID)
    if raylet is None or sys.platform != "linux" or not any(each.endswith(AGENTS) for each in sys.orig_argv):
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(raylet):  # it has ended before
        os._exit(1)


def run_the_next_one() -> None:
    """Runs the environment's own sitecustomize, if there is one."""
    here = str(Path(__file__).parent)
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    leave_out()
    end_with_raylet()
    run_the_next_one()
