"""A service's processes on this machine: seen, noted in a file, and ended by number, one by one. Linux."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.local_ray.private import variable

MARK = "OFFRAMP_RUN"
"""The environment variable by which a run's processes, and theirs, tell whose they are."""


class Identity(BaseModel):
    """A process, told apart from a later one with its number."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: int
    """Ticks of the system's clock between the machine's start and the process's."""


class RunNotes(BaseModel):
    """What is in a run's file, for the next start to read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    boot: str
    """The system's name of the time between two starts of the machine: processes of another have ended."""
    run: str
    """The value of `MARK` in the run's processes."""
    owner: Identity
    """The `offramp serve` itself."""
    noted: tuple[Identity, ...] = ()
    """Those whose environment cannot be read are known by their number and start only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProcess:
    """A process that runs."""

    identity: Identity
    parent: int
    name: str
    run: str | None = None
    """The mark in its environment; None if there is none, if another user owns it, or if its title overwrote it."""


Seen = Mapping[int, SeenProcess]
"""Everything that runs on this machine now, by process id."""


def runs_on(notes: RunNotes, boot: str, seen: Seen, *, me: Identity) -> bool:
    """Whether another running service looks after these processes; our own number may have had a run before."""
    return notes.boot == boot and notes.owner != me and _is_there(notes.owner, seen)


def processes_of(notes: RunNotes, boot: str, seen: Seen, *, me: Identity) -> tuple[SeenProcess, ...]:
    """Processes of a run that are still there, by number; never `me`, nor its ancestors.

    Its own are those that were noted, those with its mark, and what either has started.
    """
    if notes.boot != boot:
        return ()
    noted = {each.pid for each in notes.noted if _is_there(each, seen)}
    marked = {pid for pid, each in seen.items() if each.run == notes.run}
    spared = {me.pid, *_ancestors(me.pid, seen)}
    ours = _with_descendants((noted | marked) - spared, seen) - spared
    return tuple(seen[pid] for pid in sorted(ours))


def described(processes: Iterable[SeenProcess]) -> str:
    """For a line of a log: `haproxy 17, raylet 12`."""
    return ", ".join(f"{each.name} {each.identity.pid}" for each in processes)


def _is_there(wanted: Identity, seen: Seen) -> bool:
    found = seen.get(wanted.pid)
    return found is not None and found.identity == wanted


def _ancestors(pid: int, seen: Seen) -> set[int]:
    found: set[int] = set()
    while (process := seen.get(pid)) is not None and process.parent not in found:
        pid = process.parent
        found.add(pid)
    return found


def _with_descendants(first: set[int], seen: Seen) -> set[int]:
    found, grown = set(first), True
    while grown:
        children = {pid for pid, each in seen.items() if each.parent in found and pid not in found}
        found |= children
        grown = bool(children)
    return found


STATE = "XDG_STATE_HOME"
GRACE_S = 2.0
"""Grace period between SIGTERM and SIGKILL, in seconds. Ray's own processes need less."""
GONE_S = 10.0
"""After that a process is the system's to end."""
PROC = Path("/proc")

logger = logging.getLogger(__name__)


class NotedRun:
    """One run of a service: its mark, and the file that the next start finds if this one cannot end cleanly."""

    def __init__(self, folder: Path, boot: str, me: Identity) -> None:
        self._boot = boot
        self._notes = RunNotes(boot=boot, run=uuid.uuid4().hex, owner=me)
        self._file = folder / f"{self._notes.run}.json"
        self._can_write = True

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """What is started inside belongs to the run, and whatever that starts later; it is noted when it is there."""
        self._write()
        with variable(MARK, self._notes.run):
            yield
        self._notes = self._notes.model_copy(update={"noted": tuple(each.identity for each in self.processes())})
        self._write()

    def end(self, *, grace_s: float = GRACE_S) -> None:
        """End whatever of the run is still there, and forget it."""
        end(self.processes(), grace_s=grace_s)
        if self._can_write:
            self._file.unlink(missing_ok=True)

    def processes(self) -> tuple[SeenProcess, ...]:
        """Those that are still there."""
        return processes_of(self._notes, self._boot, look(), me=self._notes.owner)

    def _write(self) -> None:
        """A missing state folder does not stop the service."""
        if not self._can_write:
            return
        beside = self._file.with_suffix(".new")
        try:
            beside.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(self._notes.model_dump_json(), encoding="utf-8")
            beside.replace(self._file)  # whole, whenever this process is killed
        except OSError as error:
            self._can_write = False
            logger.warning("if this process is killed, the next start will not know what it left: %s", error)


