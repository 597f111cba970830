"""Every family at real size on a CUDA device that does not exist: mixed devices, wrong dtypes and
wrong shapes show."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import _families
from benchmarks._policy_bench import Build, composed
from benchmarks._random_builds import FAMILY, REAL, fill, random_weights
from benchmarks.launches import Launches
from digenrl import accelerator
from digenrl import config as configuration
from digenrl.config import config_directory
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.extensions.zoo.wan_experts import Experts
from digenrl.models.guidance import NEGATIVE
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.tiny import ensure
from digenrl.rollout.engine import RolloutEngine, SamplingSpec
from digenrl.schedule import Task
from digenrl.transport.weights import Version, adopt
from digenrl.types import CellBlock, Prompt
from reward_models.clip_score import ClipScore
from tests.models.real_policies import decoder_moves, place, plainly, real
from tests.models.tiny_policies import FAMILIES, IMAGES, ROWS
from tests.sampling import sample

pytestmark = pytest.mark.heavy

CUDA = torch.device("cuda", 0)


def shapes(policy: DiffusersPolicy) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the conditioning of one prompt, at published size."""
    return _families.conditioning(policy.facts(), policy, *ROWS[policy.family].real_text)


@pytest.fixture(autouse=True)
def rows_of_both_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose each row's expert by its number, because fake tensors have no values to choose by."""
    monkeypatch.setattr(
        Experts,
        "high_noise_rows",
        lambda self, timesteps: [row % 2 == 0 for row in range(len(timesteps))],
    )


def conditioning(policy: DiffusersPolicy, device: torch.device = CUDA) -> dict[str, Tensor]:
    """Return the conditioning of a prompt and of its negative prompt, as `Codec.encode` does."""
    made = {
        key: torch.ones(
            1, *shape, device=device, dtype=torch.bool if key.endswith("mask") else policy.dtype
        )
        for key, shape in shapes(policy).items()
    }
    return made | {NEGATIVE + key: value for key, value in made.items()}


CLIP_L = transformers.CLIPConfig(
    text_config={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "projection_dim": 768,
    },
    vision_config={
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
        "projection_dim": 768,
    },
    projection_dim=768,
)
"""openai/clip-vit-large-patch14."""
PROMPT = Prompt("a red circle on a blue background", negative="", images=IMAGES)
CHEAPEST = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "sd3" else pytest.mark.slow) for name in FAMILIES],
)


def guidance(family: str) -> dict[str, Any]:
    """Two branches."""
    return (
        {"true_cfg_scale": 3.0} if FAMILIES[family].embedded_guidance else {"guidance_scale": 4.0}
    )


def block(
    samples: denoise.FinishedSamples,
    grid: Tensor,
    condition: dict[str, Tensor],
    device: torch.device,
) -> CellBlock:
    """The cells of `samples`, as a trainer replays them."""
    return CellBlock(
        step=0,
        group=0,
        uid=1,
        first_sample=0,
        version=0,
        steps=samples.steps.to(device),
        sigmas=grid.to(device),
        latents=samples.latents,
        next_latents=samples.next_latents,
        log_probs=samples.log_probs,
        condition=condition,
        means=samples.means,
    )


