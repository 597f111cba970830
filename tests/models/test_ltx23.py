"""LTX-2.3: video and sound are one policy."""

from __future__ import annotations

import pytest
import torch

from digenrl.extensions.methods.sde import FlowCPS
from tests.models.tiny_policies import make


@pytest.mark.heavy
def test_a_log_prob_is_the_mean_over_the_numbers_of_video_and_sound() -> None:
    """Each part's own log-prob, weighted with its number of tokens. Where only the
    video is drawn, the log-prob is the video's alone."""
    policy, sampler = make("ltx23"), torch.Generator().manual_seed(0)
    assert policy.drawn is None
    assert policy.drawn_shape == policy.latent_shape
    latents, velocity, noise = torch.randn(3, 2, *policy.latent_shape, generator=sampler)
    kernel, levels = FlowCPS(0.8), (torch.tensor([0.9, 0.9]), torch.tensor([0.7, 0.7]))
    video, tokens = policy.codec.video_tokens, policy.latent_shape[0]
    assert 0 < video < tokens

    def log_prob(part: slice, drawn: int | None = None) -> torch.Tensor:
        given = (tensor[:, part] for tensor in (latents, velocity))
        found = kernel.transition(*given, *levels, levels[0], noise=noise[:, part], drawn=drawn)
        assert found.log_prob is not None
        return found.log_prob

    every, parts = slice(None), (slice(0, video), slice(video, tokens))
    seen, heard = (log_prob(part) for part in parts)
    joint = log_prob(every, policy.drawn)
    torch.testing.assert_close(joint, (video * seen + (tokens - video) * heard) / tokens)
    assert not torch.allclose(joint, seen)
    torch.testing.assert_close(log_prob(every, video), seen)
