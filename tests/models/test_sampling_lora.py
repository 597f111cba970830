"""`sampling.lora`: a constant adapter that draws, and that training does not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl.models.lora_files import LoraFileError
from digenrl.models.pipeline import DiffusersPolicy
from tests.extensions.methods.test_nft import nft
from tests.models.test_lora_files import (
    FIVE,
    FORMATS,
    as_diffusers,
    as_kohya,
    drawn,
)
from tests.models.tiny_policies import LORA, make, randomise_lora

pytestmark = pytest.mark.heavy


def adapted(family: str = "flux", seed: int = 1) -> DiffusersPolicy:
    policy = make(family)
    randomise_lora(policy, seed)
    return policy


@torch.no_grad()
def sampled(policy: DiffusersPolicy) -> Tensor:
    with policy.adapter.sampling():
        return drawn(policy)


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("family", FIVE)
def test_every_format_draws_what_it_draws_as_a_start(
    family: str, write: Any, tmp_path: Path
) -> None:
    """Outside of `sampling` the policy is unchanged, bit for bit."""
    path = write(adapted(family), tmp_path)
    policy, plain = make(family), drawn(make(family))
    policy.sample_with(str(path))
    wanted = drawn(make(family, {**LORA, "path": str(path)}))
    assert (sampled(policy) - wanted).abs().max() <= 1e-5
    assert (wanted - plain).abs().max() > 1e-3
    assert torch.equal(drawn(policy), plain)


@pytest.mark.parametrize("lora", [LORA, "full"], ids=["adapter", "all weights"])
def test_it_is_added_to_what_is_trained_and_to_its_reference(lora: Any, tmp_path: Path) -> None:
    path = str(as_diffusers(adapted(seed=3), tmp_path))
    policy = make("flux", lora, keep_reference=lora == "full")
    policy.sample_with(path)
    start = sampled(policy)
    randomise_lora(policy, seed=9, std=0.02)
    assert (sampled(policy) - start).abs().max() > 1e-3
    assert (drawn(policy) - sampled(policy)).abs().max() > 1e-3
    with policy.adapter.reference():
        assert (sampled(policy) - start).abs().max() <= 1e-5
        assert (drawn(policy) - start).abs().max() > 1e-3


def test_layers_have_ranks_and_scales_of_their_own(tmp_path: Path) -> None:
    """Published few-step adapters do so. They also adapt layers that the run would not."""
    path = as_kohya(adapted(), tmp_path)
    tensors = load_file(path)
    first, second, *_ = sorted(name for name in tensors if name.endswith(".alpha"))
    stem = second.removesuffix(".alpha")
    down, up = f"{stem}.lora_down.weight", f"{stem}.lora_up.weight"
    tensors[first] = tensors[first] / 2
    lower = tensors[down][:2].clone(), tensors[up][:, :2].clone()
    tensors[down], tensors[up] = lower
    tensors[second] = torch.tensor(2.0)
    save_file(tensors, path)
    policy = make("flux", {**LORA, "targets": "attention"})
    policy.sample_with(str(path))
    updates = {
        name: module.sampling_b @ module.sampling_a
        for name, module in policy.transformer.named_modules()
        if hasattr(module, "sampling_a")
    }
    layers = [name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")]
    assert len(updates) >= len(layers)
    found = torch.stack([update.norm() for update in updates.values()]).sort().values
    wanted = []
    for layer in layers:
        scale = float(tensors[f"{layer}.alpha"]) / len(tensors[f"{layer}.lora_down.weight"])
        rows = scale * tensors[f"{layer}.lora_up.weight"] @ tensors[f"{layer}.lora_down.weight"]
        wanted.append(rows.norm())
    assert torch.isclose(found.square().sum(), torch.stack(wanted).square().sum(), rtol=1e-5)


def test_nobody_trains_publishes_or_saves_it(tmp_path: Path) -> None:
    path = str(as_diffusers(adapted(), tmp_path))
    policy, plain = make("flux"), make("flux")
    policy.sample_with(path)
    assert policy.adapter.trained_parameters().keys() == plain.adapter.trained_parameters().keys()
    assert policy.transformer.state_dict().keys() == plain.transformer.state_dict().keys()
    assert not any("sampling" in name for name in policy.adapter.generating_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [LORA, "full"], ids=["adapter", "all weights"])
def test_a_rank_that_only_generates_draws_what_a_trainer_draws(
    lora: Any, dtype: str, tmp_path: Path
) -> None:
    path = str(as_diffusers(adapted(), tmp_path))
    trainer, rollout = make("flux", lora, dtype=dtype), make("flux", lora, dtype=dtype)
    rollout.adapter.only_generate()
    for policy in (trainer, rollout):
        policy.sample_with(path)
    assert torch.equal(sampled(trainer), sampled(rollout))
    assert not torch.equal(sampled(trainer), drawn(trainer))


def test_a_network_that_is_filled_later_draws_alike(tmp_path: Path) -> None:
    """Sharded trainers build the network so: the adapter is there before the weights."""
    path = str(as_diffusers(adapted(), tmp_path))
    whole, filled = make("flux"), make("flux", empty=True)
    whole.sample_with(path)
    filled.sample_with(path)
    filled.fill(torch.device("cpu"))
    assert torch.equal(sampled(whole), sampled(filled))


def test_a_quantized_base_takes_it(tmp_path: Path) -> None:
    path = str(as_diffusers(adapted(), tmp_path))
    policy = make("flux", quantize="int8")
    policy.sample_with(path)
    assert (sampled(policy) - drawn(policy)).abs().max() > 1e-3


def test_another_networks_file_is_refused_with_its_layers(tmp_path: Path) -> None:
    path = as_diffusers(adapted(), tmp_path)
    tensors = load_file(path)
    tensors["transformer.elsewhere.to_q.lora_A.weight"] = torch.zeros(4, 8)
    tensors["transformer.elsewhere.to_q.lora_B.weight"] = torch.zeros(8, 4)
    save_file(tensors, tmp_path / "other.safetensors")
    policy = make("flux")
    with pytest.raises(LoraFileError, match=r"sampling\.lora = .*=null.*unknown.*elsewhere"):
        policy.sample_with(str(tmp_path / "other.safetensors"))
    assert policy.sampling_digest is None
    with pytest.raises(LoraFileError, match=r"sampling\.lora = .*no such file"):
        policy.sample_with(str(tmp_path / "absent.safetensors"))


def test_a_checkpoint_of_another_adapter_is_refused(tmp_path: Path) -> None:
    """The digest is of layers and numbers, whatever tool wrote the file."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    one, again, other = (make("flux") for _ in range(3))
    one.sample_with(str(as_diffusers(adapted(), tmp_path / "one")))
    again.sample_with(str(as_kohya(adapted(), tmp_path / "one")))
    other.sample_with(str(as_diffusers(adapted(seed=2), tmp_path / "other")))
    assert one.sampling_digest != other.sampling_digest
    saved: dict[str, Any] = {}
    nft(one).on_save_checkpoint(saved)
    nft(one).on_load_checkpoint(saved)
    with pytest.raises(ValueError, match=r"sampling\.lora: the checkpoint was made with"):
        nft(other).on_load_checkpoint(saved)
