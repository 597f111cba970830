"""What `load` accepts and returns, the run directory, resume, and the merge order of the groups."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError
from pydantic import ValidationError

from digenrl import config
from digenrl.config.output_dir import prepare_run_dir_or_exit
from digenrl.config.removed import REMOVED
from digenrl.config.settings import Settings
from digenrl.config.stored import read_stored
from digenrl.config.validation import keys_of


def test_everything_is_resolved_and_read_only() -> None:
    composed = config.load(["sampling.height=24", "experiment_name=x"])
    assert composed.settings.tree.model.height == 24  # model.height: ${sampling.height}
    assert "${" not in OmegaConf.to_yaml(composed.settings.tree)
    assert "hydra" not in composed.settings.tree
    assert composed.settings.resume is None
    assert composed.run_dir.parent == Path.cwd() / "outputs" / "x"
    assert (
        composed.choices["hardware"] in config.group_options(config.config_directory())["hardware"]
    )
    assert not [group for group in composed.choices if group.startswith("hydra")]
    with pytest.raises(ReadonlyConfigError):
        composed.settings.tree.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        composed.settings.seed = 3  # type: ignore[misc]


def test_command_line_beats_hardware_beats_experiment_beats_groups() -> None:
    """The order that lets hardware=cpu_tiny shrink an experiment, and the user overrule both."""
    directory = config.config_directory()
    primary = OmegaConf.load(directory / "train.yaml")
    names = [next(iter(entry)) if OmegaConf.is_dict(entry) else entry for entry in primary.defaults]
    groups = [name for name in names if name in config.group_options(directory)]
    assert groups[-2:] == ["experiment", "hardware"]
    assert set(groups) == {group for group in config.group_options(directory) if "/" not in group}
    experiment = config.load(["data=signs", "data.prompts_per_batch=32"])
    assert experiment.settings.data.group_size == 16
    assert experiment.settings.data.prompts_per_batch == 32


def test_override_kinds() -> None:
    overrides = [
        "++seed=7",
        "+trainer.detect_anomaly=false",
        "~callbacks.recorder",
        "schedule.shares=[3,1]",
    ]
    composed = config.load(overrides)
    assert composed.settings.seed == 7
    assert composed.settings.tree.trainer.detect_anomaly is False
    assert "recorder" not in composed.settings.tree.callbacks
    assert composed.settings.schedule.shares == [3, 1]


@pytest.mark.parametrize("value", ["1e-4", "0.0001", "1.0e-04"])
def test_numbers_in_scientific_notation_are_numbers(value: str) -> None:
    assert (
        config.load([f"algorithm.optimizer.lr={value}"]).settings.tree.algorithm.optimizer.lr
        == 1e-4
    )


@pytest.mark.heavy
def test_schedule_presets_differ_as_their_names_say() -> None:
    presets = {
        name: config.load([f"schedule={name}"]).settings
        for name in config.group_options(config.config_directory())["schedule"]
    }
    assert presets["sync"].schedule.gap == 0
    assert (
        presets["colocated"].allocation.rollouts
        == presets["colocated_naive"].allocation.rollouts
        == 0
    )
    assert presets["colocated_naive"].schedule.tsp.batch == 1
    assert (presets["gap"].schedule.gap, presets["gap"].schedule.tsp.shard) == (1, False)
    assert presets["gap_tsp"].schedule.tsp.shard
    assert not presets["gap_tsp"].schedule.tag
    assert presets["gap_tsp_tag"].schedule.tag
    assert presets["full"].schedule.tag
    assert presets["full"].schedule.async_steps == 1
    keys = {frozenset(preset.tree.schedule) for preset in presets.values()}
    assert len(keys) == 1


def test_run_directories_of_one_second_do_not_meet(tmp_path: Path) -> None:
    composed = config.load([f"hydra.run.dir={tmp_path}/a/2026-01-01_00-00-00-0", "logger=none"])
    first, second = config.prepare_run_dir(composed), config.prepare_run_dir(composed)
    assert (first.name, second.name) == ("2026-01-01_00-00-00-0", "2026-01-01_00-00-00-1")
    stored = OmegaConf.load(second / "config.yaml")
    assert stored == composed.settings.tree
    assert [path.name for path in second.iterdir()] == ["config.yaml"]


def test_a_directory_that_cannot_be_made_ends_a_command_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    composed = replace(config.load([]), run_dir=tmp_path / "file" / "run-0")
    with pytest.raises(SystemExit, match="2"):
        prepare_run_dir_or_exit(composed)
    said = f"output_root: cannot write {tmp_path / 'file'} (File exists); set output_root="
    assert said in capsys.readouterr().err


def test_resume_takes_the_runs_own_configuration(tmp_path: Path) -> None:
    words = ["seed=5", "data.group_size=8", "sampling.task_size=4", "model.lora.rank=3"]
    run = config.prepare_run_dir(config.load([*words, f"hydra.run.dir={tmp_path}/run-0"]))
    again = config.load([f"resume={run}", "max_rl_steps=77"])
    assert again.resumed
    assert again.settings.resume == str(run)
    assert again.run_dir == run
    assert (
        again.settings.seed,
        again.settings.data.group_size,
        again.settings.tree.model.lora.rank,
    ) == (
        5,
        8,
        3,
    )
    assert again.settings.max_rl_steps == 77
    before = (run / "config.yaml").read_bytes()
    assert config.prepare_run_dir(again) == run
    assert (run / "config.yaml").read_bytes() == before, (
        "kept until the ranks have loaded the checkpoint"
    )
    config.store_config(again.settings.tree, run)
    assert OmegaConf.load(run / "config.yaml").max_rl_steps == 77
    assert OmegaConf.load(run / "config.yaml").resume is None


def test_a_stored_configuration_is_completed_by_the_keys_that_came_after_it(tmp_path: Path) -> None:
    """The added keys get values under which nothing changes, and a note. A key that the user
    removes stays missing."""
    run = config.prepare_run_dir(config.load(["schedule=full", f"hydra.run.dir={tmp_path}/run-0"]))
    stored = OmegaConf.load(run / "config.yaml")
    for parent, key in (
        (stored, "strategy"),
        (stored.schedule, "skip_zero"),
        (stored.schedule, "tsp"),
        (stored, "data"),
    ):
        del parent[key]
    OmegaConf.save(stored, run / "config.yaml")
    again = config.load([f"resume={run}"])
    fresh = config.load([]).settings
    assert (again.settings.strategy, again.settings.data) == (fresh.strategy, fresh.data)
    assert again.settings.schedule.skip_zero is True
    assert again.settings.schedule.tsp.model_dump() == {"batch": 1, "shard": False}
    assert again.settings.schedule.tag, "keys that are there stay"
    (note,) = again.notes
    for part in (
        str(run),
        "from the defaults",
        "schedule.skip_zero=True",
        "strategy={",
        "data.group_size=16",
    ):
        assert part in note
    with pytest.raises(config.ConfigError, match=r"schedule\.tag: missing"):
        config.load([f"resume={run}", "~schedule.tag"])


def test_a_stored_configuration_goes_on_without_the_keys_that_were_removed(tmp_path: Path) -> None:
    """Whatever they hold; a removed value, or a key that never was, is still refused."""
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/run-0"]))
    stored = OmegaConf.load(run / "config.yaml")
    kept = {key.replace("*", "judge"): 17 for key in REMOVED if "=" not in key}
    for key, value in kept.items():
        OmegaConf.update(stored, key, value, force_add=True)
    OmegaConf.save(stored, run / "config.yaml")
    tree, (note,) = read_stored(run, "resume")
    assert all(f"{key}={value}" in note for key, value in kept.items())
    assert all(OmegaConf.select(tree, key) is None for key in kept)
    assert tree.schedule == config.load([]).settings.tree.schedule
    for key, value, said in (
        ("data.zero_variance_groups", "refill", r"refill: was removed; no experiment"),
        ("schedule.gradients", "generation", r"generation: was removed; trainers compute"),
        ("schedule.never", 17, r"schedule\.never"),
    ):
        changed = tree.copy()
        OmegaConf.update(changed, key, value, force_add=True)
        OmegaConf.save(changed, run / "config.yaml")
        with pytest.raises(config.ConfigError, match=said):
            config.load([f"resume={run}"])


def test_a_removed_key_is_none_of_todays() -> None:
    assert not {*REMOVED} & {*keys_of(Settings)}


def test_resume_refuses_what_does_not_fit(tmp_path: Path) -> None:
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/run-0"]))
    for words, part in [
        ([f"resume={tmp_path}"], "It holds the runs"),
        ([f"resume={tmp_path}/none"], "is no directory"),
        ([f"resume={run}", "schedule=gap"], "a resumed run keeps its schedule"),
        ([f"resume={run}", "sed=3"], "nearest: seed"),
        ([f"resume={run}", "seed=-3"], "is too small"),
    ]:
        with pytest.raises(config.ConfigError) as caught:
            config.load(words)
        assert part in str(caught.value)
    (run / "config.yaml").write_text("a: [1\n")
    with pytest.raises(config.ConfigError, match=r"config\.yaml: cannot be read"):
        config.load([f"resume={run}"])


def test_stored_configuration_cannot_extend_the_allow_list(tmp_path: Path) -> None:
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/run-0"]))
    tree = OmegaConf.load(run / "config.yaml")
    tree.allow_targets, tree.model._target_ = ["os"], "os.system"
    OmegaConf.save(tree, run / "config.yaml")
    with pytest.raises(config.ConfigError, match=r"os\.system: refused"):
        config.load([f"resume={run}"])


def test_own_prompt_file_becomes_absolute_and_duplicates_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_bytes("\ufeffone\r\ntwo\r\none\r\n".encode())
    composed = config.load(["data.prompts=mine.txt", "data.prompts_per_batch=2"])
    assert composed.settings.data.prompts == str(tmp_path / "mine.txt")
    assert composed.notes == (
        f"data.prompts: {tmp_path}/mine.txt: 1 duplicates left out (line 3 repeats line 1).",
    )
    Path("many.txt").write_text("one\n" * 5 + "two\n")
    (note,) = config.load(["data.prompts=many.txt", "data.prompts_per_batch=2"]).notes
    assert ("4 duplicates left out" in note, note.count("repeats")) == (True, 3)
    assert config.load([]).settings.data.prompts == "drawn_scenes.txt"


def test_help_lists_every_key_and_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config.load_or_exit(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(key in text for key in keys_of(Settings))
    assert all(group in text for group in config.group_options(config.config_directory()))


def test_cfg_prints_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config.load_or_exit(["--cfg", "seed=9"])
    assert caught.value.code == 0
    assert OmegaConf.create(capsys.readouterr().out).seed == 9
    assert config.load_or_exit(["seed=9"]).settings.seed == 9


def test_flags_are_no_settings_and_hydras_words_belong_to_cfg_alone() -> None:
    given = ["all", "-c", "job", "seed=1", "job", "-h", "--cfg", "--config-dir", "d"]
    words = ["all", "seed=1", "job", "hydra.searchpath=['d']"]
    assert config.loading.without_flags(given) == (words, {"--cfg", "--help"})
    asked = [["seed=1,2", "-m"], ["--multirun"], ["m", "-c", "job"], []]
    assert [config.loading.is_multirun(each) for each in asked] == [True, True, False, False]


def test_a_key_is_required_where_all_groups_around_it_are() -> None:
    required = {key for key, its in keys_of(Settings).items() if its.required}
    assert required >= {
        "seed",
        "schedule.tsp.batch",
        "strategy",
        "callbacks",
        "allocation.rollouts",
    }
    optional = {
        "logger", "algorithm.clip_range", "model.lora.rank", "hardware.pools.NAME.gpu",
        "hardware.links.NAME.gb_s", "hardware.efficiency.train", "reward.rewards",
    }  # fmt: skip
    assert not required & optional
    assert optional <= {*keys_of(Settings)}


def test_required_keys_have_defaults_and_all_keys_a_meaning() -> None:
    tree = config.load([]).settings.tree
    assert all(
        OmegaConf.select(tree, key, default="absent") != "absent"
        for key, its in keys_of(Settings).items()
        if its.required
    )


def test_a_file_of_ones_own_cannot_extend_the_allow_list(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "mine.yaml").write_text(
        "# @package _global_\nallow_targets: [os]\ntrainer: {precision: 32-true}\n"
    )
    words = ["--config-dir", str(tmp_path), "trainer=mine"]
    said = r"^1 error .*\n  - allow_targets = \['os'\]: counts only on the command line"
    with pytest.raises(config.ConfigError, match=said):
        config.load(words)
    assert config.load([*words, "allow_targets=[fractions]"]).settings.allow_targets == [
        "fractions"
    ]


@pytest.mark.parametrize(
    ("word", "held", "counts"),
    [
        ("mine=[a]", ["a", " ", 3, None], ["a"]),
        ("+mine=[a]", ["a", "b"], ["a", "b"]),
        ("++mine=[a]", ["a"], ["a"]),
        ("mine=[a]", ["a", "${gone}", "???"], ["a", "${gone}", "???"]),
        ("mine=a", "a", []),
        ("mine={a:1}", {"a": 1}, []),
        ("minesweeper=[a]", ["a"], []),
        ("seed=1", ["a"], []),
    ],
)
def test_a_list_that_counts_on_the_command_line_alone(
    word: str, held: Any, counts: list[str]
) -> None:
    tree = OmegaConf.create({"mine": held})
    assert config.loading.command_line_list("mine", ["seed=2", word], tree) == counts


@pytest.mark.heavy
def test_a_bad_configuration_is_refused_quickly_without_torch(tmp_path: Path) -> None:
    """The bar is two seconds on an idle core; processor time is what a busy machine leaves
    unchanged."""
    code = (
        "import sys\nfrom digenrl.config import load_or_exit\n"
        "try:\n    load_or_exit(['seed=-1', 'experiment=digits'])\n"
        "finally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    before = os.times()
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    wall = time.monotonic() - began
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    assert done.returncode == 2, done.stderr
    assert "2 errors in the configuration" in done.stderr
    assert done.stderr.rstrip().endswith("False")
    assert min(used, wall) < 2.0