@pytest.mark.slow  # tests/device has the default run's
@pytest.mark.parametrize("family", FAMILIES)
def test_denoise_replay_decode_score_adopt_and_evaluation_stay_on_the_device(family: str) -> None:
    """Guidance is classifier-free. First the weights are held as by a trainer, then as by a rank
    that only generates. An adapter is trained: with all weights trained, autocast asks for a
    driver. The scorer is called without a reward suite, which would ask for values."""
    ensure(family)  # what is not there yet is built outside of the fake device
    policy = real(family, True, offload_encoders=False, **guidance(family))
    scorer = ClipScore(build="tiny", device="cpu")
    grid, kernel, steps = policy.sigma_grid(3), FlowSDE(0.7), 3
    plan = AllButLast().plan_steps(0, 0, steps)
    policy.sigma_grid = lambda count: grid[-count - 1 :]  # diffusers' scheduler asks for values
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        place(policy, CUDA)
        place(policy.codec._vae, CUDA)
        policy.codec._vae.to = lambda device: (
            policy.codec._vae
        )  # fake modules cannot be moved, not even to where they are
        policy.keep_padding(True)  # what is padding depends on values
        with init_empty_weights(include_buffers=False):
            clip = transformers.CLIPModel(CLIP_L)
        scorer.clip.model, scorer.clip.device = fill(clip, CUDA, torch.float32).eval(), CUDA
        assert policy.two_forwards
        assert policy.device == CUDA
        condition, key = conditioning(policy), denoise.SampleKey(0, 0, 1, (0, 1))
        samples = sample(
            policy, condition, key, grid, kernel, plan, torch.bfloat16, CUDA, keep_means=True
        )
        assert samples.final.device == samples.log_probs.device == CUDA
        assert samples.latents.shape == (2, 2, *policy.latent_shape)
        again = denoise.replay(policy, block(samples, grid, condition, CUDA), kernel)
        assert again.log_prob.shape == samples.log_probs.shape
        assert (again.log_prob.dtype, again.log_prob.device) == (torch.float32, CUDA)

        policy.adapter.only_generate()
        own = policy.adapter.trained_parameters()
        adopt(
            own,
            Version(
                1,
                "",
                {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in own.items()},
            ),
        )
        assert {value.device for value in own.values()} == {CUDA}

        positive = {
            name: value.cpu() for name, value in condition.items() if not name.startswith(NEGATIVE)
        }
        policy.codec._embeddings |= dict.fromkeys(
            itertools.chain(*policy.codec.branch_wordings([PROMPT])), positive
        )
        scores: list[Tensor] = []

        def score(
            media: Tensor, prompts: list[Prompt], heldout: bool, sound: None
        ) -> dict[str, Tensor]:
            scores.append(scorer(media.to(CUDA), prompts))
            return {"clip": scores[-1].cpu()}

        rewards: Any = SimpleNamespace(
            score=score, placement="inline", pending=1, needs_sound=lambda heldout: False
        )
        sampling = SamplingSpec(steps, torch.bfloat16, same_noise=False, eval_steps=None)
        engine = RolloutEngine(policy, rewards, kernel, AllButLast(), sampling, seed=0)
        found = engine.evaluate_prompts([PROMPT], 2, seed=1, steps=1)
        frames = () if policy.codec.temporal_stride is None else (policy.codec.frames,)
        assert tuple(found.media.shape) == (2, *frames, 3, 256, 256)
        assert (scores[0].device, tuple(scores[0].shape), scores[0].dtype) == (
            CUDA,
            (2,),
            torch.float32,
        )


class Copies(TorchDispatchMode):
    """Counts copies from the host to the GPU for which the host waits for all work before them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default and not given.get("non_blocking"):
            to = given.get("device")
            self.blocking += args[0].device.type == "cpu" and to is not None and to.type == "cuda"
        return func(*args, **given)


def test_a_denoising_step_waits_for_no_copy_and_reads_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted after the first step of a task, which brings the conditioning and the grid."""
    policy = real("flux", True, offload_encoders=False)
    for blocks in (
        policy.transformer.transformer_blocks,
        policy.transformer.single_transformer_blocks,
    ):
        del blocks[2:]  # the others would show nothing more
    grid = policy.sigma_grid(4)
    policy.sigma_grid = lambda steps: grid
    monkeypatch.setattr(accelerator, "is_own", lambda device: device.type == "cuda")
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)  # asks for a driver
    rewards: Any = SimpleNamespace(placement="inline", pending=1, weights={}, names=())
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        place(policy, CUDA)
        policy.keep_padding(True)
        positive = {
            name: value.cpu()
            for name, value in conditioning(policy).items()
            if not name.startswith(NEGATIVE)
        }
        policy.codec._embeddings |= dict.fromkeys(
            itertools.chain(*policy.codec.branch_wordings([PROMPT])), positive
        )
        encode, encoded = policy.codec.encode, list[int]()
        monkeypatch.setattr(policy.codec, "encode", lambda ps: encoded.append(1) or encode(ps))
        sampling = SamplingSpec(4, torch.bfloat16, same_noise=False, eval_steps=None)
        engine = RolloutEngine(policy, rewards, FlowSDE(0.7), AllButLast(), sampling, seed=0)
        task = Task(step=0, index=0, group=0, first_sample=0, samples=2, version=0)
        generation = engine.take_step(engine.begin_task(task, PROMPT))
        encoded.clear()
        with Copies() as copies:
            for _ in range(2):
                generation = engine.take_step(generation)
    assert copies.blocking == 0
    assert encoded == []


