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


def looks(media):
    return alarms.looks_of(media.mul(255).round().byte())


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
    sharp, soft = looks(PICTURES), looks(smooth(NOISE, 6))
    assert alarms.blur_alarm(sharp, looks(PICTURES.flip(0))) is None
    assert alarms.blur_alarm(sharp, soft).name == "blur"
    assert alarms.blur_alarm(soft, sharp) is None
    assert alarms.blur_alarm(looks(PICTURES[:, None].expand(6, 3, 3, 64, 64)), soft) is not None


@pytest.mark.parametrize("period", [2, 4, 8])
def test_a_faint_grid_is_seen_and_pictures_or_noise_are_not(period):
    wave = 0.04 * torch.cos(2 * math.pi * torch.arange(64) / period)
    gridded = (PICTURES + wave).clamp(0, 1)
    before = looks(PICTURES)
    assert alarms.grid_alarm(before, looks(gridded)).name == "grid"
    assert alarms.grid_alarm(before, looks(PICTURES.flip(0))) is None
    assert alarms.grid_alarm(before, looks(NOISE)) is None
    assert alarms.grid_alarm(looks(gridded), looks(gridded)) is None
    assert alarms.grid_strength(torch.full((2, 3, 8, 8), 0.5)).tolist() == [1, 1]
    assert alarms.grid_alarm(before, looks(torch.full_like(PICTURES, 0.5))) is None


def test_two_evaluations_are_searched_for_everything_that_they_can_show():
    prompts = ["a", "a", "b", "b", "b", "b"]
    varied, flat = torch.rand(6, generator=GENERATOR).numpy(), torch.full((6,), 0.5).numpy()
    assert alarms.of_evaluations(looks(PICTURES), looks(PICTURES), {"r": varied}, prompts) == []
    found = alarms.of_evaluations(
        looks(PICTURES), looks(smooth(NOISE, 6)), {"r": varied, "flat": flat}, prompts
    )
    assert [alarm.name for alarm in found] == ["blur", "variance_collapse"]
    assert "`flat`" in found[1].message
    wave = 0.05 * torch.cos(torch.pi * torch.arange(64) / 2)
    found = alarms.of_evaluations(
        looks(PICTURES), looks((PICTURES + wave).clamp(0, 1)), {}, prompts
    )
    assert [alarm.name for alarm in found] == ["grid"]


def test_videos_are_measured_a_few_at_a_time_with_the_same_result(monkeypatch):
    """In fp32 all at once, an evaluation of 128 videos took 50 GB of trainer 0's host, twice."""
    media = torch.randint(0, 256, (6, 3, 3, 32, 32), dtype=torch.uint8, generator=GENERATOR)
    together, sizes = alarms.looks_of(media), []
    strength = alarms.grid_strength
    monkeypatch.setattr(alarms, "_AT_ONCE_BYTES", 2 * 4 * media[0].numel())
    monkeypatch.setattr(
        alarms, "grid_strength", lambda part: sizes.append(len(part)) or strength(part)
    )
    found = alarms.looks_of(media)
    assert sizes == [2, 2, 2]
    assert torch.equal(found.detail, together.detail)
    assert torch.equal(found.grid, together.grid)
