"""Dumps of skipped updates can be read back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from digenrl.extensions.dump.batches import dump_to
from tests.algorithms.toy_policy import ToyPolicy, batch, roll


def test_a_dump_holds_the_whole_micro_batch_and_is_bounded(tmp_path: Path) -> None:
    blocks = roll(ToyPolicy(), storage=torch.bfloat16)
    dump = dump_to(tmp_path / "skipped", keep=2)
    for version in range(4):
        dump(batch(blocks, version=version), "gradient norm is nan")
    folders = sorted((tmp_path / "skipped").iterdir())
    assert [folder.name for folder in folders] == [
        "rank0-version0-update0",
        "rank0-version1-update0",
    ]
    tensors = load_file(folders[0] / "batch.safetensors")
    assert torch.equal(tensors["1/latents"], blocks[1].latents)
    assert torch.equal(tensors["0/log_probs"], blocks[0].log_probs)
    assert torch.equal(tensors["0/condition/c"], blocks[0].condition["c"])
    assert tensors["reward/r"].shape == (2, 4)
    facts = json.loads((folders[0] / "batch.json").read_text())
    assert facts["reason"] == "gradient norm is nan"
    assert [block["uid"] for block in facts["blocks"]] == [100, 101]
