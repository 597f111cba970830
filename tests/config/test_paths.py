"""Paths become absolute when the words are read. A copy of a key follows its source. Both hold in a
new run and in a stored one."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import digenrl
from digenrl import config
from digenrl.cli.evaluate import EvaluateKeys
from digenrl.cli.join import JoinKeys
from digenrl.cli.report import ReportKeys
from digenrl.config.command_settings import schema_of
from digenrl.config.help import Arguments, read_arguments
from digenrl.config.targets import walk_nodes
from digenrl.config.validation import keys_of
from digenrl.earlier_run import changed_run
from digenrl.prompts import DIRECTORY
from digenrl.reward_command import reward_config

BASE = ["experiment=digits_flowgrpo", "data.prompts_per_batch=2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two working directories, `a` and `b`, that hold files of the same names; the current one is
    `a`. The home directory is `home`."""
    for name in ("a", "b", "home"):
        folder = tmp_path / name
        (folder / "pictures").mkdir(parents=True)
        for file in ("mine.txt", "held.txt", "more.txt"):
            (folder / file).write_text(f"one {name}\ntwo {name}\n")
        (folder / "base.safetensors").write_bytes(b"")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "a")
    return tmp_path


def stored(words: list[str], folder: Path) -> Path:
    """Store the configuration of a run, as one that starts does."""
    composed = config.load([*BASE, *words, f"hydra.run.dir={folder}/run-0"])
    return config.prepare_run_dir(composed)


def at(tree: Any, key: str) -> Any:
    return OmegaConf.select(tree, key)


EVALUATION = "callbacks.evaluation"
STATISTIC = "callbacks.evaluation.statistics.0"
CLIP = "+callbacks.evaluation.statistics=[{_target_:reward_models.clip_statistics.ClipStatistics,"


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        ("data.prompts=mine.txt", "data.prompts", "a/mine.txt"),
        ("data.prompts=mine.txt", f"{EVALUATION}.prompts", "a/mine.txt"),
        ("data.heldout=./held.txt", f"{EVALUATION}.heldout_prompts", "a/held.txt"),
        (f"{EVALUATION}.prompts=held.txt", f"{EVALUATION}.prompts", "a/held.txt"),
        ("data.prompts=[{file:mine.txt,weight:1}]", "data.prompts[0].file", "a/mine.txt"),
        ("data.prompts=[{file:mine.txt,weight:1}]", f"{EVALUATION}.prompts[0].file", "a/mine.txt"),
        ("data.prompts='~/mine.txt'", "data.prompts", "home/mine.txt"),
        ("data.heldout='~/held.txt'", f"{EVALUATION}.heldout_prompts", "home/held.txt"),
        ("data.prompt_store=store", "data.prompt_store", "a/store"),
        ("data.prompt_store='~/store'", "data.prompt_store", "home/store"),
        ("output_root=../runs", "output_root", "a/../runs"),
        ("output_root='~/runs'", "output_root", "home/runs"),
        ("model.path=base.safetensors", "model.path", "a/base.safetensors"),
        ("model.path='~/base.safetensors'", "model.path", "home/base.safetensors"),
        ("model.path='~/absent'", "model.path", "home/absent"),
        (
            f"{CLIP}reference:pictures,build:tiny}}]".replace("+", ""),
            "callbacks.evaluation.statistics[0].reference",
            "a/pictures",
        ),
        (
            "+reward.rewards.more={weight:1,scorer:{_target_:reward_models.digit_judge.DigitJudge,"
            "path:'~/judge.safetensors'}}",
            "reward.rewards.more.scorer.path",
            "home/judge.safetensors",
        ),
        (
            "+reward.rewards.more={weight:1,scorer:{_target_:reward_models.digit_judge.DigitJudge,"
            "path:base.safetensors}}",
            "reward.rewards.more.scorer.path",
            "a/base.safetensors",
        ),
    ],
)
def test_a_path_is_absolute_wherever_it_stands(
    here: Path, word: str, key: str, expected: str
) -> None:
    tree = config.load([*BASE, word]).settings.tree
    assert at(tree, key) == str(here / expected)


def test_every_path_of_the_schema_becomes_absolute(here: Path) -> None:
    """A new key whose type is a path is covered by its type alone."""
    for name in ("train", "plan"):
        for key, its in keys_of(schema_of(name)).items():
            if not its.allowed.startswith("path of a ") or key == "resume":
                continue
            file = "mine.txt" if "prompt file" in its.allowed else "new"
            for value, expected in ((file, f"a/{file}"), (f"'~/{file}'", f"home/{file}")):
                tree = config.load([*BASE, f"{key}={value}"], name).settings.tree
                assert at(tree, key) == str(here / expected), key


