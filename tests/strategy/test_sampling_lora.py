"""`sampling.lora`: every schedule and every rank draws with the adapter, and trains without it."""

# Its experiments need digenrl.extensions.methods.
from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.config import ConfigError, load
from digenrl.parts import check_parts
from digenrl.strategy.publishing import agree_on_sampling_adapter
from digenrl.transport.weights import WeightsError
from tests.models.test_lora_files import LORA, as_peft
from tests.models.tiny_policies import randomise_lora
from tests.strategy.processes import TINY, Job, completed, run_series
from tests.strategy.test_equality import lend_always
from tests.strategy.test_evaluating import numbers, samples

NFT = (
    "experiment=digits_nft",
    *(word for word in TINY[1:] if not word.startswith("~")),
    "callbacks.evaluation.samples_per_prompt=2",
    "callbacks.evaluation.max_prompts=3",
    "callbacks.evaluation.every=1",
    "algorithm.optimizer.lr=0.01",
    "data.prompts_per_batch=2",
)
LENT = ("schedule=full", "schedule.gap=2", "schedule.tsp.batch=1", "schedule.async_steps=0")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: Any) -> Path:
    """An adapter of all layers of the digits' base, as PEFT writes it."""
    words = [f"model.lora.{key}={LORA[key]}" for key in ("rank", "alpha")]
    policy = load([*NFT, *words]).settings.build("model")
    randomise_lora(policy, std=0.1)
    return as_peft(policy, tmp_path_factory.mktemp("adapter"))


@pytest.mark.processes
def test_every_schedule_draws_with_it_and_trains_without(tmp_path: Path, adapter: Path) -> None:
    """Scores, weights and evaluations are equal bit by bit, whoever draws: rollouts, lending
    trainers, trainers that evaluate. Steps in one forward (TSP) round otherwise."""
    words = (*NFT, f"sampling.lora={adapter}")
    jobs = [
        Job("sync", load(list(words)).settings),
        Job("tsp", load([*words, "schedule=gap_tsp"]).settings),
        Job("lent", load([*words, *LENT]).settings, lend_always),
        Job("trainers", load([*words, "allocation.evaluation=trainers"]).settings),
        Job("without", load(list(NFT)).settings),
    ]
    found: dict[str, Any] = {}
    for job, cluster in run_series(tmp_path, 1, 1, jobs):
        record = completed(cluster)
        rewards = {key: cell.reward for key, cell in record.cells.items()}
        evaluated = numbers(cluster.metrics()), samples(cluster.run_dir)
        found[job.name] = rewards, record.weights, *evaluated
        assert cluster.spans("lend") or job.name != "lent", "no trainer ever lent"
    rewards, weights, lines, pictures = found["sync"]
    for name in ("lent", "trainers"):
        assert all(torch.equal(found[name][0][key], value) for key, value in rewards.items()), name
        assert all(torch.equal(found[name][1][key], value) for key, value in weights.items()), name
        assert found[name][2] == lines, name
        assert all((found[name][3][key] == value).all() for key, value in pictures.items()), name
    for key, value in weights.items():
        torch.testing.assert_close(found["tsp"][1][key], value, rtol=0, atol=1e-3)
    assert all(torch.equal(found["tsp"][0][key], r) for key, r in rewards.items() if key[0] == 0)
    plain = found["without"]
    assert not all(torch.equal(plain[0][key], value) for key, value in rewards.items())
    assert plain[1].keys() == weights.keys(), "the adapter is none of the trained weights"
    assert not (plain[3]["eval-0.npz/media"] == pictures["eval-0.npz/media"]).all()
    assert lines[0]["kl"] == 0.0, "the base draws with the adapter too"


@pytest.mark.processes
@pytest.mark.slow
def test_sharded_trainers_train_what_one_trains(tmp_path: Path, adapter: Path) -> None:
    words = (*NFT, f"sampling.lora={adapter}", "model.dtype=float64")
    words = (*words, "sampling.storage_dtype=float64")
    found = {}
    for trainers, sharding in ((1, "ddp"), (2, "fsdp")):
        config = load([*words, f"parallel.sharding={sharding}"]).settings
        for _, cluster in run_series(
            tmp_path / sharding, trainers, 1, [Job(sharding, config, lend_always)]
        ):
            found[sharding] = completed(cluster).weights
    for name, value in found["ddp"].items():
        torch.testing.assert_close(found["fsdp"][name], value, rtol=1e-9, atol=1e-11)


def test_ranks_that_read_other_files_are_refused() -> None:
    handshake = Handshake()
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    store = StoreClient(server.host, server.port, handshake)
    agree_on_sampling_adapter(Control(store, 0), 0, "a1")
    agree_on_sampling_adapter(Control(store, 1), 1, "a1")
    agree_on_sampling_adapter(Control(store, 2), 2, None)
    with pytest.raises(WeightsError, match=r"digest b2, trainer 0 one of a1.*the same file"):
        agree_on_sampling_adapter(Control(store, 3), 3, "b2")
    server.close()


@pytest.mark.parametrize("experiment", ["digits_flowgrpo", "digits_mixgrpo", "mixture_distill"])
def test_a_loss_that_sees_the_sampler_is_refused(experiment: str, adapter: Path) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.lora = .*algorithm=nft, awm"):
        load([f"experiment={experiment}", f"sampling.lora={adapter}"])


@pytest.mark.parametrize("method", ["nft", "awm", "dgpo", "rvm", "dpo"])
def test_methods_that_noise_finished_samples_take_it(method: str, adapter: Path) -> None:
    check_parts(load([f"experiment=digits_{method}", f"sampling.lora={adapter}"]).settings)


def test_another_models_file_is_refused_before_a_rank_starts(adapter: Path) -> None:
    words = ["experiment=scenes_fewstep", f"sampling.lora={adapter}"]
    with pytest.raises(ValueError, match=r"sampling\.lora = .*set sampling\.lora=null"):
        check_parts(load(words).settings)
