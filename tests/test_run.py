"""From a configuration to the parts of a rank: the pure translations, and one rank assembled."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
import torch

from digenrl import config as configuration
from digenrl import parts, run
from digenrl.advisor import Advice
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.world import Session, World
from digenrl.config.settings import Settings
from digenrl.config.validation import keys_of
from digenrl.settle import schedule_of
from tests.strategy.processes import configured

pytestmark = pytest.mark.heavy


def test_the_schedule_is_the_configurations() -> None:
    config = configured(
        "schedule=full",
        "schedule.tsp.batch=2",
        "schedule.shares=[3,1]",
        "schedule.stale_fraction=0.25",
        "seed=3",
    )
    spec = parts.schedule_spec(config, 3, 2)
    assert (spec.prompts, spec.group_size, spec.task_size) == (4, 4, 2)
    assert (spec.denoise_steps, spec.trained_steps, spec.updates_per_batch) == (4, 3, 1)
    assert (spec.gap, spec.tsp_batch, spec.tsp_shard, spec.tag) == (1, 2, True, True)
    assert (spec.shares, spec.async_steps, spec.stale_fraction) == ((3.0, 1.0), 1, 0.25)


def test_a_block_never_holds_more_steps_than_are_trained() -> None:
    assert parts.schedule_spec(configured("schedule.tsp.batch=all"), 3, 1).tsp_batch == 3
    assert parts.schedule_spec(configured("schedule.tsp.batch=50"), 3, 1).tsp_batch == 3
    assert parts.schedule_spec(configured("schedule.shares=equal"), 3, 1).shares == ()


@pytest.mark.parametrize("schedule", ["sync", "gap_tsp_tag", "full"])
def test_a_schedule_is_the_one_that_its_overrides_give(schedule: str) -> None:
    """The planner prints a schedule as words; a key that one of the two translations forgot would
    be lost."""
    words = (f"schedule={schedule}", "schedule.tsp.batch=2", "schedule.shares=[2,1]")
    spec = schedule_of(configured(*words), 3)
    assert spec.shares == (2.0, 1.0)
    assert schedule_of(configured(*spec.override_words()), 3) == spec
    told = {word.partition("=")[0] for word in spec.override_words()}
    assert told == {key for key in keys_of(Settings) if key.startswith("schedule.")} - {
        "schedule.auto",
        "schedule.claims",
    }


def test_sampling_settings_become_the_engines() -> None:
    spec = parts.sampling_spec(
        configured("sampling.storage_dtype=float64", "sampling.same_noise=true")
    )
    assert (spec.steps, spec.storage_dtype, spec.same_noise, spec.eval_steps) == (
        4,
        torch.float64,
        True,
        4,
    )


def test_a_rank_is_assembled_from_the_configuration_alone(tmp_path: Path) -> None:
    config = configured(
        "max_rl_steps=7",
        "schedule.gap=1",
        "data.prompts_per_batch=2",
        "callbacks.checkpoint.every=3",
    )
    session = Session("127.0.0.1", 0, Handshake(), tmp_path, time.time())
    rank = run.build_rank(config, World(0, 1, 1), session)
    assert rank.trainer.max_epochs == 7
    assert rank.strategy.world.role == "trainer"
    assert (
        rank.trainer.accumulate_grad_batches
        == rank.strategy.rank_setup.micro_batches_per_update
        == 2 * 2 * 3
    )
    assert rank.strategy.engine.policy is rank.module.policy
    assert {type(callback).__name__ for callback in rank.trainer.callbacks} >= {
        "Recorder",
        "Checkpoint",
    }  # type: ignore[attr-defined]
    assert not (tmp_path / "checkpoints").exists()
    rank.strategy.engine.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("sampling.height=100",),
            "sampling.height=100 is not a multiple of 16; nearest valid: 96 or 112",
        ),
        (
            ("hardware.build=real", "model.path=nowhere"),
            "model.path=nowhere has no model_index.json",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_before_any_rank_starts(
    words: tuple[str, ...], message: str
) -> None:
    composed = configuration.load(["experiment=flux1_flowgrpo", "hardware=cpu_tiny", *words])
    with pytest.raises(ValueError, match=message):
        parts.check_parts(composed.settings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("algorithm=grpo_guard", "algorithm/sde=cps"),
            "Guard needs a Gaussian log-prob, and FlowCPS drops",
        ),
        (("algorithm.sde.noise_level=0",), "noise level 0"),
        (("algorithm.optimizer.betas=[0.9]",), r"algorithm\.optimizer: torch\.optim\.AdamW cannot"),
        (("algorithm.optimizer.eps=-1",), r"eps=-1.*Invalid epsilon"),
        (("callbacks.checkpoint.every=-2",), r"callbacks\.checkpoint\.every"),
        (("callbacks.evaluation.samples_per_prompt=0",), r"samples_per_prompt must be >= 1"),
        (
            ("model.lora=null", "algorithm.kl_weight=0.01"),
            r"kl_weight = 0\.01 with model\.lora = null and .* set model\.keep_reference=true",
        ),
        *(
            (
                (f"experiment=digits_{name}", "model.lora=null"),
                r"with model\.lora = null and model\.keep_r",
            )
            for name in ("dpo", "dgpo")
        ),
    ],
)
def test_an_algorithm_that_cannot_train_is_refused_before_any_rank_starts(
    words: tuple[str, ...], message: str
) -> None:
    composed = configuration.load(["experiment=digits_flowgrpo", *words])
    with pytest.raises(ValueError, match=message):
        parts.check_parts(composed.settings)


@pytest.mark.parametrize("word", ["algorithm.kl_weight=0", "model.keep_reference=true"])
def test_all_weights_are_trained_without_kl_or_beside_a_copy(word: str) -> None:
    words = ["experiment=digits_flowgrpo", "model.lora=null", "algorithm.kl_weight=0.01", word]
    parts.check_parts(configuration.load(words).settings)


def test_warnings_of_the_first_rank_become_events(tmp_path: Path) -> None:
    source = logging.getLogger("digenrl.algorithms.grpo")
    handler = parts.WarningEvents(tmp_path)
    source.addHandler(handler)
    source.warning("clip_range=%g looks too large", 0.2)
    source.info("not this")
    source.removeHandler(handler)
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["message"]) for row in rows] == [
        ("warning", "clip_range=0.2 looks too large")
    ]


def test_a_rollout_of_all_weights_holds_no_value_before_the_cast(tmp_path: Path) -> None:
    """A checkpoint is read into the dtype of the rollout: fp32 would take twice the host memory."""
    words = ["experiment=flux1_flowgrpo", "hardware=cpu_tiny", "model.lora=null"]
    config = configuration.load([*words, "model.dtype=bfloat16"]).settings
    rollout = World(1, 1, 1)
    policy = configuration.instantiate(parts.model_of(config, rollout))
    assert all(value.is_meta for value in policy.transformer.parameters())
    session = Session("127.0.0.1", 0, Handshake(), tmp_path, time.time())
    read = run._build_policy(run.BuildContext(config, rollout, session, Advice()))
    usual = config.build("model")
    usual.adapter.only_generate()
    before, after = (dict(each.transformer.named_parameters()) for each in (usual, read))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], value), name
    assert torch.bfloat16 in {value.dtype for value in after.values()}
