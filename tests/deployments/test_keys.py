from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.keys import AccessSettings, parse_keys, read_keys
from earlyexit.errors import InputError

ALICE, BOB = "alice-0123456789", "Bob._~+/0123456="


def test_owners_have_the_names_of_their_keys_or_a_hash() -> None:
    keys = parse_keys(f"# these may ask\nalice:{ALICE}\n\n  bob:{BOB}  # since May\n", "keys")
    assert (len(keys), keys.owner(ALICE), keys.owner(BOB)) == (2, "alice", "bob")
    [owner] = parse_keys(ALICE, "keys").values()
    assert (len(owner), ALICE in owner) == (16, False)
    for token in ("", "alice", f"alice:{ALICE}", ALICE[:-1], ALICE + "0", ALICE.upper(), "é\ud800"):
        assert keys.owner(token) is None, "a part of a key"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys: no key; each line must be `name:key` or `key`"),
        ("# none\n", "keys: no key; each line must be `name:key` or `key`"),
        (f"{ALICE}\nsecret", "keys:2: a key must have at least 16 characters (got 6)"),
        ("secret secret secret", "keys:1: a key must consist of letters, digits and ._~+/-"),
        ("alice:", "keys:1: a key must consist of letters, digits and ._~+/-"),
        (f"a b:{ALICE}", "keys:1: the name before the colon must be 1 to 64 letters, digits and ._-"),
        (f":{ALICE}", "keys:1: the name before the colon must be 1 to 64 letters, digits and ._-"),
    ],
)
def test_a_malformed_line_is_reported_by_number_and_not_quoted(text: str, message: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse_keys(text, "keys")
    assert str(refusal.value) == message
    assert "secret" not in str(refusal.value)


def test_keys_come_from_a_file_that_other_users_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    access = AccessSettings(keys_file=str(path))
    with pytest.raises(InputError, match="keys: No such file or directory"):
        read_keys(access)
    path.write_text(f"alice:{ALICE}\n")
    path.chmod(0o640)
    assert [*(read_keys(access) or {}).values()] == ["alice"]
    path.write_bytes(b"alice:\xff")
    with pytest.raises(InputError, match="keys: not UTF-8 at byte 6"):
        read_keys(access)
    path.chmod(0o644)
    with pytest.raises(InputError, match=f"{path}: all users of this machine may read it; try: chmod 600 {path}"):
        read_keys(access)


def test_keys_come_from_a_variable_separated_by_commas_or_lines() -> None:
    assert read_keys(AccessSettings(rate_per_s=5.0)) is None
    keys = read_keys(AccessSettings(keys_env="KEYS"), {"KEYS": f"alice:{ALICE},bob:{BOB}\n"})
    assert keys is not None
    assert (keys.owner(ALICE), keys.owner(BOB)) == ("alice", "bob")
    with pytest.raises(InputError, match="the environment variable KEYS, which should hold API keys, is not set"):
        read_keys(AccessSettings(keys_env="KEYS"), {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keys_file": "a", "keys_env": "B"}, "keys_file and keys_env exclude each other"),
        ({"burst": 3.0}, "burst needs rate_per_s"),
        ({"cors_origins": ["example.org"]}, "'example.org' is not an origin such as https://example.org"),
        ({"cors_origins": ["https://example.org/"]}, "is not an origin such as"),
        ({"rate_per_s": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AccessSettings.model_validate(fields)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own settings, when it is imported
def test_labels_of_the_same_text_are_counted_separately() -> None:
    from deployments.metrics import LazyMetrics

    counted: Counter[tuple[str, ...]] = Counter()
    counter: Any = SimpleNamespace(inc=lambda value, labels: counted.update({tuple(labels.values()): int(value)}))
    metrics = LazyMetrics()
    metrics.instruments["offramp_answers"] = counter
    for small, large in ((5, 3), (6, 4)):
        metrics.set_total("offramp_answers", "Answers", small, exit="1", network="11m")
        metrics.set_total("offramp_answers", "Answers", large, exit="11", network="1m")
    assert counted == {("1", "11m"): 6, ("11", "1m"): 4}


def test_a_histogram_consists_of_a_counter_up_to_each_end() -> None:
    from deployments.metrics import LazyMetrics

    parts: dict[str, Counter[str]] = {name: Counter() for name in ("bucket", "count", "sum")}
    metrics = LazyMetrics()
    for name, counts in parts.items():
        part: Any = SimpleNamespace(inc=lambda value, labels, into=counts: into.update({labels.get("le", ""): value}))
        metrics.instruments[f"offramp_hop_seconds_{name}"] = part
    for values in ([0.5, 0.125, 4.0], [], [0.25]):
        metrics.observe("offramp_hop_seconds", "Hops", (0.25, 1.0), values, slot="cpu-0")
    assert parts == {"bucket": {"0.25": 2, "1": 3, "+Inf": 4}, "count": {"": 4}, "sum": {"": 4.875}}
