from __future__ import annotations

import math

import pytest
import torch

from digenrl.callbacks import picture_alarms as alarms

GENERATOR = torch.Generator().manual_seed(0)
NOISE = torch.rand(6, 3, 64, 64, generator=GENERATOR)


def smooth(media: torch.Tensor, size: int) -> torch.Tensor:
    small = torch.nn.functional.interpolate(media, (size, size), mode="area")
    return torch.nn.functional.interpolate(small, media.shape[-2:], mode="bicubic").clamp(0, 1)


PICTURES = smooth(NOISE, 24)


def test_constant_groups_are_a_collapse_and_varied_ones_are_not():
    varied = torch.rand(10, 8, generator=GENERATOR)
    assert alarms.variance_collapse("r", varied) is None
    constant = varied[:, :1].expand(10, 8).clone()
    constant[0, 0] = math.nan
    found = alarms.variance_collapse("r", constant)
    assert found.name == "variance_collapse"
    assert found.value == 1
    assert "`r`" in found.message
    constant[:3] = varied[:3]
    assert alarms.variance_collapse("r", constant) is None
    assert alarms.variance_collapse("r", torch.full((3, 4), math.nan)) is None


def test_groups_count_from_two_known_members_on():
    nan = math.nan
    pairs = torch.tensor([[0.5, 0.5, nan], [0.7, nan, 0.7]])
    assert alarms.variance_collapse("r", pairs).value == 1.0
    assert alarms.variance_collapse("r", torch.tensor([[0.5, nan], [nan, 0.7]])) is None


def test_blur_is_seen_and_equal_detail_is_not():
    assert alarms.blur(PICTURES, PICTURES.flip(0)) is None
    assert alarms.blur(PICTURES, smooth(NOISE, 6)).name == "blur"
    assert alarms.blur(smooth(NOISE, 6), PICTURES) is None
    assert alarms.blur(PICTURES[:, None].expand(6, 3, 3, 64, 64), smooth(NOISE, 6)) is not None


@pytest.mark.parametrize("period", [2, 4, 8])
def test_a_faint_grid_is_seen_and_pictures_or_noise_are_not(period):
    wave = 0.04 * torch.cos(2 * math.pi * torch.arange(64) / period)
    gridded = (PICTURES + wave).clamp(0, 1)
    assert alarms.grid(PICTURES, gridded).name == "grid"
    assert alarms.grid(PICTURES, PICTURES.flip(0)) is None
    assert alarms.grid(PICTURES, NOISE) is None
    assert alarms.grid(gridded, gridded) is None
    assert alarms.grid_strength(torch.full((2, 3, 8, 8), 0.5)).tolist() == [1, 1]
    assert alarms.grid(PICTURES, torch.full_like(PICTURES, 0.5)) is None


def test_two_evaluations_are_searched_for_everything_that_they_can_show():
    def stored(media):
        return media.mul(255).round().byte().numpy()

    prompts = ["a", "a", "b", "b", "b", "b"]
    varied, flat = torch.rand(6, generator=GENERATOR).numpy(), torch.full((6,), 0.5).numpy()
    assert alarms.of_evaluations(stored(PICTURES), stored(PICTURES), {"r": varied}, prompts) == []
    found = alarms.of_evaluations(
        stored(PICTURES), stored(smooth(NOISE, 6)), {"r": varied, "flat": flat}, prompts
    )
    assert [alarm.name for alarm in found] == ["blur", "variance_collapse"]
    assert "`flat`" in found[1].message
    wave = 0.05 * torch.cos(torch.pi * torch.arange(64) / 2)
    found = alarms.of_evaluations(
        stored(PICTURES), stored((PICTURES + wave).clamp(0, 1)), {}, prompts
    )
    assert [alarm.name for alarm in found] == ["grid"]
