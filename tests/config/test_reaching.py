"""What an allowed class may be told: no argument of a stored configuration starts a process, loads
code or names a file outside of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from digenrl import config
from digenrl.config.reaching import reaching_problems, reaching_words
from digenrl.config.stored import configuration_identity, words_to_join
from digenrl.rewards.judge import server_command
from digenrl.rewards.needs import flag_problems
from tests.reachable import reachable

LIST = Path(__file__).with_name("reachable.txt")
RULES = {
    "args": "of a judge's server: the command line alone, and an allow-list (reaching)",
    "attention_backend": "a hub's kernel on the command line alone, else installed code (reaching)",
    "default_root_dir": "refused (derived_trainer_keys.yaml)",
    "kwargs": "a logger takes known arguments alone (reaching)",
    "model_registry": "refused (derived_trainer_keys.yaml)",
    "name": "a plain name (reaching)",
    "profiler": "Lightning's own, which write into the run's directory",
    "save_dir": "refused, because the run gives its directory (reaching)",
    "scorer": "the node of a judge: its `serve` (reaching)",
    "sub_dir": "a plain name (reaching)",
    "url": "confirm_hosts (stored)",
    "urls": "confirm_hosts (stored)",
    "version": "a plain name (reaching)",
}
"""Argument -> the rule that bounds it. The list also has values that decide whether such an
argument is read (`build`, `start_s`). And it has tiny weights that a scorer writes into a temporary
directory of its own."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return config.prepare_run_dir(
        config.load([f"hydra.run.dir={tmp_path}/run-0", "reward=vlm_judge", "logger=tensorboard"])
    )


def stored(run: Path, key: str, value: Any) -> Path:
    tree = OmegaConf.load(run / "config.yaml")
    OmegaConf.update(tree, key, value, force_add=True, merge=False)
    OmegaConf.save(tree, run / "config.yaml")
    return run


JUDGE = "reward.rewards.vlm_judge.scorer"
EVIL = [
    ["--trust-remote-code"],
    ["--max-model-len", "4096", "--trust_remote_code"],
    ["--middleware", "evil.App"],
    ["--middleware=evil.App"],
    ["--host", "0.0.0.0"],
    ["--host=0.0.0.0"],
    ["--trust"],
    ["--plugin", "x"],
    ["--tool-parser-plugin=/tmp/x.py"],
    ["--worker-cls", "evil.Worker"],
    ["--worker-extension-cls=evil.Worker"],
    ["--config", "/tmp/x.yaml"],
    ["--download-dir", "/home"],
    ["--api-key", "k"],
    ["--dtype", "--trust-remote-code"],
    ["--dtype"],
    ["--enforce-eager=1"],
    ["evil/model"],
    ["--seed", "/etc/passwd"],
    ["--load-format", "pt"],
    ["--hf-overrides", '{"auto_map": {}}'],
    "--trust-remote-code",
    {"a": 1},
    [["--trust-remote-code"]],
    [None],
    ["--no-enable-prefix-caching\n--trust-remote-code"],
]


@pytest.mark.parametrize("args", EVIL, ids=str)
def test_flags_that_name_code_files_or_hosts_are_refused_wherever_they_stand(args: Any) -> None:
    tree = {"scorer": {"_target_": "x", "url": "http://x", "serve": {"args": args}}}
    assert list(reaching_problems(tree, ["scorer.serve.args", "scorer"]))
    assert list(flag_problems(args))
    with pytest.raises(ValueError, match=r"serve\.args"):
        server_command("/weights", "judge", 8000, 2, args)


