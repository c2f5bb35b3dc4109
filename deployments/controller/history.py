"""What the controller remembers, in one SQLite file: probes, counts, plans, events, and where it stands."""

from __future__ import annotations

import io
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict, TypeVar
from zipfile import BadZipFile

import numpy as np

from deployments.controller.intake import Interval
from earlyexit.errors import DataError
from optimizer.live.blame import Blame, Blamed
from optimizer.live.stragglers import Rest, Resting
from optimizer.live.trial import Delivered, Trial
from optimizer.placement import PlacedPlan, parse_placed, placed_document
from optimizer.plan import Plan, PolicySpec, chains_of
from optimizer.plan_file import parse_plan, plan_document
from optimizer.problem_file import parse_problem, problem_document
from profiles.stream import Observations, StreamShape, of_any_schema

SCHEMA = 1
KEEP_S = 7200.0
"""Of probes, counts and events: as long as the live stream of exit records keeps its windows."""
MOST_PLANS = 1000
BUSY_S = 5.0
"""How long a controller that was just replaced may still hold the file."""
BY_NUMBER = ("exits", "latencies", "crossings", "crossing_s", "words", "pruned_words")
"""Fields of an `Interval` with whole numbers for keys; the later ones are missing in what older versions wrote."""
TABLES = """
CREATE TABLE IF NOT EXISTS file (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS probes (at_s REAL NOT NULL, shape TEXT NOT NULL, columns BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS probes_by_time ON probes (at_s);
CREATE TABLE IF NOT EXISTS counts (at_s REAL NOT NULL, interval TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS counts_by_time ON counts (at_s);
CREATE TABLE IF NOT EXISTS plans (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, at_s REAL NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    words TEXT NOT NULL, placed TEXT NOT NULL, gained TEXT
);
CREATE TABLE IF NOT EXISTS events (at_s REAL NOT NULL, kind TEXT NOT NULL, words TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS standing (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A plan that was in force, or proposed and not taken."""

    epoch: int
    at_s: float
    outcome: str
    """`in force` or `proposed`."""
    reason: str
    """Why one was looked for: `period`, `asked`, ..."""
    words: str
    """The verdict."""
    placed: Mapping[str, Any]
    """As `optimizer.placement.placed_document` has it; its plan holds what was predicted."""
    gained: Mapping[str, Any] | None = None
    """What was measured while it was in force; None until it was replaced."""


