"""MiniMax-H3: its sound has noise levels of its own."""

from __future__ import annotations

import diffusers
import pytest
import torch

from digenrl import config as configuration
from digenrl.diffusion.sde import ode_step
from digenrl.extensions.methods.noised import NoisedCells
from tests.models.tiny_policies import make

pytestmark = pytest.mark.heavy
SMALL = {"frames": 22}


def test_a_step_takes_video_and_sound_from_level_to_level() -> None:
    """Along a velocity of ones, each goes as far as its own grid of diffusers' scheduler says."""
    policy = make("minimax_h3", **SMALL)
    grid, plain = policy.sigma_grid(5), diffusers.MiniMaxH3Scheduler(shift=3.0)
    plain.set_timesteps(6)
    assert policy.drawn is not None
    for step in range(5):
        now, following = grid[step].expand(2), grid[step + 1].expand(2)
        velocity = torch.ones(2, *policy.latent_shape)
        moved = ode_step(
            torch.zeros_like(velocity), policy.paced(velocity, now, following), now, following
        )
        video, sound = moved.tensor_split([policy.drawn], dim=1)
        torch.testing.assert_close(video, (grid[step + 1] - grid[step]).expand(video.shape))
        wanted = plain.sigmas[step + 1] - plain.sigmas[step]
        torch.testing.assert_close(sound, wanted.expand(sound.shape))


def test_methods_that_noise_clean_samples_refuse_it() -> None:
    policy = make("minimax_h3", **SMALL)
    noise = torch.zeros(1, 1, *policy.latent_shape)
    cells = NoisedCells(noise, noise, torch.tensor([0.5]), {})
    with pytest.raises(ValueError, match=r"minimax_h3: .*noise levels of its own.*flow_grpo"):
        cells.predict_velocity(policy)


def test_a_solver_that_would_count_the_sound_on_the_videos_levels_is_refused() -> None:
    words = ["hardware=cpu_tiny", "sampling.eval.solver=dpm2"]
    with pytest.raises(
        configuration.ConfigError, match=r"solver = dpm2: .*sound.*set sampling\.eval\.solver=euler"
    ):
        configuration.load(["experiment=minimax_h3_flowgrpo", *words])
    configuration.load(["experiment=wan21_flowgrpo", *words])
