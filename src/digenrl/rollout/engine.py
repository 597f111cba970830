"""The rollout engine: encode -> sample -> decode -> score -> `Trajectory`.

The engine runs unchanged on rollout ranks, on colocated ranks, on trainers that lend, and in
evaluation. It does not know which: the result of a task depends on the task, the seed and the
weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from digenrl import keys
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import Kernel
from digenrl.diffusion.steps import StepPlan, StepSelection
from digenrl.models.policy import Policy, wide_dtype
from digenrl.rewards.protocol import RewardError, laplacian, luma
from digenrl.rewards.scorer import AsyncScorer
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout import divergence
from digenrl.schedule import Task
from digenrl.types import Prompt, Sound, Trajectory, move_tensors

EVAL_STREAM = "evaluation"
"""Noise stream of evaluation: never the noise of any rollout."""


@dataclass(frozen=True)
class SamplingSpec:
    """The `sampling` group: how trajectories are made."""

    steps: int
    """T."""
    storage_dtype: torch.dtype = torch.float32
    """dtype of stored latents; log-probs are taken after rounding to it."""
    same_noise: bool = False
    """All samples of a group start from one noise (DanceGRPO)."""
    eval_steps: int = 0
    """ODE steps of evaluation; 0 = as in rollouts."""
    eval_guidance_scale: float | None = None
    """Guidance of an evaluation. None: as in rollouts."""
    eval_solver: denoise.Solver = "euler"
    eval_batch: int | None = None
    """Samples of evaluation at once, of one or more prompts; None = all of a prompt."""
    lora: str | None = None
    """Adapter of rollouts and evaluations that training leaves out (`Policy.sample_with`); None =
    no such adapter."""


@dataclass(frozen=True)
class Pictures:
    """Samples that an evaluation draws with fixed noise, and their scores; prompt-major."""

    media: Tensor
    """[N, C, H, W] or [N, F, C, H, W] on CPU: in [0, 1], or uint8 where they are kept."""
    prompts: tuple[Prompt, ...]
    """N prompts, one per row."""
    rewards: dict[str, Tensor]
    """name -> [N] fp32, held-out rewards included; NaN = missing."""
    kl: Tensor
    """[N] nats between policy and base model, on CPU (`rollout/divergence.py`); NaN = not
    measured."""
    noisy: Tensor
    """[N] detail of a sample of the row's prompt with the run's own noise, over that of the row;
    NaN = not measured."""
    sound: Sound | None = None
    """Sound of the N samples, on CPU; None unless a reward needs it."""


@dataclass(frozen=True)
class Generation:
    """A task on its way: it can be suspended between two denoising steps and finished on another
    rank (I12)."""

    task: Task
    prompt: Prompt
    state: denoise.SampleState


@torch.no_grad()
def ode_samples(
    policy: Policy,
    sampling: SamplingSpec,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    seed: int,
    steps: int | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Media as in `Pictures`; arguments as in `RolloutEngine.evaluate_prompts`. Model cards of
    exports call it."""
    asked = policy, sampling, prompts, samples_per_prompt, seed, steps, before_step
    return decoded_samples(*asked)[0]


@torch.no_grad()
def decoded_samples(
    policy: Policy,
    sampling: SamplingSpec,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    seed: int,
    steps: int | None = None,
    before_step: Callable[[], None] = lambda: None,
    listen: bool = False,
) -> tuple[Tensor, Sound | None]:
    """Media and, with `listen`, sound as in `Pictures`; other arguments as in
    `RolloutEngine.evaluate_prompts`."""
    if sampling.lora is not None:
        policy.sample_with(sampling.lora)
    grid = policy.sigma_grid(steps or sampling.eval_steps or sampling.steps)
    batches = fixed_batches(policy, sampling, prompts, samples_per_prompt, seed, EVAL_STREAM)
    sample = partial(
        denoise.ode_sample,
        policy,
        sigmas=grid,
        before_step=before_step,
        solver=sampling.eval_solver,
    )
    with policy.guided_by(sampling.eval_guidance_scale), policy.adapter.sampling():
        # Nothing is stored: fp32 between the steps, as a plain pipeline would have it.
        # To the host batch by batch: the device holds the media of one batch.
        media, sounds = list[Tensor](), list[Sound]()
        for condition, draw in batches:
            latents = sample(condition, draw(keys.INITIAL))
            media.append(policy.codec.decode(latents).cpu())
            if listen:
                sounds.append(move_tensors(policy.codec.decode_sound(latents), "cpu"))
    return torch.cat(media), join_sounds(sounds)


def join_sounds(parts: Sequence[Sound]) -> Sound | None:
    """Return the sound of all samples in `parts`; None without a part."""
    if not parts:
        return None
    return replace(parts[0], waveform=torch.cat([part.waveform for part in parts]))


