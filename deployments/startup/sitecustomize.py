"""Python runs this when a process of the service starts.

`deployments/local_ray/start.py` puts the folder into PYTHONPATH.

ray.serve imports pandas where it is installed, to know its tables if a deployment returns one. Ours do not, and
every process would have 30 MB of it, and a third more to do when it starts. Other imports of pandas work.

Ray's agents end with their raylet: by themselves they first tell the head, which may be gone, and wait for it forever.
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
"""The scripts that a raylet starts beside its workers, which end without help."""
RAYLET_PID = "RAY_RAYLET_PID"
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


class LeaveOut:
    """Says to `ASKING` that there is no `LEFT_OUT`, for which it is prepared."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As import hooks do: None leaves it to others."""
        if name == LEFT_OUT and _importing() == ASKING:
            raise ModuleNotFoundError(f"{ASKING} is to do without {LEFT_OUT}", name=LEFT_OUT)
        return None


def leave_out() -> None:
    """From now on, in this process."""
    if not any(type(finder).__name__ == LeaveOut.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, LeaveOut())


def end_with_raylet() -> None:
    """Have the kernel end this process, if it is one of Ray's agents, when its raylet ends; on Linux."""
    raylet = os.environ.get(RAYLET_PID)
    if raylet is None or sys.platform != "linux" or not any(each.endswith(AGENTS) for each in sys.orig_argv):
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(raylet):  # it has ended before
        os._exit(1)


def run_the_next_one() -> None:
    """A sitecustomize that the environment has of its own."""
    here = str(Path(__file__).parent)
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _importing() -> str | None:
    """The module whose import statement is under way."""
    frame = sys._getframe()
    while frame.f_back is not None and (
        frame.f_globals.get("__name__") == __name__ or "importlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else None


if __name__ == "sitecustomize":
    leave_out()
    end_with_raylet()
    run_the_next_one()
