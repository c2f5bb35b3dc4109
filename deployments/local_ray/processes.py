"""The processes of a service on this machine: noted in a file, found again after a crash, and ended. Linux.

Ray's head and raylet, without which a Ray on one machine cannot go on, are watched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.local_ray.private import Started, variable
from earlyexit.errors import HeadLostError

MARK = "OFFRAMP_RUN"
"""The environment variable that marks the processes of a run, and their children."""
STATE = "XDG_STATE_HOME"
GRACE_S = 2.0
"""Grace period between SIGTERM and SIGKILL, in seconds. Ray's own processes need less."""
GONE_S = 10.0
"""How long a killed process is waited for, in seconds."""
SAME_S = 0.1
"""A process has its own start within so many seconds, which are rounded."""
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
"""States of processes that only their parents must reap."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux names each start of the machine in this file."""

logger = logging.getLogger(__name__)


class Identity(BaseModel):
    """A process, told apart from a later one with the same number."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started_s: float
    """Seconds since the machine started, which a change of the system's clock does not alter."""


class RunNotes(BaseModel):
    """The file of a run, which the next start reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """The value of `MARK` in the run's processes."""
    boot: str
    """The start of the machine that the processes belong to."""
    owner: Identity
    """The `offramp serve` that started the run."""
    noted: tuple[Identity, ...] = ()
    """Processes of the run. They matter for those whose environment cannot be read, or was overwritten by a title."""


class NotedRun:
    """One run of a service: its mark, and the file that the next start finds if this one cannot end cleanly."""

    def __init__(self) -> None:
        self._notes = RunNotes(run=uuid.uuid4().hex, boot=boot_id(), owner=identity_of(psutil.Process()))
        self._file = notes_folder() / f"{self._notes.run}.json"
        self._can_write = True

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Marks the processes that are started inside, and notes them at the end of the block."""
        self._write()
        with variable(MARK, self._notes.run):
            yield
        self._notes = self._notes.model_copy(update={"noted": tuple(map(identity_of, processes_of(self._notes)))})
        self._write()

    def end(self, *, grace_s: float = GRACE_S) -> None:
        """Ends the processes of the run that are left, and removes its file."""
        end(processes_of(self._notes), grace_s=grace_s)
        if self._can_write:
            self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        """Writes the file; a missing state folder does not stop the service."""
        if not self._can_write:
            return
        beside = self._file.with_suffix(".new")
        try:
            beside.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(self._notes.model_dump_json(), encoding="utf-8")
            beside.replace(self._file)  # the file is whole whenever this process is killed
        except OSError as error:
            self._can_write = False
            logger.warning("if this process is killed, the next start will not know what it left: %s", error)


def clear_left() -> None:
    """Ends the processes that killed runs have left, and removes their files."""
    for file in sorted(notes_folder().glob("*.json")):
        notes = _read(file)
        if notes is None or runs_on(notes):
            continue
        left = processes_of(notes)
        if left:
            names = ", ".join(f"{_name(each)} {each.pid}" for each in left)
            logger.warning("an earlier service was killed and has left processes, which are ended: %s", names)
        end(left)
        file.unlink(missing_ok=True)


def runs_on(notes: RunNotes) -> bool:
    """Returns whether another running service owns these processes; this one's number may have had a run before."""
    return notes.boot == boot_id() and notes.owner.pid != os.getpid() and _runs(notes.owner)


def processes_of(notes: RunNotes) -> list[psutil.Process]:
    """Returns the processes of a run that are still there, without this one and its ancestors.

    They are the noted ones, those with the mark, and all that either have started.
    """
    looked_up = psutil.process_iter(["environ", "ppid", "status"])  # None for what another user's process hides
    seen = {each.pid: each for each in looked_up if each.info["status"] not in ENDED}
    spared = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    found = {each.pid for each in notes.noted if notes.boot == boot_id() and _runs(each)}
    found |= {pid for pid, each in seen.items() if (each.info["environ"] or {}).get(MARK) == notes.run}
    found -= spared
    while children := {pid for pid, each in seen.items() if each.info["ppid"] in found} - found - spared:
        found |= children
    return [seen[pid] for pid in sorted(found & set(seen))]