def fixed_batches(
    policy: Policy,
    sampling: SamplingSpec,
    prompts: Sequence[Prompt],
    samples: int,
    seed: int,
    stream: str,
) -> Iterator[tuple[dict[str, Tensor], Callable[[int], Tensor]]]:
    """Yield conditioning and noise of `sampling.eval_batch` rows at a time. The rows are `samples`
    of each prompt. The function takes a denoising step, or `keys.INITIAL`, and returns [b, *L]."""
    rows = [(prompt, sample) for prompt in prompts for sample in range(samples)]
    size = sampling.eval_batch or samples
    for first in range(0, len(rows), size):
        batch = rows[first : first + size]

        # The default binds this round's rows: callers may draw after the loop has moved on.
        def draw_noise(step: int, batch: Sequence[tuple[Prompt, int]] = batch) -> Tensor:
            shape = policy.latent_shape
            noise = [keys.noise(seed, 0, p.uid, [row], step, shape, stream) for p, row in batch]
            return torch.cat(noise).to(policy.device, wide_dtype(sampling.storage_dtype))

        yield policy.codec.encode([prompt for prompt, _ in batch]), draw_noise


def picture_detail(media: Tensor) -> Tensor:
    """Return [N], the mean absolute Laplacian of the samples' brightness.

    Example:
        >>> flat, dot = torch.zeros(1, 3, 3), torch.zeros(1, 3, 3)
        >>> dot[0, 1, 1] = 1.0
        >>> (9 * picture_detail(torch.stack([flat, dot]))).round().tolist()  # 4 + 4 * 1
        [0.0, 8.0]
    """
    return laplacian(luma(media)).abs().mean((1, 2, 3))


