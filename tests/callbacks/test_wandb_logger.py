"""W&B without a key and without a server: the run is recorded offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from digenrl.callbacks.wandb_logger import WandbLogger, has_key, kept_id


@pytest.fixture(autouse=True)
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    yield
    wandb.teardown()


def test_a_key_is_found_in_the_environment_or_the_netrc_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_key()


@pytest.mark.heavy
def test_without_a_key_the_run_is_recorded_offline(tmp_path: Path) -> None:
    logger = WandbLogger(tmp_path / "run-0")
    logger.log_hyperparams({"seed": 0})
    logger.log_metrics({"reward": 0.5}, step=1)
    assert logger.experiment.offline
    assert logger.experiment.name == "run-0"
    logger.experiment.finish()
    assert list((tmp_path / "run-0" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.slow
def test_a_server_that_is_down_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    logger = WandbLogger(tmp_path / "run-0", timeout_s=2.0)
    with pytest.warns(UserWarning, match="W&B cannot be reached"):
        logger.log_metrics({"reward": 0.5}, step=1)
    assert logger.experiment.offline
    assert logger.experiment.id == kept_id(tmp_path / "run-0" / "wandb")
    logger.experiment.finish()
