import gc
import weakref
from collections.abc import Iterator

import pytest

from deployments.process_setup import settle


class Ring:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_is_looked_at_no_more_and_what_comes_later_is() -> None:
    early: list[object] = []
    settle()
    late: list[object] = [early]
    looked_at = {id(each) for each in gc.get_objects()}
    assert id(early) not in looked_at
    assert id(late) in looked_at


def test_what_cannot_be_reached_is_not_kept_for_ever() -> None:
    lost = weakref.ref(Ring())
    settle()
    assert lost() is None