def test_a_launch_is_an_operator_that_makes_or_fills_a_tensor() -> None:
    with FakeTensorMode(), Launches() as counted:
        made = torch.empty(4, 4, device=CUDA)
        (made @ made).t().reshape(2, 8).detach()[0].add_(1)  # a product, a copy, a sum
    assert counted.count == 3


def test_a_small_decoder_stays_on_the_device() -> None:
    """The VAE of FLUX has 84 million parameters: its two moves would take a fifth of a task."""
    assert decoder_moves("flux", tasks=2) == [CUDA]


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILY)
def test_text_encoders_stay_on_the_device(model: str) -> None:
    """The whole pipeline where it counts no tokens; otherwise the networks in it."""
    usual = OmegaConf.load(config_directory() / "model" / f"{model}.yaml").max_sequence_length
    words = ("model.offload_encoders=false", f"model.max_sequence_length={usual}")
    settings = composed(model, REAL, *Build().words, *words).settings.tree.model
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        mock.patch.object(nn.Module, "_apply", plainly),
        fake,
        random_weights(model, REAL, CUDA),
        torch.no_grad(),
    ):
        policy = configuration.instantiate(settings)
        if not ROWS[FAMILY[model]].counts_tokens:
            encoded = policy.codec.encode_prompts(policy.codec.branch_wordings([PROMPT])[0])
            expected = {name: (1, *shape) for name, shape in shapes(policy).items()}
            assert {name: tuple(value.shape) for name, value in encoded.items()} == expected
        else:
            tokens = torch.ones(1, 300, dtype=torch.int64, device=CUDA)
            states = policy.codec._pipeline.text_encoder(
                tokens, attention_mask=tokens, output_hidden_states=True
            )
            encoded = {"text": states.hidden_states[-1]}
            assert encoded["text"].shape == (1, 300, shapes(policy)["text"][1])
        assert {value.device for value in encoded.values()} == {CUDA}
        assert {value.dtype for value in encoded.values() if value.is_floating_point()} == {
            torch.bfloat16
        }


@pytest.mark.slow
@CHEAPEST
@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "all"])
def test_every_trained_weight_gets_a_gradient_of_its_shape_and_dtype(
    family: str, lora: bool
) -> None:
    """A replayed block of two samples and two steps; where all weights are trained, layers are
    computed again in the backward pass. On a processor that does not exist either, because autograd
    asks CUDA for its driver."""
    ensure(family)
    processor, grid = torch.device("cpu"), torch.linspace(1.0, 0.0, 4)
    policy = real(family, lora, gradient_checkpointing=not lora, **guidance(family)).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        place(policy, processor)
        latents = torch.empty(2, 2, *policy.latent_shape, dtype=torch.bfloat16)
        samples = denoise.FinishedSamples(
            torch.arange(2), latents, latents, torch.empty(2, 2), latents[:, 0]
        )
        condition = conditioning(policy, processor)
        replayed = denoise.replay(policy, block(samples, grid, condition, processor), FlowSDE(0.7))
        assert (replayed.log_prob.shape, replayed.log_prob.dtype) == ((2, 2), torch.float32)
        replayed.log_prob.sum().backward()
    assert policy.adapter.parameters_without_gradient() == []
    for name, parameter in policy.adapter.trained_parameters().items():
        assert parameter.grad is not None
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, torch.float32), (
            name
        )
