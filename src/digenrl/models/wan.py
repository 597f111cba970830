"""Wan2.1 and 2.2 (arXiv:2503.20314): UMT5 text, classifier-free guidance, latents [16, f, h, w].

Wan2.2 A14B has two transformers, for much and for little noise. Image-to-video reads the first
frame twice: as channels beside the noise, and through a CLIP that joins the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models import pretrained
from digenrl.models.exchange import attend_together
from digenrl.models.experts import PARTS, Experts
from digenrl.models.latents import denormalise, normalise
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.prompt_store import Wording

CHECKPOINT_NAMES: Names = {
    r"blocks\.(\d+)\.": {
        **{
            (f"attn{number}.{ours}",): f"blocks.{{}}.{part}.{theirs}"
            for number, part in ((1, "self_attn"), (2, "cross_attn"))
            for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
        },
        ("attn2.add_k_proj",): "blocks.{}.cross_attn.k_img",
        ("attn2.add_v_proj",): "blocks.{}.cross_attn.v_img",
        ("ffn.net.0.proj",): "blocks.{}.ffn.0",
        ("ffn.net.2",): "blocks.{}.ffn.2",
    }
}


class _SelfAttention(WanAttnProcessor):
    """Self-attention of the video's tokens that a context group can compute together."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Any:
        if self._parallel_config is None:
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )
        states = (
            attn.norm_q(attn.to_q(hidden_states)),
            attn.norm_k(attn.to_k(hidden_states)),
            attn.to_v(hidden_states),
        )
        query, key, value = (part.unflatten(2, (attn.heads, -1)) for part in states)
        rotated = [_rotated(part, *rotary_emb) for part in (query, key)]
        (seen,) = attend_together(
            self._parallel_config, (*rotated, value), backend=self._attention_backend
        )
        return attn.to_out[1](attn.to_out[0](seen))


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply the rotary embedding to [B, tokens, heads, d] by angles [1, tokens, 1, d], in which
    each angle appears twice."""
    real, imaginary = states.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosines[..., ::2], sines[..., ::2]
    turned = real * cosine - imaginary * sine, real * sine + imaginary * cosine
    return torch.stack(turned, dim=-1).flatten(-2).type_as(states)


class WanPolicy(DiffusersPolicy):
    """Wan2.1 text-to-video, 1.3B and 14B; arguments in `DiffusersPolicy`."""

    family = "wan"
    pipelines = ("WanPipeline",)
    transformer_class = WanTransformer3DModel
    vae_class = AutoencoderKLWan
    block_lists = ("blocks",)
    temporal_stride = 4
    attention = tuple(
        f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")
    )
    feed_forward = ("ffn.net.0.proj", "ffn.net.2")
    checkpoint_names = CHECKPOINT_NAMES
    context_plan: ClassVar[dict[str, Any]] = {
        "rope": {
            part: ContextParallelInput(split_dim=1, expected_dims=4, split_output=True)
            for part in (0, 1)
        },
        "blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.wrap_units():
            self.attend_with(block.attn1, _SelfAttention())

    @classmethod
    def check_checkpoint(cls, path: str) -> None:
        """Check the checkpoint as every family does, and also its experts and its timesteps.

        A checkpoint is refused if an expert would be left out or is missing, or if its timesteps
        differ by token (Wan2.2 5B).
        """
        super().check_checkpoint(path)
        index = pretrained.model_index(path)
        experts = index.get("boundary_ratio") is not None
        if experts != ("transformer_2" in cls.components) or index.get("expand_timesteps"):
            holds = "two transformers" if experts else "one transformer"
            holds += " with a clock per token" if index.get("expand_timesteps") else ""
            raise pretrained.PretrainedError(
                f"model.path={path} holds {holds}, which the {cls.family} adapter does not read: "
                "use model=wan22_a14b for Wan2.2 T2V A14B, and wan21_14b, wan21_1_3b or "
                "wan21_i2v_14b for Wan2.1; other Wan2.2 checkpoints are not supported"
            )

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=latents,
            timestep=sigmas * 1000,
            encoder_hidden_states=condition["text"],
            return_dict=False,
        )[0]

    def encode_text(self, pipeline: Any, text: str) -> dict[str, Tensor]:
        """Return UMT5 states [1, max_sequence_length, d], zero after the prompt. Wan attends to the
        zeros, so there is no mask."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        embeddings, _ = pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=pipeline.device,
        )
        return {"text": embeddings}

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        return vae.decode(denormalise(latents, vae.config), return_dict=False)[0]


