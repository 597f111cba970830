"""Every reward YAML, in its tiny build: its suite is built and gives images and videos one finite
score a sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from digenrl.data import load_prompts
from digenrl.reward_command import reward_config, reward_suite
from digenrl.types import Prompt, Sound

pytestmark = pytest.mark.heavy

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "reward"
NEEDS_A_SERVICE = {"remote", "vlm_judge", "edit_judge", "unified_reward", "pair_judge"}
OF_ONE_MODEL = {"digits", "scenes", "scenes_edit", "mixture"}
OF_PEOPLE = {"votes"}
NAMES = sorted({path.stem for path in CONFIGS.glob("[a-z]*.yaml")} - OF_ONE_MODEL - OF_PEOPLE)
EDITS = load_prompts("edits.jsonl")[:2]
RULES = {"tag": "single_object", "include": [{"class": "sign", "count": 1}]}
PROMPTS = [
    Prompt(f'a sign "{word}"', images=e.images, metadata=RULES)
    for word, e in zip(("OPEN", "SHUT"), EDITS, strict=True)
]


@pytest.mark.parametrize("name", NAMES)
def test_it_builds_and_scores(name, tmp_path):
    words = [f"reward={name}", "hardware.build=tiny"]
    if name == "unified_reward":  # has no question of its own
        (tmp_path / "asks.py").write_text('f"How good is {prompt}?"')
        words.append(f"reward.rewards.{name}.scorer.template={tmp_path}/asks.py")
    suite = reward_suite(reward_config(words, "serve_reward"))
    suite.check_prompts(PROMPTS)
    assert any(suite.weights.values())
    if name not in NEEDS_A_SERVICE:
        media = torch.rand(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
        sound = Sound(torch.rand(2, 2, 4800, generator=torch.Generator().manual_seed(1)), 16000)
        for sample in (media, media[:, None].expand(2, 4, 3, 48, 48)):
            scores = suite.score(sample, PROMPTS, heldout=True, sound=sound)
            assert set(scores) == {*suite.names, *suite.heldout}
            assert all(torch.isfinite(values).all() for values in scores.values())
        assert all(count.missing == 0 for count in suite.failure_counts().values())
        assert all(
            identity.model_id and identity.weights_digest
            for identity in suite.scorer_identities().values()
        )
    suite.close()
