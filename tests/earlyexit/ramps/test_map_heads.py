"""Heads that give maps, of exactly the size that a task asks for, alone and behind bridges."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch.nn.functional import interpolate

from earlyexit.errors import ModelFolderError
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.ramps import build_ramp
from earlyexit.ramps.heads import DeconvRamp, MapsRamp
from earlyexit.tasks.segmentation import SegmentationTask
from tests.earlyexit.families.vision import small_layout

STYLES = ("maps", "deconv")
SIZES = [
    pytest.param((12, 16), (45, 60), id="180 x 240 at 16 to every fourth pixel"),
    pytest.param((6, 8), (45, 60), id="180 x 240 at 32 to every fourth pixel"),
    pytest.param((6, 8), (180, 240), id="180 x 240 at 32 to every pixel"),
    pytest.param((45, 60), (45, 60), id="as large as it is"),
    pytest.param((3, 3), (24, 24), id="a heatmap"),
    pytest.param((7, 5), (31, 17), id="sides of which one is no half of the other"),
    pytest.param((9, 9), (4, 5), id="smaller"),
]


@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize("style", STYLES)
@torch.inference_mode()
def test_maps_come_out_exactly_as_large_as_they_are_asked_for(
    style: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    head = build_ramp(style, (8, *before), (3, *after), "mean").eval()
    assert head.classify(torch.randn(2, 8, *before)).shape == (2, 3, *after)


@torch.inference_mode()
def test_upsampling_after_the_last_convolution_is_what_upsampling_before_it_gives() -> None:
    head = MapsRamp((8, 6, 8), (3, 45, 60), "mean").eval()
    maps = torch.randn(2, 8, 6, 8)
    inner = torch.relu(head.norm(head.convolution(maps)))
    expected = head.classifier(interpolate(inner, size=(45, 60), mode="bilinear", align_corners=False))
    torch.testing.assert_close(head.classify(maps), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_deconvolution_leaves_every_pixel_where_it_was() -> None:
    """Halves of 45 x 60 rounded up are 23 x 30 and 12 x 15; only the last row is left out, of what is doubled."""
    head = DeconvRamp((2, 12, 15), (1, 45, 60), "mean").eval()
    maps = torch.zeros(1, 2, 12, 15)
    without = head.classify(maps)
    for row, column in ((0, 0), (5, 7), (11, 14)):
        maps.zero_()
        maps[0, :, row, column] = 1
        rows, columns = (head.classify(maps) != without)[0, 0].nonzero(as_tuple=True)
        for found, place in ((rows, row), (columns, column)):
            assert (found >= 4 * place - 3).all(), "two doublings reach three pixels beyond the four that one becomes"
            assert (found <= 4 * place + 6).all()
            assert 4 * place in found


@pytest.mark.parametrize("style", STYLES)
@torch.inference_mode()
def test_an_input_has_the_maps_alone_that_it_has_among_others(style: str) -> None:
    head = build_ramp(style, (8, 6, 8), (3, 45, 60), "mean").eval()
    maps = torch.randn(7, 8, 6, 8)
    alone = torch.cat([head.classify(each[None]) for each in maps])
    torch.testing.assert_close(head.classify(maps), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("codec", "network", "message"),
    [
        ((24, 24), (24, 32), "answers in images of 32 x 24 pixels, width by height; the codec's are 24 x 24"),
        ((24, 32), (32, 32), "answers in images of 32 x 24 pixels, width by height; the network's are 32 x 32"),
    ],
    ids=["codec", "network"],
)
def test_maps_of_another_size_than_the_images_are_refused(
    codec: tuple[int, int], network: tuple[int, int], message: str
) -> None:
    with pytest.raises(ModelFolderError, match=message):
        random_model(
            asdict(small_layout(*network, narrowest=4)),
            family="resnet",
            codec={"name": "image", "height": codec[0], "width": codec[1]},
            task=SegmentationTask(("road", "sky"), height=24, width=32),
            ramps=RampOptions(style="maps"),
        )