class WanExpertsPolicy(WanPolicy):
    """Wan2.2 text-to-video A14B; arguments in `DiffusersPolicy`, and

    guidance_scale_2: the scale at noise levels of the second transformer; None = as for the first.
    """

    family = "wan22"
    components: ClassVar[Mapping[str, str]] = {part: f"{part}." for part in PARTS}
    context_plan: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, guidance_scale_2: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if guidance_scale_2 is not None and guidance_scale_2 < 1.0:
            raise ValueError(
                f"model.guidance_scale_2={guidance_scale_2}: use 1 (off) or more, or null"
            )
        self.guidance_scale_2 = guidance_scale_2

    def joined(self, networks: list[Any]) -> Any:
        """Return both experts as one network, with the boundary that the checkpoint names."""
        high, low = networks
        return Experts(high, low, 1000 * pretrained.model_index(self.path)["boundary_ratio"])

    def guidance(self, sigmas: Tensor) -> float | Tensor:
        """Return each expert's own scale [B, 1, 1, 1, 1]."""
        if self.guidance_scale_2 is None:
            return self.cfg_scale
        experts: Any = self.transformer
        high = sigmas * 1000 >= experts.boundary
        return torch.where(high, self.cfg_scale, self.guidance_scale_2).view(-1, 1, 1, 1, 1)

    def parameters_without_gradient(self) -> list[str]:
        """Return the names of trained parameters without gradient, or [] if they are all parameters
        of one expert.

        An expert gets no gradient when no cell of the update has its noise levels. The other expert
        then has all gradients.
        """
        absent = super().parameters_without_gradient()
        for prefix in self.components.values():
            own = [name for name in self.trained_parameters() if name.startswith(prefix)]
            if len(own) < len(self.trained_parameters()) and set(own) == set(absent):
                return []
        return absent


class WanImageToVideoPolicy(WanPolicy):
    """Wan2.1 image-to-video 14B; arguments in `DiffusersPolicy`.

    The CLIP sees the image fitted to the size of the video, as the autoencoder does. diffusers'
    pipeline gives the CLIP the whole image.
    """

    family = "wan_i2v"
    pipelines = ("WanImageToVideoPipeline",)
    context_plan: ClassVar[dict[str, Any]] = {}  # image tokens join the text
    text_length = 512
    reads: ClassVar[Mapping[str, tuple[int, int]]] = {"image": (1, 1)}
    attention = (*WanPolicy.attention, "attn2.add_k_proj", "attn2.add_v_proj")

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=torch.cat([latents, condition["frame"]], dim=1),
            timestep=sigmas * 1000,
            encoder_hidden_states=condition["text"],
            encoder_hidden_states_image=condition["vision"],
            return_dict=False,
        )[0]

    def encode_wording(self, pipeline: Any, wording: Wording) -> dict[str, Tensor]:
        """Return the conditioning of the text, and `vision` and `frame` of the image.

        `vision` [1, tokens, d] has the CLIP's last states but one. `frame` [1, 20, f, h, w] has 4
        channels that mark the given frames (one per frame of a latent frame), then the latents of a
        video that is grey behind its first frame.
        """
        picture = wording.images[0].fitted(self.height, self.width)
        video = pad(self.pixels(wording.images[0]).unsqueeze(2), (0, 0, 0, 0, 0, self.frames - 1))
        encoded = self._vae.encode(video.to(self._vae.device, self.vae_dtype)).latent_dist.mode()
        given = torch.zeros(1, 4, *encoded.shape[2:], device=encoded.device)
        given[:, :, 0] = 1.0
        frame = torch.cat([given, normalise(encoded.float(), self._vae.config)], dim=1)
        vision = pipeline.encode_image(picture, pipeline.image_encoder.device)
        return {**super().encode_wording(pipeline, wording), "vision": vision, "frame": frame}
