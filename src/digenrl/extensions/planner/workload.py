"""What one RL step asks for: the model's sizes (digenrl/facts.py) and the experiment's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from digenrl.facts import Facts, counted
from digenrl.recompute import ALL, INPUTS
from digenrl.schedule import ScheduleSpec

REWARD_FLOPS = {
    "pickscore": 0.38e12,
    "clip_score": 0.33e12,
    "image_similarity": 0.33e12,
    "aesthetic": 0.17e12,
    "dino_similarity": 0.04e12,
}
"""FLOPs per image of scorers that run on the GPU (2 x parameters x tokens of their ViT). Others run on the CPU."""

REWARD_CPU_SECONDS = {
    "ocr": 0.3,
    "video_quality": 0.1,
    "jpeg": 0.01,
    "digits": 0.001,
    "scenes": 0.002,
    "edit": 0.003,
    "edit_done": 0.01,
}
"""Seconds per sample of scorers that run in a CPU thread, beside the GPU: they delay a group, they occupy no GPU."""


@dataclass(frozen=True)
class Drawn:
    """What one evaluation draws."""

    prompts: int
    samples: int
    """Of each."""
    steps: int
    """Of the ODE."""
    compared: int = 0
    """Samples of each prompt that are drawn once more as rollouts draw them, with two forwards a step: the policy's and
    the base model's."""