class History:
    """One application's; nothing is on disk before `commit`, and what was committed survives a killed process.

    (A machine that loses power may lose the last commits: write-ahead logging without a sync per commit.)
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path, app: str) -> History:
        """Open the file, or make it. Raises DataError for another version's, another application's, and no database."""
        try:
            # Serve may build a replica in another thread than it runs it in; it never uses two at a time.
            connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
            _prepare(connection, path, app)
        except sqlite3.Error as error:
            raise DataError(f"{path} cannot be used as the controller's memory: {error}") from error
        return cls(connection)

    @staticmethod
    def check(path: Path, app: str) -> None:
        """Raise what `open` would, and leave the file as it is."""
        if not path.parent.is_dir():
            raise DataError(f"{path} cannot be the controller's memory: there is no folder {path.parent}")
        if not path.exists():
            return
        try:
            address = f"{path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, timeout=BUSY_S, uri=True)) as connection:
                _check_owner(connection, path, app)
        except sqlite3.Error as error:
            raise DataError(f"{path} cannot be used as the controller's memory: {error}") from error

    def commit(self) -> None:
        """Put everything since the last commit on disk."""
        self._connection.commit()

    def close(self) -> None:
        """Leave out what was not committed."""
        self._connection.close()

    def add_probes(self, at_s: float, probes: Observations) -> None:
        """Keep what one collection brought."""
        shape = json.dumps(asdict(probes.shape))
        packed = io.BytesIO()
        there: dict[str, Any] = {name: array for name, array in probes.arrays().items() if array is not None}
        np.savez_compressed(packed, **there)
        self._connection.execute("INSERT INTO probes VALUES (?, ?, ?)", (at_s, shape, packed.getvalue()))

    def probes(self) -> Iterator[Observations]:
        """All that are kept, oldest collection first, one at a time; raises DataError for a row that cannot be read."""
        rows = self._connection.execute("SELECT shape, columns FROM probes ORDER BY at_s, rowid")
        return (_unpacked(shape, columns) for shape, columns in rows)

    def add_counts(self, interval: Interval) -> None:
        """Keep what one collection counted."""
        fields = {name: getattr(interval, name) for name in Interval.__slots__}
        self._connection.execute("INSERT INTO counts VALUES (?, ?)", (interval.at_s, json.dumps(fields)))

    def counts(self, since_s: float) -> list[Interval]:
        """Those that ended after a time, oldest first."""
        rows = self._connection.execute("SELECT interval FROM counts WHERE at_s > ? ORDER BY at_s, rowid", (since_s,))
        return [_interval(json.loads(text)) for (text,) in rows]

    def add_plan(self, row: PlanRow) -> None:
        """Keep a plan."""
        self._connection.execute(
            "INSERT INTO plans (epoch, at_s, outcome, reason, words, placed) VALUES (?, ?, ?, ?, ?, ?)",
            (row.epoch, row.at_s, row.outcome, row.reason, row.words, json.dumps(row.placed)),
        )

    def gained(self, epoch: int, measured: Mapping[str, Any]) -> None:
        """Say what the plan of an epoch gave while it was in force."""
        self._connection.execute(
            "UPDATE plans SET gained = ? WHERE id = "
            "(SELECT max(id) FROM plans WHERE epoch = ? AND outcome = 'in force')",  # other settings begin at 0 again
            (json.dumps(measured), epoch),
        )

    def plans(self, limit: int) -> list[PlanRow]:
        """The last ones, newest first."""
        rows = self._connection.execute(
            "SELECT epoch, at_s, outcome, reason, words, placed, gained FROM plans ORDER BY id DESC LIMIT ?", (limit,)
        )
        return [
            PlanRow(
                epoch=epoch,
                at_s=at_s,
                outcome=outcome,
                reason=reason,
                words=words,
                placed=json.loads(placed),
                gained=None if gained is None else json.loads(gained),
            )
            for epoch, at_s, outcome, reason, words, placed, gained in rows
        ]

    def add_event(self, at_s: float, kind: str, words: str) -> None:
        """Keep what happened."""
        self._connection.execute("INSERT INTO events VALUES (?, ?, ?)", (at_s, kind, words))

    def events(self, limit: int) -> list[dict[str, Any]]:
        """The last ones, newest first."""
        rows = self._connection.execute(
            "SELECT at_s, kind, words FROM events ORDER BY at_s DESC, rowid DESC LIMIT ?", (limit,)
        )
        return [{"at_s": at_s, "kind": kind, "words": words} for at_s, kind, words in rows]

    def put(self, key: str, value: Any) -> None:
        """Remember where the controller stands; `value` is plain data."""
        self._connection.execute("INSERT OR REPLACE INTO standing VALUES (?, ?)", (key, json.dumps(value)))

    def get(self, key: str) -> Any:
        """What was put last; None for nothing."""
        row = self._connection.execute("SELECT value FROM standing WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def forget(self, now_s: float) -> None:
        """Drop what is too old to matter."""
        for table in ("probes", "counts", "events"):
            self._connection.execute(f"DELETE FROM {table} WHERE at_s < ?", (now_s - KEEP_S,))
        self._connection.execute("DELETE FROM plans WHERE id <= (SELECT max(id) FROM plans) - ?", (MOST_PLANS,))


def _prepare(connection: sqlite3.Connection, path: Path, app: str) -> None:
    """Look whose file it is before anything is written to it."""
    _check_owner(connection, path, app)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(TABLES)
    for key, value in (("schema_version", str(SCHEMA)), ("app", app)):
        connection.execute("INSERT OR IGNORE INTO file VALUES (?, ?)", (key, value))
    connection.commit()


def _check_owner(connection: sqlite3.Connection, path: Path, app: str) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return
    if "file" not in tables:
        raise DataError(f"{path} is a database of something else, not a controller's memory")
    found = dict(connection.execute("SELECT key, value FROM file").fetchall())
    if found.get("schema_version") != str(SCHEMA):
        raise DataError(
            f"{path} has schema {found.get('schema_version')}, this version reads {SCHEMA}; "
            "move the file away to begin anew"
        )
    if found.get("app") != app:
        raise DataError(f"{path} belongs to application {found.get('app')!r}, not {app!r}; give each a file of its own")


def _unpacked(shape: str, columns: bytes) -> Observations:
    document = json.loads(shape)
    try:
        with np.load(io.BytesIO(columns), allow_pickle=False) as arrays:
            kept = of_any_schema(dict(arrays))
    except (OSError, ValueError, KeyError, EOFError, zlib.error, BadZipFile) as error:
        raise DataError(f"the controller's memory holds probes that cannot be read: {error}") from error
    try:
        return Observations(shape=StreamShape(**(document | {"ramps": tuple(document["ramps"])})), **kept)
    except TypeError as error:
        raise DataError(f"the controller's memory holds probes that cannot be read: {error}") from error


def _interval(fields: dict[str, Any]) -> Interval:
    """JSON has string keys only."""
    whole = {name: {int(key): count for key, count in fields[name].items()} for name in BY_NUMBER if name in fields}
    return Interval(**(fields | whole))


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The plan in force, and everything that decisions about the next one take into account."""

    placed: PlacedPlan
    """What shall be followed."""
    reason: str
    """Why it is in force."""
    at_s: float
    """When it was put in force."""
    followed: PlacedPlan | None = None
    """What all ingresses were last told to follow; None: not known."""
    followed_s: float = 0.0
    planned_s: float
    """When it was last planned; at first, when the controller began."""
    changed_s: float
    """When the stream last became another, as far as its exits go."""
    rate_changed_s: float
    sized_for_rps: float | None = None
    """The rate that the plan was made for; None: it gives the highest there is."""
    suspended: str | None = None
    """Why nothing is served."""
    hold: bool = False
    """Whether planning rests until it is asked for."""
    trial: Trial | None = None
    previous: PlacedPlan | None = None
    """What a plan on trial goes back to."""
    resting: Resting = field(default_factory=Resting)
    blamed: Blamed = field(default_factory=Blamed)
    thresholds: Mapping[int, float] | None = None
    """Of all ramps, where tuning has found others than the settings'; None: theirs."""


