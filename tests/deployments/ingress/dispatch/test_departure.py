"""Callers' inputs, as they travel."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.ingress.core.inputs import Flight
from deployments.ingress.crossing import LiveFlight, Query, departure, sample_id_of, serial_and_attempt
from earlyexit.network.wire import Encoded


def flight(key: str, *tokens: int, serial: int = 1, attempt: int = 0) -> LiveFlight:
    encoded = Encoded(len(tokens), (np.array(tokens, dtype=np.int32),))
    made = Flight(Query(key=key, encoded=encoded, serial=serial, request_id="", settle=lambda *_: None), 0, 1, 0)
    made.attempt = attempt
    return made


def test_a_departure_is_a_packed_piece_before_block_0() -> None:
    piece = departure("i", [flight("a", 5, 6, 7), flight("b", 8, serial=2)])
    assert (piece.sample_ids, piece.next_block, piece.state_BS) == (("a#i.1.0", "b#i.2.0"), 0, None)
    assert piece.lengths_B.tolist() == [3, 1]
    [token_ids] = piece.tensors
    assert (token_ids.tolist(), token_ids.dtype) == ([5, 6, 7, 8], np.dtype(np.int32))


def test_ingresses_and_attempts_never_share_a_sample_id_though_callers_share_a_key() -> None:
    flights = [flight("a", serial=serial, attempt=attempt) for serial in (1, 2) for attempt in (0, 1)]
    assert len({sample_id_of(ingress, each) for ingress in ("one", "two") for each in flights}) == 8


@pytest.mark.parametrize("key", ["", "a", "x#1.2", "a.b"])
def test_a_sample_id_tells_serial_and_attempt_whatever_the_callers_id_holds(key: str) -> None:
    assert serial_and_attempt(sample_id_of("i", flight(key, serial=2, attempt=1))) == (2, 1)
