"""Samples from files (`data.samples=files`): supervised fine-tuning and offline DPO."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from digenrl import config as configuration
from digenrl import prompts
from digenrl.algorithms.advantages import Advantage
from digenrl.algorithms.base import PolicyModule
from digenrl.config import ConfigError
from digenrl.config.settings import Settings
from digenrl.data import load_prompts
from digenrl.diffusion.sde import FlowSDE
from digenrl.extensions.methods import dpo, sft
from digenrl.extensions.methods import forward_losses as losses
from digenrl.extensions.methods.noise_levels import NoiseLevels
from digenrl.extensions.methods.noised import noise_cells
from digenrl.extensions.tasks.digits import DigitsPolicy, pack_latents
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout.engine import SamplingSpec
from digenrl.rollout.files import FileEngine, file_of
from digenrl.schedule import Task
from digenrl.types import CellBlock, Prompt
from reward_models.digit_judge import judge_half
from scripts import draw_digits
from tests.algorithms.fit import ADAMW
from tests.algorithms.test_objectives import SHAPE, normal
from tests.algorithms.toy_policy import ToyPolicy, batch, roll
from tests.strategy.processes import TINY, assert_same_cells, completed, run_cluster

SCORER = {"_target_": "reward_models.digit_judge.DigitJudge", "judge": "b", "output": "accuracy"}
LORA = {"rank": 4, "alpha": 8, "targets": [r"attn\.to_q", r"ff\.net\.2"]}
EXPERIMENTS = ("digits_sft", "digits_offline_dpo")


def made(kind: type[PolicyModule], policy: Any, **changes: Any) -> Any:
    return kind(
        policy,
        sde=FlowSDE(0.0),
        train_steps=NoiseLevels(size=3),
        optimizer=ADAMW,
        advantage=Advantage(),
        updates_per_batch=1,
        max_grad_norm=1.0,
        ema=None,
        seed=0,
        **changes,
    )


def configured(experiment: str, *words: str) -> Settings:
    return configuration.load([f"experiment={experiment}", *TINY[1:], *words]).settings


# ---- the losses


def flow_matching_by_hand(velocity: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
    found = torch.zeros(velocity.shape[:2], dtype=torch.float64)
    for b, k in np.ndindex(*velocity.shape[:2]):
        errors = [
            (float(v) - (float(e) - float(x))) ** 2
            for v, e, x in zip(
                velocity[b, k].flatten(), noise[b, k].flatten(), clean[b, 0].flatten(), strict=True
            )
        ]
        found[b, k] = sum(errors) / len(errors)
    return found


def test_flow_matching_loss_equals_a_loop_over_numbers() -> None:
    velocity, noise, clean = (
        normal(3, 2, *SHAPE),
        normal(3, 2, *SHAPE, seed=1),
        normal(3, 1, *SHAPE, seed=2),
    )
    by_hand = flow_matching_by_hand(velocity, noise, clean)
    torch.testing.assert_close(
        losses.flow_matching_loss(velocity, noise, clean), by_hand, atol=1e-13, rtol=0
    )
    exact = losses.flow_matching_loss(noise - clean, noise, clean)
    assert float(exact.abs().max()) == 0.0
    with pytest.raises(AssertionError):  # the velocity points from data to noise
        torch.testing.assert_close(losses.flow_matching_loss(-velocity, noise, clean), by_hand)


def test_fine_tuning_is_the_mean_over_all_cells_and_takes_no_notice_of_rewards() -> None:
    policy = ToyPolicy(torch.float64)
    blocks = roll(policy, FlowSDE(0.0), NoiseLevels(size=3), storage=torch.float64)
    expected = []
    for block in blocks:
        cells = noise_cells(block, range(4), range(4), 0, sft.STREAM)
        with torch.no_grad():
            expected.append(
                flow_matching_by_hand(cells.predict_velocity(policy), cells.noise, cells.clean)
            )
    module = made(sft.Supervised, policy)
    wanted = float(torch.cat(expected).mean())
    for rewards in (torch.rand(2, 4), torch.zeros(2, 4)):
        loss = module.training_step(batch(blocks, rewards), 0)
        assert float(loss.detach()) == pytest.approx(wanted, rel=1e-6)
        assert module.useful_samples({"r": rewards}, {"r": 1.0}).all()
        assert module.teaching_groups({"r": rewards}, {"r": 1.0}).all()


def test_offline_dpo_prefers_even_samples_to_odd_ones() -> None:
    """Against the formula written out, at weights that are not the reference's."""
    policy, beta = ToyPolicy(torch.float64), 7.0
    with torch.no_grad():
        policy.transformer[2].weight.add_(0.3)
    blocks = roll(policy, FlowSDE(0.0), NoiseLevels(size=3), storage=torch.float64)
    losses_by_hand = []
    for block in blocks:
        cells = noise_cells(block, [0, 2, 1, 3], [0, 1, 0, 1], 0, dpo.STREAM)
        with torch.no_grad():
            error = flow_matching_by_hand(cells.predict_velocity(policy), cells.noise, cells.clean)
            with policy.adapter.reference():
                base = flow_matching_by_hand(
                    cells.predict_velocity(policy), cells.noise, cells.clean
                )
        for pair, k in np.ndindex(2, 3):
            better = float(error[pair, k] - base[pair, k])
            worse = float(error[pair + 2, k] - base[pair + 2, k])
            losses_by_hand.append(math.log1p(math.exp(beta / 2 * (better - worse))))
    module = made(dpo.OfflineDPO, policy, beta=beta)
    for rewards in (torch.rand(2, 4), torch.zeros(2, 4)):  # rewards do not matter
        loss = module.training_step(batch(blocks, rewards), 0)
        assert float(loss.detach()) == pytest.approx(float(np.mean(losses_by_hand)), rel=1e-6)
        assert module.teaching_groups({"r": rewards}, {"r": 1.0}).all()
    assert float(np.mean(losses_by_hand)) != pytest.approx(math.log(2.0), abs=1e-3)


