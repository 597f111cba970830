"""Names of classes that moved: a stored run finds them, and a YAML file is told the new name."""

from __future__ import annotations

import pytest

from digenrl.config.removed import present_name
from digenrl.config.targets import target_problems


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("digenrl.extensions.zoo.flux.FluxPolicy", "digenrl.models.flux.FluxPolicy"),
        ("digenrl.extensions.zoo.sd3.SD3Policy", "digenrl.models.sd3.SD3Policy"),
        ("digenrl.extensions.zoo.wan.WanPolicy", "digenrl.models.wan.WanPolicy"),
        ("digenrl.extensions.rewards.remote.RemoteScorer", "digenrl.rewards.remote.RemoteScorer"),
        (
            "digenrl.extensions.page.wandb_logger.WandbLogger",
            "digenrl.callbacks.wandb_logger.WandbLogger",
        ),
        ("digenrl.extensions.forward.nft.NFT", "digenrl.extensions.methods.nft.NFT"),
        (
            "digenrl.extensions.forward.nft.OldPolicySchedule",
            "digenrl.extensions.methods.nft.OldPolicySchedule",
        ),
        ("digenrl.extensions.forward.dpo.OfflineDPO", "digenrl.extensions.methods.dpo.OfflineDPO"),
        ("digenrl.extensions.forward.sft.Supervised", "digenrl.extensions.methods.sft.Supervised"),
        (
            "digenrl.extensions.forward.steps.NoiseLevels",
            "digenrl.extensions.methods.noise_levels.NoiseLevels",
        ),
        (
            "digenrl.diffusion.steps.NoiseLevels",
            "digenrl.extensions.methods.noise_levels.NoiseLevels",
        ),
        (
            "digenrl.extensions.offpolicy.surrogates.TOPR",
            "digenrl.extensions.methods.offpolicy.TOPR",
        ),
        (
            "digenrl.extensions.distillation.opd.Distillation",
            "digenrl.extensions.methods.distillation.Distillation",
        ),
        ("digenrl.extensions.methods.sde.FlowCPS", "digenrl.extensions.methods.sde.FlowCPS"),
    ],
)
def test_a_name_of_before_leads_to_the_class_of_today(old: str, now: str) -> None:
    assert present_name(old) == now
    assert target_problems({"_target_": now}) == []
    if old != now:
        (said,) = target_problems({"_target_": old})
        assert said == f"_target_ = {old}: refused, because it has moved; write {now}."
