"""Work of one RL step, from the model's sizes (digenrl/facts.py) and the experiment's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from digenrl.facts import Facts, ModelSizes, facts_by_family
from digenrl.schedule import ScheduleSpec

BASE_BYTES = {None: 2.0, "nf4": 0.5 + 4 / 64, "int8": 1.0}
"""`model.quantize` -> bytes of a frozen weight. nf4 has an fp32 scale per 64 weights; the scales of
int8, one per row, are neglected."""


@dataclass(frozen=True)
class Drawn:
    """Samples that one evaluation draws."""

    prompts: int
    samples: int
    """Samples of each prompt."""
    steps: int
    """Steps of the ODE."""
    compared: int = 0
    """Samples of each prompt that are drawn once more as in rollouts. Each step then takes two
    forwards: the policy's and the base model's."""


@dataclass(frozen=True)
class Workload:
    """Sizes and settings of one RL step of an experiment."""

    model: str
    """Option of configs/model."""
    height: int
    width: int
    frames: int
    steps: int
    """Denoising steps of a sample (T)."""
    trained_steps: int
    """Denoising steps that are trained (S)."""
    prompts: int
    """Groups generated per RL step, one per prompt."""
    group_size: int
    updates: int
    """Optimizer updates per RL step."""
    guidance: bool
    """Whether a velocity takes two forwards (classifier-free guidance)."""
    lora_rank: int | None
    """Rank of the LoRA adapters; None = all weights are trained."""
    lora_targets: str = "attn_ff"
    """attn | attn_ff."""
    most_text: int | None = None
    """Text tokens to which prompts are padded or cut (`model.max_sequence_length`); None = those of
    the facts."""
    reference: bool = False
    """Whether each trained cell also takes a forward of the reference model (kl_weight > 0, and DPO
    and DGPO, which compare with it)."""
    old_forwards: float = 0.0
    """Forwards without gradient of each trained cell by earlier weights: an old policy, those at
    the batch's beginning, teachers. Mean over the updates of a batch."""
    weight_copies: int = 0
    """Copies of the trained weights that the algorithm keeps for `old_forwards`, in fp32."""
    sampling_parameters: int = 0
    """Numbers of the constant adapter that generates (`sampling.lora`); 0: none."""
    whole_groups: bool = False
    """Whether a task holds all samples of a group, because the algorithm compares them at once."""
    ema: bool = False
    rewards: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    """Rewards on GPUs that no rank has (placement managed); the other two fields lack them."""
    heldout: tuple[str, ...] = ()
    """Rewards that only evaluation uses."""
    relayed: bool = True
    """Whether one rollout of a machine receives versions for all (torchrun, SLURM). On Ray each
    receives them, unless trainer 0 is on its machine."""
    compressed: bool = False
    """Whether slow connections carry differences (`network.compress`)."""
    gradient_share: float | Literal["auto", "off"] = "off"
    """Share of the gradient's values that travel in an update (`parallel.compress`)."""
    evaluated_samples: int = 0
    """Samples of one evaluation; 0: none is made."""
    evaluated: int = 0
    """Samples that an evaluating rank makes at once; 0 = no evaluation. Trainers always have room
    for them, because they evaluate when no rollout is left."""
    rollouts_evaluate: bool = False
    """Whether rollouts evaluate while trainers go on; otherwise trainers evaluate."""
    evaluation_auto: bool = False
    """Whether trainers evaluate all the same where that takes less of their time
    (`allocation.evaluation=auto`)."""
    engine: str = "eager"
    """Execution of the network: a key of `gpus.ENGINES`."""
    fused_attention: bool = False
    """Whether attention is a kernel written for the GPU."""
    passes_apart: bool = False
    """Whether the forwards of classifier-free guidance run one after the other (published rows) or
    as one batch."""
    detached: bool = False
    """Whether guidance trains its conditional forward alone (`algorithm.detach_uncond`). The two
    forwards then run one after the other."""
    base_bytes: float = 2.0
    """Bytes of one frozen weight (`BASE_BYTES`)."""
    storage_bytes: int = 2
    """Bytes of one stored latent element."""
    trained_samples: int | None = None
    """Samples of a group that are trained because they can have a gradient; None = all."""
    oversample: int = 0
    """Groups of `prompts` that are generated but not trained."""
    updates_split: Literal["groups", "samples"] = "groups"
    """Unit that updates divide among themselves (`ScheduleSpec.updates_split`)."""
    stored_prompts: bool = False
    """Whether prompts were encoded before the first step (`data.prompt_store`), so that no rank
    holds text encoders."""
    most_tsp_batch: int | None = None
    """Most denoising steps in one forward, by the rounding that the clip range allows; None = all
    trained ones."""
    compiles: bool = True
    """Whether the clip range allows the rounding of compiled blocks."""
    whole_batch: bool = False
    """Whether advantages need every reward of the batch, so that training begins after all
    generation (gap=0)."""

    @property
    def spec(self) -> ScheduleSpec:
        """Schedule that the planner starts from: tasks of one sample, fragments of one group,
        sharded steps."""
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
    def sizes(self) -> ModelSizes:
        """Published sizes and counts of the model."""
        return self.facts.models[self.model]

    @cached_property
    def facts(self) -> Facts:
        """Facts of the model's family."""
        return counted_models()[self.model]

    @property
    def heads(self) -> int:
        """Attention heads that ranks can share; 1 where they can share no tokens."""
        return int(self.sizes["network"]["num_attention_heads"]) if self.facts.context else 1

    @property
    def latent_pixels(self) -> int:
        """Height x width of a latent frame."""
        side = self.facts.latents.side
        return (self.height // side) * (self.width // side)

    @property
    def latent_frames(self) -> int:
        """Latent frames of a sample."""
        return int((self.frames - 1) / self.facts.latents.frames) + 1

    @cached_property
    def tokens(self) -> int:
        """Latent tokens of a sample."""
        return self.latent_frames * self.latent_pixels // self.facts.latents.patch**2

    @cached_property
    def text_tokens(self) -> int:
        """Text tokens of a sample: what a prompt is padded to, or, where padding is cut, what the
        facts say of a prompt, at most."""
        usual, padded = self.sizes["text_tokens"], self.sizes.get("padded")
        if self.most_text is None:
            return usual
        return min(usual, self.most_text) if padded is None else self.most_text + padded

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
        """Forwards launched per velocity; guidance in one batch is a single launch."""
        return self.passes if self.passes_apart or self.detached else 1

    @property
    def frozen_forwards(self) -> float:
        """Forwards without gradient of each trained cell."""
        return int(self.reference) + self.old_forwards

    @property
    def trained_passes(self) -> int:
        """Forwards per velocity that take a backward pass."""
        return self.passes - self.detached

    @property
    def block_bytes(self) -> float:
        """Bytes of one [tokens, hidden] in 16 bit, including text tokens where they go through the
        blocks."""
        length = self.tokens + self.text_tokens * self.sizes["joint_attention"]
        return 2.0 * self.sizes["hidden"] * length

    @property
    def samples(self) -> int:
        """Samples of one RL step."""
        return self.prompts * self.group_size

    @property
    def useful(self) -> float:
        """Share of the samples that take a backward pass."""
        return self.cells / (self.samples * self.trained_steps)

    @property
    def cells(self) -> int:
        """Cells of an RL step that take a backward pass."""
        return (
            (self.prompts - self.oversample)
            * (self.trained_samples or self.group_size)
            * self.trained_steps
        )

    @property
    def trained_parameters(self) -> int:
        """Exact number of trained parameters: LoRA's (in + out) x rank over the target layers, or
        every parameter."""
        if self.lora_rank is None:
            return self.sizes["parameters"]
        return self.sizes["lora_parameters_per_rank"][self.lora_targets] * self.lora_rank


@cache
def counted_models() -> Mapping[str, Facts]:
    """Return model -> facts of its family, for every option of configs/model whose sizes have been
    counted."""
    return {
        model: facts
        for facts in facts_by_family().values()
        for model, sizes in facts.models.items()
        if "parameters" in sizes
    }
