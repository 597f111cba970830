"""Flow-GRPO on one page: all that digenrl computes in the digits run, without what makes it fast.

A small flow model draws 8x8 digits and often ignores its prompt. Reinforcement learning teaches it
to draw the digit that the prompt asks for. An RL step draws 16 samples of each prompt, scores them
with a judge, and makes the better ones likelier. Read the page from top to bottom, and run it:

    python examples/grpo_in_one_file.py        5 RL steps, in fifteen seconds
    python examples/grpo_in_one_file.py 40     `make train EXP=digits_flowgrpo`, two minutes

The page is the specification. A run on many processes has the samples, rewards and gradients that
are computed here (tests/test_grpo_in_one_file.py). docs/design.md, section 4, walks the same way
through the system; docs/algorithms.md has the formulas of the other algorithms. Only data and what
was trained before is borrowed: the network, its weights, the features of its text, the judges.

Shapes: P prompts of an RL step, G samples of a prompt (its group), T denoising steps, B rows of a
forward. A picture is [1, H, W] with H = W = 8. A latent is [N, C]: N = 16 tokens of C = 4 pixels.

Rectified flow (Liu et al., arXiv 2209.03003): x = (1 - s) x_0 + s e mixes data x_0 and noise e, and
sigma s falls from 1 to 0 along a trajectory. The network gives the velocity v = e - x_0. Therefore
x - s v is its guess of the data, and x + (1 - s) v is its guess of the noise.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import Module

from digenrl.extensions.tasks.digits import BASE_FILE, build_transformer, text_features
from reward_models.digit_judge import JUDGES_FILE, build_judge


# ---- 1. Settings: what an experiment chooses. The values are those of experiment=digits_flowgrpo.
@dataclass(frozen=True)
class Settings:
    """The numbers of one experiment."""

    seed: int = 0
    prompts_per_batch: int = 10  # P
    group_size: int = 16  # G
    steps: int = 6  # T
    noise_level: float = 0.9  # a: how far a denoising step explores
    clip_range: float = 5e-3  # c: how far an RL step may change the likelihood of a sample
    kl_weight: float = 0.25  # holds the policy near its base, so that samples stay diverse
    updates_per_batch: int = 2  # optimizer updates of an RL step; each takes P / 2 groups
    max_grad_norm: float = 1.0
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_targets: tuple[str, ...] = (  # each matches the end of a linear layer's name
        r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
        r"ff\.net\.(0\.proj|2)",
        r"single_transformer_blocks\.\d+\.(proj_mlp|proj_out)",
        r"proj_out",
    )


# ---- 2. Prompts: each RL step takes P of them. A hash gives their order, the same everywhere.
@dataclass(frozen=True)
class Prompt:
    """A line of the prompt file: "number zero" to "number nine"."""

    text: str
    digit: int
    uid: int  # a hash of the content, so that a file in another order gives the same samples


def digest(text: str, size: int = 16) -> bytes:
    """Return the BLAKE2b hash of `text`."""
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def load_prompts() -> list[Prompt]:
    """Return all prompts."""
    prompts = []
    for line in files("digenrl").joinpath("prompts/digits.jsonl").read_text().splitlines():
        text, digit = json.loads(line).values()
        content = json.dumps([text, None, digit, {}])  # no negative prompt, no further fields
        prompts.append(Prompt(text, int(digit), int.from_bytes(digest(content, 8), "big") >> 1))
    return prompts


def prompts_of_step(settings: Settings, rl_step: int) -> list[Prompt]:
    """Return the P prompts of an RL step. An epoch is a permutation of all; P must divide them."""
    prompts, size = load_prompts(), settings.prompts_per_batch
    epoch, batch = divmod(rl_step, len(prompts) // size)
    prompts.sort(key=lambda prompt: digest(f"{settings.seed}/{epoch}/{prompt.uid}"))
    return prompts[batch * size : (batch + 1) * size]


# ---- 3. Noise: the key of a number says what it is for. Whoever draws it draws the same.
def generator(seed: int, *parts: int | str) -> np.random.Generator:
    """Return the numbers for one purpose (Philox: Salmon et al., SC'11)."""
    key = digest("\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in parts)]))
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))


def noise(seed: int, use: str, rl_step: int, prompt: Prompt, samples: int, step: int) -> Tensor:
    """Return normal noise [B, N, C] of a step, -1: the beginning."""
    draws = [generator(seed, use, rl_step, prompt.uid, n, step) for n in range(samples)]
    return torch.from_numpy(np.stack([draw.standard_normal((16, 4), np.float32) for draw in draws]))


