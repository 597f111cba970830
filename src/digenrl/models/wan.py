"""Wan2.1 text-to-video (arXiv:2503.20314): UMT5 text, classifier-free guidance, latents [16, f, h, w]."""

from __future__ import annotations

from typing import Any, ClassVar

from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor

from digenrl.models.latents import denormalise
from digenrl.models.pipeline import DiffusersPolicy


class WanPolicy(DiffusersPolicy):
    """Wan2.1 1.3B and 14B; arguments in `DiffusersPolicy`."""

    family = "wan"
    pipelines = ("WanPipeline",)
    transformer_class = WanTransformer3DModel
    vae_class = AutoencoderKLWan
    block_lists = ("blocks",)
    temporal_stride = 4
    attention = tuple(f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))
    feed_forward = ("ffn.net.0.proj", "ffn.net.2")
    context_plan: ClassVar[dict[str, Any]] = {
        "rope": {part: ContextParallelInput(split_dim=1, expected_dims=4, split_output=True) for part in (0, 1)},
        "blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=latents, timestep=sigmas * 1000, encoder_hidden_states=condition["text"], return_dict=False
        )[0]

    def encode_text(self, pipeline: Any, text: str) -> dict[str, Tensor]:
        """UMT5 states [1, max_sequence_length, d], zero after the prompt; Wan attends to the zeros, so no mask."""
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