@dataclass(frozen=True)
class Workload:
    """One RL step of one experiment."""

    model: str
    """Option of configs/model."""
    height: int
    width: int
    frames: int
    steps: int
    """T."""
    trained_steps: int
    """S."""
    prompts: int
    """Groups that are generated."""
    group_size: int
    updates: int
    """Of the optimizer, per RL step."""
    guidance: bool
    """Two forwards per velocity (classifier-free guidance)."""
    lora_rank: int | None
    """None = all weights are trained."""
    lora_targets: str = "attn_ff"
    """attn | attn_ff."""
    reference: bool = False
    """A forward of the reference model per trained cell (kl_weight > 0)."""
    ema: bool = False
    rewards: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ()
    """Rewards that only evaluation asks for."""
    evaluated: int = 0
    """Samples that a rank makes at once when it evaluates; 0 = nobody does. Trainers have room for it in any case, for
    when no rollout is left."""
    rollouts_evaluate: bool = False
    """Rollouts evaluate while trainers go on; else trainers do."""
    engine: str = "eager"
    """How the network runs: a key of `gpus.ENGINES`."""
    fused_attention: bool = False
    """Its attention is a kernel written for the GPU."""
    passes_apart: bool = False
    """The forwards of classifier-free guidance run one after the other (published rows); else as one batch."""
    storage_bytes: int = 2
    """Of one stored latent element."""
    trained_samples: int | None = None
    """Samples of a group that can have a gradient, where no others are trained; None = all."""
    oversample: int = 0
    """Groups of `prompts` that are not trained."""
    updates_split: Literal["groups", "samples"] = "groups"
    """What the updates share out (`ScheduleSpec.updates_split`)."""
    stored_prompts: bool = False
    """Prompts were encoded before the first step (`data.prompt_store`): nobody holds or waits for text encoders."""
    whole_batch: bool = False
    """Advantages need every reward of the batch, so nothing is trained before all is generated (gap=0)."""

    @property
    def spec(self) -> ScheduleSpec:
        """The schedule that the planner starts from: tasks of a sample, fragments of a group, sharded steps."""
        return ScheduleSpec(
            prompts=self.prompts,
            oversample=self.oversample,
            group_size=self.group_size,
            task_size=1,
            denoise_steps=self.steps,
            trained_steps=self.trained_steps,
            updates_per_batch=self.updates,
            updates_split=self.updates_split,
            gap=0 if self.whole_batch else 1,
            tsp_shard=True,
        )

    @cached_property
    def sizes(self) -> Mapping[str, Any]:
        """Published sizes and counts of the model."""
        return self.facts.models[self.model]

    @cached_property
    def facts(self) -> Facts:
        """Facts of the model's family."""
        return counted()[self.model]

    @property
    def latent_pixels(self) -> int:
        """Height x width of a latent frame."""
        side = self.facts.latents.side
        return (self.height // side) * (self.width // side)

    @property
    def latent_frames(self) -> int:
        """Of a sample."""
        return (self.frames - 1) // self.facts.latents.frames + 1

    @cached_property
    def tokens(self) -> int:
        """Latent tokens of a sample."""
        return self.latent_frames * self.latent_pixels // self.facts.latents.patch**2

    @property
    def latent_elements(self) -> int:
        """Numbers of a sample's latents."""
        return self.facts.latents.channels * self.latent_frames * self.latent_pixels

    @property
    def passes(self) -> int:
        """Forwards per velocity."""
        return 2 if self.guidance else 1

    @property
    def launches(self) -> int:
        """Forwards that are launched per velocity."""
        return self.passes if self.passes_apart else 1

    @property
    def block_bytes(self) -> float:
        """Of one [tokens, hidden] in 16 bit, text included where it goes through the blocks."""
        joint = self.sizes["text_tokens"] if self.sizes["joint_attention"] else 0
        return 2.0 * float(self.sizes["hidden"]) * (self.tokens + joint)

    @property
    def samples(self) -> int:
        """Samples of one RL step."""
        return self.prompts * self.group_size

    @property
    def useful(self) -> float:
        """Share of the samples that take a backward pass."""
        rows = 1.0 if self.trained_samples is None else self.trained_samples / self.group_size
        return rows * (self.prompts - self.oversample) / self.prompts

    @property
    def cells(self) -> int:
        """Cells of an RL step that take a backward pass."""
        return (self.prompts - self.oversample) * (self.trained_samples or self.group_size) * self.trained_steps

    @property
    def trained_parameters(self) -> int:
        """Exactly: LoRA's (in + out) x rank over the target layers, or every parameter."""
        if self.lora_rank is None:
            return int(self.sizes["parameters"])
        return int(self.sizes["lora_parameters_per_rank"][self.lora_targets]) * self.lora_rank

    @property
    def _trained(self) -> str:
        """Key of the counts that depend on what is trained."""
        return "full" if self.lora_rank is None else self.lora_targets

    def attention_flops(self) -> float:
        """FLOPs of the attention products in one forward: 4 x hidden x blocks x tokens^2."""
        joint = self.sizes["text_tokens"] if self.sizes["joint_attention"] else 0
        return float(4 * self.sizes["hidden"] * self.sizes["attention_blocks"] * (self.tokens + joint) ** 2)

    def forward_flops(self) -> float:
        """FLOPs of one forward of one sample: attention exactly, the rest linear through the two counted points."""
        (n0, f0), (n1, f1) = ((point["tokens"], point["flops"]) for point in self.sizes["flops"])
        joint = self.sizes["text_tokens"] if self.sizes["joint_attention"] else 0
        scale = 4 * self.sizes["hidden"] * self.sizes["attention_blocks"]
        rest0, rest1 = f0 - scale * (n0 + joint) ** 2, f1 - scale * (n1 + joint) ** 2
        slope = (rest1 - rest0) / (n1 - n0)
        return self.attention_flops() + rest0 + slope * (self.tokens - n0)

    def backward_flops(self) -> float:
        """FLOPs of one backward: attention twice its forward; the rest twice (all weights) or once (LoRA: no weight
        gradients of the frozen base)."""
        attention = self.attention_flops()
        rest = self.forward_flops() - attention
        return 2.0 * attention + (2.0 if self.lora_rank is None else 1.0) * rest

    def repeated_flops(self, mode: str) -> float:
        """FLOPs of one forward of one sample that its backward repeats when all blocks keep `mode`: attention exactly,
        of the rest the counted share."""
        attention = self.attention_flops()
        share = float(self.sizes["repeated_flops"][self._trained][mode])
        return (attention if mode == INPUTS else 0.0) + share * (self.forward_flops() - attention)

    def repeated_bytes(self, mode: str) -> float:
        """Bytes that this repetition writes and reads again: what is not kept, twice."""
        return 2.0 * float(self.sizes["blocks"]) * (self.kept_bytes(ALL, 1) - self.kept_bytes(mode, 1))

    def kept_bytes(self, mode: str, rows: int, context: int = 1) -> float:
        """Bytes that one unit of blocks keeps of a forward of `rows` samples for the backward pass, on each of
        `context` ranks that share the tokens of the picture; the text's are on all of them."""
        return self._fitted(self.sizes["kept_bytes"][self._trained][mode], rows, context)

    def forward_bytes(self, rows: int) -> float:
        """Peak of a forward of `rows` samples without gradients, weights in 16 bit; `context` as of `kept_bytes`."""
        return max(0.0, self._fitted(self.sizes["forward_bytes"], rows))

    def _fitted(self, entry: Mapping[str, float], rows: int, context: int = 1) -> float:
        tokens = self.tokens / context
        row = entry["row"] + entry["token"] * tokens + entry["text"] * float(self.sizes["text_tokens"])
        return entry["forward"] + rows * row

    def decode_flops(self) -> float:
        """FLOPs of one sample's VAE decode."""
        return (
            float(self.sizes["decode"]["flops_per_latent_pixel_frame"])
            * (self.height // 8)
            * (self.width // 8)
            * self.frames
        )

    def score_flops(self) -> float:
        """FLOPs of the GPU scorers per sample."""
        return sum(REWARD_FLOPS.get(name, 0.0) for name in self.rewards)

    def score_cpu_seconds(self) -> float:
        """Seconds of the CPU scorers per sample."""
        return sum(REWARD_CPU_SECONDS.get(name, 0.0) for name in self.rewards)

    def encode_flops(self) -> float:
        """FLOPs of the text encoders per prompt; the negative prompt is the same for all and stays in the cache."""
        encoders = self.sizes["encoders"]
        return 2.0 * encoders["parameters"] * encoders["tokens"]
