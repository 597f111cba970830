"""Latent geometry and adapters, each by a small calculation of its own."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from digenrl.models.latents import pack_latents, require_multiple, token_positions, unpack_latents
from digenrl.models.lora import LoraSpec, inject_lora, lora_modules, wide_dtype
from tests.models.tiny_policies import make


def test_a_token_is_a_patch_of_two_by_two_channel_by_channel() -> None:
    latents = torch.arange(5 * 3 * 4 * 6.0).view(5, 3, 4, 6)
    tokens = pack_latents(latents)
    assert tokens.shape == (5, 6, 12)
    for row in range(2):
        for column in range(3):
            patch = latents[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(tokens[:, 3 * row + column], patch.flatten(1))
    assert torch.equal(unpack_latents(tokens, 4, 6), latents)


def test_positions_count_rows_and_columns() -> None:
    wanted = [[0, row, column] for row in range(2) for column in range(3)]
    assert token_positions(2, 3).tolist() == wanted
    assert token_positions(1, 1).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("value", "stride", "offset", "said"),
    [
        (16, 8, 0, None),
        (8, 8, 0, None),
        (17, 4, 1, None),
        (1, 4, 1, None),
        (20, 8, 0, "is not a multiple of 8; nearest valid: 16 or 24"),
        (3, 8, 0, "is not a multiple of 8; nearest valid: 8"),
        (0, 8, 0, "is not a multiple of 8; nearest valid: 8"),
        (-16, 8, 0, "is not a multiple of 8; nearest valid: 8"),
        (16, 4, 1, "is not 1 + a multiple of 4; nearest valid: 13 or 17"),
        (-3, 4, 1, "is not 1 + a multiple of 4; nearest valid: 1"),
    ],
)
def test_a_size_is_a_multiple_or_the_nearest_are_named(
    value: int, stride: int, offset: int, said: str | None
) -> None:
    if said is None:
        require_multiple("height", value, stride, offset)
        return
    with pytest.raises(ValueError, match=r"sampling\.height") as error:
        require_multiple("height", value, stride, offset)
    assert str(error.value) == f"sampling.height={value} {said}"


def test_a_description_of_an_adapter_is_read_whole() -> None:
    given: dict[str, Any] = {"rank": "4", "alpha": 8, "targets": "to_q"}
    assert LoraSpec.from_config(given) == LoraSpec(4, 8.0, ("to_q",), None, 0)
    assert LoraSpec.from_config(given) == LoraSpec(4, 8.0, ("to_q",))
    more = {"targets": ["a", "b"], "expected": "3", "seed": 5}
    assert LoraSpec.from_config(given | more) == LoraSpec(4, 8.0, ("a", "b"), 3, 5)
    assert LoraSpec.from_config(given | {"seed": None, "expected": None}).seed == 0
    with pytest.raises(ValueError, match=r"unknown key lora\.rnk; .*did you mean lora\.rank"):
        LoraSpec.from_config(given | {"rnk": 1})
    with pytest.raises(ValueError, match=r"needs alpha, rank; set model\.lora\.alpha"):
        LoraSpec.from_config({"targets": "a"})
    for rank, alpha in ((0, 1.0), (1, 0.0), (1, -1.0)):
        with pytest.raises(ValueError, match="must be >= 1"):
            LoraSpec(rank, alpha, ("a",))
    assert LoraSpec(1, 0.5, ("a",)).rank == 1


class Layers(nn.Module):
    """Linear layers by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"to_q": nn.Linear(4, 4), "to_k": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
            )
            for _ in range(2)
        )
        self.to_q_out = nn.Linear(4, 4)


def test_layers_are_found_by_aligned_endings_in_their_own_order() -> None:
    layers = Layers()
    assert lora_modules(layers, ["to_k", "to_q"]) == [
        "blocks.0.to_q", "blocks.0.to_k", "blocks.1.to_q", "blocks.1.to_k",
    ]  # fmt: skip
    assert lora_modules(layers, [r"1\.to_.", "to_q_out"]) == [
        "blocks.1.to_q", "blocks.1.to_k", "to_q_out",
    ]  # fmt: skip
    with pytest.raises(
        ValueError, match="matches no linear layer of Layers; nearest: to_k"
    ) as error:
        lora_modules(layers, ["to_q", "to_kk"])
    assert str(error.value).endswith("Layers end in: to_k, to_q, to_q_out")


def test_an_adapter_begins_as_it_is_drawn_and_adds_its_scaled_product() -> None:
    policy = make("sd3", lora={"rank": 2, "alpha": 6.0, "targets": "attention", "seed": 7})
    network: Any = policy.transformer
    names = policy.adapter.lora_layers
    layers = [network.get_submodule(name) for name in names]
    state = torch.get_rng_state()
    for name, layer in zip(names, layers, strict=True):
        key = hashlib.blake2b(f"7\x1fstr:lora_A\x1fstr:{name}".encode(), digest_size=16).digest()
        draw = np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))
        a = draw.standard_normal((2, layer.in_features), np.float32) / np.float32(2)
        assert torch.equal(layer.lora_A["default"].weight, torch.from_numpy(a))
        assert not layer.lora_B["default"].weight.any()
    assert torch.equal(torch.get_rng_state(), state), "nobody else's numbers are drawn"
    layer, rows = layers[0], torch.randn(2, 5, layers[0].in_features)
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
        low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        base = layer.base_layer(rows)
        torch.testing.assert_close(layer(rows), base + 3.0 * rows @ low.t() @ high.t())
        with policy.adapter.reference():
            assert policy.adapter.in_reference
            assert torch.equal(layer(rows), base)
        assert not policy.adapter.in_reference
    trained = policy.adapter.trained_parameters()
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert len(trained) == 2 * len(names)


def test_an_adapter_of_another_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"would adapt 4 layers .* expected 5.*expected=4"):
        inject_lora(Layers(), LoraSpec(2, 2.0, ("to_q", "to_k"), expected=5))


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_weights_are_trained_in_32_bit_or_more(dtype: torch.dtype, held: torch.dtype) -> None:
    assert wide_dtype(dtype) == held
