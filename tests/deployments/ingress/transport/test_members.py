from __future__ import annotations

from collections.abc import Mapping

from deployments.wire.directory import ReplicaDirectory, board_of
from deployments.wire.messages import Address

Heard = list[Mapping[str, Address]]

A = {"a": Address(host="10.0.0.1", port=1, word="word of a")}
B = {"b": Address(host="10.0.0.2", port=2, word="word of b")}


def test_a_follower_is_told_what_there_is_and_of_every_change() -> None:
    board, early, late = ReplicaDirectory(), Heard(), Heard()
    board.follow(early.append)
    board.announce(A)
    board.announce(A | B)
    board.follow(late.append)
    board.announce({})
    assert (early, late) == ([{}, A, A | B, {}], [A | B, {}])


def test_every_slot_has_one_board() -> None:
    board = board_of("split-cpu-0 of this test")
    board.announce(A)
    heard, others = Heard(), Heard()
    board_of("split-cpu-0 of this test").follow(heard.append)
    board_of("split-cpu-1 of this test").follow(others.append)
    assert (heard, others) == ([A], [{}])