# ---- 4. Policy: the base network, which is frozen, and small adapters in it, which are trained.
class LoRA(Module):
    """LoRA (Hu et al., arXiv 2106.09685): y = W x + (alpha / rank) B A x, with B = 0 at first."""

    def __init__(self, name: str, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        drawn = generator(0, "lora_A", name).standard_normal((rank, base.in_features), np.float32)
        self.lora_A.weight.data = torch.from_numpy(drawn) / rank
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        y, low, up = self.base(x), self.lora_A(x), self.lora_B.weight * self.scale
        return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), up.t()).view(y.shape)


def build_policy(settings: Settings) -> Module:
    """Return the policy before training. With B = 0 it computes what the base model computes."""
    network = build_transformer().eval().requires_grad_(False)  # FLUX.1's kind, 312 k weights
    network.load_state_dict(load_file(BASE_FILE))
    targets = re.compile(rf"(.*\.)?({'|'.join(settings.lora_targets)})")
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.Linear) and targets.fullmatch(name):
            network.set_submodule(name, LoRA(name, layer, settings.lora_rank, settings.lora_alpha))
    return network


def velocity(network: Module, x: Tensor, s: Tensor, prompt: Prompt) -> Tensor:
    """Return v [B, N, C] of latents x [B, N, C] at noise levels s [B, 1, 1]."""
    found, places = text_features([prompt.text]), torch.arange(4.0)
    text, bag = (found[name].expand(len(x), *found[name].shape[1:]) for name in ("text", "pooled"))
    image_places = torch.cartesian_prod(torch.zeros(1), places, places)  # (0, row, column) [N, 3]
    word_places = torch.zeros(text.shape[1], 3)
    return network(x, text, bag, s.flatten(), image_places, word_places, return_dict=False)[0]


# ---- 5. Sampling: T denoising steps. A step with noise is a Gaussian, so it has a likelihood.
Gaussian = tuple[Tensor, Tensor]  # mean [B, N, C] and deviation [B, 1, 1]


def sigma(settings: Settings, step: int, rows: int) -> Tensor:
    """Return the noise level before a denoising step, [B, 1, 1]; that of step T is 0."""
    return torch.full((rows, 1, 1), 1.0 - step / settings.steps)


def transition(net: Module, settings: Settings, x: Tensor, step: int, prompt: Prompt) -> Gaussian:
    """Return the Gaussian of the next latents (Flow-GRPO: Liu et al., arXiv 2505.05470).

        mean = x - h v - h std^2 / (2 s) (x + (1 - s) v), deviation = std sqrt(h), h = s - next s
    Here std = a sqrt(s / (1 - s)). The first step, where 1 - s is 0, has 1 - next s in its place.
    Sampling and replay both call this, so the ratio of an unchanged policy is exactly 1.
    """
    s, after, guard = (sigma(settings, k, len(x)) for k in (step, step + 1, max(step, 1)))
    v, std = velocity(net, x, s, prompt), settings.noise_level * torch.sqrt(s / (1.0 - guard))
    mean = x + v * (after - s) + std**2 / (2.0 * s) * (x + (1.0 - s) * v) * (after - s)
    return mean, std * torch.sqrt(s - after)


