"""A scorer that the ranks of a machine share: one process for all, its death costs nobody a score,
and it takes GPUs that no rank has."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from digenrl.config.relations import relation_problems
from digenrl.hardware import assign_ranks, parse_hardware
from digenrl.rewards import managed, vlm_server
from digenrl.rewards.judge import server_command
from digenrl.rewards.managed import ManagedScorer
from digenrl.rewards.protocol import RewardError, RewardUnavailable
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt
from reward_models.jpeg_size import JpegSize
from reward_models.qwen_vl import write_tiny
from tests.changed import hardware_settings
from tests.training import commands

NODE = {"_target_": "reward_models.jpeg_size.JpegSize", "quality": 80}
PROMPTS = [Prompt("a"), Prompt("b")]
MEDIA = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of locks for each test, which has the same parent as all others."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return True


@pytest.mark.processes
def test_ranks_share_a_process_and_whoever_asks_after_its_death_starts_it_again(
    folder: Path,
) -> None:
    expected = JpegSize(80)(MEDIA, PROMPTS)
    first, second = (RewardSuite({"jpeg": {"scorer": NODE}}, placement="managed") for _ in "ab")
    try:
        assert torch.equal(first.score(MEDIA, PROMPTS)["jpeg"], expected)
        assert torch.equal(second.score(MEDIA, PROMPTS)["jpeg"], expected)
        owner, guest = first.find_scorer("jpeg"), second.find_scorer("jpeg")
        assert isinstance(owner, ManagedScorer)
        assert isinstance(guest, ManagedScorer)
        assert guest._child is None
        assert owner._child is not None
        os.kill(owner._child.pid, signal.SIGKILL)
        assert gone(owner._child.pid)
        assert torch.equal(second.score(MEDIA, PROMPTS)["jpeg"], expected)
        assert guest._child is not None
        assert torch.equal(first.score(MEDIA, PROMPTS)["jpeg"], expected)
        assert owner._child is None
        assert (
            first.failure_counts()["jpeg"].missing == second.failure_counts()["jpeg"].missing == 0
        )
        assert first.scorer_identities() == second.scorer_identities()
        last = guest._child.pid
    finally:
        first.close()
        second.close()
    assert gone(last)
    assert not list(folder.iterdir()), "nothing is left of the ranks' folder"


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_that_keeps_dying_ends_the_run() -> None:
    scorer = ManagedScorer({"_target_": "tests.rewards.services.Moody"}, max_deaths=2)
    try:
        with pytest.raises(RewardUnavailable, match=r"died \(exit code -9\); it starts again"):
            scorer(MEDIA[:1], [Prompt("killed")])
        with pytest.raises(RewardError, match="2 times in a row") as caught:
            scorer(MEDIA[:1], [Prompt("killed")])
        assert type(caught.value) is RewardError
    finally:
        scorer.close()


def test_a_process_takes_the_last_gpus_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(managed.accelerator, "current_device", lambda: torch.device("cuda", 1))
    two, one = (ManagedScorer({"_target_": "x", "device": "auto"}) for _ in "ab")
    held: list[int] = []
    assert two._take_free_gpus(managed._lock_folder(), held) == [3]
    assert one._take_free_gpus(managed._lock_folder(), held) == [2]
    with pytest.raises(
        RewardError, match=r"takes 1 GPUs, but .* sees 0 .*hardware\.pools\.NAME\.judges"
    ):
        one._take_free_gpus(
            managed._lock_folder(), held
        )  # GPU 1 is this rank's, and 0 another rank's
    for descriptor in held:
        os.close(descriptor)
    both = ManagedScorer({"_target_": "x", "url": "http://x", "serve": {"gpus": 2}})
    held = []
    assert both._take_free_gpus(managed._lock_folder(), held) == [2, 3]
    for descriptor in held:
        os.close(descriptor)


def tree(judges: int, placement: str = "managed", role: str = "auto") -> dict[str, Any]:
    pool = {"gpu": "H100", "count": 16, "per_node": 8, "role": role, "judges": judges}
    reward = {
        "placement": "thread",
        "rewards": {"hpsv3": {"scorer": {"device": "auto"}, "placement": placement}},
    }
    return {"reward": reward, "hardware": {"pools": {"a": pool}}}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (tree(0), r"hardware.pools.a.judges = 0: hpsv3 placed managed needs 1 GPUs"),
        (tree(2), r"hardware.pools.a.judges = 2: .*take 1 GPUs of each node \(hpsv3\)"),
        (tree(1, "thread"), r"hardware.pools.a.judges = 1: .*\(none is\)"),
        (tree(1), None),
        (tree(0, "thread"), None),
        (tree(0, role="trainer"), None),
    ],
)
def test_a_profile_gives_managed_rewards_what_they_take(
    settings: dict[str, Any], problem: str | None
) -> None:
    found = [line for line in relation_problems(settings) if "judges" in line]
    if problem is None:
        assert not found
    else:
        (line,) = found
        assert re.search(problem, line), line


def test_gpus_of_judges_are_no_ranks() -> None:
    sizes = {"memory_gib": 79, "tflops": 989, "hbm_tb_s": 3, "intra_gb_s": 450, "inter_gb_s": 50}
    node = {"pools": {"a": {**tree(2)["hardware"]["pools"]["a"], **sizes}}}
    hardware = parse_hardware(hardware_settings(node["pools"]))
    (pool,) = hardware.pools
    assert (pool.count, pool.per_node, pool.judges) == (12, 6, 4)
    assert (hardware.gpus, hardware.booked) == (12, 16)
    assert len(assign_ranks(hardware, 4, 8)) == 12
    with pytest.raises(ValueError, match="has 8 GPUs left for that role"):
        assign_ranks(hardware, 4, 9)
    node["pools"]["a"]["judges"] = 8
    with pytest.raises(ValueError, match="leave one for a rank"):
        parse_hardware(hardware_settings(node["pools"]))


# ---- the server on transformers


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> vlm_server.Chat:
    path = tmp_path_factory.mktemp("vlm")
    torch.manual_seed(0)
    write_tiny(path, "Qwen2_5_VL").save_pretrained(path)
    return vlm_server.Chat(str(path), "judge")


@pytest.fixture
def client(chat: vlm_server.Chat) -> Iterator[TestClient]:
    with TestClient(vlm_server.make_app(chat, "secret")) as client:
        client.headers["authorization"] = "Bearer secret"
        yield client


def body(colour: str = "red", **more: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (60, 60), colour).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    content = [
        {"type": "text", "text": "how red?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return {"model": "judge", "messages": [{"role": "user", "content": content}], **more}


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_constrained_answer_is_one_of_the_numbers(client: TestClient) -> None:
    from reward_models.vlm_judge import _form

    free = said(client.post("/v1/chat/completions", json=body(max_tokens=8)))
    bound = said(client.post("/v1/chat/completions", json=body(**_form("score", 10))))
    assert list(json.loads(bound)) == ["score"]
    assert 0 <= json.loads(bound)["score"] <= 10
    assert free != bound
    only = said(client.post("/v1/chat/completions", json=body(**_form("score", 0))))
    assert only == '{"score": 0}'


def test_the_likeliest_number_wins(chat: vlm_server.Chat) -> None:
    """Greedy over the allowed tokens: the first digit is the likeliest after `{"score": `."""
    from reward_models.vlm_judge import _form

    form = body(**_form("score", 9))
    number = json.loads(chat.generate_answer(form))["score"]
    tokenizer = chat.processor.tokenizer
    picture = Image.new("RGB", (60, 60), "red")
    turns = [{"role": "user", "content": [{"type": "text", "text": "how red?"}, {"type": "image"}]}]
    text = chat.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = chat.processor(text=[text + '{"score": '], images=[picture], return_tensors="pt").to(
        chat.device
    )
    with torch.no_grad():
        logits = chat.model(**inputs).logits[0, -1]
    digits = tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)])
    assert number == int(logits[digits].argmax())


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "another"}, 404),
        ({"messages": [{"role": "user"}]}, 400),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x"}}]}]},
            400,
        ),
    ],
)  # fmt: skip
def test_another_form_is_refused(client: TestClient, change: dict[str, Any], status: int) -> None:
    assert client.post("/v1/chat/completions", json=body() | change).status_code == status
    assert client.post("/v1/chat/completions", content=b"{").status_code == 400
    assert client.get("/health").status_code == 200
    del client.headers["authorization"]
    assert client.post("/v1/chat/completions", json=body()).status_code == 401


def test_vllm_serves_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = server_command("/weights", "judge", 8000, 0)
    assert "digenrl.rewards.vlm_server" in own
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    served = server_command("/weights", "judge", 8000, 2, ["--max-model-len", 4096])
    text = " ".join(served)
    assert "serve /weights --host 127.0.0.1 --port 8000 --served-model-name judge" in text
    assert text.endswith("--tensor-parallel-size 2 --max-model-len 4096")


@pytest.mark.processes
def test_a_child_that_was_killed_leaves_nothing_either(folder: Path) -> None:
    scorer = ManagedScorer({"_target_": "tests.rewards.services.Littering"})
    try:
        scorer(MEDIA, PROMPTS)
        assert list(folder.rglob("litter-*")), "its temporary files are beside its lock"
    finally:
        scorer.close()
    assert not list(folder.iterdir())


def test_the_folder_of_others_and_of_the_living_stays(folder: Path) -> None:
    lock = managed._try_lock(managed._lock_folder() / "one")
    assert lock is not None
    managed.remove_unused_folder(managed._folder_of(os.getppid()))
    assert list(folder.iterdir())
    os.close(lock)
    managed.remove_shared_folder(os.getppid())
    assert not list(folder.iterdir())
    (folder / "elsewhere").mkdir()
    managed._folder_of(os.getppid()).symlink_to(folder / "elsewhere")
    managed.remove_shared_folder(os.getppid())
    assert (folder / "elsewhere").is_dir()
    with pytest.raises(RewardError, match="belongs to another"):
        managed._lock_folder()


# ---- a run


@pytest.fixture
def train_command(tmp_path: Path) -> Iterator[Any]:
    yield from commands(tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_goes_on_when_its_judge_is_killed(train_command: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    train = train_command(
        "reward=vlm_judge",
        "reward.placement=managed",
        "reward.rewards.vlm_judge.scorer.serve.build=tiny",
        "max_rl_steps=4",
        "allocation.rollouts=2",
        "schedule.skip_zero=false",
    )
    judges: dict[int, psutil.Process] = {}

    def look() -> list[psutil.Process]:
        found = []
        with suppress(psutil.Error):  # a process that has just ended
            for child in (child for rank in train.ranks() for child in rank.children()):
                found += [  # not what a server forks in turn
                    server
                    for server in child.children()
                    if any("rewards.vlm_server" in word for word in server.cmdline())
                ]
        judges.update({child.pid: child for child in found})
        return found

    train.wait_for_step(1)
    (judge,) = look()  # two rollouts ask one judge
    judge.kill()
    while train.poll() is None:
        look()
        time.sleep(0.1)
    assert train.finish() == 0, train.stderr
    assert len(judges) == 2
    assert all(gone(pid) for pid in judges)
    steps = [row for row in train.rows("metrics.jsonl") if row["kind"] == "step"]
    assert len(steps) == 4
    print(steps[-1])
    rewards = [row["reward/vlm_judge"] for row in steps]
    assert all(value > 0 for value in rewards), rewards
