"""The evaluation callback inside a real Trainer: when it runs, what it writes, and that it changes
nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan as NAN
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from PIL import Image
from torch import Tensor, nn

from digenrl.callbacks import evaluation
from digenrl.callbacks.evaluation import Evaluation, eval_numbers, save_pictures
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.prompts import PromptFileError
from digenrl.report.pictures import read_samples
from digenrl.rewards.suite import RewardSuite
from digenrl.rollout.engine import RolloutEngine, SamplingSpec
from digenrl.rollout.evaluation import Pictures
from digenrl.types import Prompt
from reward_models.digit_judge import DigitStatistics
from tests.extensions.tasks.test_digits import perturbed

JUDGE = "reward_models.digit_judge.DigitJudge"


class WithEngine(SingleDeviceStrategy):
    """One device and an engine: what the callback needs of the Strategy."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(device="cpu")
        self.engine = engine


class Learner(pl.LightningModule):
    """Moves the policy's head a little in every epoch."""

    def __init__(self, policy: DigitsPolicy) -> None:
        super().__init__()
        self.head: nn.Module = policy.transformer.proj_out  # type: ignore[assignment]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return sum((p.sum() for p in self.head.parameters()), torch.zeros(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=1e-3)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("number one\nnumber seven\nnumber four\n")
    return path


def engine_of(policy: DigitsPolicy) -> RolloutEngine:
    rewards = RewardSuite(
        rewards={"judge_a": {"scorer": {"_target_": JUDGE, "judge": "a"}, "weight": 2.0}},
        heldout={"judge_b": {"scorer": {"_target_": JUDGE, "judge": "b", "output": "accuracy"}}},
        placement="inline",
    )
    return RolloutEngine(
        policy, rewards, FlowSDE(0.9), AllButLast(), SamplingSpec(steps=3, eval_steps=3), seed=0
    )


def train(
    run_dir: Path, evaluation: Evaluation | None, epochs: int = 5, logger: Logger | None = None
) -> DigitsPolicy:
    policy = DigitsPolicy()
    trainer = pl.Trainer(
        strategy=WithEngine(engine_of(policy)),
        max_epochs=epochs,
        callbacks=[evaluation] if evaluation else [],
        default_root_dir=run_dir,
        logger=logger or False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Learner(policy), torch.utils.data.DataLoader(torch.zeros(1, 1)))  # type: ignore[arg-type]
    return policy


def eval_lines(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "eval"]


def test_evaluates_before_between_and_after_and_writes_the_contract(
    tmp_path: Path, prompt_file: Path
) -> None:
    evaluation = Evaluation(
        prompt_file,
        samples_per_prompt=4,
        every=2,
        statistics=[DigitStatistics()],
        saved_per_prompt=2,
    )
    train(tmp_path, evaluation)
    lines = eval_lines(tmp_path)
    assert [line["rl_step"] for line in lines] == [0, 2, 4, 5]
    first = lines[0]
    assert first["reward"] == pytest.approx(2 * first["reward/judge_a"])
    assert first["heldout"] == first["heldout/judge_b"]
    assert first["samples"] == 12
    assert first["missing"] == 0
    assert 0.3 < first["diversity_ratio"] < 2.0
    assert first["nn_distance"] > 0
    kept = read_samples(tmp_path / "samples" / "eval-5.npz")
    assert kept.media.shape == (6, 1, 8, 8)
    assert kept.prompts == ("number one",) * 2 + ("number seven",) * 2 + ("number four",) * 2
    assert set(kept.scores) == {"judge_a", "judge_b"}


def test_the_same_noise_every_time_and_no_trace_in_training(
    tmp_path: Path, prompt_file: Path
) -> None:
    torch.manual_seed(0)
    plain = train(tmp_path / "plain", None, epochs=2)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    watched = train(
        tmp_path / "watched", Evaluation(prompt_file, samples_per_prompt=2, every=1), epochs=2
    )
    assert torch.equal(torch.get_rng_state(), state)
    for left, right in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(left, right)
    engine = engine_of(DigitsPolicy())
    again = Evaluation(prompt_file, samples_per_prompt=2).sample_share(engine)
    with np.load(tmp_path / "watched" / "samples" / "eval-0.npz") as stored:
        assert np.array_equal(stored["media"], again.media.numpy())
        assert not np.array_equal(
            np.load(tmp_path / "watched" / "samples" / "eval-2.npz")["media"], stored["media"]
        )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_share_the_prompts_equally_and_together_give_one_ranks_pictures(
    prompt_file: Path, ranks: int
) -> None:
    evaluation, engine = Evaluation(prompt_file, samples_per_prompt=2), engine_of(DigitsPolicy())
    whole = evaluation.sample_share(engine)
    parts = [evaluation.sample_share(engine, rank, ranks) for rank in range(ranks)]
    assert len({len(part.prompts) for part in parts}) == 1
    joined = torch.cat([part.media for part in parts])[: len(whole.prompts)]
    assert torch.equal(joined, whole.media)


