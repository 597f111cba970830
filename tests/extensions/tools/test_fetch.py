"""What `digenrl fetch` downloads is what a run opens, from a hub that serves the tiny builds."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from hydra.utils import get_class

from digenrl import config as configuration
from digenrl.extensions.tools.downloads import IGNORED, find_downloads
from digenrl.model_folder import require_data
from digenrl.models import tiny as builds
from digenrl.rewards.published import WEIGHTS, files_read
from reward_models import weights as scorer_weights
from reward_models.aesthetic import _HEAD_FILE as HEAD
from tests.extensions.tools.hub import COMMIT, Hub
from tests.models.families import experiments
from tests.training import Train, commands

FIRST_OF_MODEL = {model: name for name, model in reversed(experiments().items())}
SOME = sorted(FIRST_OF_MODEL.values())[::3]
CLUTTER = (
    "README.md",
    "model.safetensors",
    "flux1-dev.safetensors",
    "text_encoders/clip_g.safetensors",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin",
    "transformer/diffusion_pytorch_model.fp16.safetensors",
)
"""Files of other layouts and precisions that published repositories have as well."""
LARGE = "tokenizer.large"
"""A file of several of the client's pieces of 10 MiB."""


@contextmanager
def opened(folder: Path) -> Iterator[set[str]]:
    """Collect the names of the files below `folder` that any code of this process opens, libraries
    in Rust included."""
    libc, found = ctypes.CDLL(None, use_errno=True), set[str]()
    queue = libc.inotify_init1(os.O_NONBLOCK)
    places = {
        libc.inotify_add_watch(queue, os.fsencode(place), 0x20): place  # IN_OPEN
        for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    }
    try:
        yield found
        while True:
            try:
                events = os.read(queue, 1 << 16)
            except BlockingIOError:
                break
            while events:
                watch, mask, _, length = struct.unpack_from("iIII", events)
                name = events[16 : 16 + length].rstrip(b"\0").decode()
                if name and not mask & 0x40000000:  # a directory
                    found.add(str((places[watch] / name).relative_to(folder)))
                events = events[16 + length :]
    finally:
        os.close(queue)


def copied(source: Path, target: Path) -> Path:
    """A repository: the files of `source`, in files of their own, beside what else is published."""
    for file in (path for path in source.rglob("*") if path.is_file()):
        to = target / file.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(file.read_bytes())
    for name in CLUTTER:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).touch()
    return target


@pytest.mark.heavy
@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(
            name,
            marks=() if name in SOME else pytest.mark.slow,
        )
        for name in experiments()
    ],
)
def test_a_run_opens_what_is_listed_of_its_checkpoint(experiment: str, tmp_path: Path) -> None:
    (wanted,) = (
        each
        for each in find_downloads(configuration.load([f"experiment={experiment}"]).settings)[0]
        if each.key == "model.path"
    )
    words = [f"experiment={experiment}", "hardware=cpu_tiny"]
    node = configuration.load(words).settings.tree.model
    policy_class: Any = get_class(node._target_)
    repository = copied(builds.ensure(policy_class.facts()), tmp_path)
    names = [str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()]
    listed = set(
        filter_repo_objects(names, allow_patterns=list(wanted.files), ignore_patterns=list(IGNORED))
    )
    settings: Any = dict(node) | {"path": str(repository), "build": "real", "dtype": "float32"}
    settings.pop("_target_")
    require_data(repository)  # reads whatever configuration is there, and remembers it
    with opened(repository) as read:
        policy = policy_class(**settings)
        policy.sigma_grid(4)
        policy.codec._pipeline  # noqa: B018  the text encoders
        policy.codec._vae  # noqa: B018
    weights = {name for name in names if name.endswith((".safetensors", ".bin"))}
    assert read <= listed
    assert weights & listed == weights & read
    assert all(name.endswith(".json") for name in listed - read)  # a tokenizer's small files