def noted_run() -> NotedRun:
    """Of this process."""
    return NotedRun(notes_folder(), boot_id(), identity_of(os.getpid()))


def clear_left() -> None:
    """End processes that killed runs left behind; returns which, and forgets them."""
    boot, me = boot_id(), identity_of(os.getpid())
    files = sorted(notes_folder().glob("*.json"))
    seen = look() if files else {}
    for file in files:
        notes = _read(file)
        if notes is None or runs_on(notes, boot, seen, me=me):
            continue
        left = processes_of(notes, boot, seen, me=me)
        if left:
            logger.warning("an earlier service was killed and has left processes, which are ended: %s", described(left))
        end(left)
        file.unlink(missing_ok=True)


def end(processes: Iterable[SeenProcess], *, grace_s: float = GRACE_S) -> None:
    """Ask them to end, then have them ended, and wait until they are gone; a later process of a number is spared.

    Without any grace no SIGTERM is sent.
    """
    asked = ((signal.SIGTERM, grace_s),) if grace_s > 0 else ()
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(handle) for each in processes if (handle := _handle(each.identity)) is not None]
        for sent, patience_s in (*asked, (signal.SIGKILL, GONE_S)):
            for handle in handles:
                handle.send(sent)
            handles = _still_there(handles, patience_s)
    for handle in handles:
        logger.warning("process %d does not end", handle.pid)


def look() -> Seen:
    """Everything that runs, as far as this user may see."""
    found = (_seen(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return {each.identity.pid: each for each in found if each is not None}


def identity_of(pid: int) -> Identity:
    """Raises OSError for one that is not there."""
    return Identity(pid=pid, started=int(_fields(pid)[19]))


def boot_id() -> str:
    """Another after every start of the machine."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def notes_folder() -> Path:
    """Of this user."""
    base = os.environ.get(STATE)
    return (Path(base) if base else Path.home() / ".local/state") / "offramp/runs"


class _Handle:
    """A process that the system does not mistake for a later one of its number."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.descriptor = descriptor

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def send(self, sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self.descriptor, sent)


def _handle(identity: Identity) -> _Handle | None:
    """None where the process has ended since it was seen."""
    try:
        handle = _Handle(identity.pid, os.pidfd_open(identity.pid))
    except ProcessLookupError:
        return None
    if _is(identity):  # looked at again, now that the descriptor holds its number
        return handle
    os.close(handle.descriptor)
    return None


def _is(identity: Identity) -> bool:
    try:
        return identity_of(identity.pid) == identity
    except OSError:
        return False


def _still_there(handles: list[_Handle], patience_s: float) -> list[_Handle]:
    """Those that have not ended after so long."""
    left = {each.descriptor: each for each in handles}
    until_s = time.monotonic() + patience_s
    poll = select.poll()
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)  # readable once the process has ended
    while left and (wait_s := until_s - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(wait_s * 1000):
            poll.unregister(descriptor)
            del left[descriptor]
    return list(left.values())


def _read(file: Path) -> RunNotes | None:
    """None for a file that another release wrote, or that went while it was read."""
    try:
        return RunNotes.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        logger.warning("%s holds no notes of a run, and is left alone: %s", file, error)
        return None


def _seen(pid: int) -> SeenProcess | None:
    """None for one that has ended, or is only waited for by its parent."""
    try:
        fields = _fields(pid)
        name = (PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return SeenProcess(
        identity=Identity(pid=pid, started=int(fields[19])), parent=int(fields[1]), name=name, run=_mark(pid)
    )


def _fields(pid: int) -> list[str]:
    """Of proc(5)'s `stat`, from the third on: the second, a name in brackets, may hold anything."""
    return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _mark(pid: int) -> str | None:
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:  # another user's, or it has ended
        return None
    _, found, after = b"\0".join([b"", environment]).partition(f"\0{MARK}=".encode())
    return after.partition(b"\0")[0].decode("ascii", errors="replace") if found else None
