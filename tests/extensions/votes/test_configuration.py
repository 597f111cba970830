"""What is refused before any rank starts, and what a run says that it asks for."""

from __future__ import annotations

import pytest

from digenrl import config
from digenrl.config import ConfigError
from digenrl.config.relations import votes_of_step
from digenrl.extensions.votes.ballots import votes_wanted
from digenrl.extensions.votes.cli.vote import main
from digenrl.reward_command import reward_config

WORDS = ("experiment=scenes_fewstep", "reward=votes", "sampling.task_size=auto")
REFUSED = {
    "tasks that are parts of groups": (("sampling.task_size=8",), "set sampling.task_size=16"),
    "parts of groups in an update": (("data.updates_split=samples",), "updates_split=groups"),
    "trial samples": (
        ("sampling.scouts.candidates=2", "sampling.same_noise=false"),
        "scouts.candidates=1",
    ),
    "another process": (("reward.rewards.votes.placement=process",), "set it to thread"),
    "a service": (("reward.placement=http", "reward.rewards.votes.placement=null"), "to thread"),
    "evaluations": (
        ("+reward.heldout.people.scorer._target_=digenrl.extensions.votes.scorer.Votes",),
        "evaluations ask nobody",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_people_cannot_judge_is_refused(case):
    words, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        config.load([*WORDS, *words])


def test_a_run_says_how_many_votes_a_step_costs(tmp_path):
    composed = config.load([*WORDS, "data.prompts_per_batch=4", "data.group_size=5"])
    assert votes_of_step(composed.settings.tree) == {"votes": 4 * 5}
    assert votes_of_step(config.load(["experiment=scenes_fewstep"]).settings.tree) == {}


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "reward: [1]", "reward: {rewards: {a: {scorer: {_target_: x.Votes}}}}\ndata: 7"],
)
def test_a_config_of_others_says_nothing(tmp_path, capsys, text):
    (tmp_path / "config.yaml").write_text(text)
    assert votes_wanted(tmp_path) == (0, 0)
    assert main([f"run={tmp_path}"]) == 2
    assert "train with reward=votes" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["score", "serve_reward"])
def test_commands_without_a_run_refuse_it(command):
    with pytest.raises(ConfigError, match="asks people"):
        reward_config(["reward=votes"], command)
