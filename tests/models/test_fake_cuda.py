"""Every family at real size on a CUDA device that does not exist: mixed devices, wrong dtypes and wrong shapes show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.models.policy import NEGATIVE
from digenrl.models.tiny_builds import ensure
from digenrl.transport.weights import Version, adopt
from digenrl.types import CellBlock
from tests.models.real_policies import place, real
from tests.models.tiny_policies import FAMILIES

pytestmark = pytest.mark.heavy

CUDA = torch.device("cuda", 0)
TEXT: dict[str, dict[str, tuple[int, ...]]] = {
    "wan": {"text": (512, 4096)},
    "hunyuan_video": {"text": (256, 4096), "pooled": (768,), "mask": (256,)},
    "flux": {"text": (512, 4096), "pooled": (768,)},
    "qwen_image": {"text": (256, 3584), "mask": (256,)},
    "sd3": {"text": (333, 4096), "pooled": (2048,)},
}
"""Conditioning of one prompt."""


def conditioning(family: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of one prompt and of the negative one, as `Policy.encode` gives them."""
    made = {
        key: torch.ones(1, *shape, device=CUDA, dtype=torch.bool if key == "mask" else dtype)
        for key, shape in TEXT[family].items()
    }
    return made | {NEGATIVE + key: value for key, value in made.items()}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "sd3" else pytest.mark.slow) for name in FAMILIES]
)
def test_denoise_replay_decode_and_adopt_stay_on_the_device(family: str) -> None:
    """With classifier-free guidance; first as a trainer holds the weights, then as a rank that only generates. With an
    adapter: where all weights are trained, autocast asks for a driver."""
    guidance = {"true_cfg_scale": 3.0} if FAMILIES[family].embedded_guidance else {"guidance_scale": 4.0}
    ensure(family)  # what is not there yet is built outside of the fake device
    policy = real(family, True, offload_encoders=False, **guidance)
    grid, kernel, steps = policy.sigma_grid(3), FlowSDE(0.7), 3
    plan = AllButLast().plan(0, 0, steps)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        place(policy, CUDA)
        place(policy._decoder, CUDA)
        policy._decoder.to = lambda device: policy._decoder  # fake modules cannot be moved, not even to where they are
        assert policy.two_forwards
        assert policy.device == CUDA
        condition, key = conditioning(family, policy.dtype), denoise.SampleKey(0, 0, 1, (0, 1))
        samples = denoise.sample(policy, condition, key, grid, kernel, plan, torch.bfloat16, CUDA, keep_means=True)
        assert samples.final.device == samples.log_probs.device == CUDA
        assert samples.latents.shape == (2, 2, *policy.latent_shape)
        block = CellBlock(
            step=0,
            group=0,
            uid=1,
            first_sample=0,
            version=0,
            steps=samples.steps.to(CUDA),
            sigmas=grid.to(CUDA),
            latents=samples.latents,
            next_latents=samples.next_latents,
            log_probs=samples.log_probs,
            condition=condition,
            means=samples.means,
        )
        again = denoise.replay(policy, block, kernel)
        assert again.log_prob.shape == samples.log_probs.shape
        assert (again.log_prob.dtype, again.log_prob.device) == (torch.float32, CUDA)

        policy.only_generate()
        own = policy.trained_parameters()
        adopt(own, Version(1, "", {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in own.items()}))
        assert {value.device for value in own.values()} == {CUDA}
        noise = torch.zeros(1, *policy.latent_shape, device=CUDA)
        media = policy.decode(denoise.ode_sample(policy, condition, noise, grid))
        frames = () if policy.temporal_stride is None else (5,)
        assert tuple(media.shape) == (1, *frames, 3, 256, 256)
        assert (media.device, media.dtype) == (CUDA, torch.float32)