@pytest.mark.parametrize(
    "target",
    [
        target
        for target, sources in WEIGHTS.items()
        if "hf download" in sources.get("path", "") and not target.endswith("ClipStatistics")
    ],
)
def test_a_scorer_opens_what_is_listed(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny build is a checkpoint of the real format, which the real code loads. Statistics load
    the CLIP of a scorer."""
    read, here = set[str](), set[str]()

    @contextmanager
    def watched(path: str | None, build: str, make: Callable[[Path], None]) -> Iterator[str]:
        with scorer_weights.checkpoint(path, build, make) as folder, opened(Path(folder)) as found:
            here.update(file.name for file in Path(folder).rglob("*") if file.is_file())
            yield folder
        read.update(Path(name).name for name in found)

    scorer = get_class(target)
    for owner in scorer.__mro__:
        if hasattr(module := sys.modules[owner.__module__], "checkpoint"):
            monkeypatch.setattr(module, "checkpoint", watched)
    scorer(path=None, build="tiny")
    published = WEIGHTS[target]
    patterns = [
        pattern
        for argument, source in published.items()
        for pattern in (source.split()[3:] or files_read(argument))
    ]
    listed = set(filter_repo_objects(here, allow_patterns=patterns, ignore_patterns=list(IGNORED)))
    single = [source.split()[3] for source in published.values() if len(source.split()) == 4]
    # Published as one file of that name, which is another format than the tiny build's.
    own = {name for name in here if name.endswith(".safetensors")} if single else {HEAD}
    assert read
    assert read - own <= listed
    assert {name for name in listed if name.endswith(".safetensors")} <= read


def test_the_model_of_a_judge_is_fetched_where_the_run_serves_it() -> None:
    words = ["experiment=sd35_flowgrpo", "hardware=node_8xh100", "reward=vlm_judge", "data=scenes"]
    own = ["reward.placement=managed", "hardware.pools.h100.judges=1"]
    judge = "Qwen/Qwen2.5-VL-7B-Instruct"
    wanted, elsewhere = find_downloads(configuration.load(words).settings)
    assert judge not in [each.repository for each in wanted]
    assert [line for line in elsewhere if judge in line and "by you" in line]
    wanted, elsewhere = find_downloads(configuration.load([*words, *own]).settings)
    (found,) = (each for each in wanted if each.repository == judge)
    assert found.key == "reward.rewards.vlm_judge.scorer.model"
    assert {"config.json", "model.safetensors", "chat_template*"} <= set(found.files)
    assert not elsewhere


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with the tiny FLUX and a PickScore, beside what else is published."""
    scorer = tmp_path / "pickscore"
    scorer.mkdir()
    scorer_weights.make_clip(scorer)
    (scorer / "pytorch_model.bin").write_bytes(b"0" * 1000)
    (scorer / LARGE).write_bytes(b"0" * (24 << 20))
    served = Hub(
        {
            "black-forest-labs/FLUX.1-dev": copied(builds.ensure("flux"), tmp_path / "flux"),
            "yuvalkirstain/PickScore_v1": scorer,
        }
    )
    yield served
    served.shutdown()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    """Starts commands, and leaves none behind."""
    (tmp_path / "commands").mkdir()
    yield from commands(tmp_path / "commands")


def command(running: Any, hub: Hub, home: Path, *words: str) -> Train:
    """`digenrl WORDS` of the FLUX experiment, with this hub and an empty or filled cache, to its
    end."""
    environment = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0" if words[0] == "fetch" else "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        importlib.reload(constants)  # the environment is read by an import
        words = (*words, "experiment=flux1_flowgrpo")
        begun: Train = running(*words[1:], command=words[0], tiny=(), fork=True)
    importlib.reload(constants)
    begun.finish()
    return begun


@pytest.mark.processes
def test_fetch_says_sizes_resumes_skips_and_mends(running: Any, hub: Hub, tmp_path: Path) -> None:
    home, weights = tmp_path / "home", "transformer/diffusion_pytorch_model.safetensors"
    published = hub.repositories["black-forest-labs/FLUX.1-dev"] / weights
    hub.cut[LARGE] = 12 << 20
    first = command(running, hub, home, "fetch")
    assert first.finish() == 0, first.stderr
    assert re.search(r"FLUX.1-dev: \d+ files, .* licence no-commercial-use", first.stderr)
    assert first.stdout.splitlines()[-1] == "Everything is here."
    assert not {name for name, _ in hub.sent} & set(CLUTTER[2:])  # PickScore has the first two
    (begun,) = (first for name, first in hub.sent if name == LARGE and first)
    assert begun >= 10 << 20  # it went on where it was cut, in the client's pieces

    hub.sent.clear()
    again = command(running, hub, home, "fetch")
    assert "0.00 to download" in again.stderr
    assert hub.sent == []

    snapshot = home / "hub/models--black-forest-labs--FLUX.1-dev/snapshots" / COMMIT
    whole = published.read_bytes()
    (snapshot / weights).resolve().write_bytes(whole[:-100])
    mended = command(running, hub, home, "fetch")
    assert f"{len(whole) - 100} bytes instead of {len(whole)}" in mended.stderr
    assert [name for name, _ in hub.sent] == [weights]
    assert (snapshot / weights).read_bytes() == whole

    # What was fetched is enough for a run: it is refused for the GPUs that this machine lacks.
    run = command(running, hub, home, "train", "hardware=single_gpu")
    assert run.finish() == 2
    assert "sees none" in run.stderr


@pytest.mark.processes
def test_a_gated_model_and_a_machine_without_a_network_are_told_what_to_do(
    running: Any, hub: Hub, tmp_path: Path
) -> None:
    hub.gated = ("black-forest-labs/FLUX.1-dev",)
    refused = command(running, hub, tmp_path / "home", "fetch")
    assert refused.finish() == 2
    assert "accept its licence at https://huggingface.co/black-forest-labs" in refused.stderr
    listed = command(running, hub, tmp_path / "home", "fetch", "list=true")
    assert listed.finish() == 0
    assert [line.split()[2] for line in listed.stdout.splitlines()] == list(hub.repositories)
    run = command(running, hub, tmp_path / "home", "train", "hardware=single_gpu")
    assert "`digenrl fetch " in run.stderr
    assert "accept its licence at https://huggingface.co/black-forest-labs" in run.stderr