def test_paths_of_other_commands_are_absolute(here: Path) -> None:
    words = ["reward=jpeg", "images='~/pictures'", "prompts=mine.txt", "output=~/scores.json"]
    settings = reward_config(words, "score")
    found = [settings.tree[key] for key in ("images", "prompts", "output")]
    assert found == [
        str(here / name) for name in ("home/pictures", "a/mine.txt", "home/scores.json")
    ]
    settings = reward_config(["reward=jpeg", "token_file='~/token'"], "serve_reward")
    assert settings.tree.token_file == str(here / "home/token")


def commands_of_runs() -> set[type[Arguments]]:
    """The keys of every command that names a run."""
    names = [module.name for module in pkgutil.walk_packages(digenrl.__path__, "digenrl.")]
    modules = [importlib.import_module(name) for name in names if ".cli." in name]
    found = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    return {each for each in found if issubclass(each, Arguments) and "run" in each.model_fields}


def test_a_run_that_a_command_names_may_begin_with_a_tilde(here: Path) -> None:
    """A quoted word reaches the command as it was typed."""
    found = commands_of_runs()
    assert found >= {EvaluateKeys, JoinKeys, ReportKeys}
    for schema in found:
        more = ["suite=scenes"] if "suite" in schema.model_fields else []
        request, _ = read_arguments(schema, ["run=~/runs/one", *more])
        assert vars(request)["run"] == here / "home/runs/one", schema


def test_the_run_lies_below_an_output_root_with_a_tilde(here: Path) -> None:
    for root in ("'~/runs'", "~/runs"):
        assert here / "home/runs" in config.load([*BASE, f"output_root={root}"]).run_dir.parents
    run = config.load([*BASE, "hydra.run.dir='~/one/run-0'"]).run_dir
    assert run == here / "home/one/run-0"


def test_what_is_no_path_stays_as_typed(here: Path) -> None:
    """A hub id, a name of the project's own set, and a word that is by chance the name of a file."""
    for name in ("a", "b"):
        Path(name).write_text("")
    tree = config.load([*BASE, "model.path=random"]).settings.tree
    assert (tree.model.path, tree.data.prompts) == ("random", "digits.jsonl")
    assert tree.reward.rewards.judge_a.scorer.judge == "a"
    tree = config.load(["experiment=sd35_flowgrpo", "hardware=cpu_tiny"]).settings.tree
    assert tree.model.path == "stabilityai/stable-diffusion-3.5-medium"


def test_a_stored_run_means_the_same_files_in_another_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["data.prompts=mine.txt", "data.heldout=held.txt", "model.path=base.safetensors"]
    run = stored(words, here)
    monkeypatch.chdir(here / "b")
    for tree in (
        config.load([f"resume={run}", "max_rl_steps=77"]).settings.tree,
        changed_run(run, []).settings.tree,
    ):
        for key, name in {
            "data.prompts": "mine.txt",
            "data.heldout": "held.txt",
            f"{EVALUATION}.prompts": "mine.txt",
            f"{EVALUATION}.heldout_prompts": "held.txt",
            "model.path": "base.safetensors",
        }.items():
            assert at(tree, key) == str(here / "a" / name), key


def test_a_stored_name_of_our_own_set_is_no_file_of_the_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored([], here)
    monkeypatch.chdir(here / "b")
    Path("digits.jsonl").write_text('{"prompt": "a stranger"}\n' * 2)
    for tree in (
        config.load([f"resume={run}"]).settings.tree,
        changed_run(run, []).settings.tree,
    ):
        for key in ("data.prompts", f"{EVALUATION}.prompts"):
            assert at(tree, key) == str(DIRECTORY / "digits.jsonl")


def test_a_stored_hub_id_is_no_folder_of_the_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(["model.path=random"], here)
    monkeypatch.chdir(here / "b")
    Path("random").mkdir()
    with pytest.raises(config.ConfigError, match=r"model\.path = random: .*set model\.path="):
        config.load([f"resume={run}"])
    tree = config.load([f"resume={run}", "model.path=base.safetensors"]).settings.tree
    assert tree.model.path == str(here / "b/base.safetensors")