def test_sampling_eval_decides_steps_and_solver(prompt_file: Path) -> None:
    """One noise, another way to the picture; a callback's own steps come before the group's."""
    engine, found = engine_of(DigitsPolicy()), []
    for changes in ({"eval_steps": 5}, {"eval_solver": "dpm2"}, {"eval_steps": 6}):
        engine.sampling = replace(engine.sampling, **changes)
        found.append(Evaluation(prompt_file, samples_per_prompt=2).sample_share(engine).media)
    found.append(Evaluation(prompt_file, samples_per_prompt=2, steps=5).sample_share(engine).media)
    assert not any(torch.equal(found[0], other) for other in found[1:3])
    assert torch.equal(found[3], found[1])


def test_sampling_eval_decides_how_many_are_made_at_once(prompt_file: Path) -> None:
    """The same pictures but for the rounding of another batch; never more rows in a forward."""
    engine, found = engine_of(DigitsPolicy()), []
    rows: list[int] = []
    engine.policy.transformer.register_forward_pre_hook(
        lambda module, args, given: rows.append(len(given["hidden_states"])), with_kwargs=True
    )
    for batch in (None, 2):
        engine.sampling = replace(engine.sampling, eval_batch=batch)
        found.append(Evaluation(prompt_file, samples_per_prompt=5).sample_share(engine).media.int())
    assert (found[0] - found[1]).abs().max() <= 1
    assert set(rows) == {5, 2, 1}


def test_a_batch_may_have_several_prompts(prompt_file: Path) -> None:
    """Pieces are equally large, and pictures and divergence the same but for rounding."""
    policy = perturbed(DigitsPolicy(lora={"rank": 2, "alpha": 4, "targets": ["to_q", "to_v"]}))
    engine, found, pieces = engine_of(policy), [], []
    rows: list[int] = []
    policy.transformer.register_forward_pre_hook(
        lambda module, args, given: rows.append(len(given["hidden_states"])), with_kwargs=True
    )
    for batch in (
        None,
        5,
        8,
        100,
    ):  # five samples are two of each prompt, and three prompts do not halve
        engine.sampling = replace(engine.sampling, eval_batch=batch)
        evaluation = Evaluation(prompt_file, samples_per_prompt=2, batch=batch)
        pieces.append([len(piece) for piece in evaluation.drawn.pieces])
        found.append(evaluation.sample_share(engine))
    assert pieces == [[1, 1, 1], [1, 1, 1], [3], [3]]
    assert set(rows) == {1, 2, 3, 6}
    for other in found[1:]:
        assert (other.media.int() - found[0].media.int()).abs().max() <= 1
        assert torch.allclose(other.kl, found[0].kl, rtol=1e-4, equal_nan=True)
        assert other.prompts == found[0].prompts
    assert bool((found[0].kl.nan_to_num() > 0).any())


def test_heldout_prompts_take_the_place_of_the_training_prompts(
    tmp_path: Path, prompt_file: Path
) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"prompt": "number nine", "target": "9"}\n')
    assert [prompt.text for prompt in Evaluation(prompt_file, heldout).drawn.prompts] == [
        "number nine"
    ]
    assert len(Evaluation(prompt_file, max_prompts=2).drawn.prompts) == 2


def test_measure_leaves_missing_scores_out_and_counts_them() -> None:
    prompts = (Prompt("a"), Prompt("b"))
    nan = float("nan")
    rewards = {
        "x": torch.tensor([1.0, nan]),
        "y": torch.tensor([0.0, 1.0]),
        "z": torch.tensor([0.25, 0.75]),
    }
    pictures = Pictures(
        torch.zeros(2, 1, 2, 2, dtype=torch.uint8),
        prompts,
        rewards,
        torch.tensor([1.0, torch.nan]),
        torch.tensor([2.5, torch.nan]),
    )
    numbers = eval_numbers(pictures, {"x": 0.5})
    assert numbers["reward"] == 0.5
    assert numbers["missing"] == 1
    assert numbers["kl"] == 1.0
    assert numbers["noisy_detail"] == 2.5
    assert "kl" not in eval_numbers(replace(pictures, kl=pictures.kl.fill_(torch.nan)), {"x": 0.5})
    assert (numbers["heldout"], numbers["heldout/y"]) == (0.5, 0.5)
    assert "heldout/x" not in numbers
    assert numbers["heldout/z"] == 0.5
    with pytest.raises(ValueError, match=r"\['reward'\]"):
        eval_numbers(pictures, {"x": 0.5}, statistics=[lambda media, rows: {"reward": 0.0}])


def test_saved_pictures_keep_the_first_of_each_prompt_in_any_order(tmp_path: Path) -> None:
    prompts = (Prompt("a"), Prompt("b"), Prompt("a"), Prompt("b"))
    media = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    save_pictures(
        tmp_path / "eval-1.npz",
        Pictures(media, prompts, {"r": torch.arange(4.0)}, torch.zeros(4), torch.zeros(4)),
        per_prompt=1,
    )
    kept = read_samples(tmp_path / "eval-1.npz")
    assert kept.media[:, 0, 0, 0].tolist() == [0, 1]
    assert kept.scores["r"].tolist() == [0.0, 1.0]