class RolloutEngine:
    """Everything needed to turn a task into a trajectory.

    Args:
        policy: the model; its weights are whatever version its owner has adopted. It is put into
            evaluation mode, where it must stay: dropout would make replay differ from the rollout.
        rewards: the scorers.
        kernel: SDE transition, shared with replay.
        selection: which steps get noise and which are trained.
        sampling: grid, dtype and noise options.
        seed: the run's seed.
        keep_means: ship the rollout's transition means (GRPO-Guard, Flow-DPPO).
        keep_final: ship the clean latents (forward-process methods).
    """

    def __init__(
        self,
        policy: Policy,
        rewards: RewardSuite,
        kernel: Kernel,
        selection: StepSelection,
        sampling: SamplingSpec,
        seed: int,
        keep_means: bool = False,
        keep_final: bool = False,
    ) -> None:
        self.policy = policy.eval()
        if sampling.lora is not None:
            policy.sample_with(sampling.lora)
        self._rewards, self._kernel, self._selection = rewards, kernel, selection
        self.sampling, self.seed = sampling, seed
        self._keep_means, self._keep_final = keep_means, keep_final
        self.grid = policy.sigma_grid(sampling.steps)  # [T+1] fp32, CPU
        # The last prompt with its conditioning and the sigma grid, both on the device.
        self._read: tuple[Prompt, dict[str, Tensor], Tensor] | None = None
        self._scorer = AsyncScorer(rewards)

    @property
    def reward_weights(self) -> dict[str, float]:
        """name -> weight of the optimised rewards."""
        return {name: weight for name, weight in self._rewards.weights.items() if weight}

    @property
    def scores_inline(self) -> bool:
        """Whether `score` itself scores, instead of a thread beside it."""
        return self._rewards.placement == "inline"

    def begin_task(self, task: Task, prompt: Prompt) -> Generation:
        """Return a task before its first denoising step."""
        rows = tuple(range(task.first_sample, task.first_sample + task.samples))
        key = denoise.SampleKey(self.seed, task.step, prompt.uid, rows)
        shape, dtype = self.policy.latent_shape, self.sampling.storage_dtype
        return Generation(
            task,
            prompt,
            denoise.initial_state(key, shape, dtype, self.policy.device, self.sampling.same_noise),
        )

    def steps_left(self, generation: Generation) -> int:
        """Denoising steps that the task still needs."""
        return self.sampling.steps - generation.state.next_step

    def take_step(self, generation: Generation) -> Generation:
        """Take one denoising step of all rows."""
        before = generation.state
        condition, grid = self._network_inputs(generation.prompt)
        plan = self._step_plan(generation.task, generation.prompt)
        with self.policy.adapter.sampling():
            state = denoise.advance_state(
                self.policy, condition, before, grid, self._kernel, plan, self._keep_means
            )
        return replace(generation, state=state)

    def _network_inputs(self, prompt: Prompt) -> tuple[dict[str, Tensor], Tensor]:
        """Return the conditioning of a prompt and the sigma grid, on the policy's device. Those of
        the last prompt are kept: every denoising step of a task reads them."""
        if self._read is None or self._read[0] is not prompt:
            there = self.grid.to(self.policy.device)
            self._read = prompt, self.policy.codec.encode([prompt]), there
        return self._read[1:]

    @torch.no_grad()
    def decode(self, generation: Generation) -> Tensor:
        """Media of a task that has made all its steps: [b, C, H, W] or [b, F, C, H, W] in [0,
        1]."""
        return self.policy.codec.decode(generation.state.latents)

    @torch.no_grad()
    def hear(self, latents: Tensor) -> Sound | None:
        """Return the sound in finished latents [b, *L]; None unless a reward of rollouts needs
        it."""
        return self.policy.codec.decode_sound(latents) if self._rewards.needs_sound() else None

    def score(self, generation: Generation, media: Tensor) -> Future[Trajectory]:
        """Return a future of the finished trajectory, which resolves when its scores are there.
        Scoring runs beside the next task's generation."""
        task, prompt = generation.task, generation.prompt
        plan = self._step_plan(task, prompt)
        samples = denoise.finished_samples(generation.state, plan)
        prompts = [prompt] * task.samples
        unscored = Trajectory(
            rewards={},
            step=task.step,
            index=task.index,
            group=task.group,
            uid=prompt.uid,
            first_sample=task.first_sample,
            version=task.version,
            sigmas=self.grid,
            condition=self._network_inputs(prompt)[0],
            # Clean latents travel only where the algorithm trains on them.
            **vars(samples)
            | {"final": samples.final if self._keep_final or plan.forward_process else None},
        )
        finished: Future[Trajectory] = Future()

        # In the scorer's thread, if it has one.
        def deliver_scores(scored: Future[dict[str, Tensor]]) -> None:
            try:
                finished.set_result(replace(unscored, rewards=scored.result()))
            except BaseException as error:  # the one who waits for the trajectory must see it
                finished.set_exception(error)

        sound = self.hear(generation.state.latents)
        self._scorer.submit(media, prompts, sound=sound).add_done_callback(deliver_scores)
        return finished

    @torch.no_grad()
    def evaluate_prompts(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        seed: int,
        steps: int | None = None,
        before_step: Callable[[], None] = lambda: None,
        kl_samples: int = 0,
        noisy_too: bool = False,
    ) -> Pictures:
        """Draw ODE samples with noise that depends on (seed, prompt, sample) alone, and score them
        by every reward.

        Args:
            prompts: distinct prompts.
            samples_per_prompt: rows per prompt.
            seed: seed of the evaluation noise.
            steps: ODE steps; None = `sampling.eval_steps`.
            before_step: called before each of them; an exception ends the evaluation.
            kl_samples: number of samples of each prompt whose divergence from the base model is
                measured.
            noisy_too: whether a sample of the first prompt is drawn as rollouts do, for
                `Pictures.noisy`.
        """
        listen = self._rewards.needs_sound(heldout=True)
        asked = self.sampling, prompts, samples_per_prompt, seed, steps, before_step
        media, sound = decoded_samples(self.policy, *asked, listen)
        rows = tuple(prompt for prompt in prompts for _ in range(samples_per_prompt))
        kl = torch.full((len(prompts), samples_per_prompt), torch.nan)  # [prompts, samples]
        if kl_samples:
            drawn = fixed_batches(
                self.policy, self.sampling, prompts, kl_samples, seed, divergence.STREAM
            )
            with self.policy.adapter.sampling():
                moved = divergence.measure_divergence(self.policy, drawn, self.grid, before_step)
            kl[:, :kl_samples] = moved.view(len(prompts), kl_samples).cpu()
        noisy = torch.full((len(media),), torch.nan)  # [N], of which one is set
        made = self._noisy_sample(prompts[0], before_step) if noisy_too else None
        if made is not None:
            noisy[0] = picture_detail(made).cpu()[0] / picture_detail(media[:1]).clamp(min=1e-6)[0]
        scores = self._rewards.score(media, rows, heldout=True, sound=sound)
        return Pictures(media, rows, scores, kl.flatten(), noisy, sound)

    def _noisy_sample(self, prompt: Prompt, before_step: Callable[[], None]) -> Tensor | None:
        """Return media of one sample as rollouts draw it; None where they add no noise."""
        plan = self._selection.plan_steps(self.seed, 0, self.sampling.steps, prompt.uid)
        if not plan.sde:
            return None
        key = denoise.SampleKey(self.seed, 0, prompt.uid, (0,))
        shape, dtype = self.policy.latent_shape, self.sampling.storage_dtype
        state = denoise.initial_state(key, shape, dtype, self.policy.device)
        condition = self.policy.codec.encode([prompt])
        for _ in range(self.sampling.steps):
            before_step()
            with self.policy.adapter.sampling():
                state = denoise.advance_state(
                    self.policy, condition, state, self.grid, self._kernel, plan
                )
        return self.policy.codec.decode(state.latents)

    def _step_plan(self, task: Task, prompt: Prompt) -> StepPlan:
        return self._selection.plan_steps(self.seed, task.step, self.sampling.steps, prompt.uid)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the scorers; the batch in progress has `timeout_s` to end."""
        self._scorer.close(timeout_s)

    def reward_trouble(self) -> str | None:
        """Why the run should stop: more samples than `reward.max_missing_share` allows have no
        score; else None."""
        try:
            self._rewards.check_missing()
        except RewardError as error:
            return str(error)
        return None