def end(processes: Iterable[psutil.Process], *, grace_s: float = GRACE_S) -> None:
    """Ends processes by SIGTERM, and by SIGKILL after the grace period; without one there is no SIGTERM.

    Returns when they are gone. Descriptors make sure that a later process with the same number is spared.
    """
    with contextlib.ExitStack() as stack:
        left = {}
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(each.pid)
                stack.callback(os.close, descriptor)
                if each.is_running():  # looked at again, now that the descriptor holds the number
                    left[descriptor] = each.pid
        asked = ((signal.SIGTERM, grace_s),) if grace_s > 0 else ()
        for sent, patience_s in (*asked, (signal.SIGKILL, GONE_S)):
            for descriptor in left:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, sent)
            _await_ends(left, patience_s)
    for pid in left.values():
        logger.warning("process %d does not end", pid)


def identity_of(process: psutil.Process) -> Identity:
    """Returns what tells a process apart from others; raises psutil.NoSuchProcess."""
    return Identity(pid=process.pid, started_s=_started_s(process))


def boot_id() -> str:
    """Returns the name of this start of the machine."""
    return BOOT_ID.read_text(encoding="ascii").strip()


def notes_folder() -> Path:
    """Returns the folder with the files of this user's runs."""
    base = os.environ.get(STATE)
    return (Path(base) if base else Path.home() / ".local/state") / "offramp/runs"


def _await_ends(left: dict[int, int], patience_s: float) -> None:
    """Waits until processes have ended, and removes them from `left`, which has process ids by descriptor."""
    until_s = time.monotonic() + patience_s
    while left and (wait_s := until_s - time.monotonic()) > 0:
        for descriptor in wait(list(left), wait_s):  # readable once the process has ended
            del left[descriptor]  # type: ignore[arg-type] # descriptors are what was given


def _runs(identity: Identity) -> bool:
    """Returns whether a process has not ended; one that only its parent must reap has."""
    try:
        process = psutil.Process(identity.pid)
        return abs(_started_s(process) - identity.started_s) < SAME_S and process.status() not in ENDED
    except psutil.NoSuchProcess:
        return False


def _started_s(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()  # both move with the clock


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return "process"


def _read(file: Path) -> RunNotes | None:
    """Returns the notes in a file; None if another release wrote it, or if it was removed meanwhile."""
    try:
        return RunNotes.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        logger.warning("%s is not this release's, and is left alone; remove it if no other release runs here", file)
        return None


# Watching Ray's head

VITAL = ("gcs_server", "raylet")
"""Ray's processes that nothing restarts; Serve or Ray restarts all others."""
WATCH_S = 0.25
"""How often they are looked at, in seconds; a look takes some microseconds."""


@contextlib.contextmanager
def watched(processes: Mapping[str, Started], on_loss: Callable[[HeadLostError], None]) -> Iterator[None]:
    """Calls `on_loss`, from a thread, once one of the processes ends before the block."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            found = {name: (each.pid, each.poll()) for name, each in processes.items()}
            if any(status is not None for _, status in found.values()):
                on_loss(HeadLostError(loss_words(found)))
                return

    watching = threading.Thread(target=watch, name="head watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def loss_words(found: Mapping[str, tuple[int, int | None]]) -> str:
    """Describes the loss; `found`: process ids and, of ended processes, statuses as in `subprocess`."""
    ended = [f"{name} {pid} {_how(status)}" for name, (pid, status) in found.items() if status is not None]
    return f"Ray's head is gone ({', '.join(ended) or 'the cause is unknown'}); what was left of the service is ended"


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"
