"""The config.yaml of an earlier run is data: nothing in it reads the environment or names a host
unasked."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from digenrl import config
from digenrl.config.compose import compose_config
from digenrl.config.errors import MOST_SHOWN
from digenrl.config.help_pages import configuration_help
from digenrl.config.settings import RESUMABLE
from digenrl.config.stored import unconfirmed_hosts

SERVED = "reward.urls={judge_a: ['%s']}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/run-0"]))


def edited(run: Path, *changes: tuple[str, object]) -> Path:
    """`run` with keys of its config.yaml changed by hand."""
    tree = OmegaConf.load(run / "config.yaml")
    for key, value in changes:
        OmegaConf.update(tree, key, value, force_add=True)
    OmegaConf.save(tree, run / "config.yaml")
    return run


Load = Callable[[Path, list[str]], config.Composed]
RESUMED: Load = lambda run, words: config.load([f"resume={run}", *words])  # noqa: E731
LOOKED_AT: Load = lambda run, words: config.load(words, stored=run)  # noqa: E731
either = pytest.mark.parametrize("load", [RESUMED, LOOKED_AT], ids=["resumed", "looked at"])


@pytest.mark.heavy
@either
def test_an_interpolation_is_refused_unresolved(
    run: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "canary-5512")
    edited(
        run,
        ("reward.rewards.judge_a.scorer.path", "/tmp/${oc.env:CANARY}"),
        ("seed", "${max_rl_steps}"),
    )
    with pytest.raises(config.ConfigError) as caught:
        load(run, [])
    assert r"reward.rewards.judge_a.scorer.path = /tmp/${oc.env:CANARY}: is refused" in str(
        caught.value
    )
    assert "seed = ${max_rl_steps}" in str(caught.value)
    assert "canary-5512" not in str(caught.value)


@pytest.mark.heavy
@either
def test_a_stored_host_off_this_machine_must_be_confirmed(run: Path, load: Load) -> None:
    url, host = "http://127.0.0.1:1\\@judge.example/", r"127.0.0.1:1\@judge.example"
    edited(
        run, ("reward.urls", {"judge_a": [url]}), ("confirm_hosts", [host])
    )  # what is stored confirms nothing
    with pytest.raises(config.ConfigError) as caught:
        load(run, [])
    assert f"reward.urls.judge_a[0]: names {host}" in str(caught.value)
    assert f"add confirm_hosts=[{host}] to the command line" in str(caught.value)
    confirmed = load(run, [f"confirm_hosts=['{host}']"])
    assert confirmed.settings.tree.reward.urls.judge_a == [url]
    assert load(run, [SERVED % url]), "the command line names it itself"
    assert load(run, [SERVED % "http://mine.example:1"]).settings.tree.reward.urls.judge_a == [
        "http://mine.example:1"
    ]


@pytest.mark.parametrize(
    ("path", "text", "host"),
    [
        ("urls", "http://judge.example:8700/x", "judge.example:8700"),
        ("urls", "HTTPS://judge.example", "judge.example"),
        ("urls", "http://127.0.0.1.example:1", "127.0.0.1.example:1"),
        ("urls", "http://0.0.0.0:8700", "0.0.0.0:8700"),
        ("urls", "http://127.0.0.1:8700", None),
        ("urls", "http://localhost:8700/v1", None),
        ("urls", "http://[::1]:8700", None),
        ("ray.address", "head.example:6379", "head.example:6379"),
        ("ray.address", "10.0.0.7:6379", "10.0.0.7:6379"),
        ("ray.address", "[2001:db8::7]:6379", "[2001:db8::7]:6379"),
        ("ray.address", "head", "head"),
        ("ray.address", "127.0.0.1:6379", None),
        ("ray.address", "localhost:6379", None),
        ("ray.address", "auto", None),
    ],
)
def test_a_host_is_known_by_its_place_and_with_or_without_a_scheme(
    path: str, text: str, host: str | None
) -> None:
    head, _, leaf = path.partition(".")
    tree = {head: {leaf: text} if leaf else text}
    told = unconfirmed_hosts(tree, tree, [])
    assert [line.partition(", ")[0] for line in told] == [f"{path}: names {host}"] * (
        host is not None
    )
    assert not unconfirmed_hosts(tree, tree, [str(host)]), "it is confirmed"
    assert not unconfirmed_hosts({}, tree, []), "nobody stored it"


@pytest.mark.heavy
def test_a_token_comes_from_our_own_variables_only(run: Path) -> None:
    edited(run, ("reward.heldout.judge_b.scorer.token_env", "HF_TOKEN"))
    with pytest.raises(config.ConfigError, match="token_env = HF_TOKEN"):
        config.load([f"resume={run}"])


@pytest.mark.heavy
def test_a_resumed_run_changes_only_what_the_list_allows(run: Path) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load(
            [
                f"resume={run}",
                "model.lora.rank=4",
                "seed=3",
                "max_rl_steps=50",
                "~algorithm.optimizer.eps",
            ]
        )
    said = str(caught.value)
    for part in (
        "model.lora.rank = 4 (stored: 16)",
        "seed = 3 (stored: 0)",
        "eps = absent (stored: 1e-08)",
    ):
        assert part in said
    assert all(key in said.partition("May change: ")[2] for key in RESUMABLE)
    assert "max_rl_steps = 50" not in said
    allowed = [
        "max_rl_steps=50",
        "algorithm.optimizer.lr=1e-5",
        "~callbacks.recorder",
        "+callbacks.checkpoint.every=3",
        SERVED % "http://mine.example",
    ]
    assert config.load([f"resume={run}", *allowed]).settings.max_rl_steps == 50
    assert config.load(["model.lora.rank=4"], stored=run).settings.tree.model.lora.rank == 4, (
        "looking changes nothing"
    )


@pytest.mark.heavy
def test_the_keys_that_may_change_exist_and_are_marked_in_help() -> None:
    tree = compose_config("train", [])
    absent = [key for key in RESUMABLE if OmegaConf.select(tree, key, default="absent") == "absent"]
    optional = {"hardware.efficiency", "hardware.seconds", "model.gradient_checkpointing"}
    assert set(absent) <= optional, "keys that a configuration may lack"
    marked = {
        line.split()[1]
        for line in configuration_help("train").splitlines()
        if line.startswith("* ")
    }
    assert {"max_rl_steps", "allocation.trainers", "schedule.tsp.batch", "callbacks"} <= marked
    assert not marked & {"seed", "schedule.async_steps", "data.group_size", "model.lora.rank"}


@pytest.mark.heavy
@either
def test_the_directory_of_a_plan_is_no_run(tmp_path: Path, load: Load) -> None:
    plan = config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/plan-0"], "plan"))
    with pytest.raises(
        config.ConfigError, match=r"plan-0: is the directory of a plan; .* RUN="
    ) as caught:
        load(plan, [])
    assert len(caught.value.problems) == 1
    with pytest.raises(config.ConfigError, match=rf"run = .*RUN=\.\.\.\)\. Nearest: {plan}"):
        config.load([], stored=tmp_path / "plan-1")


@pytest.mark.heavy
def test_a_class_that_moved_is_found_where_it_is_now(run: Path) -> None:
    """The run was stored before `digenrl.extensions.methods` existed."""
    tree = OmegaConf.load(run / "config.yaml")
    tree.algorithm.sde = {"_target_": "digenrl.diffusion.sde.LinearSDE", "noise_level": 0.9}
    OmegaConf.save(tree, run / "config.yaml")
    resumed = RESUMED(run, []).settings
    assert resumed.algorithm.sde._target_ == "digenrl.extensions.methods.sde.LinearSDE"


@pytest.mark.heavy
@pytest.mark.parametrize("value", [[1], "x", {"a": {"b": 1}}], ids=["list", "text", "mapping"])
def test_a_group_of_another_kind_is_refused_or_taken_and_never_an_error_of_ours(
    run: Path, value: object
) -> None:
    kept = (run / "config.yaml").read_text()
    for key in OmegaConf.load(run / "config.yaml"):
        (run / "config.yaml").write_text(kept)
        edited(run, (str(key), None), (str(key), value))
        with suppress(config.ConfigError):
            LOOKED_AT(run, [])


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"schedule_tag_gap_prompts_{number}: 1\n" for number in range(8000)),
        "zz:\n" + "".join(f"- http://host{number}:1\n" for number in range(8000)),
        "".join(f"a{number}: {{_target_: digenrl.Suite{number}}}\n" for number in range(5000)),
    ],
    ids=["keys", "hosts", "targets"],
)
def test_a_file_of_thousands_of_faults_is_refused_soon_and_in_few_words(
    tmp_path: Path, text: str
) -> None:
    run = config.prepare_run_dir(config.load([f"hydra.run.dir={tmp_path}/run-0"]))
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + text)
    began = time.process_time()
    with pytest.raises(config.ConfigError) as caught:
        config.load([], stored=run)
    assert time.process_time() - began < 15
    assert len(caught.value.problems) <= MOST_SHOWN
    assert not any("nearest: schedule_tag_gap" in each for each in caught.value.problems)
    assert "more" in str(caught.value).splitlines()[-1] or "zz" in text
    assert len(str(caught.value)) < 40 << 20


@pytest.mark.heavy
def test_an_account_that_a_stored_logger_names_must_be_confirmed(tmp_path: Path) -> None:
    words = [f"hydra.run.dir={tmp_path}/run-0", "logger=wandb", "logger.wandb.entity=team"]
    run = config.prepare_run_dir(config.load(words))
    with pytest.raises(config.ConfigError, match=r"confirm_hosts=\[wandb\.ai/team\]"):
        RESUMED(run, [])
    for given in (
        "confirm_hosts=[wandb.ai/team]",
        "logger.wandb.entity=team",
        "logger.wandb.entity=null",
        "logger.wandb.entity=mine",
        "logger.wandb.offline=true",
    ):
        assert RESUMED(run, [given]).resumed
    assert not LOOKED_AT(run, []).settings.confirm_hosts  # nothing is logged there
