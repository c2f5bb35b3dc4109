from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import served_streams
from experiments.apparate import images, recording, texts
from optimizer.live.exit_times import ExitTimes
from optimizer.live.ramp_mover import spread_out

POOLS = texts.Pools(
    reviews=tuple(f"review {k}" for k in range(1000)),
    phrases=tuple(f"phrase {k}" for k in range(1000)),
    news={str(k): tuple(f"news {k} {n}" for n in range(200)) for k in range(1, 5)},
)


def shares(sentences: list[str]) -> dict[str, float]:
    kinds = [sentence.split()[0] for sentence in sentences]
    return {kind: kinds.count(kind) / len(kinds) for kind in ("phrase", "review", "news")}


@pytest.mark.parametrize("name", texts.STREAMS)
def test_a_text_stream_has_as_many_sentences_as_asked_for_and_is_the_same_twice(name: str) -> None:
    one, other = (texts.STREAMS[name](POOLS, 600, np.random.default_rng(0)) for _ in range(2))
    assert one == other
    assert len(one) == 600


def test_reviews_come_sentence_by_sentence_without_shreds() -> None:
    review = "It was bad. Very bad! <br /><br />No.Really, it was not what I had hoped for"
    assert list(texts.sentences_of(review)) == ["It was bad.", "No.Really, it was not what I had hoped for"]


def test_categories_come_one_after_the_other() -> None:
    stream = texts.by_category(POOLS, 1000, np.random.default_rng(0))
    assert shares(stream[:100]) == {"phrase": 1, "review": 0, "news": 0}
    assert shares(stream[100:200]) == {"phrase": 0, "review": 1, "news": 0}
    assert {sentence.split()[1] for sentence in stream[200:300]} == {"1"}
    assert len(set(stream)) == 1000, "no sentence comes twice"


def test_phrases_give_way_to_reviews_and_news() -> None:
    stream = texts.gradually(POOLS, 2000, np.random.default_rng(0))
    assert shares(stream[:200])["phrase"] > 0.9
    assert shares(stream[-200:]) == pytest.approx({"phrase": 0.05, "review": 0.47, "news": 0.47}, abs=0.12)


def test_mixes_return() -> None:
    stream = texts.returning(POOLS, 1200, np.random.default_rng(0))
    assert shares(stream[:100])["phrase"] == 1
    assert shares(stream[100:200])["review"] == 1
    assert 0.2 < shares(stream[200:300])["news"] < 0.6
    assert shares(stream[300:400])["phrase"] == 1


def test_a_frame_becomes_tiles_row_by_row() -> None:
    pixels = np.zeros((64, 96, 3), dtype=np.uint8)
    pixels[32:, 64:] = 200
    found = images.tiles(Image.fromarray(pixels), 2, 3)
    assert found.shape == (6, 32, 32, 3)
    assert found.reshape(6, -1).mean(1).tolist() == [0, 0, 0, 0, 0, 200]


def test_corruptions_change_an_image_by_their_strength() -> None:
    image = np.full((32, 32, 3), 100, dtype=np.uint8)
    image[:, 16:] = 200
    assert images.darker(image, 0.0).tolist() == image.tolist()
    assert images.darker(image, 0.5).max() == 110
    assert images.blurred(image, 1.0)[0, 15, 0] > 100
    noise = images.noisy(image, 1.0, np.random.default_rng(0)).astype(float) - image
    assert noise.std() == pytest.approx(30, rel=0.1)


def test_a_stream_begins_by_day_and_has_three_nights() -> None:
    darkness = np.array([images.night(place) for place in np.linspace(0, 1, 601)])
    assert darkness[:60].max() == 0
    # Every night, a point of the stream is darker than those around it.
    darkest = (darkness[1:-1] > darkness[:-2]) & (darkness[1:-1] >= darkness[2:])
    assert np.flatnonzero(darkest).tolist() == [149, 329, 509]


def test_images_of_the_beginning_do_not_come_again() -> None:
    every = np.arange(100, dtype=np.uint8)[:, None, None, None]
    stream = images.twice(every, np.random.default_rng(0), 0.1).ravel()
    first = round(len(stream) * 0.1)
    assert not set(stream[:first]) & set(stream[first:])
    assert sorted(set(stream)) == list(range(100))


def test_the_first_tenth_of_a_stream_is_for_ramps_and_thresholds() -> None:
    stream = served_streams.stream("weather")
    assert (len(stream.records), len(stream.initial), len(stream.served)) == (1800, 90, 1620)
    assert stream.initial.sample_ids[0] == "90", "the first half is what ramps learn from"
    assert stream.served.sample_ids[0] == "180"


def test_made_up_inputs_become_harder_and_easier() -> None:
    losses = served_streams.stream("weather").records.losses_NR
    assert (
        losses[: served_streams.MADE_UP_PERIOD].mean()
        < 0.7 * losses[served_streams.MADE_UP_PERIOD : 2 * served_streams.MADE_UP_PERIOD].mean()
    )
    times = ExitTimes.of(served_streams.table(), served_streams.RAMPS, 1)
    assert spread_out(times, 0.02) == (1, 3)


def test_every_stream_is_of_a_kind() -> None:
    assert len(recording.KINDS) == 8
    assert list(recording.KINDS.values()).count("text") == 4


def test_kept_records_are_read_and_nothing_is_made(tmp_path: Path) -> None:
    folder = tmp_path
    served_streams.stream("cars").records.save(folder / "cars.npz")
    (stream,) = recording.streams(["cars"], folder=folder)
    assert stream.kind == "vision"
    assert len(stream.records) == served_streams.NUM_INPUTS