def test_offline_dpo_goes_by_the_number_of_a_sample_not_by_its_row() -> None:
    policy = ToyPolicy()
    block = roll(policy, FlowSDE(0.0), NoiseLevels(size=3))[0]
    shifted = CellBlock(**{**vars(block), "rows": (3, 4, 5, 6)})
    better, worse, counts = made(dpo.OfflineDPO, policy).pair_samples(shifted, torch.zeros(4))
    assert (better, worse, counts.tolist()) == ([1, 3], [0, 2], [True, True])


# ---- the engine


def engine(policy: DigitsPolicy) -> FileEngine:
    rewards = RewardSuite({"judge": {"scorer": SCORER}}, placement="inline")
    spec = SamplingSpec(6)
    return FileEngine(
        policy, rewards, FlowSDE(0.0), NoiseLevels(size=3), spec, seed=5, keep_final=True
    )


def drawn(policy: DigitsPolicy, prompt: Prompt, samples: int = 16) -> CellBlock:
    """All samples of a group as a block."""
    reader, task = engine(policy), Task(0, 0, 0, 0, samples, 0)
    generation = reader.begin_task(task, prompt)
    taken = 0
    while reader.steps_left(generation):
        generation, taken = reader.take_step(generation), taken + 1
    assert taken == 1
    found = reader.score(generation, reader.decode(generation)).result()
    assert found.rewards["judge"].shape == (samples,)
    own = {name: value for name, value in vars(found).items() if name not in ("index", "rewards")}
    return CellBlock(**own)


def test_a_group_is_the_pictures_of_its_line() -> None:
    policy, prompt = DigitsPolicy(), load_prompts("digits_sft.jsonl")[4]
    final = drawn(policy, prompt).final
    assert final is not None
    images, labels = judge_half("a")
    real = images[labels == 4][:16]
    assert_same_pictures(policy.codec.decode(final), real)
    assert not torch.equal(policy.codec.decode(final), real)  # shuffled


def assert_same_pictures(found: Tensor, real: Tensor) -> None:
    """The same pictures in any order, to the 8 bits of a file."""
    distances = (found[:, None] - real[None]).abs().flatten(2).amax(2)
    assert float(distances.amin(1).max()) <= 1 / 255 + 1e-6
    assert sorted(distances.argmin(1).tolist()) == list(range(len(real)))


def test_even_samples_are_preferred_and_odd_ones_rejected() -> None:
    prompt = load_prompts("digits_preferences.jsonl")[4]
    block = drawn(DigitsPolicy(), prompt)
    for number in range(16):
        role = file_of(prompt, number, 5, 0).role
        assert role == ("preferred", "rejected")[number % 2]
    assert block.samples == 16


def test_a_file_returns_when_all_were_taken_and_in_another_order() -> None:
    prompt = load_prompts("digits_sft.jsonl")[0]
    for step in range(3):
        first = [file_of(prompt, number, 0, step).digest for number in range(16)]
        assert set(Counter(first).values()) == {1}
        assert file_of(prompt, 16, 0, step).digest == first[0]
    assert [file_of(prompt, n, 0, 0).digest for n in range(16)] != [
        file_of(prompt, n, 0, 1).digest for n in range(16)
    ]


@pytest.mark.parametrize("kind", [sft.Supervised, dpo.OfflineDPO])
def test_gradients_reach_every_weight_of_the_real_network(kind: type[PolicyModule]) -> None:
    """A few updates also lower the loss on the same pictures and noise."""
    policy = DigitsPolicy(lora=LORA)
    name = "digits_sft.jsonl" if kind is sft.Supervised else "digits_preferences.jsonl"
    block = drawn(policy, load_prompts(name)[4], samples=4)
    module = made(kind, policy, **({} if kind is sft.Supervised else {"beta": 50.0}))
    optimizer, found = module.configure_optimizers(), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = module.training_step(batch([block]), 0)
        loss.backward()
        assert policy.adapter.parameters_without_gradient() == []
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
        found.append(float(loss.detach()))
    assert found[-1] < found[0] - 0.01