@pytest.mark.parametrize("continued", ["resume", "eval"])
@pytest.mark.parametrize(
    ("word", "copies"),
    [
        ("data.heldout=more.txt", {f"{EVALUATION}.heldout_prompts": "b/more.txt"}),
        ("++data.heldout=more.txt", {f"{EVALUATION}.heldout_prompts": "b/more.txt"}),
        ("+data.heldout=more.txt", {f"{EVALUATION}.heldout_prompts": "b/more.txt"}),
        ("data.prompts=more.txt", {f"{EVALUATION}.prompts": "b/more.txt"}),
    ],
)
def test_an_override_of_a_stored_run_reaches_the_copies(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    copies: dict[str, str],
    continued: str,
) -> None:
    run = stored(["data.prompts=mine.txt", "data.heldout=held.txt"], here)
    monkeypatch.chdir(here / "b")
    composed = (
        config.load([f"resume={run}", word]) if continued == "resume" else changed_run(run, [word])
    )
    for key, name in copies.items():
        assert at(composed.settings.tree, key) == str(here / name)


@pytest.mark.parametrize(
    ("word", "copies"),
    [
        ("sampling.eval.batch=3", {f"{EVALUATION}.batch": 3}),
        ("sampling.eval.steps=4", {f"{EVALUATION}.steps": 4}),
        ("sampling.height=16", {"model.height": 16}),
        ("++sampling.width=16", {"model.width": 16}),
        ("sampling.guidance_scale=2.0", {"model.guidance_scale": 2.0}),
    ],
)
def test_every_copy_of_a_run_that_is_looked_at_follows_its_source(
    here: Path, word: str, copies: dict[str, Any]
) -> None:
    tree = changed_run(stored([], here), [word]).settings.tree
    assert {key: at(tree, key) for key in copies} == copies


def test_a_copy_of_ones_own_follows_its_source_in_a_stored_run(here: Path) -> None:
    (here / "own/experiment").mkdir(parents=True)
    (here / "own/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults: [digits_flowgrpo]\n"
        "data: {prompts_per_batch: 2, prompts: mine.txt, heldout: held.txt}\n"
        "callbacks: {evaluation: {prompts: '${data.heldout}', seed: '${seed}'}}\n"
    )
    words = ["--config-dir", str(here / "own"), "experiment=mine"]
    composed = config.load([*words, f"hydra.run.dir={here}/run-0"])
    run = config.prepare_run_dir(composed)
    tree = changed_run(run, ["data.heldout=more.txt", "seed=7"]).settings.tree
    assert at(tree, f"{EVALUATION}.prompts") == str(here / "a/more.txt")
    assert at(tree, f"{EVALUATION}.seed") == 7
    assert composed.settings.with_values({"seed": 8}).node_at(f"{EVALUATION}.seed") == 8


def test_a_copy_with_a_value_of_its_own_is_none(here: Path) -> None:
    words = ["data.heldout=held.txt", f"{EVALUATION}.heldout_prompts=more.txt"]
    run = stored(words, here)
    tree = changed_run(run, ["data.heldout=mine.txt"]).settings.tree
    assert at(tree, f"{EVALUATION}.heldout_prompts") == str(here / "a/more.txt")
    run = stored(["data.heldout=held.txt", "experiment_name=second"], here / "second")
    tree = changed_run(run, [f"{EVALUATION}.heldout_prompts=more.txt"]).settings.tree
    assert at(tree, "data.heldout") == str(here / "a/held.txt")
    assert at(tree, f"{EVALUATION}.heldout_prompts") == str(here / "a/more.txt")


def test_the_copies_of_a_run_from_before_they_were_stored_are_found(here: Path) -> None:
    run = stored(["data.heldout=held.txt"], here)
    tree: Any = OmegaConf.load(run / "config.yaml")
    del tree["copies"]
    OmegaConf.save(tree, run / "config.yaml")
    tree = changed_run(run, ["data.heldout=more.txt"]).settings.tree
    assert at(tree, f"{EVALUATION}.heldout_prompts") == str(here / "a/more.txt")


def test_a_run_from_before_paths_were_absolute_goes_on(here: Path) -> None:
    run = stored([], here)
    tree: Any = OmegaConf.load(run / "config.yaml")
    tree.output_root = "outputs"
    OmegaConf.save(tree, run / "config.yaml")
    Path("outputs").mkdir()
    assert config.load([f"resume={run}", "max_rl_steps=99"]).settings.max_rl_steps == 99