def log_prob(value: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the Gaussian's log-density at `value`, a mean over the N x C dimensions, [B]."""
    density = -((value - mean) ** 2) / (2.0 * deviation**2) - torch.log(deviation)
    return (density - 0.5 * math.log(2.0 * math.pi)).flatten(1).mean(dim=1)


@dataclass(frozen=True)
class Group:
    """G trajectories of one prompt."""

    prompt: Prompt
    latents: Tensor  # [T, G, N, C]: what the network saw at each denoising step
    log_probs: Tensor  # [T - 1, G]: of each latent after the first, under the policy that drew it
    rewards: Tensor  # [G]


@torch.no_grad()
def draw(policy: Module, judge: Module, settings: Settings, rl_step: int, prompt: Prompt) -> Group:
    """Draw and score G samples. The last step has no noise, so it has no likelihood to train."""
    key = (settings.seed, "rollout", rl_step, prompt, settings.group_size)
    latents, log_probs = [noise(*key, -1)], []
    for step in range(settings.steps - 1):
        mean, deviation = transition(policy, settings, latents[-1], step, prompt)
        latents.append(mean + deviation * noise(*key, step))
        log_probs.append(log_prob(latents[-1], mean, deviation))
    s = sigma(settings, settings.steps - 1, settings.group_size)
    clean = latents[-1] - s * velocity(policy, latents[-1], s, prompt)
    rewards = judge(pictures(clean)).softmax(dim=1)[:, prompt.digit]
    return Group(prompt, torch.stack(latents), torch.stack(log_probs), rewards)


# ---- 6. Reward and advantage: the judge's probability of the asked digit, within each group.
def pictures(latents: Tensor) -> Tensor:
    """Return pictures [B, 1, 8, 8] in [0, 1]: 4x4 tokens of 2x2 pixels, side by side."""
    pixels = latents.view(-1, 4, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(-1, 1, 8, 8)
    return (pixels / 2 + 0.5).clamp(0.0, 1.0)


def load_judge(name: str) -> Module:
    """Return judge "a", the reward, or "b", which learned from other digits and only looks on."""
    judge, weights = build_judge().eval().requires_grad_(False), load_file(JUDGES_FILE)
    judge.load_state_dict({key[2:]: value for key, value in weights.items() if key[0] == name})
    return judge


def group_advantages(rewards: Tensor) -> Tensor:
    """Return (r - mean) / (std + 1e-4), at most 5, [G] (GRPO: Shao et al., arXiv 2402.03300)."""
    if rewards.min() == rewards.max():  # such a group teaches nothing
        return torch.zeros_like(rewards)
    centred = rewards.double() - rewards.double().mean()
    return (centred / (centred.square().mean().sqrt() + 1e-4)).clamp(-5.0, 5.0).float()


# ---- 7. Loss: make good steps likelier, a little at a time, and stay near the base model.
def losses(policy: Module, base: Module, settings: Settings, group: Group, step: int) -> Tensor:
    """Replay a denoising step under the present weights; return the loss of each sample, [G].

        max(-A r, -A clamp(r, 1 - c, 1 + c)) + kl_weight KL, where r = exp(new - old log-prob)
    Beyond the clip there is no gradient (PPO: Schulman et al., arXiv 1707.06347). Policy and base
    have the same deviation, so that KL(policy || base) = |mean - base_mean|^2 / (2 deviation^2).
    """
    with torch.no_grad():
        base_mean, _ = transition(base, settings, group.latents[step], step, group.prompt)
    mean, deviation = transition(policy, settings, group.latents[step], step, group.prompt)
    ratio = torch.exp(log_prob(group.latents[step + 1], mean, deviation) - group.log_probs[step])
    clipped = ratio.clamp(1.0 - settings.clip_range, 1.0 + settings.clip_range)
    advantages = group_advantages(group.rewards)
    kl = (mean - base_mean).square().flatten(1).mean(dim=1) / (2.0 * deviation.flatten() ** 2)
    return torch.maximum(-advantages * ratio, -advantages * clipped) + settings.kl_weight * kl


# ---- 8. Training: an RL step samples all groups with one policy, then updates it a few times.
def gradients(policy: Module, base: Module, settings: Settings, groups: Sequence[Group]) -> dict:
    """Set the gradient of the mean loss of these groups' samples and steps; return it by name."""
    policy.zero_grad()
    cells = len(groups) * settings.group_size * (settings.steps - 1)
    for group in groups:
        for step in range(settings.steps - 1):
            (losses(policy, base, settings, group, step).sum() / cells).backward()
    return {n: w.grad.clone() for n, w in policy.named_parameters() if w.grad is not None}


def train(settings: Settings, rl_steps: int) -> Iterator[tuple[Module, list[Group], list[dict]]]:
    """Train; yield after each RL step the policy, the groups, and the gradient of each update."""
    policy, base, judge = build_policy(settings), build_policy(settings), load_judge("a")
    chosen = settings.lr, settings.betas, settings.eps, settings.weight_decay
    optimizer = torch.optim.AdamW(policy.parameters(), *chosen)
    for number in range(rl_steps):
        prompts, found = prompts_of_step(settings, number), []
        groups = [draw(policy, judge, settings, number, prompt) for prompt in prompts]
        size = len(groups) // settings.updates_per_batch
        for first in range(0, len(groups), size):
            found.append(gradients(policy, base, settings, groups[first : first + size]))
            nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
        yield policy, groups, found


# ---- 9. Evaluation: another judge looks at samples of the same beginnings, without further noise.
@torch.no_grad()
def heldout_score(network: Module, settings: Settings, rows: int = 50) -> float:
    """Return the share of samples in which judge B sees the asked digit."""
    judge, seen = load_judge("b"), []
    for prompt in load_prompts():
        x = noise(1234, "evaluation", 0, prompt, rows, -1)
        for step in range(settings.steps):
            s, after = sigma(settings, step, rows), sigma(settings, step + 1, rows)
            x = x + velocity(network, x, s, prompt) * (after - s)
        seen.append(judge(pictures(x)).argmax(dim=1) == prompt.digit)
    return float(torch.cat(seen).float().mean())


def main() -> None:
    """Print the mean reward of each RL step, and the held-out score of the policy after it."""
    torch.set_num_threads(1)  # the network is small, and sums in another order round differently
    settings, rl_steps = Settings(), int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"before: held-out score {heldout_score(build_policy(settings), settings):.3f}")
    for number, (policy, groups, _) in enumerate(train(settings, rl_steps)):
        reward = torch.cat([group.rewards for group in groups]).mean()
        after = heldout_score(policy, settings)
        print(f"RL step {number}: mean reward {reward:.3f}, held-out score {after:.3f}", flush=True)


if __name__ == "__main__":
    main()
