"""Tilted mixture: a flow whose data are a Gaussian mixture, so that base and optimum are known in
closed form.

p(x) = sum_k w_k N(x; m_k, d^2 I). With x_s = (1-s) x + s eps, a component's x_s is N((1-s) m_k, c
I), where c = (1-s)^2 d^2 + s^2. The velocity E[eps - x | x_s] is the mean over the components'
posterior of

    (s - (1-s) d^2) / c (x_s - (1-s) m_k) - m_k.

A residual network that begins at zero is trained. Its output is multiplied by s / (1 - 0.7 s). This
is about the shape over sigma of the push that costs least KL under Flow-SDE: its variance times how
far a push at s reaches.

For a reward <a, x> the optimum of E_q[r] - beta KL(q || p) is p exp(r/beta) / Z. It is the mixture
with means m_k + d^2 a/beta and weights w_k exp(<a, m_k>/beta).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from digenrl.diffusion.sigmas import static_grid
from digenrl.models.codec import Codec
from digenrl.models.guidance import Guidance
from digenrl.models.policy import Policy
from digenrl.models.wording import Wording

ROWS = 2
"""Rows of a decoded picture, which shows the D coordinates as grey values."""
SPAN = 8.0
"""Coordinate that is white in a decoded picture; -SPAN is black."""


class MixtureFlow(nn.Module):
    """Closed-form velocity of the mixture, plus a residual network of `depth` blocks that is zero
    at first.

    Args:
        means: means of the components, [K][D].
        weights: weights of the K components.
        deviation: standard deviation d of every component.
    """

    means: Tensor
    log_weights: Tensor

    def __init__(
        self,
        means: Sequence[Sequence[float]],
        weights: Sequence[float],
        deviation: float,
        width: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.register_buffer(
            "means", torch.tensor([list(mean) for mean in means]), persistent=False
        )
        self.register_buffer("log_weights", torch.tensor(list(weights)).log(), persistent=False)
        self.variance = float(deviation) ** 2
        size = self.means.shape[1]
        self.enter = nn.Linear(2 * size + 1, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.SiLU(), nn.Linear(width, width)) for _ in range(depth)
        )
        self.leave = nn.Linear(width, size)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, latents: Tensor, sigmas: Tensor, direction: Tensor) -> Tensor:
        """Return the velocity [B, D] of latents [B, D] at sigmas [B], conditioned on `direction`
        [B, D]."""
        s, x = sigmas.to(latents.dtype)[:, None], latents
        hidden = self.enter(torch.cat([x, direction.to(x.dtype), s], dim=1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.mixture_velocity(x, s) + s / (1 - 0.7 * s) * self.leave(hidden)

    def mixture_velocity(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the mixture's own velocity [B, D] at s [B, 1]."""
        c = (1 - s) ** 2 * self.variance + s**2
        offset = x[:, None] - (1 - s)[..., None] * self.means
        component = (self.log_weights - offset.square().sum(-1) / (2 * c)).softmax(dim=1)
        slope = (s - (1 - s) * self.variance) / c
        return (component[..., None] * (slope[..., None] * offset - self.means)).sum(dim=1)


class MixtureCodec(Codec):
    """Axes as texts, coordinates as grey pictures."""

    def encode_prompts(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        """Return `direction` [B, D], with a 1 or -1 at one coordinate. Raises ValueError for a text
        that names no axis."""
        (axes,) = self.latent_shape
        found = torch.zeros(len(wordings), axes, device=self.device)
        for row, (text, _) in enumerate(wordings):
            named = re.fullmatch(r"along ([+-])(\d+)", text)
            if named is None or int(named[2]) >= axes:
                raise ValueError(
                    f"prompt {text!r}: the mixture knows `along +0` .. `along -{axes - 1}`."
                )
            found[row, int(named[2])] = 1.0 if named[1] == "+" else -1.0
        return {"direction": found}

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, D] to grey pictures [B, 1, ROWS, D/ROWS], fp32 in [0, 1]."""
        return (latents.float() / (2 * SPAN) + 0.5).clamp(0.0, 1.0).unflatten(1, (1, ROWS, -1))


class MixturePolicy(Policy):
    """Policy of the mixture's flow. A prompt names the axis along which the reward rises, as in
    "along -3".

    Args:
        means, weights, deviation: the mixture, as in `MixtureFlow`; D is even.
        width, depth: size of the residual network.
        dtype, keep_reference: as in `DigitsPolicy`; all weights of the residual network are
            trained.
        seed: seed of the residual network's first layers.
    """

    family = "mixture"
    codec_class = MixtureCodec
    block_lists = ("blocks",)

    def __init__(
        self,
        means: Sequence[Sequence[float]],
        weights: Sequence[float],
        deviation: float,
        width: int = 64,
        depth: int = 2,
        dtype: torch.dtype | str = torch.float32,
        keep_reference: bool = False,
        seed: int = 0,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = MixtureFlow(means, weights, deviation, width, depth)
        axes = network.means.shape[1]
        codec = MixtureCodec(self.family, network, (axes,), Guidance())
        super().__init__(network, codec, dtype=dtype, keep_reference=keep_reference)

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Return the velocity [B, D]."""
        return self.network(latents, sigmas, condition["direction"])

    def sigma_grid(self, steps: int) -> Tensor:
        """Return sigmas [steps + 1], fp32, linear from 1 to 0."""
        return static_grid(steps, 1.0)
