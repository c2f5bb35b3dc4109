from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from earlyexit.backends.captured import CapturedSegments, shape_of
from earlyexit.clock import MonotonicClock
from earlyexit.errors import InputError
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.store import load_network, open_network, save_model
from offramp.commands.jobs import ProfileJob
from offramp.commands.profile import noise_text, profile_figures, profile_model, splits_of
from profiles.latency import LatencyProfile
from profiles.measure import LiveSplits, time_splits
from tests.earlyexit.families.decoders import decoder, hf_decoder

QUICK = ProfileJob(batches=(1, 2), lengths=(4, 8), repeats=3)


def test_a_missing_gpu_is_reported(model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="device 'V100' needs CUDA, which torch does not find"):
        profile_model(model, ProfileJob(device="V100"))


def test_measuring_does_not_change_the_number_of_threads(model: Path) -> None:
    assert profile_model(model, ProfileJob(batches=(1,), repeats=1, threads=2))[0].lengths == (16,), "all it takes"
    assert torch.get_num_threads() == 1


def test_a_profile_is_measured_written_and_read_back(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    profile, points = profile_model(model, QUICK, progress=lambda *step: seen.append(step))
    # Three blocks, two ramps, the whole model; two batch sizes, two lengths.
    assert len(points) == (3 + 2 + 1) * 2 * 2
    assert (seen[0], seen[-1]) == (("warm-up", 1, 24), ("measure", 3, 3))
    profile.save(tmp_path / "profile.json")
    back = LatencyProfile.load(tmp_path / "profile.json")
    assert (back.model, back.num_blocks, back.ramps, back.kind) == ("m", 3, (0, 1), "measured")
    assert (back.device, back.backend, back.dtype, back.lengths) == ("cpu", "torch", "float32", (4, 8))
    for table in back.tables.values():
        assert (table.block_s_NB.shape, table.ramp_s_EB.shape) == ((3, 2), (2, 2))
        assert (table.block_s_NB > 0).all()
        assert (table.block_s_NB[:, 1] >= table.block_s_NB[:, 0]).all()
    facts = profile.provenance
    assert (facts["seed"], facts["repeats"], facts["threads"], facts["timings"]) == (0, 3, 1, 72)
    assert facts["outliers"] == sum(point.outliers for point in points)
    assert 0 <= facts["spread"] < 10
    assert facts["device_name"]
    assert facts["versions"]["torch"] == torch.__version__
    figures = profile_figures(profile)
    assert [(row["length"], row["batch"]) for row in figures["rows"]] == [(4, 1), (4, 2), (8, 1), (8, 2)]
    assert figures["rows"][0]["model_s"] == pytest.approx(profile.at(4).block_s_NB[:, 0].sum())
    assert json.loads(json.dumps(figures)) == figures


def test_only_one_of_the_inner_blocks_with_equal_structure_is_measured(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "max_length": 16}
    save_model(random_model({**sizes, "num_blocks": 5}, ramps=RampOptions(at=(0, 2, 3))), tmp_path)
    profile, points = profile_model(tmp_path, QUICK, one_of_each=True)
    # The first block, an inner one and the last; the ramp of the first and of an inner one; the whole model.
    measured = [(split.first, split.end, split.ramps) for split in dict.fromkeys(each.timed.split for each in points)]
    assert measured[:6] == [(0, 1, ()), (1, 2, ()), (4, 5, ()), (0, 1, (0,)), (2, 3, (2,)), (0, 5, ())]
    table = profile.at(4)
    assert table.block_s_NB[1].tolist() == table.block_s_NB[2].tolist() == table.block_s_NB[3].tolist()
    assert table.block_s_NB[0].tolist() != table.block_s_NB[1].tolist()
    assert table.ramp_s_EB[1].tolist() == table.ramp_s_EB[2].tolist()


def test_steps_and_prompts_of_a_decoder_are_measured(tmp_path: Path) -> None:
    save_model(decoder(hf_decoder()), tmp_path)
    profile, _ = profile_model(tmp_path, ProfileJob(batches=(1, 4), repeats=2, context=20))
    assert (profile.lengths, profile.provenance["context"]) == ((1, 16), 20)
    assert (profile.at(1).context, profile.at(16).context) == (20, None)
    assert profile.at(1).context_s >= 0
    profile.save(tmp_path / "profile.json")
    assert LatencyProfile.load(tmp_path / "profile.json").at(1).context_s == profile.at(1).context_s
    assert all((table.block_s_NB > 0).all() for table in profile.tables.values())


@pytest.mark.parametrize(
    ("spread", "text"),
    [
        pytest.param(0.05, "spread 5.0%, 3 outliers in 72 timings", id="quiet"),
        pytest.param(0.06, "spread 6.0%, 3 outliers in 72 timings\nwarning: a spread above 5%", id="noisy"),
    ],
)
def test_the_noise_of_the_machine_is_reported(spread: float, text: str) -> None:
    said = noise_text({"spread": spread, "outliers": 3, "timings": 72})
    assert said.startswith(text)
    assert ("warning" in said) == ("warning" in text)


@pytest.mark.gpu
def test_a_gpu_is_waited_for_and_named(model: Path) -> None:
    profile, _ = profile_model(model, ProfileJob(device="cuda", batches=(1, 64), lengths=(8,), repeats=3))
    assert profile.provenance["device_name"] == torch.cuda.get_device_name()
    assert profile.provenance["driver"]
    assert (profile.at(8).block_s_NB > 0).all()


@pytest.mark.gpu
def test_a_gpu_profile_measures_the_served_configuration(model: Path) -> None:
    job = ProfileJob(device="cuda", batches=(1, 4), lengths=(5, 8), repeats=3)
    network, rng = load_network(model, device="cuda"), np.random.default_rng(0)
    segments, splits = open_network("torch", network, model), splits_of(job, network)
    assert isinstance(segments, CapturedSegments)
    live = LiveSplits(network, rng, segments)
    live.make_ready(splits)
    time_splits(splits, live.prepare, clock=MonotonicClock(), rng=rng, repeats=3)
    shape = shape_of(np.full(4, 5, dtype=np.int32), network.max_length)
    assert {(timed.split.first, timed.split.end) for timed in splits} == {
        (segment.first, segment.end) for segment, held in segments.captured if held == shape
    }