def evaluated_edits(tmp_path: Path, logger: Logger | None = None) -> None:
    """Train one step of prompts that change a red and a blue picture."""
    for name, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        Image.new("RGB", (40, 40), colour).save(tmp_path / f"{name}.png")
    asked = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": f"number {word}", "image": f"{name}.png"}
        for word, name in (("one", "red"), ("two", "blue"))
    ]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    train(tmp_path, Evaluation(asked, samples_per_prompt=2, every=0), epochs=1, logger=logger)


def test_what_prompts_change_is_kept_beside_the_samples(tmp_path: Path) -> None:
    evaluated_edits(tmp_path)
    kept = read_samples(tmp_path / "samples" / "eval-1.npz").sources
    assert kept is not None
    assert kept[:, :, 4, 4].tolist() == [[200, 0, 0]] * 2 + [[0, 0, 200]] * 2


@pytest.mark.parametrize(
    ("key", "value"), [("samples_per_prompt", 0), ("every", -1), ("max_prompts", 0)]
)
def test_counts_out_of_range_are_refused(prompt_file: Path, key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"evaluation.{key} must be .* got {value}"):
        Evaluation(prompt_file, **{key: value})  # type: ignore[arg-type]
    with pytest.raises(PromptFileError):
        Evaluation("absent.txt")


def test_a_strategy_without_engine_is_refused(tmp_path: Path, prompt_file: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    with pytest.raises(TypeError, match="SingleDeviceStrategy has no rollout engine"):
        Evaluation(prompt_file).on_train_start(trainer, Learner(DigitsPolicy()))


@pytest.mark.parametrize("zero", [True, False])
def test_videos_are_gathered_in_parts_and_kept_by_trainer_0(
    zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five clips of 3,000 bytes a rank, and room for two of them on the GPU."""
    monkeypatch.setattr(evaluation, "GATHERED_BYTES", 6_000)
    local = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1, 1).expand(5, 10, 3, 10, 10)
    sent: list[int] = []

    def all_gather(part: Tensor) -> Tensor:
        sent.append(part.numel())
        return torch.stack([part, part + 100])

    strategy = SimpleNamespace(all_gather=all_gather, root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(world_size=2, is_global_zero=zero, strategy=strategy)
    found = evaluation._gather_rows(trainer, local)
    assert sent == [6_000, 6_000, 3_000]
    assert torch.equal(found, torch.cat([local, local + 100]) if zero else local)


def test_videos_become_floats_for_a_statistic_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clips = torch.zeros(2, 5, 3, 8, 8, dtype=torch.uint8)
    pictures = Pictures(
        clips,
        (Prompt("a"),) * 2,
        {"r": torch.ones(2)},
        torch.full((2,), NAN),
        torch.full((2,), NAN),
    )
    largest: list[int] = []
    usual = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda own: largest.append(own.numel()) or usual(own))
    eval_numbers(pictures, {"r": 1.0})
    assert clips.numel() not in largest
    eval_numbers(pictures, {"r": 1.0}, [lambda media, prompts: {"mean": float(media.mean())}])
    assert clips.numel() in largest


def test_videos_are_stored_as_they_are(tmp_path: Path) -> None:
    """Compression takes minutes of every trainer's time, and a quarter of the size."""
    for shape, method in (((2, 5, 3, 8, 8), ZIP_STORED), ((2, 3, 8, 8), ZIP_DEFLATED)):
        media = torch.zeros(shape, dtype=torch.uint8)
        prompts, rewards = (Prompt("a"), Prompt("b")), {"r": torch.ones(2)}
        file = tmp_path / f"{len(shape)}.npz"
        save_pictures(
            file, Pictures(media, prompts, rewards, torch.full((2,), NAN), torch.full((2,), NAN)), 1
        )
        with ZipFile(file) as archive:
            assert archive.getinfo("media.npy").compress_type == method
        assert read_samples(file).media.shape == shape


@pytest.mark.parametrize(
    "damage",
    [
        b'{"kind": "step", "peak_gib": {"0": {"train": 0.1}',
        b'{"kind": "step", "peak_gib": {"0": {"train": 0.1}\n',
        b"\xff\xfe}\n",
        b'"text}"\n"}"\n',
        b"[" * 100_000 + b"}\n",
    ],
)
def test_a_resumed_run_finds_its_evaluations_in_a_record_with_damaged_lines(
    tmp_path: Path, damage: bytes
) -> None:
    trainer: Any = SimpleNamespace(default_root_dir=tmp_path, is_global_zero=True)
    whole = b'{"kind": "eval", "rl_step": 10}\n'
    for lines in (whole + damage, damage.rstrip(b"\n") + b"\n" + whole):
        (tmp_path / "metrics.jsonl").write_bytes(lines)
        assert not evaluation._lacks_evaluation(trainer, 10)
        assert evaluation._lacks_evaluation(trainer, 20)