def test_a_stored_copy_leads_nowhere_else(here: Path) -> None:
    """A foreign config.yaml may name copies; a value changes only with what the user sets."""
    run = stored([], here)
    tree: Any = OmegaConf.load(run / "config.yaml")
    tree.copies = {"model._target_": "data.prompts", "seed": "max_rl_steps", "x.y": "z", "a": 3}
    OmegaConf.save(tree, run / "config.yaml")
    with pytest.raises(config.ConfigError, match="copies"):
        changed_run(run, [])
    del tree.copies["a"]
    OmegaConf.save(tree, run / "config.yaml")
    found = changed_run(run, ["max_rl_steps=3"]).settings.tree
    assert (found.seed, found.model._target_) == (tree.seed, tree.model._target_)


def test_no_stored_text_holds_a_relative_path(here: Path) -> None:
    """No word that names a file here is left in config.yaml as it was typed."""
    words = ["data.prompts=mine.txt", "data.heldout=held.txt", "model.path=base.safetensors"]
    tree = OmegaConf.load(stored(words, here) / "config.yaml")
    typed = ("mine.txt", "held.txt", "base.safetensors", "outputs")
    assert not [path for path, value in walk_nodes(OmegaConf.to_container(tree)) if value in typed]


def test_a_run_on_a_folder_with_a_secrets_shape_is_continued(here: Path) -> None:
    for number, name in enumerate(("sk-lab-flux-lora-prompts", "sk-lab_flux_lora_prompts_of_all")):
        Path(name).mkdir()
        Path(name, "mine.txt").write_text("one\ntwo\n")
        run = stored([f"data.prompts={name}/mine.txt"], here / str(number))
        again = config.load([f"resume={run}", "max_rl_steps=50"]).settings
        assert again.data.prompts == str(here / "a" / name / "mine.txt")


def test_what_was_masked_is_set_again_to_continue(here: Path) -> None:
    absent = "hf_fluxlorapromptsofthelab"
    run = stored([f"model.path='~/{absent}'"], here)
    said = r"model\.path = .*<redacted>: was masked .* set it again"
    with pytest.raises(config.ConfigError, match=said):
        config.load([f"resume={run}"])
    again = config.load([f"resume={run}", f"model.path='~/{absent}'"])
    assert again.settings.tree.model.path == str(here / "home" / absent)


@pytest.mark.heavy
def test_a_path_that_an_interpolation_makes_is_absolute_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thread.txt").write_text("".join(f"prompt {number}\n" for number in range(20)))
    monkeypatch.chdir(tmp_path)
    words = [f"hydra.run.dir={tmp_path}/run", "data.prompts=${reward.placement}.txt"]
    assert config.load(words).settings.tree.data.prompts == str(tmp_path / "thread.txt")


@pytest.mark.parametrize("name", ["mine.txt/", "./mine.txt/", "../a/mine.txt", "~/../a/mine.txt/"])
def test_a_slash_at_the_end_leaves_no_path_relative(here: Path, name: str) -> None:
    word = f"data.prompts={name}"
    evaluated = f"callbacks.evaluation.prompts={name}"
    tree = config.load([*BASE, word, evaluated, f"+model.path={name}"]).settings.tree
    for key in ("data.prompts", "callbacks.evaluation.prompts", "model.path"):
        held = Path(OmegaConf.select(tree, key))
        assert held.is_absolute(), key
        assert held.resolve() == here / "a" / "mine.txt"


@pytest.mark.parametrize(
    "word",
    [
        "output_root=~nobody-here/runs",
        "data.prompt_store=~nobody-here/store",
        "data.prompts=~nobody-here/mine.txt",
        "resume=~nobody-here/run",
        "--config-dir=~nobody-here/configs",
    ],
)
def test_the_home_of_nobody_is_refused(here: Path, word: str) -> None:
    with pytest.raises(config.ConfigError, match=r"~nobody-here/\S+: (there is no user|no such)"):
        config.load([*BASE, word])
    assert not (here / "a" / "~nobody-here").exists()


@pytest.mark.parametrize("address", ["s3://bucket/runs", "gs://x", "file:///data", "hdfs://n:1/x"])
@pytest.mark.parametrize("key", ["output_root", "data.prompt_store"])
def test_an_address_is_no_directory(here: Path, key: str, address: str) -> None:
    with pytest.raises(config.ConfigError, match=f"{address}: is an address; name a file or dir"):
        config.load([*BASE, f"{key}={address}"])