@pytest.mark.heavy
def test_stored_flags_of_a_judges_server_count_only_on_the_command_line(run: Path) -> None:
    words = ["--max-model-len", "4096"]
    stored(run, f"{JUDGE}.serve.args", words)
    for load in (
        lambda *w: config.load([f"resume={run}", *w]),
        lambda *w: config.load([*w], stored=run),
    ):
        with pytest.raises(config.ConfigError, match="counts only on the command line"):
            load()
    (given,) = reaching_words(OmegaConf.to_container(OmegaConf.load(run / "config.yaml")))
    found = config.load([f"resume={run}", given]).settings.tree
    assert list(OmegaConf.select(found, f"{JUDGE}.serve.args")) == words


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{JUDGE}.serve", {"args": ["--seed", "1"], "cmd": "x"}),
        (f"{JUDGE}.serve", ["--seed"]),
        (f"{JUDGE}.model", "--trust-remote-code"),
        (f"{JUDGE}._args_", ["http://127.0.0.1:1", "m"]),
        ("logger.tensorboard.name", "../../elsewhere"),
        ("logger.tensorboard.name", "/tmp/elsewhere"),
        ("logger.tensorboard.version", ".."),
        ("logger.tensorboard.version", ["a"]),
        ("logger.tensorboard.sub_dir", "a/../../b"),
        ("logger.tensorboard.log_dir", "/tmp/elsewhere"),
        ("logger.tensorboard.filename_suffix", "/../x"),
        ("logger.tensorboard.save_dir", "s3://evil/x"),
        ("logger.tensorboard.name", "a\n/x"),
        ("trainer.model_registry", "evil/model"),
        ("trainer.default_root_dir", "/tmp/elsewhere"),
        ("logger", {"x\nssh-ed25519 AAAA": {"_target_": "x", "_partial_": True}}),
        ("model.attention_backend", "flash_hub"),
        ("model.attention_backend", "_flash_3_hub"),
        ("model.attention_backend", "_Flash_3_HUB"),
        ("model.attention_backend", "sage\n_hub"),
    ],
)
def test_arguments_that_name_code_or_files_outside_are_refused(
    run: Path, key: str, value: Any
) -> None:
    stored(run, key, value)
    with pytest.raises(config.ConfigError) as caught:
        config.load([], stored=run)
    assert key in str(caught.value)


@pytest.mark.heavy
def test_a_rollout_that_joins_is_told_what_the_command_line_has_allowed(run: Path) -> None:
    words = [f"{JUDGE}.serve.args=['--max-model-len',4096]", "confirm_hosts=['judge.example:1']"]
    stored(
        stored(run, f"{JUDGE}.serve.args", ["--max-model-len", 4096]),
        f"{JUDGE}.url",
        "http://judge.example:1",
    )
    tree = OmegaConf.load(run / "config.yaml")
    with pytest.raises(config.ConfigError):
        config.load([], stored=run)
    joined = config.load(words_to_join(tree), stored=run).settings.tree
    assert configuration_identity(joined) == configuration_identity(
        config.load(words, stored=run).settings.tree
    )


@pytest.mark.heavy
def test_a_stored_prompt_store_is_no_place_to_write(run: Path) -> None:
    stored(run, "data.prompt_store", "/home/somebody")
    found = config.load([f"resume={run}"])
    assert found.settings.data.prompt_store == "auto"
    assert any("data.prompt_store=/home/somebody" in note for note in found.notes)
    own = config.load([f"resume={run}", "data.prompt_store=/tmp/mine"]).settings
    assert own.data.prompt_store == "/tmp/mine"
    stored(run, "data.prompt_store", None)
    assert config.load([f"resume={run}"]).settings.data.prompt_store is None


@pytest.mark.heavy
def test_a_directory_of_configurations_stands_under_the_same_rule(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    judge = (config.config_directory() / "reward" / "vlm_judge.yaml").read_text()
    mine = judge.replace("args: []", "args: [--max-model-len, 4096]")
    (tmp_path / "reward" / "mine.yaml").write_text(mine)
    words = ["--config-dir", str(tmp_path), "reward=mine"]
    with pytest.raises(config.ConfigError, match="counts only on the command line"):
        config.load(words)
    config.load([*words, f"{JUDGE}.serve.args=['--max-model-len',2048]"])


@pytest.mark.heavy
def test_every_argument_that_reaches_further_is_known() -> None:
    """Write the list anew: python -m tests.reachable > tests/config/reachable.txt, and read what
    has changed: a new argument needs a rule."""
    found = reachable()
    assert found == LIST.read_text().splitlines()
    assert RULES.keys() - {"args"} <= {line.split()[1].rstrip(":") for line in found}