def test_the_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    for name, lines in draw_digits.drawn(tmp_path).items():
        assert (prompts.DIRECTORY / name).read_text() == "\n".join(lines) + "\n"
    for path in sorted((prompts.DIRECTORY / "digits").iterdir()):
        assert np.array_equal(
            np.asarray(Image.open(path)), np.asarray(Image.open(tmp_path / "digits" / path.name))
        )


def test_a_picture_survives_the_way_into_latents_and_back(tmp_path: Path) -> None:
    image, policy = load_prompts("digits_sft.jsonl")[7].images[0], DigitsPolicy()
    with Image.open(image.path) as opened:
        pixels = torch.from_numpy(np.asarray(opened, dtype=np.float32))[None, None] / 255
    latents = policy.codec.encode_media([image])
    torch.testing.assert_close(latents, pack_latents(2 * pixels - 1))
    torch.testing.assert_close(policy.codec.decode(latents), pixels)


# ---- what is refused


def lines_file(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "asked.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    Image.new("L", (8, 8), 120).save(folder / "grey.png")
    return path


GREY = {"prompt": "number four", "media": "grey.png"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "media": "none.png"}, r"asked.jsonl:2: media = none.png: cannot be read"),
        ({"prompt": "a", "media": ["grey.png", 3]}, r"asked.jsonl:2: media = 3 must be text"),
        ({"prompt": "a", "media": "asked.jsonl"}, r"asked.jsonl:2: media = asked.jsonl: is no"),
        ({"prompt": "a", "prefered": "grey.png"}, r'"prefered"; nearest: preferred'),
        ({"prompt": "a", "image": ["grey.png"]}, r'image = \["grey.png"\] must be text'),
        ({"prompt": "a"}, r"needs media in every line, and .*asked.jsonl:2 names no file; change"),
        (
            {"prompt": "a", "preferred": "grey.png", "rejected": "grey.png"},
            r"needs media in every line, and .*asked.jsonl:2 names preferred, rejected; change",
        ),
    ],
)
def test_a_bad_line_is_named_before_anything_starts(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    path = lines_file(tmp_path, GREY, line)
    with pytest.raises(ConfigError, match=message):
        configured("digits_sft", f"data.prompts={path}", "data.prompts_per_batch=2")


def test_preferences_need_both_kinds(tmp_path: Path) -> None:
    path = lines_file(tmp_path, {"prompt": "a", "preferred": "grey.png"}, GREY)
    with pytest.raises(
        ConfigError,
        match=r"OfflineDPO .* preferred and rejected in every .*asked.jsonl:1 names preferred; change",
    ):
        configured("digits_offline_dpo", f"data.prompts={path}", "data.prompts_per_batch=1")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_training_on_own_samples_would_teach_nothing(experiment: str) -> None:
    with pytest.raises(ConfigError, match=r"data.samples = generated: .* set data.samples=files"):
        configured(experiment, "data.samples=generated")


def test_what_does_not_go_with_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="a file has no denoising steps to train; use algorithm"):
        configured("digits_flowgrpo", "data=digits_sft")
    with pytest.raises(ConfigError, match=r"sampling.scouts.candidates = 2: nothing is generated"):
        configured("digits_sft", "sampling.scouts.candidates=2")
    with pytest.raises(ConfigError, match=r"task_size = 1 with .* such as 2"):
        configured("digits_offline_dpo", "sampling.task_size=1")


def test_a_family_that_cannot_read_pictures_says_so() -> None:
    policy = configuration.instantiate(
        configuration.load(["experiment=mixture_flowgrpo"]).settings.tree.model
    )
    with pytest.raises(ValueError, match=r"mixture has no `encode_media`.*data.samples=generated"):
        policy.codec.encode_media(load_prompts("digits_sft.jsonl")[0].images)


# ---- whole runs


@pytest.mark.processes
@pytest.mark.parametrize(
    "experiment",
    ["digits_sft", pytest.param("digits_offline_dpo", marks=pytest.mark.slow)],
)
def test_every_schedule_trains_the_same_files_with_the_same_gradient(
    tmp_path: Path, experiment: str
) -> None:
    """Colocated, and disaggregated over three ranks; two RL steps each."""
    together = completed(run_cluster(tmp_path / "0", 1, 0, configured(experiment)))
    apart = completed(
        run_cluster(tmp_path / "1", 1, 2, configured(experiment, "schedule=gap_tsp_tag"))
    )
    assert_same_cells(apart, together)
    assert len(together.gradients) == 2
    for ours, theirs in zip(together.gradients, apart.gradients, strict=True):
        assert max(float(value.abs().max()) for value in ours.values()) > 0
        for name, value in ours.items():
            torch.testing.assert_close(theirs[name], value, atol=1e-4, rtol=1e-3)