class StandingChanges(TypedDict, total=False):
    """Fields of a `Standing` that become others."""

    placed: PlacedPlan
    reason: str
    at_s: float
    followed: PlacedPlan | None
    followed_s: float
    planned_s: float
    changed_s: float
    rate_changed_s: float
    sized_for_rps: float | None
    suspended: str | None
    hold: bool
    trial: Trial | None
    previous: PlacedPlan | None
    resting: Resting
    blamed: Blamed
    thresholds: Mapping[int, float] | None


PLANS = ("placed", "followed", "previous")
PLAIN = tuple(
    each.name for each in fields(Standing) if each.name not in {*PLANS, "trial", "resting", "blamed", "thresholds"}
)


def standing_document(standing: Standing) -> dict[str, Any]:
    """Plain data that `parse_standing` reads back."""
    return {
        **{name: getattr(standing, name) for name in PLAIN},
        **{name: _unless_none(placed_document, getattr(standing, name)) for name in PLANS},
        "trial": _unless_none(asdict, standing.trial),
        "resting": [asdict(rest) for rest in standing.resting.rests],
        "blamed": [_blame_document(blame) for blame in standing.blamed.blames],
        "thresholds": _unless_none(dict, standing.thresholds),
    }


def parse_standing(document: Mapping[str, Any]) -> Standing:
    """Read what `standing_document` wrote; raises PlanError for plans that this version refuses."""
    plans: dict[str, Any] = {name: _unless_none(parse_placed, document[name]) for name in PLANS}
    return Standing(
        **{name: document[name] for name in PLAIN},
        **plans,
        trial=_unless_none(_parse_trial, document["trial"]),
        resting=Resting(tuple(Rest(**rest) for rest in document["resting"])),
        blamed=Blamed(tuple(_parse_blame(blame) for blame in document["blamed"])),
        thresholds=_unless_none(_parse_thresholds, document.get("thresholds")),
    )


def _unless_none(change: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else change(value)


def _parse_trial(document: Mapping[str, Any]) -> Trial:
    return Trial(**{**document, "before": _unless_none(lambda before: Delivered(**before), document["before"])})


def _parse_thresholds(document: Mapping[str, float]) -> dict[int, float]:
    """JSON has string keys only."""
    return {int(ramp): threshold for ramp, threshold in document.items()}


def _blame_document(blame: Blame) -> dict[str, Any]:
    """The stages as a plan, whose policy and shares do not matter."""
    policy = PolicySpec(name="patience", patience=1)
    num_chains = len(chains_of(blame.stages, blame.problem.num_blocks))
    shares = (1 / num_chains,) * num_chains
    plan = Plan(stages=blame.stages, shares=shares, policy=policy, networks=blame.problem.networks)
    return {"stages": plan_document(plan), "problem": problem_document(blame.problem), "until": blame.until}


def _parse_blame(document: Mapping[str, Any]) -> Blame:
    stages, problem = parse_plan(document["stages"]).stages, parse_problem(document["problem"]).problem
    return Blame(stages=stages, problem=problem, until=document["until"])
